"""Tests that files are whole or not there, and as private as asked."""

import os
import stat

import pytest

from tff_dpftrl import durable_files


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    durable_files.write(path, b"old")

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable_files.os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        durable_files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_the_block_or_in_the_name_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), durable_files.replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise RuntimeError

    def name() -> str:
        raise RuntimeError

    with pytest.raises(RuntimeError), durable_files.naming(tmp_path, name) as file:
        file.write(b"whole")
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_asked_for_when_the_content_is_complete(tmp_path):
    content = []

    def name() -> str:
        (unfinished,) = tmp_path.iterdir()
        content.append(unfinished.read_bytes())
        return "named"

    with durable_files.naming(tmp_path, name) as file:
        file.write(b"whole")
    assert content == [b"whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["named"]


@pytest.mark.parametrize(
    ("umask", "private", "mode"),
    [(0o022, False, 0o644), (0o077, False, 0o600), (0o000, True, 0o600), (0o022, True, 0o600)],
)
def test_the_umask_decides_unless_the_file_is_private(tmp_path, umask, private, mode):
    before = os.umask(umask)
    try:
        durable_files.write(tmp_path / "file", b"x", private=private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path):
    durable_files.write(tmp_path / "kept", b"x")
    (tmp_path / ".hidden").write_bytes(b"y")
    pid = os.fork()
    if pid == 0:
        with durable_files.replacing(tmp_path / "file") as file:
            file.write(b"half")
            os._exit(9)  # As SIGKILL does: no clean-up runs.
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 3
    durable_files.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "kept"]
    durable_files.remove_leftovers(tmp_path / "missing")


def _tree(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_whole_or_not_there(tmp_path):
    path = tmp_path / "new"
    with durable_files.new_folder(path) as folder:
        (folder / "in").mkdir()
        (folder / "in" / "a").write_text("1")
        assert not path.exists()
    assert _tree(tmp_path) == {"new/in/a": "1"}
    for replace in (False, True):
        with pytest.raises(RuntimeError), durable_files.new_folder(path, replace=replace) as folder:
            (folder / "b").write_text("2")
            raise RuntimeError
        assert _tree(tmp_path) == {"new/in/a": "1"}


def test_a_folder_gives_way_only_if_asked(tmp_path):
    path = tmp_path / "new"
    path.mkdir()
    (path / "a").write_text("1")
    with pytest.raises(FileExistsError), durable_files.new_folder(path) as folder:
        (folder / "b").write_text("2")
    assert _tree(tmp_path) == {"new/a": "1"}
    with durable_files.new_folder(path, replace=True) as folder:
        (folder / "b").write_text("2")
    assert _tree(tmp_path) == {"new/b": "2"}
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_cannot_be_moved_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "new"
    path.mkdir()
    (path / "a").write_text("1")
    rename = os.rename

    def only_away(source, target):
        if target == path and not (source / "a").exists():
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(durable_files.os, "rename", only_away)
    with (
        pytest.raises(OSError, match="Input/output error"),
        durable_files.new_folder(path, replace=True) as folder,
    ):
        (folder / "b").write_text("2")
    assert _tree(tmp_path) == {"new/a": "1"}
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_leftover_folders_are_removed_too(tmp_path):
    for name in (".0123456789abcdef.unfinished", "kept.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("1")
    durable_files.remove_leftovers(tmp_path)
    assert _tree(tmp_path) == {"kept.unfinished/a": "1"}


def test_one_holds_a_lock_and_nobody_holds_one_whose_file_is_gone(tmp_path, monkeypatch):
    path, flock = tmp_path / "lock", durable_files.fcntl.flock
    with durable_files.locked(path) as is_ours, durable_files.locked(path) as is_others:
        assert is_ours and not is_others

    def late(descriptor, how):
        path.unlink()  # Its holder is done with it, and another process may make a new one.
        flock(descriptor, how)

    monkeypatch.setattr(durable_files.fcntl, "flock", late)
    with durable_files.locked(path) as is_ours:
        assert not is_ours
