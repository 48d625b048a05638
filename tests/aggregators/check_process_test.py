"""Tests that nothing a client tells the server goes unnamed."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_dpftrl
from tff_dpftrl import aggregators, execution
from tff_dpftrl.aggregators import check_process as check_process_lib
from tff_dpftrl.aggregators import dp_ftrl, release_registry
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import blt, identity, tree
from tff_dpftrl.private_round import clipping, fixed_clip, seeds

LeakKind = check_process_lib.LeakKind
check_process = tff_dpftrl.check_process

_TYPE = tff.TensorType(np.float32, [3])
_BLT = blt.Blt((0.99, 0.8), (0.05, 0.2))


def _ours(noise_multiplier=1.0, **options):
    return aggregators.build_dp_ftrl_aggregator(
        _BLT,
        noise_multiplier=noise_multiplier,
        clip_norm=1.0,
        clients_per_round=4,
        **options,
    )


def _adaptive():
    return aggregators.build_adaptive_dp_ftrl_aggregator(
        _BLT,
        noise_multiplier=1.0,
        clients_per_round=100,
        clipping=aggregators.AdaptiveClipping(only_estimates=True),
    )


def _leaks(process):
    """Kinds and paths of the leaks."""
    return [(leak.kind, path) for leak in check_process(process).leaks for path in leak.paths]


@pytest.mark.parametrize("factory", [_ours(), _adaptive()], ids=["fixed", "adaptive"])
def test_a_private_aggregator_is_clean(factory):
    check = check_process(factory.create(_TYPE))
    assert check.leaks == ()
    assert [release.noise_multiplier for release in check.releases] == [1.0]
    check.raise_if_any()


def test_an_aggregator_that_is_built_again_has_the_same_release():
    strategy = tree.Tree(8)  # Its noise has loops, whose functions TensorFlow numbers.
    factory = aggregators.build_dp_ftrl_aggregator(
        strategy, noise_multiplier=1.0, clip_norm=1.0, clients_per_round=4
    )
    one, other = (
        check_process_lib.check_process(factory.create(tff.TensorType(np.float32, [3]))).releases
        for _ in range(2)
    )
    assert one == other


def test_other_aggregators_are_not():
    assert _leaks(tff.aggregators.SumFactory().create(_TYPE)) == [(LeakKind.EXACT, "result")]
    leaks = _leaks(tff.aggregators.UnweightedMeanFactory().create(_TYPE))
    assert leaks == [(LeakKind.EXACT, "result"), (LeakKind.COHORT_SIZE, "result")]
    weighted = tff.aggregators.MeanFactory().create(_TYPE, tff.TensorType(np.float32))
    leaks = check_process(weighted).leaks
    assert [leak.paths for leak in leaks] == [("result",)] * 2  # The weights' sum is one of them.
    assert tff.TensorType(np.float32) in [leak.value_type for leak in leaks]


@pytest.mark.parametrize(
    "intrinsic, dtype, send",
    [
        ("federated_mean", np.float32, tff.federated_mean),
        ("federated_weighted_mean", np.float32, lambda v: tff.federated_mean(v, weight=v)),
        ("federated_min", np.int32, tff.federated_min),
        ("federated_max", np.int32, tff.federated_max),
        ("federated_secure_sum", np.int32, lambda v: tff.federated_secure_sum(v, 8)),
        (
            "federated_secure_sum_bitwidth",
            np.int32,
            lambda v: tff.federated_secure_sum_bitwidth(v, 8),
        ),
        (
            "federated_aggregate",
            np.float32,
            lambda v: tff.aggregators.federated_sample(v),
        ),
    ],
)
def test_every_way_to_the_server_is_seen(intrinsic, dtype, send):
    @tff.federated_computation(tff.FederatedType(dtype, tff.CLIENTS))
    def compute(value):
        return send(value)

    (leak,) = check_process(compute).leaks
    assert leak.kind is LeakKind.EXACT
    assert leak.paths == ("result",)
    assert leak.how == intrinsic


def test_keys_of_a_selection_are_seen():
    @tff.tensorflow.computation(np.float32, np.int32)
    def pick(value, key):
        return value + tf.cast(key, tf.float32)

    @tff.federated_computation(
        tff.FederatedType(tff.TensorType(np.int32, [2]), tff.CLIENTS),
        tff.FederatedType(np.float32, tff.SERVER),
    )
    def compute(keys, value):
        max_key = tff.federated_value(np.int32(5), tff.SERVER)
        return tff.federated_select(keys, max_key, value, pick)

    (leak,) = check_process(compute).leaks
    assert leak.kind is LeakKind.NOT_KEPT
    assert leak.how == "federated_select"


def test_what_no_output_depends_on_is_named_too():
    @tff.tensorflow.computation(np.float32)
    def forget(value):
        del value
        return np.float32(1)

    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def compute(value):
        return tff.federated_map(forget, tff.federated_sum(value))

    check = check_process(compute)
    (leak,) = check.leaks
    assert (leak.kind, leak.paths) == (LeakKind.NOT_KEPT, ())
    with pytest.raises(ValueError, match="no output"):
        check.raise_if_any(allow=["result"])
    check.raise_if_any(allow=[""])


def test_counting_clients_is_told_apart_from_their_data():
    @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
    def compute(value):
        del value
        return tff.federated_sum(tff.federated_value(np.int32(1), tff.CLIENTS))

    assert _leaks(compute) == [(LeakKind.COHORT_SIZE, "result")]


@pytest.mark.parametrize(
    "options, reason",
    [({"noise_multiplier": 0.0}, "noise_multiplier is 0"), ({"deterministic_seed": 1}, "seed")],
)
def test_releases_that_protect_nobody_are_named(options, reason):
    # The private one of the same configuration is built before and after: each stays itself.
    before = _ours().create(_TYPE)
    (leak,) = check_process(_ours(**options).create(_TYPE)).leaks
    assert (leak.kind, leak.paths) == (LeakKind.NOT_PRIVATE, ("result",))
    assert reason in leak.remedy
    assert check_process(before).leaks == check_process(_ours().create(_TYPE)).leaks == ()


class _WithoutNoise(fixed_clip.FixedClipRound):
    def release(self, state, totals):
        average = [tensor / self.clients_per_round for tensor in totals.update]
        return state._replace(round_index=state.round_index + 1), average, {}


class _WithoutClipping(fixed_clip.FixedClipRound):
    def clip_client(self, tensors, broadcast, weight=None):
        tensors = [tf.cast(tensor, tf.float64) for tensor in tensors]
        return fixed_clip.interface.Contribution(tensors), tf.constant(True)


class _StrategyOfAnother(type(tff_dpftrl.Identity())):
    pass


def _with_replaced_method():
    private_round = _fixed_clip_round()
    private_round.clip_client = _fixed_clip_round(_WithoutClipping).clip_client
    return private_round


def _fixed_clip_round(kind=fixed_clip.FixedClipRound, strategy=None):
    return kind(
        strategy or tff_dpftrl.Identity(),
        noise_multiplier=1.5,
        clipping=clipping.FlatClipping(2.0),
        clients_per_round=5.0,
    )


@pytest.mark.parametrize(
    "private_round",
    [
        _fixed_clip_round(_WithoutNoise),
        _fixed_clip_round(_WithoutClipping),
        _fixed_clip_round(strategy=_StrategyOfAnother()),
        _with_replaced_method(),
    ],
    ids=["no noise", "no clipping", "strategy", "method"],
)
def test_rounds_with_code_of_others_are_not_vouched_for(private_round):
    """They inherit a guarantee, but may do anything."""
    factory = dp_ftrl.DPFTRLFactory(private_round)
    check = check_process(factory.create(_TYPE))
    assert not check.releases
    assert any(leak.paths == ("result",) for leak in check.leaks), str(check)


def test_an_exact_count_beside_the_release_is_a_metric():
    process = _ours(report_non_finite_clients=True).create(_TYPE)
    assert _leaks(process) == [(LeakKind.METRICS, "measurements.non_finite_clients")]


class _SumThatKeeps(tff.aggregators.UnweightedAggregationFactory):
    """A sum that also measures, or keeps in its state, what it is given."""

    contribution_norm = 1.0

    def __init__(self, keeps: bool):
        self._keeps = keeps

    def create(self, value_type):
        keeps = self._keeps
        zeros = np.zeros(value_type.shape, value_type.dtype)

        @tff.federated_computation
        def initialize():
            return tff.federated_value(zeros, tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            total = tff.federated_sum(value)
            return tff.templates.MeasuredProcessOutput(
                state=total if keeps else state,
                result=total,
                measurements=state if keeps else total,
            )

        return tff.templates.AggregationProcess(initialize, next_fn)


@pytest.mark.parametrize(
    "keeps, kind, path",
    [(True, LeakKind.EXACT, "state"), (False, LeakKind.METRICS, "measurements")],
)
def test_an_inner_sum_that_shows_the_sum_is_found(keeps, kind, path):
    process = _ours(sum_factory=_SumThatKeeps(keeps)).create(_TYPE)
    ((found_kind, found_path),) = _leaks(process)
    assert found_kind is kind
    assert found_path.startswith(path)


def test_other_clients_values_are_followed_through_the_clipping():
    # Every client takes off the exact mean of all before it is clipped: the release of such
    # a sum is not one client's affair any more.
    inner = _ours().create(_TYPE)

    @tff.tensorflow.computation(_TYPE, _TYPE)
    def subtract(value, mean):
        return value - mean

    @tff.federated_computation(
        inner.initialize.type_signature.result, tff.FederatedType(_TYPE, tff.CLIENTS)
    )
    def next_fn(state, value):
        mean = tff.federated_broadcast(tff.federated_mean(value))
        return inner.next(state, tff.federated_map(subtract, (value, mean)))

    leaks = _leaks(tff.templates.AggregationProcess(inner.initialize, next_fn))
    assert (LeakKind.OTHER_NOISE, "result") in leaks


def test_noise_from_a_file_is_not_private(tmp_path):
    with seeds.reading(str(tmp_path / "bits")):
        process = _ours().create(_TYPE)
    (leak,) = check_process(process).leaks
    assert "comes from a file, and not from the operating system" in str(leak)
    assert not check_process(_ours().create(_TYPE)).leaks


def _clip_and_release():
    """A registered pair: values clipped to 1, and a sum plus noise."""

    @tff.tensorflow.computation(_TYPE)
    def clip(value):
        return tf.clip_by_norm(value, 1.0), tf.norm(value)

    @tff.tensorflow.computation(_TYPE)
    def release(total):
        return (total + tf.random.normal([3]),)

    @tff.tensorflow.computation(tff.StructType([_TYPE]))
    def release_of_struct(totals):
        return totals[0] + tf.random.normal([3])

    del release
    release_registry.register(
        clip=clip,
        contributions=[0],
        release=release_of_struct,
        totals=[0],
        noise_multiplier=1.0,
        deterministic_seed=None,
    )
    return clip, release_of_struct


@pytest.mark.parametrize(
    "misuse", ["none", "no release", "norm", "not clipped", "twice", "mixed", "more noise"]
)
def test_only_the_sum_of_the_clipped_counts_as_released(misuse):
    clip, release = _clip_and_release()

    @tff.tensorflow.computation(_TYPE)
    def add_noise(value):
        return value + tf.random.normal([3])

    @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
    def compute(value):
        clipped, norm = tff.federated_map(clip, value)
        total = tff.federated_sum(clipped)
        if misuse == "no release":
            return total
        if misuse == "more noise":
            return tff.federated_map(add_noise, total)
        if misuse == "norm":
            return tff.federated_sum(norm)
        if misuse == "not clipped":
            total = tff.federated_sum(value)
        if misuse == "mixed":
            other, _ = tff.federated_map(clip, clipped)
            both = tff.federated_map(_add(), tff.federated_zip((clipped, other)))
            total = tff.federated_sum(both)
        released = tff.federated_map(release, tff.federated_zip((total,)))
        if misuse == "twice":
            return released, tff.federated_map(release, tff.federated_zip((total,)))
        return released

    check = check_process(compute)
    if misuse == "none":
        assert check.leaks == ()
        assert len(check.releases) == 1
    else:
        assert check.leaks
        with pytest.raises(ValueError, match="other than through a private release"):
            check.raise_if_any(allow=["metrics", "measurements"])


def test_a_second_release_of_a_sum_cannot_be_allowed():
    clip, release = _clip_and_release()

    @tff.federated_computation(tff.FederatedType(_TYPE, tff.CLIENTS))
    def compute(value):
        total = tff.federated_zip((tff.federated_sum(tff.federated_map(clip, value)[0]),))
        return tff.federated_map(release, total), tff.federated_map(release, total)

    # It has no path of its own, but is not what "" stands for: unused by every output.
    with pytest.raises(ValueError, match="one sum of clipped values for two releases"):
        check_process(compute).raise_if_any(allow=[""])


def test_two_releases_from_one_state_are_named():
    # The guarantee has one of them.
    process = _ours().create(_TYPE)
    clients = tff.FederatedType(_TYPE, tff.CLIENTS)

    @tff.federated_computation(process.initialize.type_signature.result, clients, clients)
    def with_one_state(state, first, second):
        return process.next(state, first).result, process.next(state, second).result

    @tff.federated_computation([process.initialize.type_signature.result] * 2 + [clients] * 2)
    def with_two_states(state, other_state, first, second):
        return process.next(state, first).result, process.next(other_state, second).result

    (leak,) = check_process(with_one_state).leaks
    assert "two releases from the same state" in str(leak)
    with pytest.raises(ValueError, match="of which the accounting has one"):
        check_process(with_one_state).raise_if_any(allow=["", "metrics"])
    assert check_process(with_two_states).leaks == ()


def test_of_aggregators_that_run_the_same_computations_the_weakest_counts():
    class Doubled(tff.aggregators.SumFactory):
        contribution_norm = 2.0
        sum_dtype = np.float64

    # Noise of 2 on contributions of norm 2 or, with the same two computations, of norm 1.
    weak = _ours(1.0, sum_factory=Doubled()).create(_TYPE)
    strong = _ours(2.0).create(_TYPE)
    (release,) = check_process(weak).releases
    assert release.noise_multiplier == 1.0
    assert check_process(strong).leaks == ()


def _add():
    @tff.tensorflow.computation(_TYPE, _TYPE)
    def add(first, second):
        return first + second

    return add


@pytest.mark.parametrize(
    "factory",
    [
        tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, 4, 1.0),
        tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(1.0, 100),
        tff.aggregators.DifferentiallyPrivateFactory.tree_aggregation(
            1.0, 4, 1.0, tf.TensorSpec([3])
        ),
    ],
    ids=["gaussian", "adaptive", "tree"],
)
def test_noise_of_tffs_own_factories_is_not_vouched_for(factory):
    leaks = _leaks(factory.create(_TYPE))
    assert (LeakKind.OTHER_NOISE, "result") in leaks
    assert {kind for kind, _ in leaks} == {LeakKind.OTHER_NOISE}
    assert not check_process(factory.create(_TYPE)).releases


def test_secure_sums_are_clean_but_for_their_count():
    with execution.secure_sum_simulation():
        factory = aggregators.build_secagg_dp_ftrl_aggregator(
            identity.Identity(),
            noise_multiplier=1.0,
            clip_norm=1.0,
            clients_per_round=4,
            encoding=grid.for_bits(3, 5, 16),
        )
        process = factory.create(_TYPE)
    check = check_process(process)
    leaks = [(leak.kind, leak.paths) for leak in check.leaks]
    assert leaks == [(LeakKind.COHORT_SIZE, ("measurements.summed_clients",))]
    check.raise_if_any(allow=["measurements.summed_clients"])


def test_allowed_paths_allow_nothing_beside_them():
    process = _ours(report_non_finite_clients=True).create(_TYPE)
    check = check_process(process)
    check.raise_if_any(allow=["measurements"])
    check.raise_if_any(allow=["measurements.non_finite_clients"])
    for other in (["measurements.non_finite"], ["state"], ["result"], [""], []):
        with pytest.raises(ValueError, match="non_finite_clients"):
            check.raise_if_any(allow=other)


def test_paths_name_parts_as_wholes_only_where_all_of_them_are_meant():
    state_type = collections.OrderedDict(a=(np.float32, np.float32), b=(np.float32, np.float32))

    @tff.federated_computation(
        tff.FederatedType(state_type, tff.SERVER), tff.FederatedType(np.float32, tff.CLIENTS)
    )
    def compute(state, value):
        total = tff.federated_sum(value)
        parts = collections.OrderedDict(a=(total, total), b=(total, state.b[1]))
        return collections.OrderedDict(state=tff.federated_zip(parts))

    assert [path for _, path in _leaks(compute)] == ["state.a", "state.b[0]"]


def test_a_factory_is_no_process():
    with pytest.raises(ValueError, match="create returns"):
        check_process(_ours())


def test_a_finding_says_what_where_and_what_to_do():
    (leak,) = check_process(tff.aggregators.SumFactory().create(_TYPE)).leaks
    assert str(leak) == (
        "result: aggregated without noise (federated_sum of float32[3]). Pass one of this "
        "package's aggregators for it, or leave it out."
    )
    assert "1 leak(s)" in str(check_process(tff.aggregators.SumFactory().create(_TYPE)))
