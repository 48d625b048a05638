"""Compares small runs with what they came to when `recorded_runs.json` was written.

The same seeds must give the same batches, noise, weights, metrics and statements after every
change of the code. Floating-point sums depend on the processor, in the order that they are added
in: texts are compared exactly but for the last digits of long numbers, and results with a
tolerance that is explained at `_RELATIVE`.

`python -m tests.finetuning.recorded_runs_test record` writes the file anew, for a change that is
meant to change them: the difference belongs into its commit message.
"""

import csv
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.finetuning import toy_finetuning
from tests.training import toy_run
from tff_dpftrl.finetuning import custom_run, example_sampling, plan
from tff_dpftrl.finetuning import run as finetuning_run

_RECORD = pathlib.Path(__file__).with_name("recorded_runs.json")
# A run's sums have fewer than 10⁴ terms in float32, whose unit roundoff is 6e-8: another order
# moves a result by 6e-4 of the terms' size at worst, and by the root of that number, 6e-6, if
# errors are independent. Six steps add up, and an optimizer that divides by a small second moment
# amplifies. Another seed moves every number by more than a tenth of its size.
_RELATIVE = 1e-3
_PROJECTIONS = 3


def _digest(weights) -> list[list[float]]:
    """Returns products of each tensor with fixed vectors of signs, over their norm."""
    found = []
    for weight in map(np.asarray, weights):
        signs = np.random.RandomState(weight.size).choice([-1.0, 1.0], [_PROJECTIONS, weight.size])
        found.append((signs @ weight.ravel() / np.sqrt(weight.size)).round(7).tolist())
    return found


def _outcome(
    toy: pathlib.Path, output: pathlib.Path, lines: list[str], summary: str, weights
) -> dict[str, Any]:
    rows = list(csv.DictReader((output / "private" / "metrics.csv").read_text().splitlines()))
    statement = (output / "privacy_statement.md").read_text().replace(str(toy), "TOY")
    # The date, the run's id and the digests of files with long numbers in them.
    statement = re.sub(r"(?m)^- (date|run|tensorflow|\w+_sha256): .*$", r"- \1: #", statement)
    lines = [line.replace(str(output), "OUTPUT").replace(str(toy), "TOY") for line in lines]
    return {
        "files": sorted(path.name for path in output.iterdir()),
        "private files": sorted(path.name for path in (output / "private").iterdir()),
        "progress": lines,
        "summary": re.sub(r"\d+(\.\d+)?", "#", summary.replace(str(output), "OUTPUT")),
        "statement": re.sub(r"tff_dpftrl \S+", "tff_dpftrl VERSION", statement),
        "metrics": [{k: v for k, v in row.items() if k != "seconds"} for row in rows],
        "weights": _digest(weights),
    }


def _bigrams() -> tf.keras.Model:
    size = len(toy_run.WORDS) + 4
    layers = [tf.keras.layers.Embedding(size, 4), tf.keras.layers.Dense(size)]
    model = tf.keras.Sequential(layers)
    model(np.zeros([1, 6], np.int32))
    rng = np.random.RandomState(3)
    model.set_weights([rng.normal(0.0, 0.1, weight.shape) for weight in model.get_weights()])
    return model


def _train(toy: pathlib.Path, output: pathlib.Path, **options: Any) -> dict[str, Any]:
    from tff_dpftrl.training import run as training_run

    lines: list[str] = []
    config = toy_run.config(toy, **options)
    results = training_run.train(config, output, progress=lines.append)
    return _outcome(toy, output, lines, results.summary, toy_run.weights(output))


def _train_own(toy: pathlib.Path, output: pathlib.Path) -> dict[str, Any]:
    from tff_dpftrl.training import run as training_run

    lines: list[str] = []
    results = training_run.train(
        toy_run.config(toy, embedding_size=None, lstm_size=None),
        output,
        model=_bigrams(),
        progress=lines.append,
    )
    return _outcome(toy, output, lines, results.summary, toy_run.weights(output))


def _finetune(toy: pathlib.Path, output: pathlib.Path, **options: Any) -> dict[str, Any]:
    lines: list[str] = []
    config = toy_finetuning.config(toy, **options)
    results = finetuning_run.finetune(config, output, progress=lines.append)
    return _outcome(toy, output, lines, results.summary, toy_run.weights(output))


def _finetune_own(toy: pathlib.Path, output: pathlib.Path, seed: int | None = 11) -> dict[str, Any]:
    rng = np.random.RandomState(3)
    table = {f"user {i}": rng.normal(2.0, 1.0, [1 + i % 4, 3]) for i in range(60)}
    users = example_sampling.Users(tuple(table), np.array([len(rows) for rows in table.values()]))
    lines: list[str] = []
    results = custom_run.finetune(
        output,
        custom_run.Model(
            lambda weights, rows: 0.5 * tf.reduce_sum(tf.square(weights[0] - rows), axis=1),
            [np.zeros(3, np.float32)],
            trained_on="nobody's data",
        ),
        custom_run.Examples(
            users,
            lambda examples: np.stack([table[user][i] for user, i in examples]).astype(np.float32),
        ),
        plan.make_plan(
            users,
            sampling="user",
            group_size=2,
            expected_units=20,
            num_steps=5,
            target_epsilon=8.0,
        ),
        custom_run.Steps(
            clip_norm=1.0,
            optimizer=lambda: tf.keras.optimizers.Adam(0.3),
            iterate_averaging=0.5,
        ),
        custom_run.Evaluation(lambda weights: {"error": np.linalg.norm(weights[0] - 2.0)}, every=2),
        deterministic_noise_seed=seed,
        progress=lines.append,
    )
    return _outcome(toy, output, lines, "", results.weights)


_PRIVATE = {"deterministic_noise_seed": None}
_RUNS: dict[str, Callable[[pathlib.Path, pathlib.Path], dict[str, Any]]] = {
    "train": _train,
    "train, private": lambda toy, output: _train(
        toy, output, **_PRIVATE, num_rounds=2, min_sep=2, vocabulary="private"
    ),
    "train, own model": _train_own,
    "train, DP-FedAvg": lambda toy, output: _train(
        toy, output, algorithm="dp-fedavg", buffers=None, min_sep=None, noise_multiplier=2.0
    ),
    "finetune": _finetune,
    "finetune, private": lambda toy, output: _finetune(toy, output, **_PRIVATE, num_steps=2),
    "finetune, adapters": lambda toy, output: _finetune(toy, output, adapter_rank=2),
    "finetune, passes": lambda toy, output: _finetune(
        toy,
        output,
        sampling="passes",
        group_size=2,
        cohort_size=8,
        noise_multiplier=0.7,
        delta=1e-3,
        iterate_averaging=0.5,
    ),
    "finetune, own model": _finetune_own,
    "finetune, own model, private": lambda toy, output: _finetune_own(toy, output, None),
}
_UNKNOWN = ("weights", "metrics", "summary")  # What nobody can repeat of a private run.

toy = toy_finetuning.toy


def _assert_same(found: Any, recorded: Any, name: str) -> None:
    """Compares numbers, in whatever they are nested, with the tolerance."""
    if isinstance(recorded, dict):
        assert list(found) == list(recorded), name
        for key, value in recorded.items():
            _assert_same(found[key], value, f"{name}: {key}")
    elif isinstance(recorded, list):
        assert len(found) == len(recorded), name
        for index, value in enumerate(recorded):
            _assert_same(found[index], value, f"{name}[{index}]")
    elif recorded == "":
        assert found == "", name
    else:
        number = float(recorded)
        assert float(found) == pytest.approx(number, rel=_RELATIVE, abs=_RELATIVE), name


# Other processors end a search for a mechanism at figures that differ in their last digits.
_LONG_NUMBER = re.compile(r"(\d+\.\d{8,})")


def _assert_same_text(found: Any, recorded: Any, name: str) -> None:
    """Compares a text, or lists of lines; numbers with eight decimals or more to seven digits."""
    if not isinstance(recorded, str):
        assert found == recorded, name
        return
    parts, wanted = _LONG_NUMBER.split(found), _LONG_NUMBER.split(recorded)
    assert parts[::2] == wanted[::2], name
    numbers = [np.array(split[1::2], float) for split in (parts, wanted)]
    np.testing.assert_allclose(*numbers, rtol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "finetune" else pytest.mark.slow) for name in _RUNS],
)
def test_a_run_comes_to_what_it_came_to_when_it_was_recorded(name, toy, tmp_path):
    recorded = json.loads(_RECORD.read_text(encoding="utf-8"))[name]
    found = _RUNS[name](toy, tmp_path / "run")
    texts = ["files", "private files", "progress", "statement"]
    texts += [] if "private" in name else ["summary"]
    for kind in texts:
        _assert_same_text(found[kind], recorded[kind], kind)
    if "private" not in name:
        _assert_same(found["metrics"], recorded["metrics"], "metrics.csv")
        _assert_same(found["weights"], recorded["weights"], "weights")


def test_the_tolerance_tells_runs_apart():
    recorded = json.loads(_RECORD.read_text(encoding="utf-8"))
    one, other = (recorded[name]["weights"] for name in ("train", "train, DP-FedAvg"))
    apart = np.abs(np.subtract(np.concatenate(one), np.concatenate(other)))
    assert np.median(apart) > 10 * _RELATIVE
    with pytest.raises(AssertionError):
        _assert_same(one, other, "weights")


def _record(folder: pathlib.Path) -> None:
    toy_finetuning.write(folder)
    found = {}
    for index, (name, run) in enumerate(_RUNS.items()):
        found[name] = run(folder, folder / str(index))
        if "private" in name:
            for part in _UNKNOWN:
                del found[name][part]
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    _RECORD.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        import tempfile

        with tempfile.TemporaryDirectory() as temporary:
            _record(pathlib.Path(temporary))
    else:
        sys.exit(pytest.main([__file__]))
