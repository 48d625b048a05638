"""Runs the program of docs/how_to/drop_in.md, and its beginning in README.md, on tiny data."""

import collections
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_dpftrl
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.participation import ledger_rules

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = _ROOT / "docs" / "how_to" / "drop_in.md"
_NUM_DEVICES = 12
_SMALLER = {"num_rounds": 6, "min_sep": 3, "clients_per_round": 3}


def _blocks(page: pathlib.Path = _PAGE) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def _example() -> str:
    """The first Python block, with numbers that a test has time for."""
    code = _blocks()[0]
    for name, value in _SMALLER.items():
        code, count = re.subn(rf"\b{name}=[\d_]+", f"{name}={value}", code)
        assert count >= 1, f"The page's example gives no {name}: adapt _SMALLER."
    return code


def _model_fn():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([tf.keras.layers.Input([2]), tf.keras.layers.Dense(1)]),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=(tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])),
    )


def _names(asked: collections.Counter) -> dict:
    """What the page leaves to the reader; `asked` counts the devices that take part."""
    devices = [f"device {i}" for i in range(_NUM_DEVICES)]
    x = np.eye(2, dtype=np.float32)

    def client_data(device):
        assert device in devices
        asked[device] += 1
        return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)

    held_out = [tf.data.Dataset.from_tensor_slices((x, 2 * x[:, :1])).batch(2)] * 2
    return {
        "model_fn": _model_fn,
        "devices": devices,
        "client_data": client_data,
        "held_out_data": held_out,
    }


@pytest.fixture(scope="module")
def begun():
    """The example before its loop: the text of the loop, and what is defined by then."""
    before, loop = _example().split("\nclaim = ")
    names = _names(collections.Counter())
    exec(before, names)
    return "claim = " + loop, names


def test_the_example_keeps_its_schema_and_states_what_was_observed(
    begun, capfd, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    asked = collections.Counter()
    loop, names = begun[0], begun[1] | _names(asked)
    client_data = names["client_data"]

    def interrupted(device):
        if sum(asked.values()) == 10:  # In round 3, which has one device by now.
            raise KeyboardInterrupt
        return client_data(device)

    with pytest.raises(KeyboardInterrupt):
        exec(loop, names | {"client_data": interrupted})
    asked.subtract(names["devices"][i] for i in names["sampler"].cohort(3)[:1])
    exec(loop, names)
    printed = capfd.readouterr().out
    statement = names["statement"]
    assert statement.has_guarantee and statement.epsilon <= 8.0
    assert statement_text.markdown(statement) in printed
    assert sum(asked.values()) == 6 * 3
    assert statement.observed.max_participations == max(asked.values()) == 2
    assert statement.observed.min_sep >= 3
    assert statement.observed.num_rounds == statement.accounted.num_rounds == 6
    # The model has been trained, and the noise was that of a private run.
    weights = names["process"].get_model_weights(names["state"]).trainable
    assert all(np.any(weight != 0.0) for weight in weights)
    assert names["aggregator"].private_round.deterministic_seed is None
    # The evaluation has this model's loss: by hand, on the held-out devices.
    kernel, bias = weights
    loss = np.mean((np.eye(2) @ kernel + bias - [[2.0], [0.0]]) ** 2)
    evaluated = names["metrics"]["client_work"]["eval"]["current_round_metrics"]
    assert evaluated["loss"] == pytest.approx(loss, rel=1e-5)
    assert evaluated["num_examples"] == 4


_BLT = tff_dpftrl.Blt(buf_decay=(0.9,), output_scale=(0.3,))
_FIXED = {"noise_multiplier": 0.5, "clip_norm": 1.0, "clients_per_round": 3}
_ADAPTIVE = tff_dpftrl.AdaptiveClipping(only_estimates=True)


@pytest.mark.parametrize(
    "aggregator",
    [
        tff_dpftrl.build_dp_ftrl_aggregator(tff_dpftrl.Tree(4), **_FIXED),
        tff_dpftrl.build_secagg_dp_ftrl_aggregator(_BLT, **_FIXED, bits=20),
        tff_dpftrl.WeightedFactory(tff_dpftrl.build_dp_ftrl_aggregator(_BLT, **_FIXED)),
        tff_dpftrl.build_adaptive_dp_ftrl_aggregator(
            _BLT, noise_multiplier=0.5, clients_per_round=30, clipping=_ADAPTIVE
        ),
        tff_dpftrl.SampledGaussianFactory(
            clipping=tff_dpftrl.FlatClipping(1.0),
            noise_multiplier=0.5,
            estimator=tff_dpftrl.FixedDenominator(0.5, 6),
        ),
    ],
    ids=lambda aggregator: type(aggregator).__name__,
)
def test_states_of_all_aggregators_are_kept(aggregator, tmp_path):
    schema = tff_dpftrl.MinSep(num_rounds=4, min_sep=1, max_participations=4)
    update, weight = tff.TensorType(np.float32, [3]), tff.TensorType(np.float32)
    if isinstance(aggregator, tff.aggregators.WeightedAggregationFactory):
        process = aggregator.create(update, weight)
    else:
        process = aggregator.create(update)
    if isinstance(aggregator, tff_dpftrl.SampledGaussianFactory):
        claim = aggregator.run_of(4)
    else:
        claim = aggregator.guarantee(schema, delta=1e-10)
    states = []
    for _ in range(2):
        rounds, state = tff_dpftrl.begin_or_resume(
            tmp_path, lambda: {"aggregator": process.initialize()}, schema, claim
        )
        rounds.close()
        states.append(state)
    tf.nest.map_structure(np.testing.assert_array_equal, *states)


def test_the_same_devices_again_and_again_are_refused(begun, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    same = np.arange(3)
    monkeypatch.setattr(tff_dpftrl.MinSepSampler, "cohort", lambda sampler, round_index: same)
    asked = collections.Counter()
    with pytest.raises(ledger_rules.SchemaRefusal, match="Round 1 may not begin"):
        exec(begun[0], begun[1] | _names(asked))
    assert sum(asked.values()) == 3  # Those of round 0, who were allowed.


def test_the_lines_of_the_readme_give_a_private_process():
    (lines,) = _blocks(_ROOT / "README.md")
    names = _names(collections.Counter()) | {
        "tff": tff,
        "tff_dpftrl": tff_dpftrl,
        "schema": tff_dpftrl.MinSep(num_rounds=6, min_sep=3, max_participations=2),
        "as_before": {"client_optimizer_fn": tff.learning.optimizers.build_sgdm(0.5)},
    }
    exec(lines, names)
    claim = names["aggregator"].guarantee(names["schema"], delta=1e-10)
    assert 7.9 < claim.epsilon <= 8.0
    process = tff_dpftrl.compile_process(names["process"])
    state = process.next(process.initialize(), [names["client_data"]("device 0")]).state
    assert np.any(process.get_model_weights(state).trainable[0] != 0.0)
