"""Files of tasks and runs that a public log has entries of."""

from __future__ import annotations

import hashlib
import os
import pathlib

from tff_dpftrl import validation
from tff_dpftrl.accounting import privacy_statement
from tff_dpftrl.runs import statement_subject
from tff_dpftrl.runtime import transparency_log
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.tasks import task_folder

_STATEMENT = "privacy_statement.json"


def of_folder(
    path: str | os.PathLike[str],
) -> list[tuple[transparency_log.Entry, bytes]]:
    """Returns a log's entries of a folder, with the contents of the files.

    For a task these are plans, terms, and the statement of its report; for another folder, the
    statement of its run or report. The hash of a plan is the one that was signed: a device has it.
    """
    path = pathlib.Path(path)
    now = statement_subject.now()
    found: list[tuple[transparency_log.Entry, bytes]] = []

    def add(kind: str, of: str, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        found.append((transparency_log.Entry(kind, of, digest, now), content))

    name = path.absolute().name
    statement = path / _STATEMENT
    if (path / task_folder.PLANS).exists():
        task = task_folder.read(path)
        name = f"{task.terms.population}/{task.name}"
        signed = plan_pb2.SignedTask.FromString((path / task_folder.PLANS).read_bytes())
        add("terms", name, (path / task_folder.TERMS).read_bytes())
        add("server plan", name, signed.server.plan)
        for device in signed.devices:
            add("device plan", name, device.plan)
        statement = path / task_folder.REPORT / _STATEMENT
    elif not statement.exists():
        raise validation.UsageError(
            f"{path} is neither the folder of a task nor one with a {_STATEMENT}: name one that "
            "task new, task report, train or finetune wrote."
        )
    if statement.exists():
        privacy_statement.PrivacyStatement.read(statement, folder=path)
        add("statement", name, statement.read_bytes())
    return found
