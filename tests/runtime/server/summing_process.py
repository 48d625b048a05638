"""A server in a process of its own, whose memory a test looks into.

    python -m tests.runtime.server.summing_process FOLDER secure|plain NUMBER-OF-DEVICES SIZE

Prints its address, serves until its input ends, and keeps its store in the folder.
"""

from __future__ import annotations

import asyncio
import logging
import pathlib
import sys

import numpy as np

from tests.runtime.server import example_secure_task
from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.server import served_task
from tff_dpftrl.runtime.store import sql


class PlainSum(example_secure_task.VectorSum):
    """Sums the same vectors in the clear."""

    def accumulate(self, total, payload):
        return [total[0] + 1, *np.add(total[1:], np.frombuffer(payload.update, "<u2")).tolist()]


async def serve(folder: pathlib.Path, mode: str, num_devices: int, size: int) -> None:
    """Serves one population until standard input ends."""
    served = example_secure_task.served(num_devices, size=size, step_timeout=30.0)
    if mode == "plain":
        task = served.task
        plain = example_secure_task.population.Task(
            task.name, task.rounds, PlainSum(size), example_secure_task.Keep()
        )
        served = served_task.ServedTask(plain, served.plan_for, served.largest_report_bytes)
    store = example.store_with(served, store=sql.SqlStore(folder / "store"))
    async with example.running(folder, [served], store) as server:
        print(server.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG)
    asyncio.run(serve(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
