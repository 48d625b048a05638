"""Where clients work, and which engine can do it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tff_dpftrl.training import placement


@pytest.mark.parametrize(
    "options, engine",
    [
        ({"workers": ("localhost:1",)}, "tff"),
        ({"ray_workers": 2}, "compiled"),
        ({"ray_address": "localhost:1"}, "compiled"),
    ],
)
def test_only_one_engine_can_do_it(options, engine, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    placed = placement.Placement(**options)
    placed.check(engine)
    other = {"tff": "compiled", "compiled": "tff"}[engine]
    with pytest.raises(ValueError, match=f"need a run with engine '{engine}'.*has '{other}'"):
        placed.check(other)


def test_ray_has_to_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tff_dpftrl\[distributed\]'"):
        placement.Placement(ray_workers=1).check("compiled")


@pytest.mark.parametrize("engine", ["tff", "compiled"])
def test_this_process_does_for_both(engine):
    placement.Placement().check(engine)
    assert not placement.Placement().uses_ray


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ray_workers": 0}, "ray_workers must be at least 1"),
        ({"trust_network": True}, "trust_network has a meaning with workers only"),
        ({"workers": ("localhost:1",), "ray_workers": 1}, "workers or on Ray, not on both"),
        ({"workers": ("",)}, "'', which is not 'host:port'"),
        ({"workers": ()}, "must be a list of at least one"),
        ({"ray_address": "localhost:abc"}, "must be 'host:port' or 'auto', got 'localhost:abc'"),
        ({"workers": ("localhost",)}, "'localhost', which is not 'host:port'"),
        ({"workers": ("example.org:7000",)}, "another machine's.*--trust-network"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        placement.Placement(**options)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
