"""What a server has of one device's vector in memory, files and log while it sums securely."""

import asyncio
import contextlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.runtime.server import toy_secure
from tests.runtime.server import toy_service as toy

SIZE = 2000
WINDOW = 12  # Entries below 1,000 that are looked for together: 1 in 10³⁶ by chance.
STARTS = (0, SIZE - WINDOW)
NUM_DEVICES = 4
_ROOT = pathlib.Path(__file__).resolve().parents[3]


def _varints(entries):
    return b"".join(
        bytes([entry]) if entry < 128 else bytes([entry & 127 | 128, entry >> 7])
        for entry in entries.tolist()
    )


def _ten_bits(entries):
    bits = np.unpackbits(entries.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)
    return np.packbits(bits[:, -10:].ravel()).tobytes()


def _three_bytes(entries, order):
    return entries.astype("<u4").view(np.uint8).reshape(-1, 4)[:, order].tobytes()


ENCODINGS = {
    **{
        order + dtype: lambda entries, dtype=order + dtype: entries.astype(dtype).tobytes()
        for order in "<>"
        for dtype in ("u2", "u4", "u8", "f2", "f4", "f8")
    },
    "three bytes": lambda entries: _three_bytes(entries, [0, 1, 2]),
    "three bytes, largest first": lambda entries: _three_bytes(entries, [2, 1, 0]),
    "ten bits": _ten_bits,
    "variable-length integers": _varints,
    "text": lambda entries: json.dumps(entries.tolist()).strip("[]").encode(),
}


def sentinels(vector):
    """Pieces of a vector in every encoding that somebody may keep it in, by name."""
    pieces = {start: np.array(vector[start : start + WINDOW]) for start in STARTS}
    return {
        f"{name}, from {start}": encode(piece)
        for start, piece in pieces.items()
        for name, encode in ENCODINGS.items()
    }


def memory(process_id):
    """All that a process could read of its memory."""
    try:
        file = open(f"/proc/{process_id}/mem", "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        pytest.skip(f"the memory of another process cannot be read here: {error}")
    with file:
        for line in pathlib.Path(f"/proc/{process_id}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            begin, end = (int(bound, 16) for bound in span.split("-"))
            with contextlib.suppress(OSError, ValueError, OverflowError):
                file.seek(begin)
                pages = np.frombuffer(file.read(end - begin), np.uint8).reshape(-1, 4096)
                yield pages[pages.any(axis=1)].tobytes()


def found_in(images, wanted):
    return {name for image in images for name, piece in wanted.items() if piece in image}


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
    return rng.integers(0, toy_secure.MODULUS, (NUM_DEVICES, SIZE)).tolist()


def test_no_vector_of_a_device_is_in_a_server_that_sums_securely(tmp_path, numbers):
    wanted = sentinels(numbers[0])

    def look(process, when):
        assert not found_in(memory(process.pid), wanted), when

    async def story(process, address):
        async with toy.channel_to(tmp_path, address) as channel:
            devices = await asyncio.gather(
                *(
                    toy_secure.configured(channel, each, toy_secure.demanded(size=SIZE))
                    for each in numbers
                )
            )
            for step in range(toy_secure.NUM_STEPS):
                await asyncio.gather(*(device.send() for device in devices))
                ended = await asyncio.gather(*(device.receive() for device in devices))
                if step > 1:  # Masked vectors have come; their sum is known.
                    look(process, f"after step {step}")
            assert all(ended) and all(device.answer.accepted for device in devices)

    with server(tmp_path, "secure") as (process, address):
        asyncio.run(asyncio.wait_for(story(process, address), 60))
        # What is looked for is where it may be: the sum itself.
        total = (np.array(numbers).sum(axis=0) % toy_secure.MODULUS).tolist()
        assert found_in(memory(process.pid), sentinels(total))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not found_in((path.read_bytes() for path in files), wanted)
    assert found_in((path.read_bytes() for path in files), sentinels(total))


def test_the_search_finds_a_vector_where_reports_are_summed_in_the_clear(tmp_path, numbers):
    update = np.array(numbers[0], "<u2").tobytes()

    async def story(process, address):
        async with toy.channel_to(tmp_path, address) as channel:
            streams = [await toy.connect(channel) for _ in numbers]
            for stream in streams:
                await stream.check_in()
            configuration = await streams[0].receive()
            await streams[0].report(configuration.attempt, update)
            assert (await streams[0].receive()).accepted
            return found_in(memory(process.pid), sentinels(numbers[0]))

    with server(tmp_path, "plain") as (process, address):
        assert asyncio.run(asyncio.wait_for(story(process, address), 60))


@pytest.mark.parametrize("name", ENCODINGS)
def test_pieces_are_found_in_a_whole_vector_of_every_encoding(name, numbers):
    whole = ENCODINGS[name](np.array(numbers[0]))
    found = found_in([b"x" + whole], sentinels(numbers[0]))
    assert {f"{name}, from {start}" for start in STARTS} <= found
    assert not found_in([whole], sentinels(numbers[1]))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
