"""Rows that several users own, such as the messages of a chat: which of them are trained on.

A guarantee for users holds for each owner of a row if no user owns more than G of the rows that
are trained on. Which rows these are is decided by the lists of owners alone, never by texts. So
it is the same in neighbouring data sets that have other content in the rows of one user and the
same lists of owners: "fixed-graph" differential privacy (Ganesh et al. 2025, arXiv 2503.03622).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.data import user_ids


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rows of a table of which no user owns too many.

    Attributes:
      is_selected: Whether a row is selected, bool, shape [rows].
      rows_per_owner: G, largest number of selected rows that a user owns.
      num_owned: Number of rows that have an owner.
      num_owners: Number of users who own a row.
    """

    is_selected: np.ndarray
    rows_per_owner: int
    num_owned: int
    num_owners: int

    @property
    def summary(self) -> str:
        """Numbers of rows and owners, a clause."""
        return (
            f"{int(self.is_selected.sum())} of {self.num_owned} rows of {self.num_owners} owners "
            f"are selected, so that nobody owns more than {self.rows_per_owner} of them"
        )


def of_cell(cell: Any) -> tuple[str, ...] | None:
    """Returns the distinct owners that a cell names; None if it names none, or is no such cell.

    `cell`: one id or a list of ids, as `user_ids.as_text` takes them.
    """
    try:
        names = map(user_ids.as_text, cell if user_ids.is_list(cell) else [cell])
        return tuple(dict.fromkeys(names)) or None
    except user_ids.NoId:
        return None


def select(owners_of_rows: Iterable[Sequence[str] | None], rows_per_owner: int) -> Selection:
    """Selects rows greedily, in an order that is random but always the same.

    A row is selected if each of its owners still owns fewer than G selected rows (Ganesh et al.
    2025, the greedy baseline). No row can be added afterwards. With at most r owners a row, the
    rows are at least 1/r of the largest possible number: a row that was left out had an owner
    with G selected ones, and each selected row counts for at most r such owners.

    `owners_of_rows`: distinct owners of all rows, in the table's order; None of a row without any.
    `rows_per_owner`: G, at least 1.
    """
    rows_per_owner = validation.integer("rows_per_owner", rows_per_owner, minimum=1)
    numbers: dict[str, int] = {}
    owners: list[int] = []
    ends = [0]
    for names in owners_of_rows:
        owners.extend(numbers.setdefault(name, len(numbers)) for name in names or ())
        ends.append(len(owners))
    count = len(ends) - 1
    words = hashlib.shake_256(b"tff_dpftrl/data/owners").digest(8 * count)
    order = np.argsort(np.frombuffer(words, dtype="<u8"), kind="stable")
    left = [rows_per_owner] * len(numbers)
    is_selected = np.zeros(count, bool)
    for row in order.tolist():
        here = owners[ends[row] : ends[row + 1]]
        if here and all(left[owner] for owner in here):
            is_selected[row] = True
            for owner in here:
                left[owner] -= 1
    num_owned = int(np.count_nonzero(np.diff(ends)))
    return Selection(is_selected, rows_per_owner, num_owned, len(numbers))
