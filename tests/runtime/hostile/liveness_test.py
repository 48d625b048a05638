"""After a fault has gone, rounds are released again, also with few devices that have to rest."""

from __future__ import annotations

import threading

import pytest

from tests.runtime.fleet import fleets, text_service
from tff_dpftrl.runtime.fleet import behaviour
from tff_dpftrl.runtime.store import interface
from verification import memory_store


class _FullDisk(memory_store.MemoryStore):
    """A store that takes no commit while its disk is full."""

    def __init__(self):
        super().__init__()
        self.is_full = threading.Event()
        self.refused = 0

    def commit(self, *args, **keywords):
        if self.is_full.is_set():
            self.refused += 1
            raise interface.StoreError("Cannot write to the store: the disk is full.")
        return super().commit(*args, **keywords)


@pytest.mark.slow
def test_few_devices_that_often_drop_out(tmp_path):
    """24 devices of which two in five drop out: attempts fail, and rounds are released."""
    served = text_service.Served(
        tmp_path,
        min_sep=2,
        goal_count=8,
        over_selection=1.3,
        least_fraction=0.8,
        selection_timeout=1.0,
    )
    rates = behaviour.Rates(drop_outs=0.4, stragglers=0.0)

    def until(counts):
        """Whether four rounds were released and an attempt failed, whichever came first."""
        released = len(served.released())
        return released >= 4 and len(served.rows()) > released

    with served.running() as address:
        made = fleets.of(tmp_path, address, num_devices=24, rates=rates)
        fleets.run(made, rounds=1000, until=until)
    released = served.released()
    assert len(released) >= 4
    # The rest are failed attempts. At least one round in three fails by chance.
    assert len(served.rows()) > len(released)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_uses_up_one_cohort(tmp_path):
    """As many devices as two rounds choose, with least separation 2: none can be spared."""
    store = _FullDisk()
    served = text_service.Served(
        tmp_path,
        store=store,
        min_sep=2,
        goal_count=8,
        over_selection=1.3,
        least_fraction=0.8,
        selection_timeout=1.0,
    )

    def until(counts):
        if len(served.released()) >= 2 and not store.refused:
            store.is_full.set()
        if store.refused >= 4:  # One attempt, and the round that it used up.
            store.is_full.clear()
        return store.refused >= 4 and len(served.released()) >= 5

    with served.running() as address:
        made = fleets.of(tmp_path, address, num_devices=22)
        fleets.run(made, rounds=1000, until=until)
    rows = served.rows()
    assert len(served.released()) >= 5
    assert sum(bool(row.get("skipped")) for row in rows) >= 1
    assert [row["round"] for row in rows] == list(range(len(rows)))
