"""What a public log has of a task or a run: the hashes that devices and readers can compute."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest

from tests.reports import made_up
from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl import validation
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.runtime.tasks import logged_files, task_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "small"
    small_folder.write(path, small_tasks.ROUNDS["blt"]())
    return path


def test_a_task_is_entered_by_what_its_signatures_are_under(folder, tmp_path):
    task = task_folder.read(folder)
    plans = [task.signed.server, *task.signed.devices]
    found = logged_files.of_folder(folder)
    assert [entry.kind for entry, _ in found] == ["terms", "server plan", "device plan"]
    assert {entry.of for entry, _ in found} == {f"{task.terms.population}/small"}
    hashes = [task.terms.digest(), *(plan.sha256.hex() for plan in plans)]
    assert [entry.sha256 for entry, _ in found] == hashes
    assert [hashlib.sha256(content).hexdigest() for _, content in found] == hashes


def test_statements_of_reports_and_runs_are_entered(folder, tmp_path):
    for place in (folder / task_folder.REPORT, tmp_path / "run"):
        place.mkdir()
        (place / "privacy_statement.json").write_text(statement_text.to_json(made_up.stated()))
    entry, content = logged_files.of_folder(folder)[-1]
    assert (entry.kind, content) == ("statement", statement_text.to_json(made_up.stated()).encode())
    [(of_run, _)] = logged_files.of_folder(tmp_path / "run")
    assert (of_run.kind, of_run.of, of_run.sha256) == ("statement", "run", entry.sha256)


def test_only_statements_of_the_folder_itself_are_published(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "task", ignore=lambda *_: [task_folder.REPORT])
    (tmp_path / "task" / task_folder.REPORT).symlink_to(tmp_path / "home")
    statements = [tmp_path / name / "privacy_statement.json" for name in ("run", "home")]
    for statement in statements:
        statement.parent.mkdir()
    statements[1].write_text(statement_text.to_json(made_up.stated()))
    statements[0].symlink_to(statements[1])
    for place in ("run", "task"):
        with pytest.raises(validation.UsageError, match="leads out of the folder"):
            logged_files.of_folder(tmp_path / place)
    statements[0].unlink()
    os.mkfifo(statements[0])
    statements[1].write_text('{"password": 1}')
    for place, problem in (("run", "is no regular file"), ("home", "not a privacy statement")):
        with pytest.raises(validation.UsageError, match=problem):
            logged_files.of_folder(tmp_path / place)


def test_what_is_neither_or_was_changed_is_refused(folder, tmp_path):
    with pytest.raises(validation.UsageError, match="neither the folder of a task nor one with"):
        logged_files.of_folder(tmp_path)
    (tmp_path / "privacy_statement.json").write_text("{")
    with pytest.raises(validation.UsageError, match="privacy_statement.json"):
        logged_files.of_folder(tmp_path)
    for file in ("task.pb", "terms.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    with pytest.raises(validation.UsageError, match="is refused"):
        logged_files.of_folder(tmp_path)
