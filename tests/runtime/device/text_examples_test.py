"""Tests of tff_dpftrl.runtime.device.text_examples, against TensorFlow's own protos."""

from __future__ import annotations

import unicodedata

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tff_dpftrl.data import user_text
from tff_dpftrl.runtime.device import example_store, text_examples

deterministic = hypothesis.settings(deadline=None, derandomize=True, max_examples=50)

_VALUES = st.one_of(
    st.lists(st.binary(max_size=300), max_size=4),
    st.lists(st.text(max_size=100), max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
    st.lists(st.floats(width=32, allow_nan=False), max_size=40),
)


@deterministic
@hypothesis.given(st.dictionaries(st.text(max_size=200), _VALUES, max_size=5))
def test_tensorflow_reads_what_was_encoded(features):
    parsed = tf.train.Example.FromString(text_examples.encode(features)).features.feature
    assert set(parsed) == set(features)
    for name, values in features.items():
        kind = parsed[name].WhichOneof("kind")
        if not values:
            assert kind is None
            continue
        # A graph cannot normalise the texts that it splits.
        expected = [
            unicodedata.normalize("NFC", v).encode() if isinstance(v, str) else v for v in values
        ]
        assert list(getattr(parsed[name], kind).value) == expected
        assert (
            kind == {bytes: "bytes_list", int: "int64_list", float: "float_list"}[type(expected[0])]
        )


def test_it_is_what_tensorflow_writes_deterministically():
    features = {"b": [1, -1, 2**40], "a": ["é" * 100, ""], "c": [0.5]}
    made = tf.train.Example()
    made.features.feature["a"].bytes_list.value.extend([("é" * 100).encode(), b""])
    made.features.feature["b"].int64_list.value.extend([1, -1, 2**40])
    made.features.feature["c"].float_list.value.extend([0.5])
    assert text_examples.encode(features) == made.SerializeToString(deterministic=True)
    assert text_examples.encode(dict(reversed(features.items()))) == text_examples.encode(features)


def test_one_user_of_a_corpus_becomes_a_store_that_a_graph_parses(tmp_path):
    corpus = user_text.UserText.from_mapping(
        "corpus", {"alice": ["first words", "second", "e\u0301te\u0301"], "bob": ["not hers"]}
    )
    store = example_store.SqliteExampleStore.open(tmp_path / "store", clock=lambda: 1e9)
    text_examples.add_user(store, corpus, "alice", collection="typed")
    serialized = store.select("typed", max_examples=2)
    parse = tf.function(
        lambda s: tf.io.parse_example(s, {"tokens": tf.io.FixedLenFeature([], tf.string)})
    )
    parsed = parse(tf.constant(serialized))["tokens"].numpy()
    assert parsed.tolist() == ["été".encode(), b"second"]
    assert b"alice" not in (tmp_path / "store").read_bytes()
    with pytest.raises(ValueError, match="user_id 'carol'"):
        text_examples.add_user(store, corpus, "carol")
    store.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 0.5], "got float, int"),
        ([True], "got bool"),
        ([np.int64(1)], "got int64"),
        ([None], "got NoneType"),
        ([2**63], "64 bits"),
        ([1e39], "float32"),
        (["\ud800"], "texts must be Unicode"),
    ],
)
def test_other_values_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=f"label: .*{message}"):
        text_examples.encode({"label": values})
