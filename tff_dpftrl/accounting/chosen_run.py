"""The statement of the best of a random number of runs, from that of the run by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tff_dpftrl.accounting import display, parts, privacy_statement, selection
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences

_OF_OBSERVED = ("sensitivity_squared", "sensitivity_method")


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
        *statement_lib.delta_caveats(one.delta, users, unit),
        sentences.ONE_OF_A_CHOICE,
    )
    rows = [
        dataclasses.replace(row, says=row.says or one.mechanism)
        for row in costs or (parts.Cost(parts.WEIGHTS, "", run_epsilon),)
    ]
    choice = parts.Cost(
        parts.SELECTION,
        sentences.BEST_OF_RUNS.format(
            score=score,
            mean=num_runs.mean,
            largest=num_runs.largest,
            epsilon=display.round_up(run_epsilon),
            delta=display.delta(one.delta, 3),
        ),
        epsilon - run_epsilon,
    )
    tuned = statement_lib.tuning(None)
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
        accounting=f"Of one run: {one.accounting} {sentences.ACCOUNTING_OF_CHOICE}",
        setting=f"{one.setting} {sentences.TRUST_OF_CHOICE}",
        from_whom=f"{one.from_whom or sentences.FROM_WHOM_UNKNOWN} {sentences.TRUST_OF_CHOICE}",
        output=sentences.OUTPUT_OF_CHOICE,
        covered=(*one.covered, sentences.CHOICE_COVERED),
        not_covered=tuple(
            sentences.SETTINGS_TRIED if line == tuned else line for line in one.not_covered
        ),
        assumptions=(*one.assumptions, sentences.CHOICE_SECRET),
        headline_caveats=(
            *statement_lib.delta_caveats(delta, users, unit),
            *(line for line in one.headline_caveats if line not in of_the_run),
        ),
        # The date would tell how long the runs took.
        subject={name: value for name, value in one.subject.items() if name != "date"},
    )
