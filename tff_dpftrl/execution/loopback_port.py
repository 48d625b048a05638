"""Keeps a server that binds every interface to the connections of its own machine.

TFF's worker listens on every interface, asks nobody who they are, and runs whatever
graph it is sent; it has no flag to say otherwise. Linux lets several sockets of one user
listen at one port, and a program of classic BPF choose which of them receives a
connection (`SO_ATTACH_REUSEPORT_CBPF` in socket(7)). So the port is opened here first,
with a program that passes on what was sent to a loopback address and keeps the rest,
which is reset. The worker's gRPC shares its port by default, and joins as the second
socket: there is no moment at which it can be reached from another machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys
import threading
from collections.abc import Iterator

_SO_ATTACH_REUSEPORT_CBPF = 51
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF: where a program finds the header of the packet.
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_OURS, _THEIRS = 0, 1  # The sockets of a port, in the order in which they began to listen.
# Code, lines to skip if true, lines to skip if false, operand.
_LOOPBACK_IS_THEIRS = (
    (_LOAD_BYTE, 0, 0, _IP_HEADER),
    (_SHIFT_RIGHT, 0, 0, 4),
    (_IF_EQUAL, 8, 0, 4),  # The version: 4, or else 6, whose destination must be ::1.
    (_LOAD_WORD, 0, 0, _IP_HEADER + 24),
    (_IF_EQUAL, 0, 8, 0),
    (_LOAD_WORD, 0, 0, _IP_HEADER + 28),
    (_IF_EQUAL, 0, 6, 0),
    (_LOAD_WORD, 0, 0, _IP_HEADER + 32),
    (_IF_EQUAL, 0, 4, 0),
    (_LOAD_WORD, 0, 0, _IP_HEADER + 36),
    (_IF_EQUAL, 3, 2, 1),
    (_LOAD_BYTE, 0, 0, _IP_HEADER + 16),  # Version 4: the destination must be 127.*.
    (_IF_EQUAL, 1, 0, 127),
    (_RETURN, 0, 0, _OURS),
    (_RETURN, 0, 0, _THEIRS),
)
_RESET_WHEN_CLOSED = struct.pack("ii", 1, 0)
_SECONDS_TO_ANSWER = 10.0


class CannotGuardError(RuntimeError):
    """This machine has no means to keep a port to itself."""


@contextlib.contextmanager
def guarded(port: int) -> Iterator[int]:
    """Opens a port, for another process to listen at, to loopback addresses only.

    The process must be this user's, bind every interface, and set `SO_REUSEPORT`, as
    gRPC servers do. Call `check` once it listens.

    Args:
      port: A free TCP port, or 0 for any.

    Yields:
      The port. It is guarded until the block is left.

    Raises:
      OSError: If the port is in use.
      CannotGuardError: If this is not Linux, or it refuses.
    """
    if sys.platform != "linux":
        raise CannotGuardError(f"only Linux can guard a port, and this is {sys.platform!r}")
    with _listening(port) as listener:
        threading.Thread(target=_reset_all, args=(listener,), daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread.


def _listening(port: int) -> socket.socket:
    listener = _bound(free(port), socket.SO_REUSEPORT)
    try:
        _attach(listener)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _bound(port: int, *options: int) -> socket.socket:
    """A socket bound as gRPC would bind it."""
    has_ipv6 = _has_ipv6()
    bound = socket.socket(socket.AF_INET6 if has_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if has_ipv6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        for option in (socket.SO_REUSEADDR, *options):  # The former for connections of before.
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(("::" if has_ipv6 else "0.0.0.0", port))
    except OSError as error:
        bound.close()
        raise OSError(f"port {port} cannot be used: {error.strerror}") from error
    return bound


def _has_ipv6() -> bool:
    """Whether gRPC would bind "[::]", by its own test."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _attach(listener: socket.socket) -> None:
    code = b"".join(struct.pack("HBBI", *line) for line in _LOOPBACK_IS_THEIRS)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(_LOOPBACK_IS_THEIRS), ctypes.addressof(buffer))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
    except OSError as error:
        raise CannotGuardError(f"the kernel refuses the guard of a port: {error}") from error


def _reset_all(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # The guard is over.
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_WHEN_CLOSED)
        connection.close()


def free(port: int) -> int:
    """Finds out whether a port is free, which a server that would share it does not.

    Args:
      port: A TCP port, or 0 for any.

    Returns:
      The port, which nobody listens at now.

    Raises:
      OSError: If somebody does, or this user may not.
    """
    with _bound(port) as probe:
        return probe.getsockname()[1]


def check(port: int) -> None:
    """Tries whether the server at a guarded port answers this machine, and no other.

    A connection to an address by which other machines know this one is made from here.

    Args:
      port: Where the server, which must send something first as gRPC does, listens.

    Raises:
      CannotGuardError: If the guard has no effect.
    """
    if not _answers("127.0.0.1", port):
        raise CannotGuardError(f"the guard of port {port} keeps the server from loopback as well")
    for family, elsewhere in (
        (socket.AF_INET, "192.0.2.1"),  # Addresses reserved for documentation.
        (socket.AF_INET6, "2001:db8::1"),
    ):
        own = _own_address(family, elsewhere)
        if own is not None and _answers(own, port):
            raise CannotGuardError(f"port {port} answers at {own} in spite of its guard")


def _own_address(family: int, elsewhere: str) -> str | None:
    """The address of this machine from which it would send to `elsewhere`, if any."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # Sends nothing.
            return probe.getsockname()[0]
    except OSError:
        return None


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _SECONDS_TO_ANSWER) as connection:
            return bool(connection.recv(1))
    except OSError:
        return False
