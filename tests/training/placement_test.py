"""Where clients work."""

from __future__ import annotations

import importlib.util

import pytest

from tff_dpftrl.training import placement


def test_ray_has_to_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tff_dpftrl\[distributed\]'"):
        placement.Placement(ray_workers=1).check()


def test_this_process_needs_nothing():
    placement.Placement().check()
    assert not placement.Placement().uses_ray


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ray_workers": 0}, "ray_workers must be at least 1"),
        ({"ray_address": "localhost:abc"}, "must be 'host:port' or 'auto', got 'localhost:abc'"),
        ({"ray_address": "localhost"}, "must be 'host:port' or 'auto', got 'localhost'"),
        ({"ray_address": ":6379"}, "must be 'host:port' or 'auto', got ':6379'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        placement.Placement(**options)
