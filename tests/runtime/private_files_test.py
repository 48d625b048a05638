"""Tests of tff_dpftrl.runtime.private_files."""

from __future__ import annotations

import os
import stat

import pytest

from tff_dpftrl.runtime import private_files


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_missing_folders_are_made_for_their_owner_all_of_them(tmp_path):
    folder = tmp_path / "store" / "deep" / "server"
    private_files.make_folder(folder)
    assert {_mode(path) for path in (folder, folder.parent, folder.parent.parent)} == {0o700}
    private_files.make_folder(folder)


def test_a_folder_that_exists_keeps_its_mode(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o750)
    private_files.make_folder(folder)
    private_files.make_folder(folder / "server")
    assert (_mode(folder), _mode(folder / "server")) == (0o750, 0o700)


def test_what_is_no_folder_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "folder"):
        with pytest.raises(OSError):
            private_files.make_folder(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_secret_that_others_can_use_is_refused_with_the_remedy(tmp_path, mode):
    path = tmp_path / "token"
    path.write_bytes(b"secret")
    path.chmod(mode)
    wanted = f"{path} is a token that others can use .mode {mode:04o}.: run `chmod 600 {path}`"
    with pytest.raises(ValueError, match=wanted):
        private_files.read(path, "a token")
    path.chmod(0o600)
    assert private_files.read(path, "a token") == b"secret"


def test_a_secret_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no private key at {tmp_path / 'nowhere'}"):
        private_files.read(tmp_path / "nowhere")
