"""The differences of several results folders: options, promise, participation, accuracy, curves.

It is made of what may be published, like a page of one folder.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.reports import markup, page
from tff_dpftrl.reports import results as results_lib

_NONE = "–"
_NOTHING_TO_COMPARE = {
    "sweep": "is a sweep: name its runs, the folders in its cells/",
    "pretraining": "is pretraining on public text, which promises nothing",
}
_NO_STATEMENT = "has no statement yet: tff-dpftrl report writes it, once a round is committed"
_CURVES = ("epsilon", results_lib.ACCURACY, results_lib.LOSS)


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison of runs.

    Attributes:
      labels: Names of the runs: the ends of their folders' paths by which they differ.
      runs: Facts of the runs.
    """

    labels: Sequence[str]
    runs: Sequence[results_lib.Results]

    @property
    def statements(self) -> list[statement_lib.PrivacyStatement]:
        """Privacy statements of the runs."""
        return [run.statement for run in self.runs if run.statement is not None]

    def options(self) -> dict[str, list[str]]:
        """Returns the options and derived values that differ, one value for each run."""
        flat = [
            page.flat({**run.options, "derived": run.derived, "versions": _version(run)})
            for run in self.runs
        ]
        names = dict.fromkeys(name for values in flat for name in values)
        found = {
            name: [page.shown(values[name]) if name in values else _NONE for values in flat]
            for name in names
        }
        return {name: values for name, values in found.items() if len(set(values)) > 1}

    def facts(self) -> dict[str, list[str]]:
        """Returns promise, participation, accuracy and loss, one text for each run."""
        stated = self.statements
        cached = f"top-1 accuracy{results_lib.WITH_EARLIER_TEXT}, held-out users"
        name = results_lib.MODEL_WITH_EARLIER_TEXT
        seen = "on record or reported by devices"
        held_out = " or ".join(sorted({run.held_out for run in self.runs}))
        with_cache = [
            f"{run.baselines[name]:.2%}" if name in run.baselines else _NONE for run in self.runs
        ]
        return {
            "kind": [page.TITLES[run.kind] for run in self.runs],
            "ε": [_epsilon(one) for one in stated],
            "δ": [display.delta(one.delta) if one.has_guarantee else _NONE for one in stated],
            "for one": [one.unit_of_privacy for one in stated],
            "caveats beside ε": [str(len(one.headline_caveats)) for one in stated],
            "mechanism": [one.mechanism for one in stated],
            "rounds on record": _participation(stated, "num_rounds"),
            "rounds from turn to turn, declared": _participation(stated, "min_sep", declared=True),
            f"rounds from turn to turn, {seen}": _participation(stated, "min_sep"),
            "turns of one, declared": _participation(stated, "max_participations", declared=True),
            f"turns of one, {seen}": _participation(stated, "max_participations"),
            "top-1 accuracy, held-out users": [_last(r, results_lib.ACCURACY) for r in self.runs],
            "best top-1 accuracy of the run": [_best(run) for run in self.runs],
            **({cached: with_cache} if set(with_cache) != {_NONE} else {}),
            f"loss, {held_out}": [_last(run, results_lib.LOSS) for run in self.runs],
        }

    def accuracies(self) -> list[list[str]]:
        """Returns a row for each evaluated round: the round, and the accuracy of each run."""
        curves = [dict(run.series(results_lib.ACCURACY)) for run in self.runs]
        rounds = sorted(set(itertools.chain.from_iterable(curves)))
        return [
            [f"{i:g}", *(f"{curve[i]:.2%}" if i in curve else "" for curve in curves)]
            for i in rounds
        ]

    def warnings(self) -> list[str]:
        """Returns sentences on differences that make the runs hard to compare."""
        stated, told = self.statements, []

        def differ(read: Callable[[statement_lib.PrivacyStatement], object]) -> bool:
            return len({read(one) for one in stated}) > 1

        def each(read: Callable[[int], object]) -> str:
            return ", ".join(f"{read(i)} in {label}" for i, label in enumerate(self.labels))

        if differ(lambda one: one.unit_of_privacy):
            units = each(lambda i: "one " + stated[i].unit_of_privacy)
            told.append(f"Their ε do not compare: they are for {units}.")
        elif differ(lambda one: one.adjacency):
            told.append(
                "Their ε do not compare: neighbouring data sets are defined in different ways, "
                "see each statement."
            )
        private = [one for one in stated if one.has_guarantee]
        if len({one.delta for one in private}) > 1:
            deltas = each(lambda i: display.delta(stated[i].delta))
            told.append(f"Compare ε at one δ only (tff-dpftrl account): δ is {deltas}.")
        if differ(lambda one: one.setting):
            told.append("Other parties are trusted, or with other things: see each statement.")
        if differ(lambda one: one.participation_record):
            records = each(lambda i: stated[i].participation_record)
            told.append(f"Participation or sampling is {records}.")
        without = [
            label for label, one in zip(self.labels, stated, strict=True) if not one.has_guarantee
        ]
        if without:
            told.append(f"There is no guarantee for {', '.join(without)}.")
        told += [
            f"Beside ε of {label} must stand: {' '.join(one.headline_caveats)}"
            for label, one in zip(self.labels, stated, strict=True)
            if one.has_guarantee and one.headline_caveats
        ]
        if len({run.data for run in self.runs}) > 1:
            told.append("Accuracy and loss do not compare: the data have different names.")
        if len({page.UNITS.get(run.kind, "round") for run in self.runs}) > 1:
            units = each(lambda i: f"a {page.UNITS.get(self.runs[i].kind, 'round')}")
            told.append(f"Curves do not compare point by point: one is {units}.")
        return [*told, sentences.CHOICE_AMONG_RUNS]

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison for programs; ε is null without a guarantee."""
        runs = []
        for label, run, stated in zip(self.labels, self.runs, self.statements, strict=True):
            schemas = {
                name: None if seen is None else dataclasses.asdict(seen)
                for name, seen in (("declared", stated.declared), ("observed", stated.observed))
            }
            last = run.evaluations[-1] if run.evaluations else {}
            runs.append(
                {
                    "name": label,
                    "kind": run.kind,
                    "epsilon": stated.epsilon,
                    "delta": stated.delta,
                    "unit_of_privacy": stated.unit_of_privacy,
                    "adjacency": stated.adjacency,
                    "mechanism": stated.mechanism,
                    **schemas,
                    "last_evaluation": {k: v for k, v in last.items() if k != "epsilon"},
                    "curves": {name: run.series(name) for name in _CURVES},
                }
            )
        return {"runs": runs, "options": self.options(), "warnings": self.warnings()}

    def to_html(self) -> str:
        """Returns the comparison as one page, without scripts and without references."""
        head = ["", *self.labels]

        def rows(values: dict[str, list[str]]) -> list[list[str]]:
            return [[markup.text(cell) for cell in (name, *row)] for name, row in values.items()]

        options = self.options()
        curves = {label: run.rows for label, run in zip(self.labels, self.runs, strict=True)}
        units = {page.UNITS.get(run.kind, "round") for run in self.runs}
        sections = [
            ("What does not compare", markup.bullets(map(markup.text, self.warnings()))),
            ("Promise, participation, results", markup.table(head, rows(self.facts()), "Facts")),
            (
                "Options that differ",
                markup.table(head, rows(options), "Options and derived values")
                if options
                else "<p>None.</p>",
            ),
            (
                "Curves",
                page.charts(
                    curves,
                    unit=" or ".join(sorted(units)),
                    is_of_words=all(run.is_of_words for run in self.runs),
                ),
            ),
            ("How it was measured", markup.element("p", markup.text(page.HELD_OUT))),
        ]
        title = f"Comparison of {len(self.runs)} runs"
        return page.document(title, ", ".join(self.labels), sections, is_private=False)


def of(folders: Sequence[pathlib.Path]) -> Comparison:
    """Compares two or more results folders, each of another run."""
    if len(folders) < 2:
        raise validation.UsageError("Name two runs or more: a run has nothing to differ from.")
    known: dict[pathlib.Path, pathlib.Path] = {}
    for folder in folders:
        first = known.setdefault(folder.resolve(), folder)
        if first is not folder:
            raise validation.UsageError(f"{folder} is named twice: name each run once.")
    runs = [results_lib.read(folder) for folder in folders]
    for run in runs:
        says = _NOTHING_TO_COMPARE.get(run.kind)
        if says or run.statement is None:
            raise validation.UsageError(f"{run.folder} {says or _NO_STATEMENT}.")
    return Comparison(_labels([folder.resolve() for folder in folders]), runs)


def _labels(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the shortest ends of paths by which they differ."""
    for length in itertools.count(1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise AssertionError("Paths differ at some length.")


def _version(run: results_lib.Results) -> dict[str, Any]:
    return {name: value for name, value in run.versions.items() if name == "tff_dpftrl"}


def _epsilon(stated: statement_lib.PrivacyStatement) -> str:
    return display.round_up(stated.epsilon) if stated.has_guarantee else "no guarantee"


def _participation(
    stated: Sequence[statement_lib.PrivacyStatement], name: str, *, declared: bool = False
) -> list[str]:
    found = []
    for one in stated:
        seen = one.declared if declared else one.observed
        value = None if seen is None else getattr(seen, name)
        found.append(_NONE if value is None else str(value))
    return found


def _last(run: results_lib.Results, column: str) -> str:
    points = run.series(column)
    if not points:
        return _NONE
    return f"{points[-1][1]:.2%}" if column == results_lib.ACCURACY else f"{points[-1][1]:.4g}"


def _best(run: results_lib.Results) -> str:
    points = run.series(results_lib.ACCURACY)
    return f"{max(value for _, value in points):.2%}" if points else _NONE
