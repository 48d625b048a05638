"""Tests of tff_dpftrl.finetuning.ghost, against one gradient after the other."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.models import small_models
from tff_dpftrl.finetuning import clipped_sums, ghost
from tff_dpftrl.models import gpt2, llama, low_rank, table, transformer, weight_uses, word_lstm
from tff_dpftrl.private_round import clipping

_LSTM = word_lstm.WordLstm(11, 5, embedding_size=6, state_size=4)
_TRANSFORMER = transformer.Transformer(
    11, 5, embedding_size=6, num_layers=1, num_heads=3, feed_forward_size=7
)
_MODELS = {
    "lstm": _LSTM,
    "lstm-untied": dataclasses.replace(_LSTM, tie_embeddings=False),
    "lstm-coupled": dataclasses.replace(_LSTM, couple_gates=True),
    "transformer": _TRANSFORMER,
    "transformer-deep": dataclasses.replace(_TRANSFORMER, num_layers=2),
    # So wide that tokens are compared instead of gradients formed.
    "lstm-wide": dataclasses.replace(_LSTM, embedding_size=40, state_size=32),
    "transformer-wide": dataclasses.replace(
        _TRANSFORMER, embedding_size=40, num_heads=4, feed_forward_size=64
    ),
    # With so many words besides that this holds for the tied embedding, too.
    "lstm-words": dataclasses.replace(_LSTM, vocabulary_size=300, embedding_size=40, state_size=32),
    "transformer-words": dataclasses.replace(_TRANSFORMER, vocabulary_size=300, embedding_size=40),
}
_MODELS |= {
    "gpt2": gpt2.Gpt2(11, 5, 6, 2, 3, 7, num_positions=8),
    "gpt2-wide": gpt2.Gpt2(11, 5, 40, 1, 4, 64),
    "llama": llama.Llama(11, 5, 8, 2, 4, 2, 7),
    "llama-untied": llama.Llama(11, 5, 8, 1, 2, 1, 7, tie_embeddings=False, head_size=6),
    "llama-wide": llama.Llama(11, 5, 40, 1, 4, 2, 64),
}
_MODELS["transformer-adapters"] = low_rank.LowRank(
    _MODELS["transformer-deep"], _MODELS["transformer-deep"].initial_weights(1), 2
)
# Of a rank at which tokens are compared.
_MODELS["transformer-wide-adapters"] = low_rank.LowRank(
    _MODELS["transformer-wide"], _MODELS["transformer-wide"].initial_weights(1), 40
)
_COUNTS = {1: [1, 1, 1, 1], 3: [3, 1, 0, 2]}
_NO_CLIP = 1e6


def _slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _weights(model, seed=0):
    """Moved, so that biases are not zero, and tied embeddings matter as inputs and outputs."""
    rng = np.random.default_rng(seed)
    return [
        tf.constant(w + rng.normal(0, 0.3, w.shape), tf.float32) for w in model.initial_weights(0)
    ]


_MODELS |= {
    f"{name}-adapters": low_rank.LowRank(_MODELS[name], _weights(_MODELS[name], 1), rank)
    for name, rank in (("gpt2", 2), ("llama-wide", 20))
}


def _rows(model, counts, seed=0):
    """Rows of all lengths, one of them empty, and `row_splits`."""
    rng = np.random.default_rng(seed)
    num_rows, length = sum(counts), model.sequence_length + 1
    # Few words, so that some come again in a unit.
    ids = rng.integers(1, min(model.vocabulary_size, 6), [num_rows, length]).astype(np.int32)
    ends = rng.integers(2, length + 1, num_rows)
    ends[1:2] = 0
    ids[np.arange(length) >= ends[:, None]] = 0
    splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return (ids[:, :-1], ids[:, 1:]), splits


def _run(way, weights, rows, splits, clip_norm):
    total, units = way(weights, rows, splits, clip_norm)
    assert all(x.dtype in (tf.float32, tf.float64) for x in total)
    assert all(x.dtype == tf.float64 for x in units)
    return [x.numpy() for x in total], units.norms.numpy()


def _loop(model, **options):
    return clipped_sums.looped(clipped_sums.language_rows(model), **options)


def _assert_same(found, expected, clip_norm):
    """Norms agree to a part of what the clip's margin allows, and so do sums.

    That is some eighty roundings of float32, of the terms that a norm or a sum has.
    """
    margin = clipping.CLIP_MARGIN / 2
    (totals, norms), (expected_totals, expected_norms) = found, expected
    np.testing.assert_allclose(norms, expected_norms, rtol=margin, atol=margin * 1e-3)
    scale = np.minimum(expected_norms, clip_norm)
    scale = scale[np.isfinite(expected_norms)].sum()
    for total, expected_total in zip(totals, expected_totals, strict=True):
        np.testing.assert_allclose(total, expected_total, rtol=0, atol=margin * scale)


@pytest.mark.parametrize(
    ("rows_per_unit", "name"),
    [
        pytest.param(
            *pair, marks=[] if pair in ((3, "lstm"), (3, "transformer")) else [pytest.mark.slow]
        )
        for pair in itertools.product(_COUNTS, _MODELS)
    ],
)
def test_one_pass_is_one_gradient_after_the_other(name, rows_per_unit):
    model, weights = _MODELS[name], _weights(_MODELS[name])
    rows, splits = _rows(model, _COUNTS[rows_per_unit])
    booked, loop = ghost.booked(model, rows_per_unit), _loop(model)
    norms = _run(loop, weights, rows, splits, 1.0)[1]
    assert np.count_nonzero(norms) == 3
    for clip_norm in (np.median(norms[norms > 0]), _NO_CLIP):
        expected = _run(loop, weights, rows, splits, clip_norm)
        found = _run(booked, weights, rows, splits, clip_norm)
        _assert_same(found, expected, clip_norm)
        assert all(np.abs(x).max() > 1e-4 for x in expected[0])


@pytest.mark.parametrize("name", ["lstm-words", "transformer", *_slow("lstm", "transformer-words")])
def test_rows_without_padding_are_taken_together(name):
    model, weights = _MODELS[name], _weights(_MODELS[name])
    words = np.random.default_rng(0).integers(1, 6, [6, model.sequence_length + 1])
    words = words.astype(np.int32)
    rows, splits = (words[:, :-1], words[:, 1:]), np.array([0, 2, 4, 6])
    norms = _run(_loop(model), weights, rows, splits, 1.0)[1]
    clip_norm = np.median(norms)
    expected = _run(_loop(model), weights, rows, splits, clip_norm)
    _assert_same(
        _run(ghost.booked(model, 2), weights, rows, splits, clip_norm), expected, clip_norm
    )


def _random_tokens(seed, units=3, tokens=24, inputs=7, outputs=50):
    """Float32 inputs and gradients that cancel each other more from unit to unit."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=[units, tokens, inputs])
    x[:, 1::2] = x[:, ::2]
    gradient = rng.normal(size=[units, tokens, outputs])
    rest = np.logspace(0, -2, units)[:, None, None]
    gradient[:, 1::2] = rest * gradient[:, 1::2] - (1 - rest) * gradient[:, ::2]
    return x.astype(np.float32), gradient.astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_the_norm_of_compared_tokens_is_off_by_no_more_than_is_proven(seed):
    x, gradient = _random_tokens(seed)
    found = ghost._compared_tokens(0.0, tf.constant(gradient), tf.constant(x))
    wide, wide_gradient = x.astype(np.float64), gradient.astype(np.float64)
    exact = np.linalg.norm(np.einsum("uti,uto->uio", wide, wide_gradient), axis=(1, 2))
    sizes = np.linalg.norm(wide, axis=2) * np.linalg.norm(wide_gradient, axis=2)
    lengths = sizes.sum(axis=1)
    assert lengths[0] / exact[0] < 10 and lengths[-1] / exact[-1] > 60
    error = np.abs(np.sqrt(found.square.numpy()) - exact)
    roundings = x.shape[1] + 2 + (ghost._ADDED + 2) / 2
    assert np.all(error <= roundings * 2.0**-24 * lengths)
    np.testing.assert_allclose(np.sqrt(found.length_squared.numpy()), lengths, rtol=1e-5)
    assert not found.between.numpy().any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_compared_tokens_that_are_not_finite_spoil_their_own_unit_only(value):
    x, gradient = _random_tokens(0)
    expected = ghost._compared_tokens(1.0, tf.constant(gradient), tf.constant(x))
    for broken in (x, gradient):
        kept, broken[1, 5, 3] = broken[1, 5, 3], value
        found = ghost._compared_tokens(1.0, tf.constant(gradient), tf.constant(x))
        broken[1, 5, 3] = kept
        assert not np.isfinite(found.square[1])
        for unit in (0, 2):
            np.testing.assert_array_equal(found.square[unit], expected.square[unit])


@pytest.mark.parametrize("tokens", [1, 30, 256])
def test_tokens_that_are_alike_have_a_factor(tokens):
    rng = np.random.default_rng(0)
    inputs = np.stack([np.zeros([tokens, 3]), np.ones([tokens, 3]), rng.normal(size=[tokens, 3])])
    inputs[2] *= np.logspace(-12, 12, tokens)[:, None]
    alike = inputs @ inputs.transpose(0, 2, 1)
    factor = ghost._factor(tf.constant(alike), 3).numpy()
    scale = np.sqrt(np.einsum("utt,uss->uts", alike, alike))
    assert np.all(np.abs(factor @ factor.transpose(0, 2, 1) - alike) <= 1e-10 * scale + 2e-30)


@pytest.mark.parametrize("size", [1024, 16384])
def test_products_of_long_inputs_may_be_off_by_a_rounding_for_each_entry(size):
    inputs = np.full(size, 43 * 2.0**-32)  # Squares are almost a last place of the first one's.
    inputs[0] = 1.0
    x = np.stack([inputs, 1.5 * inputs])[None].astype(np.float32)
    found = ghost._compared_tokens(0.0, tf.ones([1, 2, 3]), tf.constant(x))
    exact = 3 * np.square(2.5 * np.linalg.norm(inputs))
    np.testing.assert_allclose(found.square, [exact], rtol=1e-5)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
@pytest.mark.parametrize("rows_per_unit", [3, *_slow(1)])
def test_the_loss_of_a_unit_is_the_mean_of_its_rows(name, rows_per_unit):
    model, weights = _MODELS[name], _weights(_MODELS[name])
    rows, splits = _rows(model, _COUNTS[rows_per_unit])
    losses = clipped_sums.language_rows(model)(weights, rows).numpy()
    bounds = zip(splits[:-1], splits[1:], strict=True)
    expected = [losses[a:b].mean() if b > a else 0.0 for a, b in bounds]
    for way in (ghost.booked(model, rows_per_unit), _loop(model)):
        np.testing.assert_allclose(way(weights, rows, splits, 0.1)[1].losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *("lstm", "transformer-words", "gpt2", "llama-wide"),
        *_slow("lstm-words", "transformer", "gpt2-wide", "llama"),
    ],
)
def test_an_embedding_that_is_tied_needs_the_product_of_both_uses(name, monkeypatch):
    model, weights = _MODELS[name], _weights(_MODELS[name])
    rows, splits = _rows(model, _COUNTS[1])
    expected = _run(_loop(model), weights, rows, splits, 0.5)
    monkeypatch.setattr(ghost, "_ties", lambda results: {})
    looked_up = ghost._looked_up
    monkeypatch.setattr(
        ghost,
        "_looked_up",
        lambda words, of_words, number, _: looked_up(words, of_words, number, None),
    )
    found = _run(ghost.booked(model, 1), weights, rows, splits, 0.5)
    assert np.abs(found[1] / expected[1].clip(1e-9) - 1).max() > 100 * clipping.CLIP_MARGIN
    with pytest.raises(AssertionError):
        _assert_same(found, expected, 0.5)


@pytest.mark.parametrize("seed", [*range(5), *_slow(5, 6, 7)])
def test_any_shape_will_do(seed):
    rng = np.random.default_rng(seed)
    sizes = {"vocabulary_size": 7 + seed, "sequence_length": int(rng.integers(1, 7))}
    names = [name for name in table.MODELS if table.build(name, **sizes).reports_uses]
    model = small_models.build(names[seed % len(names)], **sizes)
    rows_per_unit = int(rng.integers(1, 5))
    counts = rng.integers(0, rows_per_unit + 1, 5)
    rows, splits = _rows(model, counts, seed)
    clip_norm = float(rng.choice([0.05, 0.5, 5.0]))
    weights = _weights(model, seed)
    _assert_same(
        _run(ghost.booked(model, rows_per_unit), weights, rows, splits, clip_norm),
        _run(_loop(model), weights, rows, splits, clip_norm),
        clip_norm,
    )


@pytest.mark.parametrize("name", ["lstm", *_slow("transformer")])
def test_units_without_words_and_chunks_without_units_add_zero(name):
    model, weights = _MODELS[name], _weights(_MODELS[name])
    for counts in ([], [0], [0, 0]):
        total, norms = _run(ghost.booked(model, 2), weights, *_rows(model, counts), 1.0)
        assert norms.shape == (len(counts),) and not norms.any()
        assert [x.shape for x in total] == list(model.weight_shapes.values())
        assert not any(x.any() for x in total)
    only_padding = np.zeros([2, model.sequence_length], np.int32)
    total, norms = _run(ghost.booked(model, 1), weights, (only_padding,) * 2, [0, 1, 2], 1.0)
    assert not norms.any() and not any(x.any() for x in total)


@pytest.mark.parametrize(
    ("name", "value"), [("lstm-untied", np.nan), ("lstm-untied", 1e30), ("lstm-wide", np.nan)]
)
def test_a_unit_that_is_not_finite_counts_as_zero(name, value):
    model = dataclasses.replace(_MODELS[name], tie_embeddings=False)
    weights = _weights(model)
    (words, targets), splits = _rows(model, _COUNTS[3])
    words[splits[3]] = 10  # In no other unit.
    rows = words, targets
    embedding = weights[0].numpy()
    embedding[10] = value
    broken = [tf.constant(embedding), *weights[1:]]
    if value == 1e30:
        # Gates that large saturate, but their kernel's gradient is as large.
        broken[1] = tf.ones_like(broken[1]) * 1e-30
    booked = ghost.booked(model, 3)
    found = _run(booked, broken, rows, splits, 0.5)
    assert np.isinf(found[1][3]) and np.isfinite(found[1][:3]).all()
    _assert_same(found, _run(_loop(model), broken, rows, splits, 0.5), 0.5)
    without = tuple(x[: splits[3]] for x in rows)
    expected = _run(booked, broken, without, splits[:-1], 0.5)
    assert all(np.isfinite(x).all() for x in found[0])
    _assert_same((found[0], found[1][:3]), expected, 0.5)


@pytest.mark.parametrize(
    "name", ["lstm", "transformer-wide", "llama", *_slow("gpt2", "llama-untied")]
)
def test_no_unit_moves_the_sum_by_more_than_the_clip_norm(name):
    model, weights = _MODELS[name], _weights(_MODELS[name])
    rows, splits = _rows(model, _COUNTS[3])
    booked = ghost.booked(model, 3)
    total, norms = _run(booked, weights, rows, splits, 0.1)
    assert norms[0] > 0.1
    fewer = tuple(x[3:] for x in rows), splits[1:] - 3
    without, _ = _run(booked, weights, *fewer, 0.1)
    moved = np.sqrt(sum(np.sum((x - y) ** 2) for x, y in zip(total, without, strict=True)))
    assert 0.1 * (1 - 2 * clipping.CLIP_MARGIN) < moved <= 0.1


def _contradicting(model, rows_per_unit=2):
    """Weights at which a unit's rows, alike but for the last word, want the contrary."""
    words = np.tile(np.arange(1, model.sequence_length + 1, dtype=np.int32), [rows_per_unit, 1])
    targets = np.roll(words, -1, axis=1)
    targets[:, -1] = np.arange(1, rows_per_unit + 1)
    rows = words, targets
    losses = clipped_sums.language_rows(model)
    weights = [tf.Variable(weight) for weight in _weights(model)]
    optimizer = tf.keras.optimizers.Adam(0.02)

    optimizer.build(weights)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(weights, rows))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    for rate in (0.02, 0.005, 0.001, 2e-4, 4e-5):
        optimizer.learning_rate = rate
        for _ in range(300):
            step()
    return [tf.constant(weight) for weight in weights], rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm-wide", "transformer-wide"])
def test_rows_that_contradict_each_other_move_the_sum_by_no_more_than_the_clip_norm(name):
    model = _MODELS[name]
    weights, alone = _contradicting(model)
    (words, targets), splits = _rows(model, [2, 2, 1])
    rows = np.concatenate([alone[0], words]), np.concatenate([alone[1], targets])
    splits = np.concatenate([[0], splits + 2])
    found = _run(ghost.booked(model, 2), weights, rows, splits, 1e-4)
    expected = _run(_loop(model), weights, rows, splits, 1e-4)
    norms = expected[1]
    assert norms[0] < 0.01 * norms[1:].min()  # Its gradients cancel,
    clip_norm = norms[0] / 3  # and are clipped all the same.
    total, _ = _run(ghost.booked(model, 2), weights, alone, splits[:2], clip_norm)
    moved = np.sqrt(sum(np.sum(x**2) for x in total))
    assert clip_norm * (1 - 2 * clipping.CLIP_MARGIN) < moved <= clip_norm
    _assert_same(found, expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_graph_computes_the_same_every_time(name):
    model, weights = _MODELS[name], _weights(_MODELS[name])
    rows, splits = _rows(model, _COUNTS[3])
    clip_norm = tf.constant(0.5, tf.float64)
    booked = tf.function(ghost.booked(model, 3), autograph=False)
    found, again = (_run(booked, weights, rows, splits, clip_norm) for _ in range(2))
    _assert_same(found, _run(_loop(model), weights, rows, splits, 0.5), 0.5)
    np.testing.assert_array_equal(found[1], again[1])
    for x, y in zip(found[0], again[0], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("units_per_chunk", [3, 7])
def test_chunks_add_up_and_normalised_units_have_norm_one_at_most(units_per_chunk):
    model, weights = _LSTM, _weights(_LSTM)
    rows, splits = _rows(model, [1, 2, 2, 0, 1, 2, 1])
    booked = ghost.booked(model, 2, normalised=True)
    add = clipped_sums.sum_in_chunks(booked, units_per_chunk=units_per_chunk)
    total, units = add(weights, lambda begin, end: tuple(x[begin:end] for x in rows), splits, 0.2)
    found = total, units.norms
    expected = _run(_loop(model, normalised=True), weights, rows, splits, 0.2)
    assert (expected[1] > 0.2).sum() > 3
    _assert_same(found, expected, 1.0)


def test_thousands_of_small_scores_are_not_lost_beside_a_large_one():
    # All probabilities are near 1/V: a square of one is half a unit in the last place of 1.
    model = dataclasses.replace(_LSTM, vocabulary_size=4096)
    weights = [tf.constant(w) for w in model.initial_weights(0)]
    rows, splits = _rows(model, [1] * 8)
    norms = _run(ghost.booked(model, 1), weights, rows, splits, 1.0)[1]
    expected = _run(_loop(model), weights, rows, splits, 1.0)[1]
    np.testing.assert_allclose(norms, expected, rtol=clipping.CLIP_MARGIN / 10)


def test_the_way_is_chosen_by_model_and_rows():
    for name in table.MODELS:
        model = small_models.build(name, vocabulary_size=11, sequence_length=5)
        for rows_per_unit in (2, 100):
            chosen = ghost.fastest_clipped_sum(model, rows_per_unit)
            is_loop = chosen.function.__qualname__.startswith("looped")
            assert is_loop == (rows_per_unit == 100 or not model.reports_uses)


def test_graphs_are_kept_for_models_of_the_same_sizes_and_for_no_others():
    kept, same = (ghost.fastest_clipped_sum(dataclasses.replace(_LSTM), 99) for _ in range(2))
    assert kept is same
    others = [
        ghost.fastest_clipped_sum(dataclasses.replace(_LSTM, state_size=5), 99),
        ghost.fastest_clipped_sum(_UsedTwice(**dataclasses.asdict(_LSTM)), 99),
        ghost.fastest_clipped_sum(_LSTM, 98),
        ghost.fastest_clipped_sum(_LSTM, 99, normalised=True),
        # Its graphs have weights in them.
        *(ghost.fastest_clipped_sum(_MODELS["gpt2-adapters"], 99) for _ in range(2)),
    ]
    assert len({id(each) for each in [kept, *others]}) == 7
    weights, (rows, splits) = _weights(_LSTM), _rows(_LSTM, [1, 2])
    read = lambda begin, end: tuple(x[begin:end] for x in rows)  # noqa: E731
    for _ in range(2):
        clipped_sums.sum_in_chunks(kept, units_per_chunk=1)(weights, read, splits, 0.5)
    (graph,) = kept.graphs.values()
    assert graph.experimental_get_tracing_count() == 1


def test_what_does_not_fit_is_refused():
    rows, splits = _rows(_LSTM, [3, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="more rows than rows_per_unit"):
        _run(ghost.booked(_LSTM, 2), _weights(_LSTM), rows, splits, 1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits must go from 0"):
        _run(ghost.booked(_LSTM, 3), _weights(_LSTM), rows, splits[:-1], 1.0)
    with pytest.raises(ValueError, match="rows_per_unit must be at least 1, got 0"):
        ghost.fastest_clipped_sum(_LSTM, 0)
    normed = dataclasses.replace(_LSTM, unit_norm_embeddings=True)
    with pytest.raises(ValueError, match="WordLstm, which does not report its uses of weights"):
        ghost.booked(normed, 1)


class _UsedTwice(word_lstm.WordLstm):
    """A model that uses its projection in a second place, too."""

    def compact_logits(self, weights, words, record=weight_uses.ignore):
        logits, positions = super().compact_logits(weights, words, record)
        outputs = record(logits, weight_uses.Bias("gate_bias"), order=positions)
        return outputs, positions


def test_a_weight_used_twice_in_another_way_is_refused():
    model = _UsedTwice(11, 5, embedding_size=6, state_size=4)
    with pytest.raises(NotImplementedError, match="the weight gate_bias is used in 2 places"):
        _run(ghost.booked(model, 1), _weights(model), *_rows(model, [1]), 1.0)


@pytest.mark.parametrize(
    "name",
    [
        "llama-wide",
        *_slow("gpt2", "transformer", "llama-wide-adapters"),
    ],
)
def test_in_bfloat16_what_is_added_is_what_was_clipped(name):
    model = _MODELS[name]
    weights, (rows, splits) = _weights(model), _rows(model, [2])
    ways = [
        ghost.booked(model, 2, compute_dtype="bfloat16"),
        clipped_sums.looped(clipped_sums.language_rows(model, "bfloat16")),
    ]
    exact, _ = _run(ghost.booked(model, 2), weights, rows, splits, _NO_CLIP)
    exact = np.concatenate([np.ravel(x) for x in exact])
    for way in ways:
        whole, (norm,) = _run(way, weights, rows, splits, _NO_CLIP)
        whole = np.concatenate([np.ravel(x) for x in whole]).astype(np.float64)
        np.testing.assert_allclose(np.linalg.norm(whole), norm, rtol=clipping.CLIP_MARGIN / 2)
        # It is another gradient, and not far off.
        away = np.linalg.norm(whole - exact) / np.linalg.norm(exact)
        assert 1e-4 < away < 0.1
        for clip_norm in (0.7 * norm, norm, 1e-3):
            clipped, _ = _run(way, weights, rows, splits, clip_norm)
            clipped = np.concatenate([np.ravel(x) for x in clipped]).astype(np.float64)
            length = np.linalg.norm(clipped)
            assert length <= clip_norm
            np.testing.assert_allclose(length, clip_norm, rtol=2 * clipping.CLIP_MARGIN)


def test_what_bfloat16_and_recomputing_are_not_for_is_refused():
    with pytest.raises(ValueError, match="compute_dtype must be one of float32 for a WordLstm"):
        ghost.fastest_clipped_sum(_LSTM, 1, compute_dtype="bfloat16")
    with pytest.raises(ValueError, match="compute_dtype must be one of float32, bfloat16 for a"):
        ghost.booked(_TRANSFORMER, 1, compute_dtype="float16")
    with pytest.raises(ValueError, match="gradient_checkpointing is for .* units of up to 5: lea"):
        ghost.fastest_clipped_sum(_TRANSFORMER, 1, recompute=True)
    with pytest.raises(ValueError, match="gradient_checkpointing is for .*here a WordLstm has"):
        ghost.fastest_clipped_sum(_LSTM, 100, recompute=True)


@pytest.mark.parametrize(
    "name",
    [
        "transformer",
        *_slow("gpt2", "llama", "transformer-deep", "gpt2-adapters"),
    ],
)
def test_recomputing_the_blocks_changes_no_gradient(name):
    model = _MODELS[name]
    weights, (rows, splits) = _weights(model), _rows(model, [3, 1])
    kept = _run(_loop(model), weights, rows, splits, 0.5)
    again = tf.function(ghost.fastest_clipped_sum(model, 100, recompute=True), autograph=False)
    found = _run(again, weights, rows, splits, 0.5)
    # As far as the order of a sum may change: TensorFlow fuses other operations.
    _assert_same(found, kept, 0.5)
