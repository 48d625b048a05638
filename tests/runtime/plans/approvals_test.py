"""Approvals: of exactly one task, by distinct reviewers who did not sign it."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import validation
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.plans import approvals, plan_pb2, signing

_BUILDER, _ALICE, _BOB, _STRANGER = (
    ed25519.Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(4)
)
_TERMS = "ab" * 32


def _task(name="nwp"):
    devices = [plan_pb2.DevicePlan(task=name, least_runtime_version=i) for i in (1, 2)]
    return signing.sign_task(plan_pb2.ServerPlan(task=name), devices, _BUILDER)


def _approved(*keys, task=None, of=None, signer=b""):
    """Returns the plan of a device, approved with keys; the approvals may be `of` another task."""
    task = task or _task()
    content = approvals.unapproved(of or task, _TERMS)
    given = [approvals.approve(content, key, signer) for key in keys]
    content.approvals.extend(given)
    plan = task.devices[1]
    plan.approvals.CopyFrom(content)
    return plan


def _reviewers(required=1, **keys):
    keys = keys or {"Alice": _ALICE, "Bob": _BOB}
    return approvals.Reviewers({n: key.public_key() for n, key in keys.items()}, required)


def test_distinct_reviewers_count():
    assert _reviewers().check(_approved(_BOB), "nwp") == ("Bob",)
    assert _reviewers(2).check(_approved(_BOB, _STRANGER, _ALICE), "nwp") == ("Alice", "Bob")
    with pytest.raises(signing.PlanRefusedError, match="'nwp' has 0 of the 1 .* by nobody"):
        _reviewers().check(_approved(), "nwp")
    for twice in ((_BOB, _BOB), (_BOB, _STRANGER, _BOB)):
        with pytest.raises(signing.PlanRefusedError, match="has 1 of the 2 .* by Bob; reviewers"):
            _reviewers(2).check(_approved(*twice), "nwp")


def test_an_unknown_key_is_named():
    name = signing.key_name(_STRANGER.public_key()).hex()
    with pytest.raises(signing.PlanRefusedError, match=rf"not counted: {name} \(no reviewer\)"):
        _reviewers().check(_approved(_STRANGER), "nwp")


def test_who_signed_the_plans_cannot_approve_them():
    signer = _task().server.key
    with pytest.raises(validation.UsageError, match="a builder's own approval does not count"):
        approvals.approve(approvals.unapproved(_task(), _TERMS), _BUILDER, signer)
    forced = _approved(_BUILDER)
    reviewers = _reviewers(Alice=_ALICE, Builder=_BUILDER)
    with pytest.raises(signing.PlanRefusedError, match=r"Builder \(signed the plans\)"):
        reviewers.check(forced, "nwp")


@pytest.mark.parametrize("field", ["terms", "server_plan", "device_plans"])
def test_an_approval_is_of_every_byte_of_a_task(field):
    plan = _approved(_ALICE)
    if field == "device_plans":
        plan.approvals.device_plans[0] = bytes(32)
    else:
        setattr(plan.approvals, field, bytes(32))
    with pytest.raises(signing.PlanRefusedError, match=r"Alice \(not of this task\)"):
        _reviewers().check(plan, "nwp")


def test_approvals_of_another_task_do_not_count():
    plan = _approved(_ALICE, of=_task("other"))
    with pytest.raises(signing.PlanRefusedError, match="are of other plans"):
        _reviewers().check(plan, "nwp")
    # Nor if they claim to be of this one.
    plan.approvals.device_plans[1] = plan.sha256
    with pytest.raises(signing.PlanRefusedError, match=r"Alice \(not of this task\)"):
        _reviewers().check(plan, "nwp")


def test_hashes_cannot_be_split_differently():
    plan = _approved(_ALICE)
    given = plan.approvals
    given.terms, given.server_plan = given.terms[:31], given.terms[31:] + given.server_plan
    with pytest.raises(signing.PlanRefusedError, match="not of this task"):
        _reviewers().check(plan, "nwp")


def test_equal_arguments_give_equal_approvals():
    assert _approved(_ALICE).SerializeToString() == _approved(_ALICE).SerializeToString()


@pytest.mark.parametrize(
    ("keys", "required", "message"),
    [
        ({"Alice": _ALICE}, 2, "approvals=2 is more than the 1 reviewers"),
        ({"Alice": _ALICE}, 0, "approvals must be"),
        ({"Alice": _ALICE, "Bob": _ALICE}, 1, "The key of the reviewer Bob is that of Alice, too"),
    ],
)
def test_an_impossible_list_is_refused(keys, required, message):
    with pytest.raises(validation.UsageError, match=message):
        _reviewers(required, **keys)


def _pem(key):
    return signing_keys.public_pem(key.public_key()).decode()


def test_a_list_of_keys_is_read(tmp_path):
    path = tmp_path / "reviewers.pem"
    path.write_text(f"# Alice <a@b>\r\n\r\n{_pem(_ALICE)}\n{_pem(_BOB)}", encoding="utf-8-sig")
    found = approvals.read_reviewers(path, 2)
    assert list(found.keys) == ["Alice <a@b>", signing.key_name(_BOB.public_key()).hex()]
    assert found.check(_approved(_BOB, _ALICE), "nwp")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no public key"),
        ("Alice\n", "holds no public key"),
        (f"Alice\n{_pem(_ALICE)}Bob\n{_pem(_ALICE)}", "of the reviewer Bob is that of Alice"),
        (_pem(_ALICE) * 2, "has the reviewer .* twice"),
        (f"Alice\n{_pem(_ALICE)}Alice\n{_pem(_BOB)}", "has the reviewer Alice twice"),
        (_pem(_ALICE).replace("MCow", "MCoW"), "block 1, holds no Ed25519 public key"),
        (_pem(_ALICE).replace("PUBLIC", "PRIVATE"), "block 1, holds no Ed25519 public key"),
    ],
)
def test_a_bad_list_is_named(tmp_path, content, message):
    path = tmp_path / "reviewers.pem"
    path.write_text(content)
    with pytest.raises(validation.UsageError, match=message):
        approvals.read_reviewers(path, 1)


def test_a_missing_list_is_named(tmp_path):
    with pytest.raises(validation.UsageError, match="There are no reviewers at"):
        approvals.read_reviewers(tmp_path / "none", 1)
