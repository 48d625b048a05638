"""Rules by which the ledger refuses a round, with their messages."""

from __future__ import annotations

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.participation import schema as schema_lib


class LedgerRefusal(validation.UsageError):
    """Refusal of the ledger to begin or commit a round."""


class SchemaRefusal(LedgerRefusal):
    """Refusal of a round that would break the declared participation schema."""


class BudgetRefusal(LedgerRefusal):
    """Refusal of a round that would exceed the budget."""


class ReplayRefusal(LedgerRefusal):
    """Refusal to repeat a round with another cohort, or to go on from a noise state twice."""


class ForkRefusal(LedgerRefusal):
    """Refusal of a training state that is not the one last committed."""


def check_position(
    round_index: int,
    checkpoint: str,
    *,
    next_round: int,
    last_checkpoint: str,
    checkpoint_round: int | None,
) -> None:
    """Refuses to continue from any state but the one last committed, or with another round.

    `checkpoint` is the fingerprint of the state that the round would continue from.
    `checkpoint_round` is the round that continues from it; None if the ledger does not know it.
    """
    if checkpoint != last_checkpoint:
        if checkpoint_round is None:
            raise ForkRefusal(
                "The training state is a fork: this ledger never committed a checkpoint "
                f"{checkpoint}. Restore the checkpoint {last_checkpoint}, or use the ledger "
                "that belongs to this state."
            )
        raise ForkRefusal(
            f"The training state is rolled back: it is the one before round {checkpoint_round}, "
            f"but the ledger has committed rounds up to {next_round - 1}. Going on from here "
            "would release rounds a second time, which costs more than this ledger counts. Restore "
            f"the checkpoint {last_checkpoint}."
        )
    if round_index != next_round:
        raise ForkRefusal(
            f"Round {round_index} cannot begin: the next round of this ledger is {next_round}."
        )


def check_replay(round_index: int, before: str, now: str) -> None:
    """Refuses to repeat a round, begun and not committed, with a cohort of another hash."""
    if before != now:
        raise ReplayRefusal(
            f"Round {round_index} was begun before, and would be repeated with another cohort than "
            "the one that counts as having taken part. Repeat it with the same cohort, or commit "
            "it with no contribution."
        )


def check_noise_state(round_index: int, earlier_round: int | None) -> None:
    """Refuses a noise state that another round has gone on from."""
    if earlier_round is not None:
        raise ReplayRefusal(
            f"Round {round_index} would go on from the noise state of round {earlier_round}, and "
            "its noise would not be correlated as claimed: continue from the noise state of the "
            "last checkpoint."
        )


def check_schema(
    round_index: int,
    declared: schema_lib.MinSep,
    participations: np.ndarray,
    strides: np.ndarray,
) -> None:
    """Refuses a round that would break the declared schema.

    `participations` has the number of earlier rounds of each client of the cohort, and `strides`
    the rounds since its last one, for each client that has an earlier one.
    """
    breaches = declared.breaches(
        num_rounds=round_index + 1,
        min_sep=min(strides.tolist(), default=None),
        max_participations=1 + max(participations.tolist(), default=-1),
    )
    if not breaches:
        return
    too_many_rounds = any(breach.limit == "num_rounds" for breach in breaches)
    raise SchemaRefusal(
        f"Round {round_index} may not begin: {' and '.join(map(str, breaches))}. "
        + (
            "Stop here, or start a new run that declares more rounds."
            if too_many_rounds
            else "Choose a cohort whose clients the declared schema allows."
        )
    )
