"""Serialised states, of which as little as possible is in memory at a time."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from typing_extensions import override

_MOST_HEAD = 1 << 20
"""Bytes at the beginning of a content that are kept in memory."""


class Content(abc.ABC):
    """Bytes that are written, hashed and read part by part.

    `bytes(content)` has them in one piece; so has what `pickle` sends to another process.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of bytes."""

    @abc.abstractmethod
    def parts(self) -> Iterator[bytes | memoryview]:
        """Yields the bytes, in order, in parts of any size."""

    @abc.abstractmethod
    def head(self) -> bytes:
        """Returns the first bytes: as many as there are, or a mebibyte."""

    def fill(self, buffers: Sequence[memoryview]) -> None:
        """Copies all bytes into buffers of as many bytes in all, one after the other."""
        remaining = iter(buffers)
        buffer = memoryview(b"")
        for part in map(memoryview, self.parts()):
            while part:
                while not buffer:
                    buffer = next(remaining)
                size = min(len(part), len(buffer))
                buffer[:size] = part[:size]
                part, buffer = part[size:], buffer[size:]

    def __bytes__(self) -> bytes:
        return b"".join(self.parts())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (bytes, Content)):
            return NotImplemented
        return bytes(self) == bytes(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self):
        return bytes, (bytes(self),)


Serialised: TypeAlias = "bytes | memoryview | Content"
"""Bytes in one piece or in parts."""


class InMemory(Content):
    """Content of buffers that somebody has in memory, such as arrays."""

    def __init__(self, buffers: Iterable[bytes | memoryview]):
        """Takes bytes, and views of single bytes, in order; they must not be changed any more."""
        self._buffers = tuple(buffers)

    @override
    def __len__(self) -> int:
        return sum(map(len, self._buffers))

    @override
    def parts(self) -> Iterator[bytes | memoryview]:
        return iter(self._buffers)

    @override
    def head(self) -> bytes:
        return head_of(self.parts())


def head_of(parts: Iterable[bytes | memoryview]) -> bytes:
    """Returns the first bytes of a content: as many as there are, or a mebibyte."""
    found = b""
    for part in parts:
        found += part[: _MOST_HEAD - len(found)]
        if len(found) == _MOST_HEAD:
            break
    return found


def parts_of(content: Serialised) -> Iterator[bytes | memoryview]:
    """Yields the parts of a content, which may be bytes in one piece."""
    return content.parts() if isinstance(content, Content) else iter([content])


def in_pieces(parts: Iterable[bytes | memoryview], first: int, others: int) -> Iterator[bytes]:
    """Yields the bytes of some parts in pieces of other sizes; the last one may be shorter."""
    piece, size = bytearray(), first
    for part in map(memoryview, parts):
        while part:
            taken = size - len(piece)
            piece += part[:taken]
            part = part[taken:]
            if len(piece) == size:
                yield bytes(piece)
                piece, size = bytearray(), others
    if piece:
        yield bytes(piece)
