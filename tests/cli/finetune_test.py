"""Tests of `tff-dpftrl finetune` and of what works on its folder."""

import itertools
import json
import math
import re
import shutil

import pytest

from tests import small_disk
from tests.finetuning import toy_finetuning
from tests.training import toy_run
from tff_dpftrl import packages
from tff_dpftrl.cli import main
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import startup

disk = small_disk.disk
toy, no_gradients = toy_finetuning.toy, toy_finetuning.no_gradients


def _command(toy, output, *flags):
    return [
        "finetune",
        *("--data", str(toy / "users.jsonl"), "--initial-weights", str(toy / "pretrained")),
        *("--output", str(output), *flags),
    ]


_ULS = ("--sampling", "user", "--group-size", "2", "--cohort", "8", "--steps", "3")


def test_a_run_is_reported_used_and_not_taken_for_training(
    toy, no_gradients, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(startup, "_MANY_UNKNOWN", -1.0)  # As if most words were unknown.
    output = tmp_path / "run"
    flags = (*_ULS, "--target-epsilon", "8", "--clip-norm", "1")
    assert main.main(_command(toy, output, *flags)) == 0
    printed, progress = capsys.readouterr()
    assert "Take initial weights that tff-dpftrl pretrain makes with --voc" in progress
    assert "After 3 steps: top-1 accuracy" in printed and "All 3 steps are done." in printed
    loss = float(toy_run.rows(output)[-1]["eval_loss"])
    found = re.search(
        r"Held-out loss: (.*?) nats a word \(perplexity (.*?)\); before fine-t", printed
    )
    assert found is not None and float(found[1]) == pytest.approx(loss, abs=6e-4)
    assert float(found[2]) == pytest.approx(math.exp(loss), rel=1e-3)
    before = json.loads((output / "config.json").read_text())["facts"]["pretrained_loss"]
    assert f"before fine-tuning {before:.3f} nats a word" in printed and before != loss
    assert main.main(["report", str(output), "--format", "json"]) == 0
    statement = json.loads(capsys.readouterr().out)["statement"]
    assert statement["epsilon"] <= 8.0 and "ULS" in statement["mechanism"]
    assert main.main(["predict", str(output), "bao dee"]) == 0
    assert main.main(["finetune", "--resume", "--output", str(output)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(packages, "is_missing", lambda module: False)  # TFF, perhaps.
    assert main.main(["train", "--resume", "--output", str(output)]) == 2
    assert "tff-dpftrl finetune --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ("--target-epsilon", "8", "--sampling", "user", "--cohort", "8"),
            "cohort_size needs group_size or compute_budget beside it",
        ),
        ((*_ULS, "--target-epsilon", "0"), "target_epsilon must be a finite number, above 0"),
        (("--group-sise", "3"), "unknown option --group-sise; did you mean --group-size"),
        (
            (*_ULS, "--target-epsilon", "8", "--cohort", "99", "--clip-norm", "1"),
            "cohort_size = 99 exceeds the 48",
        ),
        (
            (*_ULS, "--target-epsilon", "8", "--adapter-rank", "9"),
            "adapter_rank=9 exceeds 4, the smaller side of layer_0_query_key_value_kernel: lower",
        ),
    ],
)
def test_bad_input_gets_one_line(toy, tmp_path, capsys, flags, message):
    try:
        status = main.main(_command(toy, tmp_path / "run", *flags))
    except SystemExit as error:
        status = error.code
    assert status == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("tff-dpftrl finetune: ")
    assert not (tmp_path / "run").exists()


def test_help_says_how_few_users_an_evaluation_may_be_of(capsys):
    with pytest.raises(SystemExit):
        main.main(["finetune", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "each with all examples, until there are twice as many" in said


def test_a_missing_model_is_refused_before_tensorflow(tmp_path, capsys):
    flags = ["finetune", *_ULS, "--target-epsilon", "8", "--output", str(tmp_path / "run")]
    assert main.main([*flags, "--initial-weights", str(tmp_path)]) == 2
    assert "initial_weights cannot be read" in capsys.readouterr().err
    assert main.main(["finetune", "--resume", "--output", str(tmp_path), "--steps", "3"]) == 2
    assert "leave out --num-steps" in capsys.readouterr().err


_MADE = ("model.npz", "best_model.npz", "held_out.json", "vocabulary.json")


def _content(output):
    statement = json.loads((output / "privacy_statement.json").read_text())
    assert statement.pop("subject")["run"]  # Each run has its own.
    return [(output / name).read_bytes() for name in _MADE], toy_run.rows(output), statement


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits_from_wherever_the_disk_was_full(
    disk, toy, tmp_path, capsys
):
    options = toy_finetuning.config(toy, num_steps=3).to_dict()
    lines = [f"{k} = {json.dumps(v)}" for k, v in options.items() if v is not None]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    new = ["--config", str(tmp_path / "config.toml")]

    def run(folder, *flags):
        return main.main(["finetune", *flags, "--output", str(folder / "run")])

    assert run(tmp_path, *new) == 0
    expected = _content(tmp_path / "run")
    capsys.readouterr()

    def finetune(folder):
        if run(folder, *new):
            raise OSError(capsys.readouterr().err)

    begun = failures = 0
    for folder, failure in small_disk.at_every_page(disk, finetune, itertools.count(0, 8)):
        if failure is not None:
            failures += 1
            (said,) = [s for s in str(failure).splitlines() if "tff-dpftrl finetune: " in s]
            assert re.search("No space left on device|disk is full|I/O error", said)
            assert "Traceback" not in str(failure)
            is_run = manifest.exists(folder / "run")
            begun += is_run
            assert run(folder, *(["--resume"] if is_run else new)) == 0
            capsys.readouterr()
        assert _content(folder / "run") == expected
        shutil.rmtree(folder)
    assert 2 < begun < failures
