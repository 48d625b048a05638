"""The participation that a statement may claim, counted anew from devices' own records.

The server learns of participation by sums of histograms; here every device says by itself in
which rounds it took part, abandoned attempts included, and the store says which attempts were
committed. Both must come to the same numbers.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.participation import observed


class RecountError(validation.UsageError):
    """The store and the devices contradict each other."""


@dataclasses.dataclass(frozen=True)
class Upload:
    """A report that has left a device.

    Attributes:
      device: The device's number.
      round_index: The round, from 0.
      attempt: The attempt.
      is_accepted: Whether the device was told that its report is in the sum.
    """

    device: int
    round_index: int
    attempt: str
    is_accepted: bool


def participation(
    rows: Iterable[Mapping[str, Any]],
    uploads: Sequence[Upload],
    *,
    stride_edges: Sequence[int],
    times_edges: Sequence[int],
) -> observed.Participation:
    """Returns the participation that the committed rounds show.

    Args:
      rows: The store's history of the task.
      uploads: Uploads of all devices, in the order in which they were made.
      stride_edges: Smallest stride of each declared bucket.
      times_edges: Largest number of times of each.

    Returns:
      The participation, rounded to the safe side as the buckets are.

    Raises:
      RecountError: If a committed round holds other reports than devices have sent to it.
    """
    rows = list(rows)
    ends = _strides_and_times(uploads)
    strides, times = [], []
    for row in rows:
        cohort = _cohort(row, uploads)
        done = row["round"] + 1
        for upload in cohort:
            stride, count = ends[upload.device, upload.round_index]
            if stride is not None:
                strides.append(max(edge for edge in stride_edges if edge <= stride))
            times.append(min(done, min(edge for edge in times_edges if edge >= count)))
    return observed.Participation(len(rows), min(strides, default=None), max(times, default=0))


def _strides_and_times(
    uploads: Sequence[Upload],
) -> dict[tuple[int, int], tuple[int | None, int]]:
    """Returns, for each device and round, rounds since its last time, and times so far."""
    found: dict[tuple[int, int], tuple[int | None, int]] = {}
    rounds: dict[int, list[int]] = collections.defaultdict(list)
    for upload in uploads:
        before = rounds[upload.device]
        if before and before[-1] >= upload.round_index:
            raise RecountError(f"Device {upload.device} took part twice in one round.")
        stride = upload.round_index - before[-1] if before else None
        before.append(upload.round_index)
        found[upload.device, upload.round_index] = stride, len(before)
    return found


def _cohort(row: Mapping[str, Any], uploads: Sequence[Upload]) -> list[Upload]:
    """Returns the devices whose reports are in a committed round."""
    sent = [upload for upload in uploads if upload.attempt == row["attempt"]]
    accepted = [upload for upload in sent if upload.is_accepted]
    if any(upload.round_index != row["round"] for upload in sent):
        raise RecountError(f"Round {row['round']} has reports that are of another round.")
    reports = row.get("devices/reports", 0)  # A skipped round has no counts.
    for cohort in (accepted, sent):  # Who is not told may be in the sum all the same.
        if len(cohort) == reports:
            return cohort
    raise RecountError(
        f"Round {row['round']} holds {reports} reports, and devices know of "
        f"{len(accepted)} to {len(sent)}."
    )
