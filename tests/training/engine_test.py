"""The two engines train the same model, and a run keeps its own."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from tests.training import toy_run
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import options as options_lib
from tff_dpftrl.training import run

_ROUNDS = 3
# Six roundings of float32 a round, of weights below 1.
_CLOSE = 6 * _ROUNDS * np.finfo(np.float32).eps


corpus = toy_run.corpus


@pytest.mark.parametrize(
    "options, atol",
    [
        pytest.param({}, _CLOSE, marks=pytest.mark.slow),
        pytest.param(
            {"adaptive_clipping": True, "clipped_count_stddev": 1.0},
            _CLOSE,
            marks=pytest.mark.slow,
        ),
        # A last bit turns a randomised rounding: a client's entry moves by 2 / 2^20 or so.
        pytest.param({"secagg_bits": 20}, _CLOSE + 4e-6 * _ROUNDS, marks=pytest.mark.slow),
    ],
    ids=["fixed", "adaptive", "secagg"],
)
def test_both_engines_train_the_same_model(corpus, tmp_path, options, atol):
    for engine in ("compiled", "tff"):
        config = toy_run.config(corpus, engine=engine, num_rounds=_ROUNDS, **options)
        run.train(config, tmp_path / engine)
        assert manifest.read(tmp_path / engine).config["engine"] == engine
    for ours, tffs in zip(
        toy_run.weights(tmp_path / "compiled"), toy_run.weights(tmp_path / "tff"), strict=True
    ):
        np.testing.assert_allclose(ours, tffs, rtol=0, atol=atol)
    for ours, tffs in zip(
        toy_run.rows(tmp_path / "compiled"), toy_run.rows(tmp_path / "tff"), strict=True
    ):
        for name in ("loss", "eval_loss"):
            assert bool(ours[name]) == bool(tffs[name])
            if ours[name]:
                assert float(ours[name]) == pytest.approx(float(tffs[name]), rel=1e-4)


def test_a_run_begun_before_there_was_a_choice_keeps_tffs_executor(corpus):
    options = toy_run.config(corpus).to_dict()
    del options["engine"]
    assert options_lib.of_begun_run(options, "config.json").engine == "tff"
    assert config_lib.TrainingConfig(**options).engine == "compiled"


@pytest.mark.slow
def test_a_run_cannot_leave_its_engine(corpus, tmp_path):
    output = tmp_path / "run"
    run.train(toy_run.config(corpus, num_rounds=1), output)
    path = output / "config.json"
    changed = json.loads(path.read_text())
    changed["config"]["engine"] = "tff"
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="config.engine"):
        run.train(None, output)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
