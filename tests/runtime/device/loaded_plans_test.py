"""Tests of tff_dpftrl.runtime.device.loaded_plans."""

from __future__ import annotations

import threading

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.plans import plain_plans
from tff_dpftrl.runtime.device import loaded_plans, session
from tff_dpftrl.runtime.plans import device_work, signing

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def _content(task):
    return signing.sign(plain_plans.plan(task=task), _KEY).SerializeToString()


@pytest.fixture(name="contents", scope="module")
def _contents():
    return [_content(f"task {i}") for i in range(3)]


@pytest.fixture(name="loads")
def _loads(monkeypatch):
    loads, load = [], device_work.load
    monkeypatch.setattr(device_work, "load", lambda *args: loads.append(1) or load(*args))
    return loads


def test_the_plans_used_last_are_kept(contents, loads):
    plans = loaded_plans.LoadedPlans([_KEY.public_key()], max_plans=2)
    one, two, three = contents
    first = plans.load(one)
    plans.load(two)
    assert plans.load(one) is first
    plans.load(three)  # In the place of the second.
    assert plans.load(one) is first and len(loads) == 3
    plans.load(two)
    assert len(loads) == 4


def test_a_refused_plan_is_not_kept(contents):
    plans = loaded_plans.LoadedPlans([ed25519.Ed25519PrivateKey.generate().public_key()])
    for _ in range(2):
        with pytest.raises(signing.PlanRefusedError, match="not trusted"):
            plans.load(contents[0])


def test_as_many_run_it_at_a_time_as_may(contents):
    plans = loaded_plans.LoadedPlans([_KEY.public_key()], max_running=2)
    plan = plans.load(contents[0])
    with plan.borrow(lambda: None) as one, plan.borrow(lambda: None) as two:
        assert one is not two
        for work in (one, two):
            total, _ = work.run(plain_plans.examples(1.0, 2.0), plain_plans.SCALE)
            assert total == 6.0

        def keep_going():
            raise session.Interrupted("no longer charging")

        with pytest.raises(session.Interrupted):
            with plan.borrow(keep_going):
                pass
        got = threading.Event()

        def borrow():
            with plan.borrow(lambda: None):
                got.set()

        thread = threading.Thread(target=borrow)
        thread.start()
        assert not got.wait(0.05)
    assert got.wait(20)
    thread.join()


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"keys": []}, "keys is empty"), ({"max_plans": 0}, "max_plans"), ({"max_running": 0}, "max")],
)
def test_bad_arguments_are_named(changed, name):
    with pytest.raises(ValueError, match=name):
        loaded_plans.LoadedPlans(**({"keys": [_KEY.public_key()]} | changed))
