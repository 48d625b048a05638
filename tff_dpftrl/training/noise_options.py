"""Kinds of noise of a run with clients, each with its own options.

`kind_of_run` chooses the kind by flat options. What a kind excludes is no field of its class.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.accounting import defaults
from tff_dpftrl.mechanisms import defaults as mechanism_defaults
from tff_dpftrl.mechanisms import table
from tff_dpftrl.training import composed, learning_options
from tff_dpftrl.training.composed import option

if TYPE_CHECKING:
    from tff_dpftrl.runs import privacy

Algorithm = Literal["dp-ftrl", "dp-fedavg", "dp-fedsgd"]
Mechanism = Literal[(*table.runnable(), "none")]
Sampling = Literal["cyclic", "bins"]
Estimator = Literal["fixed-denominator", "clipped-denominator"]


@dataclasses.dataclass(frozen=True)
class Noise(composed.Options, abc.ABC):
    """Options that every kind has; without noise there is no clipping either."""

    algorithm: Algorithm = option(
        "dp-ftrl",
        "Algorithm. dp-ftrl: federated averaging with correlated noise, without a sampling "
        "assumption. dp-fedavg and dp-fedsgd: independent noise, amplified by secret Poisson "
        "sampling of users.",
        "privacy",
    )
    delta: float = option(defaults.DELTA, "δ of the (ε, δ) statement.", "privacy")
    clip_norm: float = option(
        0.5, "L2 norm that a client's update is clipped to (the first one if adaptive).", "privacy"
    )

    def __post_init__(self):
        super().__post_init__()
        validation.clip_norm("clip_norm", self.clip_norm)
        validation.delta(self.delta)

    @abc.abstractmethod
    def request(self, learning: learning_options.LearningOptions, **common: Any) -> privacy.Privacy:
        """Returns what the run asks of privacy; the plan for a population is made of it."""

    def check(self, learning: learning_options.LearningOptions) -> None:
        """Refuses what does not go with the number of rounds, or with optimizers."""

    def starts(self, num_rounds: int) -> tuple[int, ...]:
        """Returns the first rounds of the blocks between restarts of the noise, the first one 0."""
        del num_rounds
        return (0,)

    def server_restarts(self, num_rounds: int) -> tuple[int, ...]:
        """Returns the rounds in which the state of the server's optimizer restarts."""
        del num_rounds
        return ()

    @property
    def statement_parameters(self) -> dict[str, int]:
        """Parameters of the privacy statement that the plan does not say."""
        return {}

    def _common(self, learning: learning_options.LearningOptions) -> dict[str, Any]:
        return {
            "num_rounds": learning.num_rounds,
            "clients_per_round": learning.clients_per_round,
            "clip_norm": self.clip_norm,
            "delta": self.delta,
        }


@dataclasses.dataclass(frozen=True)
class Noised(Noise):
    """Options of how much noise there is."""

    noise_multiplier: float | None = option(
        None, "Standard deviation of the noise draws per unit of clip norm.", "privacy", 0.0
    )
    target_epsilon: float | None = option(
        None, "Largest ε that the whole run may spend, in place of a noise multiplier.", "privacy"
    )
    max_epsilon: float | None = option(
        None,
        "Largest ε: the run stops before the round that would bring the ε spent above this. "
        "Default: no limit.",
        "run",
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_epsilon", "target_epsilon"):
            if getattr(self, name) is not None:
                validation.positive(name, getattr(self, name))
        if self.noise_multiplier is not None:
            validation.number("noise_multiplier", self.noise_multiplier, at_most=1e18)
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            given = "neither" if self.target_epsilon is None else "both"
            raise validation.UsageError(
                f"{self.chosen_by} needs either noise_multiplier or target_epsilon, got {given}."
            )
        if self.max_epsilon is not None and self.noise_multiplier == 0.0:
            raise validation.UsageError(
                "max_epsilon cannot be kept without noise: raise noise_multiplier."
            )

    @override
    def _common(self, learning: learning_options.LearningOptions) -> dict[str, Any]:
        amount = {
            "noise_multiplier": self.noise_multiplier,
            "target_epsilon": self.target_epsilon,
        }
        return super()._common(learning) | amount


@dataclasses.dataclass(frozen=True)
class _Named(Noise):
    """The mechanism by name, and the stride of the participation."""

    mechanism: Mechanism = option(
        "blt",
        f"Noise: {', '.join(table.runnable())} (see `tff-dpftrl plan --help`), or none (no "
        "clipping, no noise, no privacy). For dp-ftrl, or with a sampling.",
        "privacy",
    )
    min_sep: int | None = option(
        None,
        "Smallest difference between the indices of two rounds of one client: a stride, not the "
        "gap in between. Default: the largest that the population allows.",
        "privacy",
        1,
    )


@dataclasses.dataclass(frozen=True)
class Scheduled(_Named):
    """A participation schema without secrets."""

    max_participations: int | None = option(
        None,
        "Largest number of rounds of one client. Default: as many as min_sep allows, or, without "
        "min_sep, as few as equal shares of the rounds need.",
        "privacy",
        1,
    )


@dataclasses.dataclass(frozen=True)
class Correlated(_Named, Noised):
    """Options of correlated noise."""

    strategy: str | None = option(
        None,
        "Strategy in place of a mechanism that is optimised for the run: a file that `tff-dpftrl "
        "plan --output` wrote, or an entry of the zoo of production models, like "
        "blt-gboard-b400.",
        "privacy",
    )
    error: Literal["max", "rms"] | None = option(
        None,
        "Noise that an optimised mechanism minimises, over the prefix sums: the largest (max) or "
        "the root mean square (rms). Default: max for blt and rms for the others.",
        "privacy",
    )
    workload: Literal["prefix", "auto"] = option(
        "prefix",
        "Sums whose noise an optimised mechanism minimises. prefix: prefix sums of the updates. "
        "auto: the sums from which server_optimizer, its schedule and iterate_averaging make "
        "models. For adam, auto takes its momentum and schedule, and takes its preconditioner as "
        "constant.",
        "privacy",
    )
    buffers: int | None = option(
        None, "Number of buffers of the BLT mechanism. Default: chosen automatically.", "privacy", 1
    )
    max_decay: float | None = option(
        None,
        "Largest buffer decay of the BLT mechanism; 1 for no bound. Default: 1 - 1 / rounds.",
        "privacy",
        0.0,
    )
    bands: int | None = option(
        None,
        "Number of bands of bandmf, bandtoep and bandfhu, or of the inverse for bisr, bifr and "
        f"bandinv. Default: min_sep, or {mechanism_defaults.INVERSE_BANDS} for the inverse. For "
        "bandtoep with a sampling and a target_epsilon, but without min_sep, the number with the "
        "least noise. Memory of bandmf, bandtoep and bandfhu: bands - 1 copies of the model.",
        "privacy",
        1,
    )
    correlation: float | None = option(
        None, "Share λ of the mechanism lambda-cgd. Default: tuned.", "privacy", 0.0
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_decay is not None:
            validation.probability("max_decay", self.max_decay)

    @override
    def check(self, learning: learning_options.LearningOptions) -> None:
        options = self._mechanism_options(learning)
        if self.strategy is not None and options.given():
            raise validation.UsageError(
                f"{options.given()[0]} has no meaning with a strategy file: leave it out."
            )
        table.check(self.mechanism, options)

    def _mechanism_options(self, learning: learning_options.LearningOptions) -> table.Options:
        """Returns the options of the mechanism, with the sums that optimizers make models of."""
        workload = None
        if self.workload == "auto":
            rule = learning.update_rule(self.server_restarts(learning.num_rounds))
            workload = rule.workload(learning.num_rounds)
        return table.Options(
            error=self.error,
            buffers=self.buffers,
            max_decay=self.max_decay,
            bands=self.bands,
            correlation=self.correlation,
            workload=workload,
        )

    def _correlated(self, learning: learning_options.LearningOptions) -> dict[str, Any]:
        return {
            **self._common(learning),
            "mechanism": self.mechanism,
            "options": self._mechanism_options(learning),
            "strategy_file": self.strategy,
            "min_sep": self.min_sep,
        }


@dataclasses.dataclass(frozen=True)
class DpFtrl(Scheduled, Correlated):
    """Correlated noise without a sampling assumption."""

    chosen_by = "algorithm 'dp-ftrl'"

    secagg_bits: int | None = option(
        None,
        "Number of bits a parameter of the integers that clients encode their updates as, which "
        "secure aggregation sums. The noise is scaled up for what rounding may add. Default: no "
        "encoding.",
        "privacy",
        1,
    )
    adaptive_clipping: bool = option(
        False,
        "Estimate the clip norm privately while training, from clip_norm on. The noise restarts "
        "whenever the estimate is taken over.",
        "privacy",
    )

    @override
    def request(self, learning, **common):
        # This imports dp_accounting, which `--help` does not need.
        from tff_dpftrl.runs import dp_ftrl_privacy

        return dp_ftrl_privacy.DpFtrlPrivacy(
            starts=self.starts(learning.num_rounds),
            max_participations=self.max_participations,
            adaptive_clipping=self.adaptive_clipping,
            secagg_bits=self.secagg_bits,
            **self._correlated(learning),
            **common,
        )


@dataclasses.dataclass(frozen=True)
class AdaptiveDpFtrl(DpFtrl):
    """The same with a clip norm that is learned; the noise restarts when it changes."""

    chosen_by = "adaptive_clipping"

    target_unclipped_quantile: float = option(
        0.5, "Adaptive clipping: share of users to leave unclipped.", "privacy", 0.0
    )
    clip_learning_rate: float = option(
        0.2, "Adaptive clipping: step of the estimate's logarithm.", "privacy", 0.0
    )
    clipped_count_stddev: float | None = option(
        None,
        "Adaptive clipping: standard deviation of the noise on a round's number of unclipped "
        "users. In a simulation it is that of its own cohorts. Default: clients_per_round / 20.",
        "privacy",
        0.0,
    )
    restart_warmup: int = option(
        128, "Adaptive clipping: round of the first restart.", "privacy", 1
    )
    restart_every: int = option(
        1024, "Adaptive clipping: rounds between later restarts.", "privacy", 1
    )
    restart_optimizer: bool = option(
        False,
        "Adaptive clipping: restart the server's optimizer with the noise, with zero momentum.",
        "privacy",
    )

    def __post_init__(self):
        super().__post_init__()
        validation.number("clip_learning_rate", self.clip_learning_rate, at_most=1e38)
        validation.number("target_unclipped_quantile", self.target_unclipped_quantile, at_most=1)

    @override
    def starts(self, num_rounds: int) -> tuple[int, ...]:
        from tff_dpftrl.mechanisms import restarts

        return restarts.starts(num_rounds, every=self.restart_every, first=self.restart_warmup)

    @override
    def server_restarts(self, num_rounds: int) -> tuple[int, ...]:
        return self.starts(num_rounds)[1:] if self.restart_optimizer else ()

    @property
    @override
    def statement_parameters(self) -> dict[str, int]:
        return {"restart_warmup": self.restart_warmup, "restart_every": self.restart_every}


@dataclasses.dataclass(frozen=True)
class Amplified(Correlated):
    """Correlated noise, and users who are sampled in secret."""

    chosen_by = "sampling 'cyclic' or 'bins'"

    sampling: Sampling | None = option(
        None,
        "Secret sampling of users beside correlated noise, for data that one party holds whole. "
        "cyclic: groups take turns, and a round is a Poisson sample of the group; needs a banded "
        "mechanism. bins: each user is in every round of a bin. min_sep is the number of groups. "
        "For dp-ftrl and dp-fedavg.",
        "privacy",
    )

    @override
    def request(self, learning, **common):
        from tff_dpftrl.runs import amplified_privacy

        return amplified_privacy.AmplifiedPrivacy(
            sampling=self.sampling or "", **self._correlated(learning), **common
        )


@dataclasses.dataclass(frozen=True)
class Sampled(Noised):
    """Independent noise, and users who are sampled in secret."""

    chosen_by = "algorithm 'dp-fedavg' or 'dp-fedsgd'"

    estimator: Estimator = option(
        "fixed-denominator",
        "dp-fedavg and dp-fedsgd: denominator of a cohort's sum. fixed-denominator: the expected "
        "number of clients. clipped-denominator: the number of clients that came, but not less "
        "than the expected one; it takes twice the noise.",
        "privacy",
    )
    per_layer_clipping: bool = option(
        False,
        "dp-fedavg and dp-fedsgd: clip each of the m tensors of an update by itself, to clip_norm "
        "/ √m, instead of all of them together.",
        "privacy",
    )
    clip_norm_schedule: str | None = option(
        None,
        "dp-fedavg and dp-fedsgd: later clip norms, each behind the number of rounds after which "
        "it begins, like 2000:7.9,4000:5. The noise changes with the clip norm, so that noise "
        "multiplier and ε stay the same (McMahan et al. 2018, section 3).",
        "privacy",
    )

    @override
    def check(self, learning: learning_options.LearningOptions) -> None:
        self._later_clip_norms(learning.num_rounds)  # It refuses what is no schedule.

    @override
    def request(self, learning, **common):
        from tff_dpftrl.runs import sampled_privacy

        return sampled_privacy.SampledPrivacy(
            algorithm=self.algorithm,
            estimator=self.estimator,
            per_layer_clipping=self.per_layer_clipping,
            later_clip_norms=self._later_clip_norms(learning.num_rounds),
            **self._common(learning),
            **common,
        )

    def _later_clip_norms(self, num_rounds: int) -> tuple[tuple[int, float], ...]:
        """Returns the clip norms of `clip_norm_schedule`, each behind the rounds before it."""
        if self.clip_norm_schedule is None:
            return ()
        name, text = "clip_norm_schedule", self.clip_norm_schedule
        try:
            pairs = [entry.split(":") for entry in text.split(",")]
            later = tuple((int(after), float(norm)) for after, norm in pairs)
        except ValueError:
            raise validation.UsageError(
                f"{name} must be rounds and clip norms like 2000:7.9,4000:5, got {text!r}."
            ) from None
        starts = [0, *(after for after, _ in later), num_rounds]
        if any(one >= other for one, other in itertools.pairwise(starts)):
            raise validation.UsageError(
                f"{name} must have growing numbers of rounds between 0 and "
                f"num_rounds={num_rounds}, got {text!r}."
            )
        for _, norm in later:
            validation.clip_norm(name, norm)
        return later


@dataclasses.dataclass(frozen=True)
class NoNoise(Scheduled):
    """No clipping, no noise, no privacy."""

    chosen_by = "mechanism 'none'"

    @override
    def request(self, learning, **common):
        from tff_dpftrl.runs import dp_ftrl_privacy

        return dp_ftrl_privacy.DpFtrlPrivacy(
            mechanism=None,
            min_sep=self.min_sep,
            max_participations=self.max_participations,
            **self._common(learning),
            **common,
        )


KINDS = (DpFtrl, AdaptiveDpFtrl, Amplified, Sampled, NoNoise)
"""All kinds of noise of a training run."""


def kind_of_run(options: Mapping[str, Any]) -> type[Noise]:
    """Returns the kind of noise that flat options choose."""
    algorithm, sampling = options.get("algorithm", "dp-ftrl"), options.get("sampling")
    if algorithm == "dp-fedsgd" or (algorithm == "dp-fedavg" and sampling is None):
        return Sampled
    if options.get("mechanism") == "none":
        return NoNoise
    if sampling is not None:
        return Amplified
    return AdaptiveDpFtrl if options.get("adaptive_clipping", False) is True else DpFtrl


class RoundRules(NamedTuple):
    """Options that a round needs besides its plan."""

    learning: learning_options.LearningOptions
    noise: Noise
    secure_noise: bool = False

    @property
    def server_restarts(self) -> tuple[int, ...]:
        """Rounds in which the state of the server's optimizer restarts."""
        return self.noise.server_restarts(self.learning.num_rounds)
