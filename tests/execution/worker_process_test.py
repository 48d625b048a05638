"""Tests that a worker serves, for as long as it is wanted, whom it should."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from tff_dpftrl.execution import loopback_port, worker_process


def _connects(host: str, port: int) -> bool:
    """Whether gRPC's greeting comes back."""
    try:
        with socket.create_connection((host, port), timeout=10) as connection:
            return bool(connection.recv(1))
    except ConnectionError:
        return False


def _port(worker: worker_process.WorkerProcess) -> int:
    return int(worker.address.rpartition(":")[2])


def _own_address() -> str:
    address = loopback_port._own_address(socket.AF_INET, "192.0.2.1")
    if address is None:
        pytest.skip("this machine has no address but loopback")
    return address


def test_a_worker_is_there_within_the_block_only():
    with worker_process.serve() as worker:
        assert worker.address.startswith("127.0.0.1:")
        assert _connects("127.0.0.1", _port(worker))
    assert not os.path.exists(f"/proc/{worker.pid}")
    assert not _connects("127.0.0.1", _port(worker))


def test_other_machines_do_not_reach_it():
    address = _own_address()
    with worker_process.serve() as worker:
        assert not _connects(address, _port(worker))


def test_other_machines_reach_it_if_the_network_is_trusted():
    address = _own_address()
    with worker_process.serve(trust_network=True) as worker:
        assert worker.address == f"{socket.gethostname()}:{_port(worker)}"
        assert _connects(address, _port(worker))


@pytest.mark.parametrize("trust_network", [False, True])
def test_a_port_in_use_is_named(trust_network):
    with worker_process.serve() as worker:
        with (
            pytest.raises(OSError, match=f"port {_port(worker)} cannot be used: Address already"),
            worker_process.serve(_port(worker), trust_network=trust_network),
        ):
            pass


def test_without_a_guard_the_worker_is_not_started(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="trust_network=True"), worker_process.serve():
        pass


def test_a_guard_without_effect_ends_the_worker(monkeypatch):
    _own_address()
    program = loopback_port._LOOPBACK_IS_THEIRS
    everything = (program[-1],)
    monkeypatch.setattr(loopback_port, "_LOOPBACK_IS_THEIRS", everything)
    with (
        pytest.raises(OSError, match="in spite of its guard.*trust_network"),
        worker_process.serve(),
    ):
        pass


def test_a_worker_that_does_not_start_is_noticed(monkeypatch):
    monkeypatch.setattr(worker_process, "_binary", lambda: "/bin/false")
    with pytest.raises(OSError, match="ended with status 1 before"), worker_process.serve():
        pass


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
