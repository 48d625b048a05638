"""A store whose file a disk has changed: it is read as it was written, or refused in one line."""

import collections
import contextlib
import random
import shutil

import pytest

from tff_dpftrl.runtime.store import interface, sql

_POPULATIONS = {"keyboard": ("nwp", "nwp-evaluation"), "speech": ("words",)}
_ROUNDS = 20


def _write(folder, size):
    """Writes a store with rounds under two leases; its log is in its file when it is closed."""
    draw = random.Random(size)
    with sql.SqlStore(folder) as store:
        for population, tasks in _POPULATIONS.items():
            epoch = 0
            for task in tasks:
                store.add_task(population, task, model=b"0" * size, state=b"1" * size)
            for t in range(_ROUNDS):
                if t % 15 == 0:
                    owner = f"{population} {t}"
                    epoch = store.acquire(population, owner, now=t, duration=15.0).epoch
                for task in tasks:
                    store.commit(
                        population,
                        task,
                        round_index=t,
                        epoch=epoch,
                        model=draw.randbytes(size),
                        state=draw.randbytes(2 * size),
                        metrics={"loss": draw.random(), "counts": [draw.randrange(99)] * 30},
                        now=1.7e9 + 60.3 * t,
                    )


def _read(folder):
    """All that a store says."""
    with sql.SqlStore(folder) as store:
        return {
            population: (
                store.lease(population),
                [
                    (task, store.last_commit(population, task), store.history(population, task))
                    for task in store.tasks(population)
                ],
            )
            for population in _POPULATIONS
        }


def _go_on(folder):
    """Commits a round of each task, as the next server would."""
    with sql.SqlStore(folder) as store:
        for population, tasks in _POPULATIONS.items():
            lease = store.acquire(population, "next", now=1e9, duration=15.0)
            for task in tasks:
                store.commit(
                    population,
                    task,
                    round_index=_ROUNDS,
                    epoch=lease.epoch,
                    model=b"next",
                    state=b"next",
                    metrics={},
                    now=2e9,
                )


def _corrupt(content, draw):
    """Changes a bit, some bytes, or a sector, at a random place."""
    content = bytearray(content)
    kind = draw.choice(("bit", "bytes", "zeros", "elsewhere"))
    length = {"bit": 1, "bytes": draw.choice((1, 1, 4, 40)), "zeros": draw.choice((1, 512, 4096))}
    length = length.get(kind, 512)
    # What is next to the beginning of a page matters more than the rest of it.
    at = draw.randrange(len(content) - length)
    if draw.random() < 0.3:
        at = at // 4096 * 4096 + draw.randrange(120)
    if kind in ("zeros", "elsewhere"):
        at = at // length * length
    at = min(at, len(content) - length)
    if kind == "bit":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "bytes":
        content[at : at + length] = draw.randbytes(length)
    elif kind == "zeros":
        content[at : at + length] = bytes(length)
    else:
        source = draw.randrange(len(content) // length) * length
        content[at : at + length] = content[source : source + length]
    return bytes(content)


def _corruptions(folder, size, count, seed):
    """What came of corruptions of a store with models of a size, by outcome."""
    original = folder / "original"
    _write(original, size)
    content = (original / "store.sqlite").read_bytes()
    expected = _read(original)
    outcomes = collections.Counter()
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        changed = folder / "changed"
        changed.mkdir()
        (changed / "store.sqlite").write_bytes(_corrupt(content, draw))
        try:
            found = _read(changed)
        except interface.StoreError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
        else:
            assert found == expected, f"number {number}"
            outcomes["harmless"] += 1
            with contextlib.suppress(interface.StoreError):  # Such as of a file that says that it
                _go_on(changed)  # may only be read.
        shutil.rmtree(changed)
    return outcomes


@pytest.mark.parametrize(
    ("size", "count"),
    [(300, 40), *(pytest.param(size, 100, marks=pytest.mark.slow) for size in (300, 60_000))],
)
def test_a_corrupted_file_is_read_as_it_was_or_refused(tmp_path, size, count):
    outcomes = _corruptions(tmp_path, size, count, seed=0)
    assert outcomes["refused"] > count / 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 300, 3_000, 60_000])
def test_many_corrupted_files_are_read_as_they_were_or_refused(tmp_path, size):
    outcomes = _corruptions(tmp_path, size, 1_000, seed=1)
    assert outcomes["refused"] > 500
