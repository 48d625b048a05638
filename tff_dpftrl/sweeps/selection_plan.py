"""What each run promises so that the best of them may be chosen, computed in another process.

The process reads the text for it, as `population_check` does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import display, parts, selection
from tff_dpftrl.runs import manifest
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import child, kinds, population_check

METRICS = "metrics"
"""Score by the metrics that runs release, in place of a public text."""

SLACK = 1.0 + 1e-6
"""Factor by which ε of a run may exceed what was planned, for rounding."""

_HALVINGS = 12
_MOST_DOUBLINGS = 20
_DELTAS = (1e-3, 0.01, 0.03, 0.1, 0.3)  # Of the points by which odds are bounded.


class Planned(NamedTuple):
    """Privacy of a choice among runs of some settings.

    Attributes:
      epsilon: ε of the choice.
      run_epsilon: Largest ε of a run of a cell.
      run_delta: δ that each run is planned for, and that `run_epsilon` is for.
      run_targets: `target_epsilon` of a run of each cell; None for a given noise multiplier.
      profile: Further pairs (ε, δ) that the choice satisfies, with larger δ.
      run_costs: What the weights and all else that a run of each cell releases cost alone at δ of
        the choice, as `parts.Cost` has it, JSON-compatible; nothing for weights alone.
      digests: Digests of the users, their texts and the files that this was planned with, as
        `corpus.planned` returns them.
      score_digest: Digest of the public text that scores the runs; None for `METRICS`.
    """

    epsilon: float
    run_epsilon: float
    run_delta: float
    run_targets: list[float | None]
    profile: list[tuple[float, float]]
    run_costs: Sequence[Sequence[Mapping[str, Any]]] = ()
    digests: Mapping[str, str] = {}
    score_digest: str | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Planned:
        """Returns the plan of which `_asdict` was written as JSON."""
        points = [(epsilon, delta) for epsilon, delta in content["profile"]]
        return cls(**{**content, "profile": points})


def plan(cells: Sequence[cells_lib.Cell], num_runs: selection.NumRuns, score_text: str) -> Planned:
    """Plans the runs of all cells, and checks that a text may score them.

    If the cells have a target, the plan's ε is not above it. `selection.refuse` has accepted the
    cells.
    """
    request = {
        "kind": cells[0].kind.name,
        "configs": [cell.config.to_dict() for cell in cells],
        "num_runs": dataclasses.asdict(num_runs),
        "score_text": score_text,
    }
    answer = ask(__name__, request)
    if "error" in answer:
        index = answer["cell"]
        where = "" if index is None else f"The cell {axes_lib.label(cells[index].values)}: "
        raise validation.UsageError(where + answer["error"])
    return Planned.from_json(answer)


def check_runs(
    folders: Sequence[pathlib.Path],
    kind: kinds.RunKind,
    planned_for: Planned,
    num_runs: selection.NumRuns,
) -> None:
    """Refuses runs that cost more than what a choice among them was planned for."""
    ratio = (planned_for.epsilon - planned_for.run_epsilon) / 2.0
    promises = selection.Targets(
        (planned_for.run_epsilon * SLACK, planned_for.run_delta),
        (ratio * SLACK, num_runs.delta_of_ratio(ratio)),
    )
    request = {"kind": kind.name, "folders": list(map(str, folders)), "promises": promises}
    answer = ask(__name__, request)
    if "error" in answer:
        raise validation.UsageError(answer["error"])


def ask(module: str, request: Any) -> Any:
    """Runs a module that reads JSON, in a process that ends with this one.

    Returns the JSON in the last line that it prints.
    """
    done = subprocess.run(
        child.command([sys.executable, "-m", module]),
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process; the other one ends with it.
    )
    if done.returncode:
        raise OSError(f"the process of {module} ended with status {done.returncode}")
    return json_text.parse(done.stdout.splitlines()[-1])


def planned(
    configs: Sequence[Any], num_runs: selection.NumRuns, planner: Callable[[Any], Any]
) -> tuple[Planned | None, int, str]:
    """Plans the runs of configs.

    Returns the plan; or None, the index of the first config that cannot be run, and the reason.
    """
    first = configs[0].to_dict()
    target, delta = first["target_epsilon"], first["delta"]
    wanted = None if target is None else selection.targets(target, delta, num_runs)
    run_delta = delta / num_runs.expected
    targets: list[float | None] = []
    costs: list[list[dict[str, Any]]] = []
    runs: dict[int, selection.EpsilonOfRun] = {}  # By their plan, which many cells may share.
    for index, config in enumerate(configs):
        config = config.changed(delta=run_delta)
        try:
            if wanted is not None:
                largest = _largest_target(config, wanted, planner)
                config = config.changed(target_epsilon=largest)
            targets.append(config.to_dict()["target_epsilon"])
            privacy = planner(config)
        except ValueError as error:
            return None, index, str(error)
        runs.setdefault(id(privacy), _epsilon_of(privacy))
        rows = parts.costs(privacy.rounds, "", privacy.others, delta)
        costs.append([dataclasses.asdict(row) for row in rows])
    worst = list(runs.values())
    if wanted is None:
        wanted = selection.account(worst, num_runs, delta)
    profile = [(wanted.epsilon_at(worst, num_runs, each), each) for each in _DELTAS if each > delta]
    found = Planned(wanted.epsilon, wanted.tail[0], run_delta, targets, profile, costs)
    return found, -1, ""


def _epsilon_of(privacy: Any) -> selection.EpsilonOfRun:
    def epsilon(delta: float) -> float:
        spent = privacy.at_delta(delta).epsilon_after(privacy.num_rounds)
        return math.inf if spent is None else spent

    return epsilon


def _largest_target(config: Any, wanted: selection.Targets, planner: Callable[[Any], Any]) -> float:
    """Returns the largest target of a run with which it keeps both promises, to a relative 1e-3.

    For a Gaussian mechanism that is the first promise.
    """

    def suffices(target: float) -> bool:
        asked = config.changed(target_epsilon=target)
        return wanted.are_met_by(_epsilon_of(planner(asked)))

    low = high = wanted.tail[0]
    for _ in range(_MOST_DOUBLINGS):
        if suffices(low):
            break
        low, high = low / 2.0, low
    else:
        raise validation.UsageError(
            "no noise lets one choose among runs at this target: raise target_epsilon."
        )
    for _ in range(_HALVINGS if low < high else 0):
        middle = (low + high) / 2.0
        low, high = (middle, high) if suffices(middle) else (low, middle)
    return low


def _check_runs(
    kind: str, folders: list[str], promises: list[tuple[float, float]]
) -> Mapping[str, Any]:
    runs, promised = kinds.KINDS[kind], selection.Targets(*promises)
    try:
        for folder in map(pathlib.Path, folders):
            cost = _epsilon_of(runs.begun_plan(manifest.read(folder), folder))
            if not promised.are_met_by(cost):
                epsilon, delta = promised.tail
                return {
                    "error": f"The run in {folder} costs more than the choice was planned for: ε = "
                    f"{cost(delta):.6g} at δ = {display.delta(delta, 3)}, and {epsilon:.6g} was "
                    "planned. Nothing is released. Begin a new choice in another folder."
                }
    except ValueError as error:
        return {"error": str(error)}
    return {}


def _plan(
    kind: str, configs: list[dict[str, Any]], num_runs: dict[str, Any], score_text: str
) -> Mapping[str, Any]:
    from tff_dpftrl.training import public_score

    runs = kinds.KINDS[kind]
    made = [runs.config_class.of(**values) for values in configs]
    score_digest = None
    try:
        if score_text != METRICS:
            text = public_score.read(score_text, made[0].text)
            score_digest = text.digest()
    except ValueError as error:
        return {"cell": None, "error": str(error)}
    first = population_check.first_error(made)
    if first is not None:
        return first
    found, index, why = planned(made, selection.NumRuns(**num_runs), runs.planner())
    if found is None:
        return {"cell": index, "error": why}
    digests = population_check.digests(made)
    return found._replace(digests=digests, score_digest=score_digest)._asdict()


if __name__ == "__main__":
    asked = json_text.parse(sys.stdin.read())
    print(json.dumps((_check_runs if "folders" in asked else _plan)(**asked)))
