"""Limits on the open sessions of one address and of one connection."""

from __future__ import annotations

import collections
import hashlib
import ipaddress
import os
import urllib.parse
from typing import NamedTuple

import grpc

from tff_dpftrl.runtime.server import limits as limits_lib
from tff_dpftrl.runtime.server.errors import Refused

_IPV6_NETWORK = 64  # Bits: a host has all addresses of its network.


class Peer(NamedTuple):
    """Other end of a session, under keyed hashes that are new with each start of the server."""

    address: str  # Hash of its IPv4 address or IPv6 network.
    connection: str
    is_loopback: bool  # Whether it is on this machine.

    @property
    def source(self) -> str:
        """Name under which the Selector counts its devices.

        On loopback this is the connection, since a fleet or a local proxy shares one address.
        """
        return self.connection if self.is_loopback else self.address


class Peers:
    """Counts of open sessions by address and by connection.

    Forwarded headers are ignored, since a client can write them. An entry lasts as long as a
    session of its address is open; names are hashes with a random key.
    """

    def __init__(self, limits: limits_lib.Limits):
        """Begins without sessions."""
        self._limits = limits
        self._key = os.urandom(32)
        self._open: collections.Counter[str] = collections.Counter()

    def enter(self, peer: str) -> Peer:
        """Counts a session that opens from a peer in gRPC's form, such as "ipv4:192.0.2.1:5000".

        It raises `Refused` if the address or connection has reached the limit of open sessions.
        """
        address, is_loopback = network(peer)
        names = Peer(self._name(address), self._name(peer), is_loopback)
        most = self._limits.session_limits(is_loopback)
        for name, limit, what in zip(names[:2], most, ("address", "connection"), strict=True):
            if limit is not None and self._open[name] >= limit:
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"this {what} has {limit} sessions open, which is the limit: close one, or "
                    "try again later",
                    f"too many sessions of one {what}",
                )
        self._open.update(names[:2])
        return names

    def leave(self, peer: Peer) -> None:
        """Counts a session that has ended."""
        for name in peer[:2]:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    def _name(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=16).hexdigest()


def network(peer: str) -> tuple[str, bool]:
    """Finds the address whose sessions are counted, and whether it is this machine itself.

    The peer is in gRPC's form. The address is IPv4, an IPv6 network of 64 bits, or the kind of
    another connection, like a Unix socket.
    """
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind, True
    if address.version == 6 and address.ipv4_mapped:
        address = address.ipv4_mapped
    if address.version == 6 and not address.is_loopback:
        return str(ipaddress.ip_network((address, _IPV6_NETWORK), strict=False)), False
    return str(address), address.is_loopback
