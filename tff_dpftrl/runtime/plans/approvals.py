"""Approvals: signatures of reviewers on all parts of one task (paper 004, section 7.3).

A reviewer signs the hashes of all plans and of the privacy terms, which name the task's other
files. So an approval is valid for no task that differs in a byte. The hashes travel with the
signatures, beside the signed plan: a device that has one plan of the task can verify the approvals
of all of it. The builder, whose key signed the plans, cannot approve them. Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.plans import plan_pb2, signing

_DOMAIN = b"tff_dpftrl approval of a task 1:"
_HASH_BYTES = 32
_SHOWN = 5  # Largest number of unknown keys in a message.
_KEY = re.compile(rb"-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----", re.DOTALL)


def unapproved(task: plan_pb2.SignedTask, terms_digest: str) -> plan_pb2.Approvals:
    """Names the content of a task that reviewers approve."""
    return plan_pb2.Approvals(
        terms=bytes.fromhex(terms_digest),
        server_plan=task.server.sha256,
        device_plans=[plan.sha256 for plan in task.devices],
    )


def approve(
    content: plan_pb2.Approvals, key: ed25519.Ed25519PrivateKey, signer: bytes
) -> plan_pb2.Approvals.Approval:
    """Signs the content of a task."""
    name = signing.key_name(key.public_key())
    if name == signer:
        raise validation.UsageError(
            f"The key {name.hex()} has signed the task: a builder's own approval does not count. "
            "Give the task to another reviewer."
        )
    return plan_pb2.Approvals.Approval(key=name, signature=key.sign(_signed(content)))


@dataclasses.dataclass(frozen=True)
class Reviewers:
    """Keys of reviewers by name, each key once, and the smallest number of approvals of a task."""

    keys: Mapping[str, ed25519.Ed25519PublicKey]
    required: int = 1

    def __post_init__(self):
        validation.integer("approvals", self.required, minimum=1)
        if self.required > len(self.keys):
            raise validation.UsageError(
                f"approvals={self.required} is more than the {len(self.keys)} reviewers: name more "
                "reviewers, or ask for fewer approvals."
            )
        seen: dict[bytes, str] = {}
        for name, key in self.keys.items():
            other = seen.setdefault(signing_keys.raw(key), name)
            if other != name:
                raise validation.UsageError(
                    f"The key of the reviewer {name} is that of {other}, too: each reviewer needs "
                    "a key of their own, once."
                )

    def check(self, plan: plan_pb2.SignedPlan, task: str) -> tuple[str, ...]:
        """Refuses a plan that too few reviewers have approved; returns the names of those who have.

        The plan's hash and own signature must be verified already.
        """
        approvals = plan.approvals
        hashes = (approvals.server_plan, *approvals.device_plans)
        if approvals.approvals and plan.sha256 not in hashes:
            raise signing.PlanRefusedError(
                f"The approvals beside a plan of the task {task!r} are of other plans."
            )
        by_key: dict[bytes, plan_pb2.Approvals.Approval] = {
            approval.key: approval for approval in approvals.approvals
        }
        given, ignored = [], []
        for name, key in self.keys.items():
            approval = by_key.pop(signing.key_name(key), None)
            if approval is not None and approval.key == plan.key:
                ignored.append(f"{name} (signed the plans)")
            elif approval is not None and _is_valid(approvals, approval, key):
                given.append(name)
            elif approval is not None:
                ignored.append(f"{name} (not of this task)")
        if len(given) < self.required:
            ignored += [f"{key.hex()} (no reviewer)" for key in sorted(by_key)[:_SHOWN]]
            raise signing.PlanRefusedError(
                f"The task {task!r} has {len(given)} of the {self.required} approvals that are "
                f"required, by {', '.join(given) or 'nobody'}; reviewers are "
                f"{', '.join(self.keys)}"
                + (f"; not counted: {', '.join(ignored)}" if ignored else "")
                + "."
            )
        return tuple(given)


def read_reviewers(path: str | os.PathLike[str], required: int) -> Reviewers:
    """Reads public keys in PEM, each after a line with the reviewer's name.

    A key without a line is named by the first 8 bytes of its hash.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        raise validation.UsageError(
            f"There are no reviewers at {path}: correct the path."
        ) from None
    keys: dict[str, ed25519.Ed25519PublicKey] = {}
    begin = 0
    for block in _KEY.finditer(content):
        lines = content[begin : block.start()].decode("utf-8-sig", "replace").split("\n")
        begin = block.end()
        key = signing_keys.parse_public(block.group() + b"\n", f"{path}, block {len(keys) + 1},")
        named = [line.strip(" #\r\t") for line in lines if line.strip(" #\r\t")]
        name = named[-1] if named else signing.key_name(key).hex()
        if name in keys:
            raise validation.UsageError(f"{path} has the reviewer {name} twice: remove one.")
        keys[name] = key
    if not keys:
        raise validation.UsageError(
            f"{path} holds no public key in PEM: put each reviewer's name and key there."
        )
    return Reviewers(keys, required)


def _is_valid(
    approvals: plan_pb2.Approvals,
    approval: plan_pb2.Approvals.Approval,
    key: ed25519.Ed25519PublicKey,
) -> bool:
    try:
        key.verify(approval.signature, _signed(approvals))
    except (exceptions.InvalidSignature, signing.PlanRefusedError):
        return False
    return True


def _signed(approvals: plan_pb2.Approvals) -> bytes:
    """Returns the bytes that reviewers sign."""
    hashes = (approvals.terms, approvals.server_plan, *approvals.device_plans)
    if any(len(digest) != _HASH_BYTES for digest in hashes):
        raise signing.PlanRefusedError(f"A hash of the approvals has not {_HASH_BYTES} bytes.")
    return _DOMAIN + b"".join(hashes)
