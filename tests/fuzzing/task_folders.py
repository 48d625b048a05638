"""Folders of tasks: changed on a disk, or made wrongly by somebody who has the key."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import random
import shutil
from collections.abc import Callable

from tests.fuzzing import files, judging, messages, mutations, plans, secure_sums
from tests.runtime.plans import secure_plans
from tff_dpftrl import validation
from tff_dpftrl.data import tokenizer, vocabulary
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.plans import plan_pb2, signing
from tff_dpftrl.runtime.tasks import task_config, task_folder
from tff_dpftrl.runtime.tasks import terms as terms_lib

_NAMED = {"population": "tests", "task": "small"}
_CONFIG = task_config.TaskConfig.of(
    **_NAMED,
    num_devices=100,
    num_rounds=6,
    clients_per_round=3,
    noise_multiplier=0.5,
    clip_norm=1.0,
)
_CHANGES = {
    "task.pb": mutations.protobuf,
    "terms.json": mutations.json_text,
    "terms.sig": mutations.scattered,
    "signing_key.pub": mutations.pem,
    "config.json": mutations.json_text,
    "vocabulary.json": mutations.json_text,
}


def _write(folder: pathlib.Path, number: int) -> None:
    """Writes a task; the one of number 0 sums in the clear."""
    server, device = secure_plans.server(**_NAMED), secure_plans.device(**_NAMED)
    terms = plans.TERMS
    if not number:
        for plan in (server, device):
            plan.ClearField("secure_aggregation")
            plan.ClearField("secure_sums")
        terms = dataclasses.replace(terms, secure_aggregation=None)
    devices = [device] * (1 + number)
    task_folder.write(
        folder / "task",
        signed=signing.sign_task(server, devices, plans.KEY),
        terms=terms,
        options=_CONFIG.to_dict(),
        features={"text": named_tensors.Feature("text", None)},
        words=vocabulary.Vocabulary(("a", "b"), "nothing"),
        rule=tokenizer.Tokenizer(),
        key=plans.KEY,
        readme="A test.\n",
    )


def _read(folder: pathlib.Path) -> None:
    found = task_folder.read(folder / "task")
    assert found.name == task_folder.read(folder / "task", plans.KEYS).name
    signing.variant_for(found.devices, 1)


def _sign(kind: type, content: bytes) -> plan_pb2.SignedPlan:
    """Signs a plan of any bytes."""
    digest = hashlib.sha256(content).digest()
    return plan_pb2.SignedPlan(
        plan=content,
        sha256=digest,
        key=signing.key_name(plans.KEYS[0]),
        signature=plans.KEY.sign(signing._signed(kind, digest)),
    )


def _changed_alike(contents: list[bytes], drawn: random.Random) -> list[bytes]:
    """Changes what the plans of server and devices have in common."""
    server = plan_pb2.ServerPlan.FromString(contents[0])
    found = secure_sums.changed(server, server, drawn)
    plans_ = [found, *(plan_pb2.DevicePlan.FromString(content) for content in contents[1:])]
    for device in plans_[1:]:
        for name in ("participation", "secure_aggregation", "secure_sums"):
            device.ClearField(name)
        device.MergeFrom(
            plan_pb2.DevicePlan(
                participation=found.participation if found.HasField("participation") else None,
                secure_aggregation=(
                    found.secure_aggregation if found.HasField("secure_aggregation") else None
                ),
                secure_sums=found.secure_sums,
            )
        )
    return [plan.SerializeToString() for plan in plans_]


def _sign_again(folder: pathlib.Path, drawn: random.Random) -> None:
    """Changes plans, terms, options or words, and signs all of it again."""
    signed = plan_pb2.SignedTask.FromString((folder / "task.pb").read_bytes())
    contents = [signed.server.plan, *(plan.plan for plan in signed.devices)]
    terms = (folder / "terms.json").read_bytes()
    what = drawn.randrange(6)
    if what == 0:  # In all plans alike, or they contradict each other.
        contents = _changed_alike(contents, drawn)
    elif what < 3:
        at = drawn.randrange(len(contents))
        contents[at] = mutations.protobuf(contents[at], drawn.choice(contents), drawn)
    elif what == 3:
        terms = mutations.json_text(terms, terms, drawn)
    else:
        path = folder / drawn.choice(("config.json", "vocabulary.json"))
        path.write_bytes(mutations.json_text(path.read_bytes(), b"{}", drawn))
    devices = [_sign(plan_pb2.DevicePlan, content) for content in contents[1:]]
    try:
        server = plan_pb2.ServerPlan.FromString(contents[0])
        server.device_plans[:] = [plan.sha256 for plan in devices]
        contents[0] = server.SerializeToString()
    except messages.unreadable():
        pass
    again = plan_pb2.SignedTask(server=_sign(plan_pb2.ServerPlan, contents[0]), devices=devices)
    (folder / "task.pb").write_bytes(again.SerializeToString())
    values = json.loads((folder / "terms.json").read_bytes())
    digests = {values["server_plan"]: again.server.sha256.hex()}
    for name, digest in values["files"].items():
        digests[digest] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    for old, new in digests.items():
        terms = terms.replace(old.encode(), new.encode())
    (folder / "terms.json").write_bytes(terms)
    signature = signing.key_name(plans.KEYS[0]) + plans.KEY.sign(terms_lib._signed(terms))
    (folder / "terms.sig").write_bytes(signature)


def _signed_again_kind() -> judging.Kind:
    def prepare(folder: pathlib.Path) -> Callable[[random.Random], judging.Case]:
        for number in range(3):
            (folder / f"valid {number}").mkdir()
            _write(folder / f"valid {number}", number)
        used = folder / "used"
        used.mkdir()

        def make(drawn: random.Random) -> judging.Case:
            judging.empty(used)
            shutil.copytree(folder / f"valid {drawn.randrange(3)}", used, dirs_exist_ok=True)
            _sign_again(used / "task", drawn)
            kept = tuple(file.name for file in used.rglob("*"))
            return judging.Case(lambda: _read(used), used, kept)

        return make

    return judging.Kind("task folder, signed again", prepare, (validation.UsageError,))


KINDS = (
    files.kind("task folder", _write, _CHANGES, _read, refusals=(validation.UsageError,)),
    _signed_again_kind(),
)
"""All of them."""
