"""The statement of the best of a random number of runs, from that of the run by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tff_dpftrl.accounting import display, parts, privacy_statement, selection
from tff_dpftrl.accounting import statement_sentences as sentences

_ACCOUNTING = (
    "Of the choice: the best of a random number of runs is (ε₀ + 2 ε₁, E[K] δ₀)-DP if each run is "
    "(ε₀, δ₀)-DP and (ε₁, δ₁)-DP with δ₁ = γ (e^ε₁ − 1) / (1 − γ), for a geometric K of mean 1/γ "
    "(Papernot & Steinke 2022; Koskela, Redberg & Wang 2024), cut off at its largest value."
)
_OF_OBSERVED = ("sensitivity_squared", "sensitivity_method")
_COVERED = (
    "The choice of this run among a random number of runs, each with settings drawn at random, by "
    "a score of what they release."
)
_OUTPUT = (
    "Of the chosen run alone: its noised sums, and what is computed from them without looking at "
    "the data again: every intermediate model and the final one. Nothing of the other runs, not "
    "even their models on the way."
)
_SECRET = (
    "The number of runs, how long they took, their scores, and everything that the other runs "
    "computed stay secret. No model of any of them was sent to users while it was trained. A run "
    "whose weights were no longer finite counts as the worst; none failed for another reason that "
    "depends on the data."
)
_TRUST = (
    "Whoever runs the sweep is also trusted to keep secret how many runs there were, how long they "
    "took, their scores, and all else of those that were not chosen."
)


def statement(
    one: privacy_statement.PrivacyStatement,
    *,
    epsilon: float,
    delta: float,
    run_epsilon: float,
    profile: Sequence[tuple[float, float]],
    costs: Sequence[parts.Cost] = (),
    num_runs: selection.NumRuns,
    num_settings: int,
    score: str,
) -> privacy_statement.PrivacyStatement:
    """Builds the statement of the run that was chosen.

    `one` is the statement of that run by itself; without a guarantee, the choice has none.
    `epsilon` and `delta` are the choice's, of all `num_settings` equally likely settings.
    `run_epsilon` is the largest ε of a run that it may have been, at the run's own δ. `costs` are
    those planned for the weights and all else at `delta`: `one` states what was observed.
    """
    unit = one.unit_of_privacy
    users = one.parameters.get("num_users")
    users = users if isinstance(users, int) else None
    of_the_run = (
        *sentences.delta_caveats(one.delta, users, unit),
        sentences.ONE_OF_A_CHOICE,
    )
    rows = [
        dataclasses.replace(row, says=row.says or one.mechanism)
        for row in costs or (parts.Cost(parts.WEIGHTS, "", run_epsilon),)
    ]
    choice = parts.Cost(
        parts.SELECTION,
        f"which of the runs is the best, by {score}: geometric with a mean of {num_runs.mean:g} "
        f"runs, {num_runs.largest} at most, each with ε = {display.round_up(run_epsilon)} at "
        f"δ = {display.delta(one.delta, 3)}",
        epsilon - run_epsilon,
    )
    tuned = sentences.not_covered(None, unit, one.data_in_one_place)[-1]
    return dataclasses.replace(
        one,
        epsilon=None if one.epsilon is None else epsilon,
        delta=delta,
        rho_zcdp=None,
        parts=() if one.epsilon is None else (*rows, choice),
        profile=() if one.epsilon is None else tuple(profile),
        accounted=one.declared,  # For all runs that might have been: not what was observed of one.
        parameters={
            **{name: value for name, value in one.parameters.items() if name not in _OF_OBSERVED},
            sentences.EXPECTED_RUNS: num_runs.mean,
            "selection_largest_number_of_runs": num_runs.largest,
            "selection_settings": num_settings,
            "selection_score": score,
            "epsilon_of_one_run": run_epsilon,
            "delta_of_one_run": one.delta,
        },
        accounting=f"Of one run: {one.accounting} {_ACCOUNTING}",
        setting=f"{one.setting} {_TRUST}",
        from_whom=f"{one.from_whom or sentences.FROM_WHOM_UNKNOWN} {_TRUST}",
        output=_OUTPUT,
        covered=(*one.covered, _COVERED),
        not_covered=tuple(
            "Which settings were tried, and what they were chosen on." if line == tuned else line
            for line in one.not_covered
        ),
        assumptions=(*one.assumptions, _SECRET),
        headline_caveats=(
            *sentences.delta_caveats(delta, users, unit),
            *(line for line in one.headline_caveats if line not in of_the_run),
        ),
        # The date would tell how long the runs took.
        subject={name: value for name, value in one.subject.items() if name != "date"},
    )
