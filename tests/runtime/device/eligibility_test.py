"""Tests of tff_dpftrl.runtime.device.eligibility, on a made-up machine."""

from __future__ import annotations

import math

import pytest

from tff_dpftrl.runtime.device import eligibility


class _Machine:
    """A tree of /sys and /proc, and the clocks of a process."""

    def __init__(self, root):
        self.root = root
        self.now = self.processor_s = 0.0
        (root / "proc").mkdir()
        self.set_load("0.00")

    def set_load(self, load):
        (self.root / "proc/loadavg").write_text(f"{load} 0.50 0.60 1/100 4711\n")

    def set_supply(self, name, **values):
        folder = self.root / "sys/class/power_supply" / name
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in values.items():
            (folder / key).write_text(f"{value}\n")

    def eligibility(self, **options):
        return eligibility.LinuxEligibility(
            root=self.root,
            clock=lambda: self.now,
            processor_s=lambda: self.processor_s,
            **{"num_cores": 4, **options},
        )


@pytest.fixture(name="machine")
def _machine(tmp_path):
    return _Machine(tmp_path)


def test_what_is_set_is_what_is_unmet():
    settable = eligibility.SettableEligibility()
    assert settable.unmet() == ()
    settable.charging = False
    assert settable.unmet() == ("charging",)
    settable.idle = settable.unmetered = False
    assert settable.unmet() == ("idle", "charging", "unmetered")


def test_a_desktop_without_batteries_is_always_on_power(machine):
    assert machine.eligibility().unmet() == ()
    machine.set_supply("AC", type="Mains", online=0)
    assert machine.eligibility().unmet() == ()
    machine.set_supply("mouse", type="Battery", scope="Device", status="Discharging")
    assert machine.eligibility().unmet() == ()


@pytest.mark.parametrize(
    ("online", "statuses", "charging"),
    [
        (1, ["Charging"], True),
        (1, ["Full"], True),
        (1, ["Not charging"], True),
        (1, ["Unknown"], True),
        (1, ["Discharging"], False),  # The supply is too weak.
        (0, ["Discharging"], False),
        (0, ["Unknown"], False),
        (0, ["Charging"], True),  # Some supplies have no entry of their own.
        (1, ["Full", "Discharging"], False),
        (0, ["Full", "Full"], True),
    ],
)
def test_a_battery_may_not_be_drained(machine, online, statuses, charging):
    machine.set_supply("AC", type="Mains", online=online)
    for number, status in enumerate(statuses):
        machine.set_supply(f"BAT{number}", type="Battery", scope="System", status=status)
    assert machine.eligibility().unmet() == (() if charging else ("charging",))


def test_a_ups_on_its_battery_is_no_power(machine):
    machine.set_supply("ups", type="UPS", status="Discharging")
    assert machine.eligibility().unmet() == ("charging",)


def test_a_battery_that_says_nothing_is_not_trusted(machine):
    machine.set_supply("BAT0", type="Battery")
    assert machine.eligibility().unmet() == ("charging",)
    machine.set_supply("usb", type="USB", online=1)
    assert machine.eligibility().unmet() == ()


@pytest.mark.parametrize(("load", "idle"), [("2.00", True), ("2.01", False), ("64.0", False)])
def test_a_machine_in_use_is_not_idle(machine, load, idle):
    machine.set_load(load)
    assert machine.eligibility().unmet() == (() if idle else ("idle",))
    assert machine.eligibility(max_load_per_core=20.0).unmet() == ()


@pytest.mark.parametrize("content", ["", "much", "\n"])
def test_a_load_that_cannot_be_read_is_not_idle(machine, content):
    (machine.root / "proc/loadavg").write_text(content)
    assert machine.eligibility().unmet() == ("idle",)
    (machine.root / "proc/loadavg").unlink()
    assert machine.eligibility().unmet() == ("idle",)


def test_its_own_training_does_not_make_the_machine_busy(machine):
    watch = machine.eligibility()
    kernel = 0.0
    for _ in range(60):
        # Training on four cores, polled every 5 s: the kernel's average rises to 4.
        machine.now += 5.0
        machine.processor_s += 20.0
        kernel = 4.0 + (kernel - 4.0) * math.exp(-5.0 / 60.0)
        machine.set_load(f"{kernel:.2f}")
        assert watch.unmet() == ()
    assert kernel > 3.9
    # Somebody begins to use two and a half cores: noticed within three minutes.
    others, seconds = 0.0, 0
    while watch.unmet() == ():
        seconds += 5
        machine.now += 5.0
        machine.processor_s += 20.0
        others = 2.5 + (others - 2.5) * math.exp(-5.0 / 60.0)
        machine.set_load(f"{4.0 + others:.2f}")
    assert 30 < seconds < 180


def test_the_owner_says_what_the_network_costs(machine):
    assert machine.eligibility(is_unmetered=False).unmet() == ("unmetered",)


def test_this_very_machine_can_be_read():
    known = {"idle", "charging", "unmetered"}
    assert set(eligibility.LinuxEligibility(is_unmetered=False).unmet()) <= known
    busy = eligibility.LinuxEligibility(max_load_per_core=1e9)
    assert "idle" not in busy.unmet()


@pytest.mark.parametrize(
    ("options", "name"),
    [({"max_load_per_core": 0}, "max_load_per_core"), ({"num_cores": 0}, "num")],
)
def test_bad_arguments_are_named(machine, options, name):
    with pytest.raises(ValueError, match=name):
        machine.eligibility(**options)
