"""Rounds on TFF's own workers, which may run on other machines.

The server's part of a round stays with this process and its own worker: the state, with
the noise's seed and buffers, is sent nowhere, and noise is drawn once. A worker receives
what clients receive in federated learning, the model, and the data of its share of the
clients; it returns the sum of their updates, as yet without noise.

The shares of a round are as many as there are addresses, whoever is there to run them,
and are added in a fixed order: results do not depend on which workers are alive.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow_federated as tff

from tff_dpftrl.execution import (
    client_part,
    contexts,
    remote_worker,
    shares,
    split_round,
    worker_addresses,
)


@contextlib.contextmanager
def remote_workers(
    addresses: Sequence[str],
    *,
    secure_sums: bool = False,
    trust_network: bool = False,
    patience_seconds: float = 60.0,
    share_seconds: float = 3600.0,
) -> Iterator[tff.framework.SyncContext]:
    """Runs the clients of every round on workers of TFF, as `tff-dpftrl worker` starts them.

    What is distributed is a process's `next`, from a state at the server and data at the
    clients to a new state and other results at the server. Every other computation runs
    in this machine's own worker, as in `local`.

    A share of a round whose worker is lost is given to another, and a worker that comes
    back is used again. Warnings say so.

    Args:
      addresses: "host:port" of each worker.
      secure_sums: Whether to compute secure sums too, in the clear, as
        `secure_sum_simulation` does.
      trust_network: Allows addresses of other machines. Models, clients' data and sums
        of updates without noise travel without encryption or authentication.
      patience_seconds: For how long no worker may answer before a round is given up.
      share_seconds: How long one step of a share of a round may take before its worker
        counts as lost.

    Yields:
      TFF's context. Rounds raise `NoWorkersError`, a `ConnectionError`, when they are
      given up; the state that they began with is as good as before.

    Raises:
      ValueError: If there are no addresses, or one is malformed, occurs twice, or is
        not a loopback address and the network is not trusted.
      NoWorkersError: If no worker answers.
    """
    worker_addresses.check(addresses, trust_network=trust_network)
    with contextlib.ExitStack() as stack:
        workers = [remote_worker.RemoteWorker(address, share_seconds) for address in addresses]
        for worker in workers:
            stack.callback(worker.close)
        _connect_some(workers)
        context = _RemoteContext(workers, secure_sums, patience_seconds)
        yield stack.enter_context(contexts.entered(context))


def _connect_some(workers: Sequence[remote_worker.RemoteWorker]) -> None:
    """Waits until every worker answers or is known not to, and warns of those that do not."""
    threads = [threading.Thread(target=worker.connect, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    silent = [worker.address for worker in workers if not worker.is_connected]
    if len(silent) == len(workers):
        raise client_part.NoWorkersError(
            f"No worker answers at {', '.join(silent)}: start them with 'tff-dpftrl worker'"
        )
    for address in silent:
        warnings.warn(
            f"The worker at {address} does not answer; it is used once it does.", stacklevel=4
        )


class _RemoteContext(tff.framework.SyncContext):
    """Runs rounds on workers, everything else here."""

    def __init__(
        self,
        workers: Sequence[remote_worker.RemoteWorker],
        secure_sums: bool,
        patience_seconds: float,
    ):
        self._workers = workers
        self._secure_sums = secure_sums
        self._patience_seconds = patience_seconds
        self._here = (
            tff.backends.test.create_sync_test_cpp_execution_context()
            if secure_sums
            else tff.backends.native.create_sync_local_cpp_execution_context()
        )
        self._rounds: dict[Any, split_round.SplitRound | None] = {}

    def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation; TFF calls it."""
        if comp not in self._rounds:
            self._rounds[comp] = self._split(comp)
        split = self._rounds[comp]
        if split is None or not len(arg[1]):  # Without clients there are no shares.
            return self._here.invoke(comp, arg)
        state, data = arg
        for_clients = self._here.invoke(split.prepare, state)
        args = [
            tff.structure.Struct.unnamed(for_clients, part)
            for part in _parts(data, len(self._workers))
        ]
        sums = shares.run(split.share, args, self._workers, self._patience_seconds)
        finish_arg = tff.structure.Struct.unnamed(state, sums)
        return self._here.invoke(split.finish(len(sums)), finish_arg)

    def _split(self, comp: Any) -> split_round.SplitRound | None:
        if not split_round.is_round(comp.type_signature):
            return None
        try:
            return split_round.SplitRound(comp, secure_sums=self._secure_sums)
        except split_round.CannotSplitError as error:
            warnings.warn(f"{error} It runs on this machine alone.", stacklevel=2)
            return None


def _parts(data: Sequence[Any], number: int) -> list[list[Any]]:
    """Splits into at most `number` parts, none of which is empty, of about equal size."""
    data = list(data)
    ends = [len(data) * i // number for i in range(number + 1)]
    return [data[a:b] for a, b in zip(ends, ends[1:], strict=False) if a < b]
