"""Forty users of ten words, and a vocabulary, for tests of commands that train."""

import json
import pathlib
from collections.abc import Sequence

_WORDS = "one two three four five six seven eight nine ten".split()


def write(folder: pathlib.Path, lengths: Sequence[int]) -> None:
    """Writes users.jsonl, with a text of each length for every user, and words.txt."""
    with open(folder / "users.jsonl", "w") as file:
        for user in range(40):
            texts = [" ".join(_WORDS[(user + i) % 10] for i in range(k)) for k in lengths]
            file.write(json.dumps({"user_id": f"u{user}", "examples": texts}) + "\n")
    (folder / "words.txt").write_text("\n".join(_WORDS))
