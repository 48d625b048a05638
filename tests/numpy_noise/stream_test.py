"""Streams draw what `private_round` draws, go on after a crash, and claim what holds."""

import json
import math
import pickle
import random
import secrets

import numpy as np
import pytest
import tensorflow as tf

import tff_dpftrl
from tests.numpy_noise import example_strategies
from tff_dpftrl.accounting import statement_sentences, statement_text
from tff_dpftrl.mechanisms import restarts
from tff_dpftrl.numpy_noise import philox
from tff_dpftrl.participation import ledger_rules
from tff_dpftrl.private_round import clipping, fixed_clip, interface

_SEED = 2**127 + 12345
_TEMPLATE = {"w": (3, 5), "b": np.zeros(4), "scale": ()}
_STRATEGIES = {
    **example_strategies.STRATEGIES,
    "restarted-blt": restarts.Restarted(example_strategies.STRATEGIES["blt"], (0, 4, 9)),
    "restarted-tree": restarts.Restarted(tff_dpftrl.Tree(7), (0, 5, 11)),
    "restarted-banded": restarts.Restarted(
        example_strategies.STRATEGIES["banded-toeplitz"], (0, 6)
    ),
}
_BLT = _STRATEGIES["blt"]


def _stream(strategy, **options):
    options = {"noise_multiplier": 3.0, "clip_norm": 0.5, "template": _TEMPLATE} | options
    return tff_dpftrl.NoiseStream(strategy, **options)


@pytest.mark.parametrize(
    "name",
    [
        *example_strategies.NAMES,
        "restarted-tree",
        *(pytest.param(f"restarted-{kind}", marks=pytest.mark.slow) for kind in ("blt", "banded")),
    ],
)
def test_noise_is_that_of_the_private_round_in_tensorflow(name):
    strategy, shapes = _STRATEGIES[name], [(3, 5), (4,), ()]
    in_tensorflow = fixed_clip.FixedClipRound(
        strategy,
        noise_multiplier=3.0,
        clipping=clipping.FlatClipping(0.5),
        clients_per_round=1,
        deterministic_seed=_SEED,
    )
    nobody = interface.Contribution([tf.zeros(shape, tf.float64) for shape in shapes])
    release = tf.function(lambda state: in_tensorflow.release(state, nobody)[:2])
    state, stream = in_tensorflow.initial_state(shapes), _stream(strategy, seed=_SEED)
    for t in range(13):
        state, expected = release(state)
        noise = stream.next(t)
        assert list(noise) == list(_TEMPLATE)
        for ours, theirs, shape in zip(noise.values(), expected, shapes, strict=True):
            assert ours.dtype == np.float32 and ours.shape == shape
            # z · clip norm is 1.5; unit noise and the terms of its sum stay below 20, and each
            # of up to 13 terms differs by float32 rounding: 1.5 · 20 · 13 · 2^-23.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-5)
            assert np.all(np.abs(theirs) > 1e-4)  # So that zeros would not pass.


@pytest.mark.parametrize("name", _STRATEGIES)
def test_noise_of_a_known_seed_goes_on_bit_for_bit_from_a_saved_state(name, tmp_path):
    stream = _stream(_STRATEGIES[name], seed=_SEED)
    for t in range(6):
        stream.next(t)
    np.savez(tmp_path / "noise.npz", **stream.state())
    expected = [stream.next(t) for t in range(6, 12)]
    with np.load(tmp_path / "noise.npz") as state:
        resumed = tff_dpftrl.NoiseStream.from_state(state)
    assert resumed.round_index == 6 and resumed.seed_is_known
    for t, noise in enumerate(expected, start=6):
        again = resumed.next(t)
        assert list(again) == list(noise)
        for name in noise:
            np.testing.assert_array_equal(again[name], noise[name])


@pytest.mark.parametrize("name", _STRATEGIES)
def test_a_pickled_stream_of_a_known_seed_goes_on_bit_for_bit(name):
    stream = _stream(_STRATEGIES[name], seed=_SEED)
    for t in range(6):
        stream.next(t)
    again = pickle.loads(pickle.dumps(stream))
    for t in range(6, 12):
        expected, noise = stream.next(t), again.next(t)
        assert list(noise) == list(expected)
        for key, array in expected.items():
            np.testing.assert_array_equal(noise[key], array)


@pytest.mark.parametrize("name", _STRATEGIES)
def test_branches_of_a_state_share_their_past_and_nothing_else(name, monkeypatch):
    """All innovations, of the past and of two branches, are independent standard Gaussians.

    They are L⁻¹ times past and branch, where L is Cholesky's factor of the strategy's covariance.
    """
    # In place of the operating system's bits, for the same result in every run of the test.
    monkeypatch.setattr(secrets, "randbits", random.Random(1).getrandbits)
    size, fork, end = 20_000, 7, 14  # Within a block of six rounds, and with three tree nodes.
    strategy = _STRATEGIES[name]
    stream = _stream(strategy, noise_multiplier=1.0, clip_norm=1.0, template=[(size,)])
    past = [stream.next(t)[0] for t in range(fork)]
    state = stream.state()
    branches = [
        stream,
        tff_dpftrl.NoiseStream.from_state(state),
        pickle.loads(pickle.dumps(stream)),
    ]
    matrix = strategy.noise_matrix(end)
    factor = np.linalg.cholesky(matrix @ matrix.T)
    whitened = [
        np.linalg.solve(factor, np.stack(past + [branch.next(t)[0] for t in range(fork, end)]))
        for branch in branches
    ]
    innovations = np.concatenate([whitened[0][:fork], *(rows[fork:] for rows in whitened)])
    for rows in whitened[1:]:
        np.testing.assert_allclose(rows[:fork], whitened[0][:fork])
    found = innovations @ innovations.T / size - np.eye(len(innovations))
    # A mean of n products of two Gaussians has variance 1/n; of squares, 2/n.
    allowed = 5 * np.sqrt((1 + np.eye(len(innovations))) / size)
    assert np.all(np.abs(found) < allowed)


def test_a_round_is_drawn_once_and_in_its_turn():
    stream = _stream(_BLT)
    before = stream.state()
    first = stream.next(0)["w"]
    for round_index in (0, 2, -1):
        with pytest.raises(ValueError, match="round_index must be 1, the next round"):
            stream.next(round_index)
    resumed = tff_dpftrl.NoiseStream.from_state(before)
    with pytest.raises(ValueError, match="round_index must be 0, the next round"):
        resumed.next(1)
    assert np.all(resumed.next(0)["w"] != first)
    assert np.all(stream.next(1)["w"] != first)


def test_a_ledger_admits_a_repeated_round_and_refuses_a_stream_that_stayed_behind(tmp_path):
    schema = tff_dpftrl.MinSep(num_rounds=4, min_sep=1, max_participations=4)
    stream = _stream(_BLT)
    state = stream.state()
    with tff_dpftrl.Ledger.create(tmp_path / "l", schema, initial_checkpoint="start") as ledger:

        def begin(t, stream, cohort):
            return ledger.begin_round(
                t,
                cohort,
                noise_fingerprint=stream.noise_fingerprint,
                checkpoint_fingerprint=ledger.last_checkpoint,
            )

        assert not begin(0, stream, ["a", "b"])
        stream.next(0)
        resumed = tff_dpftrl.NoiseStream.from_state(state)
        assert begin(0, resumed, ["a", "b"])
        assert begin(0, _stream(_BLT), ["a", "b"])
        with pytest.raises(ledger_rules.ReplayRefusal):
            begin(0, resumed, ["a"])
        ledger.commit_round(0, ["a", "b"], "next")
        with pytest.raises(ledger_rules.ReplayRefusal):
            begin(1, resumed, ["a", "b"])
        assert not begin(1, stream, ["a", "b"])


@pytest.mark.parametrize(
    "name", ["blt", "banded-toeplitz", "tree", "vanilla-tree", "dense-in-blocks"]
)
def test_a_call_that_was_interrupted_can_be_repeated(name, monkeypatch):
    stream, undisturbed = (_stream(_STRATEGIES[name], seed=1) for _ in range(2))
    for t in range(7):
        expected = undisturbed.next(t)
        with monkeypatch.context() as patched:
            # The last step before the result: the kernel has already written its buffers.
            patched.setattr(np, "split", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                stream.next(t)
        np.testing.assert_array_equal(stream.next(t)["w"], expected["w"])


def test_a_state_does_not_change_with_the_stream():
    stream = _stream(_STRATEGIES["banded"])
    stream.next(0)
    state = stream.state()
    kept = {name: value.copy() for name, value in state.items()}
    stream.next(1)
    for name, value in kept.items():
        np.testing.assert_array_equal(state[name], value)


def test_rounds_end_with_the_strategy_and_with_the_block():
    stream = _stream(tff_dpftrl.Tree(3))
    for t in range(3):
        stream.next(t)
    with pytest.raises(ValueError, match="defined for 3 rounds"):
        stream.next(3)
    with pytest.raises(ValueError, match="defined for 3 rounds"):
        stream.next(3)


def test_seeds_are_fresh_and_a_given_one_is_no_secret():
    streams = [_stream(_BLT) for _ in range(20)]
    assert len({stream.state()["seed"].tobytes() for stream in streams}) == 20
    schema = tff_dpftrl.MinSep(num_rounds=20, min_sep=5, max_participations=4)
    assert streams[0].guarantee(schema, 1e-6).epsilon < math.inf
    known = tff_dpftrl.NoiseStream.from_state(_stream(_BLT, seed=0).state())
    claim = known.guarantee(schema, 1e-6)
    assert claim.epsilon == math.inf
    statement = tff_dpftrl.dp_ftrl_statement(claim, unit_of_privacy="user")
    assert statement.no_guarantee == (statement_sentences.KNOWN_SEED,)


def test_the_noise_has_the_standard_deviation_of_the_claim():
    stream = _stream(_BLT, noise_multiplier=4.0, clip_norm=0.25, template=[(100_000,)])
    (noise,) = stream.next(0)
    assert abs(noise.std() - 1.0) < 6 / math.sqrt(2 * 100_000)


def test_the_guarantee_is_that_of_the_mechanism_and_names_the_caller_s_part():
    schema = tff_dpftrl.MinSep(num_rounds=20, min_sep=5, max_participations=4)
    stream = _stream(_BLT)
    claim = stream.guarantee(schema, 1e-6)
    expected = tff_dpftrl.dp_ftrl_guarantee(
        _BLT, noise_multiplier=3.0, schema=schema, delta=1e-6, clip_norm=0.5
    )
    assert claim.epsilon == expected.epsilon and claim.clip_norm == 0.5
    for one, names_it in ((claim, True), (expected, False)):
        text = statement_text.markdown(tff_dpftrl.dp_ftrl_statement(one, unit_of_privacy="user"))
        assert (statement_sentences.CLIPPED_BY_CALLER in text) is names_it
    for t in range(2):
        stream.next(t)
    with pytest.raises(ValueError, match="all 2 rounds whose noise was drawn, got num_rounds=1"):
        stream.guarantee(tff_dpftrl.MinSep(1, 1, 1), 1e-6)


def test_without_noise_there_is_none():
    assert not np.any(_stream(_BLT, noise_multiplier=0.0).next(0)["w"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"template": []}, "at least one"),
        ({"template": np.zeros(3)}, "got a ndarray: put it in a list"),
        ({"template": {1: (2,)}}, "strings as names"),
        ({"template": [np.zeros(2, np.complex64)]}, "only floats.*got complex64: view it as real"),
        ({"template": [np.zeros(2, np.int32)]}, "only floats.*got int32: cast it"),
        ({"template": [np.array(["a"])]}, "only floats"),
        ({"template": [{"w": (2,)}]}, "flatten nested containers"),
        ({"template": [(2, -1)]}, "shapes of known sizes"),
        ({"template": [(2, None)]}, "shapes of known sizes"),
        ({"clip_norm": 0.0}, "clip_norm must be"),
        ({"clip_norm": 1e-35}, "rescale the updates"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"seed": 2**128}, "seed must be None or an integer"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _stream(_BLT, **options)


def test_streams_need_a_strategy():
    with pytest.raises(ValueError, match="strategy must be a strategy"):
        _stream("blt")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": "secret"}, "state is damaged: seed must be uint32 of shape"),
        ({"seed": np.zeros(0, np.uint32)}, "state is damaged: seed must be uint32 of shape"),
        ({"seed": np.ones(5, np.uint32)}, "state is damaged: seed must be uint32 of shape"),
        ({"seed": np.ones(4, np.int64)}, "state is damaged: seed must be uint32 of shape"),
        ({"seed": np.ones([4, 1], np.uint32)}, "state is damaged: seed must be uint32 of shape"),
        ({"buffer": np.full([3, 20], np.nan)}, "state is damaged.*finite"),
        ({"buffer": np.zeros([1, 2])}, "buffer must be float32 of shape"),
        ({"round_index": -1}, "round_index must be at least 0"),
        ({"parameters": "{}"}, "state is damaged"),
        ({"parameters": '{"version": 3}'}, "version 3 and this package draws version 2"),
    ],
)
def test_damaged_states_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        tff_dpftrl.NoiseStream.from_state(_stream(_BLT).state() | change)


def _as_version_1(state):
    parameters = json.loads(state["parameters"].item()) | {"version": 1}
    seed = np.atleast_2d(state["seed"])[0]
    return state | {"seed": seed, "parameters": np.array(json.dumps(parameters))}


@pytest.mark.parametrize(
    "name", ["identity", "blt", "banded-toeplitz", "banded", "restarted-blt", "restarted-banded"]
)
def test_a_state_of_version_1_goes_on_where_all_past_noise_is_in_it(name):
    stream = _stream(_STRATEGIES[name], seed=_SEED)
    for t in range(5):
        stream.next(t)
    resumed = tff_dpftrl.NoiseStream.from_state(_as_version_1(stream.state()))
    np.testing.assert_array_equal(resumed.next(5)["w"], stream.next(5)["w"])


@pytest.mark.parametrize("name", ["tree", "vanilla-tree", "bisr", "dense", "restarted-tree"])
def test_other_states_of_version_1_are_refused(name):
    state = _as_version_1(_stream(_STRATEGIES[name]).state())
    with pytest.raises(ValueError, match="version 1 .* go on with the version of tff_dpftrl that"):
        tff_dpftrl.NoiseStream.from_state(state)


@pytest.mark.parametrize("value", [None, 0, "no"])
def test_a_state_says_true_or_false_of_a_known_seed(value):
    state = _stream(_BLT).state()
    parameters = json.loads(state["parameters"].item()) | {"seed_is_known": value}
    with pytest.raises(ValueError, match="state is damaged.*seed_is_known"):
        tff_dpftrl.NoiseStream.from_state(state | {"parameters": json.dumps(parameters)})


def test_an_array_counts_by_its_shape_and_its_place():
    size = philox._CHUNK + 3
    one, two = (_stream(_BLT, template=[(size,), (2,)], seed=3).next(0) for _ in range(2))
    np.testing.assert_array_equal(one[0], two[0])
    swapped = _stream(_BLT, template=[(2,), (size,)], seed=3).next(0)
    assert np.all(swapped[0] != one[1])
