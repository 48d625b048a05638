"""Language models as functional models: in TFF's own training, and what they count."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.models import small_models
from tff_dpftrl.learning import functional_model
from tff_dpftrl.learning import model as model_lib
from tff_dpftrl.models import evaluation, metrics, table, text_cache, word_lstm
from tff_dpftrl.runtime.plans import allowed_ops, verification

_MODEL = word_lstm.WordLstm(10, sequence_length=4, embedding_size=3, state_size=5)
_SPECIAL = metrics.SpecialIds(oov=7, bos=8, eos=9)


def _rows(seed, count):
    """Sequences in which each word is the one before plus 1, modulo 6."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 6, count)
    rows = np.zeros([count, 5], np.int32)
    rows[:, 0] = 8
    rows[:, 1:4] = 1 + (starts[:, None] + np.arange(3)) % 6
    rows[: count // 2, 3] = 9
    rows[count // 2 :, 4] = 9
    return rows


def _dataset(rows, batch_size=4):
    return tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:])).batch(batch_size)


def _loss(weights, rows):
    """Mean cross-entropy of the targets, from the full logits."""
    logits = tf.reshape(_MODEL.logits(weights, rows[:, :-1]), [-1, 10])
    targets = rows[:, 1:].reshape(-1)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
    return tf.reduce_mean(tf.boolean_mask(losses, targets != 0))


def _build(model=_MODEL, special=_SPECIAL):
    tff = pytest.importorskip("tensorflow_federated", reason="trains with TFF")
    from tff_dpftrl.learning import local_model

    return tff.learning.algorithms.build_unweighted_fed_avg(
        local_model.as_tff(functional_model.build(model, special, seed=1)),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


@pytest.fixture(name="process", scope="module")
def _process():
    return _build()


def test_it_starts_from_the_seeds_weights(process):
    weights = process.initialize().global_model_weights.trainable
    for weight, expected in zip(weights, _MODEL.initial_weights(1), strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_a_round_is_local_sgd_and_its_mean(process):
    clients = [_rows(0, 10), _rows(1, 6)]
    deltas = []
    for rows in clients:
        weights = [tf.constant(w) for w in _MODEL.initial_weights(1)]
        for start in range(0, len(rows), 4):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = _loss(weights, rows[start : start + 4])
            gradients = map(tf.convert_to_tensor, tape.gradient(loss, weights))
            weights = [w - 0.5 * g for w, g in zip(weights, gradients, strict=True)]
        deltas.append([w - w0 for w, w0 in zip(weights, _MODEL.initial_weights(1), strict=True)])
    output = process.next(process.initialize(), [_dataset(rows) for rows in clients])
    new_weights = output.state.global_model_weights.trainable
    for weight, start, *steps in zip(new_weights, _MODEL.initial_weights(1), *deltas, strict=True):
        np.testing.assert_allclose(weight, start + sum(steps) / 2, rtol=1e-4, atol=1e-6)


def test_training_metrics_are_sums_over_clients(process):
    clients = [_rows(0, 10), _rows(1, 6)]
    output = process.next(process.initialize(), [_dataset(rows, 100) for rows in clients])
    measured = output.metrics["client_work"]["train"]
    # With one batch a client, all predictions are made by the initial weights.
    rows = np.concatenate(clients)
    expected = evaluation.Evaluator(_MODEL, _SPECIAL, rows)(_MODEL.initial_weights(1))
    assert set(measured) == {*expected, "num_sequences"}
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, rel=1e-5), name
    assert measured["num_sequences"] == 16


@pytest.mark.slow
def test_it_learns(process):
    state = process.initialize()
    evaluate = evaluation.Evaluator(_MODEL, _SPECIAL, _rows(99, 100))
    before = evaluate(state.global_model_weights.trainable)
    for round_num in range(40):
        clients = [_dataset(_rows(10 * round_num + client, 32)) for client in range(3)]
        state = process.next(state, clients).state
    after = evaluate(state.global_model_weights.trainable)
    # The first word is one of six; the others follow from the one before.
    assert after["loss"] < before["loss"] - 0.8
    assert after["top1_in_vocab"] > 0.5 > before["top1_in_vocab"]


def test_a_client_without_batches_sends_zeros(process):
    rows = np.zeros([0, 5], np.int32)
    output = process.next(process.initialize(), [_dataset(rows)])
    weights = output.state.global_model_weights.trainable
    for weight, expected in zip(weights, _MODEL.initial_weights(1), strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert output.metrics["client_work"]["train"]["num_targets"] == 0


def test_a_batch_of_padding_has_no_gradient(process):
    rows = np.zeros([4, 5], np.int32)
    output = process.next(process.initialize(), [_dataset(rows)])
    weights = output.state.global_model_weights.trainable
    for weight, expected in zip(weights, _MODEL.initial_weights(1), strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_it_takes_batches_of_ids():
    spec = tf.TensorSpec([None, 20], tf.int32)
    model = functional_model.build(word_lstm.WordLstm(10), _SPECIAL, seed=0)
    assert model.input_spec == (spec, spec)


@pytest.mark.slow
def test_somebody_s_functional_model_is_read_as_a_language_model():
    weights = _MODEL.initial_weights(0)

    @tf.function
    def predict_on_batch(model_weights, x, training=True):
        del training
        named = model_weights[0]
        return _MODEL.logits((*named["a"], *(named["b"][key] for key in "xyz")), x)

    def loss(output, label, sample_weight=None):
        raise NotImplementedError  # Not used.

    spec = tf.TensorSpec([None, 4], tf.int64)
    last = collections.OrderedDict(z=weights[5], y=weights[4])
    theirs = model_lib.Model(
        # A mapping's leaves are in the order of its keys: "y" is the fifth weight.
        initial_weights=({"b": {"x": weights[3], **last}, "a": weights[:3]}, ()),
        predict_on_batch=predict_on_batch,
        loss=loss,
        input_spec={"x": spec, "y": spec},
    )
    ours = functional_model.to_language_model(theirs, vocabulary_size=10, sequence_length=4)
    assert list(ours.weight_shapes) == [f"weights/{n}" for n in ("a/0", "a/1", "a/2")] + [
        f"weights/b/{n}" for n in "xyz"
    ]
    for copied, weight in zip(ours.initial_weights(5), weights, strict=True):
        np.testing.assert_array_equal(copied, weight)
    words = _rows(0, 3)[:, :-1]
    np.testing.assert_allclose(
        ours.logits(weights, words), _MODEL.logits(weights, words), rtol=1e-6
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gboard-cifg" else [pytest.mark.slow])
        for name in table.MODELS
    ],
)
def test_every_model_of_the_table_learns(name):
    model = small_models.build(name, vocabulary_size=11, sequence_length=5)
    special = metrics.SpecialIds(oov=8, bos=9, eos=10)
    process = _build(model, special)
    from tff_dpftrl.execution import compiled_process

    process = compiled_process.compile_process(process)
    # After a word comes the next of seven.
    rows = 1 + (np.arange(28)[:, np.newaxis] + np.arange(6)) % 7
    rows = rows.astype(np.int32)
    client = tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:])).batch(4)
    evaluate = evaluation.Evaluator(model, special, rows)
    state = process.initialize()
    before = evaluate(state.global_model_weights.trainable)
    assert before["loss"] == pytest.approx(np.log(11), abs=0.3)
    for _ in range(8):
        state = process.next(state, [client, client]).state
    after = evaluate(state.global_model_weights.trainable)
    assert after["loss"] < before["loss"] - 1.2


_WINDOW = 5  # Sequences that the cache of these tests counts.


def _by_hand(scores, history, places, window=_WINDOW):
    """Words, words that the model gets right, and with the cache, by dictionaries and loops."""
    every, earlier = np.zeros(3, int), np.zeros(3, int)
    for place in places:
        row, seen = history[place].tolist(), collections.defaultdict(collections.Counter)
        for before in history[max(place - window, 0) : place].tolist():
            for t in range(1, 5):
                if before[t] not in (0, 8):
                    for order in range(4):
                        seen[tuple([0, 0, *before[:t]][-order:] if order else [])][before[t]] += 1
        for t in range(1, 5):
            if row[t] in (0, 7, 8, 9):
                continue
            shares = np.exp(scores[place, t - 1]) / np.exp(scores[place, t - 1]).sum()
            cached, weight = np.zeros(10), 0.0
            for order in range(4):
                found = seen.get(tuple([0, 0, *row[:t]][-order:] if order else []))
                if found:
                    numbers = np.array([found[i] for i in range(10)])
                    lower = len(found) if order else 0
                    cached = (numbers + lower * cached) / (numbers.sum() + lower)
                    weight = text_cache.WEIGHTS[order]
            mixed = (1 - weight) * shares + weight * cached
            right = [(p[1:7] >= p[row[t]]).sum() == 1 for p in (shares, mixed)]
            every += [1, *right]
            earlier += [place > 0, *(place > 0 and one for one in right)]
    return every.tolist(), earlier.tolist()


@pytest.fixture(name="count", scope="module")
def _count():
    """A function that adds a batch, places of a client's sequences, to sums; and the model."""
    model = functional_model.build(_MODEL, _SPECIAL, seed=1, with_cache=True)

    def add(state, history, places):
        x = tf.gather(history, places)[:, :-1]
        labels = collections.OrderedDict(history=history, places=places)
        output = model.predict_on_batch(model.initial_weights, x, training=False)
        made = model_lib.BatchOutput(model.loss(output, labels), output, None)
        return model.update_metrics_state(state, labels, made)

    specs = [
        tf.nest.map_structure(tf.TensorSpec.from_tensor, model.initialize_metrics_state()),
        tf.TensorSpec([None, 5], tf.int32),
        tf.TensorSpec([None], tf.int32),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional_model, "_CACHED", 4 * _WINDOW + 3)
        run = tf.function(add, autograph=False).get_concrete_function(*specs)
    return run, model


def _found(count, history, places):
    run, model = count
    sums = model.initialize_metrics_state()
    for pair in np.reshape(places, [-1, 2]).astype(np.int32):
        sums = run(sums, tf.constant(history), tf.constant(pair))
    final = model.finalize_metrics(sums)
    earlier = [
        int(sums["earlier_text"][n]) for n in ("num_in_vocab", "num_top1", "num_top1_with_cache")
    ]
    return sums["counts"], earlier, {name: float(value) for name, value in final.items()}


def _text(seed, count):
    """Sequences of a user who writes some again and again, with words out of the vocabulary."""
    rng = np.random.default_rng(seed)
    own, rows = rng.integers(1, 8, [6, 3]), np.zeros([count, 5], np.int32)
    for row in rows:
        words = own[rng.integers(6)][: rng.integers(1, 4)]
        row[: len(words) + 2] = [8, *words, 9]
    return rows


def test_a_cache_of_earlier_text_is_that_of_plain_counts(count):
    history = _text(3, 20)
    scores = np.asarray(_MODEL.logits(_MODEL.initial_weights(1), history[:, :-1]), np.float64)
    for places in (np.arange(20), np.random.default_rng(5).permutation(20)[:8], [0, 0], [7, 6]):
        counts, earlier, final = _found(count, history, places)
        every, expected = _by_hand(scores, history, places)
        assert earlier == expected
        assert [int(counts[name]) for name in ("num_in_vocab", "num_top1")] == every[:2]
        assert final["top1_in_vocab_with_cache"] == pytest.approx(every[2] / every[0])
        assert final["earlier_text_num_in_vocab"] == expected[0]
        for name, right in zip(("", "_with_cache"), expected[1:], strict=True):
            accuracy = right / expected[0] if expected[0] else 0.0
            assert final[f"earlier_text_top1_in_vocab{name}"] == pytest.approx(accuracy)
    # What is compared above depends on the cache, and on which text it holds.
    every, earlier = _by_hand(scores, history, np.arange(20))
    assert every[0] > earlier[0] and every[2] > every[1] + 3
    assert _by_hand(scores, history, np.arange(20), window=20) != (every, earlier)


def test_a_client_without_earlier_text_counts_apart(count):
    _, earlier, final = _found(count, _text(3, 1), [0, 0])
    assert final["num_in_vocab"] > 0 and earlier == [0, 0, 0]
    assert final["top1_in_vocab_with_cache"] == final["top1_in_vocab"]
    _, _, final = _found(count, np.zeros([0, 5], np.int32), [])
    assert {name for name, value in final.items() if value} == {"perplexity"}  # It is 1.


def test_a_cache_changes_no_other_metric_and_needs_no_new_operation(count):
    rows = _text(4, 6)
    _, _, final = _found(count, rows, np.arange(6))
    scores = tf.reshape(_MODEL.logits(_MODEL.initial_weights(1), rows[:, :-1]), [-1, 10])
    expected = metrics.finalize(metrics.count(scores, rows[:, 1:].reshape(-1), _SPECIAL))
    for name, value in expected.items():
        assert final[name] == pytest.approx(float(value), rel=1e-5), name
    assert final["num_sequences"] == 6
    ops = verification.operations(count[0].graph.as_graph_def())
    assert set(ops) <= allowed_ops.allowed(1) - allowed_ops.DRAWS_ANEW


def test_training_needs_no_more_than_the_interface():
    model, special = small_models.Bigrams(6, 4), metrics.SpecialIds(oov=3, bos=4, eos=5)
    rows = np.array([[4, 1, 2, 5, 0]], np.int32)
    federated = functional_model.build(model, special, seed=7)
    np.testing.assert_array_equal(federated.initial_weights[0][0], model.initial_weights(7)[0])
    output = federated.predict_on_batch(federated.initial_weights, rows[:, :-1], training=False)
    assert np.isfinite(federated.loss(output, rows[:, 1:]))
