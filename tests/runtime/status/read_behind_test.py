import asyncio
import threading
from concurrent import futures

from tff_dpftrl.runtime.status import read_behind


def run(scenario, read):
    """Runs a coroutine of (kept, clock) to its end."""
    clock = [0.0]

    async def main():
        with futures.ThreadPoolExecutor(1) as executor:
            kept = read_behind.ReadBehind(
                lambda key: read(key, clock),
                executor,
                clock=lambda: clock[0],
                cost=lambda: clock[0],
            )
            await scenario(kept, clock)

    asyncio.run(main())


def test_values_are_read_on_another_thread_and_once_a_version():
    calls = []

    def read(key, clock):
        calls.append((key, threading.current_thread() is threading.main_thread()))
        return f"{key} {len(calls)}"

    async def scenario(kept, clock):
        assert kept.get("a", 1) == (None, "", None)
        await kept.settle()
        for _ in range(3):
            assert kept.get("a", 1) == ("a 1", "", 1)
            await kept.settle()
        assert kept.get("a", 2) == ("a 1", "", 1)
        await kept.settle()
        assert kept.get("a", 2) == ("a 2", "", 2)
        assert kept.get("b", None)[0] is None
        await kept.settle()
        assert kept.get("b", None) == ("b 3", "", None)

    run(scenario, read)
    assert calls == [("a", False), ("a", False), ("b", False)]


def test_what_took_long_is_not_read_again_at_once():
    calls = []

    def read(key, clock):
        calls.append(key)
        clock[0] += 2.0
        return len(calls)

    async def scenario(kept, clock):
        kept.get("a", 1)
        await kept.settle()
        clock[0] += 9.9
        kept.get("a", 2)
        await kept.settle()
        assert kept.get("a", 2) == (1, "", 1)
        clock[0] += 0.2
        kept.get("a", 2)
        await kept.settle()
        assert kept.get("a", 2) == (2, "", 2)

    run(scenario, read)


def test_failures_are_told_without_their_text_and_tried_again(caplog):
    def read(key, clock):
        if clock[0] < 5:
            raise OSError("secret path")
        return "fine"

    async def scenario(kept, clock):
        kept.get("a", 1)
        await kept.settle()
        value, error, _ = kept.get("a", 1)
        assert value is None
        assert error == "cannot be read (OSError): see the server's log"
        clock[0] += 11
        kept.get("a", 1)
        await kept.settle()
        assert kept.get("a", 1) == ("fine", "", 1)

    run(scenario, read)
    assert "secret path" in caplog.text
