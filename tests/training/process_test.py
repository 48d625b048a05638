"""Tests of the process of a run: what it refuses, and that nothing leaks past the noise."""

import sys

import pytest

from tff_dpftrl.aggregators import check_process
from tff_dpftrl.learning import functional_model
from tff_dpftrl.models import metrics, word_lstm
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import process


def _config(**changes):
    values = {"num_rounds": 8, "clients_per_round": 5, "noise_multiplier": 1.0} | changes
    return config_lib.TrainingConfig(**values)


def test_a_state_that_tff_cannot_send_is_refused():
    plan = _config(mechanism="bandtoep", min_sep=8).privacy().plan(100, 10)
    assert plan.memory_copies == 7
    process.check_state_fits(plan, 50_000_000)
    with pytest.raises(ValueError, match=r"7 copies of a model of 60000000 weights: 2\.4 GB"):
        process.check_state_fits(plan, 60_000_000)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adaptive_clipping": True, "restart_warmup": 4, "clipped_count_stddev": 2.0},
        {"algorithm": "dp-fedavg"},
    ],
    ids=["dp-ftrl", "adaptive", "dp-fedavg"],
)
def test_only_metrics_of_the_cohort_are_exact(options):
    config = _config(**options)
    model = word_lstm.WordLstm(
        vocabulary_size=9,
        sequence_length=3,
        embedding_size=2,
        state_size=2,
        tie_embeddings=True,
    )
    special = metrics.SpecialIds(oov=6, bos=7, eos=8)
    plan = config.privacy().plan(100, model.num_parameters)
    checked = check_process.check_process(
        process.build_process(plan, config, functional_model.build(model, special, seed=0))
    )
    assert len(checked.releases) == 1
    checked.raise_if_any(allow=["metrics"])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
