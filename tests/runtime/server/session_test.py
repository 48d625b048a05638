import asyncio

from tff_dpftrl.runtime.actors import messages
from tff_dpftrl.runtime.server import session


def test_a_device_that_takes_part_is_not_sent_away_by_who_does_not_know():
    async def run():
        made = session.Session("device", 0.0, None)
        away = messages.ComeBack("device", (0.0,), "the round was abandoned")
        configure = messages.Configure("device", "sum", "attempt", "task", 0, b"")
        made.receive(away)
        made.receive(configure)
        made.receive(away)
        assert await made.next_message() == away
        assert await made.next_message() == configure
        assert not made.has_mail

    asyncio.run(run())
