"""A server of the campaign, in a process of its own.

    python -m verification.campaign.server_process FOLDER NAME
        [--actors MODULE:CLASS] [--store MODULE:CLASS]

It says "ready", waits for a line, serves, and ends with its input. What its observer hears it
writes to `events/NAME.jsonl`, a line an event.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import logging
import os
import pathlib
import sys
import time

from typing_extensions import override

from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import factory
from tff_dpftrl.runtime.protocol import attestation
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.store import sql
from verification.campaign import events as events_lib
from verification.campaign import fault_injection, stage, tiny_tasks


def _named(text: str) -> type:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


async def _serve(
    place: stage.Stage,
    events: events_lib.Events,
    actor_factory: type[factory.ActorFactory],
    store_type: type,
) -> None:
    trigger = fault_injection.Trigger(place.folder)
    step = fault_injection.ArmedStep(tiny_tasks.NoisyStep(), trigger)
    served = [
        dataclasses.replace(one, observer=events)
        for one in tiny_tasks.served_populations(place.populations, step)
    ]
    issuer = signing_keys.load_public(place.server_folder.issuer_public)
    fault_injection.watch_transactions(trigger)

    class ArmedServer(server.Server):
        @override
        def _actor_factory(self, *args, **kwargs) -> factory.ActorFactory:
            return fault_injection.ArmedFactory(trigger, actor_factory, *args, **kwargs)

    with store_type(place.store) as store:
        made = ArmedServer(
            served,
            store,
            endpoint=server.Endpoint(
                place.server_folder.certificate,
                place.server_folder.private_key,
                attestation=attestation.SignedTokens([issuer], clock=time.time),
                limits=tiny_tasks.LIMITS,
            ),
        )
        await made.start()
        events.write("serves", address=made.address)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await made.stop()


def main() -> int:
    """Runs a server; returns 1 if it cannot lead."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("name")
    parser.add_argument("--actors", type=_named, default=factory.ActorFactory)
    parser.add_argument("--store", type=_named, default=sql.SqlStore)
    given = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG)
    place = stage.Stage(given.folder)
    events = events_lib.Events(place.events / f"{given.name}.jsonl")
    os.write(1, b"ready\n")
    if not sys.stdin.readline():
        return 0
    try:
        asyncio.run(_serve(place, events, given.actors, given.store))
    except server.ServerError as error:
        events.write("refused", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
