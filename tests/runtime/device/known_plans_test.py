"""Kept plans are those of their hash and population, and few."""

from __future__ import annotations

import hashlib
import os

import pytest

from tff_dpftrl.runtime.device import known_plans


def _name(content, population="tests"):
    return population, hashlib.sha256(content).digest()


def _add(known, content):
    known.add(*_name(content), content)


def _kept(known, *contents):
    return [content for content in contents if known.get(*_name(content)) == content]


@pytest.fixture(name="folder")
def _folder(tmp_path):
    return tmp_path / "plans"


def test_a_plan_is_found_again_by_another_process(folder):
    _add(known_plans.PlanFolder(folder), b"one")
    assert _kept(known_plans.PlanFolder(folder), b"one", b"two") == [b"one"]
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_the_server_of_another_population_does_not_learn_of_a_plan(folder, kind):
    known = known_plans.PlanFolder(folder) if kind == "folder" else known_plans.MemoryPlans()
    _add(known, b"one")
    assert known.get(*_name(b"one", "other")) is None
    assert known.get(*_name(b"one")) == b"one"


@pytest.mark.parametrize("sha256", [b"", bytes(5000), b"../../one"])
def test_a_hash_of_a_hostile_server_names_no_other_file(folder, sha256):
    known = known_plans.PlanFolder(folder)
    assert known.get("tests", sha256) is None
    known.add("tests", sha256, b"one")
    assert known.get("tests", sha256) == b"one"
    (file,) = folder.iterdir()
    assert len(file.name) == 64 + len(".plan")


def test_the_least_recently_used_plan_goes_first(folder):
    known = known_plans.PlanFolder(folder, most_plans=3)
    for second, content in enumerate([b"one", b"two", b"three"]):
        before = set(folder.iterdir())
        _add(known, content)
        (file,) = set(folder.iterdir()) - before
        os.utime(file, (second, second))
    assert _kept(known, b"one") == [b"one"]  # Now the newest one.
    _add(known, b"four")
    assert _kept(known, b"one", b"two", b"three", b"four") == [b"one", b"three", b"four"]


def test_the_size_of_all_plans_is_bounded(folder):
    known = known_plans.PlanFolder(folder, most_bytes=100)
    for i in range(9):
        _add(known, bytes([i]) * 30)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 100
    _add(known, bytes(101))
    assert _kept(known, bytes([8]) * 30, bytes(101)) == [bytes([8]) * 30]


def test_what_a_killed_process_left_is_removed(folder):
    _add(known_plans.PlanFolder(folder), b"one")
    unfinished = folder / ".0123456789abcdef.unfinished"
    unfinished.write_bytes(b"half a pl")
    assert _kept(known_plans.PlanFolder(folder), b"one") == [b"one"]
    assert not unfinished.exists()


def test_a_disk_that_fails_costs_a_download_only(folder):
    known = known_plans.PlanFolder(folder)
    _add(known, b"one")
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()  # A file cannot take its place.
    _add(known, b"one")
    assert _kept(known, b"one") == []


def test_devices_in_one_process_share_contents_and_not_knowledge():
    shared = {}
    one, other = known_plans.MemoryPlans(shared, most_plans=2), known_plans.MemoryPlans(shared)
    _add(one, b"one")
    assert _kept(one, b"one") == [b"one"]
    assert _kept(other, b"one") == []
    _add(other, bytes(bytearray(b"one")))
    assert other.get(*_name(b"one")) is one.get(*_name(b"one"))
    _add(one, b"two")
    assert _kept(one, b"one") == [b"one"]
    _add(one, b"three")
    assert _kept(one, b"one", b"two", b"three") == [b"one", b"three"]


def test_a_device_forgets_the_contents_that_are_its_own():
    known = known_plans.MemoryPlans(most_plans=2)
    for content in (b"one", b"two", b"three"):
        _add(known, content)
    assert sorted(known._contents.values()) == [b"three", b"two"]
