"""What more devices need, on paper: from costs that were measured, by formulas that are here.

    PYTHONPATH=. python benchmarks/runtime_planning.py
        [--devices-per-minute 10000 1000000] [--models 100000 1350000 1350000:secure]
        [--group 100] [--round-minutes 2] [--open-seconds 60] [--busy 0.5] [--cost NAME=VALUE ...]

Prints two tables in Markdown, by default those of benchmarks/RUNTIME.md: the costs, with
where they are from, and what a population needs. A device a minute is one that takes part; it
makes a connection of its own, is sent the model, and reports; it has the plan already. Who drops
out is counted as if it did not. A model is its number of weights, ":secure" for secure aggregation.
`--cost` puts in another cost, of your machine or your task: runtime_sessions.py,
runtime_reports.py, store_commits.py and secure_sums.py measure them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence

from tff_dpftrl.runtime.actors import population


def _cost(default: float, text: str) -> float:
    return dataclasses.field(default=default, metadata={"text": text})


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs that were measured; processor time unless it says otherwise."""

    session_ms: float = _cost(0.55, "a session, without its bytes: `runtime_sessions.py empty`")
    token_ms: float = _cost(0.129, "an attestation token verified")
    connection_ms: float = _cost(0.77, "a new connection (TLS): `runtime_sessions.py connections`")
    mb_ms: float = _cost(1.5, "a MB in or out: `runtime_sessions.py model`")
    frames_ms: float = _cost(
        0.02, "a session in frames of a gateway (a design, no code): `runtime_floor.py`"
    )
    session_kb: float = _cost(26.0, "memory of a session that waits: `runtime_sessions.py memory`")
    connection_kb: float = _cost(70.0, "memory of a connection: `runtime_sessions.py connections`")
    report_ms: float = _cost(0.44, "a report added, whatever its size: `runtime_reports.py`")
    report_mb_ms: float = _cost(1.0, "and for each MB of its sum: `runtime_reports.py`")
    group_ms: float = _cost(
        94.0, "a group's sum of 100 devices, 10 % gone: `secure_sums.py costs` (2³²)"
    )
    group_entry_us: float = _cost(0.69, "and for each entry of it: `secure_sums.py costs` (2³²)")
    merge_ms: float = _cost(0.02, "two sums merged: `runtime_reports.py`")
    merge_mb_ms: float = _cost(0.15, "and for each MB of one: `runtime_reports.py`")
    carry_mb_ms: float = _cost(
        1.8, "a MB of a sum received from a worker: `cluster_reports.py --aggregators 64`"
    )
    choose_us: float = _cost(2.6, "a device chosen by the Coordinator: `runtime_reports.py`")
    hand_on_us: float = _cost(1.4, "and handed on by the Master Aggregator: `runtime_reports.py`")
    step_entry_us: float = _cost(0.073, "noise and step, for each weight: `runtime_reports.py`")
    commit_mb_ms: float = _cost(
        14.0, "a commit to SQLite for each MB, not processor time: `store_commits.py`"
    )


@dataclasses.dataclass(frozen=True)
class Population:
    """Who comes, and for what.

    Attributes:
      devices_per_minute: Devices that take part.
      parameters: Weights of the model.
      secure: Whether groups sum their reports securely.
      group: Devices of an Aggregator.
      round_minutes: From one commit to the next.
      open_seconds: That a session lasts: waiting to be chosen, training, reporting.
      busy: Share of a processor that is planned with.
      over_selection: Devices chosen for each report of the goal.
    """

    devices_per_minute: float
    parameters: int
    secure: bool
    group: int = 100
    round_minutes: float = 2.0
    open_seconds: float = 60.0
    busy: float = 0.5
    over_selection: float = 1.3


_DEVICES = (10_000, 1_000_000)
_MODELS = ((100_000, False), (1_350_000, False), (1_350_000, True))
_WEIGHT_BYTES = 4  # Of a model on its way down.
_ENTRY_BYTES = {False: 2, True: 4}  # Of an update on its way up; secure: a word of 2**32.
_SUM_BYTES = 8  # Of an entry of an Aggregator's sum.
_STORED_BYTES = 16  # Of a weight in the store: the model, and the state with BLT noise.
_SECURE_UP = 1.03  # Bytes of a masked vector and the protocol, over those of the vector.
_GROUP = 100  # Devices of the groups whose secure sums were measured.


def rows(who: Population, costs: Costs) -> Iterator[tuple[str, str, float]]:
    """What a population needs.

    Args:
      who: The population.
      costs: What things cost.

    Yields:
      What, its formula, and the number.
    """
    a = who.devices_per_minute / 60
    yield "devices a second", "a = devices a minute / 60", a
    down = who.parameters * _WEIGHT_BYTES / 1e6
    yield "MB down for each", "4 bytes a weight", down
    up = who.parameters * _ENTRY_BYTES[who.secure] / 1e6 * (_SECURE_UP if who.secure else 1.0)
    yield "MB up for each", "2 bytes a weight; secure: 4, times 1.03", up
    yield "Gbit/s down", "a · down · 8 / 1000", a * down * 8e-3
    yield "Gbit/s up", "a · up · 8 / 1000", a * up * 8e-3
    each = costs.session_ms + costs.token_ms + costs.connection_ms + (down + up) * costs.mb_ms
    yield "ms of a Selector for each", "session + token + connection + (down + up) · `mb_ms`", each
    framed = costs.frames_ms + costs.token_ms + (down + up) * costs.mb_ms
    yield "the same behind gateways", "frames + token + (down + up) · `mb_ms`", framed
    selectors = math.ceil(a * each / 1e3 / who.busy)
    yield "Selectors", "a · ms / 1000 / busy; a processor each", selectors
    traffic = a * (down + up) * 8e-3 / selectors
    yield "Gbit/s of one, both ways", "Gbit/s / Selectors", traffic
    sessions = a * who.open_seconds
    yield "open sessions", "a · seconds that one lasts", sessions
    memory = sessions * (costs.session_kb + costs.connection_kb) / 1e6
    yield "GB for them", "sessions · (`session_kb` + `connection_kb`)", memory
    if who.secure:
        each = (costs.group_ms + costs.group_entry_us * who.parameters / 1e3) / _GROUP
    else:
        summed = who.parameters * _SUM_BYTES / 1e6
        each = costs.report_ms + summed * costs.report_mb_ms
    how = (
        "`report_ms` + 8 bytes a weight · `report_mb_ms`; "
        "secure: (`group_ms` + weights · `group_entry_us`) / 100"
    )
    yield "ms of an Aggregator for each", how, each
    processors = math.ceil(a * each / 1e3 / who.busy)
    yield "processors of Aggregators", "a · ms / 1000 / busy", processors
    yield "rounds an hour", "60 / minutes of one", 60 / who.round_minutes
    devices = who.devices_per_minute * who.round_minutes
    yield "goal of a round", "devices a minute · minutes / 1.3", devices / who.over_selection
    aggregators = math.ceil(devices / who.group)
    yield "Aggregators of a round", "its devices / devices of a group", aggregators
    rounds = population.RoundSettings(goal_count=1)
    fan_in, levels = rounds.fan_in(aggregators), rounds.merge_levels(aggregators)
    how = f"fewest with which no actor merges more than {rounds.max_fan_in} sums"
    yield "levels of merges", how, levels
    how = "fewest whose power of the levels is not below Aggregators"
    yield "sums that one actor merges (fan-in)", how, fan_in
    total = who.parameters * _SUM_BYTES / 1e6
    how = "fan-in · 8 bytes a weight"
    yield "MB of sums to the Master Aggregator", how, fan_in * total
    mergers = sum(math.ceil(aggregators / fan_in**level) for level in range(1, levels + 1))
    busiest = fan_in * math.ceil(mergers / processors)
    how = "fan-in · (actors that merge / processors of Aggregators, rounded up) · 8 bytes a weight"
    yield "MB of sums to the busiest worker, at most", how, busiest * total
    merge = (costs.merge_ms + total * (costs.merge_mb_ms + costs.carry_mb_ms)) / 1e3
    how = (
        "sums, levels · fan-in or those to the busiest worker if more, "
        "· (`merge_ms` + MB of one · (`merge_mb_ms` + `carry_mb_ms`))"
    )
    merging = max(levels * fan_in, busiest) * merge
    yield "seconds to merge them", how, merging
    yield "the same without a tree", "Aggregators · the same", aggregators * merge
    ending = who.parameters * costs.step_entry_us / 1e6
    ending += who.parameters * _STORED_BYTES / 1e6 * costs.commit_mb_ms / 1e3
    how = "weights · `step_entry_us` + 16 bytes a weight · `commit_mb_ms`"
    yield "seconds of noise, step and commit", how, ending
    each = (costs.choose_us + costs.hand_on_us) / 1e6
    how = "its devices · (`choose_us` + `hand_on_us`)"
    yield "seconds to choose devices and hand them on", how, devices * each
    share = (merging + ending + devices * each) / (60 * who.round_minutes)
    yield "share of a round's time", "(merging + noise, step, commit + choosing) / round", share
    how = "a tenth of 60 s / seconds for one device"
    yield "devices a minute at which choosing takes a tenth", how, 6 / each


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}" if value < 1e4 else f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.2g}"


def to_markdown(populations: Sequence[Population], costs: Costs) -> str:
    """Both tables.

    Args:
      populations: One a column.
      costs: What things cost.

    Returns:
      Lines of Markdown.
    """
    lines = ["| cost | | what, and what measures it |", "|---|---|---|"]
    for field in dataclasses.fields(costs):
        value = getattr(costs, field.name)
        lines.append(f"| `{field.name}` | {value:g} | {field.metadata['text']} |")
    heads = [
        f"{who.devices_per_minute:,.0f}/min, {who.parameters:,}" + (" secure" if who.secure else "")
        for who in populations
    ]
    lines += ["", f"| | {' | '.join(heads)} | how |", "|---" * (len(heads) + 2) + "|"]
    columns = [list(rows(who, costs)) for who in populations]
    for cells in zip(*columns, strict=True):
        name, formula, _ = cells[0]
        values = " | ".join(_number(value) for _, _, value in cells)
        lines.append(f"| {name} | {values} | {formula} |")
    return "\n".join(lines) + "\n"


def _model(text: str) -> tuple[int, bool]:
    weights, colon, kind = text.partition(":")
    if colon and kind != "secure":
        raise argparse.ArgumentTypeError(f"{text!r} must be like 100000 or 100000:secure")
    return int(weights), bool(colon)


def _named_cost(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in {field.name for field in dataclasses.fields(Costs)}:
        raise argparse.ArgumentTypeError(f"there is no cost {name!r}: name one of the first table")
    return name, float(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices-per-minute", type=float, nargs="+", default=_DEVICES)
    parser.add_argument("--models", type=_model, nargs="+", default=_MODELS)
    parser.add_argument("--group", type=int, default=_GROUP, help="devices of an Aggregator")
    parser.add_argument("--round-minutes", type=float, default=2.0)
    parser.add_argument("--open-seconds", type=float, default=60.0, help="that a session lasts")
    parser.add_argument("--busy", type=float, default=0.5, help="share of a processor")
    parser.add_argument("--cost", type=_named_cost, nargs="+", default=[], metavar="NAME=VALUE")
    given = parser.parse_args(argv)
    populations = [
        Population(
            devices,
            parameters,
            secure,
            group=given.group,
            round_minutes=given.round_minutes,
            open_seconds=given.open_seconds,
            busy=given.busy,
        )
        for devices in given.devices_per_minute
        for parameters, secure in given.models
    ]
    print(to_markdown(populations, Costs(**dict(given.cost))), end="")


if __name__ == "__main__":
    main()
