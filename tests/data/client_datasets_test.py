"""Tests of tff_dpftrl.data.client_datasets."""

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.data import client_datasets, sequences, user_text, vocabulary

_VOCABULARY = vocabulary.Vocabulary(("a", "b", "c", "d's", "."), "test")


def _user_text():
    rng = np.random.default_rng(0)
    words = ["a", "B", "c", "D's", ".", "unknown", "12"]
    return user_text.UserText.from_mapping(
        "m",
        {
            f"user {i}": [" ".join(rng.choice(words, rng.integers(0, 15))) for _ in range(i * 3)]
            for i in range(4)
        },
    )


def _rows(dataset):
    """Joins the batches of a dataset into rows of T + 1 ids."""
    rows = []
    for x, y in dataset.as_numpy_iterator():
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
        assert x.dtype == y.dtype == np.int32
        rows.append(np.concatenate([x, y[:, -1:]], axis=1))
    return np.concatenate(rows) if rows else np.zeros([0, 0])


def test_client_datasets_hold_the_sample():
    corpus = sequences.SequenceCorpus(_user_text(), _VOCABULARY, sequences.SequenceSpec(5))
    spec = client_datasets.ClientSpec(batch_size=4, max_sequences=6, num_epochs=2)
    dataset = client_datasets.client_dataset(corpus, "user 3", spec, seed=9)
    assert dataset.element_spec == (tf.TensorSpec([None, 5], tf.int32),) * 2
    assert [len(x) for x, _ in dataset] == [4, 4, 4]
    expected = corpus.sample("user 3", max_sequences=6, num_epochs=2, seed=9)
    np.testing.assert_array_equal(_rows(dataset), expected)


def test_a_user_without_text_has_no_batch():
    corpus = sequences.SequenceCorpus(_user_text(), _VOCABULARY)
    dataset = client_datasets.client_dataset(corpus, "user 0", client_datasets.ClientSpec(), seed=0)
    assert list(dataset) == []
    assert dataset.element_spec == (tf.TensorSpec([None, 20], tf.int32),) * 2


def test_stack_overflow_is_encoded_as_tff_does():
    tff = pytest.importorskip("tensorflow_federated", reason="compares with TFF")
    client_data = tff.simulation.datasets.stackoverflow.get_synthetic()
    words = list(tff.simulation.datasets.stackoverflow.get_synthetic_word_counts())[:30]
    baseline = tff.simulation.baselines.stackoverflow.word_prediction_preprocessing
    theirs = baseline.create_preprocess_fn(
        tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=2, shuffle_buffer_size=1),
        vocab=words,
        sequence_length=10,
    )
    texts = {
        user: [element["tokens"].numpy().decode() for element in dataset]
        for user in client_data.client_ids
        for dataset in [client_data.create_tf_dataset_for_client(user)]
    }
    corpus = sequences.SequenceCorpus(
        user_text.UserText.from_mapping("synthetic", texts, is_tokenized=True),
        vocabulary.Vocabulary(tuple(words), "synthetic", lower_case=False),
        sequences.SequenceSpec(10, split_long_texts=False),
    )
    for user in client_data.client_ids:
        dataset = theirs(client_data.create_tf_dataset_for_client(user))
        rows = [np.concatenate([x, y[:, -1:]], axis=1) for x, y in dataset]
        np.testing.assert_array_equal(corpus.sequences(user), np.concatenate(rows))


@pytest.mark.parametrize("field", ["batch_size", "max_sequences", "num_epochs"])
def test_bad_specs_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        client_datasets.ClientSpec(**{field: 0})
