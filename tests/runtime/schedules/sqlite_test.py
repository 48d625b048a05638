"""Some schedules on a store on disk, which keeps the same laws as the one in memory."""

import sys

import pytest

from tff_dpftrl.runtime.schedules import simulation
from tff_dpftrl.runtime.store import memory, sql


def test_schedules_are_the_same_on_disk_and_in_memory(tmp_path):
    for seed in range(5):
        with sql.SqlStore(tmp_path / f"{seed}") as store:
            on_disk = simulation.Simulation(seed, store=store)
            on_disk.run()
        in_memory = simulation.Simulation(seed, store=memory.MemoryStore())
        in_memory.run()
        assert not on_disk.watch.broken
        assert on_disk.watch.seen == in_memory.watch.seen
        assert on_disk.time == in_memory.time


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
