"""Rounds over the network beside those of Flower: round latency and devices a second.

    PYTHONPATH=. python benchmarks/runtime_peers.py --flower PYTHON
        [10x1 50x1 200x1 10x1350000 50x1350000]
        [--clients bare joining own supernodes] [--repetitions 7]

PYTHON is the interpreter of Flower's environment, see benchmarks/peers/README.md. A case is
the number of devices in a round, and of float64 parameters of model and update. Devices do
nothing but answer with an update; the new model is the mean of all updates. All of it is on
this machine, over TLS. Flower has four kinds of clients here:

    bare        its older gRPC server (`start_server`); streams of its protocol on one event
                loop over few connections, as in the load of this package
    joining     the same; each is told to go after a round, and joins anew for the next one
    own         the same server; its own `start_client`, in threads of one process
    supernodes  its deployment runtime, as its commands start it: a process for each client
                and message; only with few clients, 5x1 say, and not unless it is named

Flower's clients stay connected from round to round, but for those that join anew; our devices
open a session for each, as devices do that take part now and then. There are two figures:

    latency    from the choice of a round's devices, which are connected, to the new model
    devices/s  of whole rounds one after the other; with the check-in of ours

Contenders take turns; the processes of the others wait meanwhile. A ratio is the median over
the repetitions of the ratio within one, with least and largest; above 1, ours is better.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import runtime_sessions

from tff_dpftrl.runtime import tls

_PEERS = pathlib.Path(__file__).resolve().parent / "peers"
_FLOWER = {
    "bare": ("flower_rounds.py", "--load=bare"),
    "joining": ("flower_rounds.py", "--load=joining"),
    "own": ("flower_rounds.py", "--load=own"),
    "supernodes": ("flower_supernodes.py",),
}
_OURS = "tff-dpftrl"
_GOAL = 5.0
_SECONDS = 1.0  # About what a contender's turn takes.


@dataclasses.dataclass(frozen=True)
class Turn:
    """What some rounds took.

    Attributes:
      per_second: Devices a second.
      latency: Of a round, in seconds; the median.
      server_us: Processor time of the server for each device.
      peak_mb: The server's memory, at most, so far.
    """

    per_second: float
    latency: float
    server_us: float
    peak_mb: float


class Contender(Protocol):
    """A server and its devices, in processes of their own."""

    def turn(self, count: int) -> Turn:
        """Makes so many rounds."""


class _Ours:
    def __init__(self, pair: runtime_sessions.Pair):
        self._pair = pair

    def turn(self, count: int) -> Turn:
        measured = self._pair.measure("rounds", count)
        return Turn(
            count * self._pair.goal / measured["until_committed"],
            statistics.median(measured["latencies"]),
            measured["server_us"],
            measured["peak_mb"],
        )


class _Flower:
    def __init__(self, process: subprocess.Popen, num_devices: int):
        self._process = process
        self._num_devices = num_devices
        self.facts = self._answer()

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("{"):  # Flower writes there, too.
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} has ended.")

    def turn(self, count: int) -> Turn:
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        answer = self._answer()
        calls = count * self._num_devices
        return Turn(
            calls / answer["seconds"],
            statistics.median(answer["latencies"]),
            answer["cpu_s"] / calls * 1e6,
            answer["peak_mb"],
        )


@contextlib.contextmanager
def _flower(python: str, kind: str, num_devices: int, parameters: int) -> Iterator[_Flower]:
    script, *options = _FLOWER[kind]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as errors:
        certificate, key = pathlib.Path(name, "server.pem"), pathlib.Path(name, "server.key")
        tls.create_self_signed(certificate, key, ["127.0.0.1"])
        process = subprocess.Popen(
            [
                *(python, str(_PEERS / script), *options, f"--clients={num_devices}"),
                *(f"--parameters={parameters}", f"--certificate={certificate}", f"--key={key}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield _Flower(process, num_devices)
        except RuntimeError as error:
            errors.seek(0)
            raise RuntimeError(f"{error}\n{errors.read()[-3000:]}") from None
        finally:
            process.communicate()


def compare(contenders: Mapping[str, Contender], repetitions: int) -> dict[str, list[Turn]]:
    """Turns of the contenders, one after the other, again and again."""
    counts = {}
    for name, contender in contenders.items():
        contender.turn(1)
        latency = contender.turn(1).latency
        counts[name] = max(1, min(50, round(_SECONDS / latency)))
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, contender in contenders.items():
            turns[name].append(contender.turn(counts[name]))
    return turns


def _show(turns: Mapping[str, Sequence[Turn]]) -> None:
    print(f"{'':<22}{'devices/s':>10}{'latency ms':>12}{'server us each':>16}{'its peak MB':>13}")
    for name, rows in turns.items():
        print(
            f"{name:<22}{statistics.median(r.per_second for r in rows):>10.1f}"
            f"{statistics.median(r.latency for r in rows) * 1e3:>12.1f}"
            f"{statistics.median(r.server_us for r in rows):>16.0f}{rows[-1].peak_mb:>13.0f}"
        )
    print(f"{'times as good as':<22}{'devices/s':>16}{'latency':>20}{'goal':>14}")
    for name, rows in turns.items():
        if name == _OURS:
            continue
        both = list(zip(turns[_OURS], rows, strict=True))
        more = [own.per_second / peer.per_second for own, peer in both]
        sooner = [peer.latency / own.latency for own, peer in both]
        is_reached = min(statistics.median(more), statistics.median(sooner)) >= _GOAL
        print(
            f"{name:<22}{_spread(more):>20}{_spread(sooner):>20}{_GOAL:>10g}  "
            f"{'PASS' if is_reached else 'MISS'}",
            flush=True,
        )


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    """Compares all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="DEVICESxPARAMETERS")
    parser.add_argument("--flower", required=True, metavar="PYTHON")
    kinds = list(_FLOWER)
    parser.add_argument("--clients", nargs="+", choices=kinds, default=kinds[:3], help="Flower's")
    parser.add_argument("--repetitions", type=int, default=7)
    given = parser.parse_args()
    cases = given.cases or ["10x1", "50x1", "200x1", "10x1350000", "50x1350000"]
    for case in cases:
        num_devices, parameters = (int(number) for number in case.split("x"))
        with contextlib.ExitStack() as stack:
            pair = stack.enter_context(runtime_sessions.started(num_devices, parameters))
            contenders: dict[str, Contender] = {_OURS: _Ours(pair)}
            for kind in given.clients:
                peer = stack.enter_context(_flower(given.flower, kind, num_devices, parameters))
                contenders[f"Flower, {kind}"] = peer
            print(f"\n{num_devices} devices, {parameters} parameters; {peer.facts}")
            _show(compare(contenders, given.repetitions))


if __name__ == "__main__":
    main()
