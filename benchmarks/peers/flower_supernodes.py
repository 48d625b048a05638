"""Rounds of Flower's deployment runtime, for `benchmarks/runtime_peers.py` (see README.md).

    python flower_supernodes.py --clients 5 --parameters 1 --certificate server.pem \
        --key server.key

Starts a SuperLink and a SuperNode for each client, as their commands do by default: a process
for each, and another one for every message that a client answers. TLS is between SuperNodes
and SuperLink. What is written and read is as in `flower_rounds.py`; each line is a run of an
app, whose start is not counted. Processor time and memory are the SuperLink's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import flwr

_BIN = pathlib.Path(sys.executable).parent
_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "empty"
version = "1.0.0"
description = "Rounds without training."
license = "Apache-2.0"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "measured"

[tool.flwr.app.components]
serverapp = "empty.server:app"
clientapp = "empty.client:app"

[tool.flwr.app.config]
rounds = 1
clients = 2
parameters = 1
output = ""
"""
_CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    update = ArrayRecord([np.full(context.run_config["parameters"], 1e-3)])
    content = {"arrays": update, "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(content), reply_to=message)
"""
_SERVER = """
import json
import os
import time

import flwr

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
begins, ends = [], []


class Timed(FedAvg):
    def configure_train(self, *args, **kwargs):
        begins.append(time.perf_counter())
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, *args, **kwargs):
        result = super().aggregate_train(*args, **kwargs)
        ends.append(time.perf_counter())
        return result


@app.main()
def main(grid, context):
    config = context.run_config
    strategy = Timed(
        fraction_evaluate=0.0,
        min_train_nodes=config["clients"],
        min_available_nodes=config["clients"],
    )
    model = ArrayRecord([np.zeros(config["parameters"])])
    result = strategy.start(grid, model, num_rounds=config["rounds"])
    np.testing.assert_allclose(result.arrays.to_numpy_ndarrays()[0], 1e-3)
    with open(config["output"] + ".part", "w") as file:
        latencies = [end - begin for begin, end in zip(begins, ends, strict=True)]
        json.dump({"seconds": ends[-1] - begins[0], "latencies": latencies}, file)
    os.replace(config["output"] + ".part", config["output"])
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _answer(facts: dict) -> None:
    print(json.dumps(facts), flush=True)


def _cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> float:
    status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024


class _Deployment:
    """A SuperLink and its SuperNodes."""

    def __init__(self, given: argparse.Namespace, folder: pathlib.Path):
        self._given = given
        self._folder = folder
        self._processes: list[subprocess.Popen] = []
        self._environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "app" / "empty").mkdir(parents=True)
        (folder / "app" / "pyproject.toml").write_text(_PROJECT)
        (folder / "app" / "empty" / "__init__.py").write_text("")
        (folder / "app" / "empty" / "client.py").write_text(_CLIENT)
        (folder / "app" / "empty" / "server.py").write_text(_SERVER)
        (folder / "home").mkdir()
        self._address = f"127.0.0.1:{_free_port()}"
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{self._address}"\n'
            f'root-certificates = "{given.certificate}"\n'
        )

    def start(self) -> None:
        """Starts all; the first run waits for SuperNodes that are not connected yet."""
        given = self._given
        self._superlink = self._run(
            "flower-superlink",
            "--disable-runtime-dependency-installation",
            f"--port={self._address.rpartition(':')[2]}",
            f"--ssl-ca-certfile={given.certificate}",
            f"--ssl-certfile={given.certificate}",
            f"--ssl-keyfile={given.key}",
        )
        host, port = self._address.split(":")
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((host, int(port))).close()
                break
            time.sleep(0.1)
        for _ in range(given.clients):
            self._run(
                "flower-supernode",
                f"--superlink={self._address}",
                f"--root-certificates={given.certificate}",
                f"--port={_free_port()}",
            )

    def _run(self, command: str, *options: str) -> int:
        process = subprocess.Popen(
            [_BIN / command, *options],
            env=self._environment,
            stdout=sys.stderr,
        )
        self._processes.append(process)
        return process.pid

    def run_app(self, count: int) -> dict:
        """Makes so many rounds."""
        output = self._folder / "rounds.json"
        cpu = _cpu_seconds(self._superlink)
        config = {"rounds": count, "clients": self._given.clients}
        config |= {"parameters": self._given.parameters, "output": f'"{output}"'}
        subprocess.run(
            [_BIN / "flwr", "run", self._folder / "app", "here", "--run-config"]
            + [" ".join(f"{name}={value}" for name, value in config.items())],
            env=self._environment,
            check=True,
            stdout=sys.stderr,
        )
        while not output.exists():
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError("A process of the deployment has ended.")
            time.sleep(0.1)
        answer = json.loads(output.read_text())
        output.unlink()
        cpu = _cpu_seconds(self._superlink) - cpu
        return {**answer, "cpu_s": cpu, "peak_mb": _peak_mb(self._superlink)}

    def close(self) -> None:
        """Ends all; what they have started sees it within a second, and ends, too."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


def main() -> None:
    """Serves rounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True, help="of float64")
    parser.add_argument("--certificate", required=True, help="also the root's")
    parser.add_argument("--key", required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        deployment = _Deployment(given, pathlib.Path(name))
        with contextlib.closing(deployment) as started:
            started.start()
            _answer({"flwr": flwr.__version__})
            for line in sys.stdin:
                _answer(started.run_app(int(line)))


if __name__ == "__main__":
    main()
