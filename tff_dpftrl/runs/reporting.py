"""Statement, curves and model of what a run has committed."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from tff_dpftrl import durable_files, pictures, validation
from tff_dpftrl.accounting import display, privacy_plot, privacy_statement, statement_text
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.reports import readme
from tff_dpftrl.runs import committed_rounds, metrics_log, released_model, statement_subject
from tff_dpftrl.runs import prepared as prepared_lib

_PICTURE = "privacy.png"
# Entries that an audit is about: if one of them has changed, the audit tested another claim.
_CLAIM = ("mechanism", "parameters", "epsilon", "delta", "declared", "accounted", "observed")


def write(
    output: pathlib.Path,
    run: prepared_lib.Reportable,
    rounds: committed_rounds.CommittedRounds,
) -> Any:
    """Replaces the report of a run that this process has open, with a committed round."""
    done, plan, schedule = rounds.rounds_done, run.plan, run.schedule
    if done == 0:
        raise validation.UsageError(
            f"The run in {output} has not committed a {schedule.unit} yet: there is nothing to "
            f"report. Go on with {run.go_on}."
        )
    snapshot, saved = rounds.read(released_model.is_in_model)
    rows = metrics_log.read_rows(output, done)
    if not rows or rows[-1]["round"] < done:  # The crash came between the commit and the row.
        rows.append({column.name: saved.get(column.name) for column in run.presentation.columns})
    if metrics_log.is_of_earlier_version(output):
        metrics_log.MetricsLog(output, run.presentation.columns, done).append(rows[-1])
    ended = schedule.reason_to_end(plan, rows, done)
    weights = run.released(snapshot)
    run.presentation.write_model(output, weights)
    statement = plan.statement(
        rounds.observed(),
        run.facts,
        # When a run ends at an accuracy, or because somebody who has seen its metrics ends it,
        # depends on the data: then all rounds are charged that it might have run.
        charge_all_rounds=schedule.stop_at_accuracy is not None or ended is None,
    )
    subject = statement_subject.of_run(output, run.presentation.model_file)
    statement = continued(output, dataclasses.replace(statement, subject=subject))
    statement = write_statement(output, statement)
    run.publish(output, snapshot)
    progress = ended or (
        f"{done} of {plan.num_rounds} {schedule.unit}s are done; go on with {run.go_on}. The "
        "statement charges all of them: whoever ends a run early has seen how it went."
    )
    outcome = prepared_lib.Outcome(rows, weights, statement, progress)
    results = run.presentation.write(output, outcome)
    readme.write(output)
    return results


def continued(
    output: pathlib.Path, statement: statement_lib.PrivacyStatement
) -> statement_lib.PrivacyStatement:
    """Adds the audits that the statement in a folder has, and keeps its date if it says the same.

    The audits are those of the same claim, above all those that refuted it. The statement in the
    folder is returned if it says the same of the same files. A file that is no statement counts as
    none; one that was edited is refused (EditedError), since its audits may be gone; so is one that
    leads out of the folder.
    """
    path = output / "privacy_statement.json"
    if not os.path.lexists(path):
        return statement
    validation.file_in(output, path.name, remedy="Move it back into the folder.")
    try:
        before = statement_lib.PrivacyStatement.read(path)
    except privacy_statement.EditedError:
        raise
    except ValueError:
        return statement
    if any(getattr(statement, name) != getattr(before, name) for name in _CLAIM):
        return statement
    for entry in before.audits:
        is_refuted = sentences.refuted(entry) in before.headline_caveats
        statement = statement.with_audit(entry, is_refuted=is_refuted)
    return before if statement_subject.says_the_same(before, statement) else statement


def write_statement(
    output: pathlib.Path, statement: statement_lib.PrivacyStatement
) -> statement_lib.PrivacyStatement:
    """Writes a privacy statement, for programs and for people, and its picture if it has one.

    The returned statement has the digests by which an edit is found.
    """
    statement = statement_subject.bound(output, statement)
    for name, text in (
        ("privacy_statement.json", statement_text.to_json(statement) + "\n"),
        ("privacy_statement.md", statement_text.markdown(statement)),
    ):
        durable_files.write(output / name, text.encode("utf-8"))
    if not statement.has_guarantee:
        (output / _PICTURE).unlink(missing_ok=True)
        return statement
    pictures.write(output / _PICTURE, privacy_plot.draw(statement))
    return statement


def promise(statement: statement_lib.PrivacyStatement) -> str:
    """Returns the guarantee of a statement in a sentence, with its headline caveats."""
    if statement.epsilon is None:
        return "Privacy: NO guarantee. " + " ".join(statement.no_guarantee)
    rho = statement.rho_zcdp
    sentence = (
        f"Privacy: {display.epsilon_at(statement.epsilon, statement.delta)}, "
        + (f"ρ-zCDP {display.round_up(rho)}, " if rho is not None else "")
        + f"per {statement.unit_of_privacy}; see privacy_statement.md."
    )
    return " ".join([sentence, *statement.headline_caveats])
