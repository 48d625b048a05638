"""Tests of checkpoints: exact, verified, private, atomic."""

import collections
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


def test_only_the_owner_reads_them(tmp_path):
    checkpoint.CheckpointFolder(tmp_path / "private").save(1, _state(1.0), {})
    (path,) = (tmp_path / "private").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_nothing_is_removed_before_the_commit(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    committed = folder.save(1, _state(1.0), {})
    folder.save(2, _state(2.0), {})  # Killed here; the round is repeated, on another machine.
    repeated = folder.save(2, _state(2.0 + 1e-6), {})
    folder.load(1, committed, _state(0.0))
    folder.keep_only(2, repeated)
    assert [path.name for path in tmp_path.iterdir()] == [f"round_00000002_{repeated}.npz"]


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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
