"""Tasks that count: estimates, their standard errors, their ε, and definitions that are refused."""

import csv
import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.learning import counted_rounds as counts
from tests.runtime.plans import small_tasks
from tests.runtime.tasks import counting_task, served_fleet, small_folder, tiny_task
from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee
from tff_dpftrl.data import vocabulary
from tff_dpftrl.runtime.plans import measured_run
from tff_dpftrl.runtime.tasks import (
    bucket_estimates,
    making,
    planned_task,
    task_config,
    task_privacy,
    task_report,
)
from verification import memory_store


@pytest.fixture(autouse=True)
def quick_measurement(monkeypatch):
    """Replaces the measurement of plans in separate processes by a constant cost."""
    monkeypatch.setattr(measured_run, "measure", lambda *_: measured_run.Cost(0.1, 0.2, 1000))


def _config(**changes):
    return task_config.TaskConfig.of(
        **{
            "population": "tests",
            "num_devices": 400,
            "num_rounds": 4,
            "clients_per_round": 50,
            "clip_norm": 20.0,
            "noise_multiplier": 1e-9,  # Its noise is below the precision of float32.
            "delta": 1e-5,
        }
        | changes
    )


def _made(path, definition=None, **changes):
    return making.make(
        _config(**changes),
        path,
        small_tasks.KEY,
        progress=lambda line: None,
        definition=definition,
    )


@pytest.mark.slow
def test_the_standard_error_is_that_of_the_noise():
    num_buckets, noise = 4000, 0.5
    rounds = [[[[1.0] + [0.0] * (num_buckets - 1)]]] * 3
    sums, _ = counts.released(num_buckets, noise, rounds)
    terms = dataclasses.replace(
        small_folder.TERMS,
        strategy=counts.STRATEGY,
        clip_norm=counts.CLIP_NORM,
        noise_multiplier=noise,
    )
    stated = bucket_estimates.noise_stddev(terms, [False] * 3)
    # The standard deviation of 4,000 draws has a relative error of 1/√8000; six of them. The noise
    # of one round, or independent noise of three, differs by more than that.
    error = sums - np.array([3.0] + [0.0] * (num_buckets - 1))
    margin = 6 / math.sqrt(2 * num_buckets)
    assert abs(np.std(error) / stated - 1) < margin
    for wrong in (1.0, math.sqrt(3.0)):
        assert abs(np.std(error) / (wrong * noise * counts.CLIP_NORM) - 1) > margin


def test_skipped_rounds_have_no_part_in_the_error():
    terms = small_folder.TERMS
    inverse = np.linalg.inv(terms.strategy.strategy_matrix(5))
    for skipped in ([False] * 5, [True, False, False, True, False], [True] * 5):
        dense = np.linalg.norm((~np.array(skipped)).astype(float) @ inverse)
        wanted = terms.noise_multiplier * terms.clip_norm * dense
        assert bucket_estimates.noise_stddev(terms, skipped) == pytest.approx(wanted, rel=1e-12)
    secure = dataclasses.replace(terms, parameters={"secagg_norm_inflation": 1.5})
    assert bucket_estimates.noise_stddev(secure, [False]) == 1.5 * bucket_estimates.noise_stddev(
        terms, [False]
    )


@pytest.mark.slow
def test_a_fleet_is_counted_over_the_wire(tmp_path):
    sizes = {"num_devices": 40, "clients_per_round": 8, "num_rounds": 3, "min_sep": 1}
    _made(tmp_path / "notes", counting_task.build(), **sizes)
    task = planned_task.load(tmp_path / "notes", small_tasks.KEYS)
    # All devices have the same notes, so that it does not matter which of them take part.
    by_user = {f"d{user}": counting_task.notes(7) for user in range(40)}
    store = served_fleet.run(tmp_path, [task], by_user, rounds=3)
    task_report.write(task.folder, store, tmp_path / "report")
    with open(tmp_path / "report" / "counts.csv", newline="") as file:
        estimates = np.array([float(row["estimate"]) for row in csv.DictReader(file)])
    of_one = counting_task.histogram([7])
    num_reports = round(estimates.sum() / of_one.sum())
    assert num_reports >= 3 * 8
    np.testing.assert_allclose(estimates, num_reports * of_one, rtol=2e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_secure", [False, True])
def test_estimates_are_the_histogram_of_all_reports(tmp_path, is_secure):
    secure = {"secagg_bits": 20, "secure_aggregation": "honest-but-curious", "least_group": 3}
    made = _made(tmp_path / "notes", counting_task.build(), **(secure if is_secure else {}))
    assert not made.server.rounded and not made.devices[0].rounded
    assert made.buckets == {"kinds": ["private", "work", "other"], "lengths": ["short", "long"]}
    store = memory_store.MemoryStore()
    rounds = small_folder.Rounds(planned_task.PlannedTask(made), store)
    device = small_folder.device_of(rounds.task)
    report = small_folder.secure_report_of if is_secure else small_folder.report
    seeds = [(1, 2, 3), (11, 12, 13)]
    for cohort in seeds:
        model = rounds.commit.model
        reports = [report(device, model, counting_task.stored(seed)) for seed in cohort]
        if is_secure:
            survivors, total = small_folder.run_group(rounds.task, reports)
            rounds.run_groups([(total, len(survivors))])
        else:
            rounds.run(reports)
    found = task_report.write(made, store, tmp_path / "report")
    with open(tmp_path / "report" / "counts.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["histogram"], row["bucket"]) for row in rows] == [
        *(("kinds", name) for name in counting_task.KINDS),
        *(("lengths", name) for name in counting_task.LENGTHS),
    ]
    estimates = np.array([float(row["estimate"]) for row in rows])
    truth = counting_task.histogram([seed for cohort in seeds for seed in cohort])
    if is_secure:
        # Rotation, rounding to a grid and back: at most half a step for each of six reports in
        # each of eight coordinates; a step is below 20 / 2¹¹.
        assert np.abs(estimates - truth).max() < 6 * math.sqrt(8) * 20 / 2**11
    else:
        np.testing.assert_allclose(estimates, truth, rtol=2e-5)
    kinds = truth[: len(counting_task.KINDS)]
    assert float(rows[0]["share"]) == pytest.approx(kinds[0] / kinds.sum(), abs=0.02)
    assert "kinds, 3 buckets: " in found.summary and "see counts.csv" in found.summary
    assert found.statement.parameters["counts"] == "kinds (3 buckets), lengths (2 buckets)"
    if is_secure:
        return
    # ε is that of training with the same noise and participation.
    plan = _config().request().plan(400, 1_000_000)
    training = guarantee.dp_ftrl_guarantee(
        plan.strategy,
        noise_multiplier=plan.noise_multiplier,
        schema=plan.schema,
        delta=plan.delta,
        clip_norm=plan.clip_norm,
    )
    assert task_privacy.TaskPrivacy(made.terms).declared_epsilon == training.epsilon
    with pytest.raises(validation.UsageError, match="counts, and has no model that could be eval"):
        making.make_evaluation(
            made, made.config, tmp_path / "watch", small_tasks.KEY, progress=lambda line: None
        )


@pytest.mark.slow
def test_words_and_lengths_of_texts_are_counted(tmp_path):
    tiny_task.write_corpora(tmp_path)
    texts = {name: str(tmp_path / file) for name, file in (
        ("data", "users.jsonl"), ("vocabulary", "words.txt"), ("proxy_data", "public.jsonl")
    )}  # fmt: skip
    made = _made(tmp_path / "words", analytics="words", vocabulary_size=3, proxy_devices=2, **texts)
    assert made.buckets["words"][-1] == vocabulary.OTHER_WORDS and len(made.buckets["words"]) == 4
    assert made.buckets["lengths"] == [
        *("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128 or more")
    ]  # fmt: skip
    store = memory_store.MemoryStore()
    rounds = small_folder.Rounds(planned_task.PlannedTask(made), store)
    tiny_task.run_round(rounds)
    task_report.write(made, store, tmp_path / "report")
    with open(tmp_path / "report" / "counts.csv", newline="") as file:
        found = {(r["histogram"], r["bucket"]): float(r["estimate"]) for r in csv.DictReader(file)}
    words = [word for i in range(3) for text in tiny_task.TEXTS[i : i + 3] for word in text.split()]
    known = made.words.words
    for word in known:
        assert found["words", word] == pytest.approx(words.count(word), abs=1e-4)
    others = sum(word not in known for word in words)
    assert found["words", vocabulary.OTHER_WORDS] == pytest.approx(others, rel=1e-4)
    assert found["lengths", "2-3"] == pytest.approx(9, rel=1e-4)  # Nine texts of three words.
    assert (tmp_path / "report" / "README.md").read_text().count("counts.csv")
    # A later task takes its vocabulary from the report, the most frequent words first.
    counts_file = tmp_path / "report" / "counts.csv"
    chosen = vocabulary.from_counts(counts_file, 2)
    assert vocabulary.is_of_counts(counts_file) and chosen.is_noised and not chosen.is_public
    assert chosen.words == tuple(sorted(known, key=lambda word: (-words.count(word), word))[:2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": {}}, "buckets must name at least one histogram, got none"),
        ({"buckets": {"kinds": []}}, r"buckets\['kinds'\] must be a list of names, at least one"),
        ({"buckets": {"kinds": "abc"}}, "must be a list of names, at least one, got 'abc'"),
        ({"buckets": {"kinds": ["a", "b", "a"]}}, r"buckets\['kinds'\] has the bucket 'a' 2 times"),
        ({"max_examples": 0}, "max_examples must be at least 1"),
    ],
)
def test_buckets_that_cannot_be_counted_are_refused(changes, message):
    with pytest.raises(validation.UsageError, match=message):
        counting_task.build(**changes)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (
            lambda notes: {"kinds": notes["kind"]},
            r"with the histograms \['kinds', 'lengths'\], got",
        ),
        (lambda notes: notes["kind"], "must return a mapping with the histograms"),
        (
            lambda notes: {"kinds": tf.one_hot(notes["kind"], 3), "lengths": tf.zeros([2])},
            r"count returns 'kinds' of shape \(None, 3\), and it has 3 buckets: return the sum",
        ),
        (lambda notes: {"kinds": tf.zeros([3]), "lengths": tf.zeros([3])}, "and it has 2 buckets"),
    ],
)
def test_a_function_that_counts_something_else_is_refused(count, message, tmp_path):
    with pytest.raises(validation.UsageError, match=message):
        _made(tmp_path / "notes", counting_task.build(count=count))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "none", "noise_multiplier": None}, "mechanism 'none' has no clip norm"),
        ({"adaptive_clipping": True}, "adaptive_clipping changes the noise with the clip norm"),
        ({"server_learning_rate": 0.5}, "server_learning_rate has no meaning with the algorithm"),
    ],
)
def test_noise_of_no_known_error_is_refused(changes, message, tmp_path):
    with pytest.raises(validation.UsageError, match=message):
        _made(tmp_path / "notes", counting_task.build(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be"),
        ({"analytics": "words", "lstm_size": 8}, "lstm_size has no meaning with analytics"),
        (
            {"analytics": "words", "build": "my_task.py:build"},
            "analytics has no meaning with build",
        ),
    ],
)
def test_options_of_models_are_refused(changes, message):
    with pytest.raises(validation.UsageError, match=message):
        _config(**changes)
