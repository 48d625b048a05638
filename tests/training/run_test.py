"""Tests of whole training runs: files, messages, statement, refusals."""

import csv
import json
import pathlib
import re
import shutil
import stat

import numpy as np
import pytest

from tests.training import toy_run
from tff_dpftrl.accounting import statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.mechanisms import serialization, tree
from tff_dpftrl.participation import ledger, schema
from tff_dpftrl.runs import committed_rounds, manifest
from tff_dpftrl.training import corpus as corpus_lib
from tff_dpftrl.training import report, run, trained_model

corpus = toy_run.corpus
seeded = toy_run.seeded
trained = toy_run.trained


def test_a_run_leaves_everything_in_its_folder(trained):
    names = {p.name for p in trained.output.iterdir()}
    assert names == {
        "README.md",
        "best_model.npz",
        "config.json",
        "curves.png",
        "held_out.json",
        "metrics.csv",
        "metrics_README.md",
        "model.npz",
        "privacy.png",
        "privacy_statement.json",
        "privacy_statement.md",
        "private",
        "vocabulary.json",
    }
    rows = toy_run.rows(trained.output)
    assert [int(row["round"]) for row in rows] == list(range(1, toy_run.NUM_ROUNDS + 1))
    assert [bool(row["eval_loss"]) for row in rows] == [False, True] * 3


@pytest.mark.slow
def test_a_simulation_says_whose_epsilon_is_whose(corpus, tmp_path):
    lines, output = [], tmp_path / "simulation"
    config = toy_run.config(
        corpus,
        num_rounds=2,
        noise_multiplier=8.0,
        min_sep=None,
        simulate_report_goal=500,
        simulate_population=4000,
        deterministic_noise_seed=None,
        delta=1e-4,
    )
    results = run.train(config, output, progress=lines.append)
    assert any("Simulation: with the noise of this run" in line for line in lines)
    statement = results.statement
    assert statement.epsilon > 10 * statement.parameters["simulated_epsilon"]
    assert statement.parameters["simulated_noise_multiplier"] == 8.0
    assert statement.parameters["noise_multiplier"] == pytest.approx(0.08)
    assert "the users of this simulation have only the ε above" in results.summary
    assert report.report(output).statement == statement


@pytest.mark.slow
def test_with_averaging_the_average_is_evaluated_and_kept(corpus, tmp_path, seeded):
    last = seeded.output
    averaged = tmp_path / "averaged"
    run.train(toy_run.config(corpus, iterate_averaging=0.5, eval_every=1), averaged)
    known = manifest.read(averaged)
    with committed_rounds.CommittedRounds.open(
        averaged / "private", schema.MinSep(**known.derived["schema"]), binding=known.digest
    ) as rounds:
        snapshot, _ = rounds.restore()
    # Training goes on from the last model, as without averaging.
    for ours, plain in zip(
        snapshot.part("global_model_weights/trainable"), toy_run.weights(last), strict=True
    ):
        np.testing.assert_array_equal(ours, plain)
    for ours, average, plain in zip(
        toy_run.weights(averaged),
        snapshot.part("finalizer/average"),
        toy_run.weights(last),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, average)
        assert np.any(ours != plain)
    assert toy_run.rows(averaged)[-1]["eval_loss"] != toy_run.rows(last)[-1]["eval_loss"]


def _drop_columns(path, names):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    with open(path, "w", newline="") as file:
        kept = [name for name in rows[0] if name not in names]
        table = csv.DictWriter(file, kept, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def test_held_out_users_are_examined_after_the_last_round(trained):
    results = trained.results
    written = json.loads((trained.output / "held_out.json").read_text())
    assert written == results.held_out and written["round"] == toy_run.NUM_ROUNDS
    assert written["users"] == 6
    middle = written["accuracy_by_user"]["top1_in_vocab"]["quantiles"]["0.5"]
    assert f"Of 6 held-out users, half have a top-1 accuracy above {middle:.1%}" in results.summary
    earlier = written["earlier_text"]
    assert earlier["with"]["words"] > 0 and set(earlier) == {"all", "with", "without"}
    with_cache = f"earlier text: top-1 accuracy {earlier['all']['model_and_cache']:.2%}; on the "
    assert with_cache in results.summary
    assert earlier["all"]["model"] == pytest.approx(results.rows[-1]["eval_top1_in_vocab"])
    assert {"trigrams with earlier text", "4-grams with earlier text"} < set(results.baselines)
    # 30 words: all of them are among the 50, and the 100, most frequent.
    histograms = written["head_words"]["histograms"]
    assert histograms["50"] == histograms["100"] == [0.0] * 10 + [1.0]
    mean = sum(k * share for k, share in enumerate(histograms["10"]))
    assert f"likeliest next words, on average {mean:.1f} among the 10, 10.0" in results.summary


def test_the_config_of_a_run_has_sizes_that_were_not_given(corpus, trained):
    assert toy_run.config(corpus).language.tie_embeddings is None
    assert manifest.read(trained.output).config["tie_embeddings"] is True


def test_its_model_can_be_used_without_config_and_data(trained, tmp_path):
    for name in ("model.npz", "best_model.npz", "vocabulary.json"):
        shutil.copy(trained.output / name, tmp_path)
    for which in ("last", "best"):
        model = trained_model.find(tmp_path, which).load()
        assert model.words.words == tuple(toy_run.WORDS)
        (found,) = model.predict([f"{toy_run.WORDS[0]} {toy_run.WORDS[7]}"], top=30)
        assert {word for word, _ in found.next_words} == set(toy_run.WORDS)
        assert found.unknown_in_text == ()


@pytest.mark.slow
def test_a_finished_run_of_an_older_version_is_completed_by_resuming(trained, tmp_path):
    output, older = trained.output, tmp_path / "older"
    shutil.copytree(output, older)
    for name in ("vocabulary.json", "held_out.json"):
        (older / name).unlink()
    _drop_columns(older / "metrics.csv", ["eval_top5_in_vocab", "eval_top3_oov_wrong"])
    assert report.report(older).held_out is None
    with pytest.raises(ValueError, match=f"train --resume --output {older} writes it"):
        trained_model.find(older)
    run.train(None, older)
    for name in ("vocabulary.json", "held_out.json", "model.npz"):
        assert (older / name).read_bytes() == (output / name).read_bytes()
    assert report.report(older).held_out == trained.results.held_out


def test_files_are_as_private_as_the_umask_makes_them(trained):
    for path in (trained.output, *trained.output.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_what_a_run_will_do_is_said_before_its_first_round(trained):
    assert [line.partition(":")[0] for line in trained.lines] == [
        "Reading the data ...",
        "Users",
        "Text",
        "Participation",
        "Noise",
        "State",
        "Privacy",
        "Noise to signal",
        "Building the computations ...",
        "Results",
    ]
    text = "\n".join(trained.lines)
    # All 60 users of the file are accounted for.
    assert "48 to train on, 6 held out for evaluation, 6 kept for a test" in text
    assert "0.0% of them not among the 30 of the vocabulary" in text
    assert "at most 2 times in 6 rounds, 3 apart" in text
    assert "blt, z = 0.5" in text and "Privacy: ε at most" in text
    assert f"{trained.output}/, 0 of 6 rounds done" in text


@pytest.mark.slow
def test_nothing_is_measured_on_a_cohort_without_text(corpus, tmp_path):
    text = corpus_lib.read(toy_run.config(corpus).part(corpus_lib.TextOptions))
    speaker = text.train.user_ids[0]
    silent = set(text.train.user_ids) - {speaker}
    users = [json.loads(line) for line in (corpus / "users.jsonl").read_text().splitlines()]
    data = tmp_path / "users.jsonl"
    data.write_text(
        "".join(
            json.dumps(user | {"examples": []} if user["user_id"] in silent else user) + "\n"
            for user in users
        )
    )
    config = toy_run.config(corpus, data=str(data), num_rounds=2)
    rows = run.train(config, tmp_path / "run").rows  # The one with text is in one round at most.
    assert any(row["loss"] is None and row["top1"] is None for row in rows)
    assert all(row["loss"] is None or row["loss"] > 0 for row in rows)


@pytest.mark.slow
def test_a_known_seed_is_not_called_private(seeded):
    results = seeded.results
    assert all(row["epsilon"] is None for row in results.rows)
    assert not results.statement.has_guarantee
    assert "seed given by the user" in results.statement.no_guarantee[0]
    assert "NO guarantee" in results.summary
    text = "\n".join(seeded.lines)
    assert "Privacy: NO guarantee" in text and "\nHint: " in text


def test_the_statement_is_of_what_the_ledger_saw(trained, tmp_path):
    output = pathlib.Path(shutil.copytree(trained.output, tmp_path / "run"))
    written = statement_lib.PrivacyStatement.from_json(
        (output / "privacy_statement.json").read_text()
    )
    assert written == trained.results.statement and written.has_guarantee
    declared = schema.MinSep(toy_run.NUM_ROUNDS, 3, 2)
    with ledger.Ledger.open(output / "private" / "ledger.sqlite", declared) as book:
        seen = book.observed()
    assert written.observed.min_sep == seen.min_sep == 3
    assert (seen.num_rounds, seen.max_participations) == (toy_run.NUM_ROUNDS, 2)
    assert written.observed.num_rounds == seen.num_rounds
    assert written.epsilon <= float(trained.results.rows[-1]["epsilon"])
    assert stat.S_IMODE((output / "private").stat().st_mode) == 0o700


@pytest.mark.slow
def test_zero_noise_and_huge_clip_norm_is_plain_federated_averaging(corpus, tmp_path):
    noiseless = {"noise_multiplier": 0.0, "clip_norm": 1e6, "num_rounds": 3}
    run.train(toy_run.config(corpus, **noiseless), tmp_path / "ours")
    plain = {"mechanism": "none", "noise_multiplier": None, "buffers": None, "num_rounds": 3}
    run.train(toy_run.config(corpus, **plain), tmp_path / "plain")
    for ours, theirs in zip(
        toy_run.weights(tmp_path / "ours"), toy_run.weights(tmp_path / "plain"), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    statement = json.loads((tmp_path / "plain" / "privacy_statement.json").read_text())
    assert statement["epsilon"] is None and statement["no_guarantee"]


@pytest.mark.slow
def test_a_run_stops_before_its_budget_is_exceeded_and_says_so(corpus, tmp_path):
    options = {"mechanism": "identity", "buffers": None, "deterministic_noise_seed": None}
    plan = toy_run.config(corpus, **options).request().plan(num_clients=48, num_parameters=1)
    # A user takes part once in every three rounds: epsilon grows at rounds 1 and 4.
    spent = [plan.epsilon_after(t) for t in range(1, 7)]
    assert spent[0] == spent[2] < spent[3] == spent[5]
    budget = (spent[2] + spent[3]) / 2
    stopped = run.train(toy_run.config(corpus, **options, max_epsilon=budget), tmp_path / "run")
    assert len(stopped.rows) == 3 and stopped.statement.epsilon <= budget
    assert "Stopped after 3 of 6 rounds: the next one would bring ε to" in stopped.summary
    with pytest.raises(ValueError, match="does not pay for one round"):
        run.train(toy_run.config(corpus, **options, max_epsilon=spent[0] / 2), tmp_path / "none")


@pytest.mark.slow
def test_a_run_stops_at_the_accuracy_asked_for_and_keeps_the_best_model(corpus, tmp_path):
    options = {"eval_every": 2, "noise_multiplier": 0.0, "clip_norm": 10.0}
    results = run.train(toy_run.config(corpus, **options, stop_at_accuracy=1e-9), tmp_path / "run")
    accuracies = [row["eval_top1_in_vocab"] for row in results.rows]
    evaluated = [a for a in accuracies if a is not None]
    # When it stops depends on the data: all declared rounds are accounted for.
    assert results.statement.accounted.num_rounds == toy_run.NUM_ROUNDS
    assert all(a == 0.0 for a in evaluated[:-1])
    assert evaluated[-1] > 0.0 or len(results.rows) == toy_run.NUM_ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("secagg_bits", [None, 16])
def test_adaptive_clipping_restarts_and_is_accounted_in_blocks(corpus, tmp_path, secagg_bits):
    options = {
        "adaptive_clipping": True,
        "clipped_count_stddev": 2.0,
        "restart_warmup": 2,
        "restart_every": 2,
        "mechanism": "tree",
        "buffers": None,
        "deterministic_noise_seed": None,
        "min_sep": 2,
        "secagg_bits": secagg_bits,
    }
    results = run.train(toy_run.config(corpus, **options), tmp_path / "run")
    derived = json.loads((tmp_path / "run" / "config.json").read_text())["derived"]
    assert derived["strategy"]["mechanism"] == "restarted"
    assert derived["strategy"]["starts"] == [0, 2, 4]
    # Nobody takes part twice: one block of two rounds, one leaf and its parent.
    assert results.statement.parameters["sensitivity_squared"] == 2.0
    assert report.report(tmp_path / "run").statement == results.statement


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["identity", "tree", "blt"])
def test_secure_noise_is_stated_and_repeated_after_a_resume(
    corpus, tmp_path, monkeypatch, mechanism
):
    buffers = 2 if mechanism == "blt" else None
    options = {"noise": "secure", "mechanism": mechanism, "buffers": buffers}
    private = {**options, "deterministic_noise_seed": None, "num_rounds": 2}
    results = run.train(toy_run.config(corpus, **private), tmp_path / "private")
    statement = results.statement
    assert "AES-256" in statement.parameters["noise_generator"]
    assert sentences.SECURE_GENERATOR in statement.assumptions
    assert sentences.FLOATING_POINT not in statement.caveats
    assert (sentences.ROUNDED_CORRELATION in statement.caveats) == (mechanism != "identity")
    assert report.report(tmp_path / "private").statement == statement
    assert not run_folder.recount_run(tmp_path / "private").is_violated
    # The same seed has the same noise, also after a crash.
    run.train(toy_run.config(corpus, **options), tmp_path / "0")
    commit = ledger.Ledger.commit_round
    committed = []

    def crashing(self, *args, **kwargs):
        committed.append(args)
        if len(committed) == 4:
            raise toy_run.Crash
        return commit(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ledger.Ledger, "commit_round", crashing)
        with pytest.raises(toy_run.Crash):
            run.train(toy_run.config(corpus, **options), tmp_path / "1")
    run.train(None, tmp_path / "1")
    models = [toy_run.weights(tmp_path / name) for name in ("0", "1")]
    for one, other in zip(*models, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_secure_aggregation_charges_the_inflated_norm(corpus, tmp_path):
    options = {"secagg_bits": 20, "num_rounds": 2, "deterministic_noise_seed": None}
    results = run.train(toy_run.config(corpus, **options), tmp_path / "run")
    parameters = results.statement.parameters
    assert 1.0 < parameters["secagg_norm_inflation"] < 1.1
    assert parameters["secagg_bits_per_parameter"] <= 20
    assert parameters["secagg_upload_bytes_per_client"] > 0


@pytest.mark.slow
def test_a_strategy_from_a_file_is_used_and_named(corpus, tmp_path):
    strategy = tree.Tree(2)
    serialization.save(tmp_path / "strategy.json", strategy)
    options = {"strategy": str(tmp_path / "strategy.json"), "buffers": None, "num_rounds": 2}
    config = toy_run.config(corpus, **options)
    assert config.privacy.mechanism == "blt"  # The default, which a file overrules.
    results = run.train(config, tmp_path / "run")
    derived = json.loads((tmp_path / "run" / "config.json").read_text())["derived"]
    assert derived["strategy"] == strategy.to_dict()
    assert results.statement.mechanism == "tree"


_NOT_FINITE = "clients had an update that is not finite"


@pytest.mark.slow
def test_updates_that_are_not_finite_are_dropped_and_reported(corpus, tmp_path):
    options = {"client_learning_rate": 1e30, "num_rounds": 1, "buffers": None}
    lines = []
    config = toy_run.config(corpus, **options, mechanism="identity")
    run.train(config, tmp_path / "run", progress=lines.append)
    # Users of one batch only make an update that is huge, but finite: it is clipped.
    assert re.match(f"Round 1: [1-5] of 5 {_NOT_FINITE}", lines[-1])
    assert all(np.all(np.isfinite(weight)) for weight in toy_run.weights(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_that_drowns_in_noise_says_so_and_keeps_its_cohorts_secret(corpus, tmp_path):
    options = {"client_learning_rate": 1e30, "num_rounds": 1, "buffers": None, "min_sep": None}
    lines = []
    config = toy_run.config(corpus, **options, algorithm="dp-fedavg", noise_multiplier=1e5)
    results = run.train(config, tmp_path / "run", progress=lines.append)
    assert sum(line.startswith("Hint: the recorded runs") for line in lines) == 1
    assert "Warning: the model is worse than before training" in results.summary
    assert lines[-1].startswith(f"Round 1: some {_NOT_FINITE}")  # No size of the cohort.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_sep": 20}, "largest feasible min_sep"),
        ({"clients_per_round": 60}, "lower it to"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"vocabulary": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_user_errors_leave_nothing_behind(corpus, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run.train(toy_run.config(corpus, **options, num_rounds=40), tmp_path / "run")
    assert not (tmp_path / "run").exists()
