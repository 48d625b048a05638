"""Tests of when a run ends, and what is said then."""

import math
import sys

import pytest

from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import stopping


def _config(**options):
    return config_lib.TrainingConfig(
        mechanism="identity",
        noise_multiplier=5.0,
        num_rounds=10,
        clients_per_round=5,
        delta=1e-6,
        min_sep=2,
        **options,
    )


def _reason(config, rounds_done, rows=()):
    return stopping.reason(config, config.privacy().plan(40, 100), rows, rounds_done)


def test_all_rounds_are_a_reason():
    assert _reason(_config(), 9) is None
    assert _reason(_config(), 10) == "All 10 rounds are done."


def test_a_budget_is_a_reason_with_its_numbers():
    plan = _config().privacy().plan(40, 100)
    # A user takes part in every second round.
    budget = (plan.epsilon_after(4) + plan.epsilon_after(5)) / 2
    assert _reason(_config(max_epsilon=budget), 3) is None
    reason = _reason(_config(max_epsilon=budget), 4)
    assert reason.startswith("Stopped after 4 of 10 rounds: the next one would bring ε to")
    assert f"max_epsilon={budget:g}" in reason


def test_the_best_accuracy_is_a_reason():
    rows = [{stopping.ACCURACY: 0.25}, {stopping.ACCURACY: None}, {stopping.ACCURACY: 0.2}]
    assert stopping.best_accuracy(rows) == 0.25 and stopping.best_accuracy(rows[1:2]) is None
    assert _reason(_config(stop_at_accuracy=0.26), 3, rows) is None
    reason = _reason(_config(stop_at_accuracy=0.25), 3, rows)
    assert "reached 25.00%" in reason and "stop_at_accuracy is 25.00%" in reason
    assert _reason(_config(stop_at_accuracy=0.25), 3) is None


@pytest.mark.parametrize(
    "losses, failed",
    [([math.log(34)], False), ([9.0, 2.0], False), ([2.0, 3.6], True), ([], False)],
)
def test_a_model_that_is_worse_than_a_guess_is_called_so(losses, failed):
    warning = stopping.failure([{"eval_loss": loss} for loss in losses], vocabulary_size=34)
    assert (warning is not None) == failed
    if failed:
        assert "3.6, that of taking all words for equally likely is 3.526" in warning


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
