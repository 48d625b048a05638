"""Options that pay for training metrics, and what they are refused with."""

import pytest

from tff_dpftrl import validation
from tff_dpftrl.training import config, metrics_columns


@pytest.mark.parametrize(
    "options, says",
    [
        ({"metrics_epsilon": 0.0}, "metrics_epsilon must be"),
        ({"metrics_epsilon": 8.0}, "metrics_epsilon=8 leaves nothing of target_epsilon=8"),
        (
            {"metrics_epsilon": 1.0, "budget_shares": "metrics=0.1"},
            "metrics_epsilon=1 and budget_shares metrics=0.1 say two things",
        ),
        (
            {"budget_shares": "metrics=0.1", "target_epsilon": None, "noise_multiplier": 2.0},
            "metrics=0.1 is a share of target_epsilon",
        ),
        ({"budget_shares": "metrics=1.5"}, "gives metrics the share 1.5"),
    ],
)
def test_options_that_release_nothing_are_refused_in_a_line(options, says):
    with pytest.raises(validation.UsageError, match=says) as caught:
        config.TrainingConfig.of(**({"target_epsilon": 8.0} | options))
    assert "\n" not in str(caught.value)


def test_an_epsilon_or_a_share_pays_for_metrics():
    assert not config.TrainingConfig.of(target_epsilon=8.0).releases.has_metrics
    shared = config.TrainingConfig.of(target_epsilon=8.0, budget_shares="metrics=0.1")
    assert (shared.releases.metrics_share, shared.releases.metrics_epsilon) == (0.1, None)
    own = config.TrainingConfig.of(target_epsilon=8.0, metrics_epsilon=2.0)
    assert (own.releases.metrics_share, own.releases.metrics_epsilon) == (None, 2.0)
    assert config.TrainingConfig.of(noise_multiplier=8.0, metrics_epsilon=2.0).releases.has_metrics


def test_the_bounds_are_public_sizes():
    figures = metrics_columns.figures_of_rounds(1000, 20)
    assert figures.bounds["num_targets"] == 20.0
    assert figures.bounds["loss_sum"] == pytest.approx(20.0 * 6.907755)
