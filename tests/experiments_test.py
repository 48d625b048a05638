"""The committed results are what the page says, and the configs can be run."""

import csv
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import gaussian_means
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.sweeps import folder
from tff_dpftrl.training import config as training_config
from tff_dpftrl.training import language_config
from tff_dpftrl.training import options as options_lib

# Stands for tff-dpftrl: a server that is slow to say where it is, a fleet that looks there.
_COMMAND = """#!/usr/bin/env bash
echo "$@" >> "$ENDPOINT.called"
case $1 in
serve) sleep 0.5; echo new > "$ENDPOINT"; sleep 0.5 ;;
fleet) echo "fleet finds $(cat "$ENDPOINT")" ;;
esac
"""

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "experiments"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"experiments_{name}", _FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for their module.
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_figures_that_are_committed():
    page = _load("page")
    for path in page.PAGES:
        text = path.read_text(encoding="utf-8")
        assert page.render(text) == text, "run: python experiments/page.py"


_CONFIGS = sorted({*_FOLDER.glob("*.toml")} - {_FOLDER / "manifest.toml"})


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.name)
def test_configs_can_be_used(path):
    # Some are for `pretrain` alone.
    is_run = not path.stem.startswith("finetuning")
    kind = training_config.TrainingConfig if is_run else language_config.LanguageConfig
    options_lib.config_from_mapping(options_lib.read_toml(path), path.name, kind)


def _write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


def test_a_table_has_settings_and_baselines(tmp_path, monkeypatch):
    page = _load("page")
    monkeypatch.setattr(page, "_HERE", tmp_path)
    metrics = {"eval_top1_in_vocab": 0.2, "eval_top3_in_vocab": 0.3, "eval_perplexity": 100}
    errors = {f"{name}_se": 0.001 for name in metrics}
    blt = {"mechanism": "blt", "cells": 3, "epsilon": 4321, "simulated_epsilon": 4.00001}
    none = {"mechanism": "none", "cells": 1, "epsilon": "", "simulated_epsilon": ""}
    _write(
        tmp_path / "results" / "toy" / "summary.csv",
        [blt | metrics | errors, none | metrics | dict.fromkeys(errors, "")],
    )
    _write(
        tmp_path / "results" / "toy" / "baselines.csv",
        [{"model": "bigrams", "eval_top1_in_vocab": 0.15}],
    )
    before = "A\n<!-- table: toy, mechanism -->\nstale\n<!-- end -->\nB\n"
    lines = page.render(before).splitlines()
    assert lines[0] == "A" and lines[-1] == "B" and "stale" not in lines
    assert lines[1] == "<!-- table: toy, mechanism -->"
    assert lines[2].startswith("| mechanism | ε of the simulated run | own ε | seeds |")
    assert "| blt | 4.001 | 4321 | 3 | 20.00 ± 0.10 % | 30.00 ± 0.10 % | 100.0 ± 0.0 |" in lines
    assert "| none | none | none | 1 | 20.00 % | 30.00 % | 100.0 |" in lines
    assert "| bigrams |  |  |  | 15.00 % |  |  |" in lines


def test_a_table_has_further_shares_of_settings_and_baselines(tmp_path, monkeypatch):
    page = _load("page")
    monkeypatch.setattr(page, "_HERE", tmp_path)
    names = ("eval_top1_in_vocab", "eval_top3_in_vocab", "eval_perplexity", "eval_rescored")
    row = {"mechanism": "blt", "cells": 1, "epsilon": 4, "simulated_epsilon": ""}
    row |= dict.fromkeys(names, 0.5) | {f"{name}_se": "" for name in names}
    _write(tmp_path / "results" / "toy" / "summary.csv", [row])
    baselines = [
        {"model": "bigrams", "eval_top1_in_vocab": 0.15, "eval_rescored": 0.25},
        {"model": "trigrams", "eval_top1_in_vocab": 0.2, "eval_rescored": ""},
    ]
    _write(tmp_path / "results" / "toy" / "baselines.csv", baselines)
    block = "<!-- table: toy, mechanism, shown=eval_rescored -->\n<!-- end -->"
    lines = page.render(block).splitlines()
    assert lines[1].endswith("| perplexity | rescored |")
    assert lines[3:6] == [
        "| blt | 4 | 1 | 50.00 % | 50.00 % | 0.5 | 50.00 % |",
        "| bigrams |  |  | 15.00 % |  |  | 25.00 % |",
        "| trigrams |  |  | 20.00 % |  |  |  |",
    ]


def test_a_misspelt_word_of_a_table_is_named():
    page = _load("page")
    with pytest.raises(ValueError, match="has 'show=eval_rescored'; use shown=COLUMN"):
        page.table("mechanisms_commits", ["mechanism", "show=eval_rescored"])


def test_frequent_words_are_averaged_over_seeds(tmp_path, monkeypatch):
    page = _load("page")
    monkeypatch.setattr(page, "_HERE", tmp_path)
    cells = [("mechanism=blt", 0, 4), ("mechanism=blt", 1, 5), ("mechanism=none", 0, 3)]
    rows = [
        {"setting": setting, "seed": seed, "of_10": found, "of_50": 8}
        for setting, seed, found in cells
    ]
    _write(tmp_path / "results" / "toy" / "head_words.csv", rows)
    lines = page.render("<!-- heads: toy -->\n<!-- end -->").splitlines()
    assert lines[3:5] == ["| mechanism=blt | 4.50 | 8.00 |", "| mechanism=none | 3.00 | 8.00 |"]


def test_losses_stand_crosswise_with_errors_over_seeds(tmp_path, monkeypatch):
    page = _load("page")
    monkeypatch.setattr(page, "_HERE", tmp_path)
    losses = {("ELS", "1"): (4.0, 4.2), ("ULS", "1"): (3.9, 4.1), ("ULS", "4"): (3.5,)}
    rows = [
        {"method": method, "ε": epsilon, "seed": seed, "loss": loss}
        for (method, epsilon), found in losses.items()
        for seed, loss in enumerate(found)
    ]
    _write(tmp_path / "results" / "toy.csv", rows)
    lines = page.render("<!-- cross: toy, ε, method -->\n<!-- end -->").splitlines()
    assert lines[1] == "| ε | ELS | ULS |"
    assert lines[3:5] == ["| 1 | 4.100 ± 0.100 | 4.000 ± 0.100 |", "| 4 |  | 3.500 |"]
    lines = page.render("<!-- cross: toy, method=ULS, ε, method -->\n<!-- end -->").splitlines()
    assert lines[1:5] == ["| ε | ULS |", "|---|---|", "| 1 | 4.000 ± 0.100 |", "| 4 | 3.500 |"]
    lines = page.render("<!-- cross: toy, shown=seed, ε, method -->\n<!-- end -->").splitlines()
    assert lines[3:5] == ["| 1 | 0.500 ± 0.500 | 0.500 ± 0.500 |", "| 4 |  | 0.000 |"]


def test_losses_are_those_of_the_rate_that_was_best_with_the_first_seed(tmp_path, monkeypatch):
    page = _load("page")
    monkeypatch.setattr(page, "_HERE", tmp_path)
    found = [("0.1", "0", 4.0), ("0.2", "0", 3.0), ("0.2", "1", 5.0), ("0.1", "1", 1.0)]
    rows = [
        {"method": "ULS", "ε": "1", "seed": seed, "rate": rate, "loss": loss}
        for rate, seed, loss in found
    ]
    _write(tmp_path / "results" / "toy.csv", rows)
    block = "<!-- cross: toy, best=rate, {}ε, method -->\n<!-- end -->"
    assert page.render(block.format("")).splitlines()[3] == "| 1 | 4.000 ± 1.000 |"
    assert page.render(block.format("shown=rate, ")).splitlines()[3] == "| 1 | 0.2 |"


@pytest.mark.parametrize(
    "figure", ["epsilon", "map", "group", "users", "large_map", "long", "turns"]
)
def test_every_cell_of_a_figure_can_be_told_from_the_others(figure):
    module = _load("finetuning_text")
    assert figure in module.FIGURES
    cells = [cell for seed in (0, 1) for cell in module.cells(figure, seed)]
    assert len({tuple(module.key(cell).values()) for cell in cells}) == len(cells) > 10


def test_a_figure_that_was_interrupted_goes_on(tmp_path):
    module = _load("finetuning_text")
    path = tmp_path / "toy.csv"
    first, second, *_ = module.cells("users", seed=0)
    assert module.done(path) == set()
    module.append(path, module.key(first) | {"loss": "4.0"})
    module.append(path, module.key(second) | {"loss": "4.1"})
    assert module.done(path) == {tuple(module.key(cell).values()) for cell in (first, second)}


def test_each_method_has_the_learning_rate_of_least_loss_with_the_first_seed(tmp_path):
    module, path, tried = _load("finetuning_text"), tmp_path / "toy.csv", []
    best = {
        ("ULS", 1.0): 0.004,
        ("ULS", 2.0): 0.002,
        ("cyclic", 1.0): 0.032,
        ("cyclic", 2.0): 0.016,
    }

    def run(cell):
        loss = abs(math.log2(cell.learning_rate / best[cell.method, cell.epsilon]))
        tried.append(cell)
        module.append(path, module.key(cell) | {"loss": loss})

    cells = [
        module.Cell(method, epsilon, 256, seed=seed)
        for seed in (0, 1)
        for method in ("ULS", "cyclic", "bins")
        for epsilon in (1.0, 2.0)
    ]
    found = list(module.with_own_rates(cells, path, run))
    rates = [0.004, 0.002, 0.032, 0.016, 0.032, 0.016]
    assert [cell.learning_rate for cell in found] == rates * 2
    assert [dataclasses.replace(cell, learning_rate=None) for cell in found] == cells
    assert {cell.seed for cell in tried} == {0} and len(set(tried)) == len(tried)


def test_what_choices_rest_on_is_kept_beside_the_losses(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(_FOLDER)
    module, pictures = _load("finetuning_text"), _load("finetuning_pictures")

    class Corpus:
        facts = [{"G": 1, "L(G)": "5"}, {"G": 2, "L(G)": "4"}]

        def __init__(self, num_steps, looks, data, initial_weights, max_users, learning_rate):
            assert (num_steps, looks) == (60, ())
            assert (data, initial_weights) == ("users.jsonl", "pretrained")
            assert (max_users, learning_rate) == (None, 4e-3)

        def row(self, cell):
            return module.key(cell) | {"loss": 4.0}

    for one in (module, pictures):
        monkeypatch.setattr(one, "_RESULTS", tmp_path)
    monkeypatch.setattr(module, "Corpus", Corpus)
    files = ["--data", "users.jsonl", "--initial-weights", "pretrained"]
    monkeypatch.setattr(sys, "argv", ["finetuning_text.py", "users", "toy", *files, "--seeds", "0"])
    for _ in range(2):  # There is nothing left for the second time.
        module.main()
        assert len(pictures.read("toy_users")) == len(list(module.cells("users", seed=0)))
        assert pictures.read("toy") == [{"G": "1", "L(G)": "5"}, {"G": "2", "L(G)": "4"}]


def test_estimate_and_double_is_set_beside_the_best_of_the_map(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(_FOLDER)
    pictures = _load("finetuning_pictures")
    monkeypatch.setattr(pictures, "_RESULTS", tmp_path)
    facts = {"users": 8000, "examples": 500_000}
    # Orthogonal gradients: a group is worth as much as a cohort.
    norms = [{"G": 2**i, "L(G)": 2 ** (-i / 2)} | facts for i in range(4)]
    _write(tmp_path / "finetuning_toy.csv", norms)
    losses = {1: 4.0, 2: 4.1, 4: 4.4}
    maps = {"64": {1: 4.3, 2: 4.2}, "128": losses}
    rows = [
        {"ε": "1", "B": budget, "G": group, "loss": loss}
        for budget, found in maps.items()
        for group, loss in found.items()
    ]
    _write(tmp_path / "finetuning_toy_map.csv", rows)
    _, found = pictures.doubling("toy", "map")
    assert (found["best G"], found["its loss"]) == (1, "4.0000")
    assert found["Estimate-and-Double"] == f"{100 * (losses[found['G chosen']] / 4.0 - 1):.2f} %"
    # The oracle begins with the better G = 2 at 64, and has 2 or 4 left.
    assert (found["Greedy Oracle"], found["Max Cohort"]) == ("2.50 %", "0.00 %")
    # As the paper prints it, the group is doubled each time.
    assert (found["G as printed"], found["Max Group"]) == (4, "10.00 %")
    assert found["Random"] == "4.17 %"
    assert pictures.doubling("toy", "large_map") == []  # Not measured yet.


@pytest.mark.parametrize("experiment", ["participation", "mechanism_losses"])
def test_figures_of_the_maths_are_those_of_the_code(experiment):
    with open(_FOLDER / "results" / f"{experiment}.csv", newline="", encoding="utf-8") as file:
        kept = list(csv.DictReader(file))
    made = _load(experiment).rows()
    assert len(made) == len(kept)
    for now, then in zip(made, kept, strict=True):
        for name in {"experiment", "mechanism"} & then.keys():
            assert now.pop(name) == then.pop(name)
        for column, value in then.items():
            assert float(now[column]) == pytest.approx(float(value), rel=5e-3), column


def test_losses_of_models_are_those_of_the_code(monkeypatch):
    experiment = _load("workloads")
    kept = {(row["rounds"], row["workload"]): row for row in _kept("workload_losses.csv")}
    assert len(kept) == len(experiment._SCHEMAS) * len(experiment.WORKLOADS)
    monkeypatch.setattr(experiment, "_NAMES", {"blt": "BLT", "bandtoep": "banded Toeplitz"})
    for text in experiment.WORKLOADS[:2]:
        row = experiment.losses(schema_lib.MinSep.as_many_as_fit(200, 200), text)
        assert all(str(value) == kept["200", text][name] for name, value in row.items())


def test_models_are_trained_with_both_strategies(monkeypatch):
    experiment = _load("workloads")
    tiny = {"_TRAINED": 40, "_HELD_OUT": 16, "_BATCH": 8, "_STEPS": 15, "_SEEDS": (0, 1)}
    for name, value in (tiny | {"_RATES": (0.1,)}).items():
        monkeypatch.setattr(experiment, name, value)
    row = experiment.trained("blt", "momentum=0.9,averaging=0.95", 8.0)
    kept = _kept("workload_training.csv")
    assert list(row) == list(kept[0]) and row["noise of the models"].startswith("-")
    assert len(kept) == 12
    quiet, matrix = experiment.workload_lib.parse("momentum=0.9"), np.eye(15)
    sound, same = (experiment.accuracies(matrix, 0.0, quiet, 0.1) for _ in range(2))
    np.testing.assert_array_equal(sound, same)


def test_clipped_sums_are_those_of_single_examples():
    experiment = _load("workloads")
    rng = np.random.default_rng(0)
    shapes = [(20, 32), (1, 32), (32, 10), (1, 10)]
    weights = [rng.normal(size=(1, *shape)) for shape in shapes]
    x, y = 3 * rng.normal(size=(5, 20)), rng.integers(10, size=5)
    ones = [experiment._clipped_sums(weights, x[i : i + 1], y[i : i + 1])[0] for i in range(5)]
    assert all(np.linalg.norm(one) <= 1.0 + 1e-9 for one in ones)
    np.testing.assert_allclose(experiment._clipped_sums(weights, x, y)[0], sum(ones), rtol=1e-9)

    def loss(flat):
        parts = np.split(flat, np.cumsum([weight.size for weight in weights])[:-1])
        shaped = [part.reshape(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        logits = experiment._forward(shaped, x[:1])[1][0, 0]
        return np.log(np.sum(np.exp(logits))) - logits[y[0]]

    flat, step = np.concatenate([weight.ravel() for weight in weights]), rng.normal(size=1002)
    slope = (loss(flat + 1e-6 * step) - loss(flat - 1e-6 * step)) / 2e-6
    gradient = ones[0] @ step
    # A clipped gradient is shorter than the gradient, in its direction.
    assert 0.0 < gradient / slope <= 1.0 + 1e-6


@pytest.mark.slow
def test_passes_of_a_keras_model_are_compared_as_the_page_says(monkeypatch):
    experiment = _load("keras_passes")
    tiny = {"_NUM_TRAINED": 8, "_NUM_HELD_OUT": 16, "_BATCH": 4, "_EPOCHS": 1, "_RATES": (0.1,)}
    for name, value in tiny.items():
        monkeypatch.setattr(experiment, name, value)
    row = experiment.row("identity")
    kept = _kept("keras_passes.csv")
    assert [entry["mechanism"] for entry in kept] == list(experiment._MECHANISMS)
    same = ("ε", "δ", "seeds")
    assert all([str(row[name]) for name in same] == [x[name] for name in same] for x in kept)
    accuracies = {0.05: [0.5, 0.5, 0.5], 0.2: [0.6, 0.7, 0.8]}
    assert experiment.summary("blt", accuracies)["held-out accuracy"] == "70.0 ± 5.8 %"


_NOISE = ("finetuning_noise.csv", ("figure", "ε", "method", "G", "units a step"))


def _kept(name):
    with open(_FOLDER / "results" / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "name, keys, is_whole",
    [
        (*_NOISE, False),
        pytest.param(*_NOISE, True, marks=pytest.mark.slow),
        ("finetuning_epsilon.csv", ("σ", "G"), True),
    ],
)
def test_the_noise_of_finetuning_is_that_of_the_code(name, keys, is_whole, monkeypatch):
    monkeypatch.syspath_prepend(_FOLDER)
    module = _load("finetuning_noise")
    if name == "finetuning_noise.csv":
        if not is_whole:
            for axis in ("_GROUPS", "_BUDGETS", "_COHORTS", "_USER_GROUPS"):
                monkeypatch.setattr(module, axis, getattr(module, axis)[::4])
        made = module.noise(targets=(4.0,))
    else:
        made = module.epsilons(groups=(1, 2), stddevs=(2.0,))
    for now in made:
        (then,) = (row for row in _kept(name) if all(row[k] == str(now[k]) for k in keys))
        for column in set(now) - set(keys):
            assert float(now[column]) == pytest.approx(float(then[column]), rel=5e-3), now


def test_the_synthetic_means_were_estimated_on_the_whole_grid():
    kept = _kept("mean_estimation.csv")
    axes = (("epsilon", "ε", 7), ("compute_budget", "B", 6), ("within_user", "σ₂", 5))
    for varied, column, count in axes:
        rows = [row for row in kept if row["varied"] == varied]
        assert len({row[column] for row in rows}) == count
        ways = {(row["method"], row["G"]) for row in rows}
        assert ways == {("ELS", "16"), *(("ULS", str(group)) for group in (1, 2, 4, 8, 16))}
    # One cell again, with fewer trials.
    method = gaussian_means.Method("user", 8)
    found = gaussian_means.best(gaussian_means.Task(), method, num_trials=32)
    default = {"varied": "epsilon", "ε": "1.0", "method": "ULS", "G": "8"}
    (then,) = (row for row in kept if default.items() <= row.items())
    assert found.loss == pytest.approx(float(then["loss"]), rel=0.15)


def test_a_sweep_is_kept_when_it_is_finished(tmp_path, monkeypatch):
    collect = _load("collect")
    monkeypatch.setattr(collect, "_HERE", tmp_path / "experiments")
    monkeypatch.setattr(collect, "_PICTURES", tmp_path / "docs")
    sweep, options = tmp_path / "toy", {"mechanism": "blt", "noise_multiplier": 1.0}
    folder.write(sweep, options, {"seed": (0, 1)})
    weights = {"initial_weights": "/somewhere/here/pretrained"}
    _write(sweep / "cells.csv", [{"seed": seed} | weights for seed in (0, 1)])
    _write(sweep / "summary.csv", [{"cells": 2}])
    (sweep / "curves.png").write_bytes(b"picture")
    histograms = {"10": [0.25, 0.75], "50": [0.0, 1.0]}
    for seed, accuracy in ((0, 0.1), (1, 0.3)):
        cell = sweep / "cells" / f"seed={seed}"
        (cell / "private").mkdir(parents=True)
        baselines = {"bigrams": accuracy, "bigrams with earlier text": accuracy + 0.5}
        (cell / "private" / "baselines.json").write_text(json.dumps(baselines))
        (cell / "held_out.json").write_text(json.dumps({"head_words": {"histograms": histograms}}))
        folder.write_ending(cell, folder.Ending(0, ""))
    (sweep / "cells" / "seed=7").mkdir()  # Of somebody else.
    for path in collect.collect(sweep, "toy"):
        assert path.exists()
    kept = tmp_path / "experiments" / "results" / "toy"
    cells = (kept / "cells.csv").read_text().splitlines()
    assert cells == ["seed,initial_weights", "0,pretrained", "1,pretrained"]
    columns = "model,eval_top1_in_vocab,eval_top1_with_earlier_text"
    assert (kept / "baselines.csv").read_text() == f"{columns}\nbigrams,0.2,0.7\n"
    heads = (kept / "head_words.csv").read_text().splitlines()
    assert heads == ["setting,seed,of_10,of_50", ",0,0.75,1.0", ",1,0.75,1.0"]
    folder.write(sweep, options, {"seed": (0, 1, 2)})
    with pytest.raises(ValueError, match="1 of 3 cells"):
        collect.collect(sweep, "toy")


@pytest.mark.parametrize("secure", [(), ("secure",)])
def test_devices_of_the_demo_do_not_look_for_a_server_that_was_killed(tmp_path, secure):
    command, pretrained = tmp_path / "command", tmp_path / "pretrained"
    command.write_text(_COMMAND)
    command.chmod(0o755)
    endpoint = tmp_path / "demo" / "store" / "server" / "endpoint.json"
    for path in (endpoint, pretrained / "model.npz"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old\n")
    read = os.stat(endpoint).st_ino
    done = subprocess.run(
        [_FOLDER / "serve_demo.sh", command, pretrained, tmp_path / "demo", *secure],
        env=os.environ | {"ENDPOINT": str(endpoint)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "fleet finds new\n"
    # One that still runs is found by others all the while: its file is not removed.
    assert os.stat(endpoint).st_ino == read
    called = (endpoint.parent / "endpoint.json.called").read_text()
    assert called.startswith("task new --config next_word")
    assert called.count("--secure-aggregation") == 2 * len(secure)  # Of task new and of serve.
    assert ("--drop-outs 0.1" in called) == bool(secure)
