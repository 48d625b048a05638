"""Access control of the status page: by token, and by the names of the server."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hmac
import os
import pathlib
import re
import secrets
from collections.abc import Sequence

from tff_dpftrl import durable_files, validation
from tff_dpftrl.runtime import addresses, private_files

_LOCAL_NAMES = frozenset({*addresses.LOOPBACK_NAMES, "::1"})
_NAME = re.compile(r"[a-z0-9_.-]+", re.ASCII | re.IGNORECASE)
_TOKEN = re.compile(r"[!-~]{16,}")  # As a header can hold it.
_TOKEN_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Access:
    """Access rules of the page.

    With DNS rebinding, an attacker's web site makes a browser ask for the page by a name of the
    site, and would then read it. So the page answers only to `names`, to the address at which
    it listens, and to the address to which the reader is connected.

    Attributes:
      names: Further names and addresses of the server.
      token: Secret of every request, as a bearer token or as the password of basic
        authentication (RFC 6750, RFC 7617); None if no token is needed.
      is_open: Whether everybody who reaches the port may read the page, if it listens at an
        address other than loopback.
    """

    names: Sequence[str] = ()
    token: str | None = dataclasses.field(default=None, repr=False)
    is_open: bool = False

    def __post_init__(self):
        for name in self.names:
            if not (_NAME.fullmatch(name) or addresses.is_ip_address(name)):
                raise validation.UsageError(
                    f"{name!r} is no name of a server: give a host name or an address, without "
                    "scheme, port or wildcards."
                )
        if self.token is not None and self.is_open:
            raise validation.UsageError("token and is_open exclude each other: give one of them.")
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise validation.UsageError(
                "token must have 16 characters or more, all of ASCII and none of them a space."
            )

    def check(self, host: str) -> None:
        """Refuses an address that other machines can reach, without a token or `is_open`."""
        if not addresses.is_loopback(host) and self.token is None and not self.is_open:
            raise validation.UsageError(
                f"host={host!r} is for other machines: give a token, or is_open if everybody who "
                "reaches the port may read the status page."
            )

    def knows(self, name: str, listening: str, reached: str) -> bool:
        """Returns whether the page answers to a name.

        The name is a host in lower case, without port and brackets. The page listens at
        `listening`, and the reader is connected to the address `reached`.
        """
        known = {listening.lower(), reached, *(given.lower().strip("[]") for given in self.names)}
        if addresses.is_loopback(listening) or addresses.is_loopback(reached):
            known |= _LOCAL_NAMES
        return name in known

    def admits(self, authorization: str) -> bool:
        """Returns whether an `Authorization` header has the token, if one is needed."""
        if self.token is None:
            return True
        scheme, _, credentials = authorization.partition(" ")
        given = credentials.strip().encode()
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given, self.token.encode())


def token_of(path: str | os.PathLike[str]) -> str:
    """Returns the token in a file for its owner only; creates it with a random one (mode 0600)."""
    path = pathlib.Path(path)
    if not path.exists():
        private_files.make_folder(path.parent)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        durable_files.write(path, f"{token}\n".encode(), private=True)
    token = private_files.read(path, "a token").decode("utf-8-sig", "replace").strip()
    if not _TOKEN.fullmatch(token):
        raise validation.UsageError(
            f"{path} holds no token: put 16 random characters or more on one line, or remove the "
            "file for a new one."
        )
    return token
