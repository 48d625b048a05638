"""Keys of pairs agree, are bound to what they are for, and weak or forged ones are known."""

from __future__ import annotations

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric import x25519

from tff_dpftrl.secure_sums import keys, secure_sum_pb2

_SESSION, _OTHER_SESSION = bytes(32), bytes([1]) * 32


def _pairs():
    return keys.KeyPair(), keys.KeyPair()


def test_both_devices_derive_the_same_key_and_nobody_else():
    a, b = _pairs()
    key = a.mask_key(_SESSION, 3, 7, b.public)
    assert key == b.mask_key(_SESSION, 7, 3, a.public)
    others = [
        a.mask_key(_OTHER_SESSION, 3, 7, b.public),
        a.mask_key(_SESSION, 3, 8, b.public),
        a.mask_key(_SESSION, 7, 3, b.public),
        keys.KeyPair().mask_key(_SESSION, 3, 7, b.public),
    ]
    assert len({key, *others}) == 5


def test_private_keys_survive_being_shared():
    pair, other = _pairs()
    again = keys.KeyPair.from_int(pair.as_int())
    assert again.public == pair.public
    assert again.mask_key(_SESSION, 0, 1, other.public) == pair.mask_key(
        _SESSION, 0, 1, other.public
    )


def test_channel_opens_the_others_message_in_this_session_only():
    a, b = _pairs()
    sealed = a.channel(_SESSION, 0, 1, b.public).seal(b"shares")
    receiver = b.channel(_SESSION, 1, 0, a.public)
    assert receiver.open(sealed) == b"shares"
    assert receiver.open(receiver.seal(b"shares")) is None  # Sent back.
    assert b.channel(_OTHER_SESSION, 1, 0, a.public).open(sealed) is None
    assert b.channel(_SESSION, 2, 0, a.public).open(sealed) is None
    assert keys.KeyPair().channel(_SESSION, 1, 0, a.public).open(sealed) is None
    for broken in (b"", sealed[:-1], sealed + b"\0", bytes([sealed[0] ^ 1]) + sealed[1:]):
        assert receiver.open(broken) is None


def test_two_directions_of_a_channel_share_no_key_stream():
    a, b = _pairs()
    there = a.channel(_SESSION, 0, 1, b.public).seal(bytes(66))
    back = b.channel(_SESSION, 1, 0, a.public).seal(bytes(66))
    assert there[:66] != back[:66]


def test_keys_are_sound_as_the_library_makes_them():
    assert all(keys.is_sound(keys.KeyPair().public) for _ in range(20))


@pytest.mark.parametrize("coordinate", sorted(keys._LOW_ORDER))
def test_low_order_keys_are_unsound_and_would_leave_no_secret(coordinate):
    weak = coordinate.to_bytes(32, "little")
    assert not keys.is_sound(weak)
    with pytest.raises(ValueError):  # The library refuses the all-zero result.
        x25519.X25519PrivateKey.generate().exchange(x25519.X25519PublicKey.from_public_bytes(weak))


def test_all_points_of_low_order_are_known():
    # Of order 1 and 2 there is one coordinate, of order 4 two, of order 8 two (Bernstein).
    assert len(keys._LOW_ORDER) == 5
    assert sum(_double(u) == 0 for u in keys._LOW_ORDER) == 3  # 0, and both of order 4.
    assert sum(_double(u) in (1, keys._FIELD - 1) for u in keys._LOW_ORDER) == 2


def _double(u):
    """The coordinate of twice a point (Montgomery 1987), 0 for that at infinity."""
    p = keys._FIELD
    below = 4 * u * (u * u + 486662 * u + 1) % p
    return (u * u - 1) ** 2 * pow(below, p - 2, p) % p


def test_second_encodings_of_a_key_are_unsound():
    public = keys.KeyPair().public
    coordinate = int.from_bytes(public, "little")
    assert not keys.is_sound((coordinate | 1 << 255).to_bytes(32, "little"))
    for small in range(19):
        assert not keys.is_sound((2**255 - 19 + small).to_bytes(32, "little"))
    for length in (0, 31, 33):
        assert not keys.is_sound(bytes([9]) * length)


def test_self_mask_is_bound_and_known_by_its_commitment():
    derived = [
        keys.self_mask(seed, session, index)
        for seed, session, index in itertools.product((0, 5), (_SESSION, _OTHER_SESSION), (0, 1))
    ]
    assert len({part for both in derived for part in both}) == 16
    assert keys.self_mask(5, _SESSION, 1) == keys.self_mask(5, _SESSION, 1)
    with pytest.raises(OverflowError):
        keys.self_mask(2**256, _SESSION, 0)


def _advertisement(identity, session=_SESSION):
    made = secure_sum_pb2.KeyAdvertisement(
        encryption_key=keys.KeyPair().public,
        mask_key=keys.KeyPair().public,
        identity_key=identity.public,
    )
    made.signature = identity.sign_advertisement(session, made)
    return made


def test_signed_advertisements():
    made = _advertisement(keys.IdentityKey())
    assert keys.advertisement_is_signed(_SESSION, made)
    assert not keys.advertisement_is_signed(_OTHER_SESSION, made)
    for field in ("encryption_key", "mask_key", "identity_key", "signature"):
        forged = secure_sum_pb2.KeyAdvertisement()
        forged.CopyFrom(made)
        setattr(forged, field, getattr(_advertisement(keys.IdentityKey()), field))
        assert not keys.advertisement_is_signed(_SESSION, forged), field
        setattr(forged, field, b"")
        assert not keys.advertisement_is_signed(_SESSION, forged), field


def test_signed_survivors():
    identity = keys.IdentityKey()
    directory = [(0, _advertisement(identity)), (1, _advertisement(keys.IdentityKey()))]
    digest = keys.directory_digest(2, 2, directory)
    signature = identity.sign_survivors(_SESSION, digest, b"\3")

    def is_signed(session=_SESSION, digest=digest, bitmap=b"\3", key=identity.public):
        return keys.survivors_are_signed(session, digest, bitmap, key, signature)

    assert is_signed()
    assert not is_signed(session=_OTHER_SESSION)
    assert not is_signed(bitmap=b"\1")
    assert not is_signed(key=keys.IdentityKey().public)
    other = [directory[0], (1, _advertisement(keys.IdentityKey()))]
    for changed in (
        keys.directory_digest(3, 2, directory),
        keys.directory_digest(2, 1, directory),
        keys.directory_digest(2, 2, other),
        keys.directory_digest(2, 2, directory[:1]),
    ):
        assert not is_signed(digest=changed)
