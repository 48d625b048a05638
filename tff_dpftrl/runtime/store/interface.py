"""The lease of a population, the commits of its tasks, and the laws that every store keeps.

- The holder of a population's lease leads it. Each new holder gets a new epoch, larger than all
  epochs before. A lease ends by release, or expires by the caller's clock. Only then can another
  one acquire it.
- Clocks of machines differ and processes can be suspended: a former holder may still believe that
  it leads. So every commit names the epoch of its lease, and the store refuses all but the
  population's latest epoch.
- A task is one row: the number of rounds done, the model and the aggregator's state after them,
  and the metrics of the last round. A commit replaces the row if its round is the next one. It is
  one transaction: others see all of it or nothing.
- An attempt at a round is noted before devices take part. There is one for each round: whoever
  leads after a failure skips the round, which the devices of the attempt may have counted.

The aggregator's state holds the seed of the noise: whoever reads a store can subtract the noise. A
store is therefore as secret as the memory of the server. A commit does not release a result; what
is sent after the commit does. (Bonawitz et al. 2019, section 4, calls the leases the shared
locking service.)
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.runtime.store import contents

# Columns of `Store.history` besides the metrics.
HISTORY_COLUMNS = ("task", "round", "epoch", "committed_at")


class StoreRefusal(validation.UsageError):
    """A request that the store refuses by one of its laws."""


class LeaseHeld(StoreRefusal):
    """Somebody else leads the population.

    Attributes:
      lease: The lease that is held.
    """

    def __init__(self, lease: Lease, now: float):
        """Names the holder, and the seconds until its lease expires by the clock of `now`."""
        super().__init__(
            f"The population {lease.population!r} is led by {lease.owner!r} for at least "
            f"{lease.expires_at - now:.0f} more seconds: two servers for one population are not "
            "possible. Stop that one, or wait until its lease ends."
        )
        self.lease = lease


class LeaseLost(StoreRefusal):
    """The lease has ended, or has another holder."""

    def __init__(self, population: str, owner: str, epoch: int):
        """Names the former holder."""
        super().__init__(
            f"{owner!r} has lost the lease of the population {population!r} (epoch {epoch}): it "
            "must stop leading, and may ask for a new one."
        )


class StaleEpoch(StoreRefusal):
    """A commit was made under an epoch that is not the latest."""

    def __init__(self, population: str, epoch: int, latest: int):
        """Names the epoch that is not the latest."""
        super().__init__(
            f"Epoch {epoch} cannot commit to the population {population!r}, whose epoch is "
            f"{latest}: drop the result, it must not be released."
        )


class RoundConflict(StoreRefusal):
    """A commit is not for the next round of its task."""

    def __init__(self, task: str, round_index: int, rounds_done: int):
        """Names the round, and the number of rounds that are done."""
        super().__init__(
            f"Round {round_index} of the task {task!r} cannot be committed: {rounds_done} rounds "
            "are done. Drop the result, it must not be released, and read the last commit."
        )


class RoundUsedUp(StoreRefusal):
    """Another attempt at a round has begun before."""

    def __init__(self, task: str, round_index: int):
        """Names the round."""
        super().__init__(
            f"Another attempt at round {round_index} of the task {task!r} has begun before: skip "
            "the round, which its devices may have counted."
        )


class UnknownTask(StoreRefusal):
    """There is no such task."""

    def __init__(self, population: str, task: str):
        """Names the task."""
        super().__init__(f"The population {population!r} has no task {task!r}: add it first.")


class TaskExists(StoreRefusal):
    """The population has a task of that name already."""

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
        """Describes the damage, a clause of a sentence, and the backup that can replace it."""
        super().__init__(f"The store at {name} is damaged: {what}. {backup_advice(rounds)}")


def backup_advice(rounds: Mapping[str, int]) -> str:
    """Describes the backup that can replace a damaged store of these numbers of rounds by task."""
    if rounds:
        listed = ", ".join(f"{str(task):.200} {rounds[task]}" for task in sorted(rounds, key=str))
        which = f"at least these rounds: {listed}"
    else:
        which = "all released rounds (`rounds.json` in the server's folder has their numbers)"
    return (
        f"Restore only a backup that has {which}. With fewer, rounds would be released a second "
        "time, which costs privacy that no statement counts, and in tasks of version 0.4 repeats "
        "noise: a task without such a backup has to end."
    )


@dataclasses.dataclass(frozen=True)
class Lease:
    """The right to lead a population.

    Attributes:
      population: Name of the population.
      owner: Name of the lease's holder; empty after a release.
      epoch: Epoch, at least 1; larger than that of all earlier holders.
      expires_at: Time at which the lease ends, in seconds of the caller's clock.
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
      epoch: Epoch of the lease under which the last round was committed; 0 before the first round.
      model: Serialised model.
      state: Serialised state of the aggregator; secret. It may still be in the store, which raises
        `StoreError` if it cannot be read, or has a newer one.
      metrics: Metrics of the last round; JSON-compatible.
      attempt: Name of the attempt at the next round that has begun, if any. Its devices may have
        counted the round. Unless that attempt commits the round, it has to be skipped.
    """

    task: str
    rounds_done: int
    epoch: int
    model: bytes = dataclasses.field(repr=False)
    state: bytes | contents.Content = dataclasses.field(repr=False)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attempt: str = ""


@dataclasses.dataclass(frozen=True)
class TaskRows:
    """All that a store has of a task, read in one transaction, for an auditor.

    Attributes:
      commit: Last commit of the task.
      head: Row of the last commit without model and state; values by column.
      rounds: Rows of the committed rounds, in order; values by column.
      epoch: Epoch of the population's last lease; 0 if there was none.
    """

    commit: Commit
    head: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    epoch: int


class Store(abc.ABC):
    """Leases and commits; every method is one transaction, and durable when it returns.

    Every method raises `StoreError` where the store cannot be read or written, and `StoreDamaged`
    where a row that it needs is damaged. Nothing is changed then. If the connection breaks in the
    middle, the whole change may have been made. Times are in seconds, and all servers that share
    a store use the same clock, as far as clocks agree.
    """

    @abc.abstractmethod
    def acquire(self, population: str, owner: str, *, now: float, duration: float) -> Lease:
        """Acquires the lease of a population if nobody holds it.

        Args:
          population: Name of the population.
          owner: Name of the new holder; no other process and no earlier start may have had it.
          now: Current time in seconds.
          duration: Seconds after which the lease ends unless it is renewed.

        Returns:
          The lease with a new epoch; if `owner` holds it already, the prolonged lease with the
          same epoch.

        Raises:
          LeaseHeld: If another one holds the lease.
          ValueError: If a name is empty, or a number is not in range.
        """

    @abc.abstractmethod
    def renew(
        self, population: str, owner: str, epoch: int, *, now: float, duration: float
    ) -> Lease:
        """Prolongs a lease that has not ended.

        Args:
          population: Name of the population.
          owner: Name of the holder.
          epoch: Epoch of the lease.
          now: Current time in seconds.
          duration: Seconds after which the lease ends unless it is renewed again.

        Returns:
          The lease with the same epoch, until `now + duration`.

        Raises:
          LeaseLost: If the lease has ended, even if nobody else has acquired it yet.
        """

    @abc.abstractmethod
    def release(self, population: str, owner: str, epoch: int) -> None:
        """Ends a lease; does nothing if the owner does not hold it any more."""

    @abc.abstractmethod
    def lease(self, population: str) -> Lease | None:
        """Returns the last lease of a population, ended or not; None if there never was one."""

    @abc.abstractmethod
    def add_task(
        self, population: str, task: str, *, model: bytes, state: contents.Serialised
    ) -> Commit:
        """Adds a task, with no round done.

        Args:
          population: Name of the population.
          task: Name of the task, new in its population.
          model: Serialised initial model.
          state: Serialised initial state of the aggregator; secret.

        Returns:
          The task's first commit.

        Raises:
          TaskExists: If the population has a task of that name, which stays as it is.
        """

    @abc.abstractmethod
    def tasks(self, population: str) -> tuple[str, ...]:
        """Returns the names of the population's tasks, sorted."""

    @abc.abstractmethod
    def last_commit(self, population: str, task: str) -> Commit:
        """Returns the last commit of a task: the only state that the task may go on from.

        Raises:
          UnknownTask: If there is no such task.
        """

    @abc.abstractmethod
    def begin_attempt(
        self, population: str, task: str, *, round_index: int, epoch: int, attempt: str
    ) -> None:
        """Notes the one attempt at a round that may have devices; the round's commit forgets it.

        Args:
          population: Name of the population.
          task: Name of the task.
          round_index: Index of the round, from 0; equal to the number of rounds done before it.
          epoch: Epoch of the lease under which the round is made.
          attempt: Name of the attempt; not empty, and of no other attempt.

        Raises:
          RoundUsedUp: If another attempt at the round has begun before.
          StaleEpoch: If the population's latest epoch is another one.
          RoundConflict: If the round is not the next one of the task.
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
        state: contents.Serialised,
        metrics: Mapping[str, Any],
        now: float,
    ) -> Commit:
        """Commits a round, whole or not at all.

        Args:
          population: Name of the population.
          task: Name of the task.
          round_index: Index of the round, from 0; equal to the number of rounds done before it.
          epoch: Epoch of the lease under which the round was made.
          model: Serialised model after the round.
          state: Serialised state of the aggregator after the round; secret.
          metrics: Metrics of the round, about no single device; JSON-compatible.
          now: Current time in seconds, for the history.

        Returns:
          The commit.

        Raises:
          StaleEpoch: If the population's latest epoch is another one.
          RoundConflict: If the round is not the next one of the task.
          UnknownTask: If there is no such task.
          ValueError: If the metrics are not JSON-compatible, or use one of
            `HISTORY_COLUMNS`, or a number is not in range.
        """

    @abc.abstractmethod
    def history(self, population: str, task: str) -> list[dict[str, Any]]:
        """Returns one row a committed round, in order: `HISTORY_COLUMNS` and the metrics.

        `pandas.DataFrame(store.history(population, task))` makes a table of them.

        Raises:
          UnknownTask: If there is no such task.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes files and connections; leases stay as they are."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_lease(population: str, owner: str, now: float, duration: float) -> None:
    """Checks the arguments of a lease: names, and numbers in range."""
    for name, value in (("population", population), ("owner", owner)):
        if not isinstance(value, str) or not value:
            raise validation.UsageError(
                f"{name} must be a string that is not empty, got {value!r}."
            )
    validation.number("now", now)
    validation.positive("duration", duration)


def check_commit(round_index: int, epoch: int) -> None:
    """Checks the numbers of a commit; epoch 0 belongs to no lease."""
    validation.integer("round_index", round_index, minimum=0)
    validation.integer("epoch", epoch, minimum=1, remedy="Commit under the epoch of a lease.")


def is_held(lease: Lease, now: float) -> bool:
    """Returns whether a lease has a holder at the time `now`."""
    return bool(lease.owner) and now < lease.expires_at


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Serialises metrics as JSON; a number that is not finite becomes null.

    Refuses what is not JSON-compatible, and the names of `HISTORY_COLUMNS`.
    """
    taken = sorted(set(HISTORY_COLUMNS) & set(metrics))
    if taken:
        raise validation.UsageError(
            f"metrics must not use the names {taken}: the history has such columns."
        )
    for name, value in metrics.items():
        try:
            json.dumps(_finite(value))
        except TypeError as error:  # The message leaves out the values: they are not committed.
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
