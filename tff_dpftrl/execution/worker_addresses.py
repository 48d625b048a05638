"""Addresses of remote workers, checked before anything is loaded or started."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from tff_dpftrl import validation


def check(addresses: Sequence[str], *, trust_network: bool) -> None:
    """Refuses addresses of workers that cannot be used.

    Args:
      addresses: "host:port" of each worker.
      trust_network: Whether they may be on other machines.

    Raises:
      ValueError: If there are none, or one is malformed, occurs twice, or is not a
        loopback address and the network is not trusted.
    """
    if isinstance(addresses, str) or not addresses:
        raise validation.UsageError(
            f"addresses={addresses!r} must be a list of at least one 'host:port'."
        )
    for address in addresses:
        if not _is_host_and_port(address):
            raise validation.UsageError(
                f"addresses has {address!r}, which is not 'host:port', such as '127.0.0.1:7000'."
            )
        host, _, port = address.rpartition(":")
        if addresses.count(address) > 1:
            raise validation.UsageError(
                f"addresses has {address!r} twice: a worker uses all processors by itself."
            )
        if not trust_network and not _is_loopback(host):
            raise validation.UsageError(
                f"addresses has {address!r}, which is another machine's: the model, the clients' "
                "data and their updates would travel in the clear, to whoever answers there. If "
                "the network is trusted, say trust_network=True (--trust-network); otherwise reach "
                f"it through a tunnel, such as ssh -L {port}:localhost:{port} {host}."
            )


def check_of_ray(address: str) -> None:
    """Refuses the address of a Ray cluster that cannot be one.

    Args:
      address: "host:port", or "auto" for a cluster that has a node on this machine.

    Raises:
      ValueError: If it is neither.
    """
    if address != "auto" and not _is_host_and_port(address):
        raise validation.UsageError(
            f"address of Ray must be 'host:port' or 'auto', got {address!r}: run this program on a "
            "machine that is a node of the cluster."
        )


def _is_host_and_port(address: str) -> bool:
    host, separator, port = address.rpartition(":")
    return bool(separator and host and port.isdecimal() and 0 < int(port) < 2**16)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:  # A name; others than this can be anything.
        return host == "localhost"
