import pytest

from tff_dpftrl.runtime.cluster import placement

THREE = placement.Placement(num_selectors=2, num_workers=3)
LEADER = "toys/coordinator/00ff00ff00ff00ff"


def test_hosts_have_names():
    assert THREE.selectors == ("selector-0", "selector-1")
    assert THREE.workers == ("worker-0", "worker-1", "worker-2")
    assert THREE.permanent == THREE.selectors + THREE.workers
    assert [host for host in THREE.permanent if placement.is_worker(host)] == list(THREE.workers)


def test_selectors_and_their_devices_are_on_one_host():
    assert THREE.host_of("selector-1") == "selector-1"
    device = placement.device_prefix("selector-1", "0123abcd") + "17"
    assert THREE.host_of(device) == "selector-1"
    assert placement.life_of_device(device) == "0123abcd"


def test_aggregators_are_spread_and_so_are_attempts():
    assert THREE.host_of(LEADER) == placement.COORDINATOR
    attempts = [f"{LEADER}/round/{serial}" for serial in range(1, 4)]
    assert {THREE.host_of(attempt) for attempt in attempts} == set(THREE.workers)
    for attempt in attempts:
        groups = [THREE.host_of(f"{attempt}/aggregator/{i}") for i in range(3)]
        assert set(groups) == set(THREE.workers)
        # The first groups are not where their Master Aggregator is: both are not lost together.
        assert THREE.host_of(attempt) not in groups[:2]


def test_actors_that_merge_sums_are_on_different_workers_as_far_as_there_are_some():
    eight = placement.Placement(num_selectors=1, num_workers=8)
    attempt = f"{LEADER}/round/5"
    mergers = [f"{attempt}/merger/{i}" for i in range(7)]
    assert {eight.host_of(one) for one in (attempt, *mergers)} == set(eight.workers)


def test_the_names_of_populations_are_no_places():
    population = "selector-1/coordinator/0/round/2"
    assert THREE.host_of(f"{population}/coordinator/ff/round/4") == "worker-1"


@pytest.mark.parametrize("address", ["store", "observer", "selector-1x", "selector-", "device/1"])
def test_other_addresses_are_of_no_host(address):
    assert THREE.host_of(address) == ""


def test_there_is_a_host_of_each_kind():
    with pytest.raises(ValueError, match="num_workers"):
        placement.Placement(1, 0)
