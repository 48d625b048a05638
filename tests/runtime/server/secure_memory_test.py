"""What a server has of one device's vector in memory, files and log while it sums securely."""

import asyncio
import contextlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.runtime.server import example_secure_task
from tests.runtime.server import example_service as example
from verification.campaign import memory_search as search
from verification.campaign.memory_search import found_in

SIZE = 2000
NUM_DEVICES = 4
_ROOT = pathlib.Path(__file__).resolve().parents[3]


def memory(process_id):
    """All that a process could read of its memory."""
    try:
        yield from search.memory(process_id)
    except OSError as error:
        pytest.skip(f"the memory of another process cannot be read here: {error}")


@contextlib.contextmanager
def server(folder, mode):
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.server.summing_process"]
            + [str(folder), mode, str(NUM_DEVICES), str(SIZE)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


@pytest.fixture
def numbers():
    rng = np.random.default_rng(20260101)
    return rng.integers(0, example_secure_task.MODULUS, (NUM_DEVICES, SIZE)).tolist()


def test_no_vector_of_a_device_is_in_a_server_that_sums_securely(tmp_path, numbers):
    wanted = search.pieces(numbers[0])

    def look(process, when):
        assert not found_in(memory(process.pid), wanted), when

    async def story(process, address):
        async with example.channel_to(tmp_path, address) as channel:
            devices = await asyncio.gather(
                *(
                    example_secure_task.configured(
                        channel, each, example_secure_task.demanded(size=SIZE)
                    )
                    for each in numbers
                )
            )
            for step in range(example_secure_task.NUM_STEPS):
                await asyncio.gather(*(device.send() for device in devices))
                ended = await asyncio.gather(*(device.receive() for device in devices))
                if step > 1:  # Masked vectors have come; their sum is known.
                    look(process, f"after step {step}")
            assert all(ended) and all(device.answer.accepted for device in devices)

    with server(tmp_path, "secure") as (process, address):
        asyncio.run(asyncio.wait_for(story(process, address), 60))
        # What is looked for is where it may be: the sum itself.
        total = (np.array(numbers).sum(axis=0) % example_secure_task.MODULUS).tolist()
        assert found_in(memory(process.pid), search.pieces(total))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not found_in((path.read_bytes() for path in files), wanted)
    assert found_in((path.read_bytes() for path in files), search.pieces(total))


@pytest.mark.slow  # That the search finds something is seen in the test above, too.
def test_the_search_finds_a_vector_where_reports_are_summed_in_the_clear(tmp_path, numbers):
    update = np.array(numbers[0], "<u2").tobytes()

    async def story(process, address):
        async with example.channel_to(tmp_path, address) as channel:
            streams = [await example.connect(channel) for _ in numbers]
            for stream in streams:
                await stream.check_in()
            configuration = await streams[0].receive()
            await streams[0].report(configuration.attempt, update)
            assert (await streams[0].receive()).accepted
            return found_in(memory(process.pid), search.pieces(numbers[0]))

    with server(tmp_path, "plain") as (process, address):
        assert asyncio.run(asyncio.wait_for(story(process, address), 60))


@pytest.mark.parametrize("name", search.ENCODINGS)
def test_pieces_are_found_in_a_whole_vector_of_every_encoding(name, numbers):
    whole = search.ENCODINGS[name](np.array(numbers[0]))
    windows = found_in([b"x" + whole], search.pieces(numbers[0]))
    assert {f"{name}, from {start}" for start in (0, SIZE - search.WINDOW)} <= windows
    assert not found_in([whole], search.pieces(numbers[1]))
