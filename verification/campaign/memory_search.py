"""Searches for a device's vector: in files, and in the memory of processes.

    python -m verification.campaign.memory_search PROCESS-ID < PIECES.json

copies the memory of the process, says "copied", and prints the names of the pieces in it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

WINDOW = 12  # Entries below 1,000 that are looked for together: 1 in 10³⁶ by chance.


def _varints(entries: np.ndarray) -> bytes:
    return b"".join(
        bytes([entry]) if entry < 128 else bytes([entry & 127 | 128, entry >> 7])
        for entry in entries.tolist()
    )


def _ten_bits(entries: np.ndarray) -> bytes:
    bits = np.unpackbits(entries.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)
    return np.packbits(bits[:, -10:].ravel()).tobytes()


def _three_bytes(entries: np.ndarray, order: Sequence[int]) -> bytes:
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
"""What somebody may keep entries below 1,000 as, by name."""


def pieces(vector: Sequence[int]) -> dict[str, bytes]:
    """Returns the first and last pieces of a vector in every encoding, by name.

    Args:
      vector: At least `WINDOW` entries below 1,000.

    Returns:
      What to look for.
    """
    whole = np.array(vector)
    return {
        f"{name}, from {start}": encode(whole[start : start + WINDOW])
        for start in (0, len(whole) - WINDOW)
        for name, encode in ENCODINGS.items()
    }


def pieces_of(vectors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Returns the pieces of several vectors, by the names of both."""
    return {
        f"{owner}: {name}": piece
        for owner, vector in vectors.items()
        for name, piece in pieces(vector.tolist()).items()
    }


def memory(process_id: int) -> Iterator[bytes]:
    """Returns all that a process could read of its memory, without pages of zeros.

    Args:
      process_id: The process.

    Yields:
      Regions.

    Raises:
      OSError: If this process may not read it.
    """
    with open(f"/proc/{process_id}/mem", "rb", buffering=0) as file:
        for line in pathlib.Path(f"/proc/{process_id}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            begin, end = (int(bound, 16) for bound in span.split("-"))
            with contextlib.suppress(OSError, ValueError, OverflowError):
                file.seek(begin)
                pages = np.frombuffer(file.read(end - begin), np.uint8).reshape(-1, 4096)
                yield pages[pages.any(axis=1)].tobytes()


def files(folder: pathlib.Path) -> Iterator[bytes]:
    """Contents of all files in a folder."""
    return (path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def found_in(images: Iterable[bytes], wanted: Mapping[str, bytes]) -> set[str]:
    """Names of the pieces that are anywhere."""
    return {name for image in images for name, piece in wanted.items() if piece in image}


def to_json(wanted: Mapping[str, bytes]) -> str:
    """Pieces for the command line."""
    return json.dumps({name: base64.b64encode(piece).decode() for name, piece in wanted.items()})


def _main() -> None:
    given = {name: base64.b64decode(text) for name, text in json.load(sys.stdin).items()}
    try:
        images = list(memory(int(sys.argv[1])))
    except OSError as error:
        sys.exit(f"The memory of process {sys.argv[1]} cannot be read: {error}")
    print("copied", flush=True)  # It may go on.
    print(json.dumps(sorted(found_in(images, given))))


if __name__ == "__main__":
    _main()
