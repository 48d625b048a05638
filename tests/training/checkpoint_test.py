"""Tests of checkpoints: exact, verified, private, atomic."""

import collections
import pathlib
import stat
import sys

import numpy as np
import pytest

from tff_dpftrl.training import checkpoint

State = collections.namedtuple("State", ["weights", "buffers", "round"])


def _state(value: float) -> State:
    return State(
        weights=[np.full([2, 3], value, np.float32), np.float32(value)],
        buffers=collections.OrderedDict(a=np.arange(4, dtype=np.float64) * value),
        round=np.int64(5),
    )


def test_round_trip_is_exact(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    state = _state(1 / 3)
    name = folder.save(6, state, {"loss": 0.1})
    restored, metrics = folder.load(6, name, _state(0.0))
    assert isinstance(restored, State) and metrics == {"loss": 0.1}
    assert checkpoint.fingerprint(restored) == checkpoint.fingerprint(state) == name
    np.testing.assert_array_equal(restored.weights[0], state.weights[0])


def test_fingerprints_depend_on_every_value():
    assert checkpoint.fingerprint(_state(1.0)) != checkpoint.fingerprint(_state(1.0 + 1e-7))
    assert checkpoint.fingerprint([np.zeros(4)]) != checkpoint.fingerprint([np.zeros([2, 2])])


def test_only_the_owner_reads_and_two_are_kept(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path / "private")
    for done in range(5):
        folder.save(done, _state(float(done)), {})
    files = sorted((tmp_path / "private").iterdir())
    assert [f.name[:14] for f in files] == ["round_00000003", "round_00000004"]
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)


def test_a_missing_checkpoint_is_refused(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    folder.save(1, _state(1.0), {})
    with pytest.raises(checkpoint.CheckpointError, match="Cannot read the checkpoint"):
        folder.load(1, "0" * 32, _state(0.0))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    name = folder.save(1, _state(1.0), {})
    (path,) = tmp_path.glob("*.npz")
    other = checkpoint.CheckpointFolder(tmp_path / "other")
    other.save(1, _state(2.0), {})
    (donor,) = (tmp_path / "other").glob("*.npz")
    path.write_bytes(donor.read_bytes())
    with pytest.raises(checkpoint.CheckpointError, match="fingerprint differs"):
        folder.load(1, name, _state(0.0))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(checkpoint.CheckpointError, match="Cannot read"):
        folder.load(1, name, _state(0.0))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    name = folder.save(1, _state(1.0), {})
    with pytest.raises(checkpoint.CheckpointError, match="other shapes or types"):
        folder.load(1, name, _state(1.0)._replace(round=np.int32(5)))


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoint.write_atomically(path, b"old")

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [pathlib.Path(path)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
