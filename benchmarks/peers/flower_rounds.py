"""Rounds of Flower between processes, for `benchmarks/runtime_peers.py` (see README.md).

    python flower_rounds.py --clients 50 --parameters 1 --certificate server.pem \
        --key server.key --load bare [--channels 4]

The server is Flower's `start_server` with its own `FedAvg`, in this process; the clients are
in a second one. `--load` says what they are: "own", Flower's `start_client`, a thread for
each; or "bare", streams of Flower's protocol on one event loop, over few connections, which
cost less. They are connected before the first round, and stay so; with "joining", the bare
ones are told to go after each round, as Flower's server tells them at the end, and join anew
for the next one.

One line of JSON says when all of them are connected. Then each line on standard input is a
number of rounds to make, and is answered by one line of JSON: the seconds of each round,
from the choice of its clients to the new model, and of all of them together.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading
import time

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import flwr
import grpc
import numpy as np
from flwr.client import Client, start_client
from flwr.common import (
    Code,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.proto import transport_pb2
from flwr.server import Server, ServerConfig, SimpleClientManager, start_server
from flwr.server.history import History
from flwr.server.strategy import FedAvg

_JOIN = "/flwr.proto.FlowerService/Join"
_VALUE = 1e-3  # Of every parameter in a client's answer, hence in a round's result.
_MOST_STREAMS = 1000  # At a time, in Flower's server; further ones are refused.
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _answer(facts: dict) -> None:
    print(json.dumps(facts), flush=True)


def _usage() -> tuple[float, float]:
    """Processor seconds and peak megabytes of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


class _Rounds(Server):
    """Makes Flower's rounds when a line says so; leaves evaluation and history out."""

    def __init__(self, num_clients: int, strategy: FedAvg, *, all_go: bool):
        super().__init__(client_manager=SimpleClientManager(), strategy=strategy)
        self._num_clients = num_clients
        self._all_go = all_go

    def fit(self, num_rounds, timeout):
        """Instead of so many rounds, those that are asked for."""
        del num_rounds
        self.parameters = self._get_initial_parameters(server_round=0, timeout=timeout)
        self.client_manager().wait_for(self._num_clients)
        _answer({"flwr": flwr.__version__, "grpcio": grpc.__version__})
        index = 0
        for line in sys.stdin:
            latencies = []
            (cpu, _), begin = _usage(), time.perf_counter()
            for _ in range(int(line)):
                index += 1
                begin_round = time.perf_counter()
                parameters, _, (results, failures) = self.fit_round(index, timeout)
                latencies.append(time.perf_counter() - begin_round)
                if failures or len(results) != self._num_clients:
                    raise RuntimeError(f"{len(results)} clients answered, of {self._num_clients}")
                self.parameters = parameters
                if self._all_go:
                    self._send_all_away(timeout)
            seconds, (cpu_after, peak_mb) = time.perf_counter() - begin, _usage()
            for array in parameters_to_ndarrays(self.parameters):
                np.testing.assert_allclose(array, _VALUE)
            answer = {"seconds": seconds, "latencies": latencies, "cpu_s": cpu_after - cpu}
            _answer({**answer, "peak_mb": peak_mb})
        return History(), 0.0

    def _send_all_away(self, timeout) -> None:
        members = self.client_manager().all()
        going = list(members)
        self.disconnect_all_clients(timeout)
        while any(client in members for client in going):
            time.sleep(0.0005)
        self.client_manager().wait_for(self._num_clients)


def _parameters(count: int, value: float):
    return ndarrays_to_parameters([np.full(count, value)])


def _serve(given: argparse.Namespace) -> None:
    with socket.socket() as free:  # Flower does not tell which port it has found.
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    certificate, key = (pathlib.Path(f).read_bytes() for f in (given.certificate, given.key))
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=given.clients,
        min_available_clients=given.clients,
        initial_parameters=_parameters(given.parameters, 0.0),
    )
    server = _Rounds(given.clients, strategy, all_go=given.load == "joining")
    clients = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], f"--address={address}"], stdin=subprocess.DEVNULL
    )
    try:
        start_server(
            server_address=address,
            server=server,
            config=ServerConfig(num_rounds=1),
            certificates=(certificate, certificate, key),
        )
    finally:
        clients.terminate()
        clients.wait()


class _Null(Client):
    """Answers with the same update, whatever the model is."""

    def __init__(self, tensors: list[bytes], tensor_type: str):
        self._tensors = tensors
        self._type = tensor_type

    def fit(self, ins):
        """Nothing is trained."""
        del ins
        # Flower empties the list.
        answer = Parameters(list(self._tensors), self._type)
        return FitRes(Status(Code.OK, ""), answer, 1, {})


def _run_clients(given: argparse.Namespace) -> None:
    """Flower's own clients."""
    update = _parameters(given.parameters, _VALUE)
    certificate = pathlib.Path(given.certificate).read_bytes()

    def run() -> None:
        client = _Null(update.tensors, update.tensor_type)
        start_client(server_address=given.address, client=client, root_certificates=certificate)

    threads = [threading.Thread(target=run) for _ in range(given.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _run_bare(given: argparse.Namespace) -> None:
    """Streams that speak Flower's protocol."""
    credentials = grpc.ssl_channel_credentials(pathlib.Path(given.certificate).read_bytes())
    channels = [
        grpc.aio.secure_channel(given.address, credentials, [*_UNLIMITED, ("number", i)])
        for i in range(given.channels)
    ]
    tensors = _parameters(given.parameters, _VALUE)
    fit = transport_pb2.ClientMessage()
    fit.fit_res.status.code = transport_pb2.Code.OK
    fit.fit_res.num_examples = 1
    fit.fit_res.parameters.tensors.extend(tensors.tensors)
    fit.fit_res.parameters.tensor_type = tensors.tensor_type
    goodbye = transport_pb2.ClientMessage()
    goodbye.disconnect_res.reason = transport_pb2.Reason.ACK
    answers = {"fit_ins": fit.SerializeToString(), "reconnect_ins": goodbye.SerializeToString()}

    async def run(channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream(_JOIN)(wait_for_ready=True)
        while (raw := await call.read()) is not grpc.aio.EOF:
            message = transport_pb2.ServerMessage.FromString(raw)
            await call.write(answers[message.WhichOneof("msg")])
            if given.load == "joining" and message.HasField("reconnect_ins"):
                call.cancel()
                call = channel.stream_stream(_JOIN)(wait_for_ready=True)

    gc.freeze()  # As the load of ours.
    await asyncio.gather(*(run(channels[i % len(channels)]) for i in range(given.clients)))


def main() -> None:
    """Serves, or is the clients."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True, help="of float64")
    parser.add_argument("--certificate", required=True, help="also the root's")
    parser.add_argument("--key", required=True)
    parser.add_argument("--load", choices=["bare", "joining", "own"], required=True)
    parser.add_argument("--channels", type=int, default=4, help="connections of bare clients")
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)  # Of a started server.
    given = parser.parse_args()
    most = _MOST_STREAMS // 2 if given.load == "joining" else _MOST_STREAMS
    if given.clients > most:
        parser.error(f"--clients is {given.clients}: Flower's server takes {most}, at most.")
    logging.getLogger("flwr").setLevel(logging.ERROR)  # A line for every message takes time.
    if not given.address:
        _serve(given)
    elif given.load == "own":
        _run_clients(given)
    else:
        asyncio.run(_run_bare(given))


if __name__ == "__main__":
    main()
