"""Tests of workloads: against loops over rounds, and the noise of models against dense matrices."""

import ast
import inspect
import pathlib

import numpy as np
import pytest

import tff_dpftrl
from tests.mechanisms import examples
from tff_dpftrl.mechanisms import blt, certificate, identity, restarts, table, tree, workload
from tff_dpftrl.participation import schema as schema_lib

RULES = {
    "momentum": workload.UpdateRule(momentum=0.9),
    "rate before momentum": workload.UpdateRule(
        momentum=0.8, warmup_rounds=3, decay="cosine", rate_before_momentum=True
    ),
    "rate after momentum": workload.UpdateRule(momentum=0.8, warmup_rounds=3, decay="linear"),
    "average": workload.UpdateRule(averaging=0.7),
    "all": workload.UpdateRule(
        momentum=0.5,
        adam=True,
        warmup_rounds=2,
        decay="cosine",
        averaging=0.8,
        weight_decay=0.1,
        restarts=(5,),
    ),
}


def _models(rule: workload.UpdateRule, sums: np.ndarray) -> np.ndarray:
    """Runs the optimizer, as its papers write it, on one sum after the other."""
    num_rounds = len(sums)
    rates = rule.rates(num_rounds)
    velocity, model, average, step = 0.0, 0.0, 0.0, 0
    models = []
    for t, update in enumerate(sums):
        if t in rule.restarts:
            velocity, step = 0.0, 0
        step += 1
        before, after = (rates[t], 1.0) if rule.rate_before_momentum else (1.0, rates[t])
        if rule.adam:
            velocity = rule.momentum * velocity + (1 - rule.momentum) * before * update
            moved = velocity / (1 - rule.momentum**step)
        else:
            velocity = moved = rule.momentum * velocity + before * update
        model = model - rule.weight_decay * rates[t] * model + after * moved
        if rule.averaging is None:
            average = model
        else:
            share = (1 - rule.averaging) / (1 - rule.averaging ** (t + 1))
            average = average + share * (model - average)
        models.append(average)
    return np.array(models)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_workload_is_its_optimizer(rule):
    made = rule.workload(12)
    expected = np.column_stack([_models(rule, impulse) for impulse in np.eye(12)])
    np.testing.assert_allclose(made.matrix(), expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(made.apply_transposed(np.eye(12)), expected.T, rtol=1e-12)
    x = np.random.default_rng(0).normal(size=12)
    np.testing.assert_allclose(made.apply(x), expected @ x, rtol=1e-12)
    block = made.rounds(4, 9).matrix()
    np.testing.assert_allclose(block, expected[4:9, 4:9], rtol=1e-12, atol=1e-15)
    is_toeplitz = made.coefficients is not None
    assert is_toeplitz == (rule == RULES["momentum"])
    if is_toeplitz:
        np.testing.assert_allclose(made.coefficients, expected[:, 0], rtol=1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_block_goes_on_from_what_recurrences_kept(rule):
    made, x = rule.workload(12), np.random.default_rng(1).normal(size=12)
    state, models = np.zeros(len(made.recurrences)), []
    for start, stop in ((0, 4), (4, 5), (5, 12)):
        by_state, by_input, forward, inflow = made.responses(start, stop)
        models.append(by_state @ state + by_input @ x[start:stop])
        state = forward @ state + inflow @ x[start:stop]
    np.testing.assert_allclose(np.concatenate(models), made.apply(x), rtol=1e-11)


def test_plain_sgd_has_the_prefix_sums():
    assert workload.UpdateRule().workload(10) is None
    assert workload.parse("prefix").workload(10) is None
    assert workload.UpdateRule(rate_before_momentum=True).workload(10) is None


@pytest.mark.parametrize(
    "name",
    ["identity", "blt", "fhu", "bisr", "two-banded", "dense", "tree", "restarted blt"],
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_noise_of_models_is_that_of_dense_matrices(name, rule):
    strategy, made = examples.ALL[name], rule.workload(12)
    expected = np.sum(np.square(made.matrix() @ strategy.noise_matrix(12)), axis=1)
    found = strategy.model_noise_variance(12, made)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    schema = schema_lib.MinSep(12, 4, 3)
    claim = certificate.certify(strategy, schema, made)
    sums = certificate.certify(strategy, schema)
    assert claim.rms_error == pytest.approx(np.sqrt(expected.mean()))
    assert claim.max_loss == pytest.approx(claim.sensitivity * np.sqrt(expected.max()))
    # Privacy is C's alone.
    assert claim.sensitivity == sums.sensitivity
    np.testing.assert_array_equal(
        strategy.model_noise_variance(12, None), strategy.prefix_noise_variance(12)
    )


def test_long_runs_are_evaluated_in_pieces():
    made = RULES["average"].workload(600)
    strategy = blt.Blt((0.9,), (0.3,))
    dense_variance = np.sum(np.square(made.matrix() @ strategy.noise_matrix(600)), axis=1)
    found = strategy.model_noise_variance(600, made)
    np.testing.assert_allclose(found, dense_variance, rtol=1e-9)
    momentum = RULES["momentum"].workload(10**5)
    assert np.all(np.diff(strategy.model_noise_variance(10**5, momentum)) >= 0)


def test_sensitivity_and_accounting_know_no_workload():
    assert list(inspect.signature(identity.Identity.sensitivity).parameters) == ["self", "schema"]
    package = pathlib.Path(tff_dpftrl.__file__).parent
    sources = [
        *(package / "mechanisms" / "numerics").glob("*sensitivity.py"),
        *(package / "accounting").rglob("*.py"),
    ]
    planners = ("planner.py", "planner_request.py", "cyclic_optimize.py")  # They compare noise.
    assert len(sources) > 10
    for path in sources:
        tree_of_code = ast.walk(ast.parse(path.read_text()))
        names = {node.id for node in tree_of_code if isinstance(node, ast.Name)}
        assert path.name in planners or not any("workload" in name for name in names), path


def test_a_rule_is_read():
    assert workload.parse("momentum=0.9,warmup=5,decay=cosine,averaging=0.95") == (
        workload.UpdateRule(momentum=0.9, warmup_rounds=5, decay="cosine", averaging=0.95)
    )
    assert workload.parse("adam=0.8") == workload.UpdateRule(momentum=0.8, adam=True)
    assert workload.parse("decay=linear").description == "linear decay"
    text = workload.parse("adam=0.8,warmup=5,averaging=0.5").description
    assert text == (
        "Adam's momentum 0.8, its preconditioner as if constant, warm-up over 5 rounds, average "
        "of the models with decay 0.5"
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("auto", "cannot be read at 'auto': write prefix, or some of"),
        ("momentum=high", "cannot be read at 'momentum=high'"),
        ("warmup=5,warmup=6", "cannot be read at 'warmup=6'"),
        ("momentum=0.9,adam=0.9", "leave one of them out"),
        ("momentum=1", "momentum must be"),
        ("decay=quick", "decay must be none, linear or cosine"),
        ("averaging=1", "averaging must be"),
    ],
)
def test_mistakes_in_a_rule_are_explained(text, message):
    with pytest.raises(ValueError, match=message):
        workload.parse(text)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="warmup must be below the 10 rounds, got 10"):
        workload.UpdateRule(warmup_rounds=10).workload(10)
    made = RULES["momentum"].workload(10)
    with pytest.raises(ValueError, match="workload is for 10 rounds"):
        identity.Identity().max_error(12, made)
    with pytest.raises(ValueError, match="workload is for 10 rounds"):
        table.build("blt", schema_lib.MinSep(12, 4, 3), table.Options(workload=made))
    with pytest.raises(ValueError, match="at most 4096 rounds, got 5000"):
        tree.Tree(5000).max_error(5000, RULES["momentum"].workload(5000))
    with pytest.raises(ValueError, match="same number of rounds"):
        workload.Workload((workload.Recurrence((1.0,), (1.0, 1.0)),))
    with pytest.raises(ValueError, match="positive gains"):
        workload.Workload((workload.Recurrence((1.0,), (0.0,)),))


@pytest.mark.parametrize(
    "rule_name", ["momentum", "average", pytest.param("all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name, error",
    [
        pytest.param(name, error, marks=pytest.mark.slow if slow else ())
        for name in table.takers("workload")
        for error in ("max", "rms")
        for slow in [name == "bandinv" or (name == "bandmf" and error == "max")]
    ],
)
def test_an_optimum_beats_that_for_prefix_sums(name, error, rule_name):
    schema = schema_lib.MinSep(40, 8, 5)
    made = RULES[rule_name].workload(40)
    best = table.build(name, schema, table.Options(error, workload=made))
    for_sums = table.build(name, schema, table.Options(error))

    def loss(strategy):
        of_models = strategy.max_loss if error == "max" else strategy.rms_loss
        return of_models(schema, made)

    known_gain = (rule_name, error) == ("momentum", "rms")
    assert loss(best) <= loss(for_sums) * (0.97 if known_gain else 1 + 1e-9)


def test_all_bands_reach_the_least_loss_of_any_matrix():
    # Of one participation, by the fixed point of Denisov et al. 2022, theorem 3.2: the optimal
    # CᵀC is V^(-1/2) (V^(1/2) AᵀA V^(1/2))^(1/2) V^(-1/2), with V the diagonal of the root.
    schema, made = schema_lib.MinSep(24, 24, 1), RULES["rate after momentum"].workload(24)
    gram, v = made.matrix().T @ made.matrix(), np.ones(24)
    for _ in range(300):
        values, vectors = np.linalg.eigh(np.sqrt(np.outer(v, v)) * gram)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        v = np.diagonal(root).copy()
    product = root / np.sqrt(np.outer(v, v))
    np.testing.assert_allclose(np.diagonal(product), 1.0, rtol=1e-6)
    least = np.sqrt(np.trace(np.linalg.solve(product, gram)) / 24)
    found = table.build("bandmf", schema, table.Options(workload=made)).rms_loss(schema, made)
    toeplitz = table.build("bandtoep", schema, table.Options(workload=made))
    assert least * (1 - 1e-6) <= found <= least * 1.001
    assert found <= toeplitz.rms_loss(schema, made)


def test_blocks_between_restarts_have_their_own_workload():
    schema = schema_lib.MinSep(30, 5, 6)
    made = workload.UpdateRule(momentum=0.9, decay="cosine").workload(30)
    found = table.build("bandtoep", schema, table.Options(workload=made), starts=(0, 10))
    block = table.build(
        "bandtoep", schema_lib.MinSep(20, 5, 6), table.Options(workload=made.rounds(10, 30))
    )
    assert found == restarts.Restarted(block, (0, 10))
