"""The seed that cohorts are chosen with: public for DP-FTRL, secret where sampling is.

DP-FTRL's guarantee does not depend on who knows the cohorts. That of DP-FedAvg does:
its seed comes from the operating system and lies, readable by the owner only, with
the run's other secrets, so that a resumed run draws the same cohorts.
"""

from __future__ import annotations

import pathlib
import secrets

from tff_dpftrl import durable_files
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import privacy

_NAME = "cohort_seed"
_BITS = 256


def create(
    private: pathlib.Path, config: config_lib.TrainingConfig, plan: privacy.PrivacyPlan
) -> None:
    """Draws the seed of a new run and writes it, if it has to be secret."""
    if _is_secret(config, plan):
        text = f"{secrets.randbits(_BITS):x}\n"
        durable_files.write(private / _NAME, text.encode("ascii"), private=True)


def read(
    private: pathlib.Path, config: config_lib.TrainingConfig, plan: privacy.PrivacyPlan
) -> int:
    """The seed of a run.

    Raises:
      ValueError: If the file of a secret seed is missing or damaged.
    """
    if not _is_secret(config, plan):
        return config.seed
    try:
        return int((private / _NAME).read_text(encoding="ascii"), base=16)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The secret seed of the cohorts, {private / _NAME}, cannot be read: {error}. Without "
            "it the run cannot go on with the same cohorts; restore it or start a new run."
        ) from error


def _is_secret(config: config_lib.TrainingConfig, plan: privacy.PrivacyPlan) -> bool:
    # A run with a known noise seed is not private, and is meant to be repeatable.
    return plan.needs_secret_cohorts and config.deterministic_noise_seed is None
