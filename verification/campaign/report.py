"""A campaign's report, as Markdown and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from typing import Any

from verification.campaign import checks, faults, supervisor


def as_json(
    engine: str, left: supervisor.Campaign, verdict: checks.Verdict, *, seconds: float
) -> dict[str, Any]:
    """Returns the whole report, for programs.

    Args:
      engine: What ran the actors.
      left: The campaign.
      verdict: What came out.
      seconds: How long it took.

    Returns:
      What JSON can hold.
    """
    struck = [outcome for outcome in left.outcomes if outcome.has_struck]
    return {
        "engine": engine,
        "seed": left.seed,
        "faults": len(struck),
        "not_come": [one.fault.number for one in left.outcomes if not one.has_struck],
        "seconds": round(seconds, 1),
        "bound_seconds": left.bound,
        "hostile": {str(number): kind.value for number, kind in left.hostile.items()},
        "released": verdict.num_released,
        "skipped": verdict.num_skipped,
        "progress": _progress(struck),
        "laws": {
            law.name: {
                "law": law.value,
                "looked_at": verdict.looked_at[law],
                "broken": [what for broken, what in verdict.broken if broken is law],
            }
            for law in checks.Law
        },
        "outcomes": [
            {
                **dataclasses.asdict(one.fault),
                "kind": one.fault.kind.value,
                "struck": one.has_struck,
                "progress": one.progress,
                "pieces_looked_for": one.looked_for,
            }
            for one in left.outcomes
        ],
    }


def _part(point: str) -> str:
    """Returns the name that a point is counted under: who, or the moment around a commit."""
    if point == faults.SOME_MOMENT or point.startswith(("Store", "ServerStep", "Secure")):
        return point.removesuffix(": before").removesuffix(": after") if "Sec" in point else point
    return point.partition(":")[0]


def _progress(struck: list[supervisor.Outcome]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    without: collections.Counter[tuple[str, str]] = collections.Counter()
    for one in struck:
        key = one.fault.kind.value, _part(one.fault.point)
        found[key]  # noqa: B018  A row of its own, whatever comes.
        if one.progress is None:
            without[key] += 1
        else:
            found[key].append(one.progress)
    return [
        {
            "kind": kind,
            "where": where,
            "struck": len(seconds) + without[kind, where],
            "median_s": round(statistics.median(seconds), 2) if seconds else None,
            "max_s": round(max(seconds), 2) if seconds else None,
            "without_progress": without[kind, where],
        }
        for (kind, where), seconds in sorted(found.items())
    ]


def as_markdown(told: dict[str, Any]) -> str:
    """Returns the whole report, for people.

    Args:
      told: What `as_json` returned.

    Returns:
      Markdown.
    """
    rows = told["progress"]
    text = [
        f"# {told['faults']} faults on the engine {told['engine']}",
        "",
        f"Numbers from {told['seed']} on; {len(told['not_come'])} faults did not come to their "
        f"point. A round must be released {told['bound_seconds']:.0f} seconds after each fault. "
        f"It took {told['seconds'] / 60:.0f} minutes; {told['released']} rounds were released, and "
        f"{told['skipped']} skipped.",
        *(f"Device {number} is hostile: it {kind}." for number, kind in told["hostile"].items()),
        "",
        "| law | held against | broken |",
        "|---|---|---|",
    ]
    for law in told["laws"].values():
        text.append(f"| {law['law']} | {law['looked_at']} | {len(law['broken'])} |")
    text += ["", "| fault | struck | median s | max s |", "|---|---|---|---|"]
    by_kind = collections.defaultdict(list)
    for one in told["outcomes"]:
        if one["struck"]:
            by_kind[one["kind"]].append(one["progress"])
    for kind, seconds in by_kind.items():
        known = [one for one in seconds if one is not None] or [float("nan")]
        text.append(
            f"| {kind} | {len(seconds)} | {statistics.median(known):.1f} | {max(known):.1f} |"
        )
    text += ["", "| fault | where | struck | median s | max s |", "|---|---|---|---|---|"]
    for row in rows:
        median = "–" if row["median_s"] is None else f"{row['median_s']:.1f}"
        longest = "–" if row["max_s"] is None else f"{row['max_s']:.1f}"
        text.append(f"| {row['kind']} | {row['where']} | {row['struck']} | {median} | {longest} |")
    broken = [f"- {law['law']}: {what}" for law in told["laws"].values() for what in law["broken"]]
    if broken:
        text += ["", "## Broken", "", *broken]
    return "\n".join(text) + "\n"
