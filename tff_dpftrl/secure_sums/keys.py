"""Keys of one session: of pairs of devices, of a device's self-mask, and of its identity.

Private keys and seeds come from the operating system. Derived keys are bound to the session, to
their purpose, and to both devices: their indices in the group and public keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tff_dpftrl.secure_sums import masks, secret_sharing, secure_sum_pb2

PUBLIC_KEY_BYTES = 32
PRIVATE_KEY_BYTES = 32
MAX_PROOF_BYTES = 4096
SEED_BYTES = 32
COMMITMENT_BYTES = 32
SEALED_SHARES_BYTES = 2 * secret_sharing.SHARE_BYTES + 16

_FOR_SHARES = b"tff_dpftrl secure sum: shares\0"
_FOR_PAIR_MASK = b"tff_dpftrl secure sum: mask of a pair\0"
_FOR_NOISE_MASK = b"tff_dpftrl secure sum: mask of a noise party\0"
_FOR_NOISE_PARTY = b"tff_dpftrl secure sum: key of a noise party\0"
_FOR_SELF_MASK = b"tff_dpftrl secure sum: self-mask\0"
_FOR_ADVERTISEMENT = b"tff_dpftrl secure sum: keys\0"
_FOR_SURVIVORS = b"tff_dpftrl secure sum: survivors\0"

_FIELD = 2**255 - 19
# u-coordinates of points of order 1, 2, 4 and 8, on the curve or its twist (RFC 7748, section 7;
# Bernstein, "Curve25519", https://cr.yp.to/ecdh.html).
_LOW_ORDER = frozenset(
    (
        0,
        1,
        _FIELD - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    )
)


def is_sound(public_key: bytes) -> bool:
    """Checks whether bytes are an X25519 public key of large order in its canonical form."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        return False
    coordinate = int.from_bytes(public_key, "little")
    return coordinate < _FIELD and coordinate not in _LOW_ORDER


def _index(index: int) -> bytes:
    return index.to_bytes(4, "big")


def _derive(secret: bytes, session: bytes, info: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, session, info).derive(secret)


class KeyPair:
    """X25519 key pair of one device, for one purpose in one session."""

    def __init__(self, private_key: x25519.X25519PrivateKey | None = None):
        """Takes a private key, or generates one if None."""
        self._private = private_key or x25519.X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    @classmethod
    def from_int(cls, value: int) -> KeyPair:
        """Makes the pair of a private key that was shared as `as_int`, or raises OverflowError."""
        raw = value.to_bytes(PRIVATE_KEY_BYTES, "big")
        return cls(x25519.X25519PrivateKey.from_private_bytes(raw))

    def as_int(self) -> int:
        """Returns the private key as a number below 2²⁵⁶, for secret sharing."""
        return int.from_bytes(self._private.private_bytes_raw(), "big")

    def _agree(
        self, purpose: bytes, session: bytes, index: int, other: int, others_public: bytes
    ) -> bytes:
        public = x25519.X25519PublicKey.from_public_bytes(others_public)
        secret = self._private.exchange(public)
        lower, higher = sorted([(index, self.public), (other, others_public)])
        info = b"".join((purpose, _index(lower[0]), _index(higher[0]), lower[1], higher[1]))
        return _derive(secret, session, info, 32)

    def mask_key(self, session: bytes, index: int, other: int, others_public: bytes) -> bytes:
        """Derives the key (`masks.KEY_BYTES` bytes) of the mask that two devices have in common.

        `index` is that of the device with this pair. The caller checks the other key by `is_sound`.
        """
        return self._agree(_FOR_PAIR_MASK, session, index, other, others_public)

    def noise_mask_key(self, noise_session: bytes, device: int, others_public: bytes) -> bytes:
        """Derives the key of the mask that a device has in common with a noise party.

        A device uses the pair of its encryption key, of which nobody ever gets shares. The other
        side's public key is the device's encryption key, or the noise party's key for masks. The
        caller checks it by `is_sound`. The session is `Parameters.noise_session`. The mask's key
        has `masks.KEY_BYTES` bytes.
        """
        return self._agree(_FOR_NOISE_MASK, noise_session, device, device, others_public)

    def channel(self, session: bytes, index: int, other: int, others_public: bytes) -> Channel:
        """Opens this device's end of the encrypted channel of two devices through the server.

        The caller checks the other public key for encryption by `is_sound`.
        """
        key = self._agree(_FOR_SHARES, session, index, other, others_public)
        return Channel(key, session, index, other)


class Channel:
    """Channel for one message in each direction between two devices, with AES-256-GCM.

    One key serves both directions: each has a nonce of its own, which is used once.
    """

    def __init__(self, key: bytes, session: bytes, index: int, other: int):
        """Takes the key that both devices have."""
        self._cipher = AESGCM(key)
        self._session = session
        self._index = index
        self._other = other

    def _bound_to(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        nonce = (sender > receiver).to_bytes(12, "big")
        return nonce, self._session + _index(sender) + _index(receiver)

    def seal(self, content: bytes) -> bytes:
        """Encrypts this device's message to the other device; to be called once."""
        nonce, associated = self._bound_to(self._index, self._other)
        return self._cipher.encrypt(nonce, content, associated)

    def open(self, content: bytes) -> bytes | None:
        """Decrypts the other device's message; None if that device has not sealed it."""
        nonce, associated = self._bound_to(self._other, self._index)
        try:
            return self._cipher.decrypt(nonce, content, associated)
        except exceptions.InvalidTag:
            return None


def self_mask(seed: int, session: bytes, index: int) -> tuple[bytes, bytes]:
    """Derives the key of a device's self-mask, and the commitment to its seed.

    The seed is a random number below 2²⁵⁶; a larger one raises OverflowError. The commitment has
    COMMITMENT_BYTES bytes. It is derived beside the key and reveals nothing about it.
    """
    raw = seed.to_bytes(SEED_BYTES, "big")
    length = masks.KEY_BYTES + COMMITMENT_BYTES
    derived = _derive(raw, session, _FOR_SELF_MASK + _index(index), length)
    return derived[: masks.KEY_BYTES], derived[masks.KEY_BYTES :]


class IdentityKey:
    """Ed25519 key that a device makes for one session."""

    def __init__(self):
        """Generates a key."""
        self._private = ed25519.Ed25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def sign_advertisement(self, session: bytes, keys: secure_sum_pb2.KeyAdvertisement) -> bytes:
        """Signs both public keys of a device; returns 64 bytes."""
        return self._private.sign(_advertisement(session, keys))

    def sign_survivors(self, session: bytes, digest: bytes, bitmap: bytes) -> bytes:
        """Signs the digest of a directory and the bitmap of survivors."""
        return self._private.sign(_FOR_SURVIVORS + session + digest + bitmap)


def _advertisement(session: bytes, keys: secure_sum_pb2.KeyAdvertisement) -> bytes:
    return _FOR_ADVERTISEMENT + session + keys.encryption_key + keys.mask_key + keys.identity_key


def _verifies(identity_key: bytes, signature: bytes, content: bytes) -> bool:
    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(identity_key)
        public.verify(signature, content)
    except (ValueError, exceptions.InvalidSignature):
        return False
    return True


def advertisement_is_signed(session: bytes, keys: secure_sum_pb2.KeyAdvertisement) -> bool:
    """Checks whether the identity key of an advertisement has signed its keys for a session."""
    return _verifies(keys.identity_key, keys.signature, _advertisement(session, keys))


def survivors_are_signed(
    session: bytes, digest: bytes, bitmap: bytes, identity_key: bytes, signature: bytes
) -> bool:
    """Checks a signature of `IdentityKey.sign_survivors` by its public key."""
    return _verifies(identity_key, signature, _FOR_SURVIVORS + session + digest + bitmap)


def sign_noise_party(
    signing_key: ed25519.Ed25519PrivateKey, noise_session: bytes, mask_key: bytes
) -> secure_sum_pb2.NoisePartyKeys:
    """Signs the public key for masks that a noise party made for this session.

    The public half of `signing_key` was promised to the devices; the directory of each holds the
    message. The session is `Parameters.noise_session`.
    """
    party = signing_key.public_key().public_bytes_raw()
    signature = signing_key.sign(_FOR_NOISE_PARTY + noise_session + mask_key)
    return secure_sum_pb2.NoisePartyKeys(party=party, mask_key=mask_key, signature=signature)


def noise_party_is_signed(noise_session: bytes, keys: secure_sum_pb2.NoisePartyKeys) -> bool:
    """Checks whether a noise party has signed its key for masks for a session."""
    return _verifies(keys.party, keys.signature, _FOR_NOISE_PARTY + noise_session + keys.mask_key)


def directory_digest(
    num_devices: int,
    threshold: int,
    members: Iterable[tuple[int, secure_sum_pb2.KeyAdvertisement]],
    noise_mask_keys: Iterable[bytes] = (),
) -> bytes:
    """Computes the SHA-256 of the directory that all devices of a complete graph receive.

    Members (keys of the checked sizes) are by increasing index; keys for masks of noise parties are
    in the order of `Parameters`.
    """
    digest = hashlib.sha256(_index(num_devices) + _index(threshold))
    for index, keys in members:
        digest.update(_index(index) + keys.encryption_key + keys.mask_key + keys.identity_key)
    digest.update(b"".join(noise_mask_keys))
    return digest.digest()
