"""What a fine-tuning run that has begun goes on with: its plan, and that nothing else is new."""

from __future__ import annotations

import pathlib
from collections.abc import Collection

from tff_dpftrl import validation
from tff_dpftrl.finetuning import amplified, group_size, passes, run_privacy
from tff_dpftrl.mechanisms import workload as workload_lib
from tff_dpftrl.runs import manifest


def plan_of(
    known: manifest.Manifest, workload: workload_lib.Workload | None = None
) -> run_privacy.FinetuningPlan:
    """Returns the privacy of a run, on text or of a custom model, from its manifest.

    Correlated noise was optimised for the workload, or for the prefix sums if that is None.
    """
    config, derived = known.config, known.derived
    seed = config["deterministic_noise_seed"]
    if "plan" in derived:
        return run_privacy.SampledFinetuning.resumed(derived, deterministic_seed=seed)
    num_users, unit = known.facts["training_users"], config.get("unit_of_privacy", "user")
    if "sampling" in derived:
        return amplified.resumed(
            derived,
            num_users,
            deterministic_seed=seed,
            unit_of_privacy=unit,
            workload=workload,
        )
    # The first name is that of custom runs.
    cohort = config.get("users_per_step") or config.get("cohort_size")
    budget = config.get("compute_budget") or group_size.COMPUTE_BUDGET
    asked = passes.Passes(
        users_per_step=cohort or budget // config["group_size"],
        num_steps=config["num_steps"],
        delta=config["delta"],
        noise_multiplier=derived["noise_multiplier"],
        unit_of_privacy=unit,
    ).asked(clip_norm=derived["clip_norm"], deterministic_seed=seed, workload=workload)
    return asked.resumed(num_users, known.facts["num_parameters"], derived)


def check_is_the_same(
    begun: manifest.Manifest,
    asked: manifest.Manifest,
    output: pathlib.Path,
    *,
    but_for: Collection[str],
) -> None:
    """Refuses to go on with a run by a call that would begin another one.

    Options `but_for` may have changed. Those that `asked` records and `begun` lacks may not.
    """
    for what in ("config", "derived", "facts"):
        kept, given = dict(getattr(begun, what)), dict(getattr(asked, what))
        for name in sorted({*kept, *given} - {*but_for}):
            if kept.get(name) != given.get(name):
                raise validation.UsageError(
                    f"The run in {output} began with {name} = {kept.get(name)!r}, not "
                    f"{given.get(name)!r}: go on with what it began with, or name another folder."
                )
    for name, digest in begun.identities.items():
        if digest != asked.identities.get(name):
            raise validation.UsageError(
                f"The {name} are not those that the run in {output} began with: restore them, or "
                "name another folder."
            )
