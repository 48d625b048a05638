"""Figures of the users that a run releases with noise, within its budget.

Each round, the sums of a few metrics get independent Gaussian noise. A unit of privacy counts for
an L2 norm of at most 1 in them: each sum is divided by a public bound, and the vector of a unit is
clipped as a whole. Means are quotients of noised sums, which cost nothing more.

Each release draws its noise with fresh bits of the operating system, by SHAKE-256. A round's
figures are committed with its state, and an evaluation's are written to `private/metrics.csv`,
before anybody sees them. From then on they are read, and never drawn again.

Evaluations on protected held-out users are released likewise: each adds up the bounded sums of
users who never train, with noise of their own. The whole run then costs the larger ε of two. Which
users are held out is decided by each one's id alone, as is checked. So two neighbouring data sets,
with and without the data of one user, differ in a training user or in a held-out one, and

* if it trains, the evaluations are computed from what else is released, and from texts that are the
  same in both: post-processing, at no cost;
* if it is held out, all else is drawn alike given what was released before. The k evaluations are
  Gaussian mechanisms, chosen adaptively, in each of which the sums differ by an L2 norm of at most
  1: together they have μ = √k / z (Dong, Roth & Su 2022, corollary 2).

A user's sequences in an evaluation are drawn by its id alone, and whether it is measured follows
from its id and from the number of training users, which is public.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import budget_shares, display, gaussian, parts
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.runs import mechanism_plan, metrics_log, privacy

_DOMAIN = b"tff_dpftrl released metrics 1"
_DOMAIN_OF_EVALUATION = b"tff_dpftrl released evaluation 1"
_SAFETY = 1e-12  # Relative excess of noise for rounding.
_SEED_BYTES = 32
# A mean is reported if its denominator exceeds three standard deviations of its noise.
_LEAST_SIGNAL = 3.0
# Released values are rounded to this part of the noise, so that their last bits tell nothing.
_GRID = 2.0**-12
_LAST_SHARE = 0.25
_NORM = 1.0 - 1e-9  # What float64 rounds is far less.


@dataclasses.dataclass(frozen=True)
class Mean:
    """Mean of a metric: one of the sums over another one.

    Attributes:
      column: Column of `metrics.csv`; that of its standard error ends in "_se".
      meaning: Meaning of the column, in a few words.
    """

    column: str
    meaning: str
    numerator: str
    denominator: str


@dataclasses.dataclass(frozen=True)
class Figures:
    """Sums of a round that are released, and the means that are made of them.

    Attributes:
      bounds: What a unit's sums are divided by before it is clipped to an L2 norm of 1, by their
        names. They must not depend on protected data.
      means: The means.
      of: Whose sums they are, a phrase.
      prefix: Beginning of the names of the sums' columns.
    """

    bounds: Mapping[str, float]
    means: tuple[Mean, ...]
    of: str = "the round's cohort"
    prefix: str = "noised_sum_"

    @property
    def columns(self) -> tuple[metrics_log.Column, ...]:
        """The columns of `metrics.csv`."""
        found = []
        for mean in self.means:
            found += [
                metrics_log.Column(mean.column, f"{mean.meaning}; empty where noise outweighs it"),
                metrics_log.Column(
                    f"{mean.column}_se", f"standard error of `{mean.column}` by the noise"
                ),
            ]
        for name, bound in self.bounds.items():
            meaning = f"sum of {name} of {self.of} with noise, in units of {bound:.6g}"
            found.append(metrics_log.Column(self.prefix + name, meaning))
        return tuple(found)

    def bounded_sums(self, values: np.ndarray) -> np.ndarray:
        """Adds up the sums of units, as `learning.metric_sums.bounded` does on devices.

        `values` are in the order of `bounds`, shape [units, n]; the result is float64, shape [n],
        in units of the bounds. A unit counts for a vector with an L2 norm of at most 1, and for
        nothing if one of its values is not finite.
        """
        scaled = np.asarray(values, np.float64) / np.array(list(self.bounds.values()))
        scaled = scaled[np.isfinite(scaled).all(axis=1)]
        norms = np.linalg.norm(scaled, axis=1, keepdims=True)
        return (scaled * (_NORM / np.maximum(norms, _NORM))).sum(axis=0)

    def values(self, sums: np.ndarray, stddev: float) -> dict[str, float | None]:
        """Computes means and their standard errors, by column, from noised sums.

        The sums are in the order of `bounds`, each in units of its bound. `stddev` is that of their
        noise. A value is None where noise outweighs it.
        """
        by_name = dict(zip(self.bounds, map(float, sums), strict=True))
        values: dict[str, float | None] = {}
        for mean in self.means:
            over, under = by_name[mean.numerator], by_name[mean.denominator]
            values[mean.column] = values[f"{mean.column}_se"] = None
            if under > _LEAST_SIGNAL * stddev:
                unit = self.bounds[mean.numerator] / self.bounds[mean.denominator]
                ratio = over / under
                values[mean.column] = unit * ratio
                # To first order in the noise of both sums.
                values[f"{mean.column}_se"] = unit * stddev / under * math.hypot(1.0, ratio)
        return values

    def over_last_rounds(
        self, rows: Sequence[Mapping[str, Any]], stddev: float
    ) -> tuple[dict[str, float | None], int]:
        """Computes the means of the sums of the last quarter of some rounds; counts these rounds.

        `rows` are those of `metrics.csv`, and `stddev` is of the noise of a round's sums. The means
        are as in `values`, none if there are no noised sums.
        """
        names = [self.prefix + name for name in self.bounds]
        known = [row for row in rows if all(row.get(name) is not None for name in names)]
        last = known[-max(1, math.ceil(_LAST_SHARE * len(known))) :]
        if not last:
            return {}, 0
        sums = np.sum([[row[name] for name in names] for row in last], axis=0)
        return self.values(sums, stddev * math.sqrt(len(last))), len(last)

    def of_last_rounds(
        self, rows: Sequence[Mapping[str, Any]], stddev: float, unit: str = "round"
    ) -> str | None:
        """Returns `over_last_rounds` in a sentence; None without sums, or with noise alone."""
        values, num_rounds = self.over_last_rounds(rows, stddev)
        shown = [
            f"{mean.column.removeprefix('noised_')} {values[mean.column]:.4g} ± "
            f"{values[f'{mean.column}_se']:.2g}"
            for mean in self.means
            if values.get(mean.column) is not None
        ]
        if not shown:
            return None
        return (
            f"Training cohorts of the last {num_rounds} {unit}s, by the noised sums: "
            f"{', '.join(shown)} (± one standard error)."
        )


def planned(
    asked: privacy.Privacy,
    num_clients: int,
    num_parameters: int,
    *,
    target_epsilon: float | None,
    share: float | None,
    what: str,
    evaluations: int = 0,
) -> mechanism_plan.MechanismPlan:
    """Chooses mechanism and noise for a new run that may release figures of its cohorts.

    The budget of the figures is a `target_epsilon` of the figures alone, or a share of the whole,
    whatever else has a share; None for no figures. `what` says in a few words what is released.
    `evaluations` on held-out users are released, too; they may cost these users as much as the
    figures.
    """
    if target_epsilon is None and share is None:
        return asked.plan(num_clients, num_parameters)
    alone = dataclasses.replace(asked, others=()).plan(num_clients, num_parameters)
    others = (*asked.others, part(alone, target_epsilon, share, what))
    if evaluations:
        whole = target_epsilon or asked.target_epsilon
        assert whole is not None
        mu = gaussian.mu(whole, asked.delta)
        others += (_evaluation(mu * math.sqrt(share or 1.0), evaluations),)
    return dataclasses.replace(asked, others=others).plan(num_clients, num_parameters)


def part(
    plan: mechanism_plan.MechanismPlan, target_epsilon: float | None, share: float | None, what: str
) -> parts.Part:
    """Makes the part of a budget that pays for the figures of all rounds.

    Its noise is independent in each round. `plan` is the run's privacy without the figures.
    `target_epsilon` is the largest ε of the figures of all rounds if nothing else were released;
    None for a share of the budget. Rounds that allow no figures of their cohorts, or have no noise,
    are refused.
    """
    if not plan.has_noise:
        raise validation.UsageError(
            "Metrics cannot be released within the budget of a run without noise: take a mechanism "
            "and a noise_multiplier or target_epsilon, or leave metrics_epsilon out."
        )
    rounds = plan.rounds
    if share is not None:
        noise = budget_shares.noise_of_round(rounds, share)
    else:
        assert target_epsilon is not None
        noise = budget_shares.noise_of_round_for_epsilon(rounds, target_epsilon, plan.delta)
    return parts.Part(
        parts.METRICS,
        sentences.FIGURES_OF_ROUNDS.format(what=what, noise=display.round_down(noise, 6)),
        noise_multiplier_of_round=noise,
    )


def _evaluation(mu: float, evaluations: int) -> parts.Part:
    """Makes the part of the evaluations on held-out users, of a μ in all."""
    noise = math.sqrt(evaluations) / mu * (1.0 + _SAFETY)
    return parts.Part(
        parts.EVALUATION,
        sentences.FIGURES_OF_HELD_OUT.format(
            evaluations=evaluations, noise=display.round_down(noise, 6)
        ),
        rho_zcdp=evaluations / noise * (0.5 / noise),
    )


def noise_of(plan: mechanism_plan.MechanismPlan) -> float | None:
    """Returns the standard deviation of the noise of a round's sums; None if none are released."""
    return next(
        (one.noise_multiplier_of_round for one in plan.others if one.name == parts.METRICS), None
    )


def noise_of_evaluation(plan: mechanism_plan.MechanismPlan, evaluations: int) -> float | None:
    """Returns the standard deviation of the noise of an evaluation; None if none are released."""
    rho = math.fsum(one.rho_zcdp for one in plan.others if one.name == parts.EVALUATION)
    return math.sqrt(evaluations * 0.5 / rho) if rho else None


class Release:
    """Adds the noise to the sums of each round."""

    def __init__(
        self, figures: Figures, stddev: float, seed: int | None, *, of_evaluation: bool = False
    ):
        """Keeps its arguments.

        `stddev` is that of the noise. `seed`, in [0, 2^256), is of the noise of a run that is not
        private. If it is None, each release draws its own. Figures of held-out users
        (`of_evaluation`) have noise of their own.
        """
        self._figures = figures
        self._stddev = stddev
        self._seed = seed
        self._domain = _DOMAIN_OF_EVALUATION if of_evaluation else _DOMAIN

    def of_round(self, round_index: int, sums: np.ndarray) -> dict[str, float | None]:
        """Releases a round's sums, in units of bounds. Commit the result before it is shown."""
        size = len(self._figures.bounds)
        seed = secrets.randbits(8 * _SEED_BYTES) if self._seed is None else self._seed
        drawn = gaussians(seed, round_index, size, domain=self._domain)
        step = self._stddev * _GRID
        noised = step * np.round((np.asarray(sums, np.float64) + self._stddev * drawn) / step)
        columns = [self._figures.prefix + name for name in self._figures.bounds]
        released = dict(zip(columns, map(float, noised), strict=True))
        return {**self._figures.values(noised, self._stddev), **released}


def gaussians(seed: int, round_index: int, size: int, *, domain: bytes = _DOMAIN) -> np.ndarray:
    """Draws independent standard Gaussians of a round, float64, shape [size].

    It is Box and Muller's transform of words of 64 bits of SHAKE-256 of the seed, in [0, 2^256),
    and the round. `domain` names what the noise is for.
    """
    content = domain + seed.to_bytes(_SEED_BYTES, "little") + round_index.to_bytes(8, "little")
    pairs = (size + 1) // 2
    words = np.frombuffer(hashlib.shake_256(content).digest(16 * pairs), "<u8").reshape([2, pairs])
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-64
    radius = np.sqrt(-2.0 * np.log(np.minimum(uniform[0], 1.0)))
    angle = 2.0 * math.pi * uniform[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
