"""Provenance of a task: the code that its plans were built from, and its builder.

Plans are data: they do not change with the code. The commit lets a reviewer read the code that made
them, and make them again (paper 004, section 7.3). Nothing here depends on the time or the machine,
so that equal code and options give equal plans.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterable

import tff_dpftrl
from tff_dpftrl import validation, version
from tff_dpftrl.runtime.plans import plan_pb2

_MAX_BUILDER = 200


def find(
    build: str | None = None, builder: str | None = None, *, allow_dirty: bool = False
) -> plan_pb2.Provenance:
    """Names the code that a task is about to be built from: package, file, commits and builder.

    Without `build`, this package builds the task alone, from options that are signed with it. The
    package's repository is then only named, and the one of the current folder does not matter.
    Without a repository there is no commit. Uncommitted code is refused, unless `allow_dirty`. The
    default builder is the one that git is configured with.
    """
    made = plan_pb2.Provenance(package_version=version.__version__)
    here, folder = pathlib.Path(tff_dpftrl.__file__), pathlib.Path.cwd()
    commit = _commit(here)
    if commit is not None and _is_tracked(here):  # Not in an environment inside of a repository.
        made.package.CopyFrom(commit)
    if build is not None:
        file, _, function = build.rpartition(":")
        path = pathlib.Path(file).resolve()
        if path.is_file():  # Another one is refused when it is loaded.
            folder = path.parent
            _add_build(made, path, function, allow_dirty)
    made.builder = _builder(folder) if builder is None else builder
    if not (len(made.builder) <= _MAX_BUILDER and made.builder.isprintable()):
        raise validation.UsageError(
            f"builder must be a name and an address in one line, got "
            f"{made.builder[:_MAX_BUILDER]!r}: give --builder 'Name <address>'."
        )
    return made


def put_into(
    made: plan_pb2.Provenance, server: plan_pb2.ServerPlan, devices: Iterable[plan_pb2.DevicePlan]
) -> None:
    """Puts a provenance into the plans of a task; devices need no engineer's address."""
    server.provenance.CopyFrom(made)
    for plan in devices:
        plan.provenance.CopyFrom(made)
        plan.provenance.ClearField("builder")


def sentence(made: plan_pb2.Provenance) -> str:
    """Describes a provenance, which may be empty, in one sentence."""
    if not made.package_version:
        return "Nothing says what it was built from."
    package = f"tff_dpftrl {made.package_version}"
    package += f" ({_describe(made.package)})" if made.HasField("package") else ""
    by = f" by {made.builder}" if made.builder else ""
    if not made.build_file:
        return f"Built{by} with {package}."
    commit = _describe(made.build) if made.HasField("build") else "in no git repository"
    return f"Built{by} from {made.build_file} ({commit}) with {package}."


def _describe(commit: plan_pb2.Provenance.Commit) -> str:
    return f"commit {commit.name}{', DIRTY: with uncommitted code' if commit.is_dirty else ''}"


def _add_build(
    made: plan_pb2.Provenance, path: pathlib.Path, function: str, allow_dirty: bool
) -> None:
    """Names a file and its commit, and refuses code that is not committed."""
    commit, name = _commit(path), path.name
    is_dirty = any((folder / ".git").exists() for folder in path.parents)  # Git has no commit.
    if commit is not None:
        is_dirty = commit.is_dirty = commit.is_dirty or not _is_tracked(path)
        made.build.CopyFrom(commit)
        name = f"{_git(path.parent, 'rev-parse', '--show-prefix')}{name}"
    if is_dirty and not allow_dirty:
        last = "any commit" if commit is None else f"its last commit, {commit.name}"
        raise validation.UsageError(
            f"The git repository of {path} has changed files, or new Python files, since {last}: "
            "nobody could find the code of this task again. Commit them, or give --allow-dirty, "
            "and the task says so."
        )
    made.build_file = f"{name}:{function}"


def _builder(folder: pathlib.Path) -> str:
    """Returns the name and address that git is configured with; "" without."""
    name, address = (_git(folder, "config", f"user.{key}") or "" for key in ("name", "email"))
    return f"{name} <{address}>".strip() if address else name


def _commit(path: pathlib.Path) -> plan_pb2.Provenance.Commit | None:
    """Returns the state of the repository of a file; None if it is in none.

    New files that are not Python's, such as data, keys and finished tasks, are not looked at.
    """
    top = _git(path.parent, "rev-parse", "--show-toplevel")
    name = _git(path.parent, "rev-parse", "--verify", "HEAD")
    if not top or not name:
        return None
    root = pathlib.Path(top)
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py")
    return plan_pb2.Provenance.Commit(name=name, is_dirty=changed != "" or new != "")


def _is_tracked(path: pathlib.Path) -> bool:
    return _git(path.parent, "ls-files", "--error-unmatch", "--", path.name) is not None


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    """Runs git in a folder, and returns its output; None if it fails or is not installed."""
    # In a hook of git, they name the repository that the hook is of.
    hook = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in hook}
    try:
        done = subprocess.run(
            ("git", *arguments),
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
