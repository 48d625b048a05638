"""Tests of tff_dpftrl.models.export."""

import numpy as np
import pytest

from tff_dpftrl.models import export, word_lstm

_MODEL = word_lstm.WordLstm(9, sequence_length=4, embedding_size=3, state_size=5)


def test_a_model_comes_back_as_it_was(tmp_path):
    path, weights = tmp_path / "model.npz", _MODEL.initial_weights(3)
    export.write(path, _MODEL, weights)
    model, found = export.read(path)
    assert model == _MODEL
    assert len(found) == len(weights)
    for ours, theirs in zip(found, weights, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.npz"]


def test_the_file_needs_nothing_of_ours(tmp_path):
    export.write(tmp_path / "model.npz", _MODEL, _MODEL.initial_weights(3))
    with np.load(tmp_path / "model.npz", allow_pickle=False) as file:
        assert file["embedding"].shape == (9, 3)
        assert '"model": "word-lstm"' in file["model"].item()


def test_weights_of_another_model_are_refused(tmp_path):
    other = word_lstm.WordLstm(9, sequence_length=4, embedding_size=3, state_size=6)
    path = tmp_path / "model.npz"
    for weights in (other.initial_weights(0), _MODEL.initial_weights(0)[:-1]):
        with pytest.raises(ValueError, match="the model needs weights of shapes"):
            export.write(path, _MODEL, weights)
    assert not path.exists()
    export.write(path, _MODEL, _MODEL.initial_weights(0))
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | {"embedding": np.zeros([8, 3], np.float32)})
    with pytest.raises(ValueError, match="the model needs weights of shapes"):
        export.read(path)
    del arrays["projection"]
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="but its model needs .*'projection'"):
        export.read(path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "model.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a model that `export.write` wrote"):
        export.read(path)
    with pytest.raises(ValueError, match="none.npz is not a model"):
        export.read(tmp_path / "none.npz")
    np.savez(tmp_path / "old.npz", weight_0=np.zeros([2, 2]))
    with pytest.raises(ValueError, match="old.npz is not a model"):
        export.read(tmp_path / "old.npz")
