"""The one protocol by which every run's rounds begin and are committed.

A round goes through these steps, each of them durable before the next one:

1. `begin`: the ledger records the cohort, or refuses the round. No client has run yet.
2. The caller trains.
3. `commit`: the new state is saved, then the ledger commits to it. Only then may
   the model be used or published. Older checkpoints are removed last.

A process that dies anywhere leaves either the old state with the round perhaps begun,
or the new one. `restore` gives the one that the ledger committed to; a round that was
begun can then only be repeated with the same cohort.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tff_dpftrl import durable_files, json_text, private_round, validation
from tff_dpftrl.mechanisms import serialization
from tff_dpftrl.mechanisms import strategy as strategy_lib
from tff_dpftrl.participation import ledger, observed
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import checkpoint

_LEDGER = "ledger.sqlite"
_CHECKPOINTS = "checkpoints"
_CLAIM = "claim.json"
_STRATEGY = "strategy.json"


def begin_or_resume(
    folder: str | os.PathLike[str],
    initialize: Callable[[], Any],
    declared: schema_lib.MinSep,
    claim: Any,
    *,
    noise_part: str = "aggregator",
) -> tuple[CommittedRounds, Any]:
    """Begins a run in a folder, or goes on with the one that is there.

    The folder keeps the state, the number of committed rounds and the record of who took part. A
    round goes `rounds.begin(t, ids)`, then the training, then `rounds.commit(t, state)`; only then
    may the model be used. A process that is killed at any moment leaves the state of the last
    committed round, and a record that has at least what was released.

    Args:
      folder: Folder of this run alone, made for its owner only. It is secret: with its content
        the noise can be subtracted.
      initialize: Function that returns the state before round 0, like the `initialize` of a
        process of `tff.learning`: a nested structure of arrays.
      declared: Participation schema that the run promises.
      claim: What is claimed of the whole run, a dataclass such as `aggregator.guarantee(…)`. The
        run cannot go on with a process of another claim or strategy, but for δ. The folder keeps
        the strategy, for `load_strategy`, in `strategy.json`.
      noise_part: Part of the state that the noise of the next round goes on from, which differs in
        every round.

    Returns:
      The rounds, open, and the state that the next one continues from.

    Raises:
      UsageError: If the folder is in use, has lost its ledger, or holds a run of another claim,
        schema, `noise_part` or structure of the state; if the state has no `noise_part`; or if
        the claim is of fewer rounds than declared, or no dataclass of plain values.
      OSError: If a file cannot be written.
    """
    folder = pathlib.Path(folder)
    if getattr(claim, "schema", declared) != declared:
        raise validation.UsageError(
            f"claim is made for {claim.schema}, and declared is {declared}: give one schema."
        )
    if getattr(claim, "num_rounds", declared.num_rounds) < declared.num_rounds:
        raise validation.UsageError(
            f"claim is made for {claim.num_rounds} rounds, and declared allows "
            f"{declared.num_rounds}: claim all of them, or declare fewer."
        )
    now = _as_bound(claim) | {"noise_part": noise_part}
    path, state, is_new = folder / _CLAIM, initialize(), not CommittedRounds.exist(folder)
    if is_new and path.exists() and not CommittedRounds.exist(folder):  # Nobody began meanwhile.
        raise _lost_ledger(folder)
    then = json_text.read_object(path) if path.exists() and not is_new else now
    options: dict[str, Any] = {"noise_part": noise_part, "binding": json.dumps(then)}
    if not is_new:
        _check_same(folder, then, now)
        rounds = CommittedRounds.open(folder, declared, **options)
    else:
        rounds = CommittedRounds.create(folder, declared, state, {}, **options)
    try:
        if not is_new:
            state = rounds.restore()[0].in_structure_of(state, by_name=True)
        # The state is bound to the claim, whose file shows what differs. The process that holds the
        # ledger writes it.
        if is_new or not path.exists():
            _keep_strategy(folder, claim)
            durable_files.write(path, json.dumps(now).encode(), private=True)
    except BaseException:
        rounds.close()
        raise
    return rounds, state


def _as_bound(claim: Any) -> dict[str, Any]:
    """Returns what a run cannot change of its claim, as JSON has it."""
    strategy = getattr(claim, "strategy", "")
    if strategy is None:
        raise validation.UsageError(
            "claim has no strategy, which a run must not change: take the claim of "
            "aggregator.guarantee(…) or dp_ftrl_guarantee(…)."
        )
    try:
        values = {"class": type(claim).__name__} | dataclasses.asdict(claim)
        values.pop("delta", None)
        if isinstance(strategy, strategy_lib.Strategy):
            digest = hashlib.sha256(_json(strategy.to_dict()).encode()).hexdigest()
            values["strategy"] = f"{type(strategy).__name__} {digest}"
        return json_text.parse(_json(values))
    except (TypeError, ValueError) as error:
        raise validation.UsageError(
            f"claim must be a dataclass of finite numbers, texts, lists and dicts, such as "
            f"aggregator.guarantee(…), got a {type(claim).__name__}: {error}."
        ) from error


def _json(values: dict[str, Any]) -> str:
    def number(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__name__} is no plain value")

    return json.dumps(values, sort_keys=True, default=number, allow_nan=False)


def _check_same(folder: pathlib.Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            kept = folder / _STRATEGY
            is_kept = name == "strategy" and kept.exists()
            load = f", tff_dpftrl.load_strategy({str(kept)!r})" if is_kept else ""
            raise validation.UsageError(
                f"The run in {folder} began with {name} {then.get(name)!r}, and this claim has "
                f"{now.get(name)!r}: go on with the former{load}, or name another folder."
            )


def _lost_ledger(folder: pathlib.Path) -> validation.UsageError:
    return validation.UsageError(
        f"{folder} holds the state of a run whose {_LEDGER} is missing: restore it, or name "
        "another folder."
    )


def _keep_strategy(folder: pathlib.Path, claim: Any) -> None:
    strategy = getattr(claim, "strategy", None)
    if isinstance(strategy, strategy_lib.Strategy):
        try:
            text = serialization.strategy_to_json(strategy)
        except validation.UsageError:  # Only code of others can make it again.
            return
        durable_files.write(folder / _STRATEGY, text.encode(), private=True)


class CommittedRounds:
    """The rounds of one run: none is lost, forked, or repeated differently.

    One process at a time has them open. The folder holds checkpoints, with the seed
    of the noise, and the ledger: it is secret.
    """

    def __init__(
        self,
        participation: ledger.Ledger,
        checkpoints: checkpoint.CheckpointFolder,
        noise_part: str | None,
    ):
        """Internal; use `CommittedRounds.create` or `CommittedRounds.open`."""
        # Now that the ledger is locked, only this process writes there.
        durable_files.remove_leftovers(participation.path.parent)
        durable_files.remove_leftovers(checkpoints.folder)
        self._ledger = participation
        self._checkpoints = checkpoints
        self._noise_part = noise_part
        self._fingerprint: str | None = None
        self._noise_fingerprint: str | None = None
        self._asked: tuple[str, ...] | None = None

    @staticmethod
    def exist(folder: pathlib.Path) -> bool:
        """Returns whether a folder holds the rounds of a run, perhaps none of them begun."""
        return (folder / _LEDGER).exists()

    @classmethod
    def create(
        cls,
        folder: pathlib.Path,
        declared: schema_lib.MinSep,
        state: Any,
        saved: Mapping[str, Any],
        *,
        noise_part: str | None = "aggregator",
        binding: str = "",
        budget_guard: ledger.BudgetGuard | None = None,
    ) -> CommittedRounds:
        """Starts the rounds of a new run.

        Args:
          folder: A folder for this run only; made, for the owner only, if missing.
          declared: The participation schema that the run promises.
          state: State before round 0, a nested structure of arrays.
          saved: Values to keep with the state; JSON-compatible.
          noise_part: The part of the state that the noise of the next round goes on from, which
            differs in every round; None if there is no noise.
          binding: Text that every state is bound to besides the version of the noise, like a
            digest of all options. A run can only be opened with the binding that it began with.
          budget_guard: Function that is asked before every new round whether it may begin.

        Returns:
          The rounds, open.

        Raises:
          ValueError: If the folder holds the rounds of a run already.
          OSError: If a file cannot be written.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if cls.exist(folder):
            raise validation.UsageError(
                f"{folder} holds a run already: open it, or name another folder."
            )
        if checkpoint.has_later_rounds(folder / _CHECKPOINTS):
            raise _lost_ledger(folder)
        checkpoints = _checkpoints(folder, binding)
        snapshot = checkpoint.Snapshot.of(state)
        _check_noise_part(snapshot, noise_part)
        fingerprint = checkpoints.save(0, snapshot, saved)
        path = folder / _LEDGER
        participation = ledger.Ledger.create(
            path, declared, initial_checkpoint=fingerprint, budget_guard=budget_guard
        )
        rounds = cls(participation, checkpoints, noise_part)
        rounds._remember(snapshot, fingerprint)
        return rounds

    @classmethod
    def open(
        cls,
        folder: pathlib.Path,
        declared: schema_lib.MinSep,
        *,
        noise_part: str | None = "aggregator",
        binding: str = "",
        budget_guard: ledger.BudgetGuard | None = None,
    ) -> CommittedRounds:
        """Opens the rounds of a run to go on with it; arguments as for `create`.

        A run that another process has open, or that declared another schema, is refused.
        """
        participation = ledger.Ledger.open(folder / _LEDGER, declared, budget_guard=budget_guard)
        checkpoints = _checkpoints(folder, binding)
        return cls(participation, checkpoints, noise_part)

    def close(self) -> None:
        """Closes the ledger; another process may then open it."""
        self._ledger.close()

    def __enter__(self) -> CommittedRounds:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def rounds_done(self) -> int:
        """Number of committed rounds."""
        last = self._ledger.last_committed_round
        return 0 if last is None else last + 1

    def observed(self) -> observed.ObservedParticipation:
        """Returns who took part how often so far; a round that was begun counts."""
        return self._ledger.observed()

    def restore(self) -> tuple[checkpoint.Snapshot, dict[str, Any]]:
        """Reads the only state that the run may go on from.

        Returns:
          The state that the ledger committed to last, and the values that were kept with it.

        Raises:
          checkpoint.CheckpointError: If it is missing or damaged, or bound to something else.
        """
        snapshot, saved = self.read()
        _check_noise_part(snapshot, self._noise_part)
        self._remember(snapshot, self._ledger.last_checkpoint)
        return snapshot, saved

    def read(
        self, is_wanted: Callable[[str], bool] = lambda path: True
    ) -> tuple[checkpoint.Snapshot, dict[str, Any]]:
        """Reads the tensors that are wanted, by path, and the saved values, for a report.

        They are of the state that the run may go on from. CheckpointError says that it is missing
        or damaged, or bound to something else.
        """
        fingerprint = self._ledger.last_checkpoint
        read = self._checkpoints.load(self.rounds_done, fingerprint, is_wanted)
        self._checkpoints.keep_only(self.rounds_done, fingerprint)
        return read

    def begin(self, round_index: int, cohort: Iterable[str]) -> bool:
        """Asks the ledger whether a round may begin; call it before any client runs.

        Args:
          round_index: The round, from 0.
          cohort: Ids of all users who will be asked.

        Returns:
          Whether this repeats a round that was begun before and never committed.

        Raises:
          ledger_rules.LedgerRefusal: If it may not begin.
          ValueError: If nothing was restored, or an id is not a string or appears twice.
          OSError: If the ledger cannot be written.
        """
        if self._fingerprint is None:
            raise validation.UsageError(
                "Call restore() first: a round continues from the committed state."
            )
        cohort = tuple(cohort)
        is_repeated = self._ledger.begin_round(
            round_index,
            cohort,
            noise_fingerprint=self._noise_fingerprint,
            checkpoint_fingerprint=self._fingerprint,
        )
        self._asked = cohort
        return is_repeated

    def commit(
        self,
        round_index: int,
        state: Any,
        saved: Mapping[str, Any] = types.MappingProxyType({}),
        contributed: Iterable[str] | None = None,
    ) -> None:
        """Makes the state after the round that was begun durable, then the only one.

        Args:
          round_index: The round that was begun.
          state: State that the next round continues from.
          saved: Values to keep with the state; JSON-compatible.
          contributed: Ids of the users whose updates entered the sum; the whole cohort if None.

        Raises:
          ValueError: If `begin` was not called for this round.
          ledger_rules.LedgerRefusal: If it is another round, somebody contributed who was not
            asked, or the state is an earlier one.
          OSError: If a file cannot be written; the round is not committed then.
        """
        if self._asked is None:
            raise validation.UsageError(
                "Call begin() first: only a round that was begun can be committed."
            )
        snapshot = checkpoint.Snapshot.of(state)
        fingerprint = self._checkpoints.save(round_index + 1, snapshot, dict(saved))
        self._ledger.commit_round(
            round_index, self._asked if contributed is None else contributed, fingerprint
        )
        self._checkpoints.keep_only(round_index + 1, fingerprint)
        self._asked = None
        self._remember(snapshot, fingerprint)

    def _remember(self, snapshot: checkpoint.Snapshot, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        if self._noise_part is not None:
            self._noise_fingerprint = snapshot.fingerprint(part=self._noise_part)


def _check_noise_part(snapshot: checkpoint.Snapshot, noise_part: str | None) -> None:
    if noise_part is not None and not snapshot.part(noise_part):
        raise validation.UsageError(
            f"noise_part {noise_part!r} is no part of the state, which has {snapshot.paths}: "
            "name the part that the noise of the next round goes on from."
        )


def _checkpoints(folder: pathlib.Path, binding: str) -> checkpoint.CheckpointFolder:
    """Binds states to the version of the noise: earlier versions refuse those of a new run."""
    versions = range(private_round.NOISE_VERSION, private_round.STATE_VERSION - 1, -1)
    bound, *older = (f"noise version {version}, {binding}" for version in versions)
    return checkpoint.CheckpointFolder(folder / _CHECKPOINTS, binding=bound, older=older)
