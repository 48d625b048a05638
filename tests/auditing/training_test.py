"""One run with canaries: consistent where the code keeps its claim, VIOLATED where it does not."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.fixed_seeds import fixed_seeds  # noqa: F401
from tff_dpftrl.accounting import dp_fedavg, guarantee
from tff_dpftrl.auditing import canaries as canaries_lib
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing import training
from tff_dpftrl.auditing.evidence import worst_pattern
from tff_dpftrl.discretization import grid
from tff_dpftrl.execution import compiled_process
from tff_dpftrl.learning import local_updates, optimizers, rounds
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.mechanisms import banded_toeplitz, identity
from tff_dpftrl.participation import sampling as sampling_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import (
    aggregation,
    clipping,
    estimators,
    fixed_clip,
    sampled_gaussian,
    secure_sums,
)

_NUM_WEIGHTS = 3000
_NUM_CANARIES = 120
_SCHEMA = schema_lib.MinSep(6, 3, 2)
_STRATEGY = banded_toeplitz.BandedToeplitz((1.0, 0.5, 0.25))
_CLIP = 0.5
_DELTA = 1e-6
_GAME = training.CanaryGame(seed=0)


def _model():
    @tf.function(autograph=False)
    def predict_on_batch(model_weights, x, training):
        del training
        return tf.linalg.matvec(x, model_weights[0][0])

    def loss(output, label, sample_weight=None):
        del sample_weight
        return tf.reduce_mean((output - label) ** 2)

    return model_lib.Model(
        initial_weights=((np.zeros(_NUM_WEIGHTS, np.float32),), ()),
        predict_on_batch=predict_on_batch,
        loss=loss,
        input_spec=(
            tf.TensorSpec([None, _NUM_WEIGHTS], tf.float32),
            tf.TensorSpec([None], tf.float32),
        ),
    )


@functools.cache
def _canaries():
    return canaries_lib.Canaries(_model(), number=_NUM_CANARIES, seed=1)


@functools.cache
def _real_clients():
    rng = np.random.default_rng(0)
    return tuple(
        tf.data.Dataset.from_tensors(
            (
                rng.normal(size=(2, _NUM_WEIGHTS)).astype(np.float32),
                rng.normal(size=2).astype(np.float32),
            )
        )
        for _ in range(3)
    )


def _cohort(round_index):
    return _real_clients()[round_index % 3 :]


def _aggregation(noise_multiplier, clip_norm=_CLIP, strategy=_STRATEGY, vector_sum=None, **options):
    private_round = fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=noise_multiplier,
        clipping=clipping.FlatClipping(clip_norm),
        clients_per_round=10,
        encoded_norm=vector_sum and vector_sum.contribution_norm,
        **options,
    )
    return aggregation.Aggregation(private_round, vector_sum=vector_sum)


def _guarantee(noise_multiplier, strategy=_STRATEGY):
    return guarantee.dp_ftrl_guarantee(
        strategy, noise_multiplier=noise_multiplier, schema=_SCHEMA, delta=_DELTA
    )


def _round(made, momentum=None, clip=None):
    return rounds.build_training(
        _canaries().model,
        local_update=local_updates.FedAvg(optimizers.sgdm(0.1), clip),
        aggregation=made,
        server_optimizer=optimizers.sgdm(0.7, momentum),
    )


def _audit(process, claim, game=_GAME, **options):
    options = {"strategy": _STRATEGY, "cohorts": _cohort} | options
    return training.audit_training(process, canaries=_canaries(), claim=claim, game=game, **options)


def _mu_estimate(report, test="estimate, all iterates, likelihood ratio"):
    (says,) = (finding.says for finding in report.findings if finding.test == test)
    return float(says.split("μ = ")[1].split(",")[0])


def test_a_correct_mechanism_is_consistent_and_its_mu_is_estimated():
    # A large μ, and a server with momentum, which is taken out.
    claim = _guarantee(0.5)
    report = _audit(_round(_aggregation(0.5), momentum=0.9), claim, server_momentum=0.9)
    assert not report.is_violated
    assert report.confidence == pytest.approx(0.95)
    assert report.claim == claim_lib.Claim.of(claim)
    # Scores are N(0, 1) and N(μ, 1); real clients' share of the variance is below 9 · 4 / (d z²).
    error = np.sqrt(4 / _NUM_CANARIES + claim.mu**2 / (2 * _NUM_CANARIES))
    assert error < claim.mu / 10
    assert abs(_mu_estimate(report) - claim.mu) < 4.5 * error + 0.03 * claim.mu
    assert 0.5 * claim.mu < report.mu_at_least <= claim.mu
    assert report.trade_off is not None
    valid = report.findings[0]
    assert valid.test.startswith("one-run bound") and "for every mechanism" in valid.says
    assert 0.0 < valid.mu_at_least < claim.mu and 0.0 < valid.epsilon_at_least < claim.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["little noise", "no clip"])
def test_a_broken_mechanism_is_found(bug):
    claim = _guarantee(4.0)
    broken = {
        "little noise": _aggregation(1.0),
        "no clip": _aggregation(4e-4, clip_norm=_CLIP * 1e4),  # With the noise that was meant.
    }[bug]
    report = _audit(_round(broken), claim)
    assert report.is_violated
    assert report.mu_at_least > claim.mu
    assert report.epsilon_at_least > claim.epsilon
    if bug == "no clip":  # So bad that the bound for every mechanism shows it.
        assert report.findings[0].outcome == "violated"


class _SameNoise:
    """A process that does not advance the seed of its noise."""

    def __init__(self, process):
        self._process = process
        self.get_model_weights = process.get_model_weights

    def initialize(self):
        state = self._process.initialize()
        self._aggregator = state.aggregator
        return state

    def next(self, state, client_data):
        return self._process.next(state._replace(aggregator=self._aggregator), client_data)


def test_of_a_model_that_is_not_finite_at_once_nothing_is_said():
    signal = np.zeros((_NUM_CANARIES, 6))
    present = np.arange(_NUM_CANARIES) % 2 == 0
    movements = training.Movements(np.zeros_like(signal), present, signal, 0.0, 0)
    findings, trade_off = training.judge(movements, claim_lib.Claim.gaussian(1.0, _DELTA))
    assert [finding.outcome for finding in findings] == ["not tested"] and trade_off is None


@pytest.mark.slow
def test_noise_that_is_repeated_is_found_by_the_learned_score():
    strategy = identity.Identity()
    claim = _guarantee(4.0, strategy)
    made = _round(_aggregation(4.0, strategy=strategy, deterministic_seed=0))  # No fresh bits.
    process = _SameNoise(compiled_process.CompiledProcess(made))
    report = _audit(process, claim, strategy=strategy)
    outcomes = {finding.test: finding.outcome for finding in report.findings}
    assert outcomes["canaries as trials, all iterates, learned score"] == "violated"


def _movements(rng, claim, covariance, signal, noise=1.0):
    """What an ideal mechanism would show: noise of the claimed covariance, times `noise`."""
    factor = np.linalg.cholesky(covariance)
    present = rng.integers(0, 2, _NUM_CANARIES).astype(bool)
    moved = noise * rng.normal(size=(_NUM_CANARIES, len(covariance))) @ factor.T
    moved += present[:, np.newaxis] * signal
    signals = np.tile(signal, (_NUM_CANARIES, 1))
    return training.Movements(moved, present, signals, 1.0, len(covariance))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_audits", "mu"),
    [(40, 0.5), (300, 0.5), (300, 0.1), (300, 2.0)],
)
def test_correct_mechanisms_are_called_violated_at_most_as_often_as_said(num_audits, mu):
    rng = np.random.default_rng(3)
    covariance = worst_pattern.noise_covariance(_STRATEGY, _SCHEMA.num_rounds)
    pattern = worst_pattern.strongest_pattern(covariance, _SCHEMA)
    signal = pattern.signal(_SCHEMA.num_rounds) * mu / pattern.norm
    claim = claim_lib.Claim.gaussian(mu, _DELTA)
    violated = {1.0: 0, 0.2: 0}
    for noise in violated:
        for _ in range(num_audits if noise == 1.0 else 20):
            movements = _movements(rng, claim, covariance, signal, noise)
            findings, _ = training.judge(
                movements, claim, covariance=covariance, seed=int(rng.integers(2**31))
            )
            violated[noise] += any(finding.outcome == "violated" for finding in findings)
    expected = 0.05 * num_audits
    assert violated[1.0] <= expected + 4.5 * np.sqrt(expected)
    assert mu < 0.5 or violated[0.2] == 20  # It is no test that never finds anything.


def test_patterns_spread_over_the_rounds_keep_the_schema_and_the_limit():
    present = np.ones(30, bool)
    for schema in (schema_lib.MinSep(20, 6, 3), schema_lib.MinSep(20, 19, 2)):
        covariance = worst_pattern.noise_covariance(_STRATEGY, 20)
        signal = training._patterns(schema, covariance, present, 6, np.random.default_rng(0))
        assert signal.shape == (30, 20)
        assert all(schema.allows(np.flatnonzero(row)) for row in signal)
        assert np.all(np.any(signal != 0, axis=1))
        assert np.max(np.sum(signal != 0, axis=0)) <= 6
    with pytest.raises(ValueError, match="most_canaries=4"):
        training._patterns(
            schema_lib.MinSep(20, 6, 3), covariance, present, 4, np.random.default_rng(0)
        )


@pytest.mark.slow
def test_secure_sums_with_few_canaries_a_round():
    vector_sum = secure_sums.VectorSum(grid.for_bits(_NUM_WEIGHTS, 40, 20), _CLIP)
    process, claim = _round(_aggregation(1.0, vector_sum=vector_sum)), _guarantee(1.0)
    report = _audit(process, claim, training.CanaryGame(most_canaries=40, seed=0), cohorts=None)
    assert not report.is_violated
    assert report.mu_at_least > 0.2 * claim.mu


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "is_violated"), [(1.0, False), (0.1, True)])
def test_dp_fedavg_with_sampled_canaries(noise, is_violated):
    num_rounds, probability = 20, 0.3
    sampled = sampled_gaussian.SampledGaussianRound(
        clipping=clipping.FlatClipping(_CLIP),
        noise_multiplier=6.0 * noise,
        estimator=estimators.FixedDenominator(probability, 10),
    )
    epsilon = dp_fedavg.DpFedAvg(probability, 6.0, num_rounds).epsilon(_DELTA)
    report = _audit(
        _round(aggregation.Aggregation(sampled), clip=sampled.clipping),
        claim_lib.Claim(epsilon, _DELTA),
        training.CanaryGame(sampling_probability=probability, seed=0),
        schema=schema_lib.MinSep.unrestricted(num_rounds),
        strategy=None,
    )
    assert report.is_violated == is_violated, report


class _Numbers:
    """A model with one number for each canary, as process and as canaries."""

    def __init__(self, number, silent_from, momentum=0.0, restarts=()):
        self.number = number
        self.directions = types.SimpleNamespace(shapes=[[number]], project=lambda moved: moved[0])
        self._rng, self._momentum, self._restarts = np.random.default_rng(5), momentum, restarts
        self._silent_from, self.played = silent_from, []

    def initialize(self):
        return 0, np.zeros(self.number), np.zeros(self.number)

    def next(self, state, clients):
        t, weights, velocity = state
        self.played.append((t, len(clients)))
        noise = 4.0 * (t < self._silent_from) * self._rng.normal(size=self.number)
        velocity = (0.0 if t in self._restarts else self._momentum * velocity) + noise
        for canary in clients:
            velocity = velocity + np.eye(self.number)[canary]
        return types.SimpleNamespace(state=(t + 1, weights + velocity, velocity))

    def get_model_weights(self, state):
        return state[1]

    def weights(self, model_weights):
        return [model_weights]

    def client(self, canary, sign):
        return canary


@pytest.mark.parametrize("momentum, restarts", [(0.0, ()), (0.9, (40, 50))])
def test_a_fault_that_begins_late_is_found_by_rounds_that_are_played_alone(momentum, restarts):
    claim = claim_lib.Claim.gaussian(0.25, _DELTA)
    options = {"claim": claim, "cohorts": lambda t: [], "progress": lambda line: None}
    options |= {"server_momentum": momentum, "server_restarts": restarts}

    def single(process, rounds, **game):
        game = training.CanaryGame(seed=0, **game)
        return training.audit_single_rounds(process, rounds, canaries=process, game=game, **options)

    def whole(process):
        return training.audit_training(
            process,
            canaries=process,
            claim=claim,
            schema=schema_lib.MinSep(30, 30, 1),
            strategy=identity.Identity(),
            server_momentum=momentum,
            game=_GAME,
        )

    assert whole(_Numbers(_NUM_CANARIES, 0, momentum, restarts)).is_violated
    faulty = _Numbers(_NUM_CANARIES, 45, momentum, restarts)
    run = whole(faulty)
    assert not run.is_violated
    assert {str(one) for finding in run.findings for one in finding.covers} == {
        "round 1 of 30",
        "tensor 1 of 1",
    }
    (found,) = single(faulty, [31, 32, 40, 50])
    assert found.outcome == "violated" and found.says.startswith(
        "Of 4 rounds played alone, round 51:"
    )
    assert str(found.covers[0]) == "rounds 32, 33, 41 and 51 of 51"
    alone = [(t, number) for t, number in faulty.played[30:] if number]
    assert alone == [(t, _NUM_CANARIES // 2) for t in (31, 32, 40, 50)]
    correct = _Numbers(_NUM_CANARIES, 1000, momentum, restarts)
    (fine,) = single(correct, [31, 32, 40, 50])
    assert fine.outcome == "consistent" and 0.0 <= fine.mu_at_least < 0.25
    (few,) = single(correct, [31], most_canaries=19)
    assert few.outcome == "not tested" and "room for 19 canaries" in few.says
    assert single(correct, []) == ()


def test_canaries_are_drawn_as_clients_are():
    cyclic = sampling_lib.CyclicPoisson(60, 3, 0.5)
    signal = training._sampled(cyclic, 200, 30, np.random.default_rng(0))
    assert signal.shape == (200, 30)
    assert np.mean(signal) == pytest.approx(cyclic.share_per_round, abs=0.02)
    for turns in map(np.flatnonzero, signal):
        assert len(set(turns % 3)) <= 1
    others = training._sampled(cyclic, 200, 30, np.random.default_rng(1))
    assert np.any(signal != others)


@pytest.mark.slow
def test_real_runs_are_called_violated_at_most_as_often_as_said():
    claim = _guarantee(2.0)
    process = compiled_process.CompiledProcess(_round(_aggregation(2.0)))
    games = [training.CanaryGame(seed=seed) for seed in range(40)]
    violated = [_audit(process, claim, game).is_violated for game in games]
    assert sum(violated) <= 40 * 0.05 + 4.5 * np.sqrt(40 * 0.05)


def test_arguments_are_checked():
    claim = claim_lib.Claim(1.0, _DELTA)
    with pytest.raises(ValueError, match="schema must be given"):
        _audit(None, claim)
    for option, value in ("error_rate", 0.0), ("most_canaries", 0), ("sampling_probability", 2):
        with pytest.raises(ValueError, match=option):
            training.CanaryGame(**{option: value})
    with pytest.raises(ValueError, match="server_momentum"):
        _audit(None, claim, schema=_SCHEMA, server_momentum=1.0)
    few = canaries_lib.Canaries(_model(), number=19)
    with pytest.raises(ValueError, match="at least 20, got 19"):
        training.audit_training(None, canaries=few, claim=claim, schema=_SCHEMA)
