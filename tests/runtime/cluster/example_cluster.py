"""Deployments of example tasks."""

from __future__ import annotations

import dataclasses

from tests.runtime.server import example_secure_task
from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.cluster import deployment as deployment_lib
from tff_dpftrl.runtime.server import served_population
from tff_dpftrl.runtime.store import sql

TIMES = {"heartbeat_seconds": 0.2, "silence_seconds": 30.0, "lease_seconds": 60.0}


def pace(now, randomness):
    """Devices come back at once."""
    return (0.0, 1.0)


def build(deployed: deployment_lib.ClusterDeployment) -> deployment_lib.Parts:
    """Builds the parts of example tasks that sum integers, from the options of the deployment."""
    times = {**TIMES, **deployed.options["times"]}
    tasks = _served(deployed.options)
    digest = deployed.options.get("digest", "")
    tasks = [dataclasses.replace(task, digest=digest) for task in tasks]
    members = tuple(task.task for task in tasks)
    by_name = {task.task.name: task for task in tasks}
    return deployment_lib.Parts(
        [
            served_population.ServedPopulation(
                population.Population(name, members, **times), by_name, pace
            )
            for name in deployed.populations
        ]
    )


def _served(options):
    make = example_secure_task.served if options["secure"] else example.served
    return [make(**of_task) for of_task in options["tasks"]]


def secure_deployment(folder, **changes) -> deployment_lib.ClusterDeployment:
    """A deployment of a task that sums groups of three devices and more securely."""
    task = {"goal_count": 6, "devices_per_aggregator": 3, "step_timeout": 5.0}
    return deployment(folder, (task,), secure=True, **changes)


def deployment(
    folder, tasks=({},), times=None, secure=False, **changes
) -> deployment_lib.ClusterDeployment:
    """A deployment of a store in a folder, which is made if there is none."""
    paths = example.certificate(folder)
    place = str(folder / "store")
    options = {"tasks": tasks, "times": times or {}, "secure": secure}
    with sql.SqlStore(place) as store:
        for name in changes.get("populations", (example.POPULATION,)):
            if not store.tasks(name):
                example.store_with(*_served(options), store=store, population=name)
    given = {
        "populations": (example.POPULATION,),
        "builder": "tests.runtime.cluster.example_cluster:build",
        "store": place,
        "certificate": str(paths["certificate"]),
        "private_key": str(paths["key"]),
        "options": options,
    }
    return deployment_lib.ClusterDeployment(**{**given, **changes})
