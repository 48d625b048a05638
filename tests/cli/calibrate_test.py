"""Tests of `tff-dpftrl calibrate`."""

from __future__ import annotations

import argparse
import json

import pytest

from tff_dpftrl.cli import account, calibrate, main

_RUN = ["--rounds", "200", "--min-sep", "40", "--max-participations", "4"]


def _json(capsys, module, name, *arguments):
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    args = parser.parse_args([name, *arguments, "--format", "json"])
    assert args.run(args) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("mechanism", ["tree", "blt", "identity", "bandtoep", "bisr", "lambda-cgd"])
def test_target_epsilon_is_met(mechanism, capsys):
    report = _json(
        capsys, calibrate, "calibrate", "--mechanism", mechanism, *_RUN, "--target-epsilon", "2",
        "--delta", "1e-8",
    )  # fmt: skip
    assert 2 * (1 - 1e-8) <= report["epsilon"] <= 2
    # `account` agrees.
    again = _json(
        capsys, account, "account", "--mechanism", mechanism, *_RUN, "--delta", "1e-8",
        "--noise-multiplier", repr(report["noise_multiplier"]),
    )  # fmt: skip
    assert again == report


def test_target_rho_with_restarts_and_inflation(capsys):
    report = _json(
        capsys, calibrate, "calibrate", "--mechanism", "tree", *_RUN, "--target-rho", "0.25",
        "--restart-every", "50", "--clip-norm-inflation", "1.1",
    )  # fmt: skip
    assert report["rho_zcdp"] == pytest.approx(0.25, rel=1e-9)
    assert report["rho_zcdp"] <= 0.25
    assert report["delta"] == 1e-10


@pytest.mark.parametrize(
    "sampling",
    [
        ["--sampling", "poisson", "--sampling-probability", "0.05"],
        [
            "--sampling", "cyclic", "--sampling-groups", "4", "--sampling-probability", "0.2",
            "--mechanism", "bandtoep", "--bands", "3",
        ],
    ],
)  # fmt: skip
@pytest.mark.parametrize("neighbours", [[], ["--neighbours", "substitute"]])
def test_target_of_sampled_rounds_is_met_for_the_neighbours(sampling, neighbours, capsys):
    flags = ["--rounds", "60", "--delta", "1e-6", *sampling, *neighbours]
    report = _json(capsys, calibrate, "calibrate", *flags, "--target-epsilon", "3")
    met = report["neighbours"]["epsilon"] if neighbours else report["epsilon"]
    assert 3 * (1 - 1e-3) <= met <= 3
    noise = ["--noise-multiplier", repr(report["noise_multiplier"])]
    assert _json(capsys, account, "account", *flags, *noise) == report


def test_target_for_a_group_without_sampling(capsys):
    report = _json(
        capsys, calibrate, "calibrate", "--mechanism", "tree", *_RUN, "--target-epsilon", "2",
        "--delta", "1e-8", "--group-of", "3",
    )  # fmt: skip
    assert 2 * (1 - 1e-8) <= report["neighbours"]["epsilon"] <= 2
    assert report["epsilon"] < 0.7


def test_a_sampled_run_has_no_rho(capsys):
    flags = ["--rounds", "9", "--sampling", "poisson", "--sampling-probability", "0.1"]
    assert main.main(["calibrate", *flags, "--target-rho", "1"]) == 2
    assert "give --target-epsilon" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["0", "-1", "inf", "nan"])
def test_bad_target_is_status_2(target, capsys):
    status = main.main(["calibrate", "--mechanism", "tree", *_RUN, f"--target-epsilon={target}"])
    assert status == 2
    assert "target_epsilon" in capsys.readouterr().err
