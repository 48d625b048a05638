"""Tests of runs on tables: the same run from every form, on and on."""

from __future__ import annotations

import csv
import dataclasses
import json
import random

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.training import toy_run
from tff_dpftrl.data import grouping, jsonl, sequences, table_files, user_text, vocabulary
from tff_dpftrl.finetuning import opening
from tff_dpftrl.participation import ledger, schema
from tff_dpftrl.runs import loop, manifest
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus as corpus_lib
from tff_dpftrl.training import custom_models, pretraining, run, text_task, warm_start

corpus = toy_run.corpus


@pytest.fixture(scope="module")
def rows(corpus):
    """The texts of the toy corpus in an order of their own; a user's in that user's order."""
    users = jsonl.read(corpus / "users.jsonl")
    rows = [(user, text) for user in users.user_ids for text in users.examples(user)]
    others = random.Random(2).sample(rows[1:], len(rows) - 1)
    return [rows[0], *others]


def _write_csv(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("author", "stars", "body"), *((u, 5, t) for u, t in rows)])


def _assert_same(output, expected):
    for ours, theirs in zip(toy_run.weights(output), toy_run.weights(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert toy_run.rows(output) == toy_run.rows(expected)


@pytest.mark.slow
def test_all_forms_of_a_table_give_the_same_run(corpus, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write_csv(tmp_path / "1.csv", rows[:100])
    _write_csv(tmp_path / "2.csv", rows[100:])
    lines = [json.dumps({"who": user, "said": text}) for user, text in rows]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    table = pa.table({"user_id": [u for u, _ in rows], "text": [t for _, t in rows]})
    parquet.write_table(table, tmp_path / "t.parquet")
    config = toy_run.config(corpus, num_rounds=1)
    said = []
    for name, options in (
        ("1.csv,2.csv", {}),
        ("t.jsonl", {"user_column": "who", "text_column": "said"}),
        ("t.parquet", {}),
    ):
        changed = config.changed(data=name, **options)
        run.train(changed, tmp_path / "runs" / name, progress=said.append)
    run.train(config.changed(data="docs"), tmp_path / "runs" / "rows", rows=iter(rows))
    for name in ("t.jsonl", "t.parquet", "rows"):
        _assert_same(tmp_path / "runs" / name, tmp_path / "runs" / "1.csv,2.csv")
    assert any("users are in the column 'author', texts in 'body'" in line for line in said)
    statement = (tmp_path / "runs" / "1.csv,2.csv" / "privacy_statement.md").read_text()
    assert "one value of the column 'author'" in statement


@pytest.mark.slow
def test_a_run_on_rows_goes_on_with_the_same_rows_only(corpus, rows, tmp_path):
    config = toy_run.config(corpus, data="mine", num_rounds=4, stop_at_accuracy=1e-6)
    run.train(config, tmp_path / "run", rows=rows)  # Stops at the first evaluation.
    assert manifest.read(tmp_path / "run").config["data"] == "mine"
    model = config.language.model
    assert "rows=..." in custom_models.resume_command(model, tmp_path / "run", "mine")
    assert len(run.train(None, tmp_path / "run", rows=rows).rows) == 3
    with pytest.raises(ValueError, match=r"was in memory: give it again.*rows=\.\.\."):
        run.train(None, tmp_path / "run")
    others = [(user, text + " ao") for user, text in rows]
    with pytest.raises(ValueError, match="texts of the training users are no longer"):
        run.train(None, tmp_path / "run", rows=others)
    with pytest.raises(ValueError, match="Give text or rows, not both"):
        run.train(config, tmp_path / "other", rows=rows, text=object())


def test_pretraining_takes_rows_and_later_runs_recognise_them(corpus, rows, tmp_path):
    public = pretraining.PretrainingConfig(epochs=1)
    other = toy_run.config(corpus, data="docs").language
    quiet = {"progress": lambda line: None}
    pretraining.pretrain(public, other, tmp_path / "pre", rows=rows, **quiet)
    record = json.loads((tmp_path / "pre" / warm_start.RECORD).read_text())
    assert record["source"] == "public rows, declared public by the operator"
    config = toy_run.config(corpus, initial_weights=str(tmp_path / "pre"))
    with pytest.raises(ValueError, match="public rows', the very text that this run protects"):
        run.train(config.changed(data="mine"), tmp_path / "run", rows=rows)
    # And rows of the users to be protected are refused, wherever their texts are now.
    protected = jsonl.read(corpus / "users.jsonl")
    again = [(user, text) for user in protected.user_ids for text in protected.examples(user)]
    with pytest.raises(ValueError, match="'public rows' .* has texts of theirs"):
        pretraining.read(public, toy_run.config(corpus).language, rows=again)
    text = pretraining.read(public, other, rows=rows)
    with pytest.raises(ValueError, match="Give text or rows, not both"):
        pretraining.pretrain(public, other, tmp_path / "x", text=text, rows=rows)


@pytest.mark.slow
def test_rows_that_weights_were_pretrained_on_are_refused(corpus, rows, tmp_path):
    _write_csv(tmp_path / "t.csv", rows)
    public = pretraining.PretrainingConfig(data=str(tmp_path / "t.csv"), epochs=1)
    other = toy_run.config(corpus, data="docs").language
    pretraining.pretrain(public, other, tmp_path / "pre", progress=lambda line: None)
    config = toy_run.config(corpus, data="mine", initial_weights=str(tmp_path / "pre"))
    text = corpus_lib.read(config.part(corpus_lib.TextOptions), rows=rows)
    strangers = user_text.UserText.from_mapping("mine", {"a": ["b c"], "d": ["e"]})
    for is_gone in (False, True):  # Then digests of it are there.
        if is_gone:
            (tmp_path / "t.csv").unlink()
        for given in ({"rows": rows}, {"text": text}):
            with pytest.raises(ValueError, match=r"t\.csv', the very text that this run protects"):
                run.train(config, tmp_path / "run", **given)
        warm_start.refuse_protected(tmp_path / "pre", "mine", users=[strangers])
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_whose_file_is_gone_goes_on_by_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in ("docs", str(tmp_path / "gone.csv"), "gone.csv"):
        for command in (
            custom_models.resume_command("lstm", tmp_path, data),
            opening.resume_command(tmp_path, data),
        ):
            assert command.startswith("tff-dpftrl ") and "--resume" in command
    assert "rows=..." in opening.resume_command(tmp_path, "mine")


@pytest.mark.slow
def test_a_run_on_a_cached_table_is_the_one_in_memory(corpus, rows, tmp_path, monkeypatch):
    path, output = tmp_path / "t.csv", tmp_path / "run"
    _write_csv(path, rows)
    config = toy_run.config(corpus, data=str(path), num_rounds=3)
    run.train(config, tmp_path / "in_memory")
    assert not (tmp_path / "in_memory" / manifest.TEXTS_CACHE).exists()
    monkeypatch.setattr(grouping, "_IN_MEMORY", 500)
    monkeypatch.setattr(sequences, "_CACHED", 2000)  # Of a handful of users.

    def crash(self, row):
        raise toy_run.Crash

    said = []
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_publish", crash)
        with pytest.raises(toy_run.Crash):
            run.train(config, output)
        assert (output / manifest.TEXTS_CACHE).exists()
        patch.setattr(table_files, "rows", None)  # No table is read again, no text but what
        patch.setattr(sequences.SequenceCorpus, "_count", None)  # the rounds need.
        with pytest.raises(toy_run.Crash):
            run.train(None, output, progress=said.append)
    assert any("as read before" in line for line in said)
    _write_csv(path, [(user, text + " ao") for user, text in rows])
    with pytest.raises(ValueError, match="texts of the training users are no longer"):
        run.train(None, output)
    _write_csv(path, rows)
    run.train(None, output)
    _assert_same(output, tmp_path / "in_memory")


@pytest.mark.slow
def test_what_an_unbegun_run_left_is_used_or_removed(corpus, rows, tmp_path, monkeypatch):
    path, private = tmp_path / "t.csv", tmp_path / "run" / "private"
    _write_csv(path, rows)
    config = toy_run.config(corpus, data=str(path), num_rounds=1, deterministic_noise_seed=None)
    monkeypatch.setattr(grouping, "_IN_MEMORY", 500)
    corpus_lib.read_users(config.text, cache=private / "texts.sqlite")
    made = (private / "texts.sqlite").stat().st_ino
    (private / "checkpoints").mkdir()
    (private / "checkpoints" / "round_00000000_old.npz").write_text("of nothing")
    (private / ".killed.unfinished").write_text("of nothing")
    begun = ledger.Ledger.create(
        private / "ledger.sqlite", schema.MinSep.unrestricted(1), initial_checkpoint="of nothing"
    )
    begun.close()
    run.train(config, tmp_path / "run")
    assert (private / "texts.sqlite").stat().st_ino == made
    assert not (private / "checkpoints" / "round_00000000_old.npz").exists()
    assert not (private / ".killed.unfinished").exists()


def test_n_grams_of_a_large_corpus_are_counted_on_a_sample_that_is_named(rows, monkeypatch):
    users = user_text.UserText.from_rows("mine", rows)
    words = vocabulary.Vocabulary(tuple(toy_run.WORDS), "test")
    spec = sequences.SequenceSpec(6)
    task = text_task.TextTask(
        **text_task.sequences_of(users, users, words, spec, max_held_out=50),
        num_untouched_users=0,
        model=None,
    )
    whole = task.baselines()
    cached = [f"{name} with earlier text" for name in ("trigrams", "4-grams")]
    assert list(whole) == ["unigrams", "bigrams", "trigrams", "4-grams", *cached]
    monkeypatch.setattr(text_task, "_COUNTED", 40)
    total = task.training_text.num_sequences
    of, cache = f" of 40/{total} sequences", " with earlier text"
    sampled = [name.replace(cache, "") + of + cache * name.endswith(cache) for name in whole]
    assert list(dataclasses.replace(task).baselines()) == sampled  # It counts again.


def test_who_is_kept_for_a_test_can_be_trained_on_with_tables(corpus, rows):
    def users(**options):
        config = config_lib.TrainingConfig.of(data="mine", mechanism="none", **options)
        return corpus_lib.read_users(config.text, rows=rows)

    usual, more = users(), users(train_on_test_users=True)
    assert set(more.train.user_ids) == {*usual.train.user_ids, *usual.test.user_ids}
    assert len(users(max_users=5).train) == 5
