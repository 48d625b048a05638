"""Tests of DP-FTRL's plan: what is derived, claimed, stated and resumed."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tff_dpftrl.accounting import facts, guarantee, statement_text
from tff_dpftrl.mechanisms import blt, dense, identity, serialization, table, tree, workload
from tff_dpftrl.participation import cohorts, observed, schema
from tff_dpftrl.runs import mechanism_plan, privacy, simulated_run

_PRIVACY = privacy.DpFtrl(
    num_rounds=12,
    clients_per_round=5,
    clip_norm=0.5,
    delta=1e-6,
    mechanism="tree",
    noise_multiplier=3.0,
    min_sep=4,
)


def _plan(num_clients=40, num_parameters=1000, **changes) -> mechanism_plan.MechanismPlan:
    return dataclasses.replace(_PRIVACY, **changes).plan(num_clients, num_parameters)


def _state(plan, seen, *, charge_all_rounds=False, **told):
    return plan.statement(seen, facts.Facts(**told), charge_all_rounds=charge_all_rounds)


_SEEN = observed.ObservedParticipation(8, 4, 2, {2: 1})


def test_the_schema_is_the_one_asked_for_or_the_largest_that_fits():
    assert _plan().declared == schema.MinSep(12, 4, 3)
    assert _plan(min_sep=None).declared == schema.MinSep(12, 8, 2)
    assert _plan(max_participations=1).declared == schema.MinSep(12, 4, 1)
    assert _plan(num_clients=5000, min_sep=None).declared == schema.MinSep(12, 12, 1)
    with pytest.raises(ValueError, match="clients_per_round=5 exceeds the 4 training users"):
        _plan(num_clients=4)


def test_the_cohorts_keep_the_schema():
    plan = _plan()
    sampler = plan.sampler(seed=1)
    counter = observed.ParticipationCounter(plan.num_clients)
    for t in range(12):
        counter.add(np.asarray(sampler.cohort(t)))
    assert isinstance(sampler, cohorts.MinSepSampler)
    assert not plan.declared.breaches(
        num_rounds=counter.observed.num_rounds,
        min_sep=counter.observed.min_sep,
        max_participations=counter.observed.max_participations,
    )


@pytest.mark.parametrize(
    ("num_clients", "clients_per_round", "num_rounds"),
    # Among them: a turn of 6.8 rounds, which fits 7 times into the stride's bound and is run 6.
    [(40, 5, 12), (13, 5, 20), (34, 5, 41), (9, 5, 30), (60, 7, 50), (7, 7, 5), (50, 3, 16)],
)
def test_without_a_stride_the_schema_is_what_the_schedule_does(
    num_clients, clients_per_round, num_rounds
):
    plan = _plan(
        num_clients, min_sep=None, clients_per_round=clients_per_round, num_rounds=num_rounds
    )
    counter = observed.ParticipationCounter(num_clients)
    for t in range(num_rounds):
        counter.add(np.asarray(plan.sampler(seed=3).cohort(t)))
    assert counter.observed.max_participations == plan.declared.max_participations
    assert counter.observed.min_sep in (plan.declared.min_sep, None)


def test_devices_that_keep_to_a_stride_may_come_as_often_as_it_allows():
    fleet = simulated_run.Deployment(population=340, report_goal=50)
    plan = _plan(34, num_rounds=41, min_sep=None, deployment=fleet)
    assert plan.simulated.participation.declared == plan.declared == schema.MinSep(41, 6, 7)


def test_epsilon_is_that_of_the_strategy_and_never_falls():
    plan = _plan()
    spent = [plan.epsilon_after(t) for t in range(13)]
    whole = guarantee.dp_ftrl_guarantee(
        tree.Tree(12), noise_multiplier=3.0, schema=schema.MinSep(12, 4, 3), delta=1e-6
    )
    assert spent[0] == 0.0 and spent == sorted(spent)
    assert spent[12] == whole.epsilon


def test_a_target_is_kept_and_nearly_used_up():
    plan = _plan(noise_multiplier=None, target_epsilon=4.0)
    assert 3.99 < plan.epsilon_after(12) <= 4.0


@pytest.mark.parametrize(
    "changes, promised",
    [({}, True), ({"noise_multiplier": 0.0}, False), ({"deterministic_seed": 3}, False)],
)
def test_no_guarantee_without_secret_noise(changes, promised):
    plan = _plan(**changes)
    assert plan.has_guarantee == promised
    assert (plan.epsilon_after(12) is None) != promised
    statement = _state(plan, _SEEN)
    assert statement.has_guarantee == promised
    assert (statement.epsilon is None) != promised


def test_the_statement_names_the_strategy_that_ran(tmp_path):
    serialization.save(tmp_path / "strategy.json", tree.Tree(12))
    # The default name of a config, while another strategy comes from a file.
    plan = _plan(mechanism="blt", strategy_file=str(tmp_path / "strategy.json"))
    assert _state(plan, _SEEN).mechanism == "tree"
    assert "Noise: tree, z = 3." in plan.describe()
    restarted = _plan(starts=(0, 6))
    assert _state(restarted, _SEEN).mechanism == restarted.strategy.name != "tree"
    assert _state(_plan(mechanism=None, noise_multiplier=None), _SEEN).mechanism == "none"


def test_the_statement_is_of_what_was_observed_unless_the_data_decided_when_to_stop():
    plan = _plan()
    spent, whole = _state(plan, _SEEN), _state(plan, _SEEN, charge_all_rounds=True)
    assert spent.accounted == schema.MinSep(8, 4, 2)
    assert whole.accounted == whole.declared == schema.MinSep(12, 4, 3)
    assert spent.epsilon < whole.epsilon == plan.epsilon_after(12)
    assert spent.parameters["num_users"] == 40 and spent.parameters["clip_norm"] == 0.5


def test_adaptive_clipping_is_stated_and_its_clip_norm_is_no_bound():
    adaptive = _state(_plan(adaptive_clipping=True), _SEEN)
    assert adaptive.adjacency != _state(_plan(), _SEEN).adjacency
    assert "clip_norm" not in adaptive.parameters
    assert adaptive.parameters["initial_clip_norm"] == 0.5


def test_no_clip_norm_is_stated_where_nothing_is_clipped():
    unclipped = _state(_plan(mechanism=None, noise_multiplier=None), _SEEN)
    assert "clip_norm" not in unclipped.parameters


def test_a_broken_promise_is_no_guarantee():
    assert not _state(_plan(), observed.ObservedParticipation(8, 3, 2, {2: 1})).has_guarantee


def test_the_budget_guard_counts_what_was_observed():
    plan = _plan()
    guard = plan.budget_guard(_state(plan, _SEEN).epsilon)
    assert guard(_SEEN) is None
    assert "above max_epsilon" in guard(observed.ObservedParticipation(9, 4, 3, {3: 1}))
    assert plan.budget_guard(None) is None


@pytest.mark.parametrize("changes", [{}, {"starts": (0, 6)}, {"secagg_bits": 16}])
def test_a_resumed_plan_is_the_same(changes):
    privacy = dataclasses.replace(_PRIVACY, mechanism="blt", **changes)
    plan = privacy.plan(40, 1000)
    derived = json.loads(json.dumps(plan.derived()))
    assert privacy.resumed(40, 1000, derived) == plan


def test_options_reach_the_mechanism():
    plan = _plan(mechanism="blt", options=table.Options(buffers=1))
    assert plan.strategy.num_buffers == 1
    assert isinstance(plan.strategy, blt.Blt)


@pytest.mark.parametrize(
    "options, is_said",
    [
        ({"adaptive_clipping": True}, True),
        ({"adaptive_clipping": True, "starts": (0, 4)}, False),
        ({}, False),
    ],
)
def test_a_clip_norm_that_cannot_adapt_is_said(options, is_said):
    said = " ".join(_plan(mechanism="tree", **options).describe())
    assert ("Warning: no restart lies within 12 rounds" in said) == is_said


def test_noise_to_signal_is_that_of_the_sum_of_all_rounds():
    # Independent noise of 12 rounds and 400 weights against 12 cohorts of 5.
    plan = _plan(mechanism="identity", num_parameters=400)
    assert plan.noise_to_signal(400) == pytest.approx(3.0 * math.sqrt(12 * 400) / (12 * 5))
    draws = np.random.default_rng(0).normal(size=[12, 400])
    for mechanism in ("identity", "blt", "tree"):
        plan = _plan(mechanism=mechanism, min_sep=1)
        strategy = identity.Identity() if mechanism == "identity" else plan.strategy
        matrix = strategy.noise_matrix(12)
        draws = np.random.default_rng(0).normal(size=[matrix.shape[1], 400])
        noise = np.linalg.norm(np.sum(3.0 * matrix @ draws, axis=0))
        # The norm of 400 Gaussians is within six standard errors, 6 / sqrt(2 · 400).
        assert plan.noise_to_signal(400) == pytest.approx(noise / 60, rel=6 / math.sqrt(800))
    assert _plan(mechanism=None, noise_multiplier=None).noise_to_signal(400) == 0.0


def test_noise_to_signal_is_as_much_larger_as_the_encoding_makes_the_noise():
    plain = _plan(mechanism="identity", num_parameters=400)
    encoded = _plan(mechanism="identity", num_parameters=400, secagg_bits=12)
    inflation = encoded.noise.encoding.inflation
    assert inflation > 1.0
    assert encoded.noise_to_signal(400) == pytest.approx(inflation * plain.noise_to_signal(400))


def test_a_plan_says_what_a_dense_strategy_costs(tmp_path):
    matrix = np.tril(np.full((12, 12), 0.2)) + np.eye(12)
    path = tmp_path / "dense.json"
    serialization.save(path, dense.Dense(matrix, rounds_at_once=3))
    plan = _plan(mechanism=None, strategy_file=str(path))
    said = " ".join(plan.describe())
    assert "takes the draws of 2.5 rounds" in said  # (3 + 6 + 9 + 12) / 12.
    assert "keeps 3 copies of the model" in said
    halves = _plan(mechanism=None, strategy_file=str(path), starts=(0, 6))
    assert "takes the draws of 1.5 rounds" in " ".join(halves.describe())
    assert "takes the draws" not in " ".join(_plan().describe())


def test_a_plan_describes_itself():
    once, thrice = _plan(max_participations=1).describe()[0], _plan().describe()[0]
    assert once == "Participation: each of 40 users at most 1 time in 12 rounds, 4 apart (stride)."
    assert "at most 3 times in 12 rounds" in thrice


def test_check_refuses_what_a_plan_would(tmp_path):
    _PRIVACY.check(40)
    with pytest.raises(ValueError, match="largest feasible min_sep"):
        _PRIVACY.check(19)
    with pytest.raises(ValueError, match="nowhere.json"):
        dataclasses.replace(_PRIVACY, strategy_file=str(tmp_path / "nowhere.json")).check(40)


def test_a_strategy_for_fewer_rounds_is_refused(tmp_path):
    serialization.save(tmp_path / "strategy.json", tree.Tree(3))
    with pytest.raises(ValueError, match="at most 3 rounds"):
        _plan(strategy_file=str(tmp_path / "strategy.json"))


def test_what_the_noise_keeps_is_known_and_said():
    assert _plan().memory_copies == 4  # The levels of a tree over 12 rounds.
    assert _plan(mechanism=None, noise_multiplier=None).memory_copies == 0
    assert "the noise keeps no copies of" in " ".join(_plan(mechanism="tree-vanilla").describe())
    two_bands = _plan(mechanism="bandtoep", options=table.Options(bands=2))
    assert "the noise keeps 1 copy of" in " ".join(two_bands.describe())
    banded = _plan(mechanism="bandtoep")
    assert banded.memory_copies == 3
    assert "the noise keeps 3 copies" in " ".join(banded.describe())


@pytest.mark.parametrize(
    "num_clients, changes, message",
    [
        (4, {}, "exceeds the 4 training users"),
        (40, {"min_sep": 9, "num_rounds": 100}, "largest feasible min_sep is 8"),
        (40, {"max_participations": 1, "num_rounds": 100}, "max_participations=1 is impossible"),
        (40, {"mechanism": None, "strategy_file": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_what_the_population_cannot_keep_is_refused_at_once(num_clients, changes, message):
    asked = dataclasses.replace(_PRIVACY, clients_per_round=5, **changes)
    with pytest.raises(ValueError, match=message):
        asked.check(num_clients)
    dataclasses.replace(_PRIVACY, clients_per_round=5).check(40)


def test_what_nobody_should_quote_epsilon_without_stands_under_the_headline():
    statement = _state(_plan(), _SEEN, headline_caveats=("Not the vocabulary.",))
    assert statement.headline_caveats[-1] == "Not the vocabulary."
    headline = statement_text.markdown(statement).partition("## Guarantee")[2].partition("## ")[0]
    assert "**Not the vocabulary.**" in headline
    assert "sentences in bold below belong to it" in statement_text.plain(statement)[2]


def test_a_workload_decides_the_strategy_of_a_new_run_and_nothing_else(monkeypatch):
    made = workload.UpdateRule(momentum=0.9).workload(12)
    asked = dataclasses.replace(
        _PRIVACY,
        mechanism="bandtoep",
        options=table.Options(workload=made),
        noise_multiplier=None,
        target_epsilon=8.0,
    )
    plan = asked.plan(40, 1000)
    assert plan.strategy == table.build("bandtoep", plan.declared, table.Options(workload=made))
    claimed = guarantee.dp_ftrl_guarantee(
        plan.strategy, noise_multiplier=plan.noise_multiplier, schema=plan.declared, delta=1e-6
    )
    assert plan.epsilon_after(12) == claimed.epsilon <= 8.0
    # Noise of the last model over what updates of the clip norm would make of it.
    weights = made.matrix()[-1]
    noise = np.linalg.norm(weights @ plan.strategy.noise_matrix(12)) * plan.noise_multiplier
    assert plan.noise_to_signal(1) == pytest.approx(noise / (weights.sum() * 5))
    assert plan.describe()[1].endswith("Optimised for momentum 0.9.")

    # A run that goes on has the strategy on record.
    def build(*args, **kwargs):
        raise AssertionError("nothing is to be optimised anew")

    monkeypatch.setattr(table, "build", build)
    other = dataclasses.replace(asked, options=table.DEFAULTS)
    for resumed in (asked, other):
        kept = resumed.resumed(40, 1000, json.loads(json.dumps(plan.derived())))
        assert kept.strategy == plan.strategy and kept.epsilon_after(12) == plan.epsilon_after(12)
