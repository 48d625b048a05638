"""What all runs on a corpus have spent together, found in folders."""

import json
import shutil

import pytest

from tff_dpftrl.accounting import display, gaussian
from tff_dpftrl.cli import budget, main
from tff_dpftrl.mechanisms import blt, branches
from tff_dpftrl.participation import ledger
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import cohort_seed, manifest
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "users.jsonl"
    path.write_text('{"user_id": "ada", "examples": ["so it is"]}\n')
    return path


def _run(folder, data, *, epsilon=2.0, facts=None, has_statement=True, unit="user"):
    folder.mkdir(parents=True)
    content = {"config": {"data": str(data)}, "facts": facts or {}}
    (folder / "config.json").write_text(json.dumps(content))
    if has_statement:
        stated = {"epsilon": epsilon, "delta": 1e-6, "rho_zcdp": None, "unit_of_privacy": unit}
        (folder / "privacy_statement.json").write_text(json.dumps(stated))


def _budget(data, results, *flags):
    return main.main(["budget", str(data), "--runs", str(results), *flags])


def test_the_runs_on_a_corpus_and_its_copies_are_composed(tmp_path, data, capsys):
    results, copy = tmp_path / "results", tmp_path / "copy.jsonl"
    shutil.copy(data, copy)
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    _run(results / "a", data)
    _run(results / "sweep" / "cells" / "b", copy, epsilon=0.5)
    _run(results / "c", other, epsilon=7.0)
    assert _budget(data, results, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in shown["runs"]] == ["a", "b"]
    assert shown["total"]["epsilon"] == 2.5 and shown["total"]["delta"] == 2e-6
    assert _budget(data, results) == 0
    out = capsys.readouterr()
    assert "For who is in all 2 of them: ε = 2.5 at δ = 2e-06" in out.out and not out.err


def test_a_run_that_has_lost_its_options_counts(tmp_path, data, capsys):
    _run(tmp_path / "results" / "a", data)
    (tmp_path / "results" / "a" / "private").mkdir()
    (tmp_path / "results" / "a" / "config.json").rename(
        tmp_path / "results" / "a" / "private" / "manifest.json"
    )
    assert _budget(data, tmp_path, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["total"]["epsilon"] == 2.0


def _choose(folder, data, *, epsilon=8.0, runs=3):
    (folder / "private").mkdir(parents=True)
    plan, axes = {"epsilon": epsilon, "digests": {}}, [["data", [str(data)]]]
    drawn = [len(folder.name)]  # Of each choice another one.
    record = {"options": {}, "axes": axes, "delta": 1e-6, "plan": plan, "drawn": drawn}
    (folder / "private" / "selection.json").write_text(json.dumps(record))
    for number in range(runs):
        _run(folder / "private" / "cells" / f"run={number}", data, epsilon=4.0)


def test_a_choice_is_one_entry_from_its_first_draw_on_and_its_runs_are_not_named(
    tmp_path, data, capsys
):
    results = tmp_path / "results"
    chosen = results / "chosen"
    _run(results / "a", data)
    _choose(results / "begun", data, runs=0)
    _choose(results / "diverged", data)
    _choose(chosen, data)
    for winner in (chosen / "private" / "winner", chosen / "winner"):
        _run(winner, data, epsilon=8.0)
        path = winner / "privacy_statement.json"
        path.write_text(path.read_text().replace("}", ', "subject": {"run": "its own"}}'))
    later = [{"name": "winner", "epsilon": 8.0, "delta": 1e-6}]
    _run(results / "later", data, facts={"earlier_runs": later})
    _choose(results / "other", tmp_path / "other.jsonl")

    def listed(*folders):
        assert main.main(["budget", str(data), "--format", "json", "--runs", *folders]) == 0
        shown = json.loads(capsys.readouterr().out)
        return [run["name"] for run in shown["runs"]], shown["total"]["epsilon"], shown["not_found"]

    names = ["begun", "chosen", "diverged", "a", "later"]
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert listed(str(results)) == (names, 28.0, [])
    shutil.move(chosen / "winner", results / "published")
    assert listed(str(results)) == (names, 28.0, [])
    # Also where a folder within is named, which may not be all of it.
    assert listed(str(chosen / "private" / "cells")) == (["chosen"], 8.0, [])
    (chosen / "private" / "selection.json").unlink()
    assert _budget(data, results, "--max-epsilon", "1000") == budget.ABOVE
    assert f"cannot be read by their options: {chosen}" in capsys.readouterr().err


def _recorded_run(folder, data, **options):
    config = config_lib.TrainingConfig.of(data=str(data), noise_multiplier=1.0, **options)
    users = corpus.read_users(config.text).train.user_ids
    _run(folder, data)
    (folder / "config.json").write_text(json.dumps({"config": {"data": str(data)} | options}))
    (folder / "private").mkdir()
    identities = {"identities": manifest.identities({"training users": users})}
    (folder / "private" / "manifest.json").write_text(json.dumps(identities))


def test_runs_on_users_who_have_moved_to_another_file_are_found(tmp_path, capsys):
    results, data = tmp_path / "results", tmp_path / "users.jsonl"
    texts = [{"user_id": f"u{i}", "examples": ["so it is"]} for i in range(40)]
    data.write_text("\n".join(map(json.dumps, texts)))
    _recorded_run(results / "a", data)
    kept = tmp_path / "kept.jsonl"
    data.rename(kept)
    data.write_text("\n".join(map(json.dumps, texts[:30])))  # Other people, by the old name.
    assert _budget(kept, results, "--format", "json") == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["a"]
    less = tmp_path / "less.jsonl"
    less.write_text(data.read_text() + " ")
    assert main.main(["budget", str(less), "--runs", str(results)]) == 2  # No run is on them.


def test_a_run_on_one_split_is_found_by_its_file_and_what_cannot_be_read_is_said(tmp_path, capsys):
    results, data = tmp_path / "results", tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        rows = [f"{split} {i},x,so it is" for i in range(40)]
        (data / f"{split}.csv").write_text("\n".join(["user,place,text", *rows]))
    _recorded_run(results / "a", data, split="train")
    _run(results / "b", data / "train.csv")
    _recorded_run(results / "of_test", data, split="test")
    assert _budget(data / "train.csv", results, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in shown["runs"]] == ["a", "b"] and not shown["not_compared"]
    copy = shutil.copytree(data, tmp_path / "copy")
    both = results / "both"
    _recorded_run(both, f"{data / 'test.csv'},{data / 'train.csv'}", split=None)
    assert _budget(copy, results, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in shown["runs"]] == ["a", "both", "of_test"]
    shutil.rmtree(both)
    renamed = tmp_path / "renamed.csv"
    renamed.write_text((data / "train.csv").read_text().replace("user", "name", 1))
    _run(results / "c", renamed)
    assert _budget(renamed, results, "--max-epsilon", "1000") == budget.ABOVE
    assert f"by their options: {results / 'a'}, {results / 'of_test'}." in capsys.readouterr().err


def test_a_limit_decides_the_status(tmp_path, data):
    _run(tmp_path / "results" / "a", data)
    assert _budget(data, tmp_path, "--max-epsilon", "2") == 0
    assert _budget(data, tmp_path, "--max-epsilon", "1.9") == budget.ABOVE


_STRATEGY, _SCHEMA = blt.Blt((0.95,), (0.4,)), schema_lib.MinSep(8, 2, 3)
_SQUARED = _STRATEGY.sensitivity(_SCHEMA).squared


def _create_ledger(folder):
    path = folder / "private" / "ledger.sqlite"
    ledger.Ledger.create(path, _SCHEMA, initial_checkpoint="initial").close()


def _commit(folder, rounds, ids="state"):
    with ledger.Ledger.open(folder / "private" / "ledger.sqlite", _SCHEMA) as book:
        for t in rounds:
            book.begin_round(
                t, [], noise_fingerprint=None, checkpoint_fingerprint=book.last_checkpoint
            )
            book.commit_round(t, [], f"{ids} {t}")


def _forked(results, data, *, noise_version=3, ended=True, **stated):
    """Makes a run of 3 rounds, and a copy of it, and goes on with both."""
    statement = {
        "epsilon": 3.0, "delta": 1e-6, "rho_zcdp": 0.1 * _SQUARED, "unit_of_privacy": "user",
        "parameters": {"sensitivity_squared": _SQUARED}, "accounted": vars(_SCHEMA), **stated,
    }  # fmt: skip
    _run(results / "a", data)
    (results / "a" / "privacy_statement.json").write_text(json.dumps(statement))
    derived = {"derived": {"strategy": _STRATEGY.to_dict()}, "noise_version": noise_version}
    config = {"config": {"data": str(data)}, "facts": {}, **derived}
    (results / "a" / "config.json").write_text(json.dumps(config))
    (results / "a" / "private").mkdir()
    _create_ledger(results / "a")
    _commit(results / "a", range(3))
    shutil.copytree(results / "a", results / "b")
    if ended:
        _commit(results / "a", range(3, 8), "of a")
        _commit(results / "b", range(3, 6), "of b")


def _spent(data, results, capsys):
    assert _budget(data, results, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert _budget(data, results) == 0
    return shown, capsys.readouterr().out


def _assert_two_are_charged_one_by_one(data, results, capsys):
    """Asserts that two branches with 3 rounds in common cost twice the ρ of one."""
    shown, text = _spent(data, results, capsys)
    mu = gaussian.mu_from_rho(0.2 * _SQUARED)
    assert shown["total"]["epsilon"] == pytest.approx(gaussian.epsilon(mu, 1e-6))
    total = display.epsilon_at(shown["total"]["epsilon"], shown["total"]["delta"])
    cost = f"they cost {total} together, each charged by itself."
    assert f"Its 2 branches share 3 rounds: {cost}" in text


def test_branches_of_one_run_are_found_and_charged_together(tmp_path, data, capsys):
    results = tmp_path / "results"
    _forked(results, data)
    shown, text = _spent(data, results, capsys)
    (fork,) = shown["forks"]
    assert fork["shared_rounds"] == 3 and len(fork["folders"]) == 2
    joint = branches.sensitivity(_STRATEGY, _SCHEMA, num_branches=2, fork_at=3).squared
    assert fork["together"][0]["rho_zcdp"] == pytest.approx(0.1 * joint)
    assert joint < 2 * _SQUARED
    mu = gaussian.mu_from_rho(0.1 * joint)
    assert shown["total"]["epsilon"] == pytest.approx(gaussian.epsilon(mu, 1e-6))
    assert fork["num_branches"] == 2 and fork["total"] == shown["total"]
    cost = display.epsilon_at(gaussian.epsilon(mu, 1e-6), 1e-6)
    said = f"are of one run. Its 2 branches share 3 rounds: they cost {cost} together."
    assert f"{results / 'a'}, {results / 'b'} {said}" in text
    # Another run, and a backup of the first rounds, which has released nothing else.
    _run(results / "other", data)
    shutil.copytree(results / "a", results / "ended")
    for path in (results / "ended" / "private").glob("ledger.sqlite*"):
        path.unlink()
    _create_ledger(results / "ended")
    _commit(results / "ended", range(2))
    shown, text = _spent(data, results, capsys)
    (fork,) = shown["forks"]
    assert len(fork["folders"]) == 3 and said in text
    assert shown["total"]["epsilon"] == pytest.approx(gaussian.epsilon(mu, 1e-6) + 2.0)


def test_a_backup_that_was_not_continued_costs_nothing(tmp_path, data, capsys):
    results = tmp_path / "results"
    _forked(results, data, noise_version=2, ended=False)
    _commit(results / "b", range(3, 6))
    shown, text = _spent(data, results, capsys)
    assert shown["forks"][0]["shared_rounds"] == 3
    assert shown["total"]["epsilon"] == pytest.approx(
        gaussian.epsilon(gaussian.mu_from_rho(0.1 * _SQUARED), 1e-6)
    )
    assert "One of them has all rounds, and they share 3 rounds: they cost ε = " in text


_EVALUATION = {"parts": [{"name": "evaluation of held-out users"}]}


def test_a_backup_whose_evaluations_may_have_been_made_again_is_charged(tmp_path, data, capsys):
    results = tmp_path / "results"
    _forked(results, data, ended=False, **_EVALUATION)
    _commit(results / "b", range(3, 6))
    _assert_two_are_charged_one_by_one(data, results, capsys)


def test_evaluations_of_a_backup_with_the_same_noise_have_no_guarantee(tmp_path, data, capsys):
    _forked(tmp_path / "results", data, noise_version=2, ended=False, **_EVALUATION)
    assert _budget(data, tmp_path, "--max-epsilon", "1000") == budget.ABOVE
    assert "share 3 rounds: nothing is promised" in capsys.readouterr().out


def test_a_backup_that_states_more_than_the_run_is_charged(tmp_path, data, capsys):
    results = tmp_path / "results"
    _forked(results, data, ended=False)
    path = results / "a" / "privacy_statement.json"
    stated = json.loads(path.read_text()) | {"rho_zcdp": 0.3 * _SQUARED}
    path.write_text(json.dumps(stated))
    _commit(results / "b", range(3, 6))
    shown, _ = _spent(data, results, capsys)
    mu = gaussian.mu_from_rho(0.4 * _SQUARED)
    assert shown["total"]["epsilon"] == pytest.approx(gaussian.epsilon(mu, 1e-6))


def _lose_ledger(folder):
    (folder / "private" / "ledger.sqlite").write_text("damaged")


@pytest.mark.parametrize(
    "differs", [{"noise_version": 2}, {"rho_zcdp": None}, {}], ids=["old", "sampled", "fresh"]
)
def test_copies_of_which_a_ledger_is_not_readable_are_not_taken_for_two_runs(
    tmp_path, data, capsys, differs
):
    results = tmp_path / "results"
    _forked(results, data, **differs)
    _lose_ledger(results / "b")
    status = _budget(data, results, "--max-epsilon", "1000")
    text = capsys.readouterr().out
    assert f"no ledger can be read in {results / 'b'} (another process may have it open)" in text
    if differs:
        assert status == budget.ABOVE and ": nothing is promised, since" in text
    else:  # Their noise is fresh: no shared round is charged less than twice.
        assert status == 0 and ": each is charged by itself, they cost ε = " in text


def test_a_ledger_in_use_is_not_taken_for_that_of_another_run(tmp_path, data, capsys):
    results = tmp_path / "results"
    _forked(results, data, noise_version=2)
    with ledger.Ledger.open(results / "a" / "private" / "ledger.sqlite", _SCHEMA):
        assert _budget(data, results, "--max-epsilon", "1000") == budget.ABOVE
    assert f"no ledger can be read in {results / 'a'}" in capsys.readouterr().out


def test_other_runs_of_the_same_options_are_told_by_their_secret_seeds(tmp_path, data, capsys):
    results = tmp_path / "results"
    _forked(results, data, rho_zcdp=None)
    for name in "ab":
        _lose_ledger(results / name)
        cohort_seed.create(results / name / "private")
    assert _budget(data, results, "--max-epsilon", "1000") == 0
    shutil.copy(results / "a" / "private" / "cohort_seed", results / "b" / "private")
    assert _budget(data, results, "--max-epsilon", "1000") == budget.ABOVE
    assert ": nothing is promised, since" in capsys.readouterr().out


def test_copies_of_a_choice_have_no_guarantee(tmp_path, data, capsys):
    _choose(tmp_path / "chosen", data)
    assert _budget(data, tmp_path, "--max-epsilon", "8") == 0
    shutil.copytree(tmp_path / "chosen", tmp_path / "again")
    assert _budget(data, tmp_path, "--max-epsilon", "1000") == budget.ABOVE
    text = capsys.readouterr().out
    assert "the budget does not cover choices that are made twice" in text


@pytest.mark.parametrize(
    "differs", [{"parts": [{"name": "weights"}]}, {"accounted": None}], ids=["parts", "schema"]
)
def test_branches_of_other_kinds_are_charged_one_by_one(tmp_path, data, capsys, differs):
    results = tmp_path / "results"
    _forked(results, data, **differs)
    _assert_two_are_charged_one_by_one(data, results, capsys)


@pytest.mark.parametrize("differs", [{"noise_version": 2}, {"rho_zcdp": None}])
def test_branches_with_the_same_noise_or_samples_have_no_guarantee(tmp_path, data, capsys, differs):
    _forked(tmp_path / "results", data, **differs)
    assert _budget(data, tmp_path, "--max-epsilon", "1000") == budget.ABOVE
    assert "share 3 rounds: nothing is promised, since" in capsys.readouterr().out


@pytest.mark.parametrize(
    "plant, says",
    [
        (lambda folder, data: _run(folder, data, epsilon=None), "Not all of them have a guarantee"),
        (lambda folder, data: _run(folder, data, has_statement=False), "Without a statement: "),
        (lambda folder, data: _run(folder, "gone.jsonl"), "Not compared, since"),
        (
            lambda folder, data: _run(folder, data, unit="example"),
            "Not all of them protect the same",
        ),
        (lambda folder, data: _run(folder, data, unit="example"), "where ε is for single examples"),
        (
            lambda folder, data: _run(
                folder,
                data,
                facts={"earlier_runs": [{"name": "elsewhere", "epsilon": 1.0, "delta": 1e-6}]},
            ),
            "Not in these folders: elsewhere",
        ),
    ],
    ids=["no guarantee", "no statement", "data gone", "unit", "whose", "weights from elsewhere"],
)
def test_what_is_not_known_is_said_and_above_any_limit(tmp_path, data, capsys, plant, says):
    results = tmp_path / "results"
    _run(results / "a", data)
    plant(results / "b", data)
    assert _budget(data, results, "--max-epsilon", "1000") == budget.ABOVE
    out = capsys.readouterr()
    assert says in out.out + out.err


def test_a_model_that_was_pretrained_on_the_corpus_has_no_guarantee(tmp_path, data, capsys):
    results = tmp_path / "results"
    _run(results / "a", data)
    (results / "pretrained").mkdir()
    record = {"source": "it", "pretraining": {"data": str(data)}}
    (results / "pretrained" / "pretraining.json").write_text(json.dumps(record))
    assert _budget(data, results) == 0
    assert "Not all of them have a guarantee" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--runs", "nowhere"], "nowhere is no folder"),
        (["--runs", "."], "No run on users.jsonl is in ."),
        (["--runs", ".", "--max-epsilon", "-1"], "--max-epsilon"),
    ],
)
def test_mistakes_are_one_line(tmp_path, data, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main.main(["budget", "users.jsonl", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
