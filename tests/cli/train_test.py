"""Tests of `tff-dpftrl train`: how flags and files become a config, and its errors."""

import argparse
import dataclasses
import sys

import pytest

from tff_dpftrl.cli import train
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import run as run_lib


@pytest.fixture
def configs(monkeypatch):
    """The configs that would have been trained with."""
    seen = []

    def fake_train(config, output):
        seen.append(config)
        return argparse.Namespace(summary="done")

    monkeypatch.setattr(run_lib, "train", fake_train)
    return seen


def _main(*arguments):
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    args = parser.parse_args(["train", *arguments])
    return args.run(args)


def test_flags_overrule_the_file(configs, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('mechanism = "tree"\nnum_rounds = 7\nnoise_multiplier = 1.0\nlower_case = true')
    output = str(tmp_path / "out")
    arguments = ["--rounds", "9", "--target-epsilon", "2", "--no-lower-case"]
    assert _main("--config", str(path), *arguments, "--output", output) == 0
    (config,) = configs
    assert config == config_lib.TrainingConfig(
        mechanism="tree", num_rounds=9, target_epsilon=2.0, lower_case=False
    )
    assert f"Results are in {output}/" in capsys.readouterr().out


def test_mechanism_none_overrules_the_noise_of_the_file(configs, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("noise_multiplier = 1.0")
    _main("--config", str(path), "--mechanism", "none", "--output", "out")
    assert configs == [config_lib.TrainingConfig(mechanism="none")]


def test_every_option_has_a_flag(configs):
    flags = ["--noise-multiplier", "1"]
    for field in dataclasses.fields(config_lib.TrainingConfig):
        if field.default is not None and not isinstance(field.default, bool):
            flags += [f"--{field.name.replace('_', '-')}", str(field.default)]
    _main(*flags, "--output", "out")
    assert configs == [config_lib.TrainingConfig(noise_multiplier=1.0)]


def test_resume_takes_no_options(configs, tmp_path):
    with pytest.raises(ValueError, match="leave out --num-rounds"):
        _main("--resume", "--rounds", "3", "--output", str(tmp_path))
    assert _main("--resume", "--output", str(tmp_path)) == 0
    assert configs == [None]


def test_an_interruption_says_what_is_there(tmp_path):
    args = argparse.Namespace(output=str(tmp_path / "my run"))
    (tmp_path / "my run" / "private").mkdir(parents=True)
    assert "nothing to resume" in train.what_is_left(args)
    (tmp_path / "my run" / "config.json").touch()
    said = train.what_is_left(args)
    assert f"tff-dpftrl train --resume --output '{tmp_path}/my run'" in said
    assert f"tff-dpftrl report '{tmp_path}/my run'" in said


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
