"""The lease of a population, the commits of its tasks, and the laws that every store keeps.

- A population is led by the holder of its lease. Each new holder gets an epoch of its own,
  larger than all before it. A lease ends by release, or by itself at a time of the
  caller's clock; only then does another one get it.
- Clocks of machines differ and processes are stopped: a former holder may still believe that
  it leads. So every commit names the epoch it was made under, and only the latest epoch
  of the population can commit.
- A task is one row: the rounds done, the model and the aggregator's state after them, and the
  metrics of the last one. A commit replaces the row if the round is the next one. It is one
  transaction: seen whole, or not at all.

The aggregator's state holds the seed of the noise: whoever reads a store can subtract it. A
store is therefore as secret as the memory of the server, and inside of what "released"
means: a result is released by what is sent after its commit, not by the commit.
(Bonawitz et al. 2019, section 4, calls the leases the shared locking service.)
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from tff_dpftrl import validation

# What a row of `Store.history` holds besides the metrics.
HISTORY_COLUMNS = ("task", "round", "epoch", "committed_at")


class StoreRefusal(validation.UsageError):
    """The store does not do what was asked, by one of its laws."""


class LeaseHeld(StoreRefusal):
    """Somebody else leads the population.

    Attributes:
      lease: The lease that is held.
    """

    def __init__(self, lease: Lease, now: float):
        """Says who leads, and for how long still by the clock of `now`."""
        super().__init__(
            f"The population {lease.population!r} is led by {lease.owner!r} for at least "
            f"{lease.expires_at - now:.0f} more seconds: two servers for one population are not "
            "possible. Stop that one, or wait until its lease ends."
        )
        self.lease = lease


class LeaseLost(StoreRefusal):
    """The lease has ended, or somebody else has it."""

    def __init__(self, population: str, owner: str, epoch: int):
        """Says whose lease is gone."""
        super().__init__(
            f"{owner!r} has lost the lease of the population {population!r} (epoch {epoch}): it "
            "must stop leading, and may ask for a new one."
        )


class StaleEpoch(StoreRefusal):
    """A commit was made under an epoch that is not the latest."""

    def __init__(self, population: str, epoch: int, latest: int):
        """Says which epoch came too late."""
        super().__init__(
            f"Epoch {epoch} cannot commit to the population {population!r}, whose epoch is "
            f"{latest}: drop the result, it must not be released."
        )


class RoundConflict(StoreRefusal):
    """A commit is not for the next round of its task."""

    def __init__(self, task: str, round_index: int, rounds_done: int):
        """Says which round would be the next one."""
        super().__init__(
            f"Round {round_index} of the task {task!r} cannot be committed: {rounds_done} rounds "
            "are done. Drop the result, it must not be released, and read the last commit."
        )


class UnknownTask(StoreRefusal):
    """There is no such task."""

    def __init__(self, population: str, task: str):
        """Names the task."""
        super().__init__(f"The population {population!r} has no task {task!r}: add it first.")


class TaskExists(StoreRefusal):
    """A task of that name is there already."""

    def __init__(self, population: str, task: str):
        """Names the task."""
        super().__init__(
            f"The population {population!r} has a task {task!r} already: go on from its last "
            "commit, or choose another name."
        )


class StoreError(OSError):
    """The store cannot be opened, read or written."""


class StoreDamaged(StoreError):
    """The store holds something else than was written to it."""

    def __init__(self, name: str, what: str, rounds: Mapping[str, int]):
        """Says what is damaged, and which backup can replace the store.

        Args:
          name: Place of the store.
          what: What is damaged, a clause.
          rounds: Number of committed rounds by task, as far as they can be read.
        """
        super().__init__(f"The store at {name} is damaged: {what}. {backup_advice(rounds)}")


def backup_advice(rounds: Mapping[str, int]) -> str:
    """Says which backup can replace a damaged store.

    Args:
      rounds: Number of committed rounds by task; empty if they cannot be read.

    Returns:
      Two sentences.
    """
    if rounds:
        listed = ", ".join(f"{task} {number}" for task, number in sorted(rounds.items()))
        which = f"at least these rounds: {listed}"
    else:
        which = "all released rounds (`rounds.json` in the server's folder has their numbers)"
    return (
        f"Restore only a backup that has {which}. A backup with fewer would repeat noise that is "
        "released already: a task without such a backup has to end."
    )


@dataclasses.dataclass(frozen=True)
class Lease:
    """The right to lead a population.

    Attributes:
      population: Name of the population.
      owner: Who leads; empty after a release.
      epoch: From 1; larger than that of all earlier holders.
      expires_at: Seconds on the clock that was handed in.
    """

    population: str
    owner: str
    epoch: int
    expires_at: float


@dataclasses.dataclass(frozen=True)
class Commit:
    """The state of a task after its last committed round.

    Attributes:
      task: Name of the task.
      rounds_done: Number of committed rounds.
      epoch: Under which the last one was committed; 0 before the first.
      model: The model, serialised.
      state: The aggregator's state, serialised; secret.
      metrics: Metrics of the last round; JSON-compatible.
    """

    task: str
    rounds_done: int
    epoch: int
    model: bytes = dataclasses.field(repr=False)
    state: bytes = dataclasses.field(repr=False)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Store(abc.ABC):
    """Leases and commits; every method is one transaction, and durable when it returns.

    Every method raises `StoreError` where the store cannot be read or written, or is damaged as
    far as the method needs it (`StoreDamaged`); nothing is changed then, or, if the connection
    broke in the middle, all of it may be. Times are seconds of one clock, the same for all who
    share a store (as far as clocks go).
    """

    @abc.abstractmethod
    def acquire(self, population: str, owner: str, *, now: float, duration: float) -> Lease:
        """Takes the lease of a population if nobody holds it.

        Args:
          population: Name of the population.
          owner: Who will lead: a name that no other process and no earlier start had.
          now: The time.
          duration: Seconds for which the lease holds unless it is renewed.

        Returns:
          The lease, of a new epoch; of the same one, prolonged, if `owner` holds it.

        Raises:
          LeaseHeld: If somebody else holds it.
          ValueError: If a name is empty, or a number is not in range.
        """

    @abc.abstractmethod
    def renew(
        self, population: str, owner: str, epoch: int, *, now: float, duration: float
    ) -> Lease:
        """Prolongs a lease that has not ended.

        Returns:
          The lease, of the same epoch, until `now + duration`.

        Raises:
          LeaseLost: If it has ended, even if nobody else has it yet.
        """

    @abc.abstractmethod
    def release(self, population: str, owner: str, epoch: int) -> None:
        """Ends a lease; nothing happens if it is not the owner's any more."""

    @abc.abstractmethod
    def lease(self, population: str) -> Lease | None:
        """The last lease of a population, ended or not; None if there never was one."""

    @abc.abstractmethod
    def add_task(self, population: str, task: str, *, model: bytes, state: bytes) -> Commit:
        """Adds a task, with no round done.

        Args:
          population: Name of the population.
          task: Name of the task, new in its population.
          model: The model it begins with.
          state: The aggregator's state it begins with; secret.

        Returns:
          What was committed.

        Raises:
          TaskExists: If there is one of that name; it is untouched.
        """

    @abc.abstractmethod
    def tasks(self, population: str) -> tuple[str, ...]:
        """Names of the population's tasks, sorted."""

    @abc.abstractmethod
    def last_commit(self, population: str, task: str) -> Commit:
        """The only state that the task may go on from.

        Raises:
          UnknownTask: If there is no such task.
        """

    @abc.abstractmethod
    def commit(
        self,
        population: str,
        task: str,
        *,
        round_index: int,
        epoch: int,
        model: bytes,
        state: bytes,
        metrics: Mapping[str, Any],
        now: float,
    ) -> Commit:
        """Commits a round, whole or not at all.

        Args:
          population: Name of the population.
          task: Name of the task.
          round_index: The round, from 0; the number of rounds done before it.
          epoch: The epoch of the lease that the round was made under.
          model: The model after the round.
          state: The aggregator's state after the round; secret.
          metrics: Of the round, about no single device; JSON-compatible.
          now: The time, for the history.

        Returns:
          What was committed.

        Raises:
          StaleEpoch: If the population's epoch is another one.
          RoundConflict: If it is not the next round of the task.
          UnknownTask: If there is no such task.
          ValueError: If the metrics are not JSON-compatible, or use one of
            `HISTORY_COLUMNS`, or a number is not in range.
        """

    @abc.abstractmethod
    def history(self, population: str, task: str) -> list[dict[str, Any]]:
        """One row a committed round, in order: `HISTORY_COLUMNS` and the metrics.

        `pandas.DataFrame(store.history(population, task))` is a table of them.

        Raises:
          UnknownTask: If there is no such task.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what the store holds open; leases go on."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_lease(population: str, owner: str, now: float, duration: float) -> None:
    """Checks the arguments of a lease.

    Raises:
      ValueError: If a name is empty, or a number is not in range.
    """
    for name, value in (("population", population), ("owner", owner)):
        if not isinstance(value, str) or not value:
            raise validation.UsageError(
                f"{name} must be a string that is not empty, got {value!r}."
            )
    validation.number("now", now)
    validation.positive("duration", duration)


def check_commit(round_index: int, epoch: int) -> None:
    """Checks the numbers of a commit.

    Raises:
      ValueError: If one is not in range; epoch 0 is nobody's.
    """
    validation.integer("round_index", round_index, minimum=0)
    validation.integer("epoch", epoch, minimum=1, remedy="Commit under the epoch of a lease.")


def is_held(lease: Lease, now: float) -> bool:
    """Whether somebody holds a lease at a time."""
    return bool(lease.owner) and now < lease.expires_at


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Serialises metrics as JSON; a number that is not finite becomes null.

    Raises:
      ValueError: If they are not JSON-compatible, or use one of `HISTORY_COLUMNS`.
    """
    taken = sorted(set(HISTORY_COLUMNS) & set(metrics))
    if taken:
        raise validation.UsageError(
            f"metrics must not use the names {taken}: the history has such columns."
        )
    for name, value in metrics.items():
        try:
            json.dumps(_finite(value))
        except TypeError as error:  # Without the values: they are not committed.
            raise validation.UsageError(
                f"metrics must be JSON-compatible, which {name!r} is not ({error}): convert "
                "arrays and tensors to numbers and lists."
            ) from None
    return json.dumps({name: _finite(value) for name, value in metrics.items()})


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
