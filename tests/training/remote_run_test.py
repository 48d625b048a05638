"""A run on TFF's remote workers is that of one process, whatever happens to the workers."""

from __future__ import annotations

import functools
import os
import signal
import sys

import numpy as np
import pytest

from tests.training import toy_run
from tff_dpftrl import execution
from tff_dpftrl.execution import worker_process
from tff_dpftrl.training import committed_run, placement, run

_CLOSE = 1e-5  # Sums in another order, over all rounds.


corpus = toy_run.corpus


def _on(*workers):
    return placement.Placement(workers=tuple(worker.address for worker in workers))


def test_without_any_worker_nothing_is_written(corpus, tmp_path):
    with worker_process.serve() as worker:
        placed = _on(worker)
    output = tmp_path / "run"
    with pytest.raises(execution.NoWorkersError, match="No worker answers"):
        run.train(toy_run.config(corpus, engine="tff"), output, placement=placed)
    assert not output.exists()


@pytest.mark.slow
def test_a_run_that_loses_all_its_workers_goes_on_with_others(corpus, tmp_path, monkeypatch):
    config = toy_run.config(corpus, engine="tff")
    run.train(config, tmp_path / "local")
    monkeypatch.setattr(
        execution,
        "remote_workers",
        functools.partial(execution.remote_workers, patience_seconds=1.0),
        raising=False,
    )
    output = tmp_path / "remote"
    with worker_process.serve() as one, worker_process.serve() as two:
        publish = committed_run.CommittedRun._publish

        def publish_and_kill(self, row):
            publish(self, row)
            if row["round"] == 2:  # The next round finds one worker, or dies with it.
                os.kill(one.pid, signal.SIGKILL)
            if row["round"] == 3:
                os.kill(two.pid, signal.SIGKILL)

        monkeypatch.setattr(committed_run.CommittedRun, "_publish", publish_and_kill)
        with (
            pytest.warns(UserWarning, match=f"{one.address} was lost"),
            pytest.raises(execution.NoWorkersError, match="as good as ever"),
        ):
            run.train(config, output, placement=_on(one, two))
    monkeypatch.setattr(committed_run.CommittedRun, "_publish", publish)
    assert len(toy_run.rows(output)) == 3
    with worker_process.serve() as worker:
        run.train(None, output, placement=_on(worker))
    assert len(toy_run.rows(output)) == toy_run.NUM_ROUNDS
    for ours, expected in zip(
        toy_run.weights(output), toy_run.weights(tmp_path / "local"), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=_CLOSE)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
