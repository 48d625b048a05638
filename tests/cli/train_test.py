"""Tests of `tff-dpftrl train`: how flags and files become a config, and its errors."""

import argparse
import json
import os
import subprocess
import sys

import pytest

from tests.cli import toy_corpus
from tff_dpftrl.cli import train
from tff_dpftrl.execution import operation_threads
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import composed, corpus
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import run as run_lib


@pytest.fixture
def configs(monkeypatch):
    """The configs that would have been trained with, on a text of a thousand users."""
    seen = []
    text = argparse.Namespace(train=range(1000), held_out=range(100))

    def fake_train(opened):
        assert len(opened.text.train) == 1000 and not opened.placement.uses_ray
        seen.append(opened.config)
        return argparse.Namespace(summary="done")

    monkeypatch.setattr(run_lib, "train_opened", fake_train)
    monkeypatch.setattr(corpus, "read", lambda config, **given: text)
    return seen


def _resolved(**options):
    return config_lib.TrainingConfig.of(**options).with_defaults()


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
    assert config == _resolved(mechanism="tree", num_rounds=9, target_epsilon=2.0, lower_case=False)
    assert f"Results are in {output}/" in capsys.readouterr().out


def test_files_in_the_home_folder_are_found(configs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "run.toml"
    path.write_text('data = "~/users.jsonl"\nmechanism = "none"')
    read = []
    text = argparse.Namespace(train=range(1000), held_out=range(100))
    monkeypatch.setattr(corpus, "read", lambda config, **given: read.append(config.data) or text)
    assert _main("--config", str(path), "--output", str(tmp_path / "out")) == 0
    assert read == [str(tmp_path / "users.jsonl")]


def test_clients_of_compiled_rounds_get_the_cores(configs, tmp_path, monkeypatch):
    limits = []

    def limit(clients_per_round):
        limits.append(clients_per_round)
        raise RuntimeError("TensorFlow has begun to work.")  # As in a test.

    monkeypatch.setattr(operation_threads, "limit_operation_threads", limit)
    noise = ["--noise-multiplier", "1", "--clients-per-round", "7"]
    assert _main(*noise, "--output", str(tmp_path / "run")) == 0
    assert limits == [7] and len(configs) == 1


def test_mechanism_none_overrules_the_noise_of_the_file(configs, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("noise_multiplier = 1.0")
    _main("--config", str(path), "--mechanism", "none", "--output", "out")
    assert configs == [_resolved(mechanism="none")]


def test_every_option_has_a_flag(configs):
    flags = ["--noise-multiplier", "1"]
    for name, (field, _) in composed.options_of(config_lib.TrainingConfig).items():
        if field.default is not None and not isinstance(field.default, bool):
            flags += [f"--{name.replace('_', '-')}", str(field.default)]
    _main(*flags, "--output", "out")
    assert configs == [_resolved(noise_multiplier=1.0)]


def test_a_model_is_named_and_sized(configs):
    flags = "--model transformer --layers 3 --heads 2 --embedding-size 8 --feed-forward-size 9"
    _main("--mechanism", "none", *flags.split(), "--output", "out")
    _main("--mechanism", "none", *"--model gboard-cifg --tie-embeddings --output out".split())
    transformer, cifg = (made.language for made in configs)
    assert transformer.model == "transformer"
    assert transformer.model_sizes == {
        "embedding_size": 8,
        "num_layers": 3,
        "num_heads": 2,
        "feed_forward_size": 9,
    }
    assert (cifg.model, cifg.tie_embeddings) == ("gboard-cifg", True)


def test_resume_takes_no_options(configs, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="leave out --num-rounds"):
        _main("--resume", "--rounds", "3", "--output", str(tmp_path))
    began = _resolved(mechanism="none", num_rounds=7)
    known = manifest.Manifest(began.to_dict(), {}, {}, {})
    monkeypatch.setattr(manifest, "read", lambda output: known)
    assert _main("--resume", "--output", str(tmp_path)) == 0
    assert configs == [began]


_BLOCKED = """
import contextlib, importlib.abc, io, json, os, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            sys.exit("tensorflow was imported")

sys.meta_path.insert(0, Blocker())
from tff_dpftrl import packages
from tff_dpftrl.cli import main

packages.is_missing = lambda module: False
for line in sys.stdin:
    folder, arguments = json.loads(line)
    os.chdir(folder)
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            status = main.main(arguments)
        except SystemExit as error:
            status = error.code
    print(json.dumps([status, errors.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def without_tensorflow():
    """Runs a command, which ends when it imports TensorFlow: gives its status and errors.

    One interpreter is enough: none of its commands gets TensorFlow.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _BLOCKED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as interpreter:

        def run(folder, *arguments):
            print(json.dumps([str(folder), arguments]), file=interpreter.stdin, flush=True)
            status, errors = json.loads(interpreter.stdout.readline())
            return status, errors.strip().splitlines()

        yield run
        interpreter.stdin.close()


@pytest.fixture
def folder(tmp_path):
    """Has forty users, words, a file of nonsense, and a folder with something in it."""
    toy_corpus.write(tmp_path, lengths=(6, 6))
    (tmp_path / "nonsense").write_text("no TOML, no strategy")
    (tmp_path / "broken.jsonl").write_text("[]\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.json").write_text("{}")
    return tmp_path


_VALID = (
    "train --data users.jsonl --vocabulary words.txt --clients-per-round 3 --noise-multiplier 1 "
    "--rounds 9 --output new"
)


def test_a_command_without_mistakes_gets_as_far_as_tensorflow(folder, without_tensorflow):
    status, _ = without_tensorflow(folder, *_VALID.split())
    assert status == "tensorflow was imported"


@pytest.mark.parametrize(
    "mistake, message",
    [
        ("--rounds 0", "num_rounds"),
        ("--config nonsense", "not valid TOML"),
        ("--data nowhere.jsonl", "nowhere.jsonl"),
        ("--strategy nonsense", "nonsense"),
        ("--output used", "already holds a run"),
        ("--clients-per-round 1000", "exceeds the"),
        ("--min-sep 30 --rounds 100", "largest feasible min_sep"),
        ("--model transformer --lstm-size 5", "lstm_size is for the model word-lstm"),
        ("--config nowhere.toml", "nowhere.toml"),
        ("--data broken.jsonl", "broken.jsonl is one JSON array"),
        ("--vocabulary nowhere.txt", "nowhere.txt"),
        ("--strategy nowhere.json", "nowhere.json"),
        ("--output words.txt", "not a folder"),
        ("--algorithm dp-fedavg --clients-per-round 1000", "exceeds the"),
    ],
)
def test_mistakes_are_found_before_tensorflow_is_imported(
    folder, without_tensorflow, mistake, message
):
    status, errors = without_tensorflow(folder, *_VALID.split(), *mistake.split())
    assert status == 2 and message in errors[-1]
    assert errors[-1].startswith("tff-dpftrl train: ")
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    "arguments, messages",
    [
        (
            "train --data reviews.csv",
            ("--output is missing", "noise_multiplier or target_epsilon", "known to have users"),
        ),
        ("train --data reviews.txt --output new", ("target_epsilon", "files that end in .csv")),
        (
            "finetune --data nowhere.csv",
            (
                "--output",
                "initial_weights",
                "target_epsilon",
                "nowhere.csv: cannot",
            ),
        ),
        ("train --resume", ("--output is missing",)),
    ],
)
def test_all_that_is_missing_is_told_at_once(folder, without_tensorflow, arguments, messages):
    (folder / "reviews.csv").write_text("who,what\nann,x\n")
    status, errors = without_tensorflow(folder, *arguments.split())
    assert status == 2
    for message in messages:
        assert message in errors[-1]


@pytest.mark.parametrize("arguments", ["train --resume --output new", "report new"])
def test_no_run_is_found_before_tensorflow_is_imported(folder, without_tensorflow, arguments):
    status, errors = without_tensorflow(folder, *arguments.split())
    assert status == 2 and "There is no run in new" in errors[-1]


def test_an_interruption_says_what_is_there(tmp_path):
    args = argparse.Namespace(output=str(tmp_path / "my run"))
    (tmp_path / "my run" / "private").mkdir(parents=True)
    assert "nothing to resume" in train.what_is_left(args)
    (tmp_path / "my run" / "config.json").touch()
    said = train.what_is_left(args)
    assert f"tff-dpftrl train --resume --output '{tmp_path}/my run'" in said
    assert f"tff-dpftrl report '{tmp_path}/my run'" in said
