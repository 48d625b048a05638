"""Tests that a guarded port answers its own machine, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

import pytest

from tff_dpftrl.execution import loopback_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a guard")
_MANY = 20  # Were sockets of a port chosen at random, one in a million would be so one-sided.


@contextlib.contextmanager
def _greeter(port, shared=True):
    """A server at every address, as gRPC's: it shares its port, and speaks first."""
    with loopback_port._bound(port, *([socket.SO_REUSEPORT] if shared else [])) as listener:
        listener.listen()

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"hello")

        threading.Thread(target=greet, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _answers(host, port):
    try:
        with socket.create_connection((host, port), timeout=10) as connection:
            return connection.recv(5) == b"hello"
    except ConnectionError:
        return False


def _own_addresses():
    found = (
        loopback_port._own_address(socket.AF_INET, "192.0.2.1"),
        loopback_port._own_address(socket.AF_INET6, "2001:db8::1"),
    )
    return [address for address in found if address is not None]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_reaches_the_server_every_time(host):
    if ":" in host and not loopback_port._has_ipv6():
        pytest.skip("this machine has no IPv6")
    with loopback_port.guarded(0) as port, _greeter(port):
        assert all(_answers(host, port) for _ in range(_MANY))


def test_other_addresses_never_do():
    addresses = _own_addresses()
    if not addresses:
        pytest.skip("this machine has no other address")
    with loopback_port.guarded(0) as port, _greeter(port):
        for address in addresses:
            assert not any(_answers(address, port) for _ in range(_MANY))
        loopback_port.check(port)
    with _greeter(0) as port:  # Without the guard.
        assert all(_answers(address, port) for address in addresses)
        with pytest.raises(loopback_port.CannotGuardError, match="in spite of its guard"):
            loopback_port.check(port)


def test_a_server_that_is_not_there_is_noticed():
    with loopback_port.guarded(0) as port:
        with pytest.raises(loopback_port.CannotGuardError, match="from loopback as well"):
            loopback_port.check(port)


def test_a_port_in_use_is_refused_even_if_it_could_be_shared():
    with _greeter(0) as port, pytest.raises(OSError, match="in use"), loopback_port.guarded(port):
        pass


def test_the_port_is_free_again_afterwards():
    with loopback_port.guarded(0) as port, _greeter(port):
        assert _answers("127.0.0.1", port)
    with _greeter(port, shared=False):
        assert _answers("127.0.0.1", port)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(loopback_port.CannotGuardError, match="darwin"), loopback_port.guarded(0):
        pass


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
