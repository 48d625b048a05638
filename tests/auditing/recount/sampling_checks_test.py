"""Tests of the recount's check of secret sampling, on ledgers made for it."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

from tff_dpftrl.auditing.recount import records, sampling_checks
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.finetuning import example_sampling
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.participation import cohorts

_ROUNDS, _GROUP, _PROBABILITY = 30, 3, 0.1
_USERS = example_sampling.of_sizes(np.random.default_rng(0).integers(1, 6, 80))
_POOL = np.minimum(_USERS.num_examples, _GROUP).tolist()
_SEED, _PUBLIC_SEED = 2**255 + 12345, 7
_KINDS = ["dp-fedavg", plan_lib.USER, plan_lib.EXAMPLE]


def _samples(kind, seed=_SEED, probability=_PROBABILITY, step=lambda t: t):
    """The users of each round, by the code that trains."""
    options = {"sampling_probability": probability, "seed": seed}
    if kind == "dp-fedavg":
        sampler = cohorts.PoissonSampler(
            num_clients=len(_USERS), num_rounds=_ROUNDS, **options
        ).cohort
    else:
        made = {
            plan_lib.USER: example_sampling.UserSampling,
            plan_lib.EXAMPLE: example_sampling.ExampleSampling,
        }[kind](_USERS, group_size=_GROUP, num_steps=_ROUNDS, **options)

        def sampler(t):
            return made.batch(t).unit_users

    # A ledger numbers the clients by when they were asked first.
    numbers: dict[int, int] = {}
    return {
        t: sorted({numbers.setdefault(u, len(numbers)) for u in sampler(step(t)).tolist()})
        for t in range(_ROUNDS)
    }


def _found(kind, samples, *, has_seed=True, pool=_POOL):
    is_example = kind == plan_lib.EXAMPLE
    plan = {
        "sampling": kind,
        "num_units": sum(_POOL) if is_example else len(_USERS),
        "units_are_declared": False,
    }
    run = records.Records(
        folder=pathlib.Path("run"),
        public={
            "config": {},
            "derived": {"sampling_probability": 0.1} if kind == "dp-fedavg" else {"plan": plan},
            "facts": {"training_users": len(_USERS)},
        },
        manifest=None,
        ledger=records.Ledger(
            declared=(_ROUNDS, 1, _ROUNDS),
            initial_checkpoint="",
            rounds={t: ("", None, "") for t in samples},
            commits={},
            asked={t: users for t, users in samples.items() if users},
            dropped={},
            clients={},
        ),
        **dict.fromkeys(["checkpoint", "statement", "statement_text", "metrics"]),
        unreadable=(),
        cohort_seed=_SEED if has_seed else None,
        pool=pool if is_example else None,
    )
    terms = terms_lib.Terms(
        kind=terms_lib.SAMPLED,
        noise_multiplier=1.0,
        delta=1e-5,
        strategy=None,
        probability=_PROBABILITY,
        group_size=_GROUP if is_example else 1,
        other_epsilon=0.0,
        num_rounds=_ROUNDS,
        is_secret=True,
    )
    return sampling_checks.sampling("sampling", run, terms)


_PLANTED = {
    "the same sample in every step": {"step": lambda t: 0},
    "the same sample in two steps that follow each other": {"step": lambda t: t // 2},
    "twice the probability": {"probability": 2 * _PROBABILITY},
    "samples from the public seed": {"seed": _PUBLIC_SEED},
}


@pytest.mark.parametrize("kind", _KINDS)
def test_what_the_secret_seed_draws_is_consistent(kind):
    found = _found(kind, _samples(kind))
    assert (found.outcome, found.error_rate) == ("consistent", 0.0), found.says


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("fault", _PLANTED)
def test_a_fault_of_sampling_is_seen_by_drawing_again(kind, fault):
    found = _found(kind, _samples(kind, **_PLANTED[fault]))
    assert found.outcome == "violated" and "secret seed" in found.says


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("fault", list(_PLANTED)[:3])
def test_most_faults_are_seen_without_the_secret(kind, fault):
    found = _found(kind, _samples(kind, **_PLANTED[fault]), has_seed=False)
    assert found.outcome == "violated" and "chance" in found.says


@pytest.mark.parametrize("kind", _KINDS)
def test_samples_by_chance_are_consistent_without_the_secret(kind):
    outcomes = [_found(kind, _samples(kind, seed), has_seed=False) for seed in range(200)]
    assert {found.outcome for found in outcomes} == {"consistent"}
    assert {found.error_rate for found in outcomes} == {1e-3}
    if kind == plan_lib.EXAMPLE:  # Without the sizes of the pool the seed is of no use.
        found = _found(kind, _samples(kind), pool=None)
        assert (found.outcome, found.error_rate) == ("consistent", 1e-3)


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        ([*_POOL[:-1], _GROUP + 1], "above the group size"),
        (_POOL[:-1], "the pool is of 79 users, of 80"),
        ([1] * 80, "the pool has 80 examples, and the plan"),
    ],
)
def test_a_pool_that_is_not_that_of_the_plan_is_named(pool, says):
    found = _found(plan_lib.EXAMPLE, _samples(plan_lib.EXAMPLE), pool=pool)
    assert found.outcome == "violated" and says in found.says


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
