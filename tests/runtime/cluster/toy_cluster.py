"""Deployments of toy tasks."""

from __future__ import annotations

from tests.runtime.server import toy_service as toy
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.cluster import deployment as deployment_lib
from tff_dpftrl.runtime.store import sql

TIMES = {"heartbeat_seconds": 0.2, "silence_seconds": 30.0, "lease_seconds": 60.0}


def pace(now, randomness):
    """Devices come back at once."""
    return (0.0, 1.0)


def build(deployed: deployment_lib.Deployment) -> deployment_lib.Parts:
    """The parts of toy tasks that sum integers, as the deployment's options say."""
    times = {**TIMES, **deployed.options.get("times", {})}
    tasks = [toy.served(**options) for options in deployed.options.get("tasks", ({},))]
    served = population.Population(deployed.population, tuple(task.task for task in tasks), **times)
    return deployment_lib.Parts(served, {task.task.name: task for task in tasks}, pace)


def deployment(folder, tasks=({},), times=None, **changes) -> deployment_lib.Deployment:
    """A deployment of a new store in a folder."""
    paths = toy.certificate(folder)
    place = str(folder / "store")
    with sql.SqlStore(place) as store:
        if not store.tasks(toy.POPULATION):
            toy.store_with(*(toy.served(**options) for options in tasks), store=store)
    given = {
        "population": toy.POPULATION,
        "builder": "tests.runtime.cluster.toy_cluster:build",
        "store": place,
        "certificate": str(paths["certificate"]),
        "private_key": str(paths["key"]),
        "options": {"tasks": tasks, "times": times or {}},
    }
    return deployment_lib.Deployment(**{**given, **changes})
