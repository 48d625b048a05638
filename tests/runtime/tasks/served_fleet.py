"""Tasks that are served, over the wire, to a fleet with examples of named tensors."""

from __future__ import annotations

import json
import pathlib
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.runtime.fleet import server_thread
from tests.runtime.plans import small_tasks
from tests.runtime.server import example_service
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.fleet import behaviour, fleet
from tff_dpftrl.runtime.server import server
from tff_dpftrl.runtime.tasks import planned_task, task_folder
from verification import memory_store


def run(
    folder: pathlib.Path,
    tasks: Sequence[planned_task.PlannedTask],
    by_user: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    rounds: int,
) -> memory_store.MemoryStore:
    """Serves tasks of the population "tests" to one device for each user.

    Args:
      folder: Folder for the devices' data and the server's certificate.
      tasks: Tasks whose examples have the same features.
      by_user: Examples by user.
      rounds: Number of rounds of all tasks after which it ends.

    Returns:
      The store, with what was committed.
    """
    data = folder / "devices.jsonl"
    lines = [{"user_id": user, "examples": list(examples)} for user, examples in by_user.items()]
    data.write_text("\n".join(map(json.dumps, lines)))
    store = memory_store.MemoryStore()
    for task in tasks:
        task.add_to(store)
    settings = {
        "population": population.Population(
            "tests",
            tuple(task.served.task for task in tasks),
            heartbeat_seconds=0.5,
            silence_seconds=30.0,
            lease_seconds=60.0,
        ),
        "tasks": {task.name: task.served for task in tasks},
        "store": store,
        "endpoint": example_service.endpoint(folder),
        "pace": lambda now, randomness: (0.3 + 0.3 * randomness.random(), 2.0),
        "observer": example_service.Notes(),
        "randomness": random.Random(1),
    }
    with server_thread.running(lambda: server.Server.of(**settings)) as address:
        devices = fleet.Fleet(
            fleet.ConnectionSettings(
                address,
                (folder / "server.pem").read_bytes(),
                (signing_keys.raw(small_tasks.KEYS[0]),),
            ),
            "tests",
            str(data),
            num_devices=len(by_user),
            rates=behaviour.Rates(drop_outs=0.0, stragglers=0.0),
            start_within_s=0.5,
            usual_wait_s=1.0,
            features=named_tensors.read_features(tasks[0].folder.path / task_folder.EXAMPLES),
        )
        ending = fleet.Ending(rounds=rounds, seconds=120.0)
        fleet.run(devices, ending, stop=threading.Event(), on_session_end=lambda end: None)
    return store
