"""The task of a language model of this package, as one more definition of a task. Needs TFF."""

from __future__ import annotations

import pathlib

from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, sources, vocabulary
from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import metric_grid, metrics, table
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runtime.plans import text_pipeline
from tff_dpftrl.runtime.tasks import definition, task_config
from tff_dpftrl.training import corpus, startup, warm_start

_LARGEST_LOSS = 100.0  # Largest mean loss of a device's targets, in nats.


def read_public(
    options: task_config.OnPublicText, max_examples: int, progress: progress_lib.Progress
) -> tuple[list[list[dict[str, str]]], vocabulary.Vocabulary]:
    """Reads the public text of a task."""
    public = read_proxies(options, max_examples)
    words = corpus.public_vocabulary(options.with_defaults())
    progress(f"Vocabulary: {len(words.words)} {words.unit} ({words.source}).")
    texts = (example[options.text_feature] for examples in public for example in examples)
    for line in startup.describe_script(texts, words):
        progress(line)
    return public, words


def read_proxies(
    options: task_config.OnPublicText, max_examples: int
) -> list[list[dict[str, str]]]:
    """Reads public text as the examples of a few devices, each with the text of one user.

    Each has the newest ones, the newest first, as devices give them.
    """
    source = options.proxy_data
    if source == "standard-library":
        text = docstrings.read_standard_library()
    elif sources.share_texts(source, options.data, options.table):
        raise validation.UsageError(
            f"proxy_data {source!r} is the data that is protected, a copy of it, or "
            "has texts of its users: name public text."
        )
    else:
        text = sources.load_user_text(source, pretokenized=options.pretokenized)
    every = max(1, len(text) // options.proxy_devices)
    return [
        [{options.text_feature: one} for one in text.examples(user)[: -max_examples - 1 : -1]]
        for user in text.user_ids[::every][: options.proxy_devices]
    ]


def define(
    options: task_config.LanguageTask,
    max_examples: int,
    seed: int,
    progress: progress_lib.Progress,
    *,
    with_cache: bool = False,
) -> definition.TaskDefinition:
    """Reads and checks what the options name; a device has at most `max_examples` texts."""
    reading = options.table
    public, words = read_public(options, max_examples, progress)
    model = table.build(
        options.model,
        vocabulary_size=words.size,
        sequence_length=options.sequence_length,
        **options.model_sizes,
    )
    initial = None
    if options.initial_weights is not None:
        folder = pathlib.Path(options.initial_weights)
        initial = warm_start.read(folder, model, words, seed, protected=options.data, table=reading)
        progress(f"Initial weights: {initial.source}.")
    special = metrics.SpecialIds(oov=words.oov, bos=words.bos, eos=words.eos)
    weights = None if initial is None else initial.weights
    pipeline = text_pipeline.text_pipeline(
        words,
        options.sequence_length,
        feature=options.text_feature,
        is_tokenized=options.pretokenized,
        with_history=with_cache,
        batch_size=options.batch_size,
        epochs=options.client_epochs,
        shuffle=options.shuffle,
        max_rows=options.max_sequences_per_client,
    )
    num_rows = options.max_sequences_per_client * options.client_epochs
    num_targets = num_rows * options.sequence_length
    counts = {
        name: float(num_targets) * (_LARGEST_LOSS if zero.dtype.is_floating else 1)
        for name, zero in (metrics.zero_counts() | functional_model.zero_cached()).items()
    }
    return definition.TaskDefinition(
        model=functional_model.build(model, special, seed, weights, with_cache=with_cache),
        pipeline=pipeline,
        proxies=public,
        largest_metrics=counts | {"num_sequences": float(num_rows)},
        grids={
            "loss": metric_grid.MetricGrid.logarithmic(2.0**-6, _LARGEST_LOSS, per_octave=16),
            "top1_in_vocab": metric_grid.MetricGrid.linear(0.0, 1.0, 50),
            "num_sequences": metric_grid.MetricGrid.logarithmic(1.0, 2.0 * num_rows),
        },
        data=pathlib.PurePath(options.data).name,
        description=f"{options.model} of {len(words.words)} words, in sequences of "
        f"{options.sequence_length}",
        language=definition.Language(words, words.rule(options.pretokenized), initial),
    )
