import asyncio
import logging

import pytest

from tests.runtime import stories
from tff_dpftrl.runtime.actors import messages, roles
from tff_dpftrl.runtime.cluster import mail
from tff_dpftrl.runtime.protocol import wire_pb2
from tff_dpftrl.runtime.store import interface


class Carrier:
    """Carries mail when it is let, and fails when it is told to."""

    def __init__(self):
        self.carried = []
        self.sizes = []
        self.lost = []
        self.may_go = asyncio.Event()
        self.error = None
        self.at_a_time = self.most_at_a_time = 0

    async def carry(self, host, batch, num_bytes):
        self.at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        await self.may_go.wait()
        self.at_a_time -= 1
        if self.error is not None:
            raise self.error
        self.carried.append((host, batch))
        self.sizes.append(num_bytes)

    def failed(self, host, lost):
        self.lost.append((host, lost))

    def texts(self, host):
        return [[one.message for one in batch] for to, batch in self.carried if to == host]


def play(_, story, **options):
    async def run():
        carrier = Carrier()
        outbox = mail.Outbox(carrier.carry, carrier.failed, **options)
        await story(carrier, outbox)
        await outbox.flush(5.0)
        outbox.close()

    asyncio.run(asyncio.wait_for(run(), 30))


story = stories.played_by(play, "carrier", "outbox")


@story()
async def test_nothing_is_carried_after_the_close(carrier, outbox):
    carrier.may_go.set()
    outbox.close()
    outbox.post("a", mail.Deliver("x", 0))
    await asyncio.sleep(0.01)
    assert carrier.carried == []


@story()
async def test_what_waits_while_a_batch_is_on_its_way_goes_together_and_in_order(carrier, outbox):
    outbox.post("a", mail.Deliver("x", 0))
    await asyncio.sleep(0)  # It is on its way.
    await asyncio.sleep(0)
    for i in range(1, 10):
        outbox.post("a", mail.Deliver("x", i))
    carrier.may_go.set()
    await outbox.flush(5.0)
    assert carrier.texts("a") == [[0], list(range(1, 10))]
    assert carrier.most_at_a_time == 1


@story()
async def test_hosts_do_not_wait_for_each_other(carrier, outbox):
    for i in range(3):
        outbox.post("a", mail.Deliver("x", i))
        outbox.post("b", mail.Deliver("y", i))
    await asyncio.sleep(0.01)
    carrier.may_go.set()
    await outbox.flush(5.0)
    assert carrier.texts("a") == carrier.texts("b") == [[0, 1, 2]]
    assert carrier.most_at_a_time == 2


@story(max_batch_bytes=1000)
async def test_a_batch_has_a_size_and_a_large_message_goes_alone(carrier, outbox):
    carrier.may_go.set()

    def report(size):
        return mail.Deliver("x", messages.Report("d", "a", wire_pb2.Report(update=bytes(size))))

    for size in (100, 100, 5000, 100):
        outbox.post("a", report(size))
    await outbox.flush(5.0)
    sizes = [[len(one.message.payload.update) for one in batch] for _, batch in carrier.carried]
    assert sizes == [[100, 100], [5000], [100]]
    assert carrier.sizes[1] >= 5000


def test_a_model_counts_once_in_a_batch():
    model = bytes(600)

    async def story(carrier, outbox):
        carrier.may_go.set()
        for i in range(3):
            outbox.post(
                "a", mail.Deliver(f"d{i}", messages.Configure(f"d{i}", "s", "a", "t", 0, model))
            )
        await outbox.flush(5.0)
        ((_, batch),) = carrier.carried
        assert len(batch) == 3 and carrier.sizes[0] < 3 * len(model)

    play(None, story, max_batch_bytes=2000)


def test_secret_states_of_roles_count_too():
    commit = interface.Commit("t", 0, 0, b"", bytes(900))
    role = roles.MasterAggregatorRole("c", 1, commit, b"", frozenset())

    async def story(carrier, outbox):
        carrier.may_go.set()
        outbox.post("a", mail.Begin("x", role, "c"))
        outbox.post("a", mail.Deliver("x", "next"))
        await outbox.flush(5.0)
        assert [len(batch) for _, batch in carrier.carried] == [1, 1]

    play(None, story, max_batch_bytes=1000)


@story()
async def test_what_was_to_follow_is_lost_with_a_call_that_fails_and_later_mail_is_not(
    carrier, outbox
):
    carrier.error = mail.Unreachable()
    outbox.post("a", mail.Deliver("x", 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    outbox.post("a", mail.Deliver("x", 1))
    carrier.may_go.set()
    await outbox.flush(5.0)
    assert carrier.lost == [("a", [mail.Deliver("x", 0), mail.Deliver("x", 1)])]
    carrier.error = None
    outbox.post("a", mail.Deliver("x", 2))
    await outbox.flush(5.0)
    assert carrier.texts("a") == [[2]]


@pytest.mark.parametrize("error", [ValueError("secret words"), MemoryError("secret words")])
def test_mail_that_cannot_be_carried_is_lost_without_a_word_of_it(error, caplog):
    async def story(carrier, outbox):
        carrier.error = error
        carrier.may_go.set()
        outbox.post("a", mail.Deliver("x", "secret words"))
        await outbox.flush(5.0)
        assert [len(lost) for _, lost in carrier.lost] == [1]

    with caplog.at_level(logging.DEBUG):
        play(None, story)
    assert type(error).__name__ in caplog.text and "secret" not in caplog.text
