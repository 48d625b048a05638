"""Tests of `tff-dpftrl finetune` and of what works on its folder."""

import json
import sys

import pytest

from tests.finetuning import toy_finetuning
from tff_dpftrl.cli import main

toy = toy_finetuning.toy


def _command(toy, output, *flags):
    return [
        "finetune",
        *("--data", str(toy / "users.jsonl"), "--initial-weights", str(toy / "pretrained")),
        *("--output", str(output), *flags),
    ]


_ULS = ("--sampling", "user", "--group-size", "2", "--cohort", "8", "--steps", "3")


def test_a_run_is_reported_used_and_not_taken_for_training(toy, tmp_path, capsys):
    output = tmp_path / "run"
    flags = (*_ULS, "--target-epsilon", "8", "--clip-norm", "1")
    assert main.main(_command(toy, output, *flags)) == 0
    printed = capsys.readouterr().out
    assert "After 3 steps: top-1 accuracy" in printed and "All 3 steps are done." in printed
    assert main.main(["report", str(output), "--format", "json"]) == 0
    statement = json.loads(capsys.readouterr().out)["statement"]
    assert statement["epsilon"] <= 8.0 and "ULS" in statement["mechanism"]
    assert main.main(["predict", str(output), "bao dee"]) == 0
    assert main.main(["finetune", "--resume", "--output", str(output)]) == 0
    capsys.readouterr()
    assert main.main(["train", "--resume", "--output", str(output)]) == 2
    assert "tff-dpftrl finetune --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--target-epsilon", "8"), "sampling 'auto' needs compute_budget"),
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
