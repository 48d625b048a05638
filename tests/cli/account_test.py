"""Tests of `tff-dpftrl account`."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from tff_dpftrl.accounting import dp_fedavg, gaussian, guarantee, mixture_of_gaussians
from tff_dpftrl.cli import account, main
from tff_dpftrl.mechanisms import (
    banded_toeplitz,
    branches,
    restarts,
    serialization,
    tree,
    zoo,
)
from tff_dpftrl.participation import schema as schema_lib

_ES_ES = [
    "--mechanism", "tree", "--noise-multiplier", "7", "--rounds", "1900",
    "--min-sep-gap", "526", "--max-participations", "3", "--delta", "1e-10",
]  # fmt: skip


def _run(*arguments):
    parser = argparse.ArgumentParser()
    account.add_parser(parser.add_subparsers())
    args = parser.parse_args(["account", *arguments])
    return args.run(args)


def _json(capsys, *arguments):
    assert _run(*arguments, "--format", "json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_a_gboard_row(capsys):
    report = _json(capsys, *_ES_ES)
    assert report.keys() >= {
        "rho_zcdp", "epsilon", "delta", "epsilon_rdp", "sensitivity_squared", "num_rounds",
        "min_sep", "max_participations", "mechanism", "noise_multiplier",
    }  # fmt: skip
    # Gboard paper, Table 1, es-ES: rho = .35 from S² = 34.
    assert report["rho_zcdp"] == pytest.approx(34 / 98)
    assert report["sensitivity_squared"] == 34
    assert (report["num_rounds"], report["min_sep"], report["max_participations"]) == (1900, 527, 3)
    assert report["mechanism"] == "tree"
    assert report["noise_multiplier"] == 7.0
    assert report["delta"] == 1e-10
    assert report["epsilon"] < report["epsilon_rdp"]


def test_text_rounds_up(capsys):
    assert _run(*_ES_ES) == 0
    text = capsys.readouterr().out
    assert "rho (zCDP)      0.347" in text  # .346939 rounded up
    assert "epsilon         5.364 at delta = 1e-10" in text  # 5.36374
    assert "at least 527 apart (stride; 526 rounds in between)" in text


def test_the_next_command_has_the_mechanism_or_the_file(capsys, tmp_path):
    assert _run(*_ES_ES) == 0
    assert "tff-dpftrl train --mechanism tree --noise" in capsys.readouterr().err
    file = tmp_path / "of my own.json"
    serialization.save(file, tree.Tree(1900))
    assert _run("--strategy", str(file), *_ES_ES[2:]) == 0
    assert f"tff-dpftrl train --strategy '{file}' --noise" in capsys.readouterr().err


def test_min_sep_is_the_stride(capsys):
    stride = [x if x != "--min-sep-gap" else "--min-sep" for x in _ES_ES]
    stride[stride.index("526")] = "527"
    assert _json(capsys, *stride) == _json(capsys, *_ES_ES)


def test_strategy_from_a_file(capsys, tmp_path):
    path = tmp_path / "strategy.json"
    serialization.save(path, zoo.load("blt-gboard-b400"))
    report = _json(
        capsys, "--strategy", str(path), "--noise-multiplier", "7.379", "--rounds", "1280",
        "--min-sep-gap", "300", "--max-participations", "4", "--delta", "1e-10",
    )  # fmt: skip
    # BLT paper, Table 4, es-ES.
    assert report["mechanism"] == "blt"
    assert report["rho_zcdp"] == pytest.approx(0.15337, rel=1e-4)
    assert report["epsilon"] == pytest.approx(3.4565, rel=1e-4)


def test_restarts(capsys):
    report = _json(capsys, *_ES_ES, "--restart-every", "1024", "--first-restart", "128")
    strategy = restarts.Restarted(tree.Tree(1900), (0, 128, 1152))
    schema = schema_lib.MinSep.from_gap(1900, 526, 3)
    assert report["sensitivity_squared"] == strategy.sensitivity(schema).squared
    assert report["mechanism"] == "tree, restarted 2 times"


def test_clip_norm_inflation_is_charged(capsys):
    plain = _json(capsys, *_ES_ES)
    inflated = _json(capsys, *_ES_ES, "--clip-norm-inflation", "1.01")
    assert inflated["rho_zcdp"] == pytest.approx(plain["rho_zcdp"] * 1.01**2)
    assert inflated["epsilon"] > plain["epsilon"]


def test_amplification_by_cyclic_sampling(capsys):
    report = _json(
        capsys, "--mechanism", "bandfhu", "--bands", "10", "--noise-multiplier", "2", "--rounds",
        "95", "--delta", "1e-7", "--sampling", "cyclic", "--sampling-groups", "10",
        "--sampling-probability", "0.05",
    )  # fmt: skip
    strategy = banded_toeplitz.BandedToeplitz.fhu(10)
    once = strategy.sensitivity(schema_lib.MinSep(95, 95, 1))
    expected = dp_fedavg.DpFedAvg(0.05, 2 / once.value, 10).epsilon(1e-7)
    assert report["epsilon"] == pytest.approx(expected, rel=1e-9)
    known = guarantee.dp_ftrl_guarantee(
        strategy, noise_multiplier=2, schema=schema_lib.MinSep(95, 10, 10), delta=1e-7
    )
    assert report["epsilon_if_known"] == pytest.approx(known.epsilon)
    assert report["epsilon"] < report["epsilon_if_known"]


_DP_SGD = [
    "--noise-multiplier", "1.5", "--rounds", "100", "--delta", "1e-6", "--sampling", "poisson",
    "--sampling-probability", "0.02",
]  # fmt: skip


def test_dp_sgd_needs_no_mechanism_and_no_separation(capsys):
    report = _json(capsys, *_DP_SGD)
    assert report["epsilon"] == dp_fedavg.DpFedAvg(0.02, 1.5, 100).epsilon(1e-6)
    assert (report["mechanism"], report["group_size"]) == ("identity", 1)
    # Of two examples of a user; and of two users who are replaced together.
    two = _json(capsys, *_DP_SGD, "--group-size", "2")
    pair = mixture_of_gaussians.els(1.5, 0.02, 2)
    assert two["epsilon"] == mixture_of_gaussians.epsilon(pair, num_steps=100, delta=1e-6)
    other = _json(capsys, *_DP_SGD, "--neighbours", "substitute", "--group-of", "2")
    assert other["epsilon"] == report["epsilon"]
    pair = dataclasses.replace(pair, is_substitution=True)
    assert other["neighbours"]["epsilon"] == mixture_of_gaussians.epsilon(
        pair, num_steps=100, delta=1e-6
    )
    assert _run(*_DP_SGD, "--neighbours", "substitute") == 0
    text = capsys.readouterr().out
    assert "if nobody learns who was drawn" in text
    assert "where the data of a user are replaced by other data (the privacy loss" in text


@pytest.mark.parametrize(
    "flags",
    [
        ["bins", "--bins", "4", "--mechanism", "bandfhu", "--bands", "2"],
        ["b-min-sep", "--min-sep", "4", "--sampling-probability", "0.1", "--mechanism", "identity"],
    ],
    ids=lambda flags: flags[0],
)
def test_every_other_sampling_is_below_samples_that_are_known(flags, capsys):
    run = ["--noise-multiplier", "3", "--rounds", "12", "--delta", "1e-5", "--sampling"]
    report = _json(capsys, *run, *flags)
    assert report["sampling"] == flags[0]
    assert 0 < report["epsilon"] <= report["epsilon_if_known"]
    assert main.main(["account", *run, flags[0]]) == 2
    assert f"--sampling {flags[0]} needs --" in capsys.readouterr().err


def test_other_neighbours_without_sampling_have_a_larger_sensitivity(capsys):
    plain = _json(capsys, *_ES_ES)
    report = _json(capsys, *_ES_ES, "--neighbours", "substitute", "--group-of", "3")
    mu = (2 * plain["rho_zcdp"]) ** 0.5
    other = report.pop("neighbours")
    assert report == plain
    assert other["epsilon"] == pytest.approx(gaussian.epsilon(6 * mu, 1e-10))
    same = _json(capsys, *_ES_ES, "--neighbours", "add-or-remove")
    assert same["neighbours"]["epsilon"] == plain["epsilon"]


def test_branches_are_charged_together(capsys):
    plain = _json(capsys, *_ES_ES)
    figures = {}
    for fork_at in (0, 1000, 1900):
        flags = [*_ES_ES, "--branches", "3", "--fork-at", str(fork_at)]
        report = _json(capsys, *flags)
        assert (report["num_branches"], report["fork_at"]) == (3, fork_at)
        figures[fork_at] = report["sensitivity_squared"]
        # rho and epsilon follow from it, and those of other neighbours, too.
        mu = figures[fork_at] ** 0.5 / 7
        assert report["rho_zcdp"] == pytest.approx(mu**2 / 2)
        assert report["epsilon"] == pytest.approx(gaussian.epsilon(mu, 1e-10))
        two = _json(capsys, *flags, "--group-of", "2")["neighbours"]
        assert two["epsilon"] == pytest.approx(gaussian.epsilon(2 * mu, 1e-10))
    assert figures[0] == 3 * 34 and figures[1900] == plain["sensitivity_squared"] == 34
    schema = schema_lib.MinSep.from_gap(1900, 526, 3)
    joint = branches.sensitivity(tree.Tree(1900), schema, num_branches=3, fork_at=1000)
    assert figures[1000] == joint.squared and 34 < joint.squared < 3 * 34
    assert _run(*_ES_ES, "--branches", "3", "--fork-at", "1000") == 0
    printed = capsys.readouterr()
    assert "3 branches together, which share the first 1000 rounds" in printed.out
    assert "train" not in printed.err


def test_participations_default_to_as_many_as_fit(capsys):
    report = _json(
        capsys, "--mechanism", "identity", "--noise-multiplier", "1", "--rounds", "10",
        "--min-sep", "4", "--delta", "1e-6",
    )  # fmt: skip
    assert report["max_participations"] == report["sensitivity_squared"] == 3


def test_no_noise_is_no_guarantee(capsys):
    arguments = ["0" if x == "7" else x for x in _ES_ES]
    report = _json(capsys, *arguments)
    assert report["epsilon"] is report["rho_zcdp"] is None
    assert _run(*arguments) == 0
    assert "No differential privacy guarantee" in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--first-restart", "5"], "--restart-every"),
        (["--restart-every", "0"], "--restart-every must be at least 1"),
        (["--buffers", "3"], "buffers is for the mechanism blt, not for tree"),
        (["--sampling-groups", "3"], "--sampling-groups needs --sampling, one of poisson"),
        (["--sampling", "cyclic", "--sampling-groups", "3"], "needs --sampling-probability"),
        (["--sampling", "poisson", "--sampling-probability", "0.1"], "--max-participations"),
        (["--group-of", "0"], "group_of must be at least 1"),
        (["--clip-norm-inflation", "0.5"], "clip_norm_inflation"),
        (["--branches", "2"], "--branches and --fork-at need each other"),
        (["--branches", "0", "--fork-at", "5"], "--branches must be at least 1"),
        (["--branches", "2", "--fork-at", "1901"], "--fork-at must be at most --rounds 1900"),
    ],
)
def test_bad_input_is_one_line_and_status_2(extra, message, capsys):
    assert main.main(["account", *_ES_ES, *extra]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_estimate_stands_beside_the_bound(capsys):
    run = ["--noise-multiplier", "3", "--rounds", "12", "--delta", "1e-3", "--sampling", "bins"]
    run += ["--bins", "4", "--mechanism", "bandfhu", "--bands", "2", "--estimate-draws", "4000"]
    report = _json(capsys, *run)
    stated = report["estimate"]
    assert stated["low"] <= stated["epsilon"] <= stated["high"]
    assert stated["low"] <= report["epsilon"] and stated["num_samples"] == 4000
    assert main.main(["account", *run]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("estimate"))
    assert line.endswith("by 4000 Monte Carlo draws: no guarantee")
    assert main.main(["account", *run, "--noise-multiplier", "0"]) == 0
    assert "estimate" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--estimate-draws", "5000"], "--estimate-draws is for --sampling bins or b-min-sep"),
        (["--mechanism", "tree"], "poisson is accounted for with independent noise only"),
        (["--sampling-groups", "3"], "--sampling-groups is not for --sampling poisson"),
        (["--sampling-probability", "1.5"], "sampling_probability must be"),
        (["--sampling", "cyclic", "--sampling-groups", "3"], "--mechanism bandtoep --bands 4"),
        (["--clip-norm-inflation", "1.1"], "multiply --noise-multiplier"),
        (["--restart-every", "4"], "--restart-every"),
        (["--branches", "3", "--fork-at", "40"], "give --rounds 220, the rounds of all branches"),
        (
            ["--sampling", "cyclic", "--sampling-groups", "3", "--mechanism", "tree"],
            "needs a banded C",
        ),
        (
            [
                "--sampling",
                "cyclic",
                "--sampling-groups",
                "3",
                "--mechanism",
                "bandfhu",
                "--bands",
                "4",
            ],
            "num_groups must be at least the number of bands 4",
        ),
    ],
)
def test_bad_input_with_sampling_is_one_line_and_status_2(extra, message, capsys):
    assert main.main(["account", *_DP_SGD, *extra]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_options_of_mechanisms_do_not_go_with_a_file(tmp_path):
    path = tmp_path / "strategy.json"
    serialization.save(path, tree.Tree(8))
    common = ["--strategy", str(path), "--noise-multiplier", "1", "--delta", "1e-6"]
    schema = ["--rounds", "8", "--min-sep", "2"]
    with pytest.raises(ValueError, match="--strategy"):
        _run(*common, *schema, "--buffers", "2")
    with pytest.raises(ValueError, match="15 rounds"):
        _run(*common, "--rounds", "20", "--min-sep", "2")


@pytest.mark.parametrize("command", ["account", "calibrate"])
def test_a_large_delta_is_warned_of_and_one_is_refused(command, capsys):
    flags = [*_ES_ES]
    if command == "calibrate":
        flags[flags.index("--noise-multiplier") : flags.index("--noise-multiplier") + 2] = []
        flags += ["--target-rho", "0.1"]
    for delta, warned in (("1e-10", False), ("1e-3", False), ("2e-3", True)):
        flags[flags.index("--delta") + 1] = delta
        assert main.main([command, *flags]) == 0
        assert ("is large" in capsys.readouterr().err) == warned
    for delta in ("1", "1.5", "0", "nan"):
        flags[flags.index("--delta") + 1] = delta
        assert main.main([command, *flags]) == 2
        error = capsys.readouterr().err
        assert "--delta must be" in error and error.count("\n") == 1


def test_agrees_with_the_library(capsys):
    found = guarantee.dp_ftrl_guarantee(
        tree.Tree(1900),
        noise_multiplier=7.0,
        schema=schema_lib.MinSep.from_gap(1900, 526, 3),
        delta=1e-10,
    )
    assert _json(capsys, *_ES_ES) == found.to_dict()


def test_next_to_no_noise_is_unbounded_and_boundless_noise_is_refused(capsys):
    def run(noise, *flags):
        status = main.main(
            ["account", "--mechanism", "tree", "--rounds", "100", "--min-sep", "10",
             "--noise-multiplier", noise, "--delta", "1e-10", "--format", "json", *flags]
        )  # fmt: skip
        return status, capsys.readouterr()

    status, printed = run("1e-200")
    assert status == 0
    report = json.loads(printed.out)
    assert report["epsilon"] is None and report["rho_zcdp"] is None
    status, printed = run("1e-200", "--format", "text")
    assert status == 0 and "unbounded at delta" in printed.out
    status, printed = run("inf")
    assert status != 0 and "noise_multiplier must be a finite number" in printed.err
    assert "Traceback" not in printed.err and not printed.out
