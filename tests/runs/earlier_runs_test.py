"""What the manifest of a run records of the runs that its weights come from."""

import json

import pytest

from tff_dpftrl.accounting import composition, statement_sentences
from tff_dpftrl.runs import earlier_runs, manifest

_USERS = ["ada", "bob"]


def _write(folder, *, epsilon=2.0, facts=None, users=None, unit="user"):
    (folder / "private").mkdir(parents=True)
    stated = {"epsilon": epsilon, "delta": 1e-6, "rho_zcdp": None, "unit_of_privacy": unit}
    (folder / "privacy_statement.json").write_text(json.dumps(stated))
    (folder / "config.json").write_text(json.dumps({"config": {}, "facts": facts or {}}))
    if users is not None:
        identities = manifest.identities({"training users": users})
        (folder / "private" / "manifest.json").write_text(json.dumps({"identities": identities}))
    return folder


@pytest.mark.parametrize(
    "users, same", [(_USERS, True), (["ada"], False), (None, None)], ids=["same", "other", "gone"]
)
def test_a_run_is_recorded_with_what_it_has_spent(tmp_path, users, same):
    facts = earlier_runs.facts_of(_write(tmp_path / "first", users=users), _USERS)
    assert earlier_runs.parts(facts) == ((composition.Spent("first", 1e-6, 2.0),), same)


def test_a_run_whose_claim_was_refuted_has_no_guarantee(tmp_path):
    path = _write(tmp_path / "first") / "privacy_statement.json"
    caveat = statement_sentences.refuted("audited: VIOLATED")
    audited = {"audits": ["audited: VIOLATED"], "headline_caveats": []}
    path.write_text(json.dumps(json.loads(path.read_text()) | audited))
    assert earlier_runs.statement_of(path.parent).epsilon == 2.0  # Audited, and not refuted.
    refuted = audited | {"headline_caveats": [caveat]}
    path.write_text(json.dumps(json.loads(path.read_text()) | refuted))
    assert earlier_runs.statement_of(path.parent) == composition.Spent("first")


@pytest.mark.parametrize("users_of_first", [_USERS, ["ada"]])
def test_a_chain_is_followed_to_its_beginning(tmp_path, users_of_first):
    facts = earlier_runs.facts_of(_write(tmp_path / "first", users=users_of_first), _USERS)
    second = _write(tmp_path / "second", epsilon=1.0, facts=facts, users=_USERS)
    runs, same = earlier_runs.parts(earlier_runs.facts_of(second, _USERS))
    assert [run.name for run in runs] == ["second", "first"]
    assert [run.epsilon for run in runs] == [1.0, 2.0]
    assert same == (users_of_first == _USERS)


def test_places_of_examples_do_not_tell_that_the_examples_are_the_same(tmp_path):
    facts = earlier_runs.facts_of(_write(tmp_path / "1", users=_USERS, unit="example"), _USERS)
    runs, same = earlier_runs.parts(json.loads(json.dumps(facts)))
    assert runs[0].unit_of_privacy == "example" and same is None
    second = _write(tmp_path / "2", facts=facts, users=_USERS)
    assert earlier_runs.parts(earlier_runs.facts_of(second, _USERS))[1] is None


def test_a_run_without_statement_has_no_guarantee(tmp_path):
    folder = _write(tmp_path / "first")
    (folder / "privacy_statement.json").unlink()
    runs, _ = earlier_runs.parts(earlier_runs.facts_of(folder, _USERS))
    assert runs == (composition.Spent("first"),)


def test_the_report_of_a_served_task_is_a_run(tmp_path):
    folder = _write(tmp_path / "report")
    (folder / "config.json").unlink()
    runs, same = earlier_runs.parts(earlier_runs.facts_of(folder, _USERS))
    assert runs == (composition.Spent("report", 1e-6, 2.0),) and same is None


def test_what_is_no_run_has_no_facts(tmp_path):
    assert earlier_runs.facts_of(tmp_path, _USERS) == {}
    assert earlier_runs.parts({}) == ((), None)
    with pytest.raises(ValueError, match="There is no run in .*say in words"):
        earlier_runs.of_caller(tmp_path, _USERS)


@pytest.mark.parametrize("content", ["{", "[]", '{"epsilon": "4", "delta": 1, "rho_zcdp": null}'])
def test_a_damaged_statement_is_refused(tmp_path, content):
    folder = _write(tmp_path / "first")
    (folder / "privacy_statement.json").write_text(content)
    with pytest.raises(ValueError, match="privacy_statement.json"):
        earlier_runs.facts_of(folder, _USERS)


@pytest.mark.parametrize("total", [(3.0, 2e-6), None])
def test_a_copy_with_a_statement_only_has_what_all_runs_have_spent(tmp_path, total):
    """As in a copy of a run's folder in Hugging Face's layout."""
    facts = earlier_runs.facts_of(_write(tmp_path / "first"), _USERS)
    copy = _write(tmp_path / "copy", epsilon=1.0)
    (copy / "config.json").write_text('{"model_type": "gpt2"}')
    runs, _ = earlier_runs.parts(facts)
    this = composition.Spent("this", 1e-6, 1.0 if total else None)
    says, found = composition.with_earlier_runs(this, runs, None)
    path = copy / "privacy_statement.json"
    stated = json.loads(path.read_text()) | {"headline_caveats": [says]}
    if total is not None:
        assert (found.epsilon, found.delta) == total
        keys = ("epsilon_with_earlier_runs", "delta_with_earlier_runs")
        stated["parameters"] = dict(zip(keys, total, strict=True))
    path.write_text(json.dumps(stated))
    (spent,) = earlier_runs.chain_of(copy)
    assert (spent.epsilon, spent.delta) == (total or (None, None))
    assert spent.rho_zcdp is None and "copy" in spent.name
    assert earlier_runs.statement_of(copy).epsilon == 1.0  # Of that run alone.
