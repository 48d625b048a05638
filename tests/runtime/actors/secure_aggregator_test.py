import dataclasses
import random

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.server import example_secure_task
from tff_dpftrl.runtime.actors import actor, messages, roles, secure_aggregator
from tff_dpftrl.runtime.actors.messages import Refusal
from tff_dpftrl.runtime.protocol import session_stream
from tff_dpftrl.secure_sums import noise_party, secure_sum_pb2

DEVICES = ("a", "b", "c", "d", "e")
NUMBERS = {name: (i, 10 * i, 500) for i, name in enumerate(DEVICES, 1)}
ROLE = roles.AggregatorRole("attempt", "sum", 5, b"the model", DEVICES, parent="attempt")
CLOSE = messages.CloseReporting()


class Group:
    """An Aggregator with its devices, which send scripted messages."""

    def __init__(self, task=None, least=3, role=ROLE):
        self.task = task or example_secure_task.task(5, least_devices=least)
        self.demands = self.task.secure_sum
        self.actor = secure_aggregator.SecureAggregator(
            "sums", self.task, role, random.Random(0), lambda *_: (7.0, 9.0)
        )
        self.effects = self.actor.start(0.0)
        self.timers = []
        self.participants, self.to_send, self.steps, self.ends = {}, {}, {}, {}
        self.configured = {}
        self.sent = []
        self._take_effects()

    def _take_effects(self):
        for effect in self.effects:
            if isinstance(effect, actor.After):
                self.timers.append(effect)
            elif isinstance(effect, actor.Send):
                self._deliver_effect(effect.to, effect.message)

    def _deliver_effect(self, to, message):
        if isinstance(message, messages.Configure):
            self.configured[to] = message
            made = example_secure_task.participant(message, NUMBERS[to], self.demands)
            self.participants[to], self.to_send[to] = made, made.advertise()
        elif isinstance(message, messages.SecureSumAnswer):
            asked = secure_sum_pb2.ToDevice.FromString(message.content)
            self.to_send[to] = self.participants[to].answer(asked)
        elif isinstance(message, (messages.ReportAccepted, messages.ReportRefused)):
            self.ends.setdefault(to, message)
        else:
            self.sent.append(message)

    def deliver(self, message):
        self.effects = self.actor.step(1.0, message)
        self._take_effects()
        return self

    def message(self, device, content=None, step=None, attempt="attempt"):
        if step is None:
            step = self.steps[device] = self.steps.get(device, -1) + 1
        if content is None:
            content = self.to_send.pop(device).SerializeToString()
        return messages.SecureSumMessage(device, attempt, step, content)

    def send(self, *devices):
        for device in devices or DEVICES:
            self.deliver(self.message(device))
        return self

    def gone(self, *devices):
        for device in devices:
            self.deliver(messages.DeviceGone(device))
        return self

    def time_is_over(self):
        return self.deliver(self.timers[-1].message)

    def part(self):
        (part,) = [one for one in self.sent if isinstance(one, messages.PartialSum)]
        return part

    def sum_of(self, *devices):
        total = [
            sum(NUMBERS[d][i] for d in devices) % example_secure_task.MODULUS for i in range(3)
        ]
        return [len(devices), *total]

    def refusal(self, device):
        end = self.ends.get(device)
        return end.refusal if isinstance(end, messages.ReportRefused) else end


def others(*absent):
    return [device for device in DEVICES if device not in absent]


def closed():
    return Group().send().deliver(CLOSE)


@pytest.mark.parametrize("threat_model", [example_secure_task.HONEST, example_secure_task.ACTIVE])
def test_the_sum_is_that_of_the_devices_and_they_are_accepted(threat_model):
    made = Group(example_secure_task.task(5, threat_model=threat_model)).send().deliver(CLOSE)
    for _ in range(made.task.secure_sum.num_steps):
        assert not any(isinstance(one, messages.PartialSum) for one in made.sent)
        made.send()
    assert made.part().total == made.sum_of(*DEVICES)
    assert made.part().counts == {"reports": 5, "summed_groups": 1}
    assert made.ends["b"] == messages.ReportAccepted("b", "attempt", (7.0, 9.0))
    assert len(made.ends) == 5


def test_who_arrives_is_counted_until_reporting_is_closed():
    made = Group().send("a", "b")
    assert made.sent[-1] == messages.ReportsCounted("sums", 2, 3, is_short=True)
    made.gone("c")
    assert made.sent[-1] == messages.ReportsCounted("sums", 2, 2, is_short=True)
    made.gone("a")
    assert made.sent[-1] == messages.ReportsCounted("sums", 1, 2, is_short=True)
    made.send("d", "e").deliver(CLOSE)
    made.deliver(messages.DeviceGone("a"))
    for _ in range(3):
        made.send("b", "d", "e")
    assert made.part().total == made.sum_of("b", "d", "e")
    assert made.part().counts == {"reports": 3, "dropped": 2, "summed_groups": 1}


def test_who_has_not_arrived_is_given_up():
    made = Group().send("a", "b", "c").deliver(messages.DropSilent())
    assert made.sent[-1] == messages.ReportsCounted("sums", 3, 0)
    made.send("d")
    assert made.refusal("d") is Refusal.LATE
    made.deliver(CLOSE).deliver(messages.DropSilent())
    for _ in range(3):
        made.send("a", "b", "c")
    assert made.part().total == made.sum_of("a", "b", "c")


def test_no_more_devices_arrive_than_the_sum_has_room_for():
    made = Group(role=dataclasses.replace(ROLE, most_reports=3)).send("a", "b", "c", "d")
    assert made.refusal("d") is Refusal.LATE
    made.gone("a").send("e").deliver(CLOSE)  # There is room again.
    for _ in range(3):
        made.send("b", "c", "e")
    assert made.part().total == made.sum_of("b", "c", "e")


@pytest.mark.parametrize("step", range(1, 4))
@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "not noticed"])
def test_who_drops_out_is_not_waited_for_longer_than_the_step(step, is_noticed):
    made = closed()
    for _ in range(1, step):
        made.send()
    made.send(*others("b"))
    made = made.gone("b") if is_noticed else made.time_is_over()
    for _ in range(step, 3):
        made.send(*others("b"))
    is_in_the_sum = step == 3  # Its vector was, before it went.
    devices = DEVICES if is_in_the_sum else others("b")
    assert made.part().total == made.sum_of(*devices)
    expected = {"reports": len(devices), "summed_groups": 1}
    assert made.part().counts == (expected if is_in_the_sum else {**expected, "dropped": 1})


def test_steps_have_their_time_and_a_timer_of_one_that_is_over_means_nothing():
    made = closed()
    (timer,) = made.timers[1:]
    assert timer.seconds == made.task.rounds.secure_step_timeout
    made.send()
    made.deliver(timer.message).deliver(timer.message).send().send()
    assert made.part().total == made.sum_of(*DEVICES)


@pytest.mark.parametrize("step", range(4))
def test_at_the_least_number_the_sum_is_made_and_below_it_the_group_is_lost(step):
    for absent, is_lost in ((["a", "b"], False), (["a", "b", "c"], True)):
        made = Group()
        for i in range(step):
            made.send().deliver(CLOSE) if i == 0 else made.send()
        made.send(*others(*absent)).gone(*absent)
        if step == 0:
            made.deliver(CLOSE)
        for _ in range(step, 3):
            if not is_lost:
                made.send(*others(*absent))
        part = made.part()
        if is_lost:
            assert part.total is None
            assert part.counts["lost_groups"] == 1 and part.counts["reports"] == 0
            assert {made.refusal(device) for device in others(*absent)} == {Refusal.GROUP_LOST}
            assert part.counts["group lost"] == 2 and part.counts["dropped"] == 3
        else:
            assert part.total is not None and not part.counts.get("lost_groups")


def test_nobody_there_when_reporting_closes_is_a_lost_group():
    made = Group().deliver(CLOSE).deliver(CLOSE)
    assert made.part().total is None
    assert made.part().counts == {"reports": 0, "outstanding": 5, "lost_groups": 1}
    assert made.send("a").refusal("a") is Refusal.GROUP_LOST


def test_who_comes_late_is_refused_by_name():
    made = Group().send(*others("a")).deliver(CLOSE)
    assert made.send("a").refusal("a") is Refusal.LATE
    made.send(*others("a", "b")).time_is_over()
    assert made.send("b").refusal("b") is Refusal.LATE
    made.send("c", "d", "e").send("c", "d", "e")
    assert made.part().total == made.sum_of("c", "d", "e")
    assert made.part().counts == {"reports": 3, "late": 2, "summed_groups": 1}
    assert made.ends["c"].turns == (7.0, 9.0)


def test_a_message_that_comes_twice_counts_once():
    made = Group()
    for step in range(4):
        for device in DEVICES:
            message = made.message(device)
            made.deliver(message).deliver(message)
        if step == 0:
            made.deliver(CLOSE)
    assert made.part().total == made.sum_of(*DEVICES)
    # The last message of all comes again once the group is done.
    assert made.part().counts == {"reports": 5, "duplicate": 19, "summed_groups": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xff",
        b"",
        secure_sum_pb2.ToServer(masked_vector={"content": b"12"}).SerializeToString(),
        secure_sum_pb2.ToServer(key_advertisement={}).SerializeToString(),
    ],
    ids=["unreadable", "empty", "another one", "without keys"],
)
@pytest.mark.parametrize("step", range(4))
def test_what_is_malformed_is_refused_with_the_reason_and_the_group_goes_on(content, step):
    made = Group()
    for i in range(4):
        if i == step:
            made.deliver(made.message("b", content))
            end = made.ends["b"]
            assert end.refusal is Refusal.UNUSABLE and end.reason
        made.send(*(DEVICES if i < step else others("b")))
        if i == 0:
            made.deliver(CLOSE)
    devices = DEVICES if step == 3 else others("b")
    assert made.part().total == made.sum_of(*devices)
    assert made.part().counts["unusable"] == 1


def test_other_attempts_and_strangers_are_refused_and_change_nothing():
    made = Group().send(*others("a"))
    content = made.to_send["a"].SerializeToString()
    made.deliver(made.message("a", content, step=0, attempt="another"))
    assert made.refusal("a") is Refusal.WRONG_ATTEMPT
    made.deliver(made.message("stranger", content, step=0))
    assert made.refusal("stranger") is Refusal.NOT_SELECTED
    made.send("a").deliver(CLOSE)
    made.send().send().send()
    assert made.part().total == made.sum_of(*DEVICES)


def test_a_report_in_the_clear_is_never_looked_at():
    made = Group().send(*others("a"))
    made.deliver(messages.Report("a", "attempt", "what I typed"))
    assert made.refusal("a") is Refusal.IN_THE_CLEAR
    made.deliver(CLOSE).send(*others("a")).deliver(messages.Report("b", "attempt", "what I typed"))
    assert made.refusal("b") is Refusal.IN_THE_CLEAR
    made.send("c", "d", "e").send("c", "d", "e")
    assert made.part().total == made.sum_of("c", "d", "e")
    assert made.part().counts == {"reports": 3, "in the clear": 2, "summed_groups": 1}


def test_a_sum_that_is_not_of_its_devices_is_lost():
    made = Group()
    made.participants["a"] = lying = example_secure_task.participant(
        made.configured["a"], NUMBERS["a"], made.demands, count=2
    )
    made.to_send["a"] = lying.advertise()
    made.send().deliver(CLOSE).send().send().send()
    assert made.part().total is None
    assert made.part().counts == {"reports": 0, "lost_groups": 1, "group lost": 5}


def test_it_ends_when_its_master_has_forgotten_it():
    made = Group()
    timer = made.timers[0]
    assert timer.seconds == made.task.longest > made.task.rounds.longest
    assert made.deliver(timer.message).effects == [actor.Stop("sums")]


def test_what_is_printed_holds_nothing_of_a_device():
    made = Group().send().deliver(CLOSE)
    made.send()
    message = made.message("a")
    assert repr(message) == "SecureSumMessage(device='a', attempt='attempt', step=2)"
    made.deliver(message)
    assert "content" not in repr(made.effects) and "session" not in repr(ROLE)


PARTY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))


class NoisedGroup(Group):
    """A group with a noise party, whose noise is 1, 2 and 3."""

    def __init__(self):
        task = example_secure_task.task(5)
        demanded = dataclasses.replace(
            task.secure_sum, noise_parties=(PARTY.public_key().public_bytes_raw(),)
        )
        role = dataclasses.replace(ROLE, parties=("party",))
        super().__init__(dataclasses.replace(task, secure_sum=demanded), role=role)

    def _deliver_effect(self, to, message):
        if to != "party" or not isinstance(message, messages.Configure):
            super()._deliver_effect(to, message)
            return
        self.configured[to] = message
        made = noise_party.NoiseParty(
            self.demands,
            message.secure_sum_session,
            PARTY,
            lambda: example_secure_task.vector((1, 2, 3), count=0),
            context=session_stream.secure_sum_context("sum", 5, b"the model"),
        )
        self.participants[to], self.to_send[to] = made, made.advertise()


def test_a_noise_party_adds_to_the_sum_and_counts_as_no_device():
    group = NoisedGroup()
    group.send("party", *DEVICES)
    counted = [m for m in group.sent if isinstance(m, messages.ReportsCounted)]
    assert (counted[-1].accepted, counted[-1].outstanding) == (5, 0)
    group.deliver(CLOSE)
    for _ in range(3):
        group.send()
    assert not group.ends
    group.send("party")
    part = group.part()
    assert part.total == [
        5,
        *(
            sum(numbers) % 1000 + i + 1
            for i, numbers in enumerate(zip(*NUMBERS.values(), strict=True))
        ),
    ]
    assert part.counts == {"reports": 5, "summed_groups": 1}
    assert all(isinstance(end, messages.ReportAccepted) for end in group.ends.values())
    assert group.ends.keys() == {*DEVICES, "party"}


def test_reporting_waits_a_step_for_the_keys_of_a_noise_party():
    group = NoisedGroup().send(*DEVICES).deliver(CLOSE)
    assert group.to_send.keys() == {"party"}  # The devices have no answer yet.
    group.send("party")
    assert group.to_send.keys() == set(DEVICES)
    late = NoisedGroup().send(*DEVICES).deliver(CLOSE).time_is_over()
    assert late.part().counts["lost_groups"] == 1 and late.part().total is None


@pytest.mark.parametrize("step", range(5))
def test_a_group_that_its_noise_party_leaves_is_lost(step):
    group = NoisedGroup().send("party", *DEVICES)
    for number in range(step):
        group = group.send() if number else group.deliver(CLOSE)
    group.gone("party")
    if not step:
        assert group.sent[-1].outstanding == 0  # Nothing to wait for: reporting is closed.
        group.deliver(CLOSE)
    part = group.part()
    assert part.total is None and part.counts["lost_groups"] == 1
    assert part.counts["reports"] == 0 and "dropped" not in part.counts


def test_noise_that_has_come_is_in_the_sum_though_its_party_is_gone():
    group = NoisedGroup()
    group.send("party", *DEVICES).deliver(CLOSE)
    for _ in range(3):
        group.send()
    group.send("party").gone("party")
    assert group.part().counts == {"reports": 5, "summed_groups": 1}


def test_noise_that_cannot_be_read_loses_the_group():
    group = NoisedGroup().send("party", *DEVICES).deliver(CLOSE)
    for _ in range(3):
        group.send()
    group.deliver(group.message("party", b"\xff"))
    assert group.part().total is None
    assert group.ends["party"].refusal is Refusal.UNUSABLE
    assert Refusal.UNUSABLE.value not in group.part().counts  # It is no report.
