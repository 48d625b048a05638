"""Provenance: the commit, the builder, and what is not committed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tff_dpftrl import validation, version
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.tasks import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def _git(folder, *arguments):
    done = subprocess.run(
        ("git", *arguments), cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture(name="repository")
def _repository(tmp_path, monkeypatch):
    """A repository with a committed build file, of an engineer who is known to git."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(tmp_path / "none"))
    folder = tmp_path / "repository"
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks/digits.py").write_text("def build(): ...\n")
    (folder / "notes.txt").write_text("notes\n")
    _git(folder, "init", "-q")
    _git(folder, "config", "user.name", "Ada")
    _git(folder, "config", "user.email", "ada@example.org")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "A task")
    return folder


def _of(repository, **options):
    return provenance.find(f"{repository}/tasks/digits.py:build", **options)


def test_a_clean_repository_is_named(repository):
    made = _of(repository)
    commit = _git(repository, "rev-parse", "HEAD")
    assert (made.build.name, made.build.is_dirty) == (commit, False)
    assert made.build_file == "tasks/digits.py:build"
    assert made.builder == "Ada <ada@example.org>"
    assert made.package_version == version.__version__
    assert f"by Ada <ada@example.org> from tasks/digits.py:build (commit {commit}) with " in (
        provenance.sentence(made)
    )
    # The same inputs give the same bytes, whatever the time and the current folder.
    again = _of(repository).SerializeToString(deterministic=True)
    assert again == made.SerializeToString(deterministic=True)


def _change(folder):
    (folder / "notes.txt").write_text("other notes\n")


def _stage(folder):
    _change(folder)
    _git(folder, "add", "notes.txt")


def _add_module(folder):
    (folder / "helpers.py").write_text("")


def _ignore(folder):
    _git(folder, "rm", "-q", "--cached", "tasks/digits.py")
    (folder / ".gitignore").write_text("tasks/digits.py\n")
    _git(folder, "add", ".gitignore")
    _git(folder, "commit", "-q", "-m", "Ignore")


@pytest.mark.parametrize("change", [_change, _stage, _add_module, _ignore])
def test_code_that_is_not_committed_is_refused_unless_forced(repository, change):
    change(repository)
    with pytest.raises(validation.UsageError, match="Commit them, or give --allow-dirty"):
        _of(repository)
    made = _of(repository, allow_dirty=True)
    assert made.build.is_dirty and "DIRTY" in provenance.sentence(made)


def test_data_keys_and_finished_tasks_are_no_code(repository):
    (repository / "signing_key").write_text("")
    (repository / "digits").mkdir()
    (repository / "digits/task.pb").write_bytes(b"")
    assert not _of(repository).build.is_dirty


def test_a_file_in_no_repository_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "digits.py").write_text("")
    made = provenance.find(f"{tmp_path}/digits.py:build", "Ada")
    assert not made.HasField("build") and made.package_version == version.__version__
    assert "from digits.py:build (in no git repository)" in provenance.sentence(made)


def test_a_repository_without_a_commit_or_without_git_is_dirty(repository, tmp_path, monkeypatch):
    _git(tmp_path, "init", "-q", "empty")
    (tmp_path / "empty/digits.py").write_text("")
    with pytest.raises(validation.UsageError, match="since any commit"):
        provenance.find(f"{tmp_path}/empty/digits.py:build")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(validation.UsageError, match="since any commit"):
        _of(repository)
    assert not _of(repository, allow_dirty=True).HasField("build")


def test_a_hook_of_another_repository_does_not_mislead(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    assert _of(repository).build.name == _git(
        repository, f"--git-dir={repository}/.git", "rev-parse", "HEAD"
    )


def test_the_package_alone_is_never_refused(repository, monkeypatch):
    _change(repository)
    monkeypatch.chdir(repository)
    made = provenance.find()
    assert made.builder == "Ada <ada@example.org>"  # But nothing of the repository.
    assert not made.HasField("build") and not made.build_file
    assert f"with tff_dpftrl {version.__version__}" in provenance.sentence(made)


def test_a_package_inside_of_an_environment_has_no_commit(repository, monkeypatch):
    (repository / ".gitignore").write_text(".venv\n")
    package = repository / ".venv/tff_dpftrl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance.tff_dpftrl, "__file__", str(package / "__init__.py"))
    assert not provenance.find().HasField("package")


@pytest.mark.parametrize("builder", ["two\nlines", "x" * 201, "\x1b[1m"])
def test_a_builder_is_one_line(builder):
    with pytest.raises(validation.UsageError, match="builder must be a name"):
        provenance.find(builder=builder)


@pytest.mark.parametrize("build", ["nowhere.py:build", "digits", "in memory"])
def test_a_file_that_is_not_there_is_left_to_who_loads_it(repository, monkeypatch, build):
    monkeypatch.chdir(repository)
    assert not provenance.find(build).build_file


def test_devices_are_not_told_the_builder():
    made = provenance.find(builder="Ada <ada@example.org>")
    server, device = plan_pb2.ServerPlan(), plan_pb2.DevicePlan()
    provenance.put_into(made, server, [device])
    assert server.provenance == made
    assert b"Ada" not in device.SerializeToString()
    assert device.provenance.package_version == version.__version__


def test_an_older_plan_says_nothing():
    assert "Nothing says" in provenance.sentence(plan_pb2.ServerPlan().provenance)
