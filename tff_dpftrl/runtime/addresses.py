"""Network addresses: the defaults of the package, and reading HOST:PORT."""

from __future__ import annotations

import ipaddress

from tff_dpftrl import validation

LOOPBACK_HOST = "127.0.0.1"
"""Default host of everything that listens: other machines cannot reach it."""
LOOPBACK_NAMES = ("localhost", LOOPBACK_HOST)
"""Default names of a new certificate."""
DEFAULT_ADDRESS = f"{LOOPBACK_HOST}:0"
"""Default address of a server and of its status page: loopback, with any free port."""


def is_ip_address(text: str) -> bool:
    """Returns whether a text is an IP address, which may be in brackets."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a host, an IP address or localhost."""
    return host == "localhost" or (
        is_ip_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback
    )


def split(address: str, name: str = "address", *, can_listen: bool = False) -> tuple[str, int]:
    """Splits HOST:PORT into host (IPv6 without its brackets) and port, or raises ValueError.

    Port 0, any free port, is accepted only with `can_listen`. `name` is the argument or flag in the
    error message.
    """
    host, _, port = address.rpartition(":")
    if (
        not host
        or "/" in host
        or not port.isdecimal()
        or len(port) > 5
        or not (0 if can_listen else 1) <= int(port) < 2**16
    ):
        example = "127.0.0.1:8443; port 0 is any free port" if can_listen else "example.org:443"
        raise validation.UsageError(f"{name} must be HOST:PORT, like {example}, got {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)
