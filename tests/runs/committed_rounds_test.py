"""Tests of the one protocol of rounds: a toy run, killed at every boundary."""

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import stat
from typing import Any

import numpy as np
import pytest

from tests import kills
from tff_dpftrl import durable_files, private_round, validation
from tff_dpftrl.accounting import amplified_banded, dp_fedavg, guarantee
from tff_dpftrl.mechanisms import banded, banded_toeplitz, identity, serialization
from tff_dpftrl.participation import ledger, ledger_rules, recount, schema
from tff_dpftrl.runs import checkpoint, committed_rounds

State = collections.namedtuple("State", ["weights", "aggregator"])
_SCHEMA = schema.MinSep(num_rounds=5, min_sep=2, max_participations=3)
_START = State(weights=np.zeros(3), aggregator=(np.int64(0), np.zeros(3)))


def _cohort(round_index: int) -> list[str]:
    return [f"user{round_index % 2}", f"user{round_index % 2 + 2}"]


def _noise(aggregator) -> np.ndarray:
    return np.random.default_rng([11, int(aggregator[0])]).normal(size=3)


def _train(state: State, round_index: int) -> State:
    """A round whose noise is a function of the state, as that of an aggregator is."""
    noise = _noise(state.aggregator)
    weights = state.weights + (round_index + 1) + noise - 0.5 * state.aggregator[1]
    return State(weights, (state.aggregator[0] + 1, noise))


class _Crash(BaseException):
    """Stands for the death of the process."""


def _open(folder: pathlib.Path, **options) -> committed_rounds.CommittedRounds:
    if committed_rounds.CommittedRounds.exist(folder):
        return committed_rounds.CommittedRounds.open(folder, _SCHEMA, **options)
    return committed_rounds.CommittedRounds.create(folder, _SCHEMA, _START, {"round": 0}, **options)


def _run(folder: pathlib.Path, num_rounds: int = 5, **options) -> State:
    """Runs, or goes on with, the toy run in a folder."""
    with _open(folder, **options) as rounds:
        snapshot, saved = rounds.restore()
        assert saved == {"round": rounds.rounds_done}
        state = snapshot.in_structure_of(_START)
        while rounds.rounds_done < num_rounds:
            t = rounds.rounds_done
            rounds.begin(t, _cohort(t))
            state = _train(state, t)
            rounds.commit(t, state, {"round": t + 1})
    return state


def _checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted((folder / "checkpoints").iterdir())


def test_a_run_is_that_of_a_plain_loop(tmp_path):
    state = _START
    for t in range(5):
        state = _train(state, t)
    np.testing.assert_array_equal(_run(tmp_path).weights, state.weights)
    with _open(tmp_path) as rounds:
        seen = rounds.observed()
    assert (seen.num_rounds, seen.min_sep, seen.max_participations) == (5, 2, 3)
    assert len(_checkpoints(tmp_path)) == 1


_CLAIM = guarantee.dp_ftrl_guarantee(
    identity.Identity(), noise_multiplier=1.0, schema=_SCHEMA, delta=1e-6
)


def _loop(folder: pathlib.Path, released: list[int], claim: Any = _CLAIM, num_rounds=2) -> State:
    """A loop as users write it."""
    rounds, state = committed_rounds.begin_or_resume(folder, lambda: _START, _SCHEMA, claim)
    try:
        for t in range(rounds.rounds_done, num_rounds):
            rounds.begin(t, _cohort(t))
            state = _train(state, t)
            rounds.commit(t, state)
            released.append(t)
    finally:
        rounds.close()
    return state


def test_a_loop_may_be_killed_at_any_moment(tmp_path):
    expected = _run(tmp_path / "whole", num_rounds=2).weights
    for kill_at in itertools.count():
        folder, released = tmp_path / str(kill_at), []
        with kills.dying(kill_at) as events, contextlib.suppress(kills.Killed):
            _loop(folder, released)
            break
        if (folder / "ledger.sqlite").exists():
            counted = recount.recount(folder / "ledger.sqlite")
            assert counted.committed_rounds >= len(released), events
        else:
            assert not released, events
        np.testing.assert_array_equal(_loop(folder, released).weights, expected)
        assert len(_checkpoints(folder)) == 1
        assert len(released) == len(set(released)), events
    assert kill_at > 2 * 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"noise_multiplier": 2.0}, "began with noise_multiplier 1.0, and this claim has 2.0"),
        ({"clip_norm": 1.0}, "began with clip_norm None, and this claim has 1.0"),
        ({"schema": dataclasses.replace(_SCHEMA, min_sep=1)}, "claim is made for MinSep"),
    ],
)
def test_a_loop_of_another_claim_is_refused_by_name(tmp_path, change, message):
    _loop(tmp_path, [])
    with pytest.raises(ValueError, match=message):
        _loop(tmp_path, [], dataclasses.replace(_CLAIM, **change))
    _loop(tmp_path, [], dataclasses.replace(_CLAIM, delta=1e-7))


_SWAPPED = [banded_toeplitz.BandedToeplitz(c) for c in [(1.0, 0.5, 0.25), (1.0, 0.25, 0.5)]]


@pytest.mark.parametrize(
    "strategies",
    [_SWAPPED, [banded.Banded([[0.6, 0.0], *[[0.6, below]] * 7]) for below in (0.8, -0.8)]],
    ids=lambda strategies: type(strategies[0]).__name__,
)
def test_a_loop_of_another_strategy_of_the_same_sensitivity_is_refused(tmp_path, strategies):
    apart = schema.MinSep(num_rounds=8, min_sep=4, max_participations=2)
    first, second = (
        guarantee.dp_ftrl_guarantee(strategy, noise_multiplier=1.0, schema=apart, delta=1e-6)
        for strategy in strategies
    )
    assert first == second

    def begin(claim: guarantee.Guarantee) -> None:
        committed_rounds.begin_or_resume(tmp_path, lambda: _START, apart, claim)[0].close()

    begin(first)
    with pytest.raises(ValueError, match=r"began with strategy .*load_strategy\(.*strategy.json"):
        begin(second)
    kept = serialization.load(tmp_path / "strategy.json")
    begin(dataclasses.replace(first, strategy=kept))


def test_a_banded_claim_by_cyclic_sampling_is_bound_to_its_strategy(tmp_path):
    then, now = (
        amplified_banded.AmplifiedBanded.from_strategy(
            strategy, noise_multiplier=1.0, num_rounds=5, num_groups=3, sampling_probability=0.1
        )
        for strategy in _SWAPPED
    )
    _loop(tmp_path, [], then)
    with pytest.raises(ValueError, match="began with strategy"):
        _loop(tmp_path, [], now)


@dataclasses.dataclass(frozen=True)
class _Claim:
    """Claim of a user's own."""

    value: Any = 1.0


@pytest.mark.parametrize(
    "claim, message",
    [
        (object(), "claim must be a dataclass of .*, got a object"),
        ("ε = 1", "claim must be a dataclass of .*, got a str"),
        (_Claim(object()), "got a _Claim: a object is no plain value"),
        (_Claim(float("nan")), "got a _Claim: Out of range float"),
        (dp_fedavg.DpFedAvg(0.1, 1.0, 4), "made for 4 rounds, and declared allows 5"),
        (dataclasses.replace(_CLAIM, strategy=None), "claim has no strategy"),
    ],
)
def test_what_cannot_be_claimed_of_the_whole_run_is_refused(tmp_path, claim, message):
    with pytest.raises(validation.UsageError, match=message):
        _loop(tmp_path, [], claim)
    assert not list(tmp_path.iterdir())


def test_a_loop_of_another_kind_of_claim_or_with_other_fields_is_refused(tmp_path):
    then = dp_fedavg.DpFedAvg(0.1, 1.0, 5)
    _loop(tmp_path, [], then)
    fields = [(field.name, field.type) for field in dataclasses.fields(then)]
    other = dataclasses.make_dataclass("Other", fields)(0.1, 1.0, 5)
    with pytest.raises(ValueError, match="began with class 'DpFedAvg', and this claim has 'Other'"):
        _loop(tmp_path, [], other)
    more = dataclasses.make_dataclass("DpFedAvg", [*fields, ("more", int)])(0.1, 1.0, 5, 7)
    with pytest.raises(ValueError, match="began with more None, and this claim has 7"):
        _loop(tmp_path, [], more)


def test_numbers_of_numpy_are_plain_values(tmp_path):
    _loop(tmp_path, [], _Claim(np.int64(5)))
    _loop(tmp_path, [], _Claim(5), num_rounds=3)


def test_a_loop_with_another_part_for_the_noise_is_refused(tmp_path):
    _loop(tmp_path, [])
    with pytest.raises(ValueError, match="began with noise_part 'aggregator', .* has 'weights'"):
        committed_rounds.begin_or_resume(
            tmp_path, lambda: _START, _SCHEMA, _CLAIM, noise_part="weights"
        )
    _run(tmp_path / "other", num_rounds=1)
    with pytest.raises(ValueError, match="noise_part 'noise' is no part of the state"):
        _run(tmp_path / "other", noise_part="noise")


@pytest.mark.parametrize("lost", [["checkpoints/*"], ["claim.json"]])
def test_a_run_without_its_ledger_does_not_begin_anew(tmp_path, lost):
    _loop(tmp_path, [], num_rounds=1)
    for path in [path for one in [*lost, "ledger.sqlite"] for path in tmp_path.glob(one)]:
        path.unlink()
    before = _checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"ledger.sqlite is missing: restore it, or name another"):
        _loop(tmp_path, [])
    assert _checkpoints(tmp_path) == before


def test_of_two_that_begin_at_once_one_is_refused(tmp_path, monkeypatch):
    """The second one begins when the first one has found the folder free."""
    key, released = ledger.pseudonyms.Pseudonyms.create, []

    def late(path):
        monkeypatch.setattr(ledger.pseudonyms.Pseudonyms, "create", key)
        with pytest.raises(validation.UsageError, match="another process makes it"):
            _loop(tmp_path, [], dataclasses.replace(_CLAIM, noise_multiplier=2.0))
        return key(path)

    monkeypatch.setattr(ledger.pseudonyms.Pseudonyms, "create", late)
    _loop(tmp_path, released)
    assert released == [0, 1]
    _loop(tmp_path, released, num_rounds=3)


def test_who_begins_late_changes_nothing_of_the_run(tmp_path, monkeypatch):
    """The first one begins when the second one has found the folder free."""
    exist = committed_rounds.CommittedRounds.exist

    def early(folder):
        monkeypatch.setattr(committed_rounds.CommittedRounds, "exist", exist)
        _loop(folder, [])
        return False

    monkeypatch.setattr(committed_rounds.CommittedRounds, "exist", early)
    with pytest.raises(validation.UsageError, match="holds a run already"):
        _loop(tmp_path, [], dataclasses.replace(_CLAIM, noise_multiplier=2.0))
    released = []
    _loop(tmp_path, released, num_rounds=3)
    assert released == [2]
    assert not list(tmp_path.glob(".*"))


Other = collections.namedtuple("Other", ["weights", "aggregator", "momentum"])
Renamed = collections.namedtuple("Renamed", ["kernel", "aggregator"])


@pytest.mark.parametrize(
    "other, message",
    [
        (_START._replace(weights=np.zeros(4)), r"weights float64\[3\] where .* weights float64\[4"),
        (Other(*_START, np.zeros(3)), r"has no more tensors where .* momentum float64\[3\]"),
        (Renamed(*_START), r"has weights float64\[3\] where .* has kernel float64\[3\]"),
    ],
)
def test_a_loop_of_another_state_is_refused_by_name(tmp_path, other, message):
    _loop(tmp_path, [])
    with pytest.raises(checkpoint.CheckpointError, match=message):
        committed_rounds.begin_or_resume(tmp_path, lambda: other, _SCHEMA, _CLAIM)
    assert _loop(tmp_path, []).weights.shape == (3,)  # The folder is free again.


def test_a_state_has_the_part_that_decides_the_noise(tmp_path):
    with pytest.raises(ValueError, match="noise_part 'aggregator' is no part of the state"):
        committed_rounds.begin_or_resume(tmp_path, lambda: {"w": 1.0}, _SCHEMA, _CLAIM)
    assert not committed_rounds.CommittedRounds.exist(tmp_path)


def test_a_round_begun_is_repeated_with_the_same_cohort_or_refused(tmp_path):
    with _open(tmp_path) as rounds:
        assert not rounds.begin(0, ["a", "b"])
    with _open(tmp_path) as rounds:
        rounds.restore()
        with pytest.raises(ledger_rules.ReplayRefusal, match="another cohort"):
            rounds.begin(0, ["a", "c"])
        assert rounds.begin(0, ["b", "a"])
        assert rounds.observed().num_rounds == 1 and rounds.rounds_done == 0


def test_a_noise_state_that_does_not_change_is_refused(tmp_path):
    with _open(tmp_path) as rounds:
        rounds.begin(0, ["a"])
        rounds.commit(0, _START._replace(weights=np.ones(3)), {})
        with pytest.raises(ledger_rules.ReplayRefusal, match="noise state of round 0"):
            rounds.begin(1, ["b"])


def test_without_noise_only_the_state_must_change(tmp_path):
    with _open(tmp_path, noise_part=None) as rounds:
        rounds.begin(0, ["a"])
        rounds.commit(0, _START._replace(weights=np.ones(3)), {})
        rounds.begin(1, ["b"])
        with pytest.raises(ledger_rules.ForkRefusal, match="fingerprint of an earlier state"):
            rounds.commit(1, _START, {})


def test_steps_out_of_order_are_refused(tmp_path):
    with _open(tmp_path) as rounds:
        with pytest.raises(ValueError, match=r"Call begin\(\) first"):
            rounds.commit(0, _START, {})
        with pytest.raises(ledger_rules.LedgerRefusal, match="the next round of this ledger is 0"):
            rounds.begin(1, ["a"])
    with _open(tmp_path) as rounds, pytest.raises(ValueError, match=r"Call restore\(\) first"):
        rounds.begin(0, ["a"])


def test_a_pending_round_is_not_committed_without_being_begun_again(tmp_path):
    with _open(tmp_path) as rounds:
        rounds.begin(0, ["a"])
    with _open(tmp_path) as rounds:
        rounds.restore()
        with pytest.raises(ValueError, match=r"Call begin\(\) first"):
            rounds.commit(0, _train(_START, 0), {})


def test_who_did_not_contribute_is_not_counted(tmp_path):
    with _open(tmp_path) as rounds:
        rounds.begin(0, ["a", "b"])
        rounds.commit(0, _train(_START, 0), {}, contributed=["a"])
        assert dict(rounds.observed().histogram) == {1: 1}


def test_the_ledger_keeps_the_promise(tmp_path):
    with _open(tmp_path) as rounds:
        rounds.begin(0, ["a"])
        rounds.commit(0, _train(_START, 0), {})
        with pytest.raises(ledger_rules.SchemaRefusal, match="below min_sep=2"):
            rounds.begin(1, ["a"])


def test_the_budget_guard_is_asked(tmp_path):
    with _open(tmp_path, budget_guard=lambda seen: f"no {seen.num_rounds} rounds") as rounds:
        with pytest.raises(ledger_rules.BudgetRefusal, match="no 1 rounds"):
            rounds.begin(0, ["a"])


def test_a_run_is_bound_to_what_it_began_with(tmp_path):
    _run(tmp_path, num_rounds=2, binding="one digest")
    with pytest.raises(checkpoint.CheckpointError, match="under other options"):
        _run(tmp_path, binding="another digest")
    assert _run(tmp_path, binding="one digest").aggregator[0] == 5


def test_a_run_is_bound_to_the_version_of_the_noise(tmp_path, monkeypatch):
    _run(tmp_path, num_rounds=2)
    later = private_round.NOISE_VERSION + 1
    monkeypatch.setattr(private_round, "NOISE_VERSION", later)
    monkeypatch.setattr(private_round, "STATE_VERSION", later)
    with pytest.raises(checkpoint.CheckpointError, match="with other noise"):
        _run(tmp_path)


def _by_version_0_4(monkeypatch):
    """Binds new folders, and opens them, as version 0.4 does."""
    monkeypatch.setattr(private_round, "NOISE_VERSION", 2)


def test_a_new_folder_is_refused_by_a_version_with_another_rule_of_the_noise(tmp_path, monkeypatch):
    _loop(tmp_path, [])
    _by_version_0_4(monkeypatch)
    with pytest.raises(checkpoint.CheckpointError, match="with other noise"):
        _loop(tmp_path, [])


def test_a_folder_of_version_0_4_goes_on_and_stays_one_of_it(tmp_path, monkeypatch):
    released = []
    with monkeypatch.context() as patch:
        _by_version_0_4(patch)
        _loop(tmp_path, released)
    _loop(tmp_path, released, num_rounds=3)
    _loop(tmp_path, released, num_rounds=4)
    _by_version_0_4(monkeypatch)
    _loop(tmp_path, released, num_rounds=5)
    assert released == [*range(5)]


def test_a_rolled_back_checkpoint_is_refused(tmp_path):
    _run(tmp_path, num_rounds=1)
    older = {path.name: path.read_bytes() for path in _checkpoints(tmp_path)}
    _run(tmp_path, num_rounds=2)
    for path in _checkpoints(tmp_path):
        path.unlink()
    for name, content in older.items():
        (tmp_path / "checkpoints" / name).write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match="that the ledger names as the last one"):
        _run(tmp_path)


def test_a_second_process_and_a_second_run_are_refused(tmp_path):
    with _open(tmp_path):
        with pytest.raises(ValueError, match="in use by another process"):
            _open(tmp_path)
        with pytest.raises(ValueError, match="holds a run already"):
            committed_rounds.CommittedRounds.create(tmp_path, _SCHEMA, _START, {})


def test_opening_removes_what_a_killed_process_left_unfinished(tmp_path, monkeypatch):
    _run(tmp_path, num_rounds=1)

    def killed(*args):
        raise _Crash

    with monkeypatch.context() as patch:
        patch.setattr(durable_files.os, "replace", killed)
        patch.setattr(pathlib.Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(_Crash):
            _run(tmp_path, num_rounds=2)
    assert [path.name.startswith(".") for path in _checkpoints(tmp_path)] == [True, False]
    with _open(tmp_path):
        assert [path.name.startswith(".") for path in _checkpoints(tmp_path)] == [False]


def test_the_folder_is_for_the_owner_only(tmp_path):
    _run(tmp_path / "run", num_rounds=1)
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
