"""Tests of interrupted runs: crashes, reports, resumption, and what is refused."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from tests.training import toy_run
from tff_dpftrl.accounting import privacy_statement, statement_text
from tff_dpftrl.data import jsonl, split, tokenizer, vocabulary
from tff_dpftrl.participation import ledger
from tff_dpftrl.runs import checkpoint, manifest, metrics_log, statement_subject
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import (
    federated_trainer,
    opening,
    options,
    report,
    run,
    text_task,
    trained_model,
)

corpus = toy_run.corpus
seeded = toy_run.seeded
trained = toy_run.trained

_BANDS = {"mechanism": "bandtoep", "bands": 2}
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")  # When a statement was written.


def test_a_second_run_in_the_folder_and_a_missing_one_are_refused(trained, tmp_path, corpus):
    with pytest.raises(ValueError, match="already holds a run: add --resume"):
        run.train(toy_run.config(corpus), trained.output)
    with pytest.raises(ValueError, match="There is no run in"):
        run.train(None, tmp_path)


def _assert_same_run(output, expected):
    for ours, theirs in zip(toy_run.weights(output), toy_run.weights(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert toy_run.rows(output) == toy_run.rows(expected)


# Every file that a run leaves outside of private/, and what it rests on besides the model.
_PUBLISHED = {
    "README.md": "what is in the other files",
    "best_model.npz": "held-out users, who choose the round",
    "config.json": "options, and what the statement names",
    "curves.png": "ε, held-out users",
    "held_out.json": "held-out users",
    "metrics.csv": "ε, held-out users",
    "metrics_README.md": "nothing",
    "model.npz": "nothing",
    "privacy.png": "the statement",
    "privacy_statement.json": "accounting, participation",
    "privacy_statement.md": "accounting, participation",
    "vocabulary.json": "the vocabulary, a public one here",
}
_KEYED = re.compile(
    r'("?(run|data_hmac_sha256|statement_(?:hmac_)?sha256)"?[:`| ]*"?)[0-9a-f]{16,}'
)  # By a random key.


def _published(output):
    """The content of each file outside of private/, without the date and what is keyed."""
    found = {}
    for path in output.rglob("*"):
        name = path.relative_to(output)
        if path.is_file() and name.parts[0] != "private":
            found[str(name)] = path.read_bytes()
            if path.suffix in (".json", ".md"):
                text = _KEYED.sub(r"\1", _DATE.sub("", path.read_text()))
                found[str(name)] = text.encode()
    return found


@pytest.mark.slow
@pytest.mark.pictures
def test_what_may_be_published_does_not_depend_on_exact_figures(seeded, corpus, tmp_path):
    expected = seeded.output
    train = federated_trainer.FederatedTrainer.train

    def measure_otherwise(trainer, state, round_index, members):
        time.sleep(0.01)
        trained = train(trainer, state, round_index, members)
        return trained._replace(loss=1.5 + round_index, top1=0.75, num_not_finite=3)

    output = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(corpus)
        patch.setattr(federated_trainer.FederatedTrainer, "train", measure_otherwise)
        patch.setattr(text_task.TextTask, "baselines", lambda task: {"unigrams": 0.987})
        run.train(toy_run.config(pathlib.Path(".")), output)
    assert toy_run.rows(output) != toy_run.rows(expected)
    ours, theirs = _published(output), _published(expected)
    assert ours.keys() == theirs.keys() and ours.keys() <= _PUBLISHED.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    for name in ("metrics.csv", "curves.png", "baselines.json"):
        private = [folder / "private" / name for folder in (output, expected)]
        assert private[0].read_bytes() != private[1].read_bytes(), name


# Where a process dies in its fourth call, rounds committed by then, and rounds begun.
_CRASH_SITES = (
    (ledger.Ledger, "begin_round", "after", 3, 4),
    (checkpoint.CheckpointFolder, "save", "after", 2, 3),
    (ledger.Ledger, "commit_round", "after", 4, 4),
    (metrics_log.MetricsLog, "append", "before", 4, 4),
)


@pytest.mark.slow
@pytest.mark.parametrize("owner, site, when, committed, begun", _CRASH_SITES)
def test_after_a_crash_a_run_can_be_reported_and_resumes_to_the_same_weights(
    corpus, seeded, tmp_path, monkeypatch, owner, site, when, committed, begun
):
    original = getattr(owner, site)
    calls = []

    def crashing(self, *args, **kwargs):
        calls.append(args)
        crash = len(calls) == 4
        if crash and when == "before":
            raise toy_run.Crash
        result = original(self, *args, **kwargs)
        if crash:
            raise toy_run.Crash
        return result

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, site, crashing)
        with pytest.raises(toy_run.Crash):
            run.train(toy_run.config(corpus), output)
    _report_and_resume(output, seeded, committed, begun)


def _report_and_resume(output, expected, committed, begun):
    reported = report.report(output)
    assert [row["round"] for row in reported.rows] == list(range(1, committed + 1))
    # Who was asked in a round that was begun may have been used.
    assert reported.statement.observed.num_rounds == begun
    # Whoever ends a run early may have done so because of what was learned.
    assert reported.statement.accounted.num_rounds == toy_run.NUM_ROUNDS
    assert f"{committed} of 6 rounds are done; go on with" in reported.summary
    results = run.train(None, output)
    _assert_same_run(output, expected.output)
    assert results.statement == expected.results.statement
    assert "All 6 rounds are done." in results.summary


def test_a_killed_run_goes_on_with_other_noise_and_costs_the_same(trained, tmp_path):
    output = pathlib.Path(shutil.copytree(trained.killed, tmp_path / "run"))
    assert report.report(output).statement.observed.num_rounds == 5  # Those that were asked.
    found, expected = run.train(None, output).statement, trained.results.statement
    assert toy_run.rows(output)[:4] == toy_run.rows(trained.output)[:4]
    for name in ("epsilon", "observed", "accounted", "parameters"):
        assert getattr(found, name) == getattr(expected, name)
    assert np.all(toy_run.weights(output)[0] != toy_run.weights(trained.output)[0])


@pytest.mark.pictures
def test_a_report_says_the_same_as_the_run_and_needs_no_tff(trained, tmp_path, monkeypatch):
    output, expected = tmp_path / "run", trained.output
    shutil.copytree(expected, output)
    for name in ("model.npz", "privacy_statement.json", "privacy_statement.md", "curves.png"):
        (output / name).unlink()
    leftover = output / ".model.npz.0123456789ab.unfinished"
    leftover.touch()
    monkeypatch.setitem(sys.modules, "tensorflow_federated", None)  # Importing it fails.
    assert report.report(output).summary == trained.results.summary
    _assert_same_run(output, expected)
    names = ("privacy_statement.json", "privacy_statement.md")
    said, before = (
        privacy_statement.PrivacyStatement.from_json((folder / names[0]).read_text())
        for folder in (output, expected)
    )
    # There was none to keep the date of, which the digests bind: all else is the same, to a byte.
    date = {statement_subject.DATE: before.subject[statement_subject.DATE]}
    same = dataclasses.replace(said, subject={**said.subject, **date})
    same = statement_subject.bound(output, same)
    texts = statement_text.to_json(same) + "\n", statement_text.markdown(same)
    for name, text in zip(names, texts, strict=True):
        assert text == (expected / name).read_text()
        assert _DATE.search((output / name).read_text())
        shutil.copy(expected / name, output / name)
    report.report(output)  # One that says the same stays as it is.
    for name in names:
        assert (output / name).read_bytes() == (expected / name).read_bytes()
    assert (output / "curves.png").read_bytes() == (expected / "curves.png").read_bytes()
    assert not leftover.exists()


@pytest.mark.slow
def test_a_run_under_way_and_one_without_a_round_are_not_reported(corpus, tmp_path, monkeypatch):
    output = tmp_path / "run"

    def crash(*args, **kwargs):
        with pytest.raises(ValueError, match="in use by another process"):
            report.report(output)
        raise toy_run.Crash

    with monkeypatch.context() as patch:
        patch.setattr(ledger.Ledger, "begin_round", crash)
        with pytest.raises(toy_run.Crash):
            run.train(toy_run.config(corpus), output)
    assert manifest.exists(output)
    with pytest.raises(ValueError, match="has not committed a round yet"):
        report.report(output)


@pytest.mark.slow
def test_a_crash_before_the_first_round_leaves_a_folder_that_can_be_used(
    corpus, tmp_path, monkeypatch
):
    def crash(*args):
        raise toy_run.Crash

    with monkeypatch.context() as patch:
        patch.setattr(manifest.Manifest, "keep", crash)
        with pytest.raises(toy_run.Crash):
            run.train(toy_run.config(corpus, num_rounds=1), tmp_path / "run")
    assert not manifest.exists(tmp_path / "run")
    run.train(toy_run.config(corpus, num_rounds=1), tmp_path / "run")


@pytest.mark.parametrize(
    ("algorithm", "others"),
    [
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("dp-fedavg", {"clip_norm_schedule": "1:0.5"}),
            ("dp-fedsgd", {}),
            # One client is expected in a round: some cohorts are empty.
            ("dp-ftrl", {"sampling": "cyclic", "clients_per_round": 1} | _BANDS),
        )
    ],
)
def test_sampled_algorithms_resume_with_the_same_secret_cohorts(
    corpus, tmp_path, monkeypatch, algorithm, others
):
    options = {
        "algorithm": algorithm,
        "mechanism": "blt",  # The default, which these algorithms ignore.
        "buffers": None,
        "min_sep": None,
        "noise_multiplier": 2.0,
        "deterministic_noise_seed": None,
        "num_rounds": 3,
    } | others
    output = tmp_path / "run"

    def crash(*args):
        raise toy_run.Crash

    with monkeypatch.context() as patch:
        patch.setattr(ledger.Ledger, "commit_round", crash)
        with pytest.raises(toy_run.Crash):
            run.train(toy_run.config(corpus, **options), output)
    # The round was begun with a cohort: the ledger would refuse another one.
    results = run.train(None, output)
    assert results.statement.mechanism in (algorithm, "banded-toeplitz (2 bands)")
    if "clip_norm_schedule" in others:
        said = results.statement.parameters["clip_norm_by_round"]
        assert said.startswith("1, 0.5 after 1 rounds; ")
    assert results.statement.epsilon == pytest.approx(float(results.rows[-1]["epsilon"]))
    assert "probability" in results.statement.assumptions[0]
    seed = (output / "private" / "cohort_seed").read_text().strip()
    assert len(seed) > 50  # 256 bits, hexadecimal.
    assert all(row["clients"] is None for row in results.rows)  # Cohorts are secret.
    published = [p for p in output.rglob("*") if p.is_file() and "private" not in p.parts]
    assert all(seed.encode() not in p.read_bytes() for p in published)


def _edit(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "go_on",
    [report.report, pytest.param(lambda output: run.train(None, output), marks=pytest.mark.slow)],
)
def test_a_changed_noise_multiplier_is_refused_and_named(trained, tmp_path, go_on):
    output = pathlib.Path(shutil.copytree(trained.output, tmp_path / "run"))

    def more_noise(content):
        content["config"]["noise_multiplier"] = 50.0
        content["derived"]["noise_multiplier"] = 50.0

    _edit(output / "config.json", more_noise)
    with pytest.raises(ValueError, match=r"config.noise_multiplier: 0.5 → 50.0"):
        go_on(output)
    # Nor does it help to change the copy too: the ledger's commits cover its digest.
    _edit(output / "private" / "manifest.json", more_noise)
    with pytest.raises(checkpoint.CheckpointError, match="under other options"):
        go_on(output)


@pytest.mark.slow
def test_a_run_goes_on_when_the_model_of_its_vocabulary_is_gone(corpus, trained, tmp_path):
    words = tmp_path / "model" / "vocabulary.json"
    words.parent.mkdir()
    shutil.copy(trained.output / "vocabulary.json", words)
    config = toy_run.config(corpus, vocabulary=str(words), num_rounds=1, min_sep=1)
    run.train(config, tmp_path / "run", progress=lambda line: None)
    before = opening.open_run(None, tmp_path / "run").text.words
    words.unlink()
    assert opening.open_run(None, tmp_path / "run").text.words == before


def test_a_run_goes_on_with_the_rule_of_its_vocabulary(trained, tmp_path):
    output = pathlib.Path(shutil.copytree(trained.output, tmp_path / "run"))
    _edit(output / "vocabulary.json", lambda content: content.update(format=1))
    assert opening.open_run(None, output).text.words.word_rule == tokenizer.NO_MARKS
    with pytest.raises(ValueError, match="The words of the vocabulary are no longer those"):
        run.train(None, output)  # It began with the rule of today.


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_as_it_would_have(tmp_path, monkeypatch):
    """That version tore marks from their letters."""
    toy_run.write_corpus(tmp_path)
    data, output = tmp_path / "users.jsonl", tmp_path / "run"
    data.write_text(data.read_text().replace("bao", "म\u0947ं"), encoding="utf-8")
    (tmp_path / "words.txt").write_text("म\n" + "\n".join(toy_run.WORDS), encoding="utf-8")
    config = toy_run.config(tmp_path, num_rounds=2, min_sep=1)

    def earlier(*args, **kwargs):
        words = from_file(*args, **kwargs)
        return dataclasses.replace(words, word_rule=tokenizer.NO_MARKS)

    def crashing(self, *args, **kwargs):
        begin_round(self, *args, **kwargs)
        if args[0] == 1:
            raise toy_run.Crash

    from_file, begin_round = vocabulary.from_file, ledger.Ledger.begin_round
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "from_file", earlier)
        run.train(config, tmp_path / "expected")
        patch.setattr(ledger.Ledger, "begin_round", crashing)
        with pytest.raises(toy_run.Crash):
            run.train(config, output)
    run.train(None, output)
    _assert_same_run(output, tmp_path / "expected")
    trained = trained_model.find(output)
    assert trained.words.id_of["म"] == 1
    assert trained.rule.words("म\u0947ं")[0] == "म"


@pytest.mark.parametrize("engine", ["compiled", "tff"])
def test_earlier_versions_had_two_engines(trained, tmp_path, monkeypatch, engine):
    output = shutil.copytree(trained.output, tmp_path / "run")
    known = manifest.read(output)
    config = {**known.config, "engine": engine}
    monkeypatch.setattr(manifest, "read", lambda _: dataclasses.replace(known, config=config))
    assert options.of_manifest(manifest.read(output), output) == options.of_manifest(known, output)
    with (
        contextlib.nullcontext()
        if engine == "compiled"
        else pytest.raises(ValueError, match="engine 'tff', TFF's executor, which this version")
    ):
        opening.open_run(None, output)


def _refuse_to_go_on(trained, folder, users, message):
    """Asserts that a run does not go on with other users, whom its file is found to have."""
    output = pathlib.Path(shutil.copytree(trained.output, folder / "run"))
    (folder / "users.jsonl").write_text("\n".join(map(json.dumps, users)) + "\n")
    read = jsonl.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "read", lambda path, **options: read(folder / path.name, **options))
        with pytest.raises(ValueError, match=message):
            run.train(None, output)


def test_other_users_are_refused_on_resuming(corpus, trained, tmp_path):
    users = list(map(json.loads, (corpus / "users.jsonl").read_text().splitlines()))
    _refuse_to_go_on(trained, tmp_path, users[:-10], "training users are no longer those")


def test_other_texts_of_the_same_users_are_refused_on_resuming(corpus, trained, tmp_path):
    """The statement is about those texts, and copies that go on with others protect others."""
    users = list(map(json.loads, (corpus / "users.jsonl").read_text().splitlines()))
    train = next(user for user in users if split.hash_bucket(user["user_id"]) > 1)
    train["examples"][0] = " ".join(reversed(train["examples"][0].split()))
    message = "texts of the training users are no longer those"
    _refuse_to_go_on(trained, tmp_path, users, message)
    # A run of a version that did not record the texts goes on.
    older = manifest.read(trained.output)
    identities = {k: v for k, v in older.identities.items() if k != manifest.TEXTS}
    assert len(identities) < len(older.identities)
    dataclasses.replace(older, identities=identities).check_identities(
        {manifest.TEXTS: ["another"]}, remedy=""
    )


def test_texts_of_held_out_users_must_be_the_same_if_noise_is_added_to_them(corpus, tmp_path):
    users = [json.loads(line) for line in (corpus / "users.jsonl").read_text().splitlines()]
    held_out = next(user for user in users if split.is_held_out(user["user_id"]))
    held_out["examples"][0] = " ".join(reversed(held_out["examples"][0].split()))
    (tmp_path / "users.jsonl").write_text("\n".join(map(json.dumps, users)) + "\n")
    found = {}
    for held_out_users in ("public", "protected"):
        for data in (corpus, tmp_path):
            options = {"data": str(data / "users.jsonl"), "held_out_users": held_out_users}
            config = toy_run.config(corpus, metrics_epsilon=2.0, **options)
            opened = opening.open_run(config, tmp_path / "run")
            found[held_out_users, data] = run._identities(config, run._task(opened, print))
    assert found["public", corpus] == found["public", tmp_path]
    ours, theirs = found["protected", corpus], found["protected", tmp_path]
    different = {name for name in ours if ours[name] != theirs[name]}
    assert different == {"texts of the held-out users"}


_CHILD = textwrap.dedent("""
    import json, pathlib, sys
    from tff_dpftrl.training import config, run
    options = json.loads(sys.argv[2])
    run.train(options and config.TrainingConfig.of(**options), pathlib.Path(sys.argv[1]))
""")


def _start(output: pathlib.Path, config: config_lib.TrainingConfig | None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(output), json.dumps(config and config.to_dict())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _kill_and_resume_until_done(corpus, output, delays):
    """Kills a run after each of the delays (seconds since its first round); returns the kills."""
    kills = 0
    for delay in delays:
        fresh = not manifest.exists(output)
        child = _start(output, toy_run.config(corpus) if fresh else None)
        while child.poll() is None and not manifest.exists(output):
            time.sleep(0.05)
        time.sleep(delay)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.communicate()
        assert child.returncode in (0, -signal.SIGKILL)
    child = _start(output, None)
    _, errors = child.communicate()
    assert child.returncode == 0, errors.decode()
    assert not list(output.rglob("*.unfinished"))
    return kills


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_weights(corpus, seeded, tmp_path):
    output = tmp_path / "run"
    assert _kill_and_resume_until_done(corpus, output, delays=[1.5]) == 1
    _assert_same_run(output, seeded.output)


@pytest.mark.slow
def test_thirty_kills_at_random_moments(corpus, seeded, tmp_path):
    rng = random.Random(3)
    kills = attempts = 0
    while kills < 30:
        output = tmp_path / f"run{attempts}"
        # The first child is killed after its first commit, later ones while they start or run.
        delays = [rng.uniform(0.0, 3.0), *(rng.uniform(1.0, 9.0) for _ in range(5))]
        kills += _kill_and_resume_until_done(corpus, output, delays)
        _assert_same_run(output, seeded.output)
        attempts += 1
        assert attempts <= 20, f"only {kills} of the children were still running when killed"
