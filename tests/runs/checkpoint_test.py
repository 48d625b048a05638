"""Tests of checkpoints: exact, verified, private, atomic, bound."""

import collections
import json
import stat

import numpy as np
import pytest
import tensorflow as tf

from tff_dpftrl.mechanisms import banded_toeplitz, blt, dense, identity, inverse_banded, tree
from tff_dpftrl.private_round import clipping, fixed_clip
from tff_dpftrl.runs import checkpoint

State = collections.namedtuple("State", ["weights", "buffers", "round"])


def _state(value: float) -> State:
    return State(
        weights=[np.full([2, 3], value, np.float32), np.float32(value)],
        buffers=collections.OrderedDict(a=np.arange(4, dtype=np.float64) * value),
        round=np.int64(5),
    )


def _snapshot(value: float) -> checkpoint.Snapshot:
    return checkpoint.Snapshot.of(_state(value))


def _fingerprint(state, **options) -> str:
    return checkpoint.Snapshot.of(state).fingerprint(**options)


def test_round_trip_is_exact(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    state = _state(1 / 3)
    name = folder.save(6, checkpoint.Snapshot.of(state), {"loss": 0.1})
    snapshot, saved = folder.load(6, name)
    restored = snapshot.in_structure_of(_state(0.0))
    assert isinstance(restored, State) and saved == {"loss": 0.1}
    assert _fingerprint(restored) == _fingerprint(state) == name
    np.testing.assert_array_equal(restored.weights[0], state.weights[0])
    np.testing.assert_array_equal(restored.buffers["a"], state.buffers["a"])


def test_a_part_is_read_after_all_was_verified(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    name = folder.save(6, _snapshot(1 / 3), {"loss": 0.1})
    part, saved = folder.load(6, name, lambda path: path.startswith("weights/"))
    assert part.paths == ("weights/0", "weights/1") and saved == {"loss": 0.1}
    np.testing.assert_array_equal(part.tensors[0], _state(1 / 3).weights[0])
    whole, _ = folder.load(6, name)
    for some in ({"part": "weights"}, {"part": "buffers", "binding": "b"}):
        assert whole.fingerprint(**some) == _fingerprint(_state(1 / 3), **some)
    # Damage elsewhere is found, too.
    (tmp_path / f"round_00000006_{name}.npz").unlink()
    damaged = folder.save(6, _snapshot(0.25), {})
    (path,) = tmp_path.glob("*.npz")
    path.rename(tmp_path / path.name.replace(damaged, name))
    with pytest.raises(checkpoint.CheckpointError, match="is damaged"):
        folder.load(6, name, lambda path: False)


def test_a_template_without_values_takes_no_memory(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    state = _state(2.0)._replace(weights=[np.ones([1000, 3]), tf.ones([2])])
    template = checkpoint.without_values(state)
    assert template.weights[0].strides == (0, 0)
    snapshot, _ = folder.load(1, folder.save(1, checkpoint.Snapshot.of(state), {}))
    assert _fingerprint(snapshot.in_structure_of(template)) == _fingerprint(state)


def test_order_is_kept_beyond_ten_tensors(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    state = {"many": [np.int64(i) for i in range(1200)]}
    snapshot, _ = folder.load(1, folder.save(1, checkpoint.Snapshot.of(state), {}))
    assert snapshot.in_structure_of(state)["many"] == list(range(1200))


def test_fingerprints_depend_on_every_value_shape_and_type():
    assert _fingerprint(_state(1.0)) != _fingerprint(_state(1.0 + 1e-7))
    assert _fingerprint([np.zeros(4)]) != _fingerprint([np.zeros([2, 2])])
    assert _fingerprint([np.zeros(1)]) != _fingerprint([np.zeros(1, np.int64)])


_KNOWN = collections.OrderedDict(
    weights=[np.arange(6, dtype=np.float32).reshape(2, 3).T, np.float32(0.5)],
    buffers=(np.zeros([0, 4]), np.array([True, False])),
    round=np.int64(5),
)
_KNOWN_FINGERPRINT = "9c2959b4c89ad9bf9aeb52ad2bee6d48"


def test_fingerprints_never_change():
    # A run must be able to go on under the next version of this package.
    assert _fingerprint(_KNOWN, binding="b") == _KNOWN_FINGERPRINT


def test_fingerprints_are_the_same_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(checkpoint, "_BYTES_PER_THREAD", 1)
    for cores in (1, 3):
        monkeypatch.setattr(checkpoint.os, "cpu_count", lambda cores=cores: cores)
        assert _fingerprint(_KNOWN, binding="b") == _KNOWN_FINGERPRINT


def test_any_layout_of_a_tensor_is_kept(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    snapshot, _ = folder.load(1, folder.save(1, checkpoint.Snapshot.of(_KNOWN), {}))
    restored = snapshot.in_structure_of(_KNOWN)
    assert _fingerprint(restored) == _fingerprint(_KNOWN)
    np.testing.assert_array_equal(restored["weights"][0], _KNOWN["weights"][0])
    assert restored["weights"][1].shape == ()


def test_a_file_of_numpys_savez_is_a_checkpoint(tmp_path):
    # Earlier versions of this package wrote them so.
    folder = checkpoint.CheckpointFolder(tmp_path, binding="b")
    snapshot = checkpoint.Snapshot.of(_KNOWN)
    tensors = {
        f"{i:04d}/{path}": tensor
        for i, (path, tensor) in enumerate(zip(snapshot.paths, snapshot.tensors, strict=True))
    }
    np.savez(
        tmp_path / f"round_00000003_{_KNOWN_FINGERPRINT}.npz",
        saved=np.array(json.dumps({"loss": 2.0})),
        **tensors,
    )
    loaded, saved = folder.load(3, _KNOWN_FINGERPRINT)
    assert saved == {"loss": 2.0} and loaded.paths == snapshot.paths


def test_tensors_of_tensorflow_are_not_copied(tmp_path):
    state = {"weights": [tf.range(4.0), tf.constant(2.0)], "round": tf.constant(3, tf.int64)}
    snapshot = checkpoint.Snapshot.of(state)
    assert np.shares_memory(snapshot.tensors[-2], np.asarray(state["weights"][0]))
    as_arrays = tf.nest.map_structure(lambda tensor: tensor.numpy().copy(), state)
    assert snapshot.fingerprint() == _fingerprint(as_arrays)
    folder = checkpoint.CheckpointFolder(tmp_path)
    loaded, _ = folder.load(1, folder.save(1, snapshot, {}))
    restored = loaded.in_structure_of(state)
    np.testing.assert_array_equal(restored["weights"][0], as_arrays["weights"][0])


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    folder = checkpoint.CheckpointFolder(tmp_path)
    name = folder.save(1, _snapshot(1.0), {})

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(checkpoint.os, "fsync", disk_full)
        folder.save(2, _snapshot(2.0), {})
    folder.load(1, name)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_part_is_a_whole_name_of_the_path():
    state = {"noise": [np.ones(2)], "noise_free": np.ones(3), "other": np.ones(4)}
    snapshot = checkpoint.Snapshot.of(state)
    assert [tensor.shape for tensor in snapshot.part("noise")] == [(2,)]
    other = checkpoint.Snapshot.of(state | {"noise_free": np.zeros(3)})
    assert snapshot.fingerprint(part="noise") == other.fingerprint(part="noise")
    assert snapshot.fingerprint(part="noise_free") != other.fingerprint(part="noise_free")


def test_only_the_owner_reads_them(tmp_path):
    checkpoint.CheckpointFolder(tmp_path / "private").save(1, _snapshot(1.0), {})
    (path,) = (tmp_path / "private").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_nothing_is_removed_before_the_commit(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    committed = folder.save(1, _snapshot(1.0), {})
    folder.save(2, _snapshot(2.0), {})  # Killed here; the round is repeated, on another machine.
    repeated = folder.save(2, _snapshot(2.0 + 1e-6), {})
    folder.load(1, committed)
    folder.keep_only(2, repeated)
    assert [path.name for path in tmp_path.iterdir()] == [f"round_00000002_{repeated}.npz"]


def test_a_missing_checkpoint_is_refused(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    folder.save(1, _snapshot(1.0), {})
    with pytest.raises(checkpoint.CheckpointError, match="Cannot read the checkpoint"):
        folder.load(1, "0" * 32)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    folder = checkpoint.CheckpointFolder(tmp_path)
    name = folder.save(1, _snapshot(1.0), {})
    (path,) = tmp_path.glob("*.npz")
    other = checkpoint.CheckpointFolder(tmp_path / "other")
    other.save(1, _snapshot(2.0), {})
    (donor,) = (tmp_path / "other").glob("*.npz")
    path.write_bytes(donor.read_bytes())
    with pytest.raises(checkpoint.CheckpointError, match="fingerprint differs"):
        folder.load(1, name)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(checkpoint.CheckpointError, match="Cannot read"):
        folder.load(1, name)
    path.unlink()
    name = folder.save(1, _snapshot(1.0), {})
    path.rename(tmp_path.parent / "elsewhere")
    path.symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(checkpoint.CheckpointError, match="leads out of the folder"):
        folder.load(1, name)


def test_a_checkpoint_of_another_manifest_is_refused(tmp_path):
    name = checkpoint.CheckpointFolder(tmp_path, binding="a").save(1, _snapshot(1.0), {})
    checkpoint.CheckpointFolder(tmp_path, binding="a").load(1, name)
    with pytest.raises(checkpoint.CheckpointError, match="saved under other options"):
        checkpoint.CheckpointFolder(tmp_path, binding="b").load(1, name)


def test_a_checkpoint_of_another_model_is_refused():
    with pytest.raises(
        checkpoint.CheckpointError, match=r"has \S+ \S+ where .* has \S+ \S+: resume with"
    ):
        _snapshot(1.0).in_structure_of(_state(1.0)._replace(round=np.int32(5)))


_SHAPES = [(3,), (2, 2)]


def _restored_of_0_4(strategy, num_buffers):
    """A state after three rounds, of tensors with 7 entries, as version 0.4 saved it."""
    clip = clipping.FlatClipping(1.0)
    round_ = fixed_clip.FixedClipRound(
        strategy, noise_multiplier=1.5, clipping=clip, clients_per_round=4
    )
    buffer = np.ones([num_buffers, 7], np.float32) if num_buffers else ()
    state = fixed_clip.FixedClipState(np.int64(3), np.array([2**40, 2**50]), buffer)
    template = checkpoint.without_values(round_.initial_state(_SHAPES))
    return round_, state, checkpoint.Snapshot.of(state).in_structure_of(template)


@pytest.mark.parametrize(
    "strategy, num_buffers",
    [
        (identity.Identity(), 0),
        (blt.Blt((0.9, 0.5), (0.1, 0.2)), 2),
        (banded_toeplitz.BandedToeplitz((1.0, 0.5, 0.2)), 2),
    ],
    ids=["identity", "blt", "bands"],
)
def test_states_of_version_0_4_go_on(strategy, num_buffers):
    round_, before, state = _restored_of_0_4(strategy, num_buffers)
    found = [round_.noise(tf.nest.map_structure(tf.constant, state), _SHAPES) for _ in range(2)]
    for _, after in found:
        assert after.round_index == 4
        np.testing.assert_array_equal(after.seed, before.seed)
    assert np.all(found[0][0][0] != found[1][0][0])


@pytest.mark.parametrize(
    "strategy, num_buffers",
    [
        (tree.Tree(8), 0),
        (tree.Tree(8, variance_reduction=False), 0),
        (inverse_banded.InverseBanded.bisr(3), 0),
        (inverse_banded.InverseBanded.lambda_cgd(0.7), 0),
        (dense.Dense(np.eye(8), rounds_at_once=4), 4),
    ],
    ids=["tree", "tree-vanilla", "bisr", "lambda-cgd", "dense"],
)
def test_states_of_version_0_4_that_had_another_form_are_refused(strategy, num_buffers):
    with pytest.raises(checkpoint.CheckpointError, match=r"finish it with version 0\.4\."):
        _restored_of_0_4(strategy, num_buffers)
