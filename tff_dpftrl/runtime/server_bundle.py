"""A server's bundle: one file with everything public that its devices have to know.

`tff-dpftrl serve` writes `device_bundle.json` into the server's folder, and
`tff-dpftrl device --server-bundle` reads it. It is the same for all devices and holds no secret,
but a device trusts what it names: bring it to devices so that nobody can change it on the way.
The private key that makes attestation tokens is not in it: its owner can pose as any number of
devices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.runtime import signing_keys

_VERSION = 1
_TEXTS = ("population", "server", "certificate")
_KEYS = ("plan_keys", "issuers")


@dataclasses.dataclass(frozen=True)
class ServerBundle:
    """Public facts of a server, which devices have to know."""

    population: str
    server: str  # HOST:PORT of the server, or several of them separated by commas.
    # Certificate that proves the server's name, in PEM; empty if devices have to know its authority
    # already.
    certificate: str
    plan_keys: tuple[str, ...]  # Public keys of the signers of plans, in PEM.
    issuers: tuple[str, ...] = ()  # Public keys of the issuers of attestation tokens, in PEM.

    @classmethod
    def of(
        cls,
        population: str,
        server: str,
        certificate: str | os.PathLike[str] | None,
        plan_keys: Iterable[ed25519.Ed25519PublicKey],
        issuers: Iterable[str | os.PathLike[str]],
    ) -> ServerBundle:
        """Reads the files of a server.

        `server` is HOST:PORT, or several separated by commas. `certificate` is the file that
        devices are to trust; None to name none. It raises ValueError if a file of an issuer's key
        holds none.
        """
        return cls(
            population,
            server,
            "" if certificate is None else pathlib.Path(certificate).read_text("utf-8-sig"),
            tuple(signing_keys.public_pem(key).decode() for key in plan_keys),
            tuple(
                signing_keys.public_pem(signing_keys.load_public(path)).decode() for path in issuers
            ),
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file."""
        content = {"version": _VERSION, **dataclasses.asdict(self)}
        durable_files.write(pathlib.Path(path), (json.dumps(content, indent=1) + "\n").encode())


def read(path: str | os.PathLike[str]) -> ServerBundle:
    """Reads a file of `ServerBundle.write`; raises ValueError if it is missing or damaged."""
    try:
        content = json_text.parse(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise validation.UsageError(
            f"--server-bundle {path} cannot be read: {error.strerror}."
        ) from None
    except ValueError:
        content = None
    if _is_bundle(content):
        keys = {name: tuple(content[name]) for name in _KEYS}
        return ServerBundle(**{name: content[name] for name in _TEXTS}, **keys)
    raise validation.UsageError(
        f"--server-bundle {path} is no bundle of this version: copy device_bundle.json of the "
        "server's folder again."
    )


def _is_bundle(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.get("version") == _VERSION
        and all(isinstance(content.get(name), str) for name in _TEXTS)
        and all(isinstance(content.get(name), list) for name in _KEYS)
        and all(isinstance(key, str) for name in _KEYS for key in content[name])
    )
