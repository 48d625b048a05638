import collections
import random

from tff_dpftrl.runtime.actors import waiting

ONE = frozenset({"one"})


def make(**devices_of_peers):
    made = waiting.Waiting(random.Random(0))
    for peer, count in devices_of_peers.items():
        for i in range(count):
            made.add(f"{peer}{i}", ONE, peer)
    return made


def peers(devices):
    return collections.Counter(device[0] for device in devices)


def test_devices_are_chosen_evenly_among_peers():
    made = make(a=10, b=1, c=2)
    assert peers(made.evenly(3, "one")) == {"a": 1, "b": 1, "c": 1}
    assert peers(made.evenly(6, "one")) == {"a": 3, "b": 1, "c": 2}
    assert len(made.evenly(99, "one")) == 13
    assert made.evenly(99, "another") == []


def test_the_choice_within_a_peer_is_random():
    made = make(a=10)
    chosen = collections.Counter(made.evenly(1, "one")[0] for _ in range(2000))
    assert len(chosen) == 10 and min(chosen.values()) > 100


def test_the_crowd_is_who_waits_from_the_peers_with_the_most_devices():
    made = make(a=2, b=3, c=3)
    assert set(peers(made.crowded() for _ in range(100))) == {"b", "c"}
    assert made.is_crowded("b0") and not made.is_crowded("a0")
    for device in ("b0", "c0", "c1"):
        made.remove(device)
    made.remove("c0")  # It does not wait any more.
    assert set(peers(made.crowded() for _ in range(100))) == {"a", "b"}
    assert "c0" not in made and "c2" in made and len(made) == 5


def test_it_agrees_with_a_count_of_all_devices():
    randomness = random.Random(1)
    made = make()
    known = {}
    for i in range(3000):
        if randomness.random() < 0.55 or not known:
            known[f"{i}"] = f"{randomness.randrange(6)}"
            made.add(f"{i}", ONE, known[f"{i}"])
        else:
            gone = randomness.choice(list(known))
            del known[gone]
            made.remove(gone)
        counts = collections.Counter(known.values())
        if known:
            assert counts[known[made.crowded()]] == max(counts.values())
    assert set(made) == set(known)
