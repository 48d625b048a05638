"""Factories and processes of TFF are audited, ours, TFF's and others'."""

import collections

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="audits aggregators of TFF")

import tensorflow_federated as tff

import tff_dpftrl
from tests.auditing import planted_bugs, tff_cases
from tests.fixed_seeds import fixed_seeds  # noqa: F401
from tff_dpftrl import execution
from tff_dpftrl.aggregators import adaptive_clipping, dp_ftrl
from tff_dpftrl.auditing import aggregator as aggregator_lib
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import mechanism as mechanism_lib
from tff_dpftrl.auditing import playing, probes, tff_aggregators
from tff_dpftrl.private_round import adaptive_clipping as adaptive_clipping_lib
from tff_dpftrl.private_round import clipping, fixed_clip

_TYPE = tff.to_type(
    collections.OrderedDict(b=tff.TensorType(np.float32, [2]), a=tff.TensorType(np.float64, [1, 2]))
)


def _games(trials, **options):
    return aggregator_lib.GameBudget(trials, error_rate=1e-3, seed=1, **options)


def _outcomes(report):
    return {finding.test: finding.outcome for finding in report.findings}


def _identity():
    return dp_ftrl.DPFTRLFactory(
        planted_bugs.fixed(fixed_clip.FixedClipRound, tff_dpftrl.Identity())
    )


def _secure():
    return tff_dpftrl.build_secagg_dp_ftrl_aggregator(
        planted_bugs.blt(),
        noise_multiplier=2.0,
        clients_per_round=planted_bugs.CLIENTS_PER_ROUND,
        clip_norm=planted_bugs.CLIP_NORM,
        encoding=planted_bugs.encoding(),
    ).for_updates(tff_aggregators.type_of([[128], [2, 64]]))


_FACTORIES = {
    "BLT": lambda: dp_ftrl.DPFTRLFactory(planted_bugs.fixed(fixed_clip.FixedClipRound)),
    "adaptive": lambda: adaptive_clipping.AdaptiveDPFTRLFactory(
        planted_bugs.adaptive(adaptive_clipping_lib.AdaptiveClipRound)
    ),
    "secure sum": _secure,
    "sampled": lambda: tff_dpftrl.SampledGaussianFactory(
        clipping=clipping.FlatClipping(planted_bugs.CLIP_NORM),
        noise_multiplier=2.0,
        estimator=tff_dpftrl.FixedDenominator(0.1, 100.0),
    ),
}


@pytest.mark.parametrize("name", _FACTORIES)
def test_numbers_of_a_factory_are_those_of_the_aggregation(name):
    with execution.compiled_only():
        factory = _FACTORIES[name]()
    of_aggregation = mechanism_lib.Mechanism.of(planted_bugs.CORRECT[name].build())
    assert mechanism_lib.Mechanism.of(factory) == of_aggregation
    assert mechanism_lib.is_ours(factory)


def test_a_factory_with_foreign_parts_is_not_ours():
    foreign = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(),
        noise_multiplier=1.0,
        clients_per_round=1,
        clip_norm=1.0,
        sum_factory=tff.aggregators.clipping_factory(1.0, tff.aggregators.SumFactory()),
        encoded_norm=1.0,
    )
    assert not mechanism_lib.is_ours(foreign)
    assert mechanism_lib.Mechanism.of(tff.aggregators.SumFactory()) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", _FACTORIES)
def test_correct_factories_are_consistent(name):
    with execution.compiled_only():
        factory = _FACTORIES[name]()
        report = tff_dpftrl.audit_aggregator(
            factory, schema=planted_bugs.SCHEMA, budget=_games(2000)
        )
    assert report.verdict == "consistent with the claim", report.to_markdown()
    assert report.is_ours


@pytest.mark.parametrize(
    "aggregator, message",
    [
        (object(), "must be an Aggregation, a TFF aggregation factory"),
        (tff.aggregators.SumFactory(), "claim must be given"),
    ],
)
def test_what_cannot_be_audited_is_refused(aggregator, message):
    with pytest.raises(ValueError, match=message):
        tff_dpftrl.audit_aggregator(aggregator, schema=planted_bugs.SCHEMA)


def test_a_secure_aggregator_plays_updates_of_the_grid_that_it_was_given(monkeypatch):
    def one_round(audit, *_):
        player = audit.player
        assert player.sizes == [128, 128]
        played = player.next(player.initialize(), [player.client(np.zeros(256))])
        assert played.released.shape == (256,)
        return [], None

    monkeypatch.setattr(aggregator_lib._Audit, "findings", one_round)
    with execution.compiled_only():
        aggregator = tff_dpftrl.build_secagg_dp_ftrl_aggregator(
            tff_dpftrl.Identity(),
            noise_multiplier=2.0,
            clients_per_round=planted_bugs.CLIENTS_PER_ROUND,
            clip_norm=planted_bugs.CLIP_NORM,
            encoding=planted_bugs.encoding(dim=256),
        )
        tff_dpftrl.audit_aggregator(
            aggregator, schema=planted_bugs.SCHEMA, budget=_games(200), resume=False
        )


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{"encoding": planted_bugs.encoding()}, {"bits": 20}])
def test_secure_aggregators_are_audited_on_a_grid_of_theirs_or_one_that_is_made(grid):
    with execution.compiled_only():
        aggregator = tff_dpftrl.build_secagg_dp_ftrl_aggregator(
            planted_bugs.blt(),
            noise_multiplier=2.0,
            clients_per_round=planted_bugs.CLIENTS_PER_ROUND,
            clip_norm=planted_bugs.CLIP_NORM,
            **grid,
        )
        report = tff_dpftrl.audit_aggregator(
            aggregator, schema=planted_bugs.SCHEMA, budget=_games(800)
        )
    assert report.verdict == "consistent with the claim", report.to_markdown()
    assert report.is_ours
    assert _outcomes(report)["distinguishing game, likelihood ratio"] == "consistent"


@pytest.mark.slow
def test_a_client_that_counts_in_full_is_weighed_to_do_so():
    inner = _identity()
    report = tff_dpftrl.audit_aggregator(
        tff_dpftrl.WeightedFactory(inner, weight_cap=20.0),
        schema=tff_dpftrl.MinSep(6, 3, 2),
        budget=_games(800),
    )
    assert report.verdict == "consistent with the claim", report.to_markdown()
    # With a weight of 1, not 20, the canaries would reach a twentieth of μ.
    assert report.mu_at_least > 0.5 * report.claim.mu


def test_a_mechanism_of_which_nothing_is_known_is_tested_without_numbers():
    process = _identity().create(tff.to_type([(np.float32, [80]), (np.float32, [3])]))
    schema = tff_dpftrl.MinSep(6, 3, 2)
    claim = claim_lib.Claim(epsilon=8.0, delta=1e-6)
    report = tff_dpftrl.audit_aggregator(process, schema=schema, claim=claim, budget=_games(240))
    assert report.verdict == "consistent with the claim", report.to_markdown()
    assert not report.is_ours
    outcomes = _outcomes(report)
    assert outcomes["what one client adds"] == "not tested"
    # So few trials refute no ε = 8.
    assert outcomes["distinguishing game, learned classifier"] == "not tested"


class _NoiseOfAll(tff.aggregators.UnweightedAggregationFactory):
    """Adds one number to all coordinates: of no mechanism that keeps them apart."""

    def __init__(self, stddev):
        self._stddev = stddev

    def create(self, value_type):
        inner = tff.aggregators.SumFactory().create(value_type)
        stddev = self._stddev

        @tff.tensorflow.computation(value_type)
        def clip(value):
            return tf.clip_by_global_norm(value, 1.0)[0]

        @tff.tensorflow.computation(value_type)
        def with_noise(value):
            noise = tf.random.normal([], stddev=stddev)
            return tf.nest.map_structure(lambda x: x + noise, value)

        @tff.federated_computation(
            inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            summed = inner.next(state, tff.federated_map(clip, value))
            released = tff.federated_map(with_noise, summed.result)
            return tff.templates.MeasuredProcessOutput(summed.state, released, summed.measurements)

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


@pytest.mark.parametrize(
    "stddev, canaries_per_run, is_violated",
    [
        (1e-3, None, True),
        pytest.param(1e6, None, False, marks=pytest.mark.slow),
        pytest.param(1e-3, 1, True, marks=pytest.mark.slow),
    ],
)
def test_of_a_black_box_only_bounds_that_hold_for_every_mechanism_decide(
    monkeypatch, stddev, canaries_per_run, is_violated
):
    monkeypatch.setattr(probes, "_NOBODY_REPEATS", 20)  # It is the games that are looked at.
    report = tff_dpftrl.audit_aggregator(
        _NoiseOfAll(stddev),
        schema=tff_dpftrl.MinSep(3, 3, 1),
        claim=claim_lib.Claim(epsilon=1.0, delta=1e-6),
        budget=_games(240, canaries_per_run=canaries_per_run),
    )
    assert _outcomes(report)["a round executed again from its state"] == "consistent"
    (game,) = (finding for finding in report.findings if "learned" in finding.test)
    assert (game.outcome == "violated") == is_violated, game.says
    is_one_run = canaries_per_run is None
    assert ("It holds for every mechanism" in game.says) == is_one_run
    assert (game.mu_at_least is None) == is_one_run


@pytest.mark.slow
def test_canaries_of_half_precision_count_in_full():
    aggregator = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(), noise_multiplier=0.5, clients_per_round=10, clip_norm=200.0
    )
    report = tff_dpftrl.audit_aggregator(
        aggregator,
        schema=tff_dpftrl.MinSep(4, 1, 4),
        budget=_games(400),
        value_type=tff.to_type([(np.float16, [80])] * 2),
    )
    assert report.verdict == "consistent with the claim", report.to_markdown()
    # Standard error of μ √(4 / 400 + μ² / 800) is 0.17.
    assert 0.7 * 4.0 < report.mu_at_least < 4.0


def _player(process, client_weight=1.0):
    return playing.Player(tff_aggregators.of_process(process), client_weight)


def test_clients_and_results_are_flat_vectors_in_the_order_of_the_tensors():
    player = _player(tff.aggregators.SumFactory().create(_TYPE))
    assert player.sizes == [2, 2] and player.is_compiled
    assert player.significant_bits == [24, 24]
    clients = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 0.0, 0.0, 0.5])]
    played = player.next(player.initialize(), [player.client(client) for client in clients])
    np.testing.assert_array_equal(played.released, [11.0, 2.0, 3.0, 4.5])


def test_a_weight_is_the_last_number_of_a_client():
    factory = tff.aggregators.MeanFactory()
    player = _player(factory.create(_TYPE, tff.TensorType(np.float32)))
    clients = [player.client(np.ones(4), 3.0), player.client(np.full(4, 5.0), 1.0)]
    played = player.next(player.initialize(), clients)
    np.testing.assert_array_equal(played.released, [2.0] * 4)
    np.testing.assert_array_equal(player.zeroed(), np.zeros(5))


def test_clients_weigh_what_the_player_is_told():
    process = tff.aggregators.MeanFactory().create(_TYPE, tff.TensorType(np.int32))
    player = _player(process, client_weight=3.0)
    clients = [player.client(np.ones(4)), player.client(np.full(4, 5.0), 1.0)]
    played = player.next(player.initialize(), clients)
    np.testing.assert_array_equal(played.released, [2.0] * 4)


@pytest.mark.parametrize("dtype, largest", [(np.float16, 65504.0), (np.float64, 2.0**128)])
def test_the_largest_value_is_one_of_all_floats_that_a_client_goes_through(dtype, largest):
    value_type = tff.to_type([tff.TensorType(np.float32, [2]), tff.TensorType(dtype, [1])])
    player = _player(tff.aggregators.SumFactory().create(value_type))
    assert player.largest_value == pytest.approx(largest)
    client = player.client(np.full(3, player.largest_value))
    released = player.next(player.initialize(), [client]).released
    np.testing.assert_array_equal(released, [player.largest_value] * 3)


def _probes(factory, mechanism, value_type):
    player = _player(factory.create(tff_aggregators.type_of(value_type)))
    saved, _ = probes.saved_states(player, mechanism, [0])
    return probes.Probes(player, mechanism, saved, canary_norm=1e3, seed=0)


@pytest.mark.parametrize(
    "name, outcome",
    [("TFF's tree_aggregation", "violated"), ("TFF's gaussian_fixed", "consistent")],
)
def test_noise_of_tff_that_follows_from_the_state_is_found(name, outcome):
    case = tff_cases.OF_TFF[name]
    found = _probes(case.build(), **case.options)
    assert found.round_executed_again().outcome == outcome


@pytest.mark.parametrize(
    "dtype, outcome, says",
    [
        (np.float32, "consistent", "the noise covers 1."),
        (tf.bfloat16.as_numpy_dtype, "not tested", "clip norms more pass."),
    ],
)
def test_a_contribution_that_rounding_hides_is_not_tested(dtype, outcome, says):
    # Noise of 10 clip norms in each of 60 coordinates, of which bfloat16 keeps 8 bits.
    aggregator = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(), noise_multiplier=10.0, clip_norm=1.0, clients_per_round=4
    )
    found = _probes(
        aggregator,
        mechanism_lib.Mechanism.of(aggregator),
        tff.to_type([tff.TensorType(dtype, [60])]),
    )
    finding = found.contribution(1.0, 0.0, 0.01)
    assert finding.outcome == outcome and says in finding.says, finding.says


class _ClipsInFloat32(tff.aggregators.UnweightedAggregationFactory):
    """Drops what is not finite, then clips: the norm of finite numbers may be infinite."""

    def create(self, value_type):
        inner = tff.aggregators.SumFactory().create(value_type)

        @tff.tensorflow.computation(value_type)
        def clip(value):
            tensors = tf.nest.flatten(value)
            is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in tensors])
            clipped, _ = tf.clip_by_global_norm(tensors, 1.0)
            kept = [tf.where(is_finite, x, tf.zeros_like(x)) for x in clipped]
            return tf.nest.pack_sequence_as(value, kept)

        @tff.federated_computation(
            inner.initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state, value):
            return inner.next(state, tff.federated_map(clip, value))

        return tff.templates.AggregationProcess(inner.initialize, next_fn)


def test_a_finite_update_that_makes_what_is_released_no_number_is_found():
    mechanism = mechanism_lib.Mechanism(tff_dpftrl.Identity(), 1.0, 1.0, 1.0)
    found = _probes(_ClipsInFloat32(), mechanism, [[60], [4]])
    assert found.not_finite(0.01).outcome == "consistent"
    finding = found.stays_finite()
    assert finding.outcome == "violated" and "1e+20" in finding.says
