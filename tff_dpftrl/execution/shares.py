"""Hands the shares of a round to workers, of which some may be lost and come back."""

from __future__ import annotations

import collections
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow_federated as tff

from tff_dpftrl.execution import client_part, remote_worker

_MOST_ATTEMPTS = 5  # At one share.
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0
_SECONDS_BETWEEN_LOOKS = 0.5
_WHAT_IS_KEPT = "The state before this round is as good as ever: start workers and go on from it"


def run(
    comp: tff.framework.ConcreteComputation,
    args: Sequence[Any],
    workers: Sequence[remote_worker.RemoteWorker],
    patience_seconds: float,
) -> list[Any]:
    """Runs a computation once for each argument.

    A worker takes a share at a time. One that is lost gives its share back, and is asked
    again and again until it answers or there is nothing left to do.

    Args:
      comp: The computation, compiled.
      args: Its arguments.
      workers: Who may run it.
      patience_seconds: For how long no worker at all may answer.

    Returns:
      The results, in the order of the arguments.

    Raises:
      NoWorkersError: If no worker answered for that long, or one share lost five workers.
    """
    shares = _Shares(len(args))
    for worker in workers:
        threading.Thread(target=_work, args=(worker, shares, comp, args), daemon=True).start()
    try:
        return shares.wait(workers, patience_seconds)
    except BaseException:
        shares.fail(None)
        for worker in workers:
            worker.abandon()
        raise


def _work(
    worker: remote_worker.RemoteWorker,
    shares: _Shares,
    comp: tff.framework.ConcreteComputation,
    args: Sequence[Any],
) -> None:
    """What is done for one worker, in its thread, while there are shares."""
    pause = _FIRST_PAUSE_SECONDS
    while not shares.are_over:
        if not worker.connect():
            shares.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            continue
        index = shares.take()
        if index is None:
            return
        try:
            shares.put(index, worker.run(comp, args[index]))
        except remote_worker.WorkerLostError as error:
            shares.put_back(index, f"The worker at {worker.address} was lost in a round ({error})")
        except BaseException as error:
            shares.fail(error)


class _Shares:
    """Which shares wait, which are done, and whether to go on."""

    def __init__(self, number: int):
        self._changed = threading.Condition()
        self._waiting = collections.deque(range(number))
        self._attempts = [0] * number
        self._results: list[Any] = [None] * number
        self._num_left = number
        self._failed = False
        self._error: BaseException | None = None
        self._losses: list[str] = []

    @property
    def are_over(self) -> bool:
        """Whether all are done, or given up."""
        return self._failed or not self._num_left

    def take(self) -> int | None:
        """Waits for a share to do; None if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.are_over)
            return None if self.are_over else self._waiting.popleft()

    def put(self, index: int, result: Any) -> None:
        """Takes the result of a share."""
        with self._changed:
            self._results[index] = result
            self._num_left -= 1
            self._changed.notify_all()

    def put_back(self, index: int, loss: str) -> None:
        """Takes a share back whose worker is lost."""
        with self._changed:
            self._attempts[index] += 1
            self._losses.append(loss)
            self._waiting.append(index)
            if self._attempts[index] == _MOST_ATTEMPTS:
                self._fail(
                    client_part.NoWorkersError(
                        f"{loss}, for the fifth time in the same share. {_WHAT_IS_KEPT}"
                    )
                )
            self._changed.notify_all()

    def fail(self, error: BaseException | None) -> None:
        """Gives the round up."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        self._failed = True
        self._error = self._error or error
        self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Waits, but not longer than there is something to do."""
        with self._changed:
            self._changed.wait_for(lambda: self.are_over, timeout=seconds)

    def wait(
        self, workers: Sequence[remote_worker.RemoteWorker], patience_seconds: float
    ) -> list[Any]:
        """Waits for all results and returns them, or raises why there are none."""
        answered = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.are_over, timeout=_SECONDS_BETWEEN_LOOKS)
                losses, self._losses = self._losses, []
            for loss in losses:
                warnings.warn(f"{loss}; what it did is done again.", stacklevel=3)
            if self._error is not None:
                raise self._error
            if self.are_over:
                return self._results
            if any(worker.is_connected for worker in workers):
                answered = time.monotonic()
            elif time.monotonic() - answered > patience_seconds:
                addresses = ", ".join(worker.address for worker in workers)
                raise client_part.NoWorkersError(
                    f"No worker has answered for {patience_seconds:g} seconds: {addresses}. "
                    f"{_WHAT_IS_KEPT}"
                )
