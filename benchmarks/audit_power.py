"""How often audits call aggregators violated: correct ones, ones with a planted bug, TFF's own.

    python benchmarks/audit_power.py --kinds correct --audits 20 --trials 400
    python benchmarks/audit_power.py --kinds planted tff --audits 3

prints a Markdown table. μ is the largest lower bound of an audit, over that of the mechanism
as it describes itself, as the median over the audits.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import pathlib
import statistics
import sys
import time
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests.auditing import planted_bugs  # noqa: E402
from tff_dpftrl.auditing import aggregator, mechanism, playing  # noqa: E402
from tff_dpftrl.auditing.evidence import worst_pattern  # noqa: E402

_PLAYER = playing.Player
_KINDS = ("correct", "planted", "tff")


def _cases(kind: str) -> dict[str, planted_bugs.Case]:
    if kind != "tff":
        return planted_bugs.CORRECT if kind == "correct" else planted_bugs.PLANTED
    from tests.auditing import tff_cases  # It needs TFF.

    return tff_cases.OF_TFF


def _described_mu(case: planted_bugs.Case) -> float | None:
    """μ of what is released along a canary, by the numbers of the mechanism."""
    numbers = case.options.get("mechanism") or mechanism.Mechanism.of(case.build())
    if numbers is None:
        return None
    covariance = worst_pattern.noise_covariance(numbers.strategy, case.schema.num_rounds)
    return worst_pattern.strongest_pattern(covariance, case.schema).norm / numbers.noise_stddev


class _Compiled:
    """Players in place of `playing.Player`: two of them, compiled once, in turn."""

    def __init__(self):
        self._players: list[playing.Player] = []
        self._turn = itertools.cycle((0, 1))

    def __call__(self, process, client_weight, entropy=None):
        index = next(self._turn)
        if index == len(self._players):
            self._players.append(_PLAYER(process, client_weight, entropy))
        return self._players[index]


def _row(name: str, case: planted_bugs.Case, arguments: argparse.Namespace) -> str:
    described, seconds, ratios = _described_mu(case), [], []
    violated: collections.Counter[str] = collections.Counter()
    num_violated = 0
    compiled = _Compiled() if arguments.compile_once else playing.Player
    for index in range(arguments.audits):
        start = time.perf_counter()
        with mock.patch.object(playing, "Player", compiled):
            report = aggregator.audit_aggregator(
                **case.arguments(),
                budget=aggregator.GameBudget(arguments.trials, seed=arguments.seed + index),
            )
        seconds.append(time.perf_counter() - start)
        num_violated += report.is_violated
        violated.update(f.test for f in report.findings if f.outcome == "violated")
        if described:
            ratios.append(report.mu_at_least / described)
        if arguments.reports:
            print(report.to_markdown(), file=sys.stderr)
    found = "; ".join(f"{test} ({count})" for test, count in violated.most_common()) or "–"
    ratio = f"{statistics.median(ratios):.2f}" if ratios else "–"
    return (
        f"| {name} | {num_violated} of {arguments.audits} | {ratio} | "
        f"{statistics.median(seconds):.1f} | {found} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--audits", type=int, default=3, help="audits of each aggregator")
    parser.add_argument("--seed", type=int, default=0, help="of the first audit; then one more")
    parser.add_argument("--only", default="", help="part of the names to audit")
    parser.add_argument("--trials", type=int, default=8000)
    parser.add_argument(
        "--compile-once", action="store_true", help="the same compiled process in all audits"
    )
    parser.add_argument("--reports", action="store_true", help="all reports to standard error")
    arguments = parser.parse_args()
    print("| aggregator | VIOLATED | μ shown / described | seconds | by |")
    print("|---|---|---|---|---|")
    for kind in arguments.kinds:
        for name, case in _cases(kind).items():
            if arguments.only in name:
                print(_row(name, case, arguments), flush=True)


if __name__ == "__main__":
    main()
