"""The choice of the best of a random number of runs, within one ε: `sweep --select`.

    private/selection.json   options, plan, digests of the data, and the cells that were drawn;
                             written before any run, each of which is bound to it
    private/cells/           the runs, as those of a sweep
    private/winner/          the best run's model and its statement, kept before they are released
    winner/                  a copy of them; all that may be published

A run whose weights are no longer finite is one outcome like others: that follows from its noised
sums, and its score is the worst. If it is chosen, this is all that is released.

How many runs there are, which ones, their scores and how long they take has to stay secret.
`accounting/selection.py` has the mathematics.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import durable_files, json_text, validation
from tff_dpftrl.accounting import chosen_run, display, parts
from tff_dpftrl.accounting import selection as selection_lib
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.reports import readme
from tff_dpftrl.runs import (
    earlier_runs,
    joint_runs,
    manifest,
    metrics_log,
    metrics_share,
    reporting,
)
from tff_dpftrl.sweeps import axes as axes_lib
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder as folder_lib
from tff_dpftrl.sweeps import selection_plan
from tff_dpftrl.training import composed, language_config, warm_start

DIVERGED = "outcome.json"
"""Name of the only file of a winner that diverged."""

_FORMAT = 2
_RELEASED = ("model.npz", "vocabulary.json", manifest.NAME)
_RELEASED_LOSS = "noised_loss"
_SAYS_DIVERGED = (
    "The run that was chosen diverged: its weights are not finite, and there is no model. The "
    "choice has spent this epsilon on its users all the same."
)
_MEAN = 10.0  # Default expected number of runs.
_LARGEST = 5.0  # Default largest number of runs, over the expected one.
# Options that take the guarantee of a choice away, and why.
_REFUSED = {
    "deterministic_noise_seed": "all runs would have the same noise, which is known",
    "simulate_report_goal": "the ε of a simulated run protects nobody",
    "stop_at_accuracy": "held-out users would decide when a run ends",
    "max_epsilon": "each run has to be accounted for before it begins",
}


@dataclasses.dataclass(frozen=True)
class Selection:
    """Choice among runs that has been planned, with its δ and the distribution of their number.

    Models are scored by the public text `score_text`, or by `METRICS`. `plan` has ε of the choice,
    and what each run is planned for. `drawn` has the index of the cell of each run.
    """

    score_text: str
    num_runs: selection_lib.NumRuns
    delta: float
    plan: selection_plan.Planned
    drawn: Sequence[int]

    def runs(self, cells: Sequence[cells_lib.Cell]) -> list[cells_lib.Cell]:
        """Returns the runs as cells, each in a folder of its own."""
        return [self._run(number, index, cells[index]) for number, index in enumerate(self.drawn)]

    def costs(self, number: int) -> tuple[parts.Cost, ...]:
        """Returns the planned cost of the weights, and of each other part that a run releases."""
        if not self.plan.run_costs:
            return ()
        return tuple(parts.Cost(**row) for row in self.plan.run_costs[self.drawn[number]])

    def _run(self, number: int, index: int, cell: cells_lib.Cell) -> cells_lib.Cell:
        options: dict[str, Any] = {"delta": self.plan.run_delta}
        if self.plan.run_targets[index] is not None:
            options["target_epsilon"] = self.plan.run_targets[index]
        config = cell.config.changed(**options)
        return cells_lib.Cell({"run": number, **cell.values}, config)


def num_runs(mean: float | None = None, largest: int | None = None) -> selection_lib.NumRuns:
    """Returns the distribution of the number of runs.

    `mean` is the expected number without the limit. Default: 10. `largest` is the limit. Default:
    five times the mean.
    """
    mean = _MEAN if mean is None else mean
    if largest is None:
        largest = math.ceil(_LARGEST * mean) if math.isfinite(mean) else 1
    return selection_lib.NumRuns(mean, largest)


def exists(output: pathlib.Path) -> bool:
    """Returns whether a folder holds a choice among runs."""
    return (output / joint_runs.RECORD).exists()


def refuse(cells: Sequence[cells_lib.Cell], score_text: str) -> None:
    """Refuses cells that one ε cannot cover when one of them is chosen."""
    found = [cell.config.to_dict() for cell in cells]
    for cell, options in zip(cells, found, strict=True):
        for name, why in _reasons(cell.config, options):
            raise validation.UsageError(
                f"The cell {axes_lib.label(cell.values)} has {name}, which does not go with "
                f"--select: {why}, or sweep without --select."
            )
        if score_text == selection_plan.METRICS and not _releases_metrics(options):
            raise validation.UsageError(
                f"The cell {axes_lib.label(cell.values)} releases no metrics within its ε, and "
                "--select metrics scores by them: give --metrics-epsilon, or name a public text."
            )
    first = found[0]
    shared = {"target_epsilon", "delta"}
    shared |= language_config.TextConfig.known()
    for name in sorted(shared):
        for options in found:
            if options[name] != first[name]:
                raise validation.UsageError(
                    f"--select needs the same {name} in all cells, since the statement of the best "
                    f"run has one ε, at one δ, for the users of one text; got "
                    f"{axes_lib.shown(first[name])} and {axes_lib.shown(options[name])}: leave it "
                    "out of --over."
                )


def _releases_metrics(options: Mapping[str, Any]) -> bool:
    share = metrics_share.of(options["budget_shares"])
    return options["metrics_epsilon"] is not None or share is not None


def _reasons(config: Any, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the options of a cell that are refused, and why."""
    found = [
        (name, f"{why}; leave it out")
        for name, why in _REFUSED.items()
        if options.get(name) is not None
    ]
    if options["mechanism"] == "none" or options["noise_multiplier"] == 0.0:
        found.append(("no noise", "the best run would have no guarantee; give each cell noise"))
    if options.get("vocabulary") == "private":
        found.append(
            ("vocabulary 'private'", "ε does not cover its words; take 'dp' or public ones")
        )
    if options["delta"] is None:
        found.append(("no delta", "what the choice costs depends on it; give --delta"))
    if getattr(config, "chooses_median", False) or getattr(config, "splits_budget", False):
        found.append(("no group_size", "each run would look for its own; give --group-size"))
    if options["clip_norm"] is None:
        found.append(("no clip_norm", "each run would look for its own; give --clip-norm"))
    initial = options["initial_weights"]
    if initial is not None and earlier_runs.is_run(warm_start.run_folder(pathlib.Path(initial))):
        found.append(
            (
                "weights of a private run",
                "their ε is not composed with the choice; begin with public weights",
            )
        )
    return found


def open_or_draw(
    output: pathlib.Path,
    definition: Mapping[str, Any],
    cells: Sequence[cells_lib.Cell],
    runs: selection_lib.NumRuns,
    score_text: str,
) -> Selection:
    """Reads the choice in a folder; plans and draws it if there is none.

    The choice is on the disk: it is never drawn again. This process has locked the folder.
    """
    joint_runs.refuse_lost_record(output)
    if score_text != selection_plan.METRICS:
        score_text = composed.absolute_path("data", score_text)
    asked = {
        **definition,
        "axes": [[name, values] for name, values in definition["axes"].items()],  # In their order.
        "score_text": score_text,
        "num_runs": dataclasses.asdict(runs),
        "delta": cells[0].config.to_dict()["delta"],
    }
    if exists(output):
        found = json_text.read_object(output / joint_runs.RECORD, remedy="Restore it.")
        if found.get("format") != _FORMAT:
            raise validation.UsageError(
                f"The choice in {output} was begun by another version of tff-dpftrl: name another "
                "folder."
            )
        differences = [
            name
            for name, value in json_text.parse(json.dumps(asked)).items()
            if found.get(name) != value
        ]
        if differences:
            raise validation.UsageError(
                f"--output {output} holds another choice among runs (other "
                f"{', '.join(differences)}): undo that to go on with it, or name another folder. "
                "Values cannot be added: the runs have been drawn."
            )
        plan = selection_plan.Planned.from_json(found["plan"])
        return Selection(score_text, runs, asked["delta"], plan, found["drawn"])
    plan = selection_plan.plan(cells, runs, score_text)
    if not math.isfinite(plan.epsilon):
        raise validation.UsageError(
            "A cell has too little noise for a finite ε of the choice: raise noise_multiplier, or "
            "give target_epsilon."
        )
    drawn = [secrets.randbelow(len(cells)) for _ in range(runs.draw())]
    content = {"format": _FORMAT, **asked, "plan": plan._asdict(), "drawn": drawn}
    (output / manifest.PRIVATE).mkdir(mode=0o700, exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    durable_files.write(output / joint_runs.RECORD, text.encode(), private=True)
    return Selection(score_text, runs, asked["delta"], plan, drawn)


def release(output: pathlib.Path, chosen: Selection, cells: Sequence[cells_lib.Cell]) -> None:
    """Scores the runs, and releases what may be published of the best one.

    All runs have finished or diverged. What is released is kept first: a second release is a copy
    of the first one, whatever became of the score and the runs.
    """
    winner, kept = output / joint_runs.WINNER, output / manifest.PRIVATE / joint_runs.WINNER
    if not kept.exists():
        if winner.exists():
            raise validation.UsageError(
                f"The choice in {output} was released, but {kept}, which has what was, is missing: "
                "restore it. Another release would not be covered by its ε."
            )
        _keep(kept, chosen, cells)
    if not winner.exists():
        with durable_files.new_folder(winner) as folder:
            shutil.copytree(kept, folder, dirs_exist_ok=True)
    if not (winner / DIVERGED).exists():
        readme.write(winner)  # It names its folder.


def unfinished(output: pathlib.Path, runs: Sequence[cells_lib.Cell]) -> list[cells_lib.Cell]:
    """Returns the runs that have neither finished nor diverged."""
    folders = [folder_lib.cell_folder(output / manifest.PRIVATE, run) for run in runs]
    return [
        run
        for run, folder in zip(runs, folders, strict=True)
        if folder_lib.state(folder) != "finished" and not (folder / manifest.DIVERGED).exists()
    ]


def _keep(kept: pathlib.Path, chosen: Selection, cells: Sequence[cells_lib.Cell]) -> None:
    runs, plan = chosen.runs(cells), chosen.plan
    folder_lib.check_cells(kept.parent, runs)
    folders = [folder_lib.cell_folder(kept.parent, run) for run in runs]
    finished = [folder for folder in folders if not (folder / manifest.DIVERGED).exists()]
    statements = {folder: _statement(folder, plan) for folder in finished}
    selection_plan.check_runs(folders, cells[0].kind, plan, chosen.num_runs)
    scores, score = _scores(chosen, finished, cells[0])
    finite = {
        folder: each for folder, each in zip(finished, scores, strict=True) if math.isfinite(each)
    }
    # Runs are exchangeable: the first one of equal scores is a random one of them.
    best = min(range(len(folders)), key=lambda run: finite.get(folders[run], math.inf))
    if folders[best] not in finished:
        with durable_files.new_folder(kept) as folder:
            durable_files.write(folder / DIVERGED, _diverged(chosen).encode())
        return
    stated = chosen_run.statement(
        statements[folders[best]],
        epsilon=plan.epsilon,
        delta=chosen.delta,
        run_epsilon=plan.run_epsilon,
        profile=plan.profile,
        costs=chosen.costs(best),
        num_runs=chosen.num_runs,
        num_settings=len(cells),
        score=score,
    )
    with durable_files.new_folder(kept) as folder:
        for name in _RELEASED:
            shutil.copyfile(folders[best] / name, folder / name)
        reporting.write_statement(folder, stated)


def _statement(
    folder: pathlib.Path, plan: selection_plan.Planned
) -> statement_lib.PrivacyStatement:
    """Reads the statement of a run; refuses one that promises less than was planned."""
    path = folder / "privacy_statement.json"
    stated = statement_lib.PrivacyStatement.read(path)
    epsilon = math.inf if stated.epsilon is None or stated.is_refuted else stated.epsilon
    if stated.delta != plan.run_delta or epsilon > plan.run_epsilon * selection_plan.SLACK:
        raise validation.UsageError(
            f"The statement of the run in {folder} has ε = {epsilon:.6g} at δ = "
            f"{display.delta(stated.delta, 3)}, and {plan.run_epsilon:.6g} at "
            f"{display.delta(plan.run_delta, 3)} was planned for each run of the choice. Nothing "
            "is released. Begin a new choice in another folder."
        )
    return stated


def _diverged(chosen: Selection) -> str:
    content = {
        "outcome": _SAYS_DIVERGED,
        "epsilon": chosen.plan.epsilon,
        "delta": chosen.delta,
        "selection_expected_runs": chosen.num_runs.mean,
        "selection_largest_number_of_runs": chosen.num_runs.largest,
    }
    return json.dumps(content, indent=2) + "\n"


def _scores(
    chosen: Selection, folders: Sequence[pathlib.Path], cell: cells_lib.Cell
) -> tuple[list[float], str]:
    """Returns the scores of finished runs, the least is the best, and what they are."""
    score_text = chosen.score_text
    if score_text == selection_plan.METRICS:
        scores = [_released_loss(folder, cell) for folder in folders]
        return scores, f"the loss that they release, of the last quarter of the {cell.kind.unit}s"
    request = {
        "folders": [str(folder) for folder in folders],
        "text": score_text,
        "protected": cell.config.text.to_dict(),
    }
    answer = selection_plan.ask("tff_dpftrl.training.public_score", request)
    if answer["digest"] != chosen.plan.score_digest:
        raise validation.UsageError(
            f"The text that scores the runs, {score_text}, is no longer the one that --select was "
            "planned with: restore it."
        )
    name = pathlib.PurePath(score_text).name
    return answer["scores"], f"bits per character of {name}, declared public by the operator"


def _released_loss(folder: pathlib.Path, cell: cells_lib.Cell) -> float:
    known = manifest.read(folder)
    rows = metrics_log.read_rows(folder, cell.kind.length(cell.config))
    stddev = next(
        part["noise_multiplier_of_round"]
        for part in known.derived["others"]
        if part["name"] == parts.METRICS
    )
    values, _ = cell.kind.figures(known).over_last_rounds(rows, stddev)
    loss = values.get(_RELEASED_LOSS)
    return math.nan if loss is None else loss
