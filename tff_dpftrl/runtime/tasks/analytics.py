"""Tasks without a model: histograms and counts over the devices' data, with the same privacy.

Buckets are fixed before the task begins. A device adds up the counts of its examples, clips them
to the clip norm, and reports them like an update. The estimates are the noised sums of all rounds
(`bucket_estimates`). Needs TFF.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tff_dpftrl import validation
from tff_dpftrl.data import vocabulary
from tff_dpftrl.learning import bucket_counts
from tff_dpftrl.runs import progress as progress_lib
from tff_dpftrl.runtime.plans import example_pipeline, text_pipeline
from tff_dpftrl.runtime.tasks import definition, language_task, task_config

_BATCH_SIZE = 100  # Examples that are counted at once.
_LONGEST = 128  # Words of a text from which on lengths are not told apart.


def define(
    *,
    buckets: Mapping[str, Sequence[str]],
    features: Mapping[str, Any],
    count: Callable[[Mapping[str, Any]], Mapping[str, tf.Tensor]],
    proxies: Sequence[Sequence[Mapping[str, Any]]],
    max_examples: int,
    data: str,
    description: str = "counts of the engineer's own",
    to_rows: Callable[[Mapping[str, Any]], Mapping[str, tf.Tensor]] | None = None,
) -> definition.TaskDefinition:
    """Defines a task that counts, for a `build` of `tff-dpftrl task new --build`.

    Args:
      buckets: For each histogram, by its name, the names of its buckets. They must be public.
      features: Features of an example that a device stores, as in `ExamplePipeline`.
      count: Function from the features of some examples, each of shape [n, ...], to the sum of
        their counts: for each histogram one number for each bucket, not negative, and not NaN.
      proxies: For each simulated device its examples, by feature name, public or synthetic.
      max_examples: Largest number of examples of a device that are counted in a round, random
        ones.
      data: Name of the devices' data in statements.
      description: What is counted, in a few words.
      to_rows: Function from the features of all examples to those of rows, which are counted in
        their place, as in `ExamplePipeline`; None if an example is a row.

    Returns:
      The definition of the task.

    Raises:
      UsageError: If there is no bucket, two have one name, or `count` returns anything else.
    """
    sizes = {name: len(_checked(name, names)) for name, names in buckets.items()}
    if not sizes:
        raise validation.UsageError("buckets must name at least one histogram, got none.")

    def to_batch(rows: Mapping[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
        counted = count(rows)
        num_rows = tf.shape(next(iter(rows.values())), out_type=tf.int64)[0]
        return _joined(counted, sizes)[None], num_rows[None]

    pipeline = example_pipeline.ExamplePipeline(
        features,
        to_batch,
        batch_size=_BATCH_SIZE,
        shuffle=True,
        to_rows=to_rows,
        max_rows=validation.integer("max_examples", max_examples, minimum=1),
    )
    return definition.TaskDefinition(
        model=bucket_counts.build_model(sum(sizes.values())),
        pipeline=pipeline,
        proxies=proxies,
        largest_metrics={bucket_counts.NUM_EXAMPLES: float(max_examples)},
        data=data,
        description=description,
        loss_metric="",
        buckets={name: tuple(names) for name, names in buckets.items()},
    )


def _checked(name: str, names: Sequence[str]) -> Sequence[str]:
    """Refuses buckets that could not be told apart."""
    if isinstance(names, str) or not names or not all(isinstance(n, str) and n for n in names):
        raise validation.UsageError(
            f"buckets[{name!r}] must be a list of names, at least one, got {names!r}."
        )
    bucket, times = collections.Counter(names).most_common(1)[0]
    if times > 1:
        raise validation.UsageError(f"buckets[{name!r}] has the bucket {bucket!r} {times} times.")
    return names


def _joined(counted: Any, sizes: Mapping[str, int]) -> tf.Tensor:
    """Joins the histograms that a function counted to one vector, float32."""
    if not isinstance(counted, Mapping) or set(counted) != set(sizes):
        got = sorted(counted) if isinstance(counted, Mapping) else type(counted).__name__
        raise validation.UsageError(
            f"count must return a mapping with the histograms {sorted(sizes)}, got {got}."
        )
    parts = []
    for name, size in sizes.items():
        part = tf.cast(counted[name], tf.float32)
        if part.shape.as_list() != [size]:
            raise validation.UsageError(
                f"count returns {name!r} of shape {part.shape}, and it has {size} buckets: return "
                f"the sum over the examples, of shape ({size},)."
            )
        parts.append(part)
    return tf.concat(parts, axis=0)


def define_words(
    options: task_config.WordCounts, max_examples: int, progress: progress_lib.Progress
) -> definition.TaskDefinition:
    """Defines the counts of `--analytics words`: words of a public vocabulary, lengths of texts.

    The histogram "words" has a bucket for each word of the vocabulary, and one for all others;
    "lengths" counts texts by their number of words.
    """
    public, words = language_task.read_public(options, max_examples, progress)
    ids_of = text_pipeline.ids_of_texts(words, is_tokenized=options.pretokenized)
    lengths = [0, *(2**power for power in range(_LONGEST.bit_length()))]
    feature, texts = options.text_feature, "texts"

    def to_rows(features: Mapping[str, Any]) -> Mapping[str, tf.Tensor]:
        return {texts: features[feature].values}

    def count(rows: Mapping[str, Any]) -> Mapping[str, tf.Tensor]:
        ids = ids_of(rows[texts])
        num_words = tf.cast(ids.row_lengths(), tf.int32)
        place = tf.searchsorted(tf.constant(lengths), num_words + 1) - 1  # Edges up to it.
        return {
            # Words have the ids 1, 2, ..., and all others the next one.
            vocabulary.COUNTED_WORDS: _counts(ids.values - 1, len(words.words) + 1),
            "lengths": _counts(place, len(lengths)),
        }

    made = define(
        buckets={
            vocabulary.COUNTED_WORDS: [*words.words, vocabulary.OTHER_WORDS],
            "lengths": _length_names(lengths),
        },
        features={feature: example_pipeline.Values(tf.string)},
        count=count,
        proxies=public,
        max_examples=max_examples,
        data=pathlib.PurePath(options.data).name,
        description=f"counts of {len(words.words)} words, and of lengths of texts",
        to_rows=to_rows,
    )
    language = definition.Language(words, words.rule(options.pretokenized), None)
    return dataclasses.replace(made, language=language)


def _counts(places: tf.Tensor, size: int) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(tf.ones_like(places, tf.float32), places, size)


def _length_names(edges: Sequence[int]) -> list[str]:
    """Names the buckets of lengths: "0", "1", "2-3", ..., "128 or more"."""
    pairs = zip(edges, edges[1:], strict=False)
    names = [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in pairs]
    return [*names, f"{edges[-1]} or more"]
