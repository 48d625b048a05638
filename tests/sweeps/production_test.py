"""Tests of the noise that a sweep's target bears."""

import dataclasses
import json
import sys

import pytest

from tests.sweeps import made_up
from tff_dpftrl.accounting import planner
from tff_dpftrl.mechanisms import tree
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder, production

_OPTIONS = {"num_rounds": 4, "clients_per_round": 5, "delta": 1e-7, "mechanism": "tree"}


def _sweep(output, accuracies, *, options=_OPTIONS, **values):
    """Finished cells with a noise multiplier each, and their files."""
    found = []
    for noise, by_seed in accuracies.items():
        for seed, accuracy in enumerate(by_seed):
            axes = {**values, "noise_multiplier": noise, "seed": seed}
            result = made_up.result(axes, accuracy, options=options)
            of_cell = folder.cell_folder(output, result.cell)
            of_cell.mkdir(parents=True)
            content = {
                "derived": {"strategy": tree.Tree(4).to_dict()},
                "facts": {"num_parameters": 1234},
            }
            (of_cell / "config.json").write_text(json.dumps(content))
            found.append(result)
    return found


def test_the_largest_noise_whose_mean_meets_the_target_is_chosen(tmp_path):
    results = _sweep(tmp_path, {4.0: [0.05], 1.0: [0.2, 0.3], 2.0: [0.1, 0.2]})
    families = production.families(results)
    (family,) = families
    assert [point.noise_multiplier for point in family.points] == [1.0, 2.0, 4.0]
    assert [point.accuracy for point in family.points] == pytest.approx([0.25, 0.15, 0.05])
    (choice,) = production.choose(families, 0.149, tmp_path)
    assert (choice.point.noise_multiplier, choice.report_goal) == (2.0, 5)
    assert (choice.num_rounds, choice.delta, choice.missed) == (4, 1e-7, ())
    assert choice.num_parameters == 1234
    # As `tff-dpftrl plan --keep-noise-of tree:2:5 --rounds 4` has it.
    expected = planner.noise_in_sum(tree.Tree(4), num_rounds=4, noise_multiplier=2.0, report_goal=5)
    assert choice.noise_in_sum == pytest.approx(expected, rel=1e-12)
    (choice,) = production.choose(families, 0.2, tmp_path)
    assert choice.point.noise_multiplier == 1.0


def test_the_noise_is_relative_to_the_report_goal_that_is_simulated(tmp_path):
    options = {**_OPTIONS, "simulate_report_goal": 500, "simulate_population": 50_000}
    results = _sweep(tmp_path, {2.0: [0.2]}, options=options)
    (choice,) = production.choose(production.families(results), 0.1, tmp_path)
    assert choice.report_goal == 500
    plain = _sweep(tmp_path / "plain", {2.0: [0.2]})
    (other,) = production.choose(production.families(plain), 0.1, tmp_path / "plain")
    assert choice.noise_in_sum == pytest.approx(other.noise_in_sum / 100, rel=1e-12)


def test_what_secure_aggregation_adds_is_kept_too(tmp_path):
    (result,) = _sweep(tmp_path, {2.0: [0.2]})
    (plain,) = production.choose(production.families([result]), 0.1, tmp_path)
    inflated = dataclasses.replace(result, clip_norm_inflation=1.25)
    (choice,) = production.choose(production.families([inflated]), 0.1, tmp_path)
    assert choice.noise_in_sum == pytest.approx(1.25 * plain.noise_in_sum, rel=1e-12)


def test_if_none_meets_it_the_nearest_is_named(tmp_path):
    families = production.families(_sweep(tmp_path, {1.0: [0.2], 2.0: [0.1], 0.5: [0.15]}))
    assert production.choose(families, 0.3, tmp_path) == []
    assert production.nearest(families).noise_multiplier == 1.0


def test_less_noise_that_missed_the_target_is_told(tmp_path):
    families = production.families(_sweep(tmp_path, {1.0: [0.1], 2.0: [0.2], 3.0: [0.1]}))
    (choice,) = production.choose(families, 0.15, tmp_path)
    assert (choice.point.noise_multiplier, choice.missed) == (2.0, (1.0,))


def test_families_are_ranked_by_the_noise_they_bear(tmp_path):
    few = _sweep(tmp_path, {2.0: [0.2]}, clip_norm=0.5)
    many = _sweep(tmp_path, {4.0: [0.2]}, clip_norm=1.0)
    none = _sweep(tmp_path, {8.0: [0.01]}, clip_norm=2.0)
    without = made_up.result({"mechanism": "none", "seed": 0}, 0.9, None)
    families = production.families([*few, *many, *none, without])
    assert [family.label for family in families] == [f"clip_norm={c}" for c in ("0.5", "1", "2")]
    choices = production.choose(families, 0.1, tmp_path)
    assert [choice.family.label for choice in choices] == ["clip_norm=1", "clip_norm=0.5"]


def test_the_strategy_of_a_run_is_in_its_folder(tmp_path):
    results = _sweep(tmp_path, {2.0: [0.2]})
    config = folder.cell_folder(tmp_path, results[0].cell) / "config.json"
    config.rename(tmp_path / "elsewhere")
    config.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="leads out of the folder"):
        production.choose(production.families(results), 0.1, tmp_path)


def test_a_run_whose_strategy_is_unknown_is_refused(tmp_path):
    results = _sweep(tmp_path, {2.0: [0.2]})
    (folder.cell_folder(tmp_path, results[0].cell) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say which strategy"):
        production.choose(production.families(results), 0.1, tmp_path)


@pytest.mark.parametrize(
    "options, axes, message",
    [
        ({"noise_multiplier": 1.0}, {"seed": (0, 1)}, "add an axis"),
        (
            {"algorithm": "dp-fedavg"},
            {"noise_multiplier": (1.0,)},
            "plans for algorithm 'dp-ftrl' without .* noise_multiplier=1 has 'dp-fedavg'",
        ),
        (
            {"sampling": "cyclic", "mechanism": "bandtoep", "bands": 2},
            {"noise_multiplier": (1.0,)},
            "without sampling, and the cell noise_multiplier=1 has 'cyclic'",
        ),
        ({"stop_at_accuracy": 0.1}, {"noise_multiplier": (1.0,)}, "earlier by stop_at_accuracy"),
        ({"max_epsilon": 9.0}, {"noise_multiplier": (1.0,)}, "may end earlier by max_epsilon"),
    ],
)
def test_a_sweep_that_no_noise_can_be_chosen_from_is_refused(options, axes, message):
    with pytest.raises(ValueError, match=message):
        production.check(cells_lib.grid(options, axes))
    production.check(cells_lib.grid({}, {"target_epsilon": (1.0, 2.0)}))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
