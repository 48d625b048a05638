"""Certificates of a platform, made for tests: a root, an authority below it, and devices."""

from __future__ import annotations

import datetime
import itertools

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

NOW = 1_800_000_000.0
_BEGIN = datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc) - datetime.timedelta(days=10)


_numbers = itertools.count(1)


class Clock:
    """A clock that stands at `NOW` until a test sets it."""

    now = NOW

    def __call__(self):
        return self.now


def new_key(curve=ec.SECP256R1):
    """Makes another key on an elliptic curve, the same in each run."""
    return ec.derive_private_key(next(_numbers) << 200, curve())


def certify(
    name,
    key,
    issuer,
    issuer_key,
    *,
    is_authority=False,
    path_length=None,
    usage=("digital_signature",),
    extension=None,
    days=100,
    hash_algorithm=None,
):
    """Makes a certificate that is valid from ten days before `NOW`."""
    kinds = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
    kinds += ("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    usage = ("key_cert_sign",) if is_authority and usage else usage
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(next(_numbers))
        .not_valid_before(_BEGIN)
        .not_valid_after(_BEGIN + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_authority, path_length), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if usage:
        chosen = x509.KeyUsage(**{kind: kind in usage for kind in kinds})
        builder = builder.add_extension(chosen, critical=True)
    if extension is not None:
        builder = builder.add_extension(extension, critical=True)
    is_ed25519 = isinstance(issuer_key, ed25519.Ed25519PrivateKey)
    return builder.sign(
        issuer_key,
        None if is_ed25519 else hash_algorithm or hashes.SHA256(),
        ecdsa_deterministic=True if isinstance(issuer_key, ec.EllipticCurvePrivateKey) else None,
    )


class Platform:
    """A platform with a root, an authority, and a batch of devices with one key."""

    def __init__(self):
        self.root_key, self.authority_key, self.key = new_key(), new_key(), new_key()
        self.root = certify("root", self.root_key, "root", self.root_key, is_authority=True)
        self.authority = certify(
            *("authority", self.authority_key, "root", self.root_key),
            is_authority=True,
            path_length=0,
        )
        self.batch = self.certify(self.key)

    def certify(self, key, name="batch", **options):
        """Makes a device's certificate, of its authority."""
        return certify(name, key, "authority", self.authority_key, **options)

    @property
    def chain(self):
        """The certificates of the batch, without the root."""
        return [self.batch, self.authority]

    def write(self, folder):
        """Writes roots.pem, chain.pem and device.key."""
        (folder / "roots.pem").write_bytes(pem(self.root))
        (folder / "chain.pem").write_bytes(pem(*self.chain))
        (folder / "device.key").touch(0o600)
        (folder / "device.key").write_bytes(key_pem(self.key))


def pem(*certificates):
    """Serialises certificates."""
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def key_pem(key):
    """Serialises a private key."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(text):
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])
