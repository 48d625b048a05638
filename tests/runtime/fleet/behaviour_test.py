"""Tests of tff_dpftrl.runtime.fleet.behaviour and availability."""

from __future__ import annotations

import random

import pytest

from tff_dpftrl.runtime.fleet import availability, behaviour


def test_shares_are_as_asked_and_the_seed_decides():
    rates = behaviour.Rates(drop_outs=0.1, stragglers=0.3, straggler_s=4.0)

    def draw():
        generator = random.Random(3)
        return [rates.draw(generator, is_malicious=False) for _ in range(4_000)]

    drawn = draw()
    assert drawn == draw()
    # Six standard deviations of the binomial distribution.
    assert sum(d.drop_out is not None for d in drawn) == pytest.approx(400, abs=6 * 19)
    slow = [d.delay_s for d in drawn if d.delay_s]
    assert len(slow) == pytest.approx(1_200, abs=6 * 29)
    assert 2.0 <= min(slow) < 2.1 and 5.9 < max(slow) <= 6.0
    assert {d.drop_out for d in drawn} == {None, *behaviour.DropOut}
    assert {int(4 * d.drop_out_at) for d in drawn if d.drop_out} == set(range(4))
    assert {d.attack for d in drawn} == {None}


def test_malicious_devices_do_what_they_are_asked_to():
    rates = behaviour.Rates(malicious=1.0, attacks=(behaviour.Attack.NAN, behaviour.Attack.TOKEN))
    generator = random.Random(0)
    assert rates.draw_malicious(generator)
    drawn = {rates.draw(generator, is_malicious=True).attack for _ in range(50)}
    assert drawn == {behaviour.Attack.NAN, behaviour.Attack.TOKEN}
    assert not behaviour.Rates().draw_malicious(generator)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"drop_outs": 1.1}, "drop_outs"),
        ({"stragglers": -0.1}, "stragglers"),
        ({"straggler_s": float("nan")}, "straggler_s"),
        ({"malicious": 0.1, "attacks": ()}, "attacks must name"),
    ],
)
def test_bad_rates_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        behaviour.Rates(**changed)


def test_four_times_as_many_devices_are_there_at_night():
    now = [0.0]
    generator = random.Random(1)
    devices = [availability.Nightly(generator, clock=lambda: now[0]) for _ in range(2_000)]

    def available(hour, day_s=24 * 3600.0):
        now[0] = hour / 24 * day_s
        return sum(not device.unmet() for device in devices)

    night, noon = available(26), available(14)
    assert night > 0.7 * len(devices)
    assert night > 4 * noon
    assert devices[0].unmet() in ((), ("charging",))
