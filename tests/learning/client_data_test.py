"""Tests of tff_dpftrl.learning.client_data."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_federated", reason="makes data or processes of TFF")

import tensorflow_federated as tff

from tff_dpftrl.data import user_text
from tff_dpftrl.learning import client_data as client_data_lib

_TEXTS = user_text.UserText.from_mapping(
    "m",
    {
        "nothing said": [],
        "few words": ["a B c"],
        "many words": ["a b unknown c D's .", "", "e\u0301 b a", "b b b b b b 12"] * 3,
    },
)


def test_texts_as_client_data():
    client_data = client_data_lib.of_texts(_TEXTS)
    assert client_data.client_ids == list(_TEXTS.user_ids)
    for make in (client_data.create_tf_dataset_for_client, client_data.serializable_dataset_fn):
        for user_id in _TEXTS.user_ids:
            texts = [element["tokens"].decode() for element in make(user_id).as_numpy_iterator()]
            assert texts == [text.replace("e\u0301", "\xe9") for text in _TEXTS.examples(user_id)]


def test_client_data_can_be_a_tff_computation():
    computation = client_data_lib.of_texts(_TEXTS).dataset_computation

    @tff.tensorflow.computation(np.str_)
    def count(client_id):
        return computation(client_id).reduce(np.int64(0), lambda n, text: n + 1)

    assert count("many words") == 12


def test_unknown_clients_are_refused():
    client_data = client_data_lib.of_texts(_TEXTS)
    with pytest.raises(ValueError, match="'nobody' is not a user of 'm'"):
        client_data.create_tf_dataset_for_client("nobody")
    with pytest.raises(tf.errors.InvalidArgumentError, match="nobody is not a client"):
        client_data.serializable_dataset_fn(tf.constant("nobody"))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
