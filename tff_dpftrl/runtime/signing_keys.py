"""Ed25519 keys in files: the private key for its owner only, the public key to hand out.

Plans are signed by the engineers who release them, attestation tokens by their issuer:
use different keys. Both files are PEM, as other tools read them.
"""

from __future__ import annotations

import os
import pathlib

from cryptography import exceptions
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import durable_files, validation
from tff_dpftrl.runtime import private_files


def public_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path at which `create` puts the public key of the private key at `path`."""
    return pathlib.Path(f"{os.fspath(path)}.pub")


def create(path: str | os.PathLike[str]) -> ed25519.Ed25519PrivateKey:
    """Draws a key from the operating system and writes it, mode 0600, beside its public key.

    The public key goes to `public_path(path)`. It raises ValueError if there is a file already.
    """
    path = pathlib.Path(path)
    if path.exists():
        raise validation.UsageError(
            f"{path} exists already: what it signed could not be verified with another key. "
            "Name another file, or remove this one."
        )
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    durable_files.write(public_path(path), public_pem(key.public_key()))
    durable_files.write(path, private, private=True)
    return key


def load_private(path: str | os.PathLike[str]) -> ed25519.Ed25519PrivateKey:
    """Reads a private key: a file of `create`, or any Ed25519 key in unencrypted PKCS8 PEM.

    It raises ValueError if the file is missing, holds no such key, or others may read it.
    """
    content = private_files.read(path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise validation.UsageError(f"{path} holds no Ed25519 private key in unencrypted PEM.")
    return key


def load_public(path: str | os.PathLike[str]) -> ed25519.Ed25519PublicKey:
    """Reads a public key in PEM; raises ValueError if the file is missing or holds none."""
    try:
        content = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        raise validation.UsageError(
            f"There is no public key at {path}: correct the path."
        ) from None
    return parse_public(content, str(path))


def parse_public(content: bytes, name: str) -> ed25519.Ed25519PublicKey:
    """Parses a public key in PEM; `name` is that of its place in the error message (ValueError)."""
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, exceptions.UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise validation.UsageError(f"{name} holds no Ed25519 public key in PEM.")
    return key


def public_pem(key: ed25519.Ed25519PublicKey) -> bytes:
    """Serialises a public key as its file holds it."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def raw(key: ed25519.Ed25519PublicKey) -> bytes:
    """Returns the 32 bytes of a public key."""
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
