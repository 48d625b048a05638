import collections
import dataclasses
import random

import pytest

from tff_dpftrl.runtime.actors import actor, factory, merging, merging_aggregator, messages, roles
from tff_dpftrl.runtime.cluster import placement
from verification.schedules import simulation

TASK = simulation.merging_population().task("training")
ATTEMPT = "toys/coordinator/0/round/3"


def leaf(i, *devices):
    return f"leaf/{i}", roles.AggregatorRole(ATTEMPT, "training", 5, b"the model", devices)


ROLE = roles.MergingAggregatorRole("training", (leaf(0, "a", "b"), leaf(1, "c")), "above")


def make(task=TASK, role=ROLE):
    made = merging_aggregator.MergingAggregator("merger", task, role)
    return made, made.start(0.0)


def sent(effects, to):
    return [one.message for one in effects if isinstance(one, actor.Send) and one.to == to]


def counted(i, *counts):
    return messages.ReportsCounted(f"leaf/{i}", *counts)


def part(i, *names, **counts):
    return messages.PartialSum(f"leaf/{i}", list(names), {"reports": len(names), **counts})


def closing():
    made, _ = make()
    return made, made.step(1.0, messages.CloseReporting())


def test_it_spawns_the_aggregators_and_is_their_parent():
    _, effects = make()
    spawned = [one for one in effects if isinstance(one, actor.Spawn)]
    assert [one.address for one in spawned] == ["leaf/0", "leaf/1"]
    assert {one.role.parent for one in spawned} == {"merger"}
    assert {one.role.attempt for one in spawned} == {ATTEMPT}
    assert (ROLE.devices, ROLE.model, ROLE.levels) == (("a", "b", "c"), b"the model", 1)
    (timer,) = [one for one in effects if isinstance(one, actor.After)]
    assert timer.seconds == TASK.longest


def test_it_tells_their_progress_together():
    made, _ = make()
    first = made.step(1.0, counted(0, 1, 1))
    assert sent(first, "above") == [messages.ReportsCounted("merger", 1, 2)]
    made.step(1.0, counted(0, 0, 2))  # Overtaken.
    assert sent(made.step(1.0, counted(1, 1, 0)), "above") == [
        messages.ReportsCounted("merger", 2, 1)
    ]
    lost = made.step(1.0, messages.Lost("leaf/0"))
    assert sent(lost, "above") == [messages.ReportsCounted("merger", 1, 0)]


def test_a_secure_sum_is_short_until_no_group_is():
    task = simulation.secure_merging_population().task("training")
    made, _ = make(task)
    together = sent(made.step(1.0, counted(0, 2, 0)), "above")
    assert together == [messages.ReportsCounted("merger", 2, 1, is_short=True)]
    together = sent(made.step(1.0, counted(1, 1, 0)), "above")
    assert together == [messages.ReportsCounted("merger", 3, 0)]


def test_it_passes_on_what_it_is_told_once():
    made, _ = make()
    for message in (messages.DropSilent(), messages.CloseReporting()):
        effects = made.step(1.0, message)
        assert sent(effects, "leaf/0") == sent(effects, "leaf/1") == [message]
    assert made.step(1.0, messages.CloseReporting()) == []
    assert made.step(1.0, messages.DropSilent()) == []


def test_each_sum_is_merged_once_and_only_when_it_was_asked_for():
    made, _ = make()
    assert made.step(1.0, part(0, "early")) == []
    made.step(1.0, messages.CloseReporting())
    made.step(1.0, part(0, "a", late=1))
    assert made.step(1.0, part(0, "a")) == made.step(1.0, part(7, "stranger")) == []
    (handed,) = sent(made.step(1.0, part(1, "c")), "above")
    assert handed.total == ["a", "c"]
    assert handed.counts == {"reports": 2, "late": 1, "lost_aggregators": 0}
    assert made.step(1.0, part(1, "c")) == made.step(1.0, messages.Lost("leaf/1")) == []


def test_a_lost_aggregator_is_in_the_counts():
    made, _ = closing()
    assert made.step(1.0, messages.Lost("leaf/0")) == []
    (handed,) = sent(made.step(1.0, part(1, "c")), "above")
    assert (handed.total, handed.counts["lost_aggregators"]) == (["c"], 1)
    # All of them are lost while devices report.
    made, _ = make()
    made.step(1.0, messages.Lost("leaf/0"))
    made.step(1.0, messages.Lost("leaf/1"))
    (handed,) = sent(made.step(1.0, messages.CloseReporting()), "above")
    assert (handed.total, handed.counts) == (None, {"lost_aggregators": 2})


def test_an_aggregator_that_does_not_answer_is_lost_before_this_one_is():
    made, effects = closing()
    (timer,) = [one for one in effects if isinstance(one, actor.After)]
    assert timer.seconds == TASK.longest_closing(1) < TASK.longest_closing(2)
    made.step(1.0, part(1, "c"))
    (handed,) = sent(made.step(9.0, timer.message), "above")
    assert (handed.total, handed.counts["lost_aggregators"]) == (["c"], 1)
    assert made.step(9.0, part(0, "a")) == made.step(9.0, timer.message) == []


def test_it_ends_when_its_parent_has_forgotten_it():
    made, effects = make()
    (timer,) = [one for one in effects if isinstance(one, actor.After)]
    assert made.step(timer.seconds, timer.message) == [actor.Stop("merger")]


def leaves(number):
    return [leaf(i, f"device/{i}") for i in range(number)]


def rounds(max_fan_in):
    return dataclasses.replace(TASK, rounds=dataclasses.replace(TASK.rounds, max_fan_in=max_fan_in))


@pytest.mark.parametrize(
    ("number", "fan_in", "levels"),
    [(1, 1, 1), (16, 16, 1), (17, 5, 2), (64, 8, 2), (256, 16, 2), (257, 7, 3), (20_000, 12, 4)],
)
def test_the_fan_in_follows_from_the_number_of_aggregators(number, fan_in, levels):
    sizes = rounds(16).rounds
    assert (sizes.fan_in(number), sizes.merge_levels(number)) == (fan_in, levels)
    assert fan_in**levels >= number


@pytest.mark.parametrize("number", [1, 2, 3, 5, 16, 17, 63, 64, 65, 100, 256, 1000])
@pytest.mark.parametrize("max_fan_in", [2, 3, 16])
def test_every_aggregator_is_in_the_tree_once(number, max_fan_in):
    task = rounds(max_fan_in)
    fan_in = task.rounds.fan_in(number)
    assert fan_in <= max_fan_in
    found, addresses = [], []

    def walk(children):
        assert len(children) <= fan_in
        for address, role in children:
            addresses.append(address)
            if isinstance(role, roles.AggregatorRole):
                found.append((address, role))
            else:
                assert len(role.children) > 1
                walk(role.children)

    top = merging.tree(leaves(number), task, ATTEMPT)
    walk(top)
    assert found == leaves(number)
    assert len(set(addresses)) == len(addresses)
    assert 1 + max(role.levels for _, role in top) == task.rounds.merge_levels(number)


def carry_out(number, max_fan_in):
    """Merges the sums of Aggregators with a device each; who sent which sum to whom, by a list."""
    task = rounds(max_fan_in)
    served = dataclasses.replace(simulation.merging_population(), tasks=(task,))
    build = factory.ActorFactory(
        served, selectors=(), pace=lambda *_: (1.0,), store_address=""
    ).build
    actors, sums, queue = {}, [], collections.deque()

    class Above(merging.Merging):
        def _begin(self):
            self._spawn_aggregators(merging.tree(children, task, ATTEMPT))

        def _receive(self, message):
            if isinstance(message, messages.PartialSum):
                self._merge(message)
            else:
                self._counted(message)

        def _progressed(self):
            if self._all_progress.accepted == number:
                self._close()

        def _use(self, total):
            done.append((total, dict(self._counts)))

    children = [
        (f"{ATTEMPT}/aggregator/{i}", dataclasses.replace(role, attempt=ATTEMPT))
        for i, (_, role) in enumerate(leaves(number))
    ]
    done = []

    def take(sender, effects):
        for effect in effects:
            if isinstance(effect, actor.Spawn):
                made = build(effect.address, effect.role, random.Random(0))
                actors[effect.address] = made
                take(effect.address, made.start(0.0))
            elif isinstance(effect, actor.Send):
                if isinstance(effect.message, messages.PartialSum):
                    sums.append((sender, effect.to))
                if isinstance(effect.message, messages.Configure):
                    report = messages.Report(effect.to, ATTEMPT, effect.to)
                    queue.append((sender, report))
                elif effect.to in actors:
                    queue.append((effect.to, effect.message))

    actors[ATTEMPT] = Above(ATTEMPT, task)
    take(ATTEMPT, actors[ATTEMPT].start(0.0))
    while queue:
        to, message = queue.popleft()
        take(to, actors[to].step(1.0, message))
    return done, sums


@pytest.mark.parametrize("number", [64, 256])
def test_no_host_receives_more_sums_than_the_fan_in(number):
    ((total, counts),), sums = carry_out(number, 16)
    assert sorted(total) == sorted(f"device/{i}" for i in range(number))
    assert counts == {"reports": number, "outstanding": 0, "lost_aggregators": 0}
    mergers = {to for _, to in sums}
    fan_in = rounds(16).rounds.fan_in(number)
    hosts = placement.Placement(num_selectors=1, num_workers=len(mergers))
    received = collections.Counter(
        hosts.host_of(to) for sender, to in sums if hosts.host_of(sender) != hosts.host_of(to)
    )
    assert max(received.values()) == fan_in
    # The same sums, all at the Master Aggregator.
    (flat,), all_sums = carry_out(number, number)
    assert (sorted(flat[0]), flat[1]) == (sorted(total), counts)
    assert {to for _, to in all_sums} == {ATTEMPT} and len(all_sums) == number
