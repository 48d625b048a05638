"""Provenance of a task: the code that its plans were built from, and who built them.

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


def of_package(builder: str | None = None) -> plan_pb2.Provenance:
    """Names the code of a task that is built by this package alone.

    All options of such a task are signed with it. So the repository that the user is in does not
    matter. The package's own does, if it is run from a checkout.

    Args:
      builder: Name and address of who builds the task; None for those that git is configured with
        in the current folder.

    Returns:
      The package's version, the commit of its checkout if there is one, and the builder.

    Raises:
      ValueError: If `builder` is not one short line.
    """
    made = plan_pb2.Provenance(package_version=version.__version__)
    here = pathlib.Path(tff_dpftrl.__file__)
    commit = _commit(here)
    if commit is not None and _is_tracked(here):  # Not in an environment inside of a repository.
        made.package.CopyFrom(commit)
    return _with_builder(made, builder, pathlib.Path.cwd())


def of_file(
    path: str | os.PathLike[str],
    function: str,
    builder: str | None = None,
    *,
    allow_dirty: bool = False,
) -> plan_pb2.Provenance:
    """Names the code of a task that is built by a file of the engineer's.

    Args:
      path: Python file.
      function: Name of the function in it.
      builder: Name and address of who builds the task; None for those that git is configured with
        in the file's folder.
      allow_dirty: Whether code may differ from the last commit; the plan then says so.

    Returns:
      The file, the commit of its repository if there is one, and what `of_package` names.

    Raises:
      ValueError: If the repository has code that is not committed, or `builder` is not one short
        line.
    """
    path = pathlib.Path(path).resolve()
    made, commit = of_package(""), _commit(path)
    is_dirty = any((folder / ".git").exists() for folder in path.parents)  # Git has no commit.
    name = path.name
    if commit is not None:
        is_dirty = commit.is_dirty = commit.is_dirty or not _is_tracked(path)
        made.build.CopyFrom(commit)
        name = _git(path.parent, "rev-parse", "--show-prefix") + name
    if is_dirty and not allow_dirty:
        last = "any commit" if commit is None else f"its last commit, {commit.name}"
        raise validation.UsageError(
            f"The git repository of {path} has changed files, or new Python files, since {last}: "
            "nobody could find the code of this task again. Commit them, or give --allow-dirty, "
            "and the task says so."
        )
    made.build_file = f"{name}:{function}"
    return _with_builder(made, builder, path.parent)


def put_into(
    made: plan_pb2.Provenance, server: plan_pb2.ServerPlan, devices: Iterable[plan_pb2.DevicePlan]
) -> None:
    """Puts a provenance into the plans of a task; devices need no engineer's address.

    Args:
      made: Provenance.
      server: Plan of the server; changed in place.
      devices: Plans of devices; changed in place.
    """
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


def _with_builder(
    made: plan_pb2.Provenance, builder: str | None, folder: pathlib.Path
) -> plan_pb2.Provenance:
    if builder is None:
        name, address = (_git(folder, "config", f"user.{key}") or "" for key in ("name", "email"))
        builder = f"{name} <{address}>" if address else name
    if len(builder) > _MAX_BUILDER or not (builder.isprintable() and builder == builder.strip()):
        raise validation.UsageError(
            f"builder must be a name and an address in one line, got {builder[:_MAX_BUILDER]!r}: "
            "give --builder 'Name <address>'."
        )
    made.builder = builder
    return made


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
