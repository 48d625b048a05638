"""Tests of what is measured on public text, against gradients taken one user at a time."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.data import jsonl, sequences, tokenizer, user_text, vocabulary
from tff_dpftrl.finetuning import example_sampling, group_size, proxies
from tff_dpftrl.models import low_rank, metrics, transformer
from tff_dpftrl.training import trained_model

_WORDS = vocabulary.Vocabulary(tuple("abcdefgh"), "made up")
_MODEL = transformer.Transformer(_WORDS.size, 5, 4, 1, 1, 6)
_ADAPTERS = low_rank.LowRank(_MODEL, _MODEL.initial_weights(2), 3)


def _corpus():
    rng = np.random.default_rng(0)
    texts = {
        f"u{i}": [" ".join(rng.choice(list("abcdefgh"), rng.integers(2, 5))) for _ in range(i % 5)]
        for i in range(10)
    }
    texts["silent"] = ["..."[:0]]
    corpus = user_text.UserText.from_mapping("public", texts)
    return sequences.SequenceCorpus(corpus, _WORDS, sequences.SequenceSpec(5, False))


def _norm(model, weights, rows):
    """‖gradient of the mean over rows of the mean loss of each‖."""
    weights = [tf.constant(weight) for weight in weights]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        losses = []
        for row in rows:
            (kept,) = np.nonzero(row[1:])
            logits = model.logits(weights, row[None, :-1])[0]
            losses.append(
                tf.reduce_mean(metrics.cross_entropy(tf.gather(logits, kept), row[1:][kept]))
            )
        loss = tf.reduce_mean(losses)
    return float(tf.linalg.global_norm(tape.gradient(loss, weights)))


@pytest.mark.parametrize("model", [_MODEL, pytest.param(_ADAPTERS, marks=pytest.mark.slow)])
def test_norms_are_medians_over_users_of_their_first_examples(model):
    corpus, weights = _corpus(), model.initial_weights(3)
    found = proxies.measure(corpus, model, weights, largest_group=3, seed=1, source="x")
    ids = [user for user in corpus.user_ids if len(corpus.sequences(user))]
    assert found.num_users == len(ids) == 8 and found.source == "x"
    assert found.gradient_norms.group_sizes == (1, 2, 4)
    users = example_sampling.Users(tuple(ids), np.array([len(corpus.sequences(u)) for u in ids]))
    chosen, orders = group_size.probe(users, largest_group=4, seed=1)
    expected = [
        np.median(
            [
                _norm(model, weights, corpus.sequences(ids[user])[order[:size]])
                for user, order in zip(chosen, orders, strict=True)
            ]
        )
        for size in (1, 2, 4)
    ]
    np.testing.assert_allclose(found.gradient_norms.norms, expected, rtol=1e-4)


@pytest.mark.slow
def test_a_model_is_measured_on_the_text_of_a_file(tmp_path):
    corpus, weights = _corpus(), _MODEL.initial_weights(3)
    path = tmp_path / "public.jsonl"
    jsonl.write(corpus.corpus, path)
    trained = trained_model.TrainedModel(_MODEL, weights, _WORDS, tokenizer.Tokenizer())
    found = proxies.of_model(trained, str(path), protected="docs", largest_group=3, seed=1)
    expected = proxies.measure(corpus, _MODEL, weights, largest_group=3, seed=1, source="x")
    assert found.gradient_norms == expected.gradient_norms
    assert found.source == "public.jsonl, declared public by the operator"
    with pytest.raises(ValueError, match="is the file of the users to be protected"):
        proxies.of_model(trained, str(path), protected=str(path), largest_group=3)


def test_text_without_words_is_refused():
    corpus = user_text.UserText.from_mapping("public", {"u": [""]})
    encoded = sequences.SequenceCorpus(corpus, _WORDS, sequences.SequenceSpec(5, False))
    with pytest.raises(ValueError, match="proxy_data has no user with a word"):
        proxies.measure(
            encoded, _MODEL, _MODEL.initial_weights(0), largest_group=1, seed=0, source=""
        )
