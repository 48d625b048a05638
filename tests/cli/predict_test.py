"""Tests of `tff-dpftrl predict`."""

import io
import json
import sys

import pytest

from tests.training import toy_model
from tff_dpftrl.cli import main, predict
from tff_dpftrl.models import text_cache
from tff_dpftrl.training import trained_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a last and a best model."""
    folder = tmp_path_factory.mktemp("run")
    return toy_model.write(folder, last=toy_model.weights(1), best=toy_model.weights(2))


def _type(monkeypatch, text, *, at_terminal=False):
    stream = io.StringIO(text)
    stream.isatty = lambda: at_terminal
    monkeypatch.setattr(sys, "stdin", stream)


def _json(arguments, capsys):
    assert main.main(["predict", *map(str, arguments), "--format", "jsonl"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_words_and_what_is_no_word_are_printed(run, capsys):
    assert main.main(["predict", str(run), "The front foo", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (expected,) = trained_model.find(run).load().predict(["The front foo"], top=2)
    shown = [f"{p:8.1%}  {word}" for word, p in expected.next_words]
    assert lines == [
        "The front foo",
        *shown,
        f"{expected.unknown_word:8.1%}  (a word outside the vocabulary)",
        f"{expected.end_of_text:8.1%}  (the end of the text)",
        "   not in the vocabulary, so read as some unknown word: 'foo'",
        "",
    ]


def _rounded(value):
    """Rounds all numbers in a result, which are probabilities, to five digits after the point."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 5))


def test_several_texts_and_lines_of_standard_input_are_the_same(run, capsys, monkeypatch):
    texts = [f"the front {'end ' * (i % 3)}." for i in range(150)]
    monkeypatch.setattr(predict, "_TEXTS_AT_A_TIME", 7)
    _type(monkeypatch, "\ufeff" + "\n".join(texts))
    found = _json([run], capsys)
    assert [entry["text"] for entry in found] == texts
    for one, other in zip(found, _json([run, *texts], capsys), strict=True):
        # Products of matrices are rounded otherwise in larger batches.
        assert _rounded(one) == _rounded(other)
    first = found[0]
    assert len(first["next_words"]) == 5
    total = sum(
        w["probability"] for w in _json([run, texts[0], "--top", 99], capsys)[0]["next_words"]
    )
    assert total + first["unknown_word"] + first["end_of_text"] == pytest.approx(1.0, rel=1e-5)


def test_the_best_model_can_be_asked(run, capsys):
    last, best = (_json([run, "the", "--model", name], capsys) for name in ("last", "best"))
    assert last != best


def test_a_person_may_press_enter(run, capsys, monkeypatch):
    _type(monkeypatch, "\nthe\n\nthe front\n", at_terminal=True)
    assert main.main(["predict", str(run)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("(the end of the text)") == 2
    assert captured.err == "Type the beginning of a sentence, and Enter; Ctrl-D ends.\n"


def test_a_text_goes_on_with_the_same_words_for_the_same_seed(run, capsys, monkeypatch):
    options = ["--tokens", 4, "--seed", 3, "--temperature", 2, "--top-p", 0.9]
    texts = ["the front", "the"]
    found = _json([run, *texts, *options], capsys)
    _type(monkeypatch, "\n".join(texts))
    assert _json([run, *options], capsys) == found
    expected = (
        trained_model.find(run).load().continue_texts(texts, 4, seed=3, temperature=2.0, top_p=0.9)
    )
    assert [entry["continuation"] for entry in found] == [one.text for one in expected]
    assert [entry["has_ended"] for entry in found] == [one.has_ended for one in expected]
    assert main.main(["predict", str(run), *texts, *map(str, options)]) == 0
    lines = [text + one.text for text, one in zip(texts, expected, strict=True)]
    assert capsys.readouterr().out.splitlines() == lines


def test_earlier_text_of_the_author_counts(run, tmp_path, capsys):
    file = tmp_path / "mine.txt"
    file.write_text("\ufeffthe front the\n\nthe front end the front end\n", encoding="utf-8")
    (found,) = _json([run, "the front", "--history", file], capsys)
    trained = trained_model.find(run).load()
    (expected,) = trained.predict(["the front"], history=file.read_text("utf-8-sig").splitlines())
    (without,) = trained.predict(["the front"])
    assert [(w["word"], w["probability"]) for w in found["next_words"]] == list(expected.next_words)
    assert dict(expected.next_words)["end"] > dict(without.next_words).get("end", 0.0) + 0.1
    # The longest n-gram is "the front end", after the beginning: of order 4.
    left = 1.0 - text_cache.WEIGHTS[3]
    assert expected.unknown_word == pytest.approx(left * without.unknown_word, rel=1e-5)


@pytest.mark.parametrize("content", [None, b"\n \n", b"\xff"])
def test_earlier_text_that_cannot_be_used_is_one_line(run, tmp_path, capsys, content):
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    said = {None: "cannot be read", b"\n \n": "has no word in it", b"\xff": "is not UTF-8"}
    assert main.main(["predict", str(run), "the", "--history", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"tff-dpftrl predict: --history {file} {said[content]}")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["the", "--tokens", "1", "--history", "f"], "--history has no meaning with --tokens"),
        ([""], "TEXT must have at least one word in it, got ''."),
        (["the", " \t"], "TEXT must have at least one word in it"),
        (["the", "--top", "0"], "--top must be at least 1, got 0."),
        (["the", "--seed", "1"], "--seed has no meaning without --tokens: leave it out."),
        (["the", "--tokens", "1", "--seed", "-1"], "--seed must be at least 0, got -1."),
        (["the", "--top", "1", "--tokens", "1"], "--top has no meaning with --tokens: leave it"),
        ([], "line 2 of standard input must have at least one word in it, got ''."),
    ],
)
def test_what_cannot_be_used_is_one_line(run, capsys, monkeypatch, arguments, said):
    _type(monkeypatch, "the\n\nfront\n")
    assert main.main(["predict", str(run), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"tff-dpftrl predict: {said}")


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert main.main(["predict", str(tmp_path), "the"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tff-dpftrl predict: There is no trained model in {tmp_path}")
