"""Addresses of Ray clusters that are refused before Ray is loaded."""

import pytest

from tff_dpftrl.execution import ray_address


@pytest.mark.parametrize(
    "address", ["auto", "localhost:6379", "10.0.0.1:1", "head:65535", "::1:80"]
)
def test_a_host_with_a_port_is_taken(address):
    ray_address.check(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        ":6379",
        "localhost:",
        "localhost:abc",
        "head:0",
        "head:65536",
        "head:000080",
    ],
)
def test_anything_else_is_refused(address):
    with pytest.raises(ValueError, match=f"'host:port' or 'auto', got '{address}'"):
        ray_address.check(address)
