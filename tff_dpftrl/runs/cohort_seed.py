"""The secret seed that cohorts are sampled with, where privacy rests on their secrecy.

DP-FTRL's guarantee does not depend on who knows the cohorts. That of DP-FedAvg does:
its seed comes from the operating system and lies, readable by the owner only, with
the run's other secrets, so that a resumed run draws the same cohorts.

Two copies of a run that both go on sample the same cohorts, with independent noise. Together their
round is one sampled release with less noise, z / √2. It is not two rounds with samples of their
own.
"""

from __future__ import annotations

import pathlib
import secrets

from tff_dpftrl import durable_files, validation

_NAME = "cohort_seed"
_BITS = 256


def create(private: pathlib.Path) -> int:
    """Draws the seed of a new run and keeps it in the folder of the run's secrets."""
    seed = secrets.randbits(_BITS)
    durable_files.write(private / _NAME, f"{seed:x}\n".encode("ascii"), private=True)
    return seed


def read(private: pathlib.Path) -> int:
    """Reads the seed that `create` kept; refuses a missing or damaged file."""
    try:
        return int((private / _NAME).read_text(encoding="ascii"), base=16)
    except (OSError, ValueError) as error:
        raise validation.UsageError(
            f"The secret seed of the cohorts, {private / _NAME}, cannot be read: {error}. Without "
            "it the run cannot go on with the same cohorts; restore it or start a new run."
        ) from error
