"""Tests what docs/how_to/migration.md says is the same before and after."""

import collections
import functools
import pathlib
import random
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

import tff_dpftrl
from tff_dpftrl.mechanisms import restarts

_PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "how_to" / "migration.md"
_SHAPES = collections.OrderedDict(weights=[3, 2], bias=[2])


def _aggregator(title, noise_multiplier):
    """What the example "before" or "after" builds."""
    (code,) = re.findall(rf"```python\n(# {title}\n.*?)```", _PAGE.read_text("utf-8"), re.DOTALL)
    code, count = re.subn(r"noise_multiplier=7.0", f"noise_multiplier={noise_multiplier}", code)
    assert count == 1
    record_specs = collections.OrderedDict(
        (name, tf.TensorSpec(shape, tf.float32)) for name, shape in _SHAPES.items()
    )
    names = {"tff": tff, "tff_dpftrl": tff_dpftrl, "record_specs": record_specs}
    exec(code, names)
    return names["aggregator"]


@functools.cache
def _results(title, noise_multiplier):
    return _run(_aggregator(title, noise_multiplier))


def _run(aggregator, num_rounds=3, scales=(0.01, 0.1, 0.5, 3.0)):
    """Aggregates of some rounds of clients, whose norms lie on both sides of 0.5."""
    value_type = tff.StructWithPythonType(
        [(name, tff.TensorType(np.float32, shape)) for name, shape in _SHAPES.items()],
        collections.OrderedDict,
    )
    process = aggregator.create(value_type)
    rng = np.random.default_rng(1)
    state, results = process.initialize(), []
    for _ in range(num_rounds):
        clients = [
            collections.OrderedDict(
                (name, (scale * rng.normal(size=shape)).astype(np.float32))
                for name, shape in _SHAPES.items()
            )
            for scale in scales
        ]
        output = process.next(state, clients)
        state = output.state
        results.append(np.concatenate([np.ravel(x) for x in output.result.values()]))
    return np.array(results)


def test_without_noise_both_examples_aggregate_the_same():
    before, after = (_results(title, 0.0) for title in ("before", "after"))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    assert np.all(np.abs(after).max(axis=1) > 1e-3)


def test_with_noise_both_examples_add_noise():
    for title in ("before", "after"):
        assert np.std(_results(title, 7.0) - _results(title, 0.0)) > 1e-3


@pytest.mark.slow
def test_a_client_that_is_not_finite_spoils_the_round_before_only():
    before, after = (
        _run(_aggregator(title, 0.0), num_rounds=1, scales=(0.1, np.nan))
        for title in ("before", "after")
    )
    assert np.all(np.isnan(before)) and np.all(np.isfinite(after))


def test_the_zcdp_of_a_tree_is_that_of_tensorflow_privacy():
    rng = random.Random(1)
    seen = set()
    for _ in range(40):  # Larger ones take TensorFlow Privacy minutes.
        n, gap, k = rng.randint(1, 64), rng.randint(0, 20), rng.randint(1, 4)
        claim = tff_dpftrl.dp_ftrl_guarantee(
            tff_dpftrl.Tree(n),
            noise_multiplier=3.0,
            schema=tff_dpftrl.MinSep.from_gap(n, gap, k),
            delta=1e-10,
        )
        theirs = tfp.compute_zcdp_single_tree(3.0, n, k, gap)
        assert claim.rho_zcdp == pytest.approx(theirs, rel=1e-12)
        assert tfp.compute_rdp_single_tree(3.0, n, k, gap, 5.0) == pytest.approx(
            5.0 * claim.rho_zcdp, rel=1e-12
        )
        seen.add(theirs)
    assert len(seen) > 10


@pytest.mark.parametrize("steps, epochs", [(128, 4), (100, 3), (7, 5)])
def test_restarted_trees_cost_what_tensorflow_privacy_says(steps, epochs):
    schema = tff_dpftrl.MinSep(steps * epochs, steps, epochs)
    starts = restarts.starts(schema.num_rounds, every=steps)
    claim = tff_dpftrl.dp_ftrl_guarantee(
        tff_dpftrl.build_strategy("tree", schema, starts=starts),
        noise_multiplier=3.0,
        schema=schema,
        delta=1e-10,
    )
    theirs = tfp.compute_rdp_tree_restart(3.0, [steps] * epochs, 2.0)
    assert 2.0 * claim.rho_zcdp == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("period, warmup", [(10, 3), (10, None), (1, None)])
def test_restarts_come_where_the_indicator_says(period, warmup):
    indicator = tfp.restart_query.PeriodicRoundRestartIndicator(period, warmup)
    state, starts = indicator.initialize(), [0]
    for t in range(35):
        restart, state = indicator.next(state)
        if restart:  # After round t.
            starts.append(t + 1)
    expected = restarts.starts(36, every=period, first=warmup)
    assert tuple(starts) == expected
