"""The recount of a choice among runs (`sweep --select`): its runs, its winner, and their ε."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Callable
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.auditing.recount import findings, record_checks, records
from tff_dpftrl.auditing.recount import terms as terms_lib

_FILE = pathlib.PurePath("private", "selection.json")
_RUNS = pathlib.PurePath("private", "cells")
_DIVERGED = pathlib.PurePath("private", "diverged.json")
_RECORD = "record of the choice among runs"
_RELEASED = ("model.npz", "vocabulary.json", "config.json")
_TOLERANCE = 1e-6  # Relative excess of ε that is ignored.


def is_choice(folder: pathlib.Path) -> bool:
    """Returns whether a folder holds a choice among runs, with its records."""
    return (folder / _FILE).exists()


def recount(
    folder: pathlib.Path,
    recount_run: Callable[[pathlib.Path], audit_report.AuditReport],
    progress: Callable[[str], None],
) -> audit_report.AuditReport:
    """Derives the ε of a choice again, and recounts each of its runs."""
    unreadable: list[str] = []
    choice = records.read_json(folder, _FILE, unreadable)
    stated = records.read_json(folder, "winner/privacy_statement.json", unreadable)
    outcome = records.read_json(folder, "winner/outcome.json", unreadable)
    if stated is None and outcome is not None:
        stated = {**outcome, "parameters": outcome}
    if choice is None or stated is None:
        raise validation.UsageError(
            f"The choice in {folder} cannot be recounted: its selection.json cannot be read, or it "
            "has no winner yet. Let the sweep end, or restore the file."
        )
    runs = sorted(path.parent for path in (folder / _RUNS).glob("*/config.json"))
    tests: dict[str, Callable[[str], audit_report.Finding]] = {
        "number of runs": lambda test: _number(test, choice, runs),
        "runs: of this choice, on the same users": lambda test: _bound(test, folder, choice, runs),
        "what each run promises": lambda test: _promises(test, choice, runs),
        "statement: ε of the choice": lambda test: _statement(test, choice, stated),
        "winner: files of one run": lambda test: _winner(test, folder / "winner", runs),
    }
    done = []
    for test, check in tests.items():
        progress(test)
        try:
            done.append(check(test))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            done.append(findings.judged(test, [f"the records cannot be recounted: {error!r}"], ""))
    for run in runs:
        report = recount_run(run)
        wrong = [f"{one.test}: {one.says}" for one in report.findings if one.outcome == "violated"]
        is_derived = report.is_tested and not report.missing
        nothing = not is_derived and report.headline
        done.append(findings.judged(run.name, wrong, report.headline, nothing=nothing))
    return audit_report.AuditReport(
        subject=f"recount of the choice {folder.absolute().name}",
        claim=claim_lib.Claim(
            math.inf if stated.get("epsilon") is None else stated["epsilon"], stated["delta"]
        ),
        findings=tuple(done),
        is_ours=True,
    )


def _number(test: str, choice: dict[str, Any], runs: list[pathlib.Path]) -> audit_report.Finding:
    """Checks that the runs that were drawn are those that were made."""
    drawn, largest = choice["drawn"], choice["num_runs"]["largest"]
    wrong = []
    if not 1 <= len(drawn) <= largest:
        wrong.append(f"{len(drawn)} were drawn, of at most {largest}")
    numbers = sorted(int(run.name.partition(",")[0].removeprefix("run=")) for run in runs)
    if numbers != list(range(len(drawn))):
        wrong.append(f"{len(drawn)} were drawn, and the folders are of {numbers}")
    return findings.judged(test, wrong, f"All {len(drawn)} that were drawn were made")


def _bound(
    test: str, folder: pathlib.Path, choice: dict[str, Any], runs: list[pathlib.Path]
) -> audit_report.Finding:
    """Checks that all runs were begun for this record, and have the users that it binds."""
    digest = hashlib.blake2b((folder / _FILE).read_bytes(), digest_size=16).hexdigest()
    wrong, users = [], set()
    for run in runs:
        unreadable: list[str] = []
        manifest = records.read_json(run, "private/manifest.json", unreadable) or {}
        identities = manifest.get("identities", {})
        users.add(identities.get("training users"))
        # Choices of the first format did not bind their runs.
        if choice.get("format", 1) > 1 and identities.get(_RECORD) != digest:
            wrong.append(f"{run.name} was begun for another record than {_FILE.name}")
    if len(users) > 1 or None in users:
        wrong.append("the runs did not all train on the same users")
    return findings.judged(test, wrong, "Each run made is of this choice, on the same users")


def _promises(test: str, choice: dict[str, Any], runs: list[pathlib.Path]) -> audit_report.Finding:
    """Checks that all runs keep what the ε of the choice rests on."""
    plan, mean = choice["plan"], choice["num_runs"]["mean"]
    stop = 1.0 / mean
    weights = [(1.0 - stop) ** k for k in range(choice["num_runs"]["largest"])]
    expected = sum(k * weight for k, weight in enumerate(weights, start=1)) / sum(weights)
    ratio = (plan["epsilon"] - plan["run_epsilon"]) / 2.0
    promised = (
        (plan["run_epsilon"], plan["run_delta"]),
        (ratio, stop * math.expm1(ratio) / (1.0 - stop)),
    )
    wrong = []
    if plan["run_delta"] * expected > choice["delta"] * (1.0 + _TOLERANCE):
        wrong.append(f"δ = {plan['run_delta']!r} of a run is too large for {expected:.6g} runs")
    for run in runs:
        found = records.read(run)
        terms = terms_lib.of(found)
        for epsilon, delta in promised:
            if delta >= 1.0:
                continue
            asked = dataclasses.replace(terms, delta=delta)
            least, _ = record_checks.epsilon_asked_for(found, asked)
            if least > epsilon * (1.0 + _TOLERANCE):
                wrong.append(
                    f"{run.name} has ε = {least:.6g} at δ = {delta:.3g}, not {epsilon:.6g}"
                )
    pairs = " and ".join(
        f"({display.round_up(epsilon, 6)}, {display.delta(delta)})" for epsilon, delta in promised
    )
    fine = f"Each run made is (ε, δ)-DP for {pairs}"
    return findings.judged(test, wrong, fine, nothing=not runs and "there is no run")


def _statement(test: str, choice: dict[str, Any], stated: dict[str, Any]) -> audit_report.Finding:
    """Checks that the winner's statement is that of the choice."""
    parameters = stated["parameters"]
    pairs = {
        "ε": (stated["epsilon"], choice["plan"]["epsilon"]),
        "δ": (stated["delta"], choice["delta"]),
        "expected number of runs": (
            parameters["selection_expected_runs"],
            choice["num_runs"]["mean"],
        ),
        "largest number of runs": (
            parameters["selection_largest_number_of_runs"],
            choice["num_runs"]["largest"],
        ),
    }
    if "outcome" not in stated:  # A winner that diverged says nothing of one run.
        pairs["ε of one run"] = (parameters["epsilon_of_one_run"], choice["plan"]["run_epsilon"])
        pairs["δ of one run"] = (parameters["delta_of_one_run"], choice["plan"]["run_delta"])
    wrong = [
        f"{name} is {said!r}, and {planned!r} was planned"
        for name, (said, planned) in pairs.items()
        if said is not None and findings.differs(said, planned)
    ]
    target = choice["options"].get("target_epsilon")
    if target is not None and choice["plan"]["epsilon"] > target * (1.0 + _TOLERANCE):
        wrong.append(f"ε is {choice['plan']['epsilon']!r}, above the target {target!r}")
    return findings.judged(test, wrong, f"ε = {stated['epsilon']!r}, as planned")


def _contents(folder: pathlib.Path, run: pathlib.Path) -> list[bytes]:
    names = [(run / name).relative_to(folder).as_posix() for name in _RELEASED]
    return [validation.file_in(folder, name, max_bytes=None).read_bytes() for name in names]


def _winner(test: str, winner: pathlib.Path, runs: list[pathlib.Path]) -> audit_report.Finding:
    """Checks that all that is released is of one run, or that nothing is of one that diverged."""
    ended = [run for run in runs if not (run / _DIVERGED).exists()]
    if (winner / "outcome.json").exists():
        wrong = [] if len(ended) < len(runs) else ["the winner diverged, and no run did"]
        names = sorted(path.name for path in winner.iterdir())
        wrong += [f"there is {name}" for name in names if name != "outcome.json"]
        return findings.judged(test, wrong, "It diverged, and nothing else is released")
    folder = winner.parent
    released = _contents(folder, winner)
    same = [run for run in ended if _contents(folder, run) == released]
    wrong = [] if same else [f"{', '.join(_RELEASED)} are not those of one run"]
    kept = folder / "private" / winner.name
    if kept.exists() and _contents(folder, kept) != released:
        wrong.append("it is not what was released first")
    return findings.judged(test, wrong, "Model, vocabulary and options are those of one run")
