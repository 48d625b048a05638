"""Signed plans: who vouches for which bytes, and as what."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime.plans import plan_pb2, signing

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
_KEYS = [_OTHER.public_key(), _KEY.public_key()]
_DEVICE = plan_pb2.DevicePlan(population="tests", task="one", least_runtime_version=2)
_SERVER = plan_pb2.ServerPlan(population="tests", task="one")


def _verified(signed, kind=plan_pb2.DevicePlan, keys=_KEYS):
    return signing.verified(signed, kind, keys)


def test_a_signed_plan_is_read_and_has_the_same_bytes_each_time():
    signed = signing.sign(_DEVICE, _KEY)
    assert _verified(signed) == _DEVICE
    assert signing.sign(_DEVICE, _KEY).SerializeToString() == signed.SerializeToString()


@pytest.mark.parametrize("field", ["plan", "sha256", "signature"])
def test_a_changed_byte_is_refused(field):
    signed = signing.sign(_DEVICE, _KEY)
    content = bytearray(getattr(signed, field))
    content[-1] ^= 1
    setattr(signed, field, bytes(content))
    with pytest.raises(signing.PlanRefusedError, match="hash differs|signature .* is not valid"):
        _verified(signed)


def test_another_plan_with_its_own_hash_is_refused():
    signed = signing.sign(_DEVICE, _KEY)
    other = signing.sign(plan_pb2.DevicePlan(population="tests", task="two"), _OTHER)
    signed.plan, signed.sha256 = other.plan, other.sha256
    with pytest.raises(signing.PlanRefusedError, match="signature as a DevicePlan is not valid"):
        _verified(signed)


def test_a_key_that_is_not_trusted_is_refused():
    signed = signing.sign(_DEVICE, _OTHER)
    with pytest.raises(signing.PlanRefusedError, match="which is not trusted; trusted are"):
        _verified(signed, keys=[_KEY.public_key()])
    signed.key = signing.key_name(_KEY.public_key())
    with pytest.raises(signing.PlanRefusedError, match="is not valid"):
        _verified(signed, keys=[_KEY.public_key()])


def test_a_servers_plan_is_no_devices_plan():
    with pytest.raises(signing.PlanRefusedError, match="signature as a DevicePlan is not valid"):
        _verified(signing.sign(_SERVER, _KEY))


def test_plans_of_a_task_belong_together():
    variants = [_DEVICE, plan_pb2.DevicePlan(task="one", least_runtime_version=1)]
    task = signing.sign_task(_SERVER, variants, _KEY)
    server, devices = signing.verified_task(task, _KEYS)
    assert server.population == "tests" and list(devices) == variants
    assert not _SERVER.device_plans
    del task.devices[1]
    with pytest.raises(signing.PlanRefusedError, match="others than those the server's plan names"):
        signing.verified_task(task, _KEYS)


def test_a_device_gets_the_newest_variant_that_it_can_run():
    variants = [plan_pb2.DevicePlan(least_runtime_version=v) for v in (4, 2, 3, 2)]
    chosen = [signing.variant_for(variants, version) for version in (1, 2, 3, 5)]
    assert chosen == [None, 1, 2, 0]
