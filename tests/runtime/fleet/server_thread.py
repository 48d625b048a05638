"""A server in a thread of its own, for devices that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading


@contextlib.contextmanager
def running(make):
    """Starts the server that `make` returns; yields its address and stops it at the end."""
    started, loop, state = threading.Event(), asyncio.new_event_loop(), {}

    async def serve():
        state["end"] = asyncio.Event()
        try:
            made = make()
            try:
                await made.start()
                state["address"] = made.address
                started.set()
                await state["end"].wait()
            finally:
                await made.stop()
        finally:
            started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(30) and "address" in state
        yield state["address"]
    finally:
        loop.call_soon_threadsafe(state["end"].set)
        thread.join(30)
        loop.close()
