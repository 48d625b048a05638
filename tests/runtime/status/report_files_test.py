import os

import pytest

from tff_dpftrl.runtime.status import report_files


def _write(folder, name, content=b"content"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_files_of_these_names_are_handed_out(tmp_path):
    folder = _write(tmp_path / "report", "privacy_statement.md")
    _write(folder, "model.npz")
    ((name, written_at),) = report_files.listed(folder)
    assert name == "privacy_statement.md"
    assert written_at == (folder / name).stat().st_mtime
    assert report_files.read(folder, name) == b"content"
    assert report_files.read(folder, "report.html") is None
    assert report_files.read(folder, "model.npz") is None


@pytest.mark.parametrize("name", ["../report.html", "/etc/hostname", "report.html/", "", "."])
def test_no_path_is_a_name(tmp_path, name):
    _write(tmp_path, "report.html")
    assert report_files.read(_write(tmp_path / "report", "report.html"), name) is None


def test_links_pipes_and_folders_are_not_followed(tmp_path):
    secret = _write(tmp_path / "private", "report.html")
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.html").symlink_to(secret / "report.html")
    os.mkfifo(folder / "privacy_statement.md")
    (folder / "privacy_statement.json").mkdir()
    assert report_files.listed(folder) == []
    assert [report_files.read(folder, name) for name in report_files.FILES] == [None] * 3
    linked = tmp_path / "linked"
    linked.symlink_to(secret)
    assert report_files.read(secret, "report.html") == b"content"
    assert report_files.listed(linked) == []


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    folder = _write(tmp_path / "report", "report.html", b"12345")
    assert report_files.read(folder, "report.html") == b"12345"
    monkeypatch.setattr(report_files, "_MAX_BYTES", 4)
    assert report_files.listed(folder) == []
    assert report_files.read(folder, "report.html") is None
