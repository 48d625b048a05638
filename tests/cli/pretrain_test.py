"""Tests of `tff-dpftrl pretrain`."""

from __future__ import annotations

import pytest

from tests.cli import toy_corpus
from tff_dpftrl.cli import main
from tff_dpftrl.training import pretraining


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The arguments of `pretraining.pretrain`, which does nothing."""
    toy_corpus.write(tmp_path, [5, 6])
    (tmp_path / "run.toml").write_text(
        f'data = "{tmp_path}/protected.jsonl"\nvocabulary = "{tmp_path}/words.txt"\n'
        "vocabulary_size = 10\nlstm_size = 7\nnoise_multiplier = 1.0\nnum_rounds = 3\n"
    )
    seen = []

    def fake(config, options, output, *, text, progress):
        seen.append((config, options, text))
        return "done"

    monkeypatch.setattr(pretraining, "pretrain", fake)
    return seen


def _main(tmp_path, *arguments):
    data = ["--data", str(tmp_path / "users.jsonl"), "--output", str(tmp_path / "out")]
    return main.main(["pretrain", *data, *arguments])


def test_the_model_is_that_of_the_run(calls, tmp_path, capsys):
    flags = ["--config", str(tmp_path / "run.toml"), "--embedding-size", "9", "--epochs", "2"]
    assert _main(tmp_path, *flags) == 0
    ((config, options, text),) = calls
    assert config.epochs == 2 and config.data.endswith("users.jsonl")
    assert options.model_sizes == {"state_size": 7, "embedding_size": 9}
    assert options.data == f"{tmp_path}/protected.jsonl" and options.vocabulary_size == 10
    assert len(text.words.words) == 10
    said = capsys.readouterr().out
    for command in ("train", "finetune"):
        assert f"tff-dpftrl {command} --initial-weights {tmp_path}/out" in said


def test_the_config_of_a_task_will_do(calls, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(file.read_text() + 'population = "keyboard"\nover_selection = 1.5\n')
    assert _main(tmp_path, "--config", str(file)) == 0
    ((_, options, _),) = calls
    assert options.model_sizes == {"state_size": 7}


def test_sub_words_are_learned_on_the_text_of_pretraining(calls, tmp_path, capsys):
    sizes = ["--vocabulary-size", "60", "--embedding-size", "4"]
    assert _main(tmp_path, "--tokenizer", "wordpiece", *sizes) == 0
    ((_, options, text),) = calls
    assert options.tokenizer == "wordpiece" and text.words.unit == "sub-words"
    assert text.words.source == "counted on users.jsonl, declared public by the operator"
    assert _main(tmp_path, "--tokenizer", "wordpiece", "--vocabulary", "english", *sizes) == 2
    assert "'english' is a list of words, and tokenizer 'wordpiece'" in capsys.readouterr().err
    assert _main(tmp_path, "--tokenizer", "checkpoint", *sizes) == 2
    assert "name the tokenizer.json of a checkpoint as vocabulary" in capsys.readouterr().err


def test_without_a_config_the_words_are_ordinary_english(calls, tmp_path):
    sizes = ["--vocabulary-size", "30", "--embedding-size", "4"]
    assert _main(tmp_path, *sizes) == 0
    assert _main(tmp_path, *sizes, "--vocabulary", "docs") == 0
    sources = [text.words.source for _, _, text in calls]
    assert "ordinary English" not in sources[1] and "English" in sources[0]


def test_help_names_both_commands_that_go_on(capsys):
    with pytest.raises(SystemExit):
        main.main(["pretrain", "--help"])
    said = capsys.readouterr().out
    for command in ("train", "finetune"):
        assert f"`{command}`" in said and f"tff-dpftrl {command} " in said


def test_options_that_flags_of_train_complete_are_not_asked_for(calls, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(file.read_text().replace("noise_multiplier = 1.0\n", ""))
    assert _main(tmp_path, "--config", str(file)) == 0 and calls
    file.write_text(file.read_text() + "embeding_size = 9\n")
    assert _main(tmp_path, "--config", str(file)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--num-rounds", "3"], "unknown option --num-rounds"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_what_is_wrong_is_said_at_once(calls, tmp_path, capsys, arguments, message):
    try:
        status = _main(tmp_path, *arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2 and not calls
    assert message in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_refused(calls, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    assert _main(tmp_path) == 2 and not calls
    assert "not an empty folder" in capsys.readouterr().err
