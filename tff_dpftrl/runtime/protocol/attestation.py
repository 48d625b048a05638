"""Attestation: proof that a client is a genuine device, but not which one (paper 004, section 3).

The server sends a fresh nonce. The device obtains a token for it from an issuer, which recognises
genuine devices (on a phone, the platform's attestation service). The server verifies the token
before it goes on. `Attestation` is the interface, `SignedTokens` the default, and `TokenIssuer` the
issuer's half. `certificate_attestation` has another one, for platforms that give devices
certificates.

A token is one Ed25519 signature over its version, the issuer's key, the nonce, a random number and
the expiry time. Nothing in it comes from the device, and two tokens have nothing in common but the
issuer's key: a server that has only tokens cannot link two tokens of one device.

Attestation does not give:

- Unlinkability towards the issuer. It sees the nonce that a device asks for; issuer and server
  together can tell which device was in which round. Blind signatures would prevent it. Here, the
  issuer must not share its log with the server.
- Unlinkability if the issuer signs with a different key for every device, since the token names
  the key. Servers should trust few keys, and devices should compare theirs.
- Protection from a genuine device whose owner sends wrong updates, or asks the issuer on behalf
  of other clients.
- Protection from relays by the nonce alone. Make the nonce with `bound_nonce`, from the server's
  challenge and what the device knows of the server.
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
    """Verdict on a token; the value is the reason for the device and for the counters."""

    GENUINE = "genuine"
    MALFORMED = "malformed token"
    UNKNOWN_ISSUER = "token of an unknown issuer"
    BAD_SIGNATURE = "bad signature"
    OTHER_NONCE = "token for another nonce"
    EXPIRED = "expired token"
    TOO_LONG_VALID = "token valid for too long"
    REPLAYED = "replayed token"
    OVERLOADED = "too many tokens at a time"
    BAD_CHAIN = "certificates that lead to no trusted root"
    NOT_VALID_NOW = "certificate that is not valid now"
    REVOKED = "revoked certificate"


class Attestation(abc.ABC):
    """Verifier of devices' tokens."""

    @abc.abstractmethod
    def verify(self, token: bytes, nonce: bytes) -> Verdict:
        """Verifies a token; never raises, whatever the token is.

        Args:
          token: Bytes that the device sent. Untrusted.
          nonce: Nonce that the token must be bound to, NONCE_BYTES bytes.

        Returns:
          `Verdict.GENUINE`, or the reason of the refusal. A token is genuine only once.
        """


def new_challenge() -> bytes:
    """Draws a nonce for one check-in from the operating system's CSPRNG."""
    return secrets.token_bytes(NONCE_BYTES)


def bound_nonce(challenge: bytes, *context: str) -> bytes:
    """Derives the nonce, NONCE_BYTES bytes, of a challenge and a context that both sides know.

    It makes a token useless to a server that relays the challenge of another server. Each side
    knows the strings of the context by itself, such as the population, and the server's name that
    its certificate proves.
    """
    digest = hashlib.sha256(b"tff_dpftrl attestation nonce\0")
    for part in (challenge, *(text.encode("utf-8", "surrogatepass") for text in context)):
        digest.update(struct.pack(">Q", len(part)) + part)
    return digest.digest()


def _key_name(key: ed25519.Ed25519PublicKey) -> bytes:
    return hashlib.sha256(signing_keys.raw(key)).digest()[:8]


class TokenIssuer:
    """Issuer of tokens; the caller of `issue` vouches for the device that asked."""

    def __init__(
        self,
        key: ed25519.Ed25519PrivateKey,
        *,
        clock: Callable[[], float],
        lifetime_s: float = 300.0,
    ):
        """Stores the issuer's private key, which must have no other use; `signing_keys` makes keys.

        `clock` returns the seconds since 1970; a token is valid for `lifetime_s` seconds.
        """
        self._key = key
        self._key_name = _key_name(key.public_key())
        self._clock = clock
        self._lifetime_s = validation.positive("lifetime_s", lifetime_s)

    def issue(self, nonce: bytes) -> bytes:
        """Makes a token, TOKEN_BYTES bytes, that is bound to a nonce, for a genuine device.

        It raises ValueError if the nonce does not have NONCE_BYTES bytes.
        """
        if len(nonce) != NONCE_BYTES:
            raise validation.UsageError(f"nonce must have {NONCE_BYTES} bytes, got {len(nonce)}.")
        expiry = int(self._clock() + self._lifetime_s)
        fields = _FIELDS.pack(_VERSION, self._key_name, nonce, secrets.token_bytes(16), expiry)
        return fields + self._key.sign(_CONTEXT + fields)


class SignedTokens(Attestation):
    """Verifier of `TokenIssuer`s' tokens, which accepts each token once. Not thread-safe.

    Several verifiers do not know each other's used tokens. They must therefore have disjoint sets
    of nonces.
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
        """Starts with no used tokens, and the public keys of the trusted issuers.

        `clock` returns the seconds since 1970; a clock that goes back counts as stopped. A validity
        above `longest_lifetime_s` is refused: it bounds the time for which used tokens are
        remembered. `clock_skew_s` is the largest error of an issuer's clock in seconds. Beyond
        `max_remembered` used tokens, about 100 bytes each, all tokens are refused for a while, so
        that none is accepted twice.
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
        self._used = UsedTokens(capacity, keep_s=self._longest_s + 2 * self._skew_s)
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


class UsedTokens:
    """Set of used tokens' numbers, kept for a while, in bounded memory."""

    def __init__(self, capacity: int, keep_s: float):
        """Starts with no used tokens; each is remembered for `keep_s` seconds at least."""
        self._capacity = capacity
        self._keep_s = keep_s
        self._recent: set[bytes] = set()
        self._older: set[bytes] = set()
        self._since: float | None = None

    def add(self, number: bytes, now: float) -> Verdict:
        """Remembers a token's number, unless it was used before or there is no room.

        `now` is a time in seconds, which never goes back.
        """
        if self._since is None or now - self._since > self._keep_s:
            # Dropped tokens were added before `since`; after two spans, both sets are old.
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
