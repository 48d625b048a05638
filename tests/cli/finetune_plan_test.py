"""Tests of `tff-dpftrl finetune-plan`."""

from __future__ import annotations

import json
import math
import re
import shlex

import pytest

from tests.finetuning import toy_finetuning
from tff_dpftrl import validation
from tff_dpftrl.cli import main
from tff_dpftrl.data import split
from tff_dpftrl.finetuning import group_size, opening, passes, proxies, run_privacy
from tff_dpftrl.training import corpus, language_config, trained_model

toy = toy_finetuning.toy

_TARGET = ["--target-epsilon", "4", "--compute-budget", "64", "--steps", "2"]
_ELS = ["--compute-budget", "128", "--smallest-cohort", "64", "--example-group-sizes", "8,16"]
# Most of the time goes into their noise multipliers, which are found once.
_USERS = ["--users", "500", "--examples-per-user", "20", *_TARGET[:2], *_ELS, "--steps", "20"]


def _out(capsys, *arguments):
    assert main.main(["finetune-plan", *arguments]) == 0
    return capsys.readouterr().out


def _json(capsys, *arguments):
    return json.loads(_out(capsys, *arguments, "--format", "json"))


def test_text_has_all_ways_and_a_reason(capsys):
    text = _out(capsys, *_USERS)
    names = [line.split("  ")[0].strip(" *") for line in text.split("\n\n")[0].splitlines()]
    assert names == [
        "way",
        "ELS, G = 8, B = 128",
        "ELS, G = 16, B = 128",
        "ULS, G = 1, M = 128",
        "ULS, G = 2, M = 64",
        "passes, G = 2, M = 64",
        "cyclic, 2 bands, G = 1, M = 128",
        "cyclic, 4 bands, G = 2, M = 64",
    ]
    assert "500 users with 10000 examples, median 20; delta = 3.99e-05" in text
    assert "* Recommended: ULS" in text and "Best if a user's gradients are all equal" in text
    assert "must stay secret" in text and "--initial-weights" in text


def test_metrics_of_steps_get_a_share(capsys):
    with_share = [*_USERS, "--budget-shares", "metrics=0.19"]
    plain, shared = _json(capsys, *_USERS), _json(capsys, *with_share)
    assert "others" not in plain["plans"][0]
    ways = [(plain[key], shared[key]) for key in ("plans", "cyclic")]
    pairs = [pair for one, other in ways for pair in zip(one, other, strict=True)]
    for one, other in [*pairs, (plain["passes"], shared["passes"])]:
        assert other["noise_multiplier"] == pytest.approx(one["noise_multiplier"] / 0.9)
        assert other["epsilon"] == pytest.approx(one["epsilon"], rel=1e-4)
    assert "--target-epsilon 4 --steps 20 --budget-shares metrics=0.19" in shared["command"]
    said = "metrics have the share 0.19 and the weights the rest: epsilon 4 is of both"
    assert said in _out(capsys, *with_share)
    assert main.main(["finetune-plan", *_USERS, "--budget-shares", "vocabulary=0.1"]) == 2
    error = capsys.readouterr().err
    assert "must be of metrics alone" in error and error.count("\n") == 1


def test_json_has_plans_that_meet_the_target(capsys):
    report = _json(capsys, *_USERS)
    for row in report["plans"]:
        assert 3.99 < row["epsilon"] <= 4.0
        assert row["delta"] == 10_000**-1.1
        assert row["noise_of_average"] == row["noise_multiplier"] / row["expected_units"]
        # Everybody has 20 examples: group sizes up to that are always filled.
        rows_of_unit = row["group_size"] if row["sampling"] == "user" else 1
        assert row["expected_gradients"] == pytest.approx(rows_of_unit * row["expected_units"])
        noise = row["relative_noise"]
        for name, power in (("equal", 0.0), ("halfway", 0.25), ("diverse", 0.5)):
            assert noise[name] == pytest.approx(row["noise_of_average"] / rows_of_unit**power)
    assert report["recommended"] in report["plans"]
    for name in ("equal", "halfway", "diverse"):
        best = min(report["plans"], key=lambda row: row["relative_noise"][name])  # noqa: B023
        group, units = best["group_size"], best["expected_units"]
        kind, letter = ("ELS", "B") if best["sampling"] == "example" else ("ULS", "M")
        assert report["best"][name] == f"{kind}, G = {group}, {letter} = {units:g}"
        assert name != "halfway" or best == report["recommended"]
    assert report["best"]["equal"] != report["best"]["diverse"]


def test_passes_are_compared_at_the_same_epsilon_and_compute(capsys):
    report = _json(capsys, *_USERS)
    found = report["passes"]
    assert found["group_size"] * found["users_per_step"] == 128 and found["num_steps"] == 20
    assert 3.99 < found["epsilon"] <= 4.0 and found["delta"] == 10_000**-1.1
    assert found["expected_gradients"] == pytest.approx(128)  # Everybody has 20 examples.
    # 20 steps of 64 of 500 users: 280 of them have three turns, with 2 of 20 examples each time.
    assert (found["users_per_step"], found["participations"]) == (64, 3)
    used = 20 * (220 * (1 - 0.9**2) + 280 * (1 - 0.9**3)) / 10_000
    assert found["share_of_examples_used"] == pytest.approx(used)
    # The measure of correlated noise is that of the samplings where noise is independent.
    plan = passes.Passes(64, 20, 1e-5, mechanism="identity", noise_multiplier=2.0)
    independent = plan.asked(clip_norm=1.0).plan(500, 1)
    assert run_privacy.noise_of_average(independent) == pytest.approx(2.0 / 64)
    assert found["noise_of_average"] < found["noise_multiplier"] / 64
    assert "--sampling passes --group-size 2 --cohort 64 --delta 3.98e-05" in _out(capsys, *_USERS)


@pytest.mark.slow
def test_bands_of_cyclic_sampling_are_compared_at_the_same_epsilon_and_compute(capsys):
    report = _json(capsys, *_USERS)
    for one in report["cyclic"]:
        assert one["group_size"] * one["units_per_step"] == 128 and 3.99 < one["epsilon"] <= 4.0
        share = one["units_per_step"] * one["bands"] / 500
        assert one["sampling_probability"] == pytest.approx(share)
        assert one["expected_gradients"] == pytest.approx(128)
    least = min(report["cyclic"], key=lambda one: one["relative_noise"]["halfway"])
    text = _out(capsys, *_USERS)
    share = least["relative_noise"]["halfway"] / report["recommended"]["relative_noise"]["halfway"]
    assert f"Cyclic sampling with correlated noise has {share:.2f} of the recommended way's" in text
    sizes = f"--group-size {least['group_size']} --cohort {least['units_per_step']}"
    assert f"--sampling cyclic --bands {least['bands']} {sizes} instead" in text


def test_passes_that_cannot_be_say_what_they_need(capsys, monkeypatch):
    def refuse(*_, **__):
        raise validation.UsageError("too few users: take more.")

    monkeypatch.setattr(passes, "planned", refuse)
    table, said = _out(capsys, *_USERS).split("\n\n")[:2]
    row = next(line for line in table.splitlines() if line.startswith("passes"))
    assert row.split()[:4] == ["passes:", "see", "below", "-"]
    assert "Passes cannot be compared: too few users: take more." in said
    assert _json(capsys, *_USERS)["passes"] == "too few users: take more."


@pytest.mark.parametrize(
    "flags, group_size, cohort_size, budget",
    [
        (("--gradient-norms", "5,0.5"), 2, 32, None),
        (("--example-group-sizes", "1", "--smallest-cohort", "64"), 1, None, 64),
    ],
)
def test_the_command_to_paste_is_taken_by_finetune(
    capsys, monkeypatch, tmp_path, flags, group_size, cohort_size, budget
):
    texts = tmp_path / "my texts.jsonl"
    users = [f"u{i}" for i in range(250)]
    rows = ({"user_id": user, "examples": ["a text"] * 4} for user in users)
    texts.write_text("\n".join(map(json.dumps, rows)))
    data = ("--data", str(texts), "--pretokenized", "--max-users", "180")
    said = _out(capsys, *data, *_TARGET, "--delta", "1e-6", *flags)
    command = shlex.split(said[said.index("tff-dpftrl finetune") :].replace("\\\n", ""))
    opened = []

    def open_run(config, output):
        opened.append(config)
        raise validation.UsageError("stop here.")

    monkeypatch.setattr(opening, "open_run", open_run)
    assert main.main(command[1:]) == 2
    (config,) = opened
    assert (config.data, config.pretokenized, config.max_users) == (str(texts), True, 180)
    assert (config.target_epsilon, config.num_steps, config.delta) == (4.0, 2, 1e-6)
    assert config.sampling == ("user" if cohort_size else "example")
    assert (config.group_size, config.cohort_size) == (group_size, cohort_size)
    assert config.compute_budget == budget and config.group_size_looked_at_users
    assert config.initial_weights == "DIR"  # To be filled in: it was not named.


def test_gradient_norms_decide(capsys):
    flat = _json(capsys, *_USERS, "--gradient-norms", "5,5")
    steep = _json(capsys, *_USERS, "--gradient-norms", "5,0.5")
    assert flat["recommended"]["group_size"] == 1
    assert (steep["recommended"]["sampling"], steep["recommended"]["group_size"]) == ("user", 2)
    noise = steep["recommended"]["relative_noise"]["given"]
    assert noise == pytest.approx(0.5 * steep["recommended"]["noise_of_average"])
    assert "fourth root" not in _out(capsys, *_USERS, "--gradient-norms", "5,5")


@pytest.mark.slow
def test_gradients_are_measured_where_finetune_measures_them(capsys, toy):
    flags = ("--initial-weights", str(toy / "pretrained"))
    public = str(toy / "public.jsonl")
    report = _json(capsys, *_USERS, *flags, "--proxy-data", public)
    trained = trained_model.find(toy / "pretrained").load()
    found = proxies.of_model(trained, public, protected="docs", largest_group=2)
    assert report["measured"]["gradient_norms"]["norms"] == list(found.gradient_norms.norms)
    assert report["measured"]["num_users"] == found.num_users
    for row in report["plans"]:
        norm = found.gradient_norms(row["group_size"] if row["sampling"] == "user" else 1)
        measured = row["relative_noise"]["measured"]
        assert measured == pytest.approx(norm * row["noise_of_average"])
        assert report["recommended"]["relative_noise"]["measured"] <= measured
    text = _out(capsys, *_USERS, *flags, "--proxy-data", public)
    assert f"{found.gradient_norms(2):.3g} (G = 2)" in text and "public.jsonl" in text


def test_protected_text_is_not_measured(capsys, toy):
    users, weights = str(toy / "users.jsonl"), str(toy / "pretrained")
    flags = ["--data", users, *_TARGET[:2], "--compute-budget", "32", "--steps", "9"]
    flags += ["--initial-weights", weights]
    assert main.main(["finetune-plan", *flags, "--proxy-data", users]) == 2
    assert "is the file of the users to be protected" in capsys.readouterr().err


def test_sizes_and_texts_are_counted(capsys, tmp_path):
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("\n".join(str(1 + i % 7) for i in range(140)), encoding="utf-8-sig")
    texts = tmp_path / "texts.jsonl"
    # Users who are held out, and one who never wrote, are not trained on.
    train = [f"u{i}" for i in range(1000) if split.hash_bucket(f"u{i}") > 1][:141]
    held_out = [f"u{i}" for i in range(1000) if split.hash_bucket(f"u{i}") < 2]
    found = {user: ["a text"] * (1 + i % 7) + [" "] for i, user in enumerate(train[:140])}
    found |= {user: ["a text"] * 50 for user in held_out} | {train[140]: [" "]}
    rows = ({"user_id": user, "examples": examples} for user, examples in found.items())
    texts.write_text("\n".join(map(json.dumps, rows)))
    flags = (*_TARGET, "--delta", "1e-4", "--example-group-sizes", "7")
    by_sizes = _json(capsys, "--user-sizes", str(sizes), *flags)
    by_texts = _json(capsys, "--data", str(texts), *flags)
    assert "--data CORPUS" in by_sizes.pop("command")
    assert f"--data {texts}" in by_texts.pop("command")
    assert by_sizes == by_texts
    two = by_sizes["plans"][-1]
    assert two["group_size"] == 2
    assert two["expected_gradients"] == pytest.approx(32 * (1 + 6 * 2) / 7)
    assert two["delta"] == 1e-4 and math.isclose(two["sampling_probability"], 32 / 140)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--users", "500", *_TARGET], "--users and --examples-per-user go together"),
        ([*_USERS, "--compute-budget", "16"], "compute_budget=16 is smaller than the smallest"),
        ([*_USERS, "--target-epsilon", "0"], "target_epsilon must be .* above 0, got 0"),
        ([*_USERS, "--target-epsilon", "1e-12", "--delta", "1e-30"], "out of reach"),
        ([*_USERS, "--steps", "0"], "num_steps must be at least 1, got 0"),
        ([*_USERS, "--delta", "2"], "delta must be .* below 1, got 2"),
        ([*_USERS, "--example-group-sizes", "0"], "group_size must be at least 1, got 0"),
        ([*_USERS, "--gradient-norms", "5"], "group_size=2 is not between 1 and 1"),
        ([*_USERS, "--proxy-data", "x.jsonl"], "--proxy-data is for --initial-weights"),
        ([*_USERS, "--initial-weights", "/nowhere"], "There is no trained model in /nowhere"),
        ([*_USERS, "--max-users", "20"], "--max-users is for --data, which is not given"),
        ([*_USERS, "--gradient-norms", "5,0,1"], "norms at group size 2 .* got 0.0"),
        (["--user-sizes", "/nowhere", *_TARGET], "--user-sizes /nowhere .* No such file"),
        (["--users", "500", "--examples-per-user", "0", *_TARGET], "--examples-per-user .* got 0"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, arguments, message):
    assert main.main(["finetune-plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error


@pytest.mark.slow
def test_texts_are_read_as_finetune_reads_them(capsys, toy, monkeypatch):
    seen, read = [], corpus.read_users

    def recorded(options):
        seen.append(options)
        return read(options)

    measured = {}
    monkeypatch.setattr(corpus, "read_users", recorded)
    monkeypatch.setattr(proxies, "of_model", lambda *a, **kwargs: measured.update(kwargs) or found)
    found = proxies.Proxies(group_size.GradientNorms((1,), (2.0,)), 3, "a book")
    users = str(toy / "users.jsonl")
    text = ("--data", users, "--pretokenized", "--max-users", "40")
    flags = ("--initial-weights", str(toy / "pretrained"), "--compute-budget", "32")
    flags += ("--target-epsilon", "4", "--steps", "9", "--delta", "1e-4")
    said = _out(capsys, *text, *flags)
    config = language_config.TextConfig(users, pretokenized=True, max_users=40)
    assert seen == [config.text]
    assert said.split("\n\n")[1].startswith("40 users with ") and measured["is_tokenized"]
    assert "of all weights, not of adapters" in said
    assert main.main(["finetune-plan", *text, *flags, "--sqlite-split", "train"]) == 2
    assert "sqlite_split applies to SQLite files only" in capsys.readouterr().err


def test_data_without_anybody_to_train_on_is_refused(capsys, tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = ({"user_id": user, "examples": [" "]} for user in ("ann", "bob"))
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main.main(["finetune-plan", "--data", str(path), *_TARGET]) == 2
    assert "none of them has a text with a word" in capsys.readouterr().err
