import grpc
import pytest

from tff_dpftrl.runtime.server import limits, peers
from tff_dpftrl.runtime.server.errors import Refused

HERE = "ipv4:127.0.0.1:5000"
THERE = "ipv4:192.0.2.1:5000"


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (HERE, ("127.0.0.1", True)),
        ("ipv4:127.9.9.9:1", ("127.9.9.9", True)),
        (THERE, ("192.0.2.1", False)),
        ("ipv6:[::1]:5000", ("::1", True)),
        ("ipv6:%5B::1%5D:5000", ("::1", True)),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5000", ("2001:db8:1:2::/64", False)),
        ("ipv6:[2001:db8:1:2::9]:5001", ("2001:db8:1:2::/64", False)),
        ("ipv6:[fe80::1%25eth0]:5001", ("fe80::/64", False)),
        ("ipv6:[::ffff:192.0.2.1]:5000", ("192.0.2.1", False)),
        ("ipv6:[::ffff:127.0.0.1]:5000", ("127.0.0.1", True)),
        ("unix:/run/socket", ("unix", True)),
        ("", ("", True)),
    ],
)
def test_a_limit_counts_ipv4_addresses_and_ipv6_networks(peer, expected):
    assert peers.network(peer) == expected


def refusal(counted, peer):
    with pytest.raises(Refused) as raised:
        counted.enter(peer)
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "\n" not in raised.value.text and "192.0.2" not in raised.value.text
    return raised.value.reason


def test_a_session_that_ends_makes_room_at_its_address():
    counted = peers.Peers(limits.Limits(sessions_per_address=2))
    first = counted.enter("ipv4:192.0.2.1:1")
    counted.enter("ipv4:192.0.2.1:2")
    assert refusal(counted, "ipv4:192.0.2.1:3") == "too many sessions of one address"
    counted.enter("ipv4:192.0.2.2:3")
    counted.leave(first)
    assert counted.enter("ipv4:192.0.2.1:4").address == first.address
    assert refusal(counted, "ipv4:192.0.2.1:5")


def test_one_connection_has_fewer_sessions_than_its_address():
    counted = peers.Peers(limits.Limits(sessions_per_connection=1))
    counted.enter("ipv4:192.0.2.1:1")
    assert refusal(counted, "ipv4:192.0.2.1:1") == "too many sessions of one connection"
    counted.enter("ipv4:192.0.2.1:2")


def test_by_default_this_machine_has_no_limit_and_others_have():
    counted = peers.Peers(limits.Limits())
    for _ in range(limits.SESSIONS_PER_ADDRESS + 1):
        counted.enter(HERE)
    for _ in range(limits.SESSIONS_PER_CONNECTION):
        counted.enter(THERE)
    assert refusal(counted, THERE) == "too many sessions of one connection"
    for i in range(limits.SESSIONS_PER_ADDRESS - limits.SESSIONS_PER_CONNECTION):
        counted.enter(f"ipv4:192.0.2.1:{6000 + i}")
    assert refusal(counted, "ipv4:192.0.2.1:1") == "too many sessions of one address"


def test_a_number_that_is_given_holds_for_this_machine_too():
    counted = peers.Peers(limits.Limits(sessions_per_address=1))
    counted.enter(HERE)
    assert refusal(counted, HERE) == "too many sessions of one address"


def test_devices_on_this_machine_are_told_apart_by_their_connection():
    counted = peers.Peers(limits.Limits())
    assert len({counted.enter(f"ipv4:127.0.0.1:{port}").source for port in (1, 1, 2)}) == 2
    assert len({counted.enter(f"ipv4:192.0.2.1:{port}").source for port in (1, 1, 2)}) == 1


def test_names_differ_between_starts_and_nothing_is_kept_of_who_has_left():
    counted = peers.Peers(limits.Limits())
    first = counted.enter(THERE)
    assert first.address != peers.Peers(limits.Limits()).enter(THERE).address
    assert "192.0.2.1" not in repr(first)
    counted.leave(first)
    assert not counted._open
