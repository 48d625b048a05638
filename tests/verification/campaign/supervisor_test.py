"""Servers are killed, stopped and cut off, and keep all laws; servers with a mistake do not."""

import asyncio
import json
import types

import pytest

from tests.verification.campaign import toy_evidence
from verification.campaign import checks, faults, servers, stage, supervisor, tiny_tasks

Kind = faults.Kind
A_FEW = (
    (Kind.RAISE, "MasterAggregator: PartialSum: before"),
    (Kind.RAISE, "SecureAggregator: SecureSumMessage 2: after"),
    (Kind.CUT, "Aggregator: Report: before"),
    (Kind.KILL, "Store: commit: inside"),
)
PAST_THE_LEASE = (
    (Kind.STOP, "ServerStep: apply: after"),
    (Kind.STOP, "StoreActor: CommitRound: before"),
    (Kind.STOP, "MasterAggregator: PartialSum: after"),
)
_LEASE_SECONDS = tiny_tasks.served_population(tiny_tasks.served_tasks()).lease_seconds
# A server that is killed cannot try again with the same result.
AFTER_THE_NOISE = ((Kind.KILL, "StoreActor: CommitRound: before"),) * 4


def _numbers_of(settings):
    """Numbers of faults with such settings; no two are the same fault."""
    known = faults.all_settings()
    return [known.index(setting) + i * len(known) for i, setting in enumerate(settings)]


def _shortest_of(settings):
    """Numbers of faults with such settings that stop a server for little more than its lease."""
    known, numbers = faults.all_settings(), []
    for setting in settings:
        drawn = [
            faults.draw(number, lease_seconds=_LEASE_SECONDS)
            for number in range(known.index(setting), 60 * len(known), len(known))
        ]
        fitting = [fault for fault in drawn if 1.3 < fault.hold / _LEASE_SECONDS and not fault.skip]
        numbers.append(min(fitting, key=lambda fault: fault.hold).number)
    return numbers


def _run(folder, num_faults, *, numbers=None, options=(), seed=0, **made):
    place = stage.Stage(folder)
    place.make(seed, **made)
    lines = []
    left = asyncio.run(
        supervisor.run(
            place,
            servers.Servers(place, options=options),
            num_faults=num_faults,
            seed=seed,
            numbers=numbers,
            progress=lines.append,
        )
    )
    print("\n".join(lines))
    return left


def _check(left, num_faults):
    verdict = checks.judge(checks.collect(left))
    assert not verdict.broken
    assert all(verdict.looked_at[law] for law in checks.Law)
    assert sum(outcome.has_struck for outcome in left.outcomes) == num_faults


@pytest.mark.slow
def test_a_few_faults_break_no_law(tmp_path):
    _check(_run(tmp_path, len(A_FEW), numbers=_numbers_of(A_FEW)), len(A_FEW))


@pytest.mark.slow
def test_faults_break_no_law_with_two_populations_in_one_server(tmp_path):
    left = _run(tmp_path, 10, seed=7, populations=tiny_tasks.TWO_POPULATIONS)
    _check(left, 10)


@pytest.mark.slow
def test_thirty_faults_break_no_law(tmp_path):
    _check(_run(tmp_path, 30, seed=7), 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, name, numbers, law",
    [
        ("--store", "CommitsUnderAnyEpoch", _shortest_of(PAST_THE_LEASE), checks.Law.FRESH_EPOCH),
        ("--actors", "ReleasesBeforeTheCommit", _numbers_of(AFTER_THE_NOISE), checks.Law.ONE_MODEL),
    ],
)
def test_a_server_with_a_mistake_is_found(tmp_path, option, name, numbers, law):
    options = (option, f"tests.verification.campaign.mistakes:{name}")
    left = _run(tmp_path, len(numbers), numbers=numbers, options=options)
    verdict = checks.judge(checks.collect(left))
    assert law in toy_evidence.broken(verdict)


@pytest.mark.slow
def test_ten_faults_break_no_law_on_two_nodes(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: run `make test-distributed`.")
    from verification.campaign import ray_servers

    place = stage.Stage(tmp_path)
    place.make(3)
    left = asyncio.run(
        supervisor.run(
            place,
            ray_servers.RayServers(place),
            num_faults=10,
            seed=3,
            start_seconds=ray_servers.START_SECONDS,
            has_nodes=True,
        )
    )
    _check(left, 10)


def test_epochs_of_different_populations_are_not_compared(tmp_path):
    place = stage.Stage(tmp_path)
    place.make(0, populations=tiny_tasks.TWO_POPULATIONS)
    made = servers.Servers(place)
    first, second = tiny_tasks.TWO_POPULATIONS
    process = types.SimpleNamespace(returncode=None)
    # What has come back has led under a larger epoch, of another population.
    for name, epochs in (("stale", {first: 4, second: 9}), ("leader", {second: 10, first: 5})):
        server = servers.Server(name, process, is_started=True, address=name)
        made._all.append(server)
        with open(place.events / f"{name}.jsonl", "w") as file:
            for population, epoch in epochs.items():
                event = {"kind": "leading", "epoch": epoch, "population": population}
                file.write(json.dumps(event) + "\n")
        made._read_events(server)
    assert [target() for target in made.targets] == ["leader"]


def test_numbers_that_follow_one_another_have_all_settings_in_turn():
    settings = faults.all_settings()
    assert len(set(settings)) > 250
    drawn = [faults.draw(number, lease_seconds=2.0) for number in range(len(settings) + 1)]
    assert {(fault.kind, fault.point) for fault in drawn[: len(settings)]} == set(settings)
    assert drawn[len(settings)].skip in range(6) and drawn[0].number == 0
    again = [faults.draw(fault.number, lease_seconds=2.0) for fault in drawn[:20]]
    assert drawn[:20] == again
    for fault in drawn:
        assert fault.is_of_a_start == (fault.point in faults.POINTS_OF_A_START)
        if fault.kind is Kind.STOP:
            assert fault.hold > 2.0
        if fault.kind is Kind.PAUSE:
            assert fault.hold < 2.0
    assert Kind.NODE not in {fault.kind for fault in drawn}
    assert (Kind.NODE, faults.SOME_MOMENT) in faults.all_settings(has_nodes=True)
