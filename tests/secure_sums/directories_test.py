"""Directories that devices go on with; `device_test` has those that each of them refuses."""

from __future__ import annotations

import pytest

from tff_dpftrl.secure_sums import (
    directories,
    group,
    keys,
    parameters,
    refusals,
    secure_sum_pb2,
    vectors,
)

_HONEST = parameters.ThreatModel.HONEST_BUT_CURIOUS


def _directory(num_devices):
    """That of the first of some devices, and what all of them demand and have advertised."""
    demanded = parameters.Parameters(
        (vectors.Segment(1, 2),), _HONEST, least_devices=2, most_devices=num_devices
    )
    advertised = [
        secure_sum_pb2.KeyAdvertisement(
            encryption_key=keys.KeyPair().public, mask_key=keys.KeyPair().public
        )
        for _ in range(num_devices)
    ]
    server = group.Group(demanded, parameters.new_session())
    for name, keys_ in enumerate(advertised):
        server.receive(name, secure_sum_pb2.ToServer(key_advertisement=keys_))
    return server.advance()[0].directory, demanded, advertised


def test_the_keys_of_all_by_index():
    directory, demanded, advertised = _directory(5)
    members = directories.check(directory, advertised[0], demanded)
    assert list(members.items()) == list(enumerate(advertised))


def test_no_key_is_looked_at_of_too_many_devices(monkeypatch):
    directory, demanded, advertised = _directory(5)
    monkeypatch.setattr(keys, "is_sound", lambda key: pytest.fail("a key was looked at"))
    directory.num_devices = 6
    with pytest.raises(refusals.TooManyDevicesError, match="A group of 6.* one of 5 at most"):
        directories.check(directory, advertised[0], demanded)


def test_one_s_own_identity_needs_no_proof_and_others_do():
    session = parameters.new_session()
    members = {}
    for index in range(3):
        identity = keys.IdentityKey()
        members[index] = secure_sum_pb2.KeyAdvertisement(
            encryption_key=keys.KeyPair().public,
            mask_key=keys.KeyPair().public,
            identity_key=identity.public,
            identity_proof=bytes([index]),
        )
        members[index].signature = identity.sign_advertisement(session, members[index])
    asked = []
    directories.check_identities(members, 1, session, lambda _, proof: not asked.append(proof))
    assert asked == [bytes([0]), bytes([2])]
    with pytest.raises(refusals.UnprovenIdentityError, match="device 2 is not proven"):
        directories.check_identities(members, 1, session, lambda _, proof: proof != bytes([2]))
