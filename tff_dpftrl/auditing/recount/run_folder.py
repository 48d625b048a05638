"""The recount of a run: all checks, and their report."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing.recount import (
    arithmetic,
    choice,
    file_checks,
    findings,
    record_checks,
    records,
    sampling_checks,
    statement_checks,
)
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.runs import statement_subject

_TASK = "task"  # Folder with the task in a report with records.
_NOT_HANDED_OVER = "private/ (manifest, ledger, secrets and checkpoints)"


def recount_run(
    folder: str | os.PathLike[str], *, progress: Callable[[str], None] = lambda line: None
) -> audit_report.AuditReport:
    """Derives a run's privacy statement again from its records, and checks its files.

    The recount only reads: `audit_aggregator` and `audit_training` test whether noise is drawn and
    clients are clipped as the records say. Nothing in the folder is changed. The folder may be that
    of a run, finished or interrupted, of `sweep --select`, or of `tff-dpftrl task report
    --records`. All tests but that of the noise in the checkpoint are exact.
    """
    folder = pathlib.Path(folder)
    if choice.is_choice(folder):
        return choice.recount(folder, recount_run, progress)
    if (folder / _TASK).is_dir():
        # Imported here: it needs `cryptography`, which a machine that fine-tunes may not have.
        from tff_dpftrl.auditing.recount import served_task

        task = served_task.read(folder)
        terms = served_task.terms(task)
        subject, checks = "report of the task", served_task.checks(task, terms)
        run, missing = task, "" if task.rows is not None else served_task.NOT_HANDED_OVER
    else:
        run = records.read(folder)
        terms = terms_lib.of(run)
        subject, checks = "run", _checks(run, terms)
        is_whole = run.manifest is not None and run.ledger is not None
        missing = "" if is_whole else _NOT_HANDED_OVER
    unknown = _unknown_mechanism(terms)
    other = statement_checks.other_version(run.statement)
    proof = unknown and f"a proof of the mechanism {unknown!r}"
    code = other and f"the code of version {other}, which wrote its text"
    missing = " and ".join(filter(None, [missing, proof, code]))
    done = []
    for test, check in checks.items():
        progress(test)
        try:
            done.append(check(test))
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            if unknown and isinstance(error, validation.UsageError):
                done.append(findings.skipped(test, str(error).rstrip(".")))
                continue
            # Records that no run writes: nobody can check their claim.
            done.append(findings.judged(test, [f"the records cannot be recounted: {error!r}"], ""))
    return audit_report.AuditReport(
        subject=f"recount of the {subject} {run.folder.absolute().name}",
        claim=_claim(run, terms),
        findings=tuple(done),
        is_ours=True,
        missing=missing,
    )


def _unknown_mechanism(terms: terms_lib.Terms) -> str:
    """Returns the name of a custom mechanism, whose matrix the recount cannot write down."""
    if terms.strategy is None:
        return ""
    try:
        arithmetic.strategy_matrix(terms.strategy, 1)
    except arithmetic.UnknownMechanismError as error:
        return error.mechanism
    except (KeyError, TypeError, ValueError, IndexError):
        pass  # Malformed parameters of a known mechanism: the checks say what is wrong.
    return ""


def _checks(
    run: records.Records, terms: terms_lib.Terms
) -> dict[str, Callable[[str], audit_report.Finding]]:
    """Returns the checks of a run of `train` or `finetune`, by name."""
    checks: dict[str, Callable[[str], audit_report.Finding]] = {
        "options: config.json and private/manifest.json": lambda test: record_checks.options(
            test, run
        ),
        "noise multiplier: options and what was derived": lambda test: (
            record_checks.noise_multiplier(test, run, terms)
        ),
        "seed of the noise": lambda test: record_checks.seed(test, run, terms),
        "ledger: one history of rounds": lambda test: record_checks.ledger(test, run, terms),
        "participation: ledger and declared schema": lambda test: record_checks.participation(
            test, run, terms
        ),
        "checkpoint: state, ledger and options": lambda test: record_checks.checkpoint(test, run),
        "noise in the checkpoint": lambda test: record_checks.noise_state(test, run, terms),
        "statement: participation": lambda test: statement_checks.participation(test, run, terms),
        "statement: sensitivity": lambda test: statement_checks.sensitivity(test, run, terms),
        "statement: ε": lambda test: statement_checks.epsilon(test, run, terms),
        "statement: Markdown and JSON": lambda test: statement_checks.text(test, run),
        "statement: every sentence": lambda test: statement_checks.sentences(
            test, run, terms, statement_checks.made_again
        ),
        "statement: what it is about": lambda test: statement_checks.subject(
            test,
            run,
            lambda: statement_subject.of_run(run.folder, file_checks.model_of(run)),
            is_bound="versions" in (run.manifest or {}),  # Recorded since statements are.
        ),
        "metrics: ε by round": lambda test: statement_checks.metrics_epsilon(test, run, terms),
        "metrics: rows and cohorts": lambda test: statement_checks.metrics_rows(test, run, terms),
        "released model and checkpoint": lambda test: file_checks.model(test, run, terms),
        "permissions of private/": lambda test: file_checks.permissions(test, run),
        "secrets outside of private/": lambda test: file_checks.secrets(test, run, terms),
        "exact figures in files that may be published": lambda test: file_checks.exact_figures(
            test, run
        ),
        "files: missing or unknown": lambda test: file_checks.complete(test, run, terms),
    }
    if run.config.get("vocabulary") in file_checks.PACKAGE_WORDS:
        checks["vocabulary: words of this package"] = lambda test: file_checks.vocabulary(test, run)
    if terms.kind == terms_lib.SAMPLED:
        checks["sampling: ledger and secret seed"] = lambda test: sampling_checks.sampling(
            test, run, terms
        )
    return checks


def _claim(run: records.Records, terms: terms_lib.Terms) -> claim_lib.Claim:
    """Returns the statement's claim; an infinite ε if there is none, or none that is valid."""
    stated = run.statement or {}
    epsilon, rho = stated.get("epsilon"), stated.get("rho_zcdp")
    delta = terms.delta if stated.get("delta") is None else stated["delta"]
    try:
        return claim_lib.Claim(
            math.inf if epsilon is None else epsilon,
            delta,
            None if rho is None else gaussian.mu_from_rho(rho),
        )
    except (TypeError, ValueError):
        return claim_lib.Claim(math.inf, terms.delta)
