"""The task of a language model of this package, as one more definition of a task. Needs TFF."""

from __future__ import annotations

import pathlib

from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, sources, tables, vocabulary
from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import metric_grid, metrics, table
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runtime.plans import text_pipeline
from tff_dpftrl.runtime.tasks import definition, task_config
from tff_dpftrl.training import corpus, startup, warm_start

_LARGEST_LOSS = 100.0  # Largest mean loss of a device's targets, in nats.


def read_public(
    config: task_config.TaskConfig, progress: progress_lib.Progress
) -> tuple[list[list[dict[str, str]]], vocabulary.Vocabulary]:
    """Reads the public text of a task."""
    public = read_proxies(config)
    words = corpus.public_vocabulary(config)
    progress(f"Vocabulary: {len(words.words)} {words.unit} ({words.source}).")
    texts = (example[config.text_feature] for examples in public for example in examples)
    for line in startup.describe_script(texts, words):
        progress(line)
    return public, words


def read_proxies(config: task_config.TaskConfig) -> list[list[dict[str, str]]]:
    """Reads public text as the examples of a few devices, each with the text of one user.

    Each has the newest ones, the newest first, as devices give them.
    """
    source = config.proxy_data
    if source == "standard-library":
        text = docstrings.read_standard_library()
    elif sources.share_texts(source, config.data, config.part(tables.TableOptions)):
        raise validation.UsageError(
            f"proxy_data {source!r} is the data that is protected, a copy of it, or "
            "has texts of its users: name public text."
        )
    else:
        text = sources.load_user_text(source, pretokenized=config.pretokenized)
    every = max(1, len(text) // config.proxy_devices)
    return [
        [{config.text_feature: one} for one in text.examples(user)[: -config.max_examples - 1 : -1]]
        for user in text.user_ids[::every][: config.proxy_devices]
    ]


def define(
    config: task_config.TaskConfig, progress: progress_lib.Progress, *, with_cache: bool = False
) -> definition.TaskDefinition:
    """Reads and checks what the options name."""
    reading = config.part(tables.TableOptions)
    public, words = read_public(config, progress)
    model = table.build(
        config.model,
        vocabulary_size=words.size,
        sequence_length=config.sequence_length,
        **config.model_sizes,
    )
    initial = None
    if config.initial_weights is not None:
        folder = pathlib.Path(config.initial_weights)
        initial = warm_start.read(
            folder, model, words, config.seed, protected=config.data, table=reading
        )
        progress(f"Initial weights: {initial.source}.")
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    weights = None if initial is None else initial.weights
    pipeline = text_pipeline.text_pipeline(
        words,
        config.sequence_length,
        feature=config.text_feature,
        is_tokenized=config.pretokenized,
        with_history=with_cache,
        batch_size=config.batch_size,
        epochs=config.client_epochs,
        shuffle=config.shuffle,
        max_rows=config.max_sequences_per_client,
    )
    num_rows = config.max_sequences_per_client * config.client_epochs
    num_targets = num_rows * config.sequence_length
    counts = {
        name: float(num_targets) * (_LARGEST_LOSS if zero.dtype.is_floating else 1)
        for name, zero in (metrics.zero_counts() | functional_model.zero_cached()).items()
    }
    return definition.TaskDefinition(
        model=functional_model.build(model, special, config.seed, weights, with_cache=with_cache),
        pipeline=pipeline,
        proxies=public,
        largest_metrics=counts | {"num_sequences": float(num_rows)},
        grids={
            "loss": metric_grid.MetricGrid.logarithmic(2.0**-6, _LARGEST_LOSS, per_octave=16),
            "top1_in_vocab": metric_grid.MetricGrid.linear(0.0, 1.0, 50),
            "num_sequences": metric_grid.MetricGrid.logarithmic(1.0, 2.0 * num_rows),
        },
        data=pathlib.PurePath(config.data).name,
        description=f"{config.model} of {len(words.words)} words, in sequences of "
        f"{config.sequence_length}",
        language=definition.Language(words, words.rule(config.pretokenized), initial),
    )
