"""`tff-dpftrl budget`: what all runs on one corpus have spent together."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from tff_dpftrl import validation
from tff_dpftrl.cli import output

if TYPE_CHECKING:
    from tff_dpftrl.accounting import composition
    from tff_dpftrl.training import data_budget

ABOVE = 3
"""Exit status where the runs have spent more than --max-epsilon, or nobody knows how much."""

_DESCRIPTION = """\
List the runs on one corpus, and state what they have spent together.

The ε of a statement covers one run by itself. Whoever sees the models of several runs on the same
people learns more. The total is for a user who takes part in all runs. ρ of Gaussian mechanisms
adds up. The privacy loss distributions of runs that sampled in secret are convolved, where a
statement has the parameters for it. ε and δ of other runs add up.

The runs of `sweep --select` are one entry, with the ε of the choice, which is spent when they are
drawn. Folders that went on from one state of a run, such as a restored backup beside the original,
are charged as branches of one run. They are found by the states that their ledgers have committed
to. Runs in folders that are not named here, or that were deleted, count too, and nobody can list
them.

The exit status is 0, or 3 if --max-epsilon is given and the total is above it or not known.
"""

_EPILOG = """\
examples:
  tff-dpftrl budget users.jsonl
  tff-dpftrl budget users.jsonl --runs results /archive/results --max-epsilon 10

  # For a script.
  tff-dpftrl budget users.jsonl --format json | jq .total.epsilon
"""


def add_parser(subparsers) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "budget",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "data", metavar="DATA", help="Corpus that the runs trained on, as given to train --data."
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["results"],
        metavar="DIR",
        help="Folders to search for runs, with all folders below them. Default: results.",
    )
    parser.add_argument(
        "--max-epsilon", type=float, metavar="E", help="Largest ε that all runs may have spent."
    )
    output.add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Lists and composes the runs, and returns the exit status."""
    from tff_dpftrl.training import data_budget

    if args.max_epsilon is not None:
        validation.positive("--max-epsilon", args.max_epsilon)
    budget = data_budget.of_corpus(args.data, args.runs)
    if not (budget.runs or budget.without_statement):
        raise validation.UsageError(
            f"No run on {args.data} is in {', '.join(args.runs)}: name the folders with --runs."
        )
    if args.format == "json":
        output.print_json(_as_json(budget))
    else:
        _print(budget)
    for line in _gaps(budget):
        print(line, file=sys.stderr)
    if args.max_epsilon is None:
        return 0
    total = budget.total
    is_within = total is not None and total.epsilon <= args.max_epsilon
    return 0 if is_within and not _gaps(budget) else ABOVE


def _gaps(budget: data_budget.Budget) -> list[str]:
    """Describes what the total leaves out, or why there is none."""
    from tff_dpftrl.accounting import composition

    lines = []
    if not composition.of_one_unit(list(budget.runs.values())):
        names = ", ".join(
            str(folder)
            for folder, run in budget.runs.items()
            if run.unit_of_privacy == "example" and run.epsilon is not None
        )
        lines.append(f"Not added up with the others: {names}, where ε is for single examples.")
    if budget.without_statement:
        names = ", ".join(map(str, budget.without_statement))
        lines.append(f"Without a statement: {names}. Run tff-dpftrl report on it first.")
    if budget.not_found:
        names = ", ".join(budget.not_found)
        lines.append(
            f"Not in these folders: {names}, whose models were the beginning of runs that are."
        )
    if budget.not_compared:
        names = ", ".join(map(str, budget.not_compared))
        lines.append(
            "Not compared, since their corpus is not where it was or was in memory, or this one "
            f"cannot be read by their options: {names}."
        )
    return lines


def _as_json(budget: data_budget.Budget) -> dict[str, object]:
    total = budget.total
    return {
        "runs": [{"folder": str(folder), **run.to_json()} for folder, run in budget.runs.items()],
        "without_statement": list(map(str, budget.without_statement)),
        "not_found": list(budget.not_found),
        "not_compared": list(map(str, budget.not_compared)),
        "forks": [
            {
                "folders": list(map(str, fork.folders)),
                "num_branches": fork.num_branches,
                "shared_rounds": fork.shared_rounds,
                "unread": list(map(str, fork.unread)),
                "is_choice": fork.is_choice,
                "together": [run.to_json() for run in fork.spent],
                "total": None if fork.total is None else dataclasses.asdict(fork.total),
            }
            for fork in budget.forks
        ],
        "total": None if total is None else dataclasses.asdict(total),
    }


_NOTHING = (
    "nothing is promised, since one has no guarantee or their noise or samples may be the same "
    "after they part"
)


def _fork_in_words(fork: data_budget.Fork) -> str:
    """Describes folders that went on from one state, and what they cost together."""
    names = ", ".join(map(str, fork.folders))
    if fork.is_choice:
        return (
            f"{names} are copies of one choice among runs (sweep --select): nothing is promised, "
            "since the budget does not cover choices that are made twice."
        )
    total = fork.total
    if fork.unread:
        unread = ", ".join(map(str, fork.unread))
        promised = f"each is charged by itself, {_cost(total)} together" if total else _NOTHING
        return (
            f"{names} may be of one run, since their options are the same, and no ledger can be "
            f"read in {unread} (another process may have it open): {promised}."
        )
    if fork.num_branches == 1:
        parted = f"One of them has all rounds, and they share {fork.shared_rounds} rounds"
    else:
        parted = f"Its {fork.num_branches} branches share {fork.shared_rounds} rounds"
    by_itself = ", each charged by itself" if len(fork.spent) > 1 else ""
    promised = f"{_cost(total)} together{by_itself}" if total else _NOTHING
    return f"{names} are of one run. {parted}: {promised}."


def _cost(total: composition.Total) -> str:
    from tff_dpftrl.accounting import display

    return f"they cost {display.epsilon_at(total.epsilon, total.delta)}"


def _print(budget: data_budget.Budget) -> None:
    from tff_dpftrl.accounting import composition, display

    rows = [["run", "ε", "δ", "ρ-zCDP"]]
    for folder, run in budget.runs.items():
        cost = ["none", "", ""]
        if run.epsilon is not None:
            rho = "" if run.rho_zcdp is None else display.round_up(run.rho_zcdp)
            cost = [display.round_up(run.epsilon), display.delta(run.delta), rho]
        rows.append([str(folder), *cost])
    rows += [[str(folder), "?", "", ""] for folder in budget.without_statement]
    output.print_table(rows, left=0)
    for fork in budget.forks:
        print(f"\n{_fork_in_words(fork)}")
    total, number = budget.total, len(rows) - 1
    if total is None and not composition.of_one_unit(list(budget.runs.values())):
        print("\nNot all of them protect the same unit: nothing is promised for all together.")
    elif total is None:
        print("\nNot all of them have a guarantee: nothing is promised for all together.")
    else:
        who = "For who is in it" if number == 1 else f"For who is in all {number} of them"
        print(f"\n{who}: {display.epsilon_at(total.epsilon, total.delta)} ({total.how}).")
