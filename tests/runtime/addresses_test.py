"""Tests of tff_dpftrl.runtime.addresses."""

from __future__ import annotations

import pytest

from tff_dpftrl.runtime import addresses


@pytest.mark.parametrize(
    ("address", "parts"),
    [("example.org:443", ("example.org", 443)), ("[::1]:65535", ("::1", 65535))],
)
def test_splits_host_and_port(address, parts):
    assert addresses.split(address) == parts


@pytest.mark.parametrize(
    "address",
    ["", "example.org", ":443", "a:65536", "a:x", "http://a:1", "a:-1", "a:²", "a:" + "1" * 5000],
)
@pytest.mark.parametrize("can_listen", [False, True])
def test_refuses_what_is_no_address(address, can_listen):
    with pytest.raises(ValueError, match="--address must be HOST:PORT"):
        addresses.split(address, "--address", can_listen=can_listen)


def test_port_0_is_for_listening():
    assert addresses.split(addresses.DEFAULT_ADDRESS, can_listen=True) == ("127.0.0.1", 0)
    with pytest.raises(ValueError, match="like example.org:443"):
        addresses.split(addresses.DEFAULT_ADDRESS)


def test_loopback():
    assert all(map(addresses.is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(map(addresses.is_loopback, ("", "example.org", "10.0.0.1", "0.0.0.0", "::")))
