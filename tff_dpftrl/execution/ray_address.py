"""Check of a Ray cluster's address, without loading Ray."""

from __future__ import annotations

from tff_dpftrl import validation


def check(address: str) -> None:
    """Checks that an address is "host:port", or "auto" for a cluster with a node here."""
    host, _, port = address.rpartition(":")
    is_pair = bool(host and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16)
    if address != "auto" and not is_pair:
        raise validation.UsageError(
            f"address of Ray must be 'host:port' or 'auto', got {address!r}: run this program on a "
            "machine that is a node of the cluster."
        )
