"""Tests of tff_dpftrl.training.pretraining, and of runs that begin with its models."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest

from tests.reports import listed_files
from tests.training import toy_run
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.data import (
    docstrings,
    jsonl,
    sequences,
    split,
    tokenizer,
    user_text,
    vocabulary,
    vocabulary_file,
)
from tff_dpftrl.models import evaluation, export
from tff_dpftrl.training import pretraining, run, trained_model, warm_start


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Public text and the words of the toy corpus; other users are protected."""
    folder = tmp_path_factory.mktemp("corpus")
    toy_run.write_corpus(folder)
    toy_run.write_public_corpus(folder)
    return folder


def _config(corpus, **options):
    defaults = {"data": str(corpus / "public.jsonl"), "epochs": 3, "batch_size": 8}
    return pretraining.PretrainingConfig(**defaults | options)


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    """A folder with a model, what was said, and the summary."""
    output = tmp_path_factory.mktemp("runs") / "pretrained"
    lines = []
    config, options = _config(corpus, data="public.jsonl"), toy_run.config(corpus).language
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(corpus)
        summary = pretraining.pretrain(config, options, output, progress=lines.append)
    return output, lines, summary


def test_a_folder_has_the_best_model_and_what_it_was_trained_on(corpus, pretrained):
    output, lines, summary = pretrained
    names = {path.name for path in output.iterdir()}
    described = {"curves.png", "pretraining.json", "text_digests.npz", "vocabulary.json"}
    assert names == {"README.md", "model.npz", *described}
    listed_files.check(output)
    record = json.loads((output / "pretraining.json").read_text())
    assert record["source"] == "public.jsonl, declared public by the operator"
    assert record["pretraining"] == dataclasses.asdict(_config(corpus))
    assert [epoch["epoch"] for epoch in record["epochs"]] == [1, 2, 3]
    losses = [epoch["eval_loss"] for epoch in record["epochs"]]
    assert record["best_epoch"] == 1 + int(np.argmin(losses))
    assert record["epochs"][-1]["loss"] < record["epochs"][0]["loss"]
    assert f"Best of 3 epochs: {record['best_epoch']}" in summary and "private" in summary
    assert "198228" not in lines[0] and "Model: word-lstm" in lines[0]
    # The loss is that of the file, on users whom it was not trained on.
    text = pretraining.read(_config(corpus), toy_run.config(corpus).language)
    assert not set(text.train.user_ids) & set(text.held_out.user_ids)
    assert len(text.train) + len(text.held_out) == 40
    trained = trained_model.find(output).load()
    rows = sequences.SequenceCorpus(text.held_out, text.words, sequences.SequenceSpec(6)).pooled()
    measured = evaluation.Evaluator(trained.model, trained.special, rows)(trained.weights)
    np.testing.assert_allclose(measured["loss"], min(losses), rtol=1e-6)


@pytest.mark.slow
def test_it_ends_when_nothing_improves(corpus, tmp_path):
    config = _config(corpus, epochs=50, learning_rate=100.0, patience=2)
    summary = pretraining.pretrain(config, toy_run.config(corpus).language, tmp_path / "out")
    (ended,) = re.findall(r"Best of (\d+) epochs: (\d+),", summary)
    assert int(ended[0]) == int(ended[1]) + 2 < 50


@pytest.mark.slow
def test_a_run_begins_with_its_weights_and_says_so(corpus, pretrained, tmp_path):
    output = tmp_path / "pretrained"
    shutil.copytree(pretrained[0], output)
    config = toy_run.config(
        corpus, initial_weights=str(output), num_rounds=2, server_learning_rate=1e-9, eval_every=1
    )
    lines = []
    results = run.train(config, tmp_path / "run", progress=lines.append)
    source = "the model 'pretrained', trained on public.jsonl, declared public by the operator"
    assert f"Initial weights: {source}; it knows 30 of 30 words." in lines
    sentence = f"Text that the initial weights were trained on: {source}."
    assert sentence in results.statement.not_covered
    assert sentences.INITIAL_WEIGHTS not in results.statement.headline_caveats
    _, before = export.read(output / "model.npz")
    for ours, theirs in zip(toy_run.weights(tmp_path / "run"), before, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    # What was begun needs the folder no more.
    shutil.rmtree(output)
    again = run.train(None, tmp_path / "run", progress=lines.append)
    assert sentence in again.statement.not_covered
    # And who goes on with its model on the same users is told of both.
    config = config.changed(initial_weights=str(tmp_path / "run"))
    second = run.train(config, tmp_path / "second", progress=lines.append).statement
    assert "All of these runs trained on the same users." in second.headline_caveats[-1]
    assert second.epsilon is None or second.parameters["epsilon_with_earlier_runs"] > second.epsilon


@pytest.mark.parametrize(
    ("pretraining_options", "options", "message"),
    [
        ({}, {"vocabulary": "private"}, "vocabulary 'private'.*public"),
        (
            {},
            {"vocabulary": "{corpus}/vocabulary.json"},
            "vocabulary .*vocabulary.json is not of public text",
        ),
        ({"data": "docs"}, {"data": "docs"}, "'docs'.*standard-library"),
        ({"data": "{corpus}/users.jsonl"}, {}, "file of the users to be protected"),
        ({"data": "{corpus}/few.jsonl"}, {}, "too few to hold out"),
    ],
)
def test_text_that_cannot_be_used_is_refused(corpus, pretraining_options, options, message):
    lines = (corpus / "public.jsonl").read_text().splitlines()
    held_out = split.by_user(jsonl.read(corpus / "public.jsonl")).validation.user_ids
    kept = [line for line in lines if json.loads(line)["user_id"] not in held_out]
    (corpus / "few.jsonl").write_text("\n".join(kept[:2]))
    words = vocabulary.Vocabulary(("the",), "counted on users", True, is_public=False)
    vocabulary_file.write(corpus / "vocabulary.json", words, tokenizer.Tokenizer(True, False))
    given = {name: value.format(corpus=corpus) for name, value in pretraining_options.items()}
    options = {name: value.format(corpus=corpus) for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        pretraining.read(_config(corpus, **given), toy_run.config(corpus, **options).language)


def test_a_copy_of_protected_text_is_refused(corpus, tmp_path):
    shutil.copy(corpus / "users.jsonl", tmp_path / "copy.jsonl")
    with pytest.raises(ValueError, match="a copy of it, or has texts"):
        pretraining.read(
            _config(corpus, data=str(tmp_path / "copy.jsonl")), toy_run.config(corpus).language
        )


def test_protected_text_is_recognised_in_columns_of_any_name(corpus, tmp_path):
    users = jsonl.read(corpus / "users.jsonl")
    lines = [f"{user},{text}" for user in users.user_ids for text in users.examples(user)]
    (tmp_path / "odd.csv").write_text("\n".join(["member,said", *lines]))
    config = _config(
        corpus, data=str(tmp_path / "odd.csv"), user_column="member", text_column="said"
    )
    with pytest.raises(ValueError, match="or has texts of theirs"):
        pretraining.read(config, toy_run.config(corpus).language)


def test_texts_that_nearly_repeat_protected_ones_are_left_out_and_it_is_said(corpus, tmp_path):
    pytest.importorskip("datasketch")
    users, public = jsonl.read(corpus / "users.jsonl"), jsonl.read(corpus / "public.jsonl")
    planted = [users.examples(user)[0] for user in users.user_ids[:3]]
    longer = " ".join(public.texts())[:400]
    texts = {user: public.examples(user) for user in public.user_ids}
    first = public.user_ids[0]
    texts[first] = [*planted[:2], f"{planted[2].upper()} !", *texts[first], longer]
    texts[users.user_ids[0]] = [planted[0]]  # Alone, it would be a protected user's own text.
    jsonl.write(user_text.UserText.from_mapping("public", texts), tmp_path / "public.jsonl")
    options = toy_run.config(corpus).language
    with pytest.raises(ValueError, match="or has texts of theirs"):
        pretraining.read(_config(corpus, data=str(tmp_path / "public.jsonl")), options)
    config = _config(
        corpus,
        data=str(tmp_path / "public.jsonl"),
        epochs=1,
        without_near_duplicates_of=str(corpus / "users.jsonl"),
    )
    text = pretraining.read(config, options)
    left = {
        user: part.examples(user) for part in (text.train, text.held_out) for user in part.user_ids
    }
    assert not set(planted) & {one for texts in left.values() for one in texts}
    assert left[first][-1] == longer and users.user_ids[0] not in left
    num_texts = sum(map(len, texts.values()))
    assert text.left_out == num_texts - sum(map(len, left.values())) >= 4

    lines = []
    pretraining.pretrain(config, options, tmp_path / "out", text=text, progress=lines.append)
    assert lines[0].startswith(f"Left out: {text.left_out} texts") and "MinHash" in lines[0]
    record = json.loads((tmp_path / "out" / "pretraining.json").read_text())
    assert record["near_duplicates"]["left_out"] == text.left_out
    assert "Jaccard" in record["near_duplicates"]["method"]
    # Weights that depend on protected text are not of public text alone, and are no such text.
    source, is_public = warm_start.source(tmp_path / "out")
    left_out = f"without near-duplicates of text of users.jsonl (texts left out: {text.left_out})"
    assert left_out in source and "epsilon does not cover" in source
    assert not is_public
    warm_start.refuse_protected(tmp_path / "out", str(corpus / "users.jsonl"))
    with pytest.raises(ValueError, match="the very text that this run protects"):
        warm_start.refuse_protected(tmp_path / "out", str(tmp_path / "public.jsonl"))
    with pytest.raises(ValueError, match="is the file of the users to be protected"):
        pretraining.read(dataclasses.replace(config, data=str(corpus / "users.jsonl")), options)


@pytest.mark.parametrize(
    "package, option, options",
    [
        ("datasketch", {"without_near_duplicates_of": "none.jsonl"}, {}),
        ("pyarrow", {"without_near_duplicates_of": "none.parquet"}, {}),
        ("tokenizers", {}, {"tokenizer": "sentencepiece"}),
    ],
)
def test_a_missing_package_is_found_before_anything_is_read(
    corpus, monkeypatch, package, option, options
):
    monkeypatch.setitem(sys.modules, package, None)
    config = _config(corpus, data="none.jsonl", **option)
    with pytest.raises(ValueError, match=f"needs {package}, which is not installed"):
        pretraining.read(config, toy_run.config(corpus, vocabulary="docs", **options).language)


def test_a_vocabulary_that_lacks_words_is_answered_with_what_to_do(corpus, pretrained, tmp_path):
    assert not any(line.startswith("Hint:") for line in pretrained[1])
    assert not any(line.startswith("Warning:") for line in pretrained[1])
    lines, data = [], tmp_path / "public.jsonl"
    text = (corpus / "public.jsonl").read_text().replace("bao", "我们在学习语言模型" * 3)
    data.write_text(text, encoding="utf-8")
    options = toy_run.config(corpus, vocabulary_size=20).language  # Of thirty words.
    pretraining.pretrain(
        _config(corpus, data=str(data), epochs=1), options, tmp_path / "run", progress=lines.append
    )
    assert any(line.startswith("Hint:") and "--vocabulary english" in line for line in lines)
    assert any(line.startswith("Warning: many texts have no spaces") for line in lines)


def test_docstrings_of_packages_may_be_public_for_another_corpus(corpus, monkeypatch):
    packages = jsonl.read(corpus / "public.jsonl")
    library = user_text.UserText.from_mapping("library", {"author1": ["a text"], "abc": ["b"]})
    monkeypatch.setattr(docstrings, "read", lambda: packages)
    monkeypatch.setattr(docstrings, "read_standard_library", lambda: library)
    found = pretraining.read(_config(corpus, data="docs"), toy_run.config(corpus).language)
    texts = [*found.train.texts(), *found.held_out.texts()]
    assert sorted(texts) == sorted([*packages.texts(), *library.texts()])
    assert found.source.endswith("and of the installed packages")


def test_weights_of_the_protected_text_are_refused(tmp_path):
    (tmp_path / "pretraining.json").write_text(
        json.dumps({"source": "docstrings", "pretraining": {"data": "docs"}})
    )
    with pytest.raises(ValueError, match="'docs', the very text that this run protects"):
        warm_start.read(tmp_path, None, None, 0, protected="docs")


def test_weights_of_a_protected_file_are_refused_wherever_it_was_named(
    corpus, pretrained, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(corpus / "public.jsonl", "copy.jsonl")
    for protected in (str(corpus / "public.jsonl"), "copy.jsonl"):
        with pytest.raises(ValueError, match="public.jsonl', the very text .* a copy of it"):
            warm_start.refuse_protected(pretrained[0], protected)
    warm_start.refuse_protected(pretrained[0], str(corpus / "users.jsonl"))


def test_weights_of_protected_text_are_refused_though_the_file_is_gone(
    corpus, pretrained, tmp_path
):
    output = pathlib.Path(shutil.copytree(pretrained[0], tmp_path / "pretrained"))
    record = (output / "pretraining.json").read_text()
    gone = record.replace(str(corpus / "public.jsonl"), str(tmp_path / "gone.jsonl"))
    assert gone != record
    (output / "pretraining.json").write_text(gone)
    shuffled = jsonl.read(corpus / "public.jsonl")
    renamed = {f"a {user}": shuffled.examples(user)[::-1] for user in shuffled.user_ids[:3]}
    jsonl.write(user_text.UserText.from_mapping("renamed", renamed), tmp_path / "renamed.jsonl")
    with pytest.raises(ValueError, match="the very text that this run protects, a copy of it"):
        warm_start.refuse_protected(output, str(tmp_path / "renamed.jsonl"))
    warm_start.refuse_protected(output, str(corpus / "users.jsonl"))
    (output / warm_start.DIGESTS).unlink()  # As in folders of earlier versions.
    warm_start.refuse_protected(output, str(tmp_path / "renamed.jsonl"))


def test_a_folder_with_something_in_it_is_refused(pretrained):
    with pytest.raises(ValueError, match="not an empty folder"):
        pretraining.check_is_free(pretrained[0])


def test_what_an_interruption_left_before_the_first_model_is_not_in_the_way(pretrained, tmp_path):
    for name in ("vocabulary.json", "pretraining.json"):
        shutil.copy(pretrained[0] / name, tmp_path)
    (tmp_path / ".0123456789abcdef.unfinished").touch()
    pretraining.check_is_free(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not an empty folder"):
        pretraining.check_is_free(tmp_path / "file")
    with pytest.raises(ValueError, match="not an empty folder"):
        pretraining.check_is_free(tmp_path)


@pytest.mark.slow
def test_a_model_is_never_without_what_it_was_trained_on(corpus, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretraining, "_draw", fail)
    with pytest.raises(KeyboardInterrupt):
        pretraining.pretrain(_config(corpus), toy_run.config(corpus).language, tmp_path / "a")
    assert (tmp_path / "a" / "model.npz").exists()
    monkeypatch.setattr(export, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        pretraining.pretrain(_config(corpus), toy_run.config(corpus).language, tmp_path / "b")
    assert (tmp_path / "b" / "pretraining.json").exists()
    assert not (tmp_path / "b" / "model.npz").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("patience", 0), ("batch_size", 0), ("learning_rate", 1e39), ("seed", -1)],
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        pretraining.PretrainingConfig(**{name: value})
