"""Tests of tff_dpftrl.auditing.recount.choice, with runs whose ε is given."""

import copy
import dataclasses
import hashlib
import json
import math
import shutil
import types

import pytest

from tff_dpftrl import validation
from tff_dpftrl.accounting import gaussian, selection
from tff_dpftrl.auditing import audit_report, claim
from tff_dpftrl.auditing.recount import arithmetic, choice, record_checks, records
from tff_dpftrl.auditing.recount import terms as terms_lib

_RUNS = selection.NumRuns(4, 20)
_DELTA = 1e-5
_WANTED = selection.targets(3.0, _DELTA, _RUNS)
_BOUND = "runs: of this choice, on the same users"
_epsilon_asked_for = record_checks.epsilon_asked_for


@dataclasses.dataclass(frozen=True)
class _Terms:
    delta: float = 0.0


def _bind(folder, number, users="them"):
    record = (folder / "private" / "selection.json").read_bytes()
    identities = {"training users": users}
    identities["record of the choice among runs"] = hashlib.blake2b(
        record, digest_size=16
    ).hexdigest()
    path = folder / "private" / "cells" / f"run={number},a=1" / "private" / "manifest.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"identities": identities}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A choice among three Gaussian runs, which has been made."""
    planned = {"epsilon": _WANTED.epsilon, "run_epsilon": _WANTED.tail[0]}
    planned |= {"run_delta": _WANTED.tail[1], "run_targets": [_WANTED.tail[0]], "profile": []}
    content = {"format": 2, "options": {"target_epsilon": 3.0}, "delta": _DELTA, "drawn": [0, 0, 0]}
    content |= {"num_runs": dataclasses.asdict(_RUNS), "plan": planned}
    parameters = {"selection_expected_runs": 4, "selection_largest_number_of_runs": 20}
    parameters |= {"epsilon_of_one_run": _WANTED.tail[0], "delta_of_one_run": _WANTED.tail[1]}
    stated = {"epsilon": _WANTED.epsilon, "delta": _DELTA, "parameters": parameters}
    for name in ("winner", *(f"private/cells/run={number},a=1" for number in range(3))):
        (tmp_path / name).mkdir(parents=True)
        for file in ("model.npz", "vocabulary.json", "config.json"):
            (tmp_path / name / file).write_text(
                name if name[-1] != "r" else "private/cells/run=1,a=1"
            )
    (tmp_path / "private" / "selection.json").write_text(json.dumps(content))
    for number in range(3):
        _bind(tmp_path, number)
    (tmp_path / "winner" / "privacy_statement.json").write_text(json.dumps(stated))
    mu = gaussian.mu(*_WANTED.tail) * (1 - 1e-11)
    monkeypatch.setattr(records, "read", lambda run: run)
    monkeypatch.setattr(terms_lib, "of", lambda run: _Terms())
    monkeypatch.setattr(
        record_checks,
        "epsilon_asked_for",
        lambda run, terms: (gaussian.epsilon(mu, terms.delta),) * 2,
    )
    return tmp_path


def _recounted(folder):
    one = audit_report.AuditReport("run", claim.Claim(1.0, 1e-5), (), is_ours=True)
    return choice.recount(folder, lambda run: one, lambda line: None)


def _wrong(folder):
    return {each.test for each in _recounted(folder).findings if each.outcome == "violated"}


def test_a_choice_that_was_made_as_planned_is_consistent(folder):
    assert choice.is_choice(folder) and not _wrong(folder)


def test_what_runs_promise_is_rounded_up_and_an_untested_run_is_not_consistent(folder):
    _, _, promises, *_, run = _recounted(folder).findings
    for pair in promises.says.partition("(ε, δ)-DP for ")[2].rstrip(".").split(" and "):
        epsilon, delta = map(float, pair.strip("()").split(", "))
        assert gaussian.epsilon(gaussian.mu(*_WANTED.tail), delta) <= epsilon
    assert (run.outcome, run.says[:18]) == ("not tested", "nothing was tested")


def test_promises_of_sampled_runs_cost_few_computations_for_each_setting(folder, monkeypatch):
    # At the large δ of the second promise ε of these runs is 0, which no narrower cells change.
    made, build = [], arithmetic.pld.PLDAccountant
    terms = terms_lib.Terms(terms_lib.SAMPLED, 1.5, _DELTA, None, 0.1, 1, 0.0, 8, True)

    def counted(**options):
        made.append(options)
        return build(**options)

    for cached in arithmetic.sampled_epsilon, arithmetic._accountant:
        cached.cache_clear()
    monkeypatch.setattr(arithmetic, "_NARROWEST_CELL", 1e-4)  # Down to 1e-7 it takes minutes.
    monkeypatch.setattr(arithmetic.pld, "PLDAccountant", counted)
    monkeypatch.setattr(terms_lib, "of", lambda run: terms)
    monkeypatch.setattr(records, "read", lambda run: types.SimpleNamespace(config={}, derived={}))
    monkeypatch.setattr(record_checks, "epsilon_asked_for", _epsilon_asked_for)
    assert not _wrong(folder)
    assert len(made) == 2  # Two widths of cells for both promises of three runs alike.


@pytest.mark.parametrize(
    "path, value, tests",
    [
        (("drawn",), [0, 0], {"number of runs"}),
        (("plan", "epsilon"), 2.9, {"what each run promises", "statement: ε of the choice"}),
        (("plan", "run_epsilon"), 2.0, {"what each run promises", "statement: ε of the choice"}),
        (("plan", "run_delta"), 1e-5, {"what each run promises", "statement: ε of the choice"}),
        (("num_runs", "mean"), 8.0, {"what each run promises", "statement: ε of the choice"}),
        (("options", "target_epsilon"), 2.5, {"statement: ε of the choice"}),
    ],
)
def test_a_choice_that_costs_more_is_found(folder, path, value, tests):
    file = folder / "private" / "selection.json"
    content = copy.deepcopy(json.loads(file.read_text()))
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    file.write_text(json.dumps(content))
    assert _wrong(folder) == {*tests, _BOUND}
    for number in range(3):
        _bind(folder, number)
    assert _wrong(folder) == tests


def test_runs_on_two_sets_of_users_are_found_also_of_an_earlier_version(folder):
    _bind(folder, 1, "others")
    assert _wrong(folder) == {_BOUND}
    path = folder / "private" / "selection.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    assert _wrong(folder) == {_BOUND}
    _bind(folder, 1)
    assert not _wrong(folder)


def test_a_second_release_of_another_run_is_found(folder):
    kept = folder / "private" / "winner"
    shutil.copytree(folder / "winner", kept)
    assert not _wrong(folder)
    for name in ("model.npz", "vocabulary.json", "config.json"):
        (folder / "winner" / name).write_text("private/cells/run=2,a=1")
    assert _wrong(folder) == {"winner: files of one run"}


@pytest.mark.parametrize(
    ("part", "mu"),
    [
        ({"name": "training metrics", "noise_multiplier_of_round": 1.5}, math.hypot(0.5, 1 / 1.5)),
        ({"name": "vocabulary", "rho_zcdp": 0.5}, math.hypot(0.5, 1.0)),
        ({"name": "evaluation of held-out users", "rho_zcdp": 0.5}, 1.0),
    ],
)
def test_what_a_run_promises_is_for_all_that_it_releases(part, mu):
    nothing = {"rho_zcdp": 0.0, "delta": 0.0, "epsilon": 0.0, "noise_multiplier_of_round": None}
    strategy = {"mechanism": "identity"}
    terms = terms_lib.Terms(
        *(terms_lib.DP_FTRL, 2.0, _DELTA, strategy, None, 1, 0.0, 4, True),
        others=(nothing | part,),
    )
    schema = {"num_rounds": 4, "min_sep": 4, "max_participations": 1}
    run = types.SimpleNamespace(config={}, derived={"noise_multiplier": 2.0, "schema": schema})
    low, high = record_checks.epsilon_asked_for(run, terms)
    assert low <= gaussian.epsilon(mu, _DELTA) <= high < low * (1.0 + 1e-5)


def test_files_of_two_runs_and_a_choice_under_way_are_found(folder):
    (folder / "winner" / "model.npz").write_text("private/cells/run=2,a=1")
    assert _wrong(folder) == {"winner: files of one run"}
    (folder / "winner" / "privacy_statement.json").unlink()
    with pytest.raises(validation.UsageError, match="has no winner yet. Let the sweep end"):
        _wrong(folder)


@pytest.mark.parametrize("place", ["winner", "private/cells/run=1,a=1"])
def test_released_files_are_those_of_the_folder(folder, place):
    elsewhere = (folder / place / "model.npz").rename(folder.parent / f"{folder.name}.npz")
    (folder / place / "model.npz").symlink_to(elsewhere)
    assert _wrong(folder) == {"winner: files of one run"}


def test_a_winner_that_diverged_is_one_if_a_run_did(folder):
    stated = json.loads((folder / "winner" / "privacy_statement.json").read_text())
    for path in (folder / "winner").iterdir():
        path.unlink()
    runs = {k: v for k, v in stated["parameters"].items() if k.startswith("selection_")}
    outcome = {"outcome": "It diverged.", "epsilon": stated["epsilon"], "delta": _DELTA, **runs}
    (folder / "winner" / "outcome.json").write_text(json.dumps(outcome))
    assert _wrong(folder) == {"winner: files of one run"}
    private = folder / "private" / "cells" / "run=1,a=1" / "private"
    (private / "diverged.json").write_text("{}")
    (private.parent / "model.npz").unlink()
    assert not _wrong(folder)
    (folder / "winner" / "outcome.json").write_text(json.dumps({**outcome, "epsilon": 1.0}))
    assert _wrong(folder) == {"statement: ε of the choice"}
    (folder / "winner" / "metrics.csv").write_text("")
    assert "winner: files of one run" in _wrong(folder)


def test_a_statement_that_leaves_out_what_one_run_costs_is_found(folder):
    path = folder / "winner" / "privacy_statement.json"
    stated = json.loads(path.read_text())
    del stated["parameters"]["epsilon_of_one_run"]
    path.write_text(json.dumps(stated))
    assert _wrong(folder) == {"statement: ε of the choice"}
