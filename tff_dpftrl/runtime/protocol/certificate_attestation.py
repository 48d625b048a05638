"""Attestation by certificates: an example of a platform's, as an alternative to issued tokens.

A platform's vendor gives each device, or each batch of devices, a key in its secure hardware and
certificates for it (X.509, RFC 5280) that lead to the vendor's root, as for a TPM's attestation key
or Android's key attestation. The device signs the server's nonce with that key, and sends the
signature with the certificates.

token = certificate_attestation.make_token(nonce, chain, key)  # On the device.
verifier = certificate_attestation.CertificateTokens(roots, clock=time.time)
verifier.verify(token, nonce)

The key must not be in software that a device's owner can read; here it is a file, for want of
hardware. The token proves that the vendor certified the key, and nothing about the software that
runs: a platform's extensions, such as Android's, would have to be read for that. The purpose of a
certificate (extended key usage) is not checked: trust a root that certifies devices only.

A certificate identifies its holder in every round. A server sees it, and could link all rounds of a
device, which issued tokens do not allow. So a vendor should give the same key and certificate to a
batch of devices, 100,000 or more (FIDO's basic attestation: WebAuthn, 14.4.1). The verifier here
keeps nothing of a certificate, and its verdicts name none.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import pathlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509 import verification
from typing_extensions import override

from tff_dpftrl import validation
from tff_dpftrl.runtime import private_files
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.protocol.attestation import Verdict

MAX_CERTIFICATES = 4
"""Largest number of certificates in a token; the root is none of them."""

MAX_TOKEN_BYTES = 3500
"""Largest size of a token in bytes: it has to fit into a check-in."""

PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey

KEYS = "EC on P-256, P-384 or P-521, RSA of 2048 to 4096 bits, or Ed25519"
"""Keys of devices that are accepted, in words. Authorities have no Ed25519 keys."""

_VERSION = 2
_CONTEXT = b"tff_dpftrl attestation with a certificate\0"
_LENGTH = struct.Struct(">H")
# The hash of a signature follows from the key: the token cannot ask for a weaker one.
_EC_HASHES = {
    ec.SECP256R1: hashes.SHA256(),
    ec.SECP384R1: hashes.SHA384(),
    ec.SECP521R1: hashes.SHA512(),
}
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
_SERIAL = re.compile(r"(0x)?[0-9a-f]{1,40}", re.IGNORECASE)  # At most 20 bytes (RFC 5280).


def make_token(nonce: bytes, chain: Sequence[x509.Certificate], key: PrivateKey) -> bytes:
    """Signs a nonce with a certified key; the token has at most `MAX_TOKEN_BYTES` bytes.

    `chain` is the certificate of the key, then those of the authorities up to the root, without it.
    It raises ValueError if the nonce has another length, the token is too long, or the key cannot
    sign.
    """
    if len(nonce) != attestation.NONCE_BYTES:
        raise validation.UsageError(
            f"nonce must have {attestation.NONCE_BYTES} bytes, got {len(nonce)}."
        )
    certificates = [one.public_bytes(serialization.Encoding.DER) for one in chain]
    content = _signed(nonce, certificates[0])
    if isinstance(key, ec.EllipticCurvePrivateKey):
        signature = key.sign(content, ec.ECDSA(_EC_HASHES[type(key.curve)]))
    elif isinstance(key, rsa.RSAPrivateKey):
        signature = key.sign(content, _PSS, hashes.SHA256())
    else:
        signature = key.sign(content)
    parts = b"".join(_LENGTH.pack(len(part)) + part for part in (signature, *certificates))
    token = bytes([_VERSION]) + nonce + parts
    if len(token) > MAX_TOKEN_BYTES:
        raise validation.UsageError(
            f"The certificates make a token of {len(token)} bytes, more than {MAX_TOKEN_BYTES}: "
            "leave out the root, or use keys on elliptic curves."
        )
    return token


class CertificateTokens(attestation.Attestation):
    """Verifier of `make_token`'s tokens, which accepts each nonce once. Not thread-safe.

    Nothing of a certificate is kept. Paths are validated by `cryptography`: signatures of at least
    SHA-256, validity, basic constraints, path lengths, key usage and name constraints, and no
    critical extension that it does not know.
    """

    def __init__(
        self,
        roots: Sequence[x509.Certificate],
        *,
        revoked: Iterable[int] = (),
        clock: Callable[[], float],
        remember_s: float = 600.0,
        max_remembered: int = 1_000_000,
    ):
        """Starts with no used nonces, and the certificates of the trusted authorities.

        Certificates with a serial number in `revoked` are refused, whoever issued them. `clock`
        returns the seconds since 1970; a clock that goes back counts as stopped. Used nonces are
        remembered for `remember_s` seconds: longer than a server waits for the answer to a
        challenge. Beyond `max_remembered` used nonces, about 100 bytes each, all tokens are refused
        for a while, so that none is accepted twice. It raises ValueError if there is no root, or
        one is no valid authority now.
        """
        self._now = clock()
        self._clock = clock
        if not roots:
            raise validation.UsageError("roots is empty: name at least one trusted root.")
        for root in roots:
            _check_root(root, _time(self._now))
        self._revoked = frozenset(revoked)
        keep_s = validation.positive("remember_s", remember_s)
        capacity = validation.integer("max_remembered", max_remembered, minimum=1)
        self._used = attestation.UsedTokens(capacity, keep_s)
        # Devices' certificates have no names of hosts, which the profile of the Web demands.
        leaf = (
            verification.ExtensionPolicy.permit_all()
            .may_be_present(
                x509.BasicConstraints, verification.Criticality.AGNOSTIC, _check_is_no_authority
            )
            .require_present(x509.KeyUsage, verification.Criticality.AGNOSTIC, _check_signs)
        )
        self._policy = (
            verification.PolicyBuilder()
            .store(verification.Store(list(roots)))
            .max_chain_depth(MAX_CERTIFICATES)
            .extension_policies(
                ee_policy=leaf, ca_policy=verification.ExtensionPolicy.webpki_defaults_ca()
            )
        )

    @override
    def verify(self, token: bytes, nonce: bytes) -> Verdict:
        parts = _parts(token)
        if parts is None:
            return Verdict.MALFORMED
        bound_to, signature, certificates = parts
        if bound_to != nonce:
            return Verdict.OTHER_NONCE
        self._now = max(self._now, self._clock())
        try:
            verdict = self._verify_chain(nonce, signature, certificates)
        except Exception:  # A library's, of whatever is in an untrusted certificate.
            verdict = Verdict.MALFORMED
        if verdict is not Verdict.GENUINE:
            return verdict
        return self._used.add(nonce, self._now)

    def _verify_chain(self, nonce: bytes, signature: bytes, certificates: list[bytes]) -> Verdict:
        chain = [x509.load_der_x509_certificate(one) for one in certificates]
        now = _time(self._now)
        if any(not _is_valid_at(one, now) for one in chain):
            return Verdict.NOT_VALID_NOW
        key = chain[0].public_key()
        if not _is_accepted(key):
            return Verdict.BAD_CHAIN
        try:
            verifier = self._policy.time(now).build_client_verifier()
            path = verifier.verify(chain[0], chain[1:]).chain
        except verification.VerificationError:
            return Verdict.BAD_CHAIN
        if any(one.serial_number in self._revoked for one in path):
            return Verdict.REVOKED
        try:
            _verify(key, signature, _signed(nonce, certificates[0]))
        except exceptions.InvalidSignature:
            return Verdict.BAD_SIGNATURE
        return Verdict.GENUINE


def read_certificates(path: str | os.PathLike[str]) -> list[x509.Certificate]:
    """Reads a PEM file of at least one certificate, without checking any of them."""
    try:
        return x509.load_pem_x509_certificates(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise validation.UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise validation.UsageError(f"{path} holds no certificates in PEM.") from None


def read_revoked(path: str | os.PathLike[str]) -> frozenset[int]:
    """Reads the serial numbers of one vendor's revoked certificates.

    Each line has one in hexadecimal; # begins a comment.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise validation.UsageError(f"{path} cannot be read: {error}.") from None
    serials = set()
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip().replace(":", "")
        if text and not _SERIAL.fullmatch(text):
            raise validation.UsageError(
                f"{path}, line {number}: {text[:60]!r} is no serial number in hexadecimal."
            )
        if text:
            serials.add(int(text, 16))
    return frozenset(serials)


def read_device(
    chain_path: str | os.PathLike[str], key_path: str | os.PathLike[str]
) -> tuple[list[x509.Certificate], PrivateKey]:
    """Reads the certificates and the key of a device, and checks that they fit each other.

    The PEM files hold the key's certificate and those of the authorities up to the root, without
    it; and the unencrypted private key, which only its owner may read.
    """
    chain = read_certificates(chain_path)
    if len(chain) > MAX_CERTIFICATES:
        raise validation.UsageError(
            f"{chain_path} has {len(chain)} certificates, more than {MAX_CERTIFICATES}: leave out "
            "the root."
        )
    content = private_files.read(key_path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm):
        key = None
    kinds = (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey, ed25519.Ed25519PrivateKey)
    if not isinstance(key, kinds) or not _is_accepted(key.public_key()):
        raise validation.UsageError(
            f"{key_path} holds no private key, in unencrypted PEM, of an accepted kind: {KEYS}."
        )
    if chain[0].public_key() != key.public_key():
        raise validation.UsageError(
            f"The first certificate of {chain_path} is not that of the key {key_path}: the "
            "device's comes first, then those of the authorities."
        )
    make_token(bytes(attestation.NONCE_BYTES), chain, key)  # Or it would be refused in a session.
    return chain, key


def _parts(token: bytes) -> tuple[bytes, bytes, list[bytes]] | None:
    """Splits a token into nonce, signature and certificates; None if it is malformed."""
    begin = 1 + attestation.NONCE_BYTES
    if not begin <= len(token) <= MAX_TOKEN_BYTES or token[0] != _VERSION:
        return None
    nonce, rest = token[1:begin], token[begin:]
    parts = []
    while rest:
        if len(rest) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(rest)
        parts.append(rest[_LENGTH.size : _LENGTH.size + size])
        rest = rest[_LENGTH.size + size :]
        if len(parts[-1]) != size:
            return None
    if not 2 <= len(parts) <= 1 + MAX_CERTIFICATES:
        return None
    return nonce, parts[0], parts[1:]


def _signed(nonce: bytes, certificate: bytes) -> bytes:
    """Returns the bytes that a device signs."""
    return _CONTEXT + nonce + hashlib.sha256(certificate).digest()


def _verify(key: object, signature: bytes, content: bytes) -> None:
    """Verifies a signature by the algorithm that belongs to the key."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, content, ec.ECDSA(_EC_HASHES[type(key.curve)]))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, content, _PSS, hashes.SHA256())
    elif isinstance(key, ed25519.Ed25519PublicKey):
        key.verify(signature, content)
    else:
        raise exceptions.InvalidSignature


def _is_accepted(key: object) -> bool:
    """Returns whether a public key is one of `KEYS`."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        return type(key.curve) in _EC_HASHES
    if isinstance(key, rsa.RSAPublicKey):
        return 2048 <= key.key_size <= 4096
    return isinstance(key, ed25519.Ed25519PublicKey)


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)


def _is_valid_at(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def _check_root(root: x509.Certificate, now: datetime.datetime) -> None:
    """Refuses a root to which no path could lead."""
    name = root.subject.rfc4514_string()
    if not _is_valid_at(root, now):
        raise validation.UsageError(
            f"The root {name} is valid from {root.not_valid_before_utc:%Y-%m-%d} to "
            f"{root.not_valid_after_utc:%Y-%m-%d} only: name the current one."
        )
    key = root.public_key()
    if not _is_accepted(key) or isinstance(key, ed25519.Ed25519PublicKey):
        raise validation.UsageError(
            f"The root {name} has a key of a kind that is not accepted: an authority's must be EC "
            "on P-256, P-384 or P-521, or RSA of 2048 to 4096 bits."
        )
    try:
        is_authority = root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        is_authority &= root.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except x509.ExtensionNotFound:
        is_authority = False
    if not is_authority:
        raise validation.UsageError(
            f"The root {name} is no certificate of an authority: it needs basic constraints with "
            "CA, and the key usage of signing certificates."
        )


def _check_is_no_authority(
    policy: verification.Policy,
    certificate: x509.Certificate,
    constraints: x509.BasicConstraints | None,
) -> None:
    del policy, certificate
    if constraints is not None and constraints.ca:
        raise ValueError("an authority is no device")


def _check_signs(
    policy: verification.Policy, certificate: x509.Certificate, usage: x509.KeyUsage
) -> None:
    del policy, certificate
    if not usage.digital_signature:
        raise ValueError("the key is not certified for signatures")
