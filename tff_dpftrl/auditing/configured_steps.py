"""Audits of fine-tuning configs: of the steps that they would take, with their model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tff_dpftrl import validation
from tff_dpftrl.accounting import parts
from tff_dpftrl.auditing import audit_report, defaults, step_probes
from tff_dpftrl.finetuning import choosing, example_sampling, proxies, run_privacy, trained_part
from tff_dpftrl.finetuning import config as config_lib
from tff_dpftrl.finetuning import run as run_lib
from tff_dpftrl.training import corpus

_UNITS = 8
_UNITS_AT_ONCE = 3  # So that sums have borders, and a last piece that is not full.
_GROUP_SIZE = 32  # Examples of a made-up user, unless the options say how many are used.
_CLIP_NORM = 1.0


def audit_config(
    config: config_lib.FinetuningConfig,
    *,
    num_users: int | None = None,
    error_rate: float = defaults.ERROR_RATE,
    progress: Callable[[str], None] | None = None,
) -> audit_report.AuditReport:
    """Audits the steps that `finetune` would take with a config: `step_probes.audit_steps`.

    The steps are those of the run: its model and initial weights, its sums, its noise. Users and
    their texts are made up: of the protected data only the number of users is counted. So plan and
    ε are those of users who all have the same number of examples. The seeds of the noise are
    secret, whatever the config says. Optimizers come after what is released, and are plain here.
    Without `num_users`, users are counted in the config's corpus. `error_rate` is the largest
    chance that a correct config is called violated.
    """
    progress = progress or (lambda line: None)
    corpus.require_packages(vars(config))
    if num_users is None:
        num_users = len(corpus.read_users(config.text).train)
    steps = dataclasses.replace(
        config.part(config_lib.StepOptions),
        optimizer="sgd",
        learning_rate=1.0,
        decay="none",
        warmup_steps=0,
        iterate_averaging=None,
    )
    initial = config.load()
    part = trained_part.TrainedPart.of(initial, config.adapter_rank, seed=config.seed)
    options, public = config.part(choosing.SamplingOptions), None
    options = dataclasses.replace(options, deterministic_noise_seed=None)
    users = _users(options, num_users)
    if options.splits_budget:
        progress("Measuring gradients of public text ...")
        public = proxies.of_model(
            dataclasses.replace(initial, model=part.model, weights=part.weights),
            config.proxy_data,
            protected=config.data,
            largest_group=choosing.largest_group(options, num_users),
            is_tokenized=config.pretokenized,
            seed=config.seed,
            table=config.table,
        )
    elif options.clip_norm is None:  # Its value changes nothing that is looked at.
        options = dataclasses.replace(options, clip_norm=_CLIP_NORM)
    chosen = choosing.choose(options, users, public, part.model.num_parameters)
    plan = chosen.privacy
    if not plan.has_guarantee:
        raise validation.UsageError(
            "config promises nothing: it has no noise. Give it noise_multiplier or target_epsilon."
        )
    rows_per_unit = run_privacy.rows_per_unit(plan, chosen.group_size)
    steps = dataclasses.replace(steps, examples_at_once=_UNITS_AT_ONCE * rows_per_unit)
    rng = np.random.default_rng(config.seed)
    sizes = 1 + rng.permutation(_UNITS) % rows_per_unit
    words = rng.integers(
        1, initial.words.size, [int(sizes.sum()), initial.model.sequence_length + 1]
    ).astype(np.int32)
    report = step_probes.audit_steps(
        lambda optimizer: run_lib.steps_of(
            steps, plan, chosen.group_size, part.model, part.weights
        ),
        (words[:, :-1], words[:, 1:]),
        np.concatenate([[0], np.cumsum(sizes)]),
        plan=plan,
        normalised=config.normalised_clipping,
        error_rate=error_rate,
        progress=progress,
    )
    subject = (
        f"what the config runs: {report.subject}, {num_users} users with "
        f"{int(users.num_examples[0])} examples each, {part.model.num_parameters} trained weights"
    )
    others = [one.name for one in getattr(plan, "plan", plan).others]
    if config.has_metrics:
        others.append(parts.METRICS)
    findings = report.findings + audit_report.untested(others)
    return dataclasses.replace(report, subject=subject, findings=findings)


def _users(options: choosing.SamplingOptions, num_users: int) -> example_sampling.Users:
    """Returns made-up users: with as many examples as one may use, and enough for the budget."""
    size = options.group_size or _GROUP_SIZE
    if options.group_size is None:
        size = max(size, math.ceil(2 * options.budget / num_users))
    return example_sampling.of_sizes([size] * num_users)
