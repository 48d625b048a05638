"""Conformance checks for aggregation factories of private averages.

Call the checks on a custom factory through a function

    def make(noise_multiplier, clip_norm, clients_per_round):
        return MyFactory(...)

Each of `ALL_CHECKS` takes that function, under any test runner, and raises
AssertionError if the factory breaks the contract.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_dpftrl.execution import entropy
from tff_dpftrl.private_round import seeds


class MakeFactory(Protocol):
    """Builds the factory under test."""

    def __call__(
        self, noise_multiplier: float, clip_norm: float, clients_per_round: int
    ) -> tff.aggregators.UnweightedAggregationFactory:
        """Returns a factory with this noise, clip norm and denominator."""
        ...


_HUGE = 1e6
_NESTED = tff.to_type(
    collections.OrderedDict(
        matrix=tff.TensorType(np.float32, [2, 3]),
        rest=[tff.TensorType(np.float32), (tff.TensorType(np.float32, [4]),)],
    )
)


def _nested(value: float) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict(
        matrix=np.full([2, 3], value, np.float32),
        rest=[np.float32(value), (np.full([4], value, np.float32),)],
    )


def _run(process: tff.templates.AggregationProcess, cohorts: Sequence[list[Any]]) -> list[Any]:
    state, outputs = process.initialize(), []
    for cohort in cohorts:
        outputs.append(process.next(state, cohort))
        state = outputs[-1].state
    return outputs


@contextlib.contextmanager
def _same_bits() -> Iterator[None]:
    """Has processes that are created here read the same bits whenever they draw a seed."""
    bits = entropy.Repeated()
    with seeds.reading(bits.path):
        yield


def _flat(result: Any) -> np.ndarray:
    return np.concatenate(
        [np.ravel(tensor).astype(np.float64) for tensor in tf.nest.flatten(result)]
    )


def _check_refused(make: MakeFactory, value_type: tff.Type, what: str) -> None:
    try:
        make(1.0, 1.0, 2).create(value_type)
    except (ValueError, TypeError):
        return
    raise AssertionError(f"create must refuse {what}, but it accepted {value_type}.")


def check_type_signature(make: MakeFactory) -> None:
    """Checks that the process takes one update a client and returns an average of the same type."""
    factory = make(1.0, 1.0, 2)
    assert isinstance(factory, tff.aggregators.UnweightedAggregationFactory), type(factory)
    for value_type in (tff.TensorType(np.float32, [3]), _NESTED):
        process = factory.create(value_type)
        assert isinstance(process, tff.templates.AggregationProcess), type(process)
        signature = process.next.type_signature
        assert signature.parameter[1].is_equivalent_to(tff.FederatedType(value_type, tff.CLIENTS))
        assert signature.result.result.is_equivalent_to(tff.FederatedType(value_type, tff.SERVER))


def check_measurements_are_flat(make: MakeFactory) -> None:
    """Measurements are a dictionary of scalars, or nothing."""
    measured = make(1.0, 1.0, 2).create(_NESTED).next.type_signature.result.measurements.member
    for name, element in tff.structure.iter_elements(measured):
        assert name is not None, measured
        assert isinstance(element, tff.TensorType) and element.shape == (), (name, element)


def check_state_round_trip(make: MakeFactory) -> None:
    """Checks that a state saved as arrays goes on, in a new process, as if nothing had happened."""
    cohorts = [[_nested(0.1 * t)] for t in range(3)]
    with _same_bits():
        outputs = _run(make(1.0, 1.0, 2).create(_NESTED), cohorts)
        saved = tf.nest.map_structure(np.array, outputs[0].state)
        process = make(1.0, 1.0, 2).create(_NESTED)
        for expected, cohort in zip(outputs[1:], cohorts[1:], strict=True):
            output = process.next(saved, cohort)
            np.testing.assert_array_equal(_flat(output.result), _flat(expected.result))
            saved = tf.nest.map_structure(np.array, output.state)


def check_zero_noise_is_the_sum_over_the_fixed_denominator(make: MakeFactory) -> None:
    """Checks sum / clients_per_round without noise: full, short, single and empty cohorts."""
    process = make(0.0, _HUGE, 4).create(_NESTED)
    cohorts = [
        [_nested(value) for value in values]
        for values in ([1.0, 2.0, 3.0, 6.0], [1.0, 2.0], [5.0], [], [1.0] * 6)
    ]
    outputs = _run(process, cohorts)
    for output, total in zip(outputs, [12.0, 3.0, 5.0, 0.0, 6.0], strict=True):
        np.testing.assert_allclose(_flat(output.result), total / 4, rtol=1e-6)


def check_one_client_is_bounded(make: MakeFactory) -> None:
    """Checks that the whole update is clipped: a client moves the sum by at most the clip norm."""
    process = make(0.0, 2.0, 1).create(_NESTED)
    for value in (1.0, -1e3, 1e12):
        (output,) = _run(process, [[_nested(value)]])
        norm = np.linalg.norm(_flat(output.result))
        assert 2.0 * (1 - 1e-4) <= norm <= 2.0 * (1 + 1e-6), (value, norm)


def check_non_finite_clients_count_as_zero(make: MakeFactory) -> None:
    """Checks that NaN or Inf anywhere in an update removes that update and nothing else."""
    process = make(0.0, _HUGE, 2).create(_NESTED)
    for value in (np.nan, np.inf, -np.inf):
        broken = _nested(1.0)
        broken["matrix"][0, 0] = value
        (output,) = _run(process, [[_nested(3.0), broken]])
        np.testing.assert_allclose(_flat(output.result), 1.5, rtol=1e-6)


def check_a_client_that_sends_zeros_counts_as_none(make: MakeFactory) -> None:
    """Checks that a client of zeros is in nothing released: neither average nor measurements."""
    with _same_bits():
        process = make(1.0, 2.0, 2).create(_NESTED)
        state = process.initialize()
        without = process.next(state, [_nested(0.5)])
        zeroed = process.next(state, [_nested(0.5), _nested(0.0)])
    np.testing.assert_array_equal(_flat(zeroed.result), _flat(without.result))
    assert zeroed.measurements == without.measurements, (zeroed.measurements, without.measurements)


def check_sums_are_exact_enough(make: MakeFactory) -> None:
    """Checks that a client's part is not rounded away beside the others' sum, as in float32."""
    process = make(0.0, 1e9, 1).create(tff.TensorType(np.float32))
    (output,) = _run(process, [[np.float32(2**25), np.float32(1), np.float32(-(2**25))]])
    assert float(output.result) == 1.0, output.result


def check_noise(make: MakeFactory) -> None:
    """Checks the size of the first round's noise, in every tensor, even without clients."""
    size = 4000
    value_type = tff.to_type([(np.float32, [size]), (np.float32, [size // 2, 2])])
    (output,) = _run(make(0.5, 3.0, 2).create(value_type), [[]])
    for tensor in output.result:
        # Stddev 0.5 * 3 / 2; six standard errors, 6.7 %.
        assert abs(np.std(tensor) / 0.75 - 1) < 6 / np.sqrt(2 * size), np.std(tensor)


def check_noise_is_fresh(make: MakeFactory) -> None:
    """Checks that no two rounds, initialisations or tensors share their noise."""
    process = make(1.0, 1.0, 1).create(tff.to_type([(np.float32, [20]), (np.float32, [20])]))
    outputs = [output for _ in range(2) for output in _run(process, [[], []])]
    noise = np.stack([tensor for output in outputs for tensor in output.result])
    assert np.all(np.isfinite(noise)), noise
    for i in range(len(noise)):
        for j in range(i):
            assert np.mean(noise[i] == noise[j]) < 0.5, (i, j)


def check_a_round_executed_again_has_other_noise(make: MakeFactory) -> None:
    """Checks that what is released after a backup was restored has noise of its own."""
    process = make(1.0, 1.0, 1).create(tff.TensorType(np.float32, [20]))
    state = process.initialize()
    one, two = (process.next(state, []).result for _ in range(2))
    assert np.mean(one == two) < 0.5, (one, two)


def check_half_precision(make: MakeFactory) -> None:
    """Checks that float16 and bfloat16 updates are summed without losing small contributions."""
    value_type = tff.to_type([(np.float16, [1]), (tf.bfloat16.as_numpy_dtype, [1])])

    def update(value):
        return [tf.constant([value], tf.float16), tf.constant([value], tf.bfloat16)]

    process = make(0.0, _HUGE, 1).create(value_type)
    # 1/1024 is half a unit in the last place of 1 in float16, less in bfloat16.
    (output,) = _run(process, [[update(1.0)] + [update(1 / 2048)] * 64])
    for tensor in output.result:
        assert float(tensor[0]) == 1 + 64 / 2048, tensor


def check_unusable_types_are_refused(make: MakeFactory) -> None:
    """Checks that empty structures and integers are refused when the process is created."""
    _check_refused(make, tff.StructType([]), "a structure without tensors")
    _check_refused(make, tff.TensorType(np.int32, [2]), "integers")


ALL_CHECKS: tuple[Callable[[MakeFactory], None], ...] = (
    check_type_signature,
    check_measurements_are_flat,
    check_state_round_trip,
    check_zero_noise_is_the_sum_over_the_fixed_denominator,
    check_one_client_is_bounded,
    check_non_finite_clients_count_as_zero,
    check_a_client_that_sends_zeros_counts_as_none,
    check_sums_are_exact_enough,
    check_noise,
    check_noise_is_fresh,
    check_a_round_executed_again_has_other_noise,
    check_half_precision,
    check_unusable_types_are_refused,
)
"""Every check of this module."""
