"""Tests of examples of named tensors."""

import json

import numpy as np
import pytest

from tff_dpftrl import validation
from tff_dpftrl.runtime.device import named_tensors

_FEATURES = {
    "image": named_tensors.Feature("int", (2, 2)),
    "text": named_tensors.Feature("text", None),
    "weight": named_tensors.Feature("float", (), is_optional=True),
}


def test_an_example_is_what_tensorflow_parses():
    tf = pytest.importorskip("tensorflow")
    image = np.array([[0, 255], [3, 4]], np.uint8)
    stored = named_tensors.encode(
        {"image": image, "text": ["e\u0301\0", b"\xff\0"], "weight": 1}, _FEATURES
    )
    parsed = tf.io.parse_single_example(
        stored,
        {
            "image": tf.io.FixedLenFeature([2, 2], tf.int64),
            "text": tf.io.VarLenFeature(tf.string),
            "weight": tf.io.FixedLenFeature([], tf.float32),
        },
    )
    np.testing.assert_array_equal(parsed["image"], image)
    assert list(parsed["text"].values.numpy()) == ["\xe9\0".encode(), b"\xff\0"]
    assert parsed["weight"] == 1.0
    assert named_tensors.encode({"image": image, "text": "b"}, _FEATURES)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": "b"}, "it has no 'image': the task needs it"),
        ({"image": [[1, 2], [3]]}, "'image' is a list of lists of different lengths"),
        ({"image": [1, 2, 3, 4]}, r"'image' has the shape \[4\], and the task takes \[2, 2\]"),
        ({"image": [[1, 2], [3, 0.5]]}, "'image' is of float64, and the task takes int"),
        ({"image": [[2**70, 2], [3, 4]]}, "'image' is of object, and the task takes int"),
        ({"image": np.zeros([2, 2], int), "text": [1]}, "'text' must hold texts or bytes"),
        ({"image": np.zeros([2, 2], int), "text": "", "weight": float("nan")}, "are not finite"),
        ({"image": np.zeros([2, 2], int), "text": "", "other": 1}, "it has 'other', and the task"),
    ],
)
def test_what_does_not_fit_is_refused(example, message):
    with pytest.raises(validation.UsageError, match=message):
        named_tensors.encode(example, _FEATURES)


def test_files_of_examples_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", image=np.zeros([3, 2, 2], int), text=np.array(["a", "b", "c"]))
    assert len(named_tensors.encode_all(named_tensors.read(tmp_path / "a.npz"), _FEATURES)) == 3
    (tmp_path / "a.jsonl").write_text('{"image": [[1, 2], [3, 4]], "text": "a"}\n\n')
    assert named_tensors.read(tmp_path / "a.jsonl") == [{"image": [[1, 2], [3, 4]], "text": "a"}]
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b"}\r\n{"text": "\x85"}', encoding="utf-8")
    assert named_tensors.read(tmp_path / "a.jsonl") == [{"text": "a\u2028b"}, {"text": "\x85"}]
    np.savez(tmp_path / "b.npz", image=np.zeros([3, 2, 2]), text=np.array(["a"]))
    (tmp_path / "b.jsonl").write_text("{")
    for name, message in (("b.npz", "first axis"), ("b.jsonl", "cannot be read"), ("c", "be read")):
        with pytest.raises(validation.UsageError, match=message):
            named_tensors.read(tmp_path / name)


def test_examples_of_users_are_read(tmp_path):
    path, one = tmp_path / "users.jsonl", {"image": [[1, 2], [3, 4]], "text": "a"}
    path.write_text(json.dumps({"user_id": "u", "examples": [one, one]}))
    found = named_tensors.read_users(path, _FEATURES)
    assert (found.user_ids, len(found)) == (("u",), 1)
    assert found.examples("u") == [named_tensors.encode(one, _FEATURES)] * 2
    for line, message in (
        ("", "has no users"),
        ("3", "object 1 is no"),
        ('{"user_id": 1, "examples": []}\n{"user_id": "1", "examples": []}', "user '1' twice"),
        ('{"user_id": null, "examples": []}', "object 1 is without a user"),
        ('{"user_id": 9007199254740993.0, "examples": []}', "object 1: .* not exact"),
        (
            '{"user_id": "1", "examples": []}\n{"user_id": "1.0", "examples": []}',
            "one number in several ways",
        ),
        (
            json.dumps({"user_id": "u", "examples": [one | {"text": "\ud800"}]}),
            "example 1: text: texts must be Unicode",
        ),
        ('{"user_id": "u", "examples": {}}', "user 'u': examples must be a list"),
        ('{"user_id": "u", "examples": [{}]}', "user 'u': example 1: it has no 'image'"),
        ('{"user_id": "u", "examples": ["a"]}', "user 'u': example 1: it is a str"),
    ):
        path.write_text(line)
        with pytest.raises(validation.UsageError, match=message):
            named_tensors.read_users(path, _FEATURES)


def test_a_description_of_examples_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "examples.json"
    path.write_bytes(named_tensors.to_json(_FEATURES))
    assert named_tensors.read_features(path) == _FEATURES
    assert named_tensors.describe(_FEATURES) == (
        "'image' (int, 2 × 2), 'text' (text, any number) and 'weight' (float)"
    )
    for text in ("3", "{}[", '{"a": {"kind": "int"}}', '{"a": {"kind": "x", "shape": null}}'):
        path.write_text(text)
        with pytest.raises(validation.UsageError, match="does not describe examples"):
            named_tensors.read_features(path)
