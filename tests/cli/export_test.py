"""Tests of `tff-dpftrl export`."""

import pytest
import tensorflow as tf

from tests.training import toy_model
from tff_dpftrl.cli import main
from tff_dpftrl.data import user_text, vocabulary
from tff_dpftrl.training import saved_model, trained_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a last and a best model."""
    folder = tmp_path_factory.mktemp("run")
    return toy_model.write(folder, last=toy_model.weights(1), best=toy_model.weights(2))


@pytest.mark.parametrize("which", ["last", pytest.param("best", marks=pytest.mark.slow)])
def test_a_model_is_exported(run, tmp_path, capsys, which):
    output = tmp_path / "exported"
    command = ["export", str(run), str(output), "--model", which, "--top", "2"]
    assert main.main(command) == 0
    printed = capsys.readouterr().out
    name = {"last": "model.npz", "best": "best_model.npz"}[which]
    assert printed == f"{run / name} with its 7 words is in {output}/\n"
    predict = tf.saved_model.load(str(output)).signatures["serving_default"]
    (words,) = predict(texts=tf.constant(["the front"]))["words"].numpy().tolist()
    (expected,) = trained_model.find(run, which).load().predict(["the front"], top=2)
    assert [word.decode() for word in words] == [word for word, _ in expected.next_words]
    assert main.main(command) == 2
    assert f"OUTPUT {output} is a SavedModel already: add --overwrite" in capsys.readouterr().err


def _written(monkeypatch):
    """The options of what would have been exported as a SavedModel."""
    found = []
    monkeypatch.setattr(saved_model, "write", lambda *_, **options: found.append(options))
    return found


def test_flags_are_options_of_the_export(run, tmp_path, monkeypatch):
    written, flags = _written(monkeypatch), ["--top", "3", "--history", "--overwrite"]
    assert main.main(["export", str(run), str(tmp_path / "new"), *flags]) == 0
    assert written == [{"top": 3, "history": True, "overwrite": True}]


def test_a_model_is_exported_for_small_devices(run, tmp_path, capsys):
    output = tmp_path / "lite"
    assert main.main(["export", str(run), "--tflite", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{run / 'model.npz'} with its 7 words is in {output}/\n"
    names = {path.name for path in output.iterdir()}
    assert names == {"model.tflite", "vocabulary.json", "README.md"}
    command = ["export", str(run), "--output", str(output), "--overwrite"]
    assert main.main(command) == 2  # It is no SavedModel.
    assert "is no SavedModel" in capsys.readouterr().err


def test_words_that_no_statement_covers_are_said_to_be(tmp_path, monkeypatch, capsys):
    _written(monkeypatch)
    corpus = user_text.UserText.from_mapping("m", {"u": ["a b c d e f g"]})
    words = vocabulary.of_training_users(corpus, 7)
    run = toy_model.write(tmp_path / "run", words=words)
    assert main.main(["export", str(run), str(tmp_path / "exported")]) == 0
    assert "no privacy statement covers that" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere", "x"], "There is no trained model in nowhere"),
        (["{run}", "x", "--top", "0"], "--top must be at least 1"),
        (["{run}"], "Name the folder for the model once"),
        (["{run}", "x", "--output", "y"], "Name the folder for the model once"),
        (["{run}", "{run}"], "exists and is no SavedModel, so it is left alone"),
    ],
)
def test_what_cannot_be_used_is_refused(run, capsys, arguments, said):
    arguments = [argument.format(run=run) for argument in arguments]
    assert main.main(["export", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "tff-dpftrl export: " in error
