"""Texts of simulated devices, from public text, for the tests of a task."""

from __future__ import annotations

from tff_dpftrl import validation
from tff_dpftrl.data import docstrings, sources, tables, user_text

_STANDARD_LIBRARY = "standard-library"


def read(
    source: str,
    *,
    num_devices: int,
    max_examples: int,
    text_feature: str,
    pretokenized: bool,
    protected: str,
    table: tables.TableOptions,
) -> list[list[dict[str, str]]]:
    """Reads public text, not that of `protected`, as the examples of a few devices.

    Each device has the newest examples of one user, the newest first, as devices give them.
    """
    text = _public_text(source, pretokenized, protected, table)
    every = max(1, len(text) // num_devices)
    return [
        [{text_feature: one} for one in text.examples(user)[: -max_examples - 1 : -1]]
        for user in text.user_ids[::every][:num_devices]
    ]


def _public_text(
    source: str, pretokenized: bool, protected: str, table: tables.TableOptions
) -> user_text.UserText:
    if source == _STANDARD_LIBRARY:
        return docstrings.read_standard_library()
    if sources.share_texts(source, protected, table):
        raise validation.UsageError(
            f"proxy_data {source!r} is the data that is protected, a copy of it, or "
            "has texts of its users: name public text."
        )
    return sources.load_user_text(source, pretokenized=pretokenized)
