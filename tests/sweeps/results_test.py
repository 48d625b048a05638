"""Tests of what cells say together: means, standard errors, the Pareto front."""

import dataclasses
import json

import numpy as np
import pytest

from tests.sweeps import made_up
from tff_dpftrl.sweeps import folder, results

_NONE = {"mechanism": "none"}


def _of(noise, *accuracies, **fields):
    return [
        made_up.result({"noise_multiplier": noise, "seed": seed}, accuracy, **fields)
        for seed, accuracy in enumerate(accuracies)
    ]


def test_means_and_standard_errors_are_those_of_numpy():
    accuracies = [0.1, 0.13, 0.19]
    one, other = results.settings([*_of(1.0, *accuracies), *_of(2.0, 0.4)])
    assert one.values == {"noise_multiplier": 1.0} and len(one.results) == 3
    assert one.mean(results.ACCURACY) == pytest.approx(np.mean(accuracies), rel=1e-12)
    expected = np.std(accuracies, ddof=1) / np.sqrt(3)
    assert one.standard_error(results.ACCURACY) == pytest.approx(expected, rel=1e-12)
    # s² = (0.04² + 0.01² + 0.05²) / 2 = 0.0021, by hand.
    assert one.standard_error(results.ACCURACY) == pytest.approx((0.0021 / 3) ** 0.5, rel=1e-12)
    assert other.mean(results.ACCURACY) == 0.4
    assert other.standard_error(results.ACCURACY) is None
    assert other.mean("eval_unheard_of") is None


def test_the_last_evaluation_the_best_and_the_time_count():
    (found,) = _of(1.0, 0.4)
    assert found.metrics == {
        results.ACCURACY: 0.4,
        "eval_loss": 3.6,
        "best_" + results.ACCURACY: 0.4,
        "seconds": 2.0,
    }
    worse = made_up.result({"noise_multiplier": 1.0}, -0.4)
    assert worse.metrics["best_" + results.ACCURACY] == -0.2


def test_the_version_that_began_a_cell_is_read(tmp_path):
    cell = made_up.result({"noise_multiplier": 1.0}, 0.1).cell
    assert results.read(tmp_path, cell).code_version is None
    of_cell = folder.cell_folder(tmp_path, cell)
    of_cell.mkdir(parents=True)
    (of_cell / "config.json").write_text('{"versions": {"tff_dpftrl": "0.3.0"}}')
    assert results.read(tmp_path, cell).code_version == "0.3.0"


def test_what_a_finished_cell_has_of_its_last_model_is_among_its_metrics(tmp_path):
    cell = made_up.result({"noise_multiplier": 1.0}, 0.1).cell
    of_cell = folder.cell_folder(tmp_path, cell)
    of_cell.mkdir(parents=True)
    earlier = {"all": {"words": 9, "model": 0.3, "model_and_cache": 0.35}}
    (of_cell / "held_out.json").write_text(json.dumps({"earlier_text": earlier}))
    assert results.read(tmp_path, cell).metrics == {}  # Perhaps of an earlier attempt.
    folder.write_ending(of_cell, folder.Ending(0, ""))
    assert results.read(tmp_path, cell).metrics == {"eval_top1_with_earlier_text": 0.35}


def test_a_mean_of_infinities_has_no_error():
    pair = _of(1.0, np.inf, 1.0)
    (found,) = results.settings(pair)
    assert found.mean(results.ACCURACY) == np.inf
    assert found.standard_error(results.ACCURACY) is None


def test_only_finished_cells_are_pooled():
    cells = [*_of(1.0, 0.1, 0.2), *_of(1.0, 0.9, state="begun"), *_of(2.0, 0.9, state="failed")]
    (found,) = results.settings(cells)
    assert found.mean(results.ACCURACY) == pytest.approx(0.15)


def test_a_curve_has_the_rounds_that_all_cells_evaluated():
    pair = _of(1.0, 0.2, 0.4)
    (setting,) = results.settings(pair)
    error = 0.1  # s / √2 of 0.2 and 0.4.
    assert setting.curve() == [
        (2, pytest.approx(0.15), pytest.approx(error / 2)),
        (4, pytest.approx(0.3), pytest.approx(error)),
    ]
    short = made_up.result({"noise_multiplier": 1.0, "seed": 2}, 0.6)
    short.rows[3][results.ACCURACY] = None
    (setting,) = results.settings([*pair, short])
    assert [number for number, _, _ in setting.curve()] == [2]
    assert results.settings(_of(1.0, 0.2))[0].curve() == [(2, 0.1, None), (4, 0.2, None)]


def test_the_largest_epsilon_of_a_setting_counts():
    pair = [*_of(1.0, 0.1, epsilon=2.0), *_of(1.0, 0.1, epsilon=3.0)]
    assert results.settings(pair)[0].epsilon == 3.0
    assert results.settings([*pair, *_of(1.0, 0.1, epsilon=None)])[0].epsilon is None


def test_settings_are_ranked_by_bits_per_character_if_all_have_them():
    settings = results.settings([*_of(1.0, 0.1), *_of(2.0, 0.3, rows=[]), *_of(3.0, 0.2)])
    metric, ranked = results.ranked(settings)
    assert metric == results.LOSS
    assert [setting.noise_multiplier for setting in ranked] == [3.0, 1.0, 2.0]
    for setting, bits in zip(settings, (1.5, np.nan, 1.75), strict=True):
        setting.results[0].rows[3:] = [{results.ACCURACY: 0.1, results.BITS: bits}]
    assert results.ranked(settings[::2])[0] == results.BITS
    assert [s.noise_multiplier for s in results.ranked(settings[::-2])[1]] == [1.0, 3.0]


def test_simulated_epsilons_are_used_if_all_private_settings_have_one():
    without = made_up.result(_NONE, 0.3, None)
    simulated = _of(1.0, 0.1, simulated_epsilon=0.5)
    assert results.uses_simulated_epsilon(results.settings([without, *simulated]))
    assert not results.uses_simulated_epsilon(results.settings([*simulated, *_of(2.0, 0.1)]))
    assert not results.uses_simulated_epsilon(results.settings([without]))


@pytest.mark.parametrize(
    "points, front",
    [
        ([], []),
        ([(1.0, 0.1)], [0]),
        ([(1.0, 0.1), (2.0, 0.2), (3.0, 0.15), (0.5, 0.05)], [3, 0, 1]),
        ([(1.0, 0.1), (1.0, 0.2)], [1]),
        ([(1.0, 0.2), (2.0, 0.2)], [0]),
        ([(1.0, 0.2), (1.0, 0.2)], [0, 1]),
    ],
)
def test_the_front_has_what_no_other_beats(points, front):
    assert results.pareto_front(points) == front


def test_baselines_are_those_of_all_settings_and_depend_on_the_seed_only():
    first, second = _of(1.0, 0.1, 0.2)
    second = dataclasses.replace(second, baselines={"bigrams": 0.4})
    assert results.common_baselines([first, second]) == {"bigrams": pytest.approx(0.3)}
    (other,) = _of(2.0, 0.1)
    assert results.common_baselines([first, other]) == {"bigrams": 0.2}
    (unknown,) = _of(2.0, 0.1, baselines={})
    assert results.common_baselines([first, unknown]) == {"bigrams": 0.2}
    (different,) = _of(2.0, 0.1, baselines={"bigrams": 0.3})
    assert results.common_baselines([first, different]) == {}
