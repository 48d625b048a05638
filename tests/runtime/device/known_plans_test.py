"""Kept plans are those of their hash, few, and of no use to whoever alters them."""

from __future__ import annotations

import hashlib
import os
import sys

import pytest

from tff_dpftrl.runtime.device import known_plans


def _hash(content):
    return hashlib.sha256(content).digest()


def _file(folder, content):
    return folder / f"{_hash(content).hex()}.plan"


@pytest.fixture(name="folder")
def _folder(tmp_path):
    return tmp_path / "plans"


def test_a_plan_is_found_again_by_another_process(folder):
    known_plans.PlanFolder(folder).add(b"one")
    known = known_plans.PlanFolder(folder)
    assert known.get(_hash(b"one")) == b"one"
    assert known.get(_hash(b"two")) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert _file(folder, b"one").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damaged", [b"", b"on", b"onf", b"one and more"])
def test_a_damaged_plan_is_forgotten_and_kept_anew(folder, damaged):
    known = known_plans.PlanFolder(folder)
    known.add(b"one")
    _file(folder, b"one").write_bytes(damaged)
    assert known.get(_hash(b"one")) is None
    assert not _file(folder, b"one").exists()
    known.add(b"one")
    assert known.get(_hash(b"one")) == b"one"


def test_the_least_recently_used_plan_goes_first(folder):
    known = known_plans.PlanFolder(folder, most_plans=3)
    for second, content in enumerate([b"one", b"two", b"three"]):
        known.add(content)
        os.utime(_file(folder, content), (second, second))
    assert known.get(_hash(b"one")) == b"one"  # Now the newest one.
    known.add(b"four")
    left = [content for content in (b"one", b"two", b"three", b"four") if known.get(_hash(content))]
    assert left == [b"one", b"three", b"four"]


def test_the_size_of_all_plans_is_bounded(folder):
    known = known_plans.PlanFolder(folder, most_bytes=100)
    for i in range(9):
        known.add(bytes([i]) * 30)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 100
    assert known.get(_hash(bytes([8]) * 30))
    known.add(bytes(101))
    assert known.get(_hash(bytes(101))) is None
    assert known.get(_hash(bytes([8]) * 30))


def test_what_a_killed_process_left_is_removed(folder):
    known = known_plans.PlanFolder(folder)
    known.add(b"one")
    unfinished = folder / ".0123456789abcdef.unfinished"
    unfinished.write_bytes(b"half a pl")
    assert known_plans.PlanFolder(folder).get(_hash(b"one")) == b"one"
    assert not unfinished.exists()


def test_a_disk_that_fails_costs_a_download_only(folder):
    known = known_plans.PlanFolder(folder)
    _file(folder, b"one").mkdir()  # A file cannot take its place.
    known.add(b"one")
    assert known.get(_hash(b"one")) is None


def test_devices_in_one_process_share_contents_and_not_knowledge():
    shared = {}
    one, other = known_plans.MemoryPlans(shared, most_plans=2), known_plans.MemoryPlans(shared)
    one.add(b"one")
    assert one.get(_hash(b"one")) == b"one"
    assert other.get(_hash(b"one")) is None
    other.add(bytes(bytearray(b"one")))
    assert other.get(_hash(b"one")) is one.get(_hash(b"one"))
    one.add(b"two")
    one.get(_hash(b"one"))
    one.add(b"three")
    assert [one.get(_hash(c)) for c in (b"one", b"two", b"three")] == [b"one", None, b"three"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
