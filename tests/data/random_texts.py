"""Random texts for the tests of tokenizers."""

import numpy as np


def strings(number: int) -> list[str]:
    """Returns random strings of several scripts, emoji and control characters."""
    rng = np.random.default_rng(7)
    ranges = [
        *((32, 127), (0, 32), (0xA0, 0x250), (0x370, 0x400), (0x400, 0x500), (0x590, 0x6FF)),
        *((0x900, 0x980), (0xE00, 0xE80), (0x3040, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAD00)),
        *((0x1F300, 0x1F700), (0x2000, 0x2070), (0xFE00, 0xFE10), (0xE000, 0xE010)),
    ]
    found = []
    for _ in range(number):
        text = ""
        for _ in range(rng.integers(1, 6)):
            low, high = ranges[rng.integers(len(ranges))]
            text += "".join(map(chr, rng.integers(low, high, rng.integers(0, 8))))
            text += ("", " ", "  ", "\n", "the ", "Planned")[rng.integers(6)]
        found.append(text)
    return found
