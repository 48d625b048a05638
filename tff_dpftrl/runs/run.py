"""A run from its beginning to its report: the steps that all kinds of runs have in common.

The folder of a run:

    config.json                 kind of the run, resolved options, what was derived from them,
                                versions; written again from its copy if it is missing
    metrics.csv, metrics_README.md, curves.png
    privacy_statement.json, .md
    private/metrics.csv, curves.png
                                the same with exact figures of the training users
    private/tensorboard/        the same as events
    private/ledger.sqlite       who took part when, and which state was committed
    private/checkpoints/        state of the process, with seed and noise buffers
    private/manifest.json       the same as config.json; from then on the folder holds a run

Each round is committed before the next one begins: its cohort to the ledger before it is
trained, then state and metrics to a checkpoint, then the checkpoint's fingerprint to the ledger.
What a run releases, a vocabulary that was counted with noise for example, is in `private/` together
with the record that charges it before a file outside of it tells of it. A run that is killed at any
moment goes on from the last committed round: it releases what was committed as it was. A round that
was under way has shown nothing. It is run again with the same cohort and other noise.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from tff_dpftrl import durable_files, validation
from tff_dpftrl.runs import (
    checkpoint,
    cohort_seed,
    committed_rounds,
    loop,
    manifest,
    privacy,
    reporting,
)
from tff_dpftrl.runs import prepared as prepared_lib
from tff_dpftrl.runs import progress as progress_lib


def train(
    output: pathlib.Path,
    known: manifest.Manifest | None,
    prepare_new: Callable[[], prepared_lib.Prepared],
    prepare_begun: Callable[[manifest.Manifest], prepared_lib.Prepared],
    progress: progress_lib.Progress,
) -> Any:
    """Trains a run, a new one or one that has begun, to its end.

    `known` is the manifest of a run that has begun, perhaps with none of its rounds; None for a new
    run. `prepare_new` and `prepare_begun` write nothing; the latter refuses data, or a model, that
    the run did not begin with. A UsageError comes before anything is written. After an OSError
    every committed round is kept.
    """
    prepared = prepare_new() if known is None else prepare_begun(known)
    with prepared.trainer as trainer:
        state = trainer.initial_state()
        template = checkpoint.without_values(state)
        if known is None:
            opened = _created_rounds(output, prepared, state)
        else:
            opened = _opened_rounds(output, prepared.report)
        del state  # It has copies of the model, and the rounds read theirs from the files.
        with opened as rounds:
            return _run(output, prepared, trainer, rounds, template, progress)


def report(
    output: pathlib.Path, reportable: Callable[[manifest.Manifest], prepared_lib.Reportable]
) -> Any:
    """Writes statement, curves and model of what a run has committed so far.

    The run may be interrupted or finished, but not under way. It can be resumed afterwards.
    """
    run = reportable(manifest.read(output))
    with committed_rounds.CommittedRounds.open(
        output / "private", run.plan.declared, binding=run.known.digest
    ) as rounds:
        durable_files.remove_leftovers(output)
        run.known.publish(output)
        return reporting.write(output, run, rounds)


def _run(
    output: pathlib.Path,
    prepared: prepared_lib.Prepared,
    trainer: prepared_lib.Trainer,
    rounds: committed_rounds.CommittedRounds,
    template: Any,
    progress: progress_lib.Progress,
) -> Any:
    """Runs the rounds that are left, and reports."""
    run = prepared.report
    durable_files.remove_leftovers(output)
    run.known.publish(output)
    prepared.keep(output)
    for line in prepared.announcement:
        progress(line)
    progress(
        f"Results: {output}/, {rounds.rounds_done} of {run.plan.num_rounds} "
        f"{run.schedule.unit}s done."
    )
    seed = prepared.public_seed
    if _has_secret_cohorts(run.plan):
        seed = cohort_seed.read(output / "private")
    trainer.sample_with(seed)
    loop.Loop(output, prepared, trainer, rounds, progress).run(template)
    return reporting.write(output, run, rounds)


def _created_rounds(
    output: pathlib.Path, prepared: prepared_lib.Prepared, state: Any
) -> committed_rounds.CommittedRounds:
    """Makes the folder of a new run, and opens its rounds."""
    manifest.check_is_free(output)
    output.mkdir(parents=True, exist_ok=True)
    lock = output / ".run.unfinished"
    # Of two processes that begin at once, one would empty the folder of the other's rounds.
    with durable_files.locked(lock) as is_ours:
        if not is_ours:
            raise validation.UsageError(
                f"Another process begins a run in {output}: name another folder."
            )
        try:
            return _alone_created_rounds(output, prepared, state)  # `_run` removes the lock.
        except BaseException:
            lock.unlink(missing_ok=True)
            raise


def _alone_created_rounds(
    output: pathlib.Path, prepared: prepared_lib.Prepared, state: Any
) -> committed_rounds.CommittedRounds:
    run = prepared.report
    manifest.check_is_free(output)  # Another process may have begun a run there meanwhile.
    private = output / "private"
    for path in private.iterdir() if private.is_dir() else ():
        if path.name != manifest.TEXTS_CACHE.name:  # Else of a run that never got to round 1.
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    rounds = committed_rounds.CommittedRounds.create(
        private, run.plan.declared, state, {}, **_ledger_options(run)
    )
    try:
        if _has_secret_cohorts(run.plan):
            cohort_seed.create(private)
        prepared.keep_first(output)
        run.known.keep(output)  # Last of all secrets: from now on the folder holds a run.
    except BaseException:
        rounds.close()
        raise
    return rounds


def _opened_rounds(
    output: pathlib.Path, run: prepared_lib.Reportable
) -> committed_rounds.CommittedRounds:
    private = output / "private"
    return committed_rounds.CommittedRounds.open(private, run.plan.declared, **_ledger_options(run))


def _ledger_options(run: prepared_lib.Reportable) -> dict[str, Any]:
    return {
        "noise_part": "aggregator" if run.plan.has_noise else None,
        "binding": run.known.digest,
        "budget_guard": run.plan.budget_guard(run.schedule.max_epsilon),
    }


def _has_secret_cohorts(plan: privacy.PrivacyPlan) -> bool:
    # A run with a known noise seed is not private, and is meant to be repeatable.
    return plan.needs_secret_cohorts and plan.deterministic_seed is None
