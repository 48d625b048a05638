"""Tests of tff_dpftrl.runtime.signing_keys."""

from __future__ import annotations

import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tff_dpftrl.runtime import signing_keys


def test_a_key_comes_back_from_its_files(tmp_path):
    path = tmp_path / "key"
    signature = signing_keys.create(path).sign(b"message")
    assert signing_keys.load_private(path).sign(b"message") == signature
    public = signing_keys.load_public(signing_keys.public_path(path))
    public.verify(signature, b"message")
    assert len(signing_keys.raw(public)) == 32


def test_the_private_key_is_for_its_owner_only(tmp_path):
    path = tmp_path / "key"
    signing_keys.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"PRIVATE" not in signing_keys.public_path(path).read_bytes()
    path.chmod(0o640)
    with pytest.raises(ValueError, match=f"mode 0640.*chmod 600 {path}"):
        signing_keys.load_private(path)


def test_a_key_is_never_replaced(tmp_path):
    path = tmp_path / "key"
    signing_keys.create(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        signing_keys.create(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_what_is_no_key_is_named(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=f"{path} holds no Ed25519 private key"):
        signing_keys.load_private(path)
    with pytest.raises(ValueError, match=f"{path} holds no Ed25519 public key"):
        signing_keys.load_public(path)


def test_keys_of_another_kind_or_place_are_refused(tmp_path):
    path = tmp_path / "key"
    for load, kind in (
        (signing_keys.load_private, "private"),
        (signing_keys.load_public, "public"),
    ):
        with pytest.raises(ValueError, match=f"no {kind} key at {path}"):
            load(path)
    other = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    path.write_bytes(
        other.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    path.chmod(0o600)
    with pytest.raises(ValueError, match="no Ed25519 private key"):
        signing_keys.load_private(path)
    public = other.public_key()
    path.write_bytes(public.public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(ValueError, match="no Ed25519 public key"):
        signing_keys.load_public(path)
