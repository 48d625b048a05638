"""Tests of the options of tasks, and of those that are refused."""

import pytest

from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import options

_GIVEN = {
    "population": "keyboard",
    "num_devices": 300,
    "num_rounds": 50,
    "clients_per_round": 40,
    "noise_multiplier": 1.0,
}


def _config(**changes):
    return task_config.TaskConfig.of(**(_GIVEN | changes))


def test_rounds_follow_from_the_options():
    rounds = _config(over_selection=1.25, least_fraction=0.5, reporting_timeout=7).round_settings
    assert (rounds.goal_count, rounds.wanted, rounds.least) == (40, 50, 20)
    assert rounds.reporting_timeout == 7.0


def test_what_follows_is_kept(tmp_path):
    resolved = _config().resolved("nwp")
    assert resolved.serving.task == "nwp"
    # 300 devices, 52 of them in each round, and some to spare.
    assert resolved.privacy.min_sep == 4
    assert resolved.language.lstm_size == 128
    assert _config(task="other", min_sep=2).resolved("nwp").serving.task == "other"
    assert _config(num_devices=52).resolved("nwp").privacy.min_sep == 1
    assert _config(num_devices=10**6).resolved("nwp").privacy.min_sep == 50
    assert resolved.resolved("nwp") == resolved
    assert task_config.TaskConfig.of(**resolved.to_dict()) == resolved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": ""}, "population must be given"),
        ({"num_devices": None}, "num_devices must be given"),
        ({"num_devices": 51}, "num_devices=51 is below the 52 devices"),
        ({"min_sep": 6}, "min_sep=6 with 52 devices a round needs 312 of them"),
        ({"max_participations": 8}, "raise it, or lower one of these"),
        ({"task": "a/b"}, "task must be a name"),
        ({"population": "../x"}, "population must be a name"),
        ({"population": "é"}, "population must be a name"),
        ({"population": "--"}, "population must be a name"),
        ({"collection": ""}, "collection must be a name"),
        ({"vocabulary": "private"}, "the server never sees"),
        ({"algorithm": "dp-fedavg"}, "mechanism 'identity'"),
        ({"model": "own"}, "cannot be named"),
        ({"weight": 0.0}, "weight must be a finite number, above 0"),
        ({"least_fraction": 1.5}, "least_fraction must be"),
        ({"least_fraction": 0.02}, "with 1 reports, and its metrics would be"),
        ({"over_selection": 0.5}, "over_selection must be at least 1"),
        ({"deterministic_noise_seed": 3}, "no meaning for a task"),
        ({"stop_at_accuracy": 0.3}, "no meaning for a task"),
        ({"held_out_users": "protected"}, "no meaning for a task"),
        ({"metrics_epsilon": 0.5}, "no meaning for a task; it is an option of train"),
        (
            {"target_epsilon": 8.0, "noise_multiplier": None, "budget_shares": "metrics=0.1"},
            "budget_shares has no meaning for a task",
        ),
        ({"simulate_report_goal": 50, "simulate_population": 100}, "no meaning for a task"),
        ({"noise_multiplier": None}, "needs either noise_multiplier or target_epsilon"),
    ],
)
def test_bad_options_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        _config(**changes)
    assert "\n" not in str(caught.value)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="did you mean over_selection"):
        options.config_from_mapping({"overselection": 2}, "a file", task_config.TaskConfig)


def test_a_grid_is_a_group_of_named_tasks():
    group = task_config.grid(_config(task="nwp"), "client_learning_rate", [0.1, 0.3])
    named = [(suffix, one.serving.task, one.learning.client_learning_rate) for suffix, one in group]
    assert named == [
        ("-client_learning_rate=0.1", "nwp-client_learning_rate=0.1", 0.1),
        ("-client_learning_rate=0.3", "nwp-client_learning_rate=0.3", 0.3),
    ]
    (_, unnamed), *_ = task_config.grid(_config(), "num_rounds", [2])
    assert unnamed == _config().changed(num_rounds=2)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("learning_rate", [0.1], "unknown option 'learning_rate'"),
        ("num_rounds", [2, 2], "gives num_rounds a value twice"),
        ("num_rounds", ["many"], "num_rounds must be of type int"),
    ],
)
def test_bad_grids_are_refused(name, values, message):
    with pytest.raises(ValueError, match=message):
        task_config.grid(_config(), name, values)


def test_the_demo_is_a_task():
    values = options.read_toml("next_word")
    config = options.config_from_mapping(values, "the demo", task_config.TaskConfig)
    assert config.serving.population == "keyboard"
    assert config.round_settings.wanted <= config.serving.num_devices
