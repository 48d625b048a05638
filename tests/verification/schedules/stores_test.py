"""Some schedules on stores in databases, which keep the same laws as the one in memory."""

import pytest

from tests.runtime.store import postgresql
from tff_dpftrl.runtime.store import sql
from verification import memory_store
from verification.schedules import simulation

server = postgresql.server


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_schedules_are_the_same_in_a_database_and_in_memory(request, tmp_path, kind):
    for seed in range(5):
        if kind == "sqlite":
            place = tmp_path / f"{seed}"
        else:
            place = request.getfixturevalue("server").new_database()
        with sql.SqlStore(place) as store:
            in_database = simulation.Simulation(seed, store=store)
            in_database.run()
        in_memory = simulation.Simulation(seed, store=memory_store.MemoryStore())
        in_memory.run()
        assert not in_database.watch.broken
        assert in_database.watch.seen == in_memory.watch.seen
        assert in_database.time == in_memory.time
