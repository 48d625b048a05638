"""Opens a training run: checks and reads everything that does not need TensorFlow.

TensorFlow takes seconds to import. What is wrong with options, files or population is found here,
before that, for the command and for `training.run.train` alike.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.data import vocabulary, vocabulary_file
from tff_dpftrl.runs import manifest
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus, custom_models, options, warm_start
from tff_dpftrl.training import placement as placement_lib

IN_THIS_PROCESS = placement_lib.Placement()


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedRun:
    """A run that can be trained as far as could be checked without TensorFlow.

    Attributes:
      known: Manifest of a run that has begun; None for a new run.
      model: Custom model; None if the config names one.
      model_trained_on: Public text that the caller's model was trained on; None if unknown.
      placement: Where the clients work.
    """

    output: pathlib.Path
    config: config_lib.TrainingConfig
    known: manifest.Manifest | None
    text: corpus.RunText
    model: custom_models.Model | None
    model_trained_on: str | os.PathLike[str] | None
    placement: placement_lib.Placement


def open_run(
    config: config_lib.TrainingConfig | None,
    output: pathlib.Path,
    *,
    text: corpus.RunText | None = None,
    rows: Any = None,
    model: custom_models.Model | None = None,
    model_trained_on: str | os.PathLike[str] | None = None,
    progress: progress_lib.Progress = progress_lib.to_stderr,
    placement: placement_lib.Placement = IN_THIS_PROCESS,
) -> OpenedRun:
    """Opens a run; nothing is written but the texts of a large table, to its folder `private`.

    The arguments are those of `training.run.train`.
    """
    known = None
    config = corpus.named(config, text, rows)
    if config is None:
        known = manifest.read(output)
        config = options.of_manifest(known, output)
        if known.config.get("engine") == "tff":
            raise validation.UsageError(
                f"The run in {output} was begun with engine 'tff', TFF's executor, which this "
                "version of tff-dpftrl does not have: finish it with the version that began it, or "
                "start a new run."
            )
        custom_models.check_resumed(config.language.model, model, model_trained_on, output)
    else:
        manifest.check_is_free(output)
        name = custom_models.name_of(config.language.model, model, model_trained_on)
        config = config.changed(model=name).with_absolute_paths().with_defaults()
        initial = config.language.initial_weights
        if initial is not None:
            if warm_start.find(initial).checkpoint is not None:
                raise validation.UsageError(
                    f"initial_weights {initial} is a checkpoint in Hugging Face's "
                    "layout, which tff-dpftrl finetune takes: fine-tune it."
                )
    placement.check()
    corpus.require_packages(config.to_dict())
    if text is None:
        if known is not None and rows is None:
            data = config.language.data
            go_on = custom_models.resume_command(config.language.model, output, data)
            corpus.check_on_disk(data, go_on)
        progress("Reading the data ...")
        text_options = config.part(corpus.TextOptions)
        if known is not None:
            text_options = _with_own_words(text_options, output)
        text = corpus.read(
            text_options,
            rows=rows,
            cache=output / manifest.TEXTS_CACHE,
            notice=progress,
        )
    elif known is None:
        corpus.check_named(config.language.data, text.train)
        if config.is_counted:
            raise validation.UsageError(
                "vocabulary 'dp' has no meaning with text in memory, which has its own words: give "
                "rows, or leave it out."
            )
    if known is None:  # A run that has begun does not need the strategy's file any more.
        corpus.check_planned(config, output, text.train, text.held_out)
        config.request().check(len(text.train))
    return OpenedRun(output, config, known, text, model, model_trained_on, placement)


def _with_own_words(options: corpus.TextOptions, output: pathlib.Path) -> corpus.TextOptions:
    """Returns the options of a run that has begun, with its copy of the words.

    The copy has the rule that splits texts into words, too, which this version may have changed.
    `check_identities` checks the words.
    """
    own = output / vocabulary_file.NAME
    is_noised = options.vocabulary == vocabulary.DP
    kept = output / manifest.PRIVATE / vocabulary_file.NAME
    if is_noised and kept.exists():  # Older runs have the public file only.
        own = kept
    if is_noised and not own.exists():
        raise validation.UsageError(
            f"{kept} is missing: it has the words that the run counted with noise, and a second "
            "count would be a second release. Restore it, or start a new run."
        )
    if not own.exists():  # Such a run crashed before its first round.
        return options
    return dataclasses.replace(options, vocabulary=str(own), vocabulary_size=None)
