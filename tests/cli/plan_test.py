"""Tests of `tff-dpftrl plan`."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex

import pytest

from tff_dpftrl.accounting import planner
from tff_dpftrl.cli import config_flags, main, plan, plan_report
from tff_dpftrl.data import split
from tff_dpftrl.mechanisms import table
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import config
from tff_dpftrl.training import options as options_lib

_KNOWN = ["--population", "4000000", "--rounds", "2000", "--delta", "1e-10"]
_TARGET = [*_KNOWN, "--target-epsilon", "5", "--report-goals", "3000,5000,6500"]

_build = functools.cache(table.build)


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """Optimizes each strategy once for all tests: they plan for the same few schemas."""
    monkeypatch.setattr(table, "build", _build)


def _out(capsys, *arguments):
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *arguments])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_text_has_a_table_the_hypothesis_and_commands(capsys):
    text = _out(capsys, *_TARGET)
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["goal", "mechanism", "min-sep"]
    assert "Recommended: blt with 5000 clients a round" in text
    assert "Hypothesis, not theorem" in text
    assert "If devices come back after 400 rounds: epsilon 7.703" in text


_PARTIES = [*_TARGET, "--mechanisms", "blt", "--secagg-inflation", "1.01"]


def test_noise_parties_cost_the_noise_of_each_and_no_epsilon(capsys, tmp_path, monkeypatch):
    def recommended(*flags):
        return json.loads(_out(capsys, *_PARTIES, *flags, "--format", "json"))["recommended"]

    one, three = recommended("--noise-parties", "1"), recommended("--noise-parties", "3")
    assert one["report_goal"] == three["report_goal"] == 5000  # 6500 are more than a group.
    for name in ("epsilon", "noise_multiplier", "rho_zcdp"):
        assert three[name] == one[name]
    for name in ("noise_in_sum", "noise_per_round"):
        assert three[name] == pytest.approx(3**0.5 * one[name], rel=1e-12)
    text = _out(capsys, *_PARTIES, "--noise-parties", "3")
    assert "has 3 times the variance, 1.732 times the noise" in text
    assert "unless the server\ncolludes with all 3." in text
    made = shlex.split(next(line for line in text.splitlines() if "task new" in line))
    monkeypatch.chdir(tmp_path)
    for index in (1, 2, 3):
        signing_keys.create(tmp_path / f"party_{index}")
    # `task new` knows every flag, and its config accepts them.
    args = main._build_parser().parse_args(made[1:])
    given = config_flags.given_options(args, task_config.TaskConfig)
    parsed = options_lib.config_from_mapping(given, "the command line", task_config.TaskConfig)
    assert len(parsed.noise_parties) == 3 and parsed.round_settings.wanted == 5000
    assert parsed.noise_multiplier == pytest.approx(three["noise_multiplier"], rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--noise-parties", "2"], "noise_parties=2 add .* which have secagg_inflation: give it"),
        ([*_PARTIES[-2:], "--noise-parties", "9"], "--noise-parties must be at most 8, got 9"),
        ([*_PARTIES[-2:], "--noise-parties", "-1"], "noise_parties must be at least 0, got -1"),
        (
            [*_PARTIES[-2:], "--noise-parties", "1", "--report-goals", "6500"],
            "one group a round, of 5000 devices at most, and --report-goals has 6500",
        ),
        (
            [*_PARTIES[-2:], "--noise-parties", "1", "--budget-shares", "metrics"],
            "noise_parties=1 add .* which have no budget_shares",
        ),
    ],
)
def test_noise_parties_that_no_task_has_are_one_line_and_status_2(flags, message, capsys):
    assert main.main(["plan", *_TARGET, *flags]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


_SAMPLED = [
    "--population", "160", "--rounds", "16", "--delta", "1e-5", "--target-epsilon", "4",
    "--report-goals", "40", "--sampling",
]  # fmt: skip


def test_sampled_clients_have_a_table_of_bands(capsys):
    every = _out(capsys, *_SAMPLED, "cyclic", "--all").splitlines()
    assert every[0].split()[:4] == ["goal", "mechanism", "sampling-groups", "sampling-probability"]
    assert every[1].split()[:4] == ["40", "identity", "1", "0.25"]
    assert {f"banded-toeplitz ({bands} bands)" for bands in (2, 4)} <= {
        line[6:].split("  ")[0] for line in every
    }
    best = json.loads(_out(capsys, *_SAMPLED, "cyclic", "--format", "json"))["plans"]
    assert len(best) == 1 and best[0]["epsilon"] <= 4
    calibrated = [
        "calibrate", "--target-epsilon", "4", "--delta", "1e-5", "--rounds", "16", "--sampling",
        "poisson", "--sampling-probability", "0.25", "--format", "json",
    ]  # fmt: skip
    (plain,) = json.loads(_out(capsys, *_SAMPLED, "poisson", "--format", "json"))["plans"]
    assert main.main(calibrated) == 0
    noise = json.loads(capsys.readouterr().out)["noise_multiplier"]
    assert plain["noise_multiplier"] == pytest.approx(noise, rel=2e-3)


@pytest.mark.parametrize(
    "flag", [["--min-sep", "4"], ["--plot", "a.png"], ["--what-if-rounds", "9"]]
)
def test_what_is_not_for_samples_is_one_line_and_status_2(flag, capsys):
    assert main.main(["plan", *_SAMPLED, "poisson", *flag]) == 2
    error = capsys.readouterr().err
    assert f"{flag[0]} is not for --sampling" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "delta, warned",
    [("0.05", "not below 1 / 27"), ("0.03", "times the 27 devices is 0.81"), ("0.003", "")],
)
def test_a_delta_that_is_too_large_for_the_population_is_warned_of(capsys, delta, warned):
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    known = ["--population", "27", "--rounds", "10", "--target-epsilon", "1"]
    options = ["--report-goals", "5", "--mechanisms", "tree", "--delta", delta]
    args = parser.parse_args(["plan", *known, *options])
    assert args.run(args) == 0
    error = capsys.readouterr().err
    assert warned in error and ("δ" in error) == bool(warned)


def test_the_printed_commands_run_and_keep_the_target(capsys, tmp_path, monkeypatch):
    commands = [
        shlex.split(line) for line in _out(capsys, *_TARGET).splitlines() if "  tff-dpftrl" in line
    ]
    assert [command[1] for command in commands] == ["optimize", "account", "train"]
    monkeypatch.chdir(tmp_path)
    assert main.main(commands[0][1:]) == 0
    capsys.readouterr()
    assert main.main([*commands[1][1:], "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 5 * (1 - 1e-5) <= report["epsilon"] <= 5
    # `train` knows every flag, and its config accepts them.
    args = main._build_parser().parse_args(commands[2][1:])
    known = {field: getattr(args, field) for field in _CONFIG_FIELDS if hasattr(args, field)}
    parsed = options_lib.config_from_mapping(known, "the command line")
    assert (parsed.learning.clients_per_round, parsed.learning.num_rounds) == (5000, 2000)
    assert parsed.privacy.min_sep == 800
    assert parsed.strategy == "strategy.json"


@pytest.mark.parametrize("population, goals", [(60, "5"), (700, "10,20"), (3000, "100")])
def test_train_takes_the_command_for_a_file_of_so_many_users(
    population, goals, capsys, tmp_path, monkeypatch
):
    flags = ["--population", str(population), "--rounds", "90", "--report-goals", goals]
    flags += ["--target-epsilon", "4", "--delta", "1e-6", "--mechanisms", "blt"]
    recommended = json.loads(_out(capsys, *flags, "--format", "json"))["recommended"]
    needed = recommended["training_users_needed"]
    in_file = recommended["users_of_a_file_needed"]
    text = _out(capsys, *flags)
    assert f"for the {needed:,} training users" in text
    assert f"the file must have {in_file:,} users" in text
    commands = [shlex.split(line) for line in text.splitlines() if "  tff-dpftrl" in line]
    monkeypatch.chdir(tmp_path)
    assert main.main(commands[0][1:]) == 0
    args = main._build_parser().parse_args(commands[2][1:])
    known = {field: getattr(args, field) for field in _CONFIG_FIELDS if hasattr(args, field)}
    parsed = options_lib.config_from_mapping(known, "the command line")
    # As many users as said, less those that `train` keeps for evaluation.
    in_training = sum(split.hash_bucket(f"user {i}") >= 2 for i in range(in_file))
    assert needed <= in_training < in_file
    made = parsed.request().plan(in_training, num_parameters=10)
    assert 4 * (1 - 1e-5) <= made.epsilon_after(90) <= 4
    made.sampler(0).cohort(89)
    with pytest.raises(ValueError):  # Fewer training users than said do not do.
        parsed.request().plan(needed - 1, num_parameters=10).sampler(0)


def test_the_note_of_held_out_users_is_near_the_split():
    shares = [split.hash_bucket(str(i)) >= 2 for i in range(20_000)]
    margin = 6 * 0.4 / 20_000**0.5
    assert sum(shares) / 20_000 == pytest.approx(plan_report._TRAINING_SHARE, abs=margin)


_CONFIG_FIELDS = config.TrainingConfig.known()


def test_a_budget_is_split_by_shares(capsys):
    one = [*_KNOWN, "--target-epsilon", "5", "--report-goals", "5000", "--mechanisms", "blt"]
    split_up = [*one, "--budget-shares", "vocabulary,metrics=0.19"]
    text = _out(capsys, *split_up)
    assert "Epsilon 5 at delta 1e-10 is of all together, by shares of the squared mu:" in text
    assert "vocabulary: 0.05 of the budget; alone epsilon " in text
    (train,) = (line for line in text.splitlines() if "tff-dpftrl train" in line)
    shares = "--budget-shares vocabulary=0.05,metrics=0.19 --vocabulary dp"
    assert f"--target-epsilon 5.0 {shares} " in train
    (alone,), (shared,) = (
        json.loads(_out(capsys, *flags, "--format", "json"))["plans"] for flags in (one, split_up)
    )
    # 1 / √(1 − 0.24), and a little for the vocabulary's tenth of δ.
    growth = shared["noise_multiplier"] / alone["noise_multiplier"]
    assert 0.76**-0.5 < growth < 1.01 * 0.76**-0.5
    assert shared["epsilon"] == pytest.approx(alone["epsilon"], rel=1e-9)
    # No ρ-zCDP holds beside a part with a δ of its own.
    assert alone["rho_zcdp"] and shared["rho_zcdp"] is shared["epsilon_rdp"] is None
    (row,) = (line.split() for line in text.splitlines() if line.startswith("5000 "))
    assert row[6] == "-"


def test_a_budget_of_sampled_rounds_is_split_by_shares(capsys):
    flags = [*_SAMPLED, "poisson"]
    split_up = [*flags, "--budget-shares", "metrics=0.19"]
    (alone,), (shared,) = (
        json.loads(_out(capsys, *one, "--format", "json"))["plans"] for one in (flags, split_up)
    )
    assert shared["noise_multiplier"] == pytest.approx(alone["noise_multiplier"] / 0.9, rel=1e-9)
    assert shared["epsilon"] == pytest.approx(alone["epsilon"], rel=1e-4)
    assert [row["name"] for row in shared["parts"]] == ["weights", "training metrics"]
    assert "training metrics: figures of each round, 0.19 of the budget" in _out(capsys, *split_up)


def test_json(capsys):
    report = json.loads(_out(capsys, *_TARGET, "--format", "json"))
    assert report["recommended"]["mechanism"] == report["recommended"]["strategy"]["mechanism"]
    assert "Hypothesis" in report["hypothesis"]
    for row in report["plans"]:
        assert row["epsilon"] <= 5
        assert row["min_sep"] * row["report_goal"] <= 4_000_000
        assert {"noise_multiplier", "noise_in_sum", "memory_bytes", "upload_bytes"} <= row.keys()
    everything = json.loads(_out(capsys, *_TARGET, "--format", "json", "--all"))
    assert len(everything["plans"]) == 27 > len(report["plans"])


def test_a_workload_is_planned_for_and_is_in_the_commands(capsys):
    known = ["--population", "40000", "--rounds", "200", "--delta", "1e-8"]
    flags = ["--target-epsilon", "5", "--report-goals", "650", "--mechanisms", "blt"]
    text = _out(capsys, *known, *flags, "--workload", "momentum=0.9")
    assert "Noise is that of the models, for momentum 0.9." in text
    assert "--max-participations 4 --workload momentum=0.9 --output strategy.json" in text


def test_what_if(capsys):
    arguments = [*_TARGET, "--what-if-rounds", "3000", "--what-if-min-sep", "300"]
    arguments += ["--mechanisms", "tree,blt", "--format", "json", "--all"]
    rows = json.loads(_out(capsys, *arguments))["plans"]
    for row in rows:
        if row["mechanism"] == "tree":
            # A tree for 2000 rounds has no level for more than 2047.
            assert "2047" in row["what_if"]["impossible"]
        else:
            assert row["what_if"]["num_rounds"] == 3000
            assert row["what_if"]["epsilon"] > row["epsilon"]
    text = _out(capsys, *arguments[:-3], "--all")
    assert "what if: epsilon" in text.splitlines()[0]


def test_keeping_the_noise_of_a_known_run(capsys):
    report = json.loads(
        _out(
            capsys, *_KNOWN, "--keep-noise-of", "tree:7:6500", "--report-goals", "6500",
            "--format", "json", "--all",
        )
    )  # fmt: skip
    rows = {row["mechanism"]: row for row in report["plans"]}
    assert rows["tree"]["noise_multiplier"] == pytest.approx(7.0)
    assert rows["blt"]["epsilon"] < rows["tree"]["epsilon"] < rows["identity"]["epsilon"]


def test_timer_sets_the_separation(capsys):
    report = json.loads(
        _out(
            capsys, *_TARGET, "--timer-hours", "24", "--rounds-per-day", "314", "--format", "json",
        )
    )  # fmt: skip
    assert {row["min_sep"] for row in report["plans"]} == {314}


def test_what_is_left_out_is_said(capsys):
    assert main.main(["plan", *_TARGET, "--max-participations", "3", "--mechanisms", "tree"]) == 0
    captured = capsys.readouterr()
    assert "Report goal 6500 is left out: max_participations=3" in captured.err
    assert captured.err.count("\n") == 1
    assert " 6500 " not in captured.out.split("\n\n")[0]


def test_without_a_quiet_plan_that_is_said(capsys):
    flags = ["--population", "200000", "--rounds", "2000", "--target-epsilon", "5"]
    text = _out(capsys, *flags, "--mechanisms", "blt", "--report-goals", "500,1000")
    assert "None of these plans is as quiet as Gboard's production models" in text
    assert "blt with 1000 clients a round" in text
    assert "on average one takes part 10 times" in text


def test_secure_aggregation_is_in_the_commands(capsys):
    text = _out(capsys, *_TARGET, "--secagg-inflation", "1.01", "--mechanisms", "blt")
    assert "--secagg-bits" in text


@pytest.mark.pictures
def test_plot(capsys, tmp_path):
    path = tmp_path / "plans.png"
    _out(capsys, *_TARGET, "--mechanisms", "identity,tree", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_in_an_unknown_format_is_refused_first(capsys, tmp_path, monkeypatch):
    monkeypatch.delattr(planner, "make_plans")
    path = tmp_path / "plans.docx"
    command = ["plan", *_TARGET, "--mechanisms", "identity,tree", "--plot", str(path)]
    assert main.main(command) == 2
    error = capsys.readouterr().err
    assert "'docx' is no format of Matplotlib" in error and "pdf" in error
    assert not path.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*_TARGET, "--mechanisms", "magic"], "magic"),
        ([*_TARGET, "--timer-hours", "3"], "--rounds-per-day"),
        ([*_TARGET, "--min-sep", "9000"], "no report goal"),
        ([*_TARGET, "--max-participations", "0"], "Leave it out for as many as fit"),
        ([*_TARGET, "--max-participations", "1"], "give 2 or more"),
        ([*_TARGET, "--mechanisms", "tree-full"], "cannot be run"),
        ([*_TARGET, "--what-if-rounds", "0"], "--what-if-rounds must be at least 1"),
        (
            ["--population", "10", "--rounds", "50", "--target-epsilon", "5"],
            "at most population=10, got 100",
        ),
        ([*_KNOWN, "--keep-noise-of", "magic:7:6500"], "magic"),
        ([*_KNOWN, "--target-epsilon", "0"], "target_epsilon"),
        ([*_TARGET, "--budget-shares", "vocabulary=1.5"], "above 0 and below 1"),
        ([*_TARGET, "--budget-shares", "vocabulary=0"], "above 0 and below 1"),
        ([*_TARGET, "--budget-shares", "vocabulary=0.5,metrics=0.5"], "nothing for the weights"),
        ([*_TARGET, "--budget-shares", "words=0.1"], "no part: take vocabulary, metrics"),
        ([*_KNOWN, "--target-rho", "1", "--budget-shares", "metrics"], "of --target-epsilon"),
        ([*_SAMPLED, "bins", "--budget-shares", "metrics"], "the sampling 'bins'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert main.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [*_KNOWN, "--target-epsilon", "5", "--report-goals", "1,x"],
        [*_KNOWN, "--target-epsilon", "5", "--report-goals", "0"],
        [*_KNOWN, "--keep-noise-of", "tree:7"],
    ],
)
def test_unreadable_flags_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        main.main(["plan", *arguments])
    assert error.value.code == 2
