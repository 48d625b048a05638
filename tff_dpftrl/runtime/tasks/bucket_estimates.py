"""Estimates of a task that counts, with their standard errors. Needs no TensorFlow."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from tff_dpftrl import durable_files
from tff_dpftrl.data import vocabulary
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.mechanisms import workload
from tff_dpftrl.runtime.tasks import terms as terms_lib

NAME = vocabulary.COUNTS
"""Name of the file of the estimates."""

_SHOWN = 3  # Buckets of a histogram in a summary.


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated count of a bucket, over all reports of all released rounds."""

    histogram: str
    bucket: str
    estimate: float  # Estimated count. Noise can make it negative.
    standard_error: float | None  # Standard deviation of its noise; None if it was not computed.
    share: float | None  # Estimate over the sum of its histogram; None if that is not positive.


def noise_stddev(terms: terms_lib.Terms, skipped: Sequence[bool]) -> float | None:
    """Computes the standard deviation of the noise in each count over all released rounds.

    The noise of a round that was `skipped` was released nowhere. With secure sums the inflation of
    the clip norm is included, and not the rounding of updates, which is far below it. None where
    rounds were skipped in a task of more than 4,096 rounds.
    """
    strategy = terms.strategy
    if strategy is None or all(skipped):
        return 0.0
    num_rounds = len(skipped)
    if not any(skipped):
        variance = float(strategy.prefix_noise_variance(num_rounds)[-1])
    elif num_rounds > workload.MAX_ROUNDS:
        return None
    else:
        released = ~np.asarray(skipped)
        variance = float(np.sum(np.square(released @ strategy.noise_matrix(num_rounds))))
    inflation = float(terms.parameters.get("secagg_norm_inflation") or 1.0)
    if terms.secure_aggregation is not None and terms.secure_aggregation.noise_parties:
        variance *= len(terms.secure_aggregation.noise_parties)  # Each adds the noise of all.
    return terms.noise_multiplier * terms.clip_norm * inflation * math.sqrt(variance)


def _estimates(
    buckets: Mapping[str, Sequence[str]],
    terms: terms_lib.Terms,
    weights: np.ndarray,
    skipped: Sequence[bool],
) -> list[Estimate]:
    """Computes the estimates of all buckets, in their order."""
    sums = weights.astype(np.float64) * float(terms.parameters["clients_per_round"] or 0)
    error, found, begin = noise_stddev(terms, skipped), [], 0
    for histogram, names in buckets.items():
        part = sums[begin : begin + len(names)]
        begin += len(names)
        total = float(part.sum())
        for name, value in zip(names, part.tolist(), strict=True):
            share = value / total if total > 0 else None
            found.append(Estimate(histogram, name, value, error, share))
    return found


def write(
    output: pathlib.Path,
    buckets: Mapping[str, Sequence[str]],
    terms: terms_lib.Terms,
    weights: np.ndarray,
    skipped: Sequence[bool],
) -> list[str]:
    """Writes `counts.csv`, the counts with their noise; returns a line for each histogram.

    `weights` are the released ones: sums divided by the goal of a round's reports.
    """
    found = _estimates(buckets, terms, weights, skipped)
    text = io.StringIO()
    writer = csv.DictWriter(
        text, [field.name for field in dataclasses.fields(Estimate)], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(map(dataclasses.asdict, found))
    durable_files.write(output / NAME, text.getvalue().encode("utf-8"))
    return [_line(name, [one for one in found if one.histogram == name]) for name in buckets]


def _line(name: str, found: Sequence[Estimate]) -> str:
    largest = sorted(found, key=lambda one: -one.estimate)[:_SHOWN]
    shown = ", ".join(f"{one.bucket!r} {_short(one)}" for one in largest)
    return f"{name}, {strategy_lib.counted(len(found), 'bucket')}: {shown}; see {NAME}."


def _short(one: Estimate) -> str:
    error = "" if one.standard_error is None else f" ± {one.standard_error:.3g}"
    return f"{one.estimate:.6g}{error}"
