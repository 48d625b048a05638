"""Tests of tff_dpftrl.models.hugging_face, against what transformers computed.

`checkpoints/write_checkpoints.py` wrote the checkpoints with transformers, and the golden scores
and gradients with torch.
"""

import json
import os
import pathlib
import shutil
import zlib

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

from tests.data import random_texts
from tests.models import checkpoint_folders
from tff_dpftrl.data import vocabulary_file
from tff_dpftrl.models import hugging_face, low_rank, metrics, table

_CHECKPOINTS = checkpoint_folders.FOLDER
_NAMES = ["gpt2", "gpt2_half", "llama_grouped_tied", "llama_untied", "llama_wide_heads"]
_EXACT = [name for name in _NAMES if name != "gpt2_half"]
_LENGTH = 6


def _read(name, sequence_length=_LENGTH):
    return hugging_face.find(_CHECKPOINTS / name).read(sequence_length)


def _golden(name):
    with np.load(_CHECKPOINTS / name / "golden.npz") as golden:
        return dict(golden)


def _tensors(folder):
    return {
        name: tensor
        for path in folder.glob("model*.safetensors")
        for name, tensor in safetensors.numpy.load_file(path).items()
    }


@pytest.mark.parametrize("name", _NAMES)
def test_scores_are_those_of_transformers(name):
    model, weights = _read(name)
    golden = _golden(name)
    words = tf.constant(golden["ids"][:, :-1] + 1, tf.int32)
    scores = model.logits(weights, words).numpy()
    assert np.abs(golden["scores"]).max() > 1
    np.testing.assert_allclose(scores[..., 1:], golden["scores"], rtol=1e-5, atol=1e-5)
    # Padding has no share of the softmax.
    np.testing.assert_allclose(
        tf.nn.log_softmax(scores)[..., 1:],
        tf.nn.log_softmax(golden["scores"]),
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_array_equal(tf.nn.softmax(scores)[..., 0], 0.0)


@pytest.mark.parametrize("name", _EXACT)
def test_gradients_are_those_of_torch(name, tmp_path):
    model, weights = _read(name)
    golden = _golden(name)
    ids = tf.constant(golden["ids"] + 1, tf.int32)
    weights = [tf.constant(weight) for weight in weights]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        scores, positions = model.compact_logits(weights, ids[:, :-1])
        targets = tf.gather(tf.reshape(ids[:, 1:], [-1]), positions)
        loss = metrics.mean_cross_entropy(scores, targets, pad=0)
    assert loss.numpy() == pytest.approx(golden["loss"], rel=1e-6)
    gradients = [tf.convert_to_tensor(x).numpy() for x in tape.gradient(loss, weights)]
    # Written as if they were weights, they have the names of those.
    hugging_face.write(tmp_path, model, gradients)
    found = _tensors(tmp_path)
    expected = {k.removeprefix("gradient "): v for k, v in golden.items() if " " in k}
    assert set(found) == set(expected)
    for key, gradient in expected.items():
        norm = np.linalg.norm(gradient)
        assert norm > 1e-3, key
        assert np.linalg.norm(found[key] - gradient) < 1e-5 * norm, key


@pytest.mark.parametrize("name", ["gpt2", "llama_untied"])
def test_token_ids_are_those_of_transformers(name):
    words, rule = vocabulary_file.read(_CHECKPOINTS / name / "tokenizer.json")
    expected = np.load(_CHECKPOINTS / name / "tokens.npy")
    assert len(set(expected)) > 9_000  # Some strings are empty or alike.
    for text, checksum in zip(random_texts.strings(len(expected)), expected, strict=True):
        ids = np.array(words.ids(rule.words(text)), "<i4") - 1
        assert zlib.crc32(ids.tobytes()) == checksum, repr(text)


@pytest.mark.parametrize("name", _EXACT)
def test_a_round_trip_gives_the_same_bits(name, tmp_path):
    source = _CHECKPOINTS / name
    hugging_face.copy_rest(source, tmp_path)
    hugging_face.write(tmp_path, *_read(name))
    expected, found = _tensors(source), _tensors(tmp_path)
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert tensor.dtype == found[key].dtype == np.float32
        assert tensor.tobytes() == found[key].tobytes(), key
    # The config says the same of the model, with more words, and nothing of who wrote it.
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path))
    after["n_inner"] = before.get("n_inner")
    changed = {name for name, value in before.items() if after.get(name) != value}
    without_effect = ("summary_", "transformers_version", "pretraining_tp", "reorder_and_upcast")
    assert all(name.startswith(without_effect) for name in changed)
    assert "transformers_version" not in after and after["eos_token_id"] == before["eos_token_id"]
    assert hugging_face.find(tmp_path).sizes == hugging_face.find(source).sizes
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in (source, tmp_path)]
    assert tokenizers[0] == tokenizers[1]
    # Whoever may read one of them may read the other.
    modes = {(tmp_path / file).stat().st_mode for file in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_half_precision_is_read_exactly_and_written_as_float32(tmp_path):
    model, weights = _read("gpt2_half")
    hugging_face.write(tmp_path, model, weights)
    assert all(tensor.dtype == np.float32 for tensor in _tensors(tmp_path).values())
    _, again = hugging_face.find(tmp_path).read(_LENGTH)
    for weight, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(weight, other)
        # bfloat16 has the upper half of the bits of float32.
        assert not (weight.view(np.uint32) & 0xFFFF).any()


def test_sequences_may_be_shorter_than_the_positions_and_not_longer():
    words = tf.constant(_golden("gpt2")["ids"][:, :4] + 1, tf.int32)
    long, short = _read("gpt2", 16), _read("gpt2", 4)
    padded = tf.pad(words, [[0, 0], [0, 12]])
    np.testing.assert_allclose(
        short[0].logits(short[1], words),
        long[0].logits(long[1], padded)[:, :4],
        rtol=1e-5,
        atol=1e-5,
    )
    for name in ("gpt2", "llama_untied"):
        with pytest.raises(ValueError, match="sequence_length must be at most 16, .* got 17"):
            _read(name, 17)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_of_the_table_can_be_written_and_read(name, tmp_path):
    model = table.build(name, vocabulary_size=9, sequence_length=5)
    weights = model.initial_weights(0)
    hugging_face.write(tmp_path, model, weights)
    read, again = hugging_face.find(tmp_path).read(5)
    assert read.weight_shapes == model.weight_shapes
    for weight, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(weight, other)
    words = np.array([[1, 2, 8, 0, 0]], np.int32)
    np.testing.assert_array_equal(model.logits(weights, words), read.logits(again, words))
    with pytest.raises(ValueError, match="'transformer' is none that transformers knows"):
        hugging_face.write(
            tmp_path, table.build("transformer", vocabulary_size=9), [np.zeros(1, np.float32)]
        )


@pytest.mark.parametrize("name", ["gpt2", "llama_untied"])
def test_adapters_are_those_of_every_kernel_as_outputs_by_inputs(name, tmp_path):
    model, weights = _read(name)
    adapted = low_rank.LowRank(model, weights, 2)
    trained = [w + 1 for w in adapted.initial_weights(0)]
    hugging_face.write_adapters(tmp_path, adapted, trained, base="base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (2, low_rank.ALPHA, "none")
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == len(adapted.weight_shapes)
    # Adds α/R B A to what is stored, by hand, and compares with the merged weights.
    hugging_face.write(tmp_path, model, adapted.merged(trained))
    merged = _tensors(tmp_path)
    for key, tensor in _tensors(_CHECKPOINTS / name).items():
        part = f"base_model.model.{key.removesuffix('.weight')}.lora_"
        if f"{part}A.weight" in tensors:
            product = tensors[f"{part}B.weight"] @ tensors[f"{part}A.weight"]
            added = low_rank.ALPHA / 2 * (product.T if config["fan_in_fan_out"] else product)
            assert key.rsplit(".", 2)[-2] in config["target_modules"]
            np.testing.assert_allclose(merged[key], tensor + added, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(merged[key], tensor)


def _edit(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _without(folder, name):
    tensors = _tensors(folder)
    tensors.pop(name)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def _with(folder, name, tensor):
    safetensors.numpy.save_file(_tensors(folder) | {name: tensor}, folder / "model.safetensors")


def _cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def _pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


_NOT_A_NUMBER = np.full([280, 8], np.nan, np.float32)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (_cut, r"model.safetensors is damaged \(.*\). Download the checkpoint"),
        (_pickle, "has its weights as a pickle, pytorch_model.bin, which could run any code"),
        (_adapter, "has adapters only, .*: merge them first"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors: restore it"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read: .*Download"),
        (lambda f: _edit(f, model_type="mamba"), "of type 'mamba', and only gpt2 and llama can be"),
        (lambda f: _edit(f, n_layer=3), "has no tensor transformer.h.2.*needs: restore all files"),
        (
            lambda f: _edit(f, n_layer=1),
            "has the tensor transformer.h.1.* no use for: scores would",
        ),
        (lambda f: _edit(f, n_layer=10**9), "has 28 tensors, too few for the 1000000000 layers"),
        (lambda f: _edit(f, n_layer="2"), "config.json: n_layer must be an integer, got '2'"),
        (lambda f: _edit(f, n_head=None), "config.json: n_head must be an integer, got None"),
        (lambda f: _edit(f, n_inner=0), "config.json: n_inner must be at least 1, got 0"),
        (
            lambda f: _edit(f, layer_norm_epsilon=True),
            "layer_norm_epsilon must be a finite number, above 0 and at most 1e.38, got True",
        ),
        (lambda f: _edit(f, vocab_size=281), r"wte.weight has the shape \[280, 8\].* \[281, 8\]"),
        (lambda f: _edit(f, activation_function="relu"), "activation_function 'relu', which this"),
        (lambda f: _edit(f, quantization_config={}), "quantization_config {}, which this package"),
        (lambda f: _without(f, "transformer.ln_f.bias"), "has no tensor transformer.ln_f.bias"),
        (lambda f: _with(f, "transformer.wte.weight", _NOT_A_NUMBER), "wte.weight has values that"),
        (
            lambda f: _with(f, "transformer.wte.weight", np.zeros([280, 8], np.int8)),
            "wte.weight is of type I8, and only F64, F32, F16, BF16 can be fine-tuned",
        ),
        (
            lambda f: _with(f, "lm_head.weight", np.zeros([280, 8], np.float32)),
            "has other output weights, lm_head.weight, than input embeddings",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(spoil, message, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(_CHECKPOINTS / "gpt2", folder)
    spoil(folder)
    assert hugging_face.is_checkpoint(folder)
    with pytest.raises(ValueError, match=message) as raised:
        hugging_face.find(folder).read(_LENGTH)
    assert "\n" not in str(raised.value)


def test_rotary_positions_that_are_scaled_are_refused(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(_CHECKPOINTS / "llama_untied", folder)
    _edit(folder, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rope_scaling .*llama3.*does not compute"):
        hugging_face.find(folder)
    _edit(folder, rope_parameters={"rope_type": "default"}, rope_scaling={"type": "linear"})
    with pytest.raises(ValueError, match="rope_scaling .*linear.*does not compute"):
        hugging_face.find(folder)
    # As transformers 4 wrote it.
    _edit(folder, rope_parameters=None, rope_scaling=None, rope_theta=5e5)
    assert hugging_face.find(folder).sizes["rotary_base"] == 5e5


@pytest.fixture
def llama(tmp_path):
    """A copy of a checkpoint in several files."""
    return pathlib.Path(shutil.copytree(_CHECKPOINTS / "llama_untied", tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "shard, message",
    [
        ("../model.safetensors", "leads out of the folder"),
        ("/etc/passwd", "leads out of the folder"),
        ("model-\ud800.safetensors", "must be a text that can be encoded"),
        ("no\nmodel.safetensors", "cannot be read"),
        ("", "is no regular file"),
        (1, "names no files"),
    ],
)
def test_shards_are_files_of_the_folder(llama, shard, message):
    index = {"weight_map": {"model.norm.weight": shard}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{message}.*Download the checkpoint again") as raised:
        hugging_face.find(llama)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("number", [10**400, -1.0, "1e4", float("inf"), True, 1e39])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_numbers_of_a_config_are_those_of_float32(llama, key, number):
    _edit(llama, rope_parameters=None, **{key: number})
    with pytest.raises(ValueError, match=f"config.json: {key} must be a finite number"):
        hugging_face.find(llama)


def test_ties_are_told_by_true_or_false(llama):
    _edit(llama, tie_word_embeddings="false")
    with pytest.raises(ValueError, match="tie_word_embeddings must be true or false, got 'false'"):
        hugging_face.find(llama)
    _edit(llama, tie_word_embeddings=None)
    assert hugging_face.find(llama).sizes["tie_embeddings"] is False


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_sizes_of_a_checkpoints_json_are_limited(llama, name):
    os.truncate(llama / name, (1 << 25) + 1)
    with pytest.raises(ValueError, match=rf"'{name}' has 33554433 bytes, and at most"):
        hugging_face.find(llama)


def test_no_file_of_somebody_else_is_copied(llama, tmp_path):
    (tmp_path / "key").write_text("secret")
    (llama / "vocab.json").symlink_to(tmp_path / "key")
    for read in (hugging_face.find, lambda folder: hugging_face.copy_rest(folder, tmp_path / "a")):
        with pytest.raises(ValueError, match="'vocab.json' leads out of the folder"):
            read(llama)
    assert not list((tmp_path / "a").iterdir())


def test_a_snapshot_of_the_hub_is_links_to_its_blobs(llama, tmp_path):
    snapshot, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/f00", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(llama.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    _, weights = hugging_face.find(snapshot).read(_LENGTH)
    np.testing.assert_array_equal(weights[0], _read("llama_untied")[1][0])


def test_names_without_the_head_and_buffers_of_older_versions_are_read(tmp_path):
    source = _CHECKPOINTS / "gpt2"
    shutil.copy(source / "config.json", tmp_path)
    tensors = {k.removeprefix("transformer."): v for k, v in _tensors(source).items()}
    tensors["h.0.attn.bias"] = np.ones([1, 1, 16, 16], np.float32)
    tensors["lm_head.weight"] = tensors["wte.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    _, weights = hugging_face.find(tmp_path).read(_LENGTH)
    for weight, expected in zip(weights, _read("gpt2")[1], strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_other_folders_are_no_checkpoints(tmp_path):
    assert not hugging_face.is_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 2}')
    assert not hugging_face.is_checkpoint(tmp_path)
