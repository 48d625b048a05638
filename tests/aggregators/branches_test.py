"""A round reads fresh bits once, in every engine: what it keeps is what it has released.

An engine that split or copied a graph could read them twice, and go on with other noise.
"""

import contextlib
import math

import numpy as np
import pytest

pytest.importorskip("tensorflow_federated", reason="runs processes of TFF")

import tensorflow_federated as tff

import tff_dpftrl
from tff_dpftrl import execution
from tff_dpftrl.auditing.evidence import worst_pattern
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import blt, restarts, tree
from tff_dpftrl.private_round import adaptive_clipping

_DIM, _ROUNDS = 20_000, 4
_TYPE = tff.TensorType(np.float32, [_DIM])
_CLIENTS, _COUNT_STDDEV = 4, 1.0
_COMMON = {"noise_multiplier": 1.0, "clients_per_round": _CLIENTS}
_BLT = blt.Blt((0.9, 0.4), (0.3, 0.2))
_RESTARTED = restarts.Restarted(_BLT, (0, 2))
_CLIPPING = adaptive_clipping.AdaptiveClipping(1.0, clipped_count_stddev=_COUNT_STDDEV)
_PLAIN = {"clip_norm": 1.0}
_SECURE = {**_PLAIN, "encoding": grid.for_bits(_DIM, _CLIENTS, 20)}

# The strategy, and what builds the aggregator of it.
_CASES = {
    "past draws": (_BLT, tff_dpftrl.build_dp_ftrl_aggregator, _PLAIN),
    "past seeds": (
        tree.Tree(_ROUNDS, variance_reduction=False),
        tff_dpftrl.build_dp_ftrl_aggregator,
        _PLAIN,
    ),
    "adaptive": (_RESTARTED, tff_dpftrl.build_adaptive_dp_ftrl_aggregator, {"clipping": _CLIPPING}),
    "secure sums": (_BLT, tff_dpftrl.build_secagg_dp_ftrl_aggregator, _SECURE),
}


def _process(aggregator):
    """A process of two results, which can be compiled."""
    inner = aggregator.create(_TYPE)

    @tff.federated_computation(
        inner.initialize.type_signature.result, tff.FederatedType(_TYPE, tff.CLIENTS)
    )
    def next_fn(state, value):
        output = inner.next(state, value)
        return output.state, tff.federated_zip((output.result, output.measurements))

    return tff.templates.IterativeProcess(inner.initialize, next_fn)


def _next(process, state):
    """Runs a round of zeros; returns the state after it, its unit noise and measurements."""
    state, (released, measured) = process.next(state, [np.zeros(_DIM, np.float32)])
    unit = np.asarray(released, np.float64) * (_CLIENTS / measured["noise_stddev"])
    return state, unit, measured


@pytest.mark.parametrize("compiles", [False, True], ids=["executor", "compiled"])
@pytest.mark.parametrize("name", _CASES)
def test_later_noise_fits_what_was_released_and_branches_have_other_noise(name, compiles):
    strategy, build, options = _CASES[name]
    is_secure = name == "secure sums"
    with execution.secure_sum_simulation() if is_secure else contextlib.nullcontext():
        process = _process(build(strategy, **_COMMON, **options))
        if compiles:
            process = execution.compile_process(process)
        state, noise, branches = process.initialize(), [], []
        for _ in range(_ROUNDS):
            _, other, _ = _next(process, state)
            state, one, measured = _next(process, state)
            if name == "adaptive" and not noise:
                counted = (measured["unclipped_fraction"] - 0.5) * _CLIENTS / _COUNT_STDDEV
                np.testing.assert_allclose(state.count_buffer[:, 0], [counted] * 2, rtol=1e-5)
                assert state.clip.estimate == measured["estimated_clip_norm"]
            noise.append(one)
            branches.append(other - one)
    factor = np.linalg.cholesky(worst_pattern.noise_covariance(strategy, _ROUNDS))
    draws, branches = np.linalg.solve(factor, noise), np.array(branches)
    # A branch differs by the round's new draw: √2 of it, and nothing of the draws before it.
    branches /= math.sqrt(2.0) * np.diag(factor)[:, np.newaxis]
    size = 5.0 * math.sqrt(2.0 / _DIM)
    np.testing.assert_allclose(draws @ draws.T / _DIM, np.eye(_ROUNDS), atol=size)
    np.testing.assert_allclose(branches @ branches.T / _DIM, np.eye(_ROUNDS), atol=size)
    earlier = np.tril(branches @ draws.T / _DIM, -1)
    np.testing.assert_allclose(earlier, 0.0, atol=size)
