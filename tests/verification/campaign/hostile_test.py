"""Hostile devices are refused, cost their own rounds only, and break no law."""

import asyncio

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.store import postgresql
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.protocol import wire_pb2
from verification.campaign import (
    checks,
    devices,
    faults,
    hostile,
    servers,
    stage,
    supervisor,
    tiny_tasks,
)

server = postgresql.server
Kind = hostile.Kind
SETTING = devices.Setting((), b"", ed25519.Ed25519PrivateKey.generate(), 3)


def test_seeds_that_follow_one_another_have_all_kinds_in_turn():
    drawn = [hostile.draw(seed, 2) for seed in range(5)]
    assert {kind for kinds in drawn for kind in kinds.values()} == set(Kind)
    assert drawn == [hostile.draw(seed, 2) for seed in range(5)]
    assert all(len(kinds) == 2 and set(kinds) < set(range(16)) for kinds in drawn)
    assert set(hostile.draw(0, 5).values()) == set(Kind)
    assert not hostile.draw(0, 0)


def _device(kind):
    return hostile.HostileDevice(4, SETTING, lambda record: None, kind=kind)


@pytest.mark.parametrize("kind, is_usable", [(Kind.DUPLICATE, True), (Kind.HUGE, False)])
def test_no_sum_takes_a_vector_that_is_none_of_one_device(kind, is_usable):
    device, summation = _device(kind), tiny_tasks.VectorSum()
    device._shared.reports = 1
    for _ in range(30):
        vector = device._vector(tiny_tasks.SECURE)
        report = wire_pb2.Report(update=device._packed(vector))
        if is_usable:
            assert summation.accumulate(summation.zero(), report)[0] == 1
            assert np.array_equal(summation.decode_group(vector, 1)[2], vector[2])
            continue
        with pytest.raises(population.UnusableReport):
            summation.accumulate(summation.zero(), report)
        with pytest.raises(population.UnusableReport):
            summation.decode_group(vector, 1)


def _break_no_law(folder, num_faults, *, num_hostile, seed, store_url="", numbers=None):
    place = stage.Stage(folder)
    place.make(seed, store_url)
    left = asyncio.run(
        supervisor.run(
            place,
            servers.Servers(place),
            num_faults=num_faults,
            seed=seed,
            numbers=numbers,
            num_hostile=num_hostile,
        )
    )
    verdict = checks.judge(checks.collect(left))
    assert not verdict.broken
    assert all(verdict.looked_at[law] for law in checks.Law)
    assert len(left.hostile) == num_hostile


@pytest.mark.slow
def test_rounds_go_on_among_hostile_devices_of_all_kinds(tmp_path):
    number = faults.all_settings().index((faults.Kind.RAISE, "Aggregator: Report: before"))
    _break_no_law(tmp_path, 1, num_hostile=5, seed=0, numbers=[number])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ten_faults_among_hostile_devices_break_no_law_on_postgresql(tmp_path, server, seed):
    url = server.new_database()
    _break_no_law(tmp_path, 10, num_hostile=2, seed=100 * seed + seed, store_url=url)
