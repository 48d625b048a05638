"""Executes the examples in docstrings, with tiny data for the names that they leave open."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import pathlib
import re
import textwrap
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_dpftrl
from tests.runtime.plans import small_tasks
from tests.training import toy_model
from tff_dpftrl.discretization import grid
from tff_dpftrl.finetuning import clipped_sums, custom_run, example_sampling
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.learning import bucket_counts
from tff_dpftrl.private_round import fixed_clip
from tff_dpftrl.runtime.plans import device_work, server_work
from tff_dpftrl.training import saved_model, tflite_model, trained_model

_PACKAGE = pathlib.Path(tff_dpftrl.__file__).parent
_FENCED = re.compile(r"```\n(.*?)```", re.DOTALL)
_INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}[^\n]*\n)+(?:\n|\Z))")
_SAMPLER = tff_dpftrl.MinSepSampler(
    num_clients=40, clients_per_round=20, num_rounds=2, min_sep=2, seed=0
)


def _is_code(text: str) -> bool:
    """Whether a part of a docstring is Python that does something."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call) for part in body for node in ast.walk(part))


@functools.cache
def _examples() -> dict[str, str]:
    """Examples without prompts in the docstrings of the package, by module and object."""
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = (ast.get_docstring(node) or "") + "\n"
                blocks = _FENCED.findall(text) + _INDENTED.findall(text)
                code = [block for block in map(textwrap.dedent, blocks) if _is_code(block)]
                if code:
                    name = getattr(node, "name", "")
                    found[f"{module}:{name}".removesuffix(":")] = "\n".join(code)
    return found


def _rows():
    rng = np.random.default_rng(0)
    return {f"user {i}": rng.normal(size=[1 + i % 5, 5]).astype(np.float32) for i in range(300)}


def _row_losses(weights, rows):
    return tf.square(tf.linalg.matvec(rows[:, :4], weights[0]) - rows[:, 4])


def _learning():
    """Names of a learning process: a model with 4,000 weights, and what it is trained on."""
    x = np.eye(2, 4000, dtype=np.float32)
    dataset = tf.data.Dataset.from_tensors((x, x[:, :1]))
    model = tff.learning.models.functional_model_from_keras(
        tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, input_shape=(4000,))]),
        tf.keras.losses.MeanSquaredError(),
        (tf.TensorSpec([None, 4000], tf.float32), tf.TensorSpec([None, 1], tf.float32)),
    )
    aggregator = tff_dpftrl.build_dp_ftrl_aggregator(
        tff_dpftrl.Identity(), noise_multiplier=1.0, clip_norm=1.0, clients_per_round=20
    )
    return {
        "aggregator": aggregator,
        "client_data": lambda _: dataset,
        "client_datasets": [dataset, dataset],
        "datasets": [dataset],
        "delta": 1e-6,
        "model": model,
        "process": tff.learning.algorithms.build_unweighted_fed_avg(
            model, tff.learning.optimizers.build_sgdm(0.1), model_aggregator=aggregator
        ),
        "sampler": _SAMPLER,
        "schema": _SAMPLER.schema,
    }


def _noise():
    schema = _SAMPLER.schema
    return {
        "strategy": tff_dpftrl.optimize_blt(schema),
        "schema": schema,
        "z": 1.0,
        "c": 0.5,
        "params": [np.zeros([2, 3])],
        "t": 0,
    }


def _exported():
    trained = trained_model.find(toy_model.write(pathlib.Path("run"))).load()
    saved_model.write("exported", trained)
    return {}


def _exported_to_tflite():
    trained = trained_model.find(toy_model.write(pathlib.Path("run"))).load()
    tflite_model.write("exported", trained)
    (given,) = tf.lite.Interpreter("exported/model.tflite").get_input_details()
    return {"ids": np.ones([1, *given["shape"][1:]], given["dtype"])}


def _query():
    schema = _SAMPLER.schema
    return {
        "strategy": tff_dpftrl.optimize_blt(schema),
        "options": {"noise_multiplier": 1.0, "clip_norm": 0.5, "clients_per_round": 20},
        "record_specs": [tf.TensorSpec([2, 3])],
        "schema": schema,
    }


def _steps():
    return {
        "private_round": fixed_clip.FixedClipRound(
            tff_dpftrl.Identity(),
            noise_multiplier=1.0,
            clipping=tff_dpftrl.FlatClipping(1.0),
            clients_per_round=2,
        ),
        "clipped_sum": clipped_sums.looped(_row_losses),
        "batch": types.SimpleNamespace(row_splits=np.array([0, 2, 3])),
        "read_rows": lambda begin, end: np.ones([end - begin, 5], np.float32),
        "optimizer": tf.keras.optimizers.SGD(0.1),
        "weights": [np.zeros(4, np.float32)],
    }


def _fine_tuning():
    tables = _rows()
    users = example_sampling.Users(tuple(tables), np.array([len(rows) for rows in tables.values()]))
    return {
        "users": users,
        "made": plan_lib.make_plan(
            users, sampling="user", group_size=4, expected_units=50, num_steps=2, target_epsilon=4.0
        ),
        "row_losses": _row_losses,
        "weights": [np.zeros(4, np.float32)],
        "read_examples": lambda rows: np.stack([tables[user][row] for user, row in rows]),
        "custom_run": custom_run,
    }


def _server_work():
    plans = small_tasks.plans(small_tasks.ROUNDS["blt"]())
    work = server_work.ServerWork(plans.server)
    state = work.initialize()
    device = device_work.DeviceWork(plans.devices[0])
    updates = [device.run(small_tasks.examples(1, 4), work.broadcast(state))]
    return {"work": work, "state": state, "updates": updates}


def _actor():
    actor = types.SimpleNamespace(start=lambda now: [], step=lambda now, message: [])
    return {"actor": actor, "now": 0.0, "message": None}


# Names that an example leaves open.
_GIVEN = {
    "aggregators.dp_query": _query,
    "aggregators.secagg": lambda: {},
    "auditing.canaries": _learning,
    "auditing.training:audit_training": _learning,
    "execution.__init__": lambda: {},
    "execution.compiled_process:compile_process": _learning,
    "learning.metric_sums": lambda: {
        "model": bucket_counts.build_model(3),
        "unfinalized_spec": {"num_examples": tf.TensorSpec([], tf.int64)},
        "of_clients": [{"num_examples": tf.constant(2, tf.int64)}],
        "metrics": {},
    },
    "numpy_noise.stream": _noise,
    "private_round.interface": lambda: {
        "private_round": _steps()["private_round"],
        "shapes": [(4,)],
        "updates": [[np.ones(4, np.float32)]],
    },
    "private_round.aggregation": lambda: {
        "private_round": _steps()["private_round"],
        "shapes": [(4,)],
        "updates": [[np.ones(4, np.float32)]],
    },
    "private_round.secure_sums": lambda: {
        "encoding": grid.for_bits(4, 3, 16),
        "clip_norm": 1.0,
        "shapes": [(4,)],
        "updates": [[np.ones(4, np.float32)]],
    },
    "runtime.actors.__init__": _actor,
    "runtime.plans.expectations": lambda: {},
    "runtime.plans.server_work": _server_work,
    "training.saved_model": _exported,
    "training.tflite_model": _exported_to_tflite,
    "finetuning.custom_run": _fine_tuning,
    "finetuning.private_steps": _steps,
}
_SLOW = {"auditing.training:audit_training", "finetuning.custom_run"}


def _names(example: str) -> dict:
    """What an example finds defined: its module's names, and those of the table above."""
    place = f"tff_dpftrl.{example.partition(':')[0]}".removesuffix(".__init__")
    module = importlib.import_module(place)
    return {**vars(module), "tff": tff, "tf": tf, "tff_dpftrl": tff_dpftrl, **_GIVEN[example]()}


@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in _examples()],
)
def test_an_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(_examples()[example], _names(example))


def _modules_with_prompts():
    return [
        ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(_PACKAGE.rglob("*.py"))
        if ">>> " in path.read_text("utf-8")
    ]


@pytest.mark.parametrize("module", _modules_with_prompts())
def test_examples_with_prompts_print_what_they_say(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_every_example_that_a_test_knows_is_there():
    assert set(_examples()) == set(_GIVEN)
