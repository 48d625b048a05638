"""Descriptions of samplings in secret: which rounds a client is in, and with what probability.

A description is what accounting, statement and a run's folder share; its `sampler` draws the
cohorts. In all of them a client's rounds are drawn independently of all data. Sources:
Choquette-Choo et al. 2023 (arXiv 2306.08153), section 4, for cyclic Poisson sampling; 2024
(arXiv 2410.06266), section 2, for balls in bins; Dong et al. 2026 (arXiv 2602.09338) for
b-min-sep.
"""

from __future__ import annotations

import abc
import dataclasses
import decimal
import types
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import Self, override

from tff_dpftrl import validation
from tff_dpftrl.participation import cohorts, secret_cohorts
from tff_dpftrl.participation import schema as schema_lib


@dataclasses.dataclass(frozen=True)
class Sampling(abc.ABC):
    """One way to sample the clients of each round, in secret.

    Attributes:
      num_rounds: Number of rounds n.
    """

    kind: ClassVar[str]

    num_rounds: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "sampling_probability":
                value = validation.probability(field.name, value)
            else:
                value = validation.integer(field.name, value, minimum=1)
            object.__setattr__(self, field.name, value)

    @property
    @abc.abstractmethod
    def share_per_round(self) -> float:
        """Expected share of all clients in a round, the same in each."""

    @property
    @abc.abstractmethod
    def schema(self) -> schema_lib.MinSep:
        """Participation schema that every client is certain to respect."""

    @abc.abstractmethod
    def sampler(self, num_clients: int, seed: int) -> cohorts.CohortSampler:
        """Makes the sampler of the cohorts.

        Args:
          num_clients: Number of clients in the population.
          seed: Non-negative integer, secret, of at least 128 random bits.

        Returns:
          The sampler.

        Raises:
          ValueError: If an argument is out of range.
        """

    @abc.abstractmethod
    def sentence(self, unit: str = "client", step: str = "round") -> str:
        """Says who is in which round, for statements.

        Args:
          unit: Word for a client, like "user".
          step: Word for a round, like "step".

        Returns:
          A sentence.
        """

    def to_dict(self) -> dict[str, Any]:
        """Returns the description for JSON."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(description: Mapping[str, Any]) -> Sampling:
        """Builds the sampling that `to_dict` described.

        Raises:
          ValueError: If there is no such sampling.
        """
        fields = dict(description)
        kind = fields.pop("kind", None)
        if kind not in KINDS:
            raise validation.UsageError(
                f"kind={kind!r} is no sampling: it must be one of {', '.join(KINDS)}."
            )
        try:
            return KINDS[kind](**fields)
        except TypeError as error:
            raise validation.UsageError(f"A sampling of kind {kind!r}: {error}.") from error


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """Groups take turns; at its group's turn, a client is in the round with a probability.

    Poisson sampling is the case of one group.

    Attributes:
      num_rounds: Number of rounds n.
      num_groups: Number of groups, which is the least stride of a client.
      sampling_probability: Probability q of a client at its group's turn.
    """

    kind = "cyclic"

    num_groups: int
    sampling_probability: float

    @classmethod
    def for_cohorts(
        cls, num_rounds: int, num_groups: int, *, num_clients: int, clients_per_round: float
    ) -> Self:
        """Builds the sampling of which a number of clients is expected in each round.

        Raises:
          ValueError: If an argument is out of range, like a cohort that is larger than a group.
        """
        validation.integer("num_groups", num_groups, minimum=1)
        probability = _share(num_clients, clients_per_round) * num_groups
        if probability > 1.0:
            most = int(num_clients / clients_per_round)
            raise validation.UsageError(
                f"num_groups={num_groups} groups of {num_clients} clients are smaller than the "
                f"{clients_per_round:g} clients of a round: at most {most} groups work, or "
                f"{num_clients // num_groups} clients a round."
            )
        return cls(num_rounds, num_groups, probability)

    @property
    @override
    def share_per_round(self) -> float:
        return self.sampling_probability / self.num_groups

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        return schema_lib.MinSep.as_many_as_fit(self.num_rounds, self.num_groups)

    @override
    def sampler(self, num_clients: int, seed: int) -> secret_cohorts.CyclicPoissonSampler:
        return secret_cohorts.CyclicPoissonSampler(
            num_clients=num_clients,
            num_groups=self.num_groups,
            sampling_probability=self.sampling_probability,
            num_rounds=self.num_rounds,
            seed=seed,
        )

    @override
    def sentence(
        self, unit: str = "client", step: str = "round", sampled: str | None = None
    ) -> str:
        """Says who is in which round; `sampled` are what is sampled of a client, one by one."""
        chance = (
            f"with probability {_rounded_up(self.sampling_probability)}, independently of all else"
        )
        whose = f"{unit}" if sampled is None else f"{sampled} of a {unit}"
        if self.num_groups == 1:
            return f"Every {whose} is in a {step} {chance}."
        return (
            f"Every {unit} was put into one of {self.num_groups} groups, once, at random, "
            f"independently of all data; the groups take turns, and every {whose} of the group "
            f"whose turn it is is in the {step} {chance}."
        )


@dataclasses.dataclass(frozen=True)
class BallsInBins(Sampling):
    """Each client draws one of the bins, once, and is in every round of its bin.

    Attributes:
      num_rounds: Number of rounds n.
      num_bins: Number of bins b, which take turns.
    """

    kind = "bins"

    num_bins: int

    @property
    @override
    def share_per_round(self) -> float:
        return 1.0 / self.num_bins

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        return schema_lib.MinSep.as_many_as_fit(self.num_rounds, self.num_bins)

    @override
    def sampler(self, num_clients: int, seed: int) -> secret_cohorts.CyclicPoissonSampler:
        return CyclicPoisson(self.num_rounds, self.num_bins, 1.0).sampler(num_clients, seed)

    @override
    def sentence(self, unit: str = "client", step: str = "round") -> str:
        return (
            f"Every {unit} was put into one of {self.num_bins} bins, once, at random, "
            f"independently of all data; the bins take turns, and a {unit} is in every {step} of "
            "its bin."
        )


@dataclasses.dataclass(frozen=True)
class MinSepPoisson(Sampling):
    """Poisson sampling that leaves out who came in the last rounds (b-min-sep sampling).

    It starts in its stationary distribution, so that each round expects the same share.

    Attributes:
      num_rounds: Number of rounds n.
      min_sep: Least stride b of a client.
      sampling_probability: Probability q of a client that was in none of the last b − 1 rounds.
    """

    kind = "b-min-sep"

    min_sep: int
    sampling_probability: float

    @classmethod
    def for_cohorts(
        cls, num_rounds: int, min_sep: int, *, num_clients: int, clients_per_round: float
    ) -> Self:
        """Builds the sampling of which a number of clients is expected in each round.

        Raises:
          ValueError: If an argument is out of range, like a stride that leaves too few clients.
        """
        validation.integer("min_sep", min_sep, minimum=1)
        share = _share(num_clients, clients_per_round)
        if share * min_sep > 1.0:
            most = int(num_clients / clients_per_round)
            raise validation.UsageError(
                f"min_sep={min_sep} empties the pool: {min_sep} rounds of {clients_per_round:g} "
                f"clients need more than {num_clients} clients; a min_sep of at most {most} works, "
                f"or {num_clients // min_sep} clients a round."
            )
        return cls(num_rounds, min_sep, min(1.0, share / (1.0 - (min_sep - 1) * share)))

    @property
    @override
    def share_per_round(self) -> float:
        return secret_cohorts.stationary_share(self.min_sep, self.sampling_probability)

    @property
    @override
    def schema(self) -> schema_lib.MinSep:
        return schema_lib.MinSep.as_many_as_fit(self.num_rounds, self.min_sep)

    @override
    def sampler(self, num_clients: int, seed: int) -> secret_cohorts.MinSepPoissonSampler:
        return secret_cohorts.MinSepPoissonSampler(
            num_clients=num_clients,
            min_sep=self.min_sep,
            sampling_probability=self.sampling_probability,
            num_rounds=self.num_rounds,
            seed=seed,
        )

    @override
    def sentence(self, unit: str = "client", step: str = "round") -> str:
        return (
            f"Every {unit} that was in none of the last {self.min_sep - 1} {step}s is in a {step} "
            f"with probability {_rounded_up(self.sampling_probability)}, independently of all "
            f"else; the first {step}s are as if infinitely many had gone before."
        )


KINDS: Mapping[str, type[Sampling]] = types.MappingProxyType(
    {one.kind: one for one in (CyclicPoisson, BallsInBins, MinSepPoisson)}
)
"""Classes of samplings, by the names that commands and folders call them by."""


def _share(num_clients: int, clients_per_round: float) -> float:
    """Returns the share of the clients that a round expects."""
    validation.integer("num_clients", num_clients, minimum=1)
    validation.positive("clients_per_round", clients_per_round)
    if clients_per_round > num_clients:
        raise validation.UsageError(
            f"clients_per_round={clients_per_round:g} exceeds num_clients={num_clients}: lower it."
        )
    return clients_per_round / num_clients


def _rounded_up(probability: float) -> str:
    """Formats a probability as statements do their parameters: six digits, rounded up."""
    context = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(probability))):.6g}"
