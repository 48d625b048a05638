"""Kills, stops and cuts off parts of a server, and checks what must hold all the same.

    PYTHONPATH=. python benchmarks/fault_campaign.py --engine asyncio|ray --faults 500 --seed 0
        [--store sqlite|postgresql] [--hostile NUMBER] [--populations 1|2]
        [--report FILE] [--folder FOLDER] [--only NUMBER] [--minutes MINUTES]

Real servers in processes of their own, over gRPC with TLS, a store on disk, and devices that
speak the real protocol. Every fault follows from its number: `--seed` is the first one's, and
`--only` tries one again, as far as processes can be repeated. `--hostile` has as many of the
devices be hostile, in ways that follow from the seed. With `--populations 2` the two tasks are of a
population each, in one server, and all devices are in both. `--store postgresql` starts a PostgreSQL of
its own, which ends with the campaign. Ends with 1 if a law was broken.
`--report` writes FILE as Markdown, and the same with the ending .json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

from tests.runtime.store import postgresql
from verification.campaign import checks, engines, report, servers, stage, supervisor, tiny_tasks


def _servers(engine: str, place: stage.Stage) -> tuple[engines.Engines, dict[str, Any]]:
    """What runs the server, and what `supervisor.run` is to know of it."""
    if engine == "asyncio":
        return servers.Servers(place), {}
    from verification.campaign import ray_servers

    options = {"start_seconds": ray_servers.START_SECONDS, "has_nodes": True}
    return ray_servers.RayServers(place), options


def main() -> int:
    """Runs a campaign; returns 1 if a law was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("asyncio", "ray"), default="asyncio")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument(
        "--hostile",
        type=int,
        choices=range(tiny_tasks.NUM_DEVICES + 1),
        default=0,
        metavar="NUMBER",
        help=f"number of hostile devices, of {tiny_tasks.NUM_DEVICES}; 0 if not given",
    )
    parser.add_argument("--populations", type=int, choices=(1, 2), default=1)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the one fault to try")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most, about")
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, help="new folder; a temporary one if none")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        folder = given.folder or pathlib.Path(temporary) / "campaign"
        begin = time.monotonic()
        place = stage.Stage(folder)
        url, database = "", None
        if given.store == "postgresql":
            database = postgresql.Server(postgresql.programs(), "fsync=off")
            stack.callback(database.stop)
            url = database.new_database()
        both = (tiny_tasks.ONE_POPULATION, tiny_tasks.TWO_POPULATIONS)
        place.make(given.seed, url, both[given.populations - 1])
        runs, options = _servers(given.engine, place)
        left = asyncio.run(
            supervisor.run(
                place,
                runs,
                num_faults=given.faults if given.only is None else 1,
                seed=given.seed,
                numbers=None if given.only is None else [given.only],
                seconds=60 * given.minutes,
                num_hostile=given.hostile,
                **options,
                progress=lambda line: print(line, flush=True),
            )
        )
        if database:  # So that devices' vectors are looked for in its files.
            database.copy_files(url, folder / "postgresql")
        verdict = checks.judge(checks.collect(left))
        told = report.as_json(
            f"{given.engine} with {given.store}"
            + (", two populations" if given.populations == 2 else ""),
            left,
            verdict,
            seconds=time.monotonic() - begin,
        )
        if given.report is not None:
            given.report.write_text(report.as_markdown(told))
            given.report.with_suffix(".json").write_text(json.dumps(told, indent=1))
        print("\n".join(checks.lines_of(verdict)))
    return 1 if verdict.broken else 0


if __name__ == "__main__":
    sys.exit(main())
