"""Authenticated encryption of messages between hosts, which Ray stores and sends in the clear.

Keys are derived from the server's private TLS key, which every host reads from its disk.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.ciphers import aead
from cryptography.hazmat.primitives.kdf import hkdf

_SALT_BYTES = 32
_NONCE = bytes(12)  # Each key seals one message.


class NotSealed(ValueError):
    """Error for a message that no host of this population sealed for this host."""


class Seal:
    """Cipher for Python objects; thread-safe."""

    def __init__(self, private_key: bytes, population: str):
        """Derives the key from the private key of the server, in unencrypted PEM."""
        key = serialization.load_pem_private_key(private_key, password=None)
        secret = key.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        self._key = _derive(secret, b"", b"tff_dpftrl messages of hosts\0" + population.encode())

    def seal(self, content: Any, to: str) -> bytes:
        """Pickles and encrypts an object for a host.

        The result begins with a random salt, from which the key of this message is derived.
        """
        salt = os.urandom(_SALT_BYTES)
        text = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
        return salt + self._cipher(salt).encrypt(_NONCE, text, salt + to.encode())

    def open(self, sealed: bytes, to: str) -> Any:
        """Decrypts a message to a host, and unpickles it only if it is authentic.

        Raises `NotSealed` if the message was changed, is for another host, or has another key.
        """
        salt, text = sealed[:_SALT_BYTES], memoryview(sealed)[_SALT_BYTES:]
        try:
            opened = self._cipher(salt).decrypt(_NONCE, text, salt + to.encode())
        except exceptions.InvalidTag:
            raise NotSealed(
                "A message was not sealed by a host of this population: the private key of the "
                "server must be the same on all nodes."
            ) from None
        return pickle.loads(opened)

    def _cipher(self, salt: bytes) -> aead.AESGCM:
        return aead.AESGCM(_derive(self._key, salt, b"message"))


def _derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    return hkdf.HKDF(hashes.SHA256(), 32, salt, info).derive(secret)
