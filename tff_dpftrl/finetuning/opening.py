"""Opens a fine-tuning run: checks and reads everything that does not need TensorFlow.

TensorFlow takes seconds to import. What is wrong with options or files is found here, before that,
for the command and for `finetuning.run.finetune` alike.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.data import sources, split, user_text
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.runs import manifest
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.training import corpus, language_config, options, trained_model, warm_start


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedRun:
    """Fine-tuning run that can go on as far as could be checked without TensorFlow.

    `known` is the manifest of a run that has begun; None for a new run, which has the files of the
    model that it begins with (`initial`), and what its statement says of them.
    """

    output: pathlib.Path
    config: config_lib.FinetuningConfig
    known: manifest.Manifest | None
    text: split.UserSplit
    initial: trained_model.TrainedFiles | None = None
    source: str = ""
    weights_are_public: bool = False

    @property
    def parts(self) -> tuple[user_text.UserText, ...]:
        """All users of the text."""
        return self.text.train, self.text.validation, self.text.test


def open_run(
    config: config_lib.FinetuningConfig | None,
    output: pathlib.Path,
    *,
    text: split.UserSplit | None = None,
    rows: Any = None,
    progress: progress_lib.Progress = progress_lib.to_stderr,
) -> OpenedRun:
    """Opens a run; nothing is written but the texts of a large table, to its folder `private`.

    `config` is None to go on with the run in `output`. Text is read from the files that the config
    names, unless `text` has it or `rows` is a table in memory (`sources.of_rows`).
    """
    known, initial, source = None, None, ("", False)
    config = corpus.named(config, text, rows)
    if config is None:
        known = manifest.read(output)
        config = config_of(known, output)
    else:
        manifest.check_is_free(output)
        config = config.with_absolute_paths()
        initial = warm_start.find(config.initial_folder)
        source = warm_start.source(config.initial_folder, config.trained_on)
    corpus.require_packages(vars(config))
    if text is None:
        if known is not None and rows is None:
            corpus.check_on_disk(config.data, resume_command(output, config.data))
        progress("Reading the data ...")
        text = corpus.read_users(
            config.text,
            rows=rows,
            cache=output / manifest.TEXTS_CACHE,
            notice=progress,
            rows_per_owner=config.rows_per_owner,
        )
    elif config.rows_per_owner is not None:
        raise validation.UsageError(
            "rows_per_owner selects rows of a table by their lists of users, which text has not: "
            "give the table as rows, or leave rows_per_owner out."
        )
    elif known is None:
        corpus.check_named(config.data, text.train)
    opened = OpenedRun(output, config, known, text, initial, *source)
    if known is None:
        reading = config.table
        corpus.check_planned(config, output, text.train, text.validation)
        warm_start.refuse_protected(config.initial_folder, config.data, reading, opened.parts)
    return opened


def config_of(known: manifest.Manifest, output: pathlib.Path) -> config_lib.FinetuningConfig:
    """Returns the options of the fine-tuning run in a folder; refuses another kind of run."""
    known.check_kind(manifest.FINETUNING, output)
    return options.config_from_mapping(
        language_config.begun(known.config),
        str(output / "config.json"),
        config_lib.FinetuningConfig,
    )


def resume_command(output: pathlib.Path, data: str) -> str:
    """Returns the command, or the call in Python for text in memory, that resumes a run."""
    if sources.is_in_memory(data):
        return f"finetuning.run.finetune(None, {str(output)!r}, text=... or rows=...)"
    return f"tff-dpftrl finetune --resume --output {shlex.quote(str(output))}"
