"""Whether who checks in is a genuine device, without knowing which (paper 004, section 3).

The server sends a fresh nonce; the device has a token made for it, which an issuer signs
that knows genuine devices when it sees them (on a phone, the platform's attestation
service); the server verifies the token before it says anything else. `Attestation` is the
interface, `SignedTokens` the default, `TokenIssuer` the issuer's half of it.

A token is one Ed25519 signature over its version, issuer's key, nonce, a random number and
the time it expires. Nothing in it comes from the device, and no part but the issuer's key is
alike in two tokens: a server that has only tokens cannot tell which two came from one device.

What this does not give:

- Unlinkability towards the issuer. It sees the nonce that a device asks for; issuer and
  server together can tell which device was in which round. Blind signatures would prevent
  it; here the issuer must be somebody who does not share its log with the server.
- Unlinkability where the issuer signs with a key of its own for every device, since the key
  is named in the token: servers should trust few keys, and devices compare theirs.
- Protection from a genuine device whose owner sends wrong updates, or who asks the issuer on
  behalf of others.
- A nonce binds a token to one connection only if nobody relays it: make it by `bound_nonce`
  from the server's challenge and what the device knows of the server.
"""

from __future__ import annotations

import abc
import enum
import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime import signing_keys

NONCE_BYTES = 32

_VERSION = 1
_FIELDS = struct.Struct(">B8s32s16sQ")  # version, issuer's key, nonce, random number, expiry
_SIGNATURE_BYTES = 64
_CONTEXT = b"tff_dpftrl attestation token\0"

TOKEN_BYTES = _FIELDS.size + _SIGNATURE_BYTES


class Verdict(enum.Enum):
    """What a verifier found; the value is the reason to tell and to count."""

    GENUINE = "genuine"
    MALFORMED = "malformed token"
    UNKNOWN_ISSUER = "token of an unknown issuer"
    BAD_SIGNATURE = "bad signature"
    OTHER_NONCE = "token for another nonce"
    EXPIRED = "expired token"
    TOO_LONG_VALID = "token valid for too long"
    REPLAYED = "replayed token"
    OVERLOADED = "too many tokens at a time"


class Attestation(abc.ABC):
    """Tells genuine devices from others."""

    @abc.abstractmethod
    def verify(self, token: bytes, nonce: bytes) -> Verdict:
        """Judges a token; never raises for what a device may send.

        Args:
          token: What the device sent, any bytes.
          nonce: What it should be bound to, NONCE_BYTES bytes.

        Returns:
          `Verdict.GENUINE`, or the reason why not. A token is genuine once.
        """


def new_challenge() -> bytes:
    """A nonce from the operating system, for one check-in."""
    return secrets.token_bytes(NONCE_BYTES)


def bound_nonce(challenge: bytes, *context: str) -> bytes:
    """The nonce that device and server derive from a challenge and what both know.

    A token for it is of no use to a server that hands on the challenge of another one.

    Args:
      challenge: What the server sent, any number of bytes.
      *context: What each side knows by itself, such as the server's name that its
        certificate proves, and the population.

    Returns:
      NONCE_BYTES bytes.
    """
    digest = hashlib.sha256(b"tff_dpftrl attestation nonce\0")
    for part in (challenge, *(text.encode("utf-8", "surrogatepass") for text in context)):
        digest.update(struct.pack(">Q", len(part)) + part)
    return digest.digest()


def _key_name(key: ed25519.Ed25519PublicKey) -> bytes:
    return hashlib.sha256(signing_keys.raw(key)).digest()[:8]


class TokenIssuer:
    """Makes tokens; whoever calls `issue` vouches for the device that asked."""

    def __init__(
        self,
        key: ed25519.Ed25519PrivateKey,
        *,
        clock: Callable[[], float],
        lifetime_s: float = 300.0,
    ):
        """Uses a key; see `signing_keys` for how it is made and kept.

        Args:
          key: The issuer's key, for nothing else.
          clock: Seconds since 1970.
          lifetime_s: For how many seconds a token is valid.

        Raises:
          ValueError: If `lifetime_s` is no positive number.
        """
        self._key = key
        self._key_name = _key_name(key.public_key())
        self._clock = clock
        self._lifetime_s = validation.positive("lifetime_s", lifetime_s)

    def issue(self, nonce: bytes) -> bytes:
        """Makes a token for a genuine device.

        Args:
          nonce: What the token is bound to, NONCE_BYTES bytes.

        Returns:
          The token, TOKEN_BYTES bytes.

        Raises:
          ValueError: If the nonce has another length.
        """
        if len(nonce) != NONCE_BYTES:
            raise validation.UsageError(f"nonce must have {NONCE_BYTES} bytes, got {len(nonce)}.")
        expiry = int(self._clock() + self._lifetime_s)
        fields = _FIELDS.pack(_VERSION, self._key_name, nonce, secrets.token_bytes(16), expiry)
        return fields + self._key.sign(_CONTEXT + fields)


class SignedTokens(Attestation):
    """Verifies tokens of `TokenIssuer`s, each of them once.

    One verifier, or one for each set of nonces that can never meet: a token that was used at
    one of them is unknown to the others, and only its nonce keeps it out. Not thread-safe.
    """

    def __init__(
        self,
        issuers: Iterable[ed25519.Ed25519PublicKey],
        *,
        clock: Callable[[], float],
        longest_lifetime_s: float = 600.0,
        clock_skew_s: float = 30.0,
        max_remembered: int = 1_000_000,
    ):
        """Starts with no token seen.

        Args:
          issuers: Keys whose tokens are genuine.
          clock: Seconds since 1970; going backwards is taken for standing still.
          longest_lifetime_s: Tokens that are valid for longer are refused, so that used
            ones can be forgotten.
          clock_skew_s: By how much an issuer's clock may be off.
          max_remembered: How many used tokens are remembered, about 100 bytes each; beyond
            that all are refused for a while rather than one accepted twice.

        Raises:
          ValueError: If there is no issuer, or a number is out of range.
        """
        self._issuers = {_key_name(key): key for key in issuers}
        if not self._issuers:
            raise validation.UsageError(
                "issuers is empty: name the public key of at least one issuer."
            )
        self._clock = clock
        self._longest_s = validation.positive("longest_lifetime_s", longest_lifetime_s)
        self._skew_s = validation.number("clock_skew_s", clock_skew_s, at_least=0)
        capacity = validation.integer("max_remembered", max_remembered, minimum=1)
        self._used = _UsedTokens(capacity, keep_s=self._longest_s + 2 * self._skew_s)
        self._now = clock()

    @override
    def verify(self, token: bytes, nonce: bytes) -> Verdict:
        if len(token) != TOKEN_BYTES:
            return Verdict.MALFORMED
        fields, signature = token[: _FIELDS.size], token[_FIELDS.size :]
        version, key_name, bound_to, number, expiry = _FIELDS.unpack(fields)
        if version != _VERSION:
            return Verdict.MALFORMED
        issuer = self._issuers.get(key_name)
        if issuer is None:
            return Verdict.UNKNOWN_ISSUER
        try:
            issuer.verify(signature, _CONTEXT + fields)
        except exceptions.InvalidSignature:
            return Verdict.BAD_SIGNATURE
        if bound_to != nonce:
            return Verdict.OTHER_NONCE
        self._now = max(self._now, self._clock())
        if expiry < self._now - self._skew_s:
            return Verdict.EXPIRED
        if expiry > self._now + self._longest_s + self._skew_s:
            return Verdict.TOO_LONG_VALID
        return self._used.add(number, self._now)


class _UsedTokens:
    """Remembers what was added for at least `keep_s` seconds, in bounded memory."""

    def __init__(self, capacity: int, keep_s: float):
        self._capacity = capacity
        self._keep_s = keep_s
        self._recent: set[bytes] = set()
        self._older: set[bytes] = set()
        self._since: float | None = None

    def add(self, number: bytes, now: float) -> Verdict:
        if self._since is None or now - self._since > self._keep_s:
            # What is dropped was last added before `since`; after two spans both are old.
            is_long_ago = self._since is None or now - self._since > 2 * self._keep_s
            self._older = set() if is_long_ago else self._recent
            self._recent = set()
            self._since = now
        if number in self._recent or number in self._older:
            return Verdict.REPLAYED
        if len(self._recent) + len(self._older) >= self._capacity:
            return Verdict.OVERLOADED
        self._recent.add(number)
        return Verdict.GENUINE
