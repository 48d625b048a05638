"""Tests of the recount's check of secret sampling, on ledgers made for it."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tff_dpftrl.auditing.recount import records, sampling_checks
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.finetuning import example_sampling
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.participation import cohorts
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.training import config as config_lib

_ROUNDS, _GROUP, _PROBABILITY = 30, 3, 0.1
_USERS = example_sampling.of_sizes(np.random.default_rng(0).integers(1, 6, 80))
_POOL = np.minimum(_USERS.num_examples, _GROUP).tolist()
_SEED, _PUBLIC_SEED = 2**255 + 12345, 7
_KINDS = ["dp-fedavg", plan_lib.USER, plan_lib.EXAMPLE]
_AMPLIFIED = {
    "cyclic": sampling_lib.CyclicPoisson(_ROUNDS, 4, 0.3),
    "bins": sampling_lib.BallsInBins(_ROUNDS, 8),
}


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

    return _recorded(lambda t: sampler(step(t)).tolist())


def _recorded(sample):
    """The users of each round, as the ledger of a run has them."""
    # A ledger numbers the clients by when they were asked first.
    numbers: dict[int, int] = {}
    return {
        t: sorted({numbers.setdefault(u, len(numbers)) for u in sample(t)}) for t in range(_ROUNDS)
    }


def _found(kind, samples, *, has_seed=True, pool=_POOL):
    is_example, amplified = kind == plan_lib.EXAMPLE, _AMPLIFIED.get(kind)
    plan = {
        "sampling": kind,
        "num_units": sum(_POOL) if is_example else len(_USERS),
        "units_are_declared": False,
    }
    run = records.Records(
        folder=pathlib.Path("run"),
        public={
            "config": {},
            "derived": {"plan": plan} if kind in (plan_lib.USER, plan_lib.EXAMPLE) else {},
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
        **dict.fromkeys(["checkpoint", "statement", "statement_text"]),
        **dict.fromkeys(["metrics", "published_metrics"]),
        unreadable=(),
        cohort_seed=_SEED if has_seed else None,
        pool=pool if is_example else None,
    )
    terms = terms_lib.Terms(
        kind=terms_lib.SAMPLED,
        noise_multiplier=1.0,
        delta=1e-5,
        strategy=None,
        probability=getattr(amplified, "sampling_probability", 1.0) if amplified else _PROBABILITY,
        sampling=amplified.to_dict() if amplified else None,
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


@pytest.mark.parametrize(
    "kind", [_KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in _KINDS[1:])]
)
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


def _amplified(kind, seed=_SEED, step=lambda t: t):
    sampler = _AMPLIFIED[kind].sampler(len(_USERS), seed)
    return _recorded(lambda t: sampler.cohort(step(t)).tolist())


@pytest.mark.parametrize("kind", _AMPLIFIED)
def test_samples_beside_correlated_noise_are_drawn_again(kind):
    found = _found(kind, _amplified(kind))
    assert (found.outcome, found.error_rate) == ("consistent", 0.0), found.says
    found = _found(kind, _amplified(kind, _PUBLIC_SEED))
    assert found.outcome == "violated" and "secret seed" in found.says


@pytest.mark.parametrize("has_seed", [True, False])
@pytest.mark.parametrize("kind", _AMPLIFIED)
def test_the_same_sample_in_every_round_and_groups_that_are_ignored_are_seen(kind, has_seed):
    same = _found(kind, _amplified(kind, step=lambda t: 0), has_seed=has_seed)
    share = _AMPLIFIED[kind].share_per_round
    ignored = _found(kind, _samples("dp-fedavg", probability=share), has_seed=has_seed)
    for found in (same, ignored):
        assert found.outcome == "violated" and "times a user came" in found.says


def test_the_same_sample_at_each_turn_of_a_group_is_seen_without_the_secret():
    found = _found("cyclic", _amplified("cyclic", step=lambda t: t % 4), has_seed=False)
    assert found.outcome == "violated" and "not by chance" in found.says


@pytest.mark.parametrize("kind", ["cyclic", "bins"])
def test_turns_by_chance_are_consistent_without_the_secret(kind):
    outcomes = {_found(kind, _amplified(kind, seed), has_seed=False).outcome for seed in range(100)}
    assert outcomes == {"consistent"}


@pytest.mark.parametrize("kind", ["bins", "cyclic"])
def test_the_noise_of_a_simulation_is_recounted_by_what_its_rounds_expect(kind, tmp_path):
    bands = {} if kind == "bins" else {"bands": 2, "min_sep": 2}
    config = config_lib.TrainingConfig.of(
        sampling=kind,
        mechanism="identity" if kind == "bins" else "bandtoep",
        noise_multiplier=2.0,
        num_rounds=24,
        clients_per_round=10,
        simulate_report_goal=40,
        simulate_population=990,
        **bands,
    )
    plan = config.request().plan(53, 10)
    facts = {"training_users": 53}
    public = {"config": config.to_dict(), "derived": plan.derived(), "facts": facts}
    run = records.Records(tmp_path, public, *[None] * 7, unreadable=())
    found = terms_lib.of(run)
    assert found.noise_multiplier == pytest.approx(plan.noise_multiplier, rel=1e-12)
    assert found.sampling == plan.sampling.to_dict()
