"""Signatures of plans, by those who vouch for what a device is asked to compute.

A plan is serialised once. Hash and signature are of these bytes. Needs no TensorFlow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from cryptography import exceptions
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import message

from tff_dpftrl import validation
from tff_dpftrl.runtime.plans import plan_pb2

_Plan = TypeVar("_Plan", plan_pb2.DevicePlan, plan_pb2.ServerPlan)
_KEY_BYTES = 8


class PlanRefusedError(validation.UsageError):
    """Raised for a plan that must not be run; the message says why."""


def key_name(key: ed25519.Ed25519PublicKey) -> bytes:
    """Returns the name of a public key in signed plans: 8 bytes of its hash."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).digest()[:_KEY_BYTES]


def sign(plan: _Plan, key: ed25519.Ed25519PrivateKey) -> plan_pb2.SignedPlan:
    """Serialises, hashes and signs a plan; equal plans give equal bytes."""
    content = plan.SerializeToString(deterministic=True)
    digest = hashlib.sha256(content).digest()
    return plan_pb2.SignedPlan(
        plan=content,
        sha256=digest,
        key=key_name(key.public_key()),
        signature=key.sign(_signed(type(plan), digest)),
    )


def sign_task(
    server: plan_pb2.ServerPlan,
    devices: Sequence[plan_pb2.DevicePlan],
    key: ed25519.Ed25519PrivateKey,
) -> plan_pb2.SignedTask:
    """Signs the plans of a task; the server's plan names the hashes of the devices' plans."""
    signed = [sign(plan, key) for plan in devices]
    bound = plan_pb2.ServerPlan()
    bound.CopyFrom(server)
    bound.device_plans[:] = [plan.sha256 for plan in signed]
    return plan_pb2.SignedTask(server=sign(bound, key), devices=signed)


def verified(
    signed: plan_pb2.SignedPlan, kind: type[_Plan], keys: Iterable[ed25519.Ed25519PublicKey]
) -> _Plan:
    """Reads a plan from an untrusted source after its hash and signature were verified."""
    if hashlib.sha256(signed.plan).digest() != signed.sha256:
        raise PlanRefusedError("The plan was changed or damaged: its hash differs.")
    trusted = {key_name(key): key for key in keys}
    if signed.key not in trusted:
        raise PlanRefusedError(
            f"The plan is signed with the key {signed.key.hex()}, which is not trusted; "
            f"trusted are {sorted(name.hex() for name in trusted)}."
        )
    try:
        trusted[signed.key].verify(signed.signature, _signed(kind, signed.sha256))
    except exceptions.InvalidSignature:
        raise PlanRefusedError(
            f"The plan's signature as a {kind.DESCRIPTOR.name} is not valid."
        ) from None
    try:
        return kind.FromString(signed.plan)
    except message.DecodeError as error:
        raise PlanRefusedError(f"The plan cannot be read: {error}.") from None


def verified_task(
    task: plan_pb2.SignedTask, keys: Iterable[ed25519.Ed25519PublicKey]
) -> tuple[plan_pb2.ServerPlan, tuple[plan_pb2.DevicePlan, ...]]:
    """Reads the plans of a task after all signatures were verified."""
    keys = list(keys)
    server = verified(task.server, plan_pb2.ServerPlan, keys)
    if [plan.sha256 for plan in task.devices] != list(server.device_plans):
        raise PlanRefusedError("The device plans are others than those the server's plan names.")
    return server, tuple(verified(plan, plan_pb2.DevicePlan, keys) for plan in task.devices)


def variant_for(devices: Sequence[plan_pb2.DevicePlan], runtime_version: int) -> int | None:
    """Returns the index of the newest variant that a device can run; None if there is none."""
    fitting = [
        (plan.least_runtime_version, -index)
        for index, plan in enumerate(devices)
        if plan.least_runtime_version <= runtime_version
    ]
    return -max(fitting)[1] if fitting else None


def _signed(kind: type[_Plan], digest: bytes) -> bytes:
    """Returns the bytes to sign, such that a plan of one kind can never pass for the other."""
    return f"tff_dpftrl {kind.DESCRIPTOR.full_name} 1:".encode() + digest
