"""Tests of tff_dpftrl.sweeps.selection."""

import contextlib
import itertools
import json
import math
import random
import shutil
import stat

import pytest

from tests import kills
from tff_dpftrl import validation
from tff_dpftrl.accounting import guarantee, privacy_plot, statement, statement_text
from tff_dpftrl.accounting import selection as selection_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.auditing.recount import records
from tff_dpftrl.mechanisms import identity
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import manifest
from tff_dpftrl.sweeps import cells as cells_lib
from tff_dpftrl.sweeps import folder as folder_lib
from tff_dpftrl.sweeps import kinds, selection, selection_plan
from tff_dpftrl.training import data_budget

_RUNS = selection_lib.NumRuns(3, 15)
_PLAN = selection_plan.Planned(
    *(2.0, 1.5, 1e-6, [1.25, 1.0], [(1.5, 0.01)], [[], []]), score_digest="public"
)
_OPTIONS = {"target_epsilon": 2.0, "delta": 1e-5}


def _cells(options=_OPTIONS, kind=kinds.TRAINING, **axes):
    axes = axes or {"clip_norm": (0.5, 1.0)}
    return cells_lib.grid(options, axes, kind)


def _open(output, cells=None, score_text="/public.jsonl", runs=_RUNS):
    definition = folder_lib.definition(_OPTIONS, {"clip_norm": (0.5, 1.0)}, kinds.TRAINING)
    return selection.open_or_draw(output, definition, cells or _cells(), runs, score_text)


@pytest.fixture
def plans(monkeypatch):
    """Counts how often runs are planned."""
    made = []

    def plan(cells, num_runs, score_text):
        made.append(score_text)
        return _PLAN

    monkeypatch.setattr(selection_plan, "plan", plan)
    return made


def test_what_was_drawn_is_kept_in_private_and_never_drawn_again(tmp_path, plans, monkeypatch):
    first = _open(tmp_path)
    path = tmp_path / "private" / "selection.json"
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    assert [each.name for each in tmp_path.iterdir()] == ["private"]
    monkeypatch.setattr(selection_lib.NumRuns, "draw", lambda self: pytest.fail("drawn again"))
    assert _open(tmp_path) == first and len(plans) == 1
    with pytest.raises(validation.UsageError, match=r"another choice among runs \(other num_runs"):
        _open(tmp_path, runs=selection_lib.NumRuns(4, 15))
    with pytest.raises(validation.UsageError, match="other score_text"):
        _open(tmp_path, score_text="/other.jsonl")
    definition = folder_lib.definition(_OPTIONS, {"clip_norm": (1.0, 0.5)}, kinds.TRAINING)
    with pytest.raises(validation.UsageError, match=r"\(other axes\)"):
        selection.open_or_draw(tmp_path, definition, _cells(), _RUNS, "/public.jsonl")
    with pytest.raises(validation.UsageError, match="holds a sweep with --select"):
        folder_lib.check(tmp_path, _OPTIONS, {"clip_norm": (0.5, 1.0)})


def test_runs_have_cells_drawn_anew_and_the_noise_that_was_planned(tmp_path, plans):
    del plans
    chosen = selection.Selection("/public.jsonl", _RUNS, 1e-5, _PLAN, [1, 0, 1])
    runs = chosen.runs(_cells())
    assert [run.name for run in runs] == [
        "run=0,clip_norm=1", "run=1,clip_norm=0.5", "run=2,clip_norm=1",
    ]  # fmt: skip
    assert [run.config.target_epsilon for run in runs] == [1.0, 1.25, 1.0]
    assert {run.config.privacy.delta for run in runs} == {1e-6}
    numbers, cells = set(), set()
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        drawn = _open(tmp_path / str(number)).drawn
        numbers.add(len(drawn))
        cells |= set(drawn)
    assert len(numbers) > 1 and cells == {0, 1} and max(numbers) <= 15


def test_a_choice_whose_record_is_lost_is_not_drawn_again(tmp_path, plans):
    _open(tmp_path)
    (tmp_path / "private" / "cells").mkdir()
    (tmp_path / "private" / "selection.json").unlink()
    for begin in (
        lambda: _open(tmp_path),
        lambda: folder_lib.check(tmp_path, _OPTIONS, {"clip_norm": (0.5, 1.0)}),
        lambda: manifest.check_is_free(tmp_path),  # Of `train`, which would empty `private`.
    ):
        with pytest.raises(validation.UsageError, match=r"selection.json is missing, .*: restore"):
            begin()
    assert len(plans) == 1


def _open_on(output, data):
    """Opens a choice among so many runs that two draws are never the same."""
    options, axes = _OPTIONS | {"data": str(data)}, {"clip_norm": (0.5, 1.0)}
    definition = folder_lib.definition(options, axes, kinds.TRAINING)
    runs = selection_lib.NumRuns(10_000, 50_000)
    cells = _cells(options)
    return selection.open_or_draw(output, definition, cells, runs, "/public.jsonl").drawn


def test_copies_of_a_folder_draw_anew_or_have_one_record_and_no_promise(tmp_path, plans):
    del plans
    data, results = tmp_path / "users.jsonl", tmp_path / "results"
    data.write_text('{"user_id": "ada", "examples": ["so it is"]}\n')
    drawn = []
    for name in ("first", "second"):  # Copied before the draw: nothing of it is anywhere.
        random.seed(1)
        (results / name).mkdir(parents=True)
        drawn.append(_open_on(results / name, data))
    assert len(drawn[0]) != len(drawn[1]) or list(drawn[0]) != list(drawn[1])
    spent = data_budget.of_corpus(str(data), [results])
    assert not spent.forks and spent.total.epsilon == 2 * _PLAN.epsilon
    shutil.copytree(results / "first", results / "copy")  # After it.
    assert list(_open_on(results / "copy", data)) == list(drawn[0])
    spent = data_budget.of_corpus(str(data), [results])
    (fork,) = spent.forks
    assert [folder.name for folder in fork.folders] == ["copy", "first"] and fork.is_choice
    assert fork.total is None and spent.total is None


def _finish(folder, noise, run):
    folder.mkdir(parents=True)
    claim = guarantee.dp_ftrl_guarantee(
        identity.Identity(), noise_multiplier=noise, schema=schema_lib.MinSep(4, 4, 1), delta=1e-6
    )
    one = statement.dp_ftrl_statement(claim, unit_of_privacy="user", num_users=1000)
    (folder / "privacy_statement.json").write_text(statement_text.to_json(one))
    content = {"config": run.config.to_dict(), "kind": "training"}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "vocabulary.json").write_text(json.dumps({"words": [f"{noise}"]}))
    for name in ("model.npz", "metrics.csv", "sweep.log", "cell.json"):
        (folder / name).write_text(f"{name} {noise}")


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A choice all of whose runs have ended, and what other processes are asked and answer."""
    chosen = selection.Selection("/public.jsonl", _RUNS, 1e-5, _PLAN, [1, 0, 1, 0])
    for number, run in enumerate(chosen.runs(_cells())):
        _finish(folder_lib.cell_folder(tmp_path / "private", run), 10.0 + number, run)
    answers = {selection_plan.__name__: {}, "digest": "public", "scores": [math.nan, 2.5, 2.0, 2.0]}
    asked = []

    def ask(module, request):
        asked.append(request)
        return answers.get(module, answers)

    monkeypatch.setattr(selection_plan, "ask", ask)
    return chosen, asked, answers


def test_the_best_run_alone_is_released_with_the_cost_of_the_choice(tmp_path, ended):
    chosen, asked, answers = ended
    cells = _cells()
    selection.release(tmp_path, chosen, cells)
    winner = tmp_path / "winner"
    first = {path.name: path.read_bytes() for path in winner.iterdir()}
    (winner / "README.md").unlink()
    selection.release(tmp_path, chosen, cells)  # As after a kill.
    shutil.rmtree(winner)
    answers.update(scores=[1.0, 2.0, 3.0, 4.0], digest="another text")
    selection.release(tmp_path, chosen, cells)
    assert {path.name: path.read_bytes() for path in winner.iterdir()} == first
    checked, scored = asked
    assert checked["promises"] == ((pytest.approx(1.5), 1e-6), pytest.approx((0.25, 0.142), 1e-3))
    assert checked["folders"] == scored["folders"] and scored["text"] == "/public.jsonl"
    shutil.rmtree(tmp_path / "private" / "winner")
    with pytest.raises(validation.UsageError, match="was released, but .* is missing: restore it"):
        selection.release(tmp_path, chosen, cells)
    assert {path.name for path in winner.iterdir()} == {
        "model.npz", "vocabulary.json", "config.json", "README.md",
        "privacy_statement.json", "privacy_statement.md", "privacy.png",
    }  # fmt: skip
    assert (winner / "model.npz").read_text() == "model.npz 12.0"
    text = (winner / "privacy_statement.json").read_text()
    stated = statement.PrivacyStatement.from_json(text)
    assert (stated.epsilon, stated.delta) == (2.0, 1e-5) and stated.rho_zcdp is None
    assert stated.profile == ((1.5, 0.01),)
    assert "report winner" in (winner / "README.md").read_text()
    # Neither how many runs there were, nor which one this is.
    released = " ".join(path.read_text() for path in winner.iterdir() if path.suffix != ".png")
    assert "run=" not in released and '"drawn"' not in released
    assert {path.name for path in tmp_path.iterdir()} == {"private", "winner"}
    assert sentences.ONE_OF_A_CHOICE not in released
    (winner / "config.json").write_text('{"config": {}, "derived": {}, "facts": {}}')
    with pytest.raises(validation.UsageError, match="name the folder that the sweep wrote to"):
        records.read(winner)


def test_wherever_a_release_is_killed_there_is_one(tmp_path, ended, monkeypatch):
    monkeypatch.setattr(privacy_plot, "draw", lambda *args, **options: None)
    chosen, _, answers = ended
    for kill_at in itertools.count():
        output = tmp_path / str(kill_at)
        shutil.copytree(tmp_path / "private", output / "private")
        answers["scores"] = [1.0, 2.0, 3.0, 4.0]
        with kills.dying(kill_at), contextlib.suppress(kills.Killed):
            selection.release(output, chosen, _cells())
            break
        seen, kept = kills.published(output), output / "private" / "winner"
        assert kept.exists() or not seen
        is_kept = kept.exists()
        answers["scores"].reverse()  # Of the runs' models, another one would be the best.
        selection.release(output, chosen, _cells())
        last = kills.published(output)
        assert last["winner/model.npz"] == (b"model.npz 10.0" if is_kept else b"model.npz 13.0")
        del last["winner/README.md"]  # It has a date.
        assert all(seen[name] == last[name] for name in seen.keys() & last.keys())
    assert kill_at > 3


def _of_little_noise(folder, answers):
    path = folder / "privacy_statement.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"epsilon": 1.51}))


def _without_guarantee(folder, answers):
    path = folder / "privacy_statement.json"
    content = {"epsilon": None, "rho_zcdp": None, "no_guarantee": ["It broke."], "parts": []}
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def _of_other_settings(folder, answers):
    content = json.loads((folder / "config.json").read_text())
    content["config"]["clip_norm"] = 7.0
    (folder / "config.json").write_text(json.dumps(content))


def _of_another_plan(folder, answers):
    answers[selection_plan.__name__] = {"error": "The run costs more than was planned."}


def _by_another_text(folder, answers):
    answers["digest"] = "another text"


@pytest.mark.parametrize(
    "change, message",
    [
        (_of_little_noise, "run=3.* has ε = 1.51 at δ = 1e-06, and 1.5 at 1e-06 was planned"),
        (_without_guarantee, "run=3.* has ε = inf at"),
        (_of_other_settings, "run=3.* holds a run with other options than the cell's"),
        (_of_another_plan, "costs more than was planned"),
        (_by_another_text, "/public.jsonl, is no longer the one that --select was planned with"),
    ],
)
def test_nothing_is_released_of_runs_other_than_planned(tmp_path, ended, change, message):
    chosen, _, answers = ended
    last = folder_lib.cell_folder(tmp_path / "private", chosen.runs(_cells())[-1])
    change(last, answers)
    with pytest.raises(validation.UsageError, match=message):
        selection.release(tmp_path, chosen, _cells())
    assert not (tmp_path / "winner").exists() and not (tmp_path / "private" / "winner").exists()


def test_a_run_that_diverged_is_the_worst_and_ends_nothing(tmp_path, monkeypatch):
    chosen = selection.Selection("/public.jsonl", _RUNS, 1e-5, _PLAN, [1, 0, 1])
    runs = chosen.runs(_cells())
    folders = [folder_lib.cell_folder(tmp_path / "private", run) for run in runs]
    for number, folder in enumerate(folders):
        _finish(folder, 10.0 + number, runs[number])
        folder_lib.write_ending(folder, folder_lib.Ending(2 * (number == 0), "diverged"))
    assert selection.unfinished(tmp_path, runs) == runs[:1]

    def diverge(folder):
        (folder / "private").mkdir()
        (folder / "private" / "diverged.json").write_text("{}")

    diverge(folders[0])
    assert not selection.unfinished(tmp_path, runs)
    answer = {"scores": [99.0, math.nan], "digest": "public"}
    monkeypatch.setattr(selection_plan, "ask", lambda module, request: answer)
    selection.release(tmp_path, chosen, _cells())
    assert (tmp_path / "winner" / "model.npz").read_text() == "model.npz 11.0"
    shutil.rmtree(tmp_path / "winner")
    shutil.rmtree(tmp_path / "private" / "winner")
    # Of runs without a score, any one is the best, and the draw made the first one a random one.
    answer["scores"][0] = math.nan
    selection.release(tmp_path, chosen, _cells())
    selection.release(tmp_path, chosen, _cells())  # As after a kill.
    (released,) = (tmp_path / "winner").iterdir()
    said = json.loads(released.read_text())
    assert released.name == "outcome.json" and "diverged" in said["outcome"]
    assert (said["epsilon"], said["delta"]) == (2.0, 1e-5) and "run=" not in released.read_text()


def _write_run_with_metrics(folder, sums, stddev):
    folder.mkdir()
    known = manifest.Manifest(
        {"sequence_length": 4},
        {"others": [{"name": "training metrics", "noise_multiplier_of_round": stddev}]},
        {"vocabulary_size": 100},
        {},
    )
    (folder / "private").mkdir()
    known.keep(folder)
    columns = [column.name for column in kinds.TRAINING.figures(known).columns]
    lines = [",".join(["round", *columns])]
    for number, pair in enumerate(sums, start=1):
        row = dict.fromkeys(columns, 1.0) | dict(
            zip(("noised_sum_loss_sum", "noised_sum_num_targets"), pair, strict=True)
        )
        lines.append(",".join([str(number), *(repr(row[name]) for name in columns)]))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def test_runs_may_be_scored_by_the_loss_that_they_release(tmp_path):
    # Of eight rounds, the last two count, by their sums: a mean of quotients would be 1.05.
    sums = [(9.0, 1.0)] * 6
    _write_run_with_metrics(tmp_path / "0", [*sums, (1.0, 10.0), (2.0, 1.0)], 0.1)
    _write_run_with_metrics(tmp_path / "1", [*sums, (1.0, 10.0), (2.0, 1.0)], 4.0)
    (cell,) = _cells({**_OPTIONS, "num_rounds": 8}, clip_norm=(1.0,))
    chosen = selection.Selection("metrics", _RUNS, 1e-5, _PLAN, [0, 0])
    scores, score = selection._scores(chosen, [tmp_path / "0", tmp_path / "1"], cell)
    assert scores[0] == pytest.approx(math.log(100) * 3.0 / 11.0)
    assert math.isnan(scores[1]) and "last quarter of the rounds" in score  # Noise outweighs it.
    with pytest.raises(validation.UsageError, match="give --metrics-epsilon, or name a public"):
        selection.refuse(_cells(), "metrics")
    selection.refuse(_cells({**_OPTIONS, "metrics_epsilon": 0.5}), "metrics")
    selection.refuse(_cells({**_OPTIONS, "budget_shares": "metrics=0.05"}), "metrics")


@pytest.mark.parametrize(
    "options, axes, message",
    [
        ({}, {"target_epsilon": (1.0, 2.0)}, "the same target_epsilon in all cells"),
        ({}, {"delta": (1e-5, 1e-6)}, "the same delta in all cells"),
        ({}, {"user_column": ("a", "b")}, "the same user_column in all cells"),
        ({}, {"data": ("a.csv", "b.csv")}, "the same data in all cells"),
        ({"deterministic_noise_seed": 1}, {}, "which is known; leave it out"),
        ({"stop_at_accuracy": 0.2}, {}, "held-out users would decide"),
        ({"vocabulary": "private"}, {}, "does not cover its words; take 'dp'"),
        ({"max_epsilon": 2.0}, {}, "accounted for before it begins"),
        ({"simulate_report_goal": 100, "simulate_population": 1000}, {}, "protects nobody"),
        ({}, {"mechanism": ("blt", "none"), "clip_norm": (1.0, 2.0)}, "no guarantee"),
    ],
)
def test_cells_that_one_choice_cannot_cover_are_refused(options, axes, message):
    base = {"noise_multiplier": 1.0, "delta": 1e-5} if "target" not in "".join(axes) else {}
    with pytest.raises(validation.UsageError, match=message):
        selection.refuse(_cells({**base, **options}, **axes), "/public.jsonl")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sampling": "example"}, "no group_size, which does not go"),
        (
            {"sampling": "user", "cohort_size": 4, "group_size": 2},
            "no clip_norm, which does not go",
        ),
        ({"sampling": "user", "cohort_size": 4, "group_size": 2, "delta": None}, "; give --delta"),
    ],
)
def test_fine_tuning_that_looks_for_its_own_sizes_is_refused(options, message):
    base = {"initial_weights": "x", "target_epsilon": 1.0, "delta": 1e-5}
    cells = _cells({**base, **options}, kinds.FINETUNING, learning_rate=(0.1, 0.2))
    with pytest.raises(validation.UsageError, match=message):
        selection.refuse(cells, "/public.jsonl")


def test_the_weights_of_a_private_run_are_refused(tmp_path):
    (tmp_path / "privacy_statement.json").write_text("{}")
    with pytest.raises(validation.UsageError, match="weights of a private run"):
        selection.refuse(_cells({**_OPTIONS, "initial_weights": str(tmp_path)}), "/x")
