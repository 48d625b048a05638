"""Tests of the TensorBoard events of a run."""

import os
import stat

import pytest
import tensorflow as tf

from tests import small_disk
from tff_dpftrl.runs import tensorboard_log

disk = small_disk.disk


def test_numbers_become_scalars_for_the_owner_only(tmp_path):
    before = os.umask(0)
    try:
        log = tensorboard_log.TensorBoardLog(tmp_path)
        log.append({"round": 7, "loss": 0.5, "eval_loss": None})
        log.close()
    finally:
        os.umask(before)
    (path,) = (tmp_path / "private" / "tensorboard").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    found = [
        (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    assert found == [(7, "loss", 0.5)]


def test_events_of_an_earlier_version_move(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events").write_bytes(b"")
    tensorboard_log.TensorBoardLog(tmp_path).close()
    assert not (tmp_path / "tensorboard").exists()
    assert stat.S_IMODE((tmp_path / "private/tensorboard/events").stat().st_mode) == 0o600


def test_a_disk_that_is_full_or_read_only_is_one_line(disk):
    def write():
        log = tensorboard_log.TensorBoardLog(disk.folder)
        for number in range(100):
            log.append({"round": number, "loss": 0.5, "eval_loss": 0.25})
        log.close()

    (disk.folder / "private").mkdir()
    with disk.read_only(), pytest.raises(OSError) as caught:
        write()
    place = disk.folder / "private" / "tensorboard"
    assert str(caught.value) == f"{place} cannot be written: Read-only file system."
    for pages in (0, 1):  # When it is opened, and later.
        disk.leave(pages)
        with pytest.raises(OSError) as caught:
            write()
        assert str(caught.value) == f"{place} cannot be written: No space left on device."
