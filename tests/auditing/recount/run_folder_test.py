"""A run that nobody touched is consistent; every fault that is planted is found by name."""

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import re
import shutil
import sqlite3
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.finetuning import toy_finetuning
from tests.training import toy_run
from tff_dpftrl.accounting import gaussian, privacy_statement, statement_text
from tff_dpftrl.auditing.recount import arithmetic, file_checks, run_folder, statement_checks
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.data import tokenizer, vocabulary, vocabulary_file
from tff_dpftrl.finetuning import custom_run, example_sampling
from tff_dpftrl.finetuning import plan as plan_lib
from tff_dpftrl.finetuning import run as finetuning_run
from tff_dpftrl.participation import ledger as ledger_lib
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import reporting, statement_subject
from tff_dpftrl.training import report

corpus = toy_run.corpus
toy = toy_finetuning.toy
trained = toy_run.trained
_SECRET = {"deterministic_noise_seed": None}

_OPTIONS = "options: config.json and private/manifest.json"
_NOISE = "noise multiplier: options and what was derived"
_SEED = "seed of the noise"
_LEDGER = "ledger: one history of rounds"
_PARTICIPATION = "participation: ledger and declared schema"
_CHECKPOINT = "checkpoint: state, ledger and options"
_STATE = "noise in the checkpoint"
_STATED_PARTICIPATION = "statement: participation"
_SENSITIVITY = "statement: sensitivity"
_EPSILON = "statement: ε"
_TEXT = "statement: Markdown and JSON"
_SENTENCES = "statement: every sentence"
_SUBJECT = "statement: what it is about"
_METRICS = "metrics: ε by round"
_ROWS = "metrics: rows and cohorts"
_MODEL = "released model and checkpoint"
_PERMISSIONS = "permissions of private/"
_SECRETS = "secrets outside of private/"
_EXACT = "exact figures in files that may be published"
_FILES = "files: missing or unknown"
_SAMPLING = "sampling: ledger and secret seed"


@pytest.fixture(scope="module")
def runs(trained):
    """A run killed before its fifth round, and the same when it had gone on to its end."""
    return trained.output, trained.killed


@pytest.fixture
def finished(runs, tmp_path):
    """A copy of the finished run, to be damaged."""
    return pathlib.Path(shutil.copytree(runs[0], tmp_path / "run"))


def _outcomes(folder):
    found = run_folder.recount_run(folder)
    return {finding.test: finding.outcome for finding in found.findings}


def _violated(folder):
    return {test for test, outcome in _outcomes(folder).items() if outcome == "violated"}


def test_an_untouched_run_is_consistent(runs):
    before = {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")}
    said = []
    found = run_folder.recount_run(runs[0], progress=said.append)
    assert found.verdict == "consistent with the claim"
    assert {finding.outcome for finding in found.findings} == {"consistent"}
    assert len(found.findings) == len(said) == 20
    assert (
        found.confidence == pytest.approx(0.999)
        and "Smallest faults that these tests would have found with 99 % probability"
        in found.to_markdown()
    )
    stated = json.loads((runs[0] / "privacy_statement.json").read_text())
    assert found.claim.epsilon == stated["epsilon"] and stated["observed"]["min_sep"] == 3
    assert {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")} == before


def test_an_interrupted_run_is_consistent_before_and_after_its_report(runs, tmp_path):
    folder = pathlib.Path(shutil.copytree(runs[1], tmp_path / "run"))
    found = _outcomes(folder)
    assert "violated" not in found.values()
    assert found[_LEDGER] == found[_CHECKPOINT] == "consistent"
    assert found[_EPSILON] == found[_STATED_PARTICIPATION] == "not tested"
    assert math.isinf(run_folder.recount_run(folder).claim.epsilon)  # Nothing is claimed yet.
    report.report(folder)
    found = _outcomes(folder)
    assert "violated" not in found.values()
    assert found[_EPSILON] == found[_STATED_PARTICIPATION] == "consistent"
    # A statement of an earlier state is no false one.
    _forge(folder, observed__num_rounds=4)
    assert _outcomes(folder)[_STATED_PARTICIPATION] == "not tested"
    assert not _violated(folder)


def test_a_run_of_an_earlier_version_bound_neither_date_nor_versions(finished):
    for name in ("config.json", "private/manifest.json"):
        values = json.loads((finished / name).read_text())
        values["versions"]["tff_dpftrl"] = "0.1.0"  # It is not what makes the difference.
        if name != "config.json":
            del values["versions"]
        (finished / name).write_text(json.dumps(values, indent=2) + "\n")
    path = finished / "privacy_statement.json"
    _edit(path, subject__config_sha256=statement_subject.sha256(finished / "config.json"))
    _without_digests(finished)
    stated = privacy_statement.PrivacyStatement.from_json(path.read_text())
    path.with_suffix(".md").write_text(statement_text.markdown(stated))
    assert not _violated(finished)
    says = {one.test: one.says for one in run_folder.recount_run(finished).findings}
    assert "bound neither its date nor its version" in says[_SUBJECT]
    date = json.loads(path.read_text())["subject"]["date"]
    report.report(finished)  # It is written with digests, and says what it said.
    assert json.loads(path.read_text())["subject"]["date"] == date
    assert (
        "as it was written"
        in {one.test: one.says for one in run_folder.recount_run(finished).findings}[_SUBJECT]
    )


def test_a_run_without_its_secrets_is_recounted_as_far_as_may_be(finished):
    shutil.rmtree(finished / "private")  # As docs/reference/results_folder.md advises.
    found = _outcomes(finished)
    assert "violated" not in found.values()
    assert found[_EPSILON] == found[_SENSITIVITY] == found[_NOISE] == "consistent"
    assert found[_LEDGER] == found[_CHECKPOINT] == found[_SECRETS] == "not tested"
    report = run_folder.recount_run(finished)
    assert report.verdict.startswith("nothing contradicts the claim, which cannot be derived")
    says = {finding.test: finding.says for finding in report.findings}
    assert "the clients that took part" not in says[_SENSITIVITY]
    assert says["released model and checkpoint"].startswith("there is no checkpoint")


def _edit(path, **changes):
    values = json.loads(path.read_text())
    for name, value in changes.items():
        *parents, last = name.split("__")
        part = values
        for parent in parents:
            part = part[parent]
        part[last] = value
    path.write_text(json.dumps(values, indent=2) + "\n")


def _statement(**changes):
    return lambda folder: _edit(folder / "privacy_statement.json", **changes)


def _options(**changes):
    def change(folder):
        for name in ("config.json", "private/manifest.json"):
            _edit(folder / name, **changes)

    return change


def _text(name, old, new):
    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def _forge(folder, **changes):
    """Changes the statement in both files alike, digests included."""
    path = folder / "privacy_statement.json"
    _edit(path, **changes)
    values = json.loads(path.read_text())
    for name in set(privacy_statement.DIGESTS) & set(values["subject"]):
        del values["subject"][name]
    forged = privacy_statement.PrivacyStatement.from_json(json.dumps(values))
    forged = statement_subject.bound(folder, forged)
    path.write_text(statement_text.to_json(forged))
    path.with_suffix(".md").write_text(statement_text.markdown(forged))


def _other_key(folder):
    """Another date, with the digest that everybody can make."""
    key = folder / "private" / "ledger.sqlite.key"
    key.rename(folder / "key")
    _forge(folder, subject__date="2020-01-01T00:00:00Z")
    (folder / "key").rename(key)


def _without_digests(folder):
    path = folder / "privacy_statement.json"
    values = json.loads(path.read_text())
    values["subject"] = {
        k: v for k, v in values["subject"].items() if not k.startswith("statement")
    }
    path.write_text(json.dumps(values))


def _both_epsilons(folder):
    """Half of ε, and what makes it look right but for the noise."""
    values = json.loads((folder / "privacy_statement.json").read_text())
    _forge(folder, epsilon=values["epsilon"] / 2)


def _lower_sensitivity(folder):
    """S², ρ and ε that fit to each other, and not to the strategy."""
    squared = json.loads((folder / "privacy_statement.json").read_text())["parameters"]
    squared = squared["sensitivity_squared"] * 0.81
    mu = math.sqrt(squared) / 0.5
    _edit(
        folder / "privacy_statement.json",
        parameters__sensitivity_squared=squared,
        rho_zcdp=mu**2 / 2,
        epsilon=gaussian.epsilon(mu, 1e-10),
    )


def _sql(*statements):
    def change(folder):
        path = folder / "private" / "ledger.sqlite"
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            for (name,) in triggers.fetchall():
                connection.execute(f"DROP TRIGGER {name}")
            for statement in statements:
                connection.execute(statement)

    return change


def _came_too_early(folder):
    """Somebody of round 0 is in round 1 too, by a ledger that hangs together."""
    _sql(
        "INSERT INTO asked SELECT 1, min(client) FROM asked WHERE round = 0",
        "UPDATE clients SET participations = participations + 1 "
        "WHERE client = (SELECT min(client) FROM asked WHERE round = 0)",
        "UPDATE commits SET smallest_stride = 1 WHERE round = 1",
    )(folder)
    path = folder / "private" / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        names = connection.execute(
            "SELECT pseudonym FROM clients JOIN asked USING (client) WHERE round = 1"
        ).fetchall()
    cohort = b"".join(sorted(name for (name,) in names))
    cohort_hash = hashlib.blake2b(cohort, digest_size=32).hexdigest()
    _sql(f"UPDATE rounds SET cohort_hash = '{cohort_hash}' WHERE round = 1")(folder)


def _state(change):
    """Changes the tensors of the checkpoint; it keeps its name."""

    def changed(folder):
        (path,) = (folder / "private" / "checkpoints").iterdir()
        with np.load(path) as archive:
            tensors = {name: archive[name] for name in archive.files}
        change(tensors)
        np.savez(path, **tensors)

    return changed


def _scale_noise(tensors):
    tensors["0008/aggregator/buffer"] *= np.float32(0.7)


def _older_noise(tensors):
    tensors["0006/aggregator/round_index"] -= 1


def _known_seed(tensors):
    tensors["0007/aggregator/seed"] = np.array([7, 0])


def _remove_checkpoint(folder):
    shutil.rmtree(folder / "private" / "checkpoints")


def _seed_words(folder):
    (path,) = (folder / "private" / "checkpoints").iterdir()
    with np.load(path) as archive:
        return archive["0007/aggregator/seed"]


def _tell_seed(folder):
    with open(folder / "metrics_README.md", "a") as file:
        file.write(f"seed: {_seed_words(folder)[1]}\n")


def _hide_seed(folder):
    with np.load(folder / "best_model.npz") as archive:
        tensors = {name: archive[name] for name in archive.files}
    np.savez_compressed(folder / "best_model.npz", **tensors, seed=_seed_words(folder))


def _tell_key(folder):
    key = (folder / "private" / "ledger.sqlite.key").read_bytes()
    _edit(folder / "vocabulary.json", note=key.hex())


def _tell_loss(folder):
    loss = (folder / "private" / "metrics.csv").read_text().splitlines()[1].split(",")[1]
    _edit(folder / "held_out.json", note=f"loss {loss}")


def _tables(folder):
    return [folder / "metrics.csv", folder / "private" / "metrics.csv"]


def _metrics(column, value):
    def change(folder):
        for path in _tables(folder):
            lines = [line.split(",") for line in path.read_text().splitlines()]
            if column in lines[0]:
                lines[-1][lines[0].index(column)] = value
            path.write_text("\n".join(map(",".join, lines)) + "\n")

    return change


def _model(change):
    def changed(folder):
        with np.load(folder / "model.npz") as archive:
            tensors = {name: archive[name] for name in archive.files}
        change(tensors)
        np.savez(folder / "model.npz", **tensors)

    return changed


def _other_weights(tensors):
    tensors["embedding"][0, 0] += 1.0


def _other_description(tensors):
    tensors["model"] = np.array(str(tensors["model"]).replace("lstm", "gru"))


def _hidden_text(tensors):
    tensors["note"] = np.array("ada wrote this")


def _copy_of_ledger(folder):
    shutil.copy(folder / "private" / "ledger.sqlite", folder / "ledger_before.sqlite")


_LAST = toy_run.NUM_ROUNDS - 1


@pytest.mark.parametrize(
    "plant, found",
    [
        (_statement(epsilon=1.0), {_EPSILON, _TEXT}),
        (_statement(epsilon="small"), {_EPSILON, _TEXT}),
        (_both_epsilons, {_EPSILON}),
        (_statement(rho_zcdp=0.5), {_EPSILON}),
        (_statement(delta=1e-12), {_EPSILON, _TEXT}),
        (_statement(parameters__noise_multiplier=5.0), {_EPSILON, _TEXT}),
        (_statement(parameters__clip_norm=0.5), {_EPSILON, _TEXT}),
        (_statement(parameters__num_users=1000), {_EPSILON, _TEXT}),
        (_lower_sensitivity, {_SENSITIVITY, _TEXT}),
        (_statement(accounted__max_participations=1), {_STATED_PARTICIPATION, _SENSITIVITY, _TEXT}),
        (_statement(observed__min_sep=4), {_STATED_PARTICIPATION, _TEXT}),
        (_text("privacy_statement.md", "User-level (ε = ", "User-level (ε = 0."), {_TEXT}),
        (_text("privacy_statement.md", "It is not assumed that", "It is assumed that"), {_TEXT}),
        (_options(config__deterministic_noise_seed=3), {_SEED, _CHECKPOINT, _EPSILON, _METRICS}),
        (
            lambda folder: _edit(folder / "config.json", config__noise_multiplier=5.0),
            {_OPTIONS, _NOISE},
        ),
        (_options(derived__noise_multiplier=5.0), {_NOISE, _CHECKPOINT, _EPSILON, _METRICS}),
        (_options(config__clip_norm=2.0), {_CHECKPOINT, _EPSILON}),
        (_sql("DELETE FROM asked WHERE round = 2 AND client < 34"), {_LEDGER, _ROWS}),
        (
            _sql("INSERT INTO asked SELECT 4, min(client) FROM asked WHERE round = 3"),
            {_LEDGER, _PARTICIPATION, _ROWS},
        ),
        (
            _sql(
                *(f"DELETE FROM {t} WHERE round = {_LAST}" for t in ("rounds", "commits", "asked"))
            ),
            {_LEDGER, _CHECKPOINT},
        ),
        (_sql("INSERT INTO rounds VALUES (6, 'x', 'y', 'z')"), {_LEDGER, _PARTICIPATION}),
        (_sql("UPDATE rounds SET continues_checkpoint = 'x' WHERE round = 3"), {_LEDGER}),
        (_sql("UPDATE rounds SET noise_fingerprint = NULL WHERE round = 3"), {_LEDGER}),
        (_sql("UPDATE declared SET min_sep = 2"), {_PARTICIPATION, _STATED_PARTICIPATION}),
        (_came_too_early, {_PARTICIPATION, _STATED_PARTICIPATION, _ROWS}),
        (_state(_scale_noise), {_CHECKPOINT, _STATE}),
        (_state(_older_noise), {_CHECKPOINT}),
        (_state(_known_seed), {_CHECKPOINT, _SEED}),
        (_remove_checkpoint, {_CHECKPOINT}),
        (lambda folder: (folder / "private").chmod(0o755), {_PERMISSIONS}),
        (lambda folder: (folder / "private" / "ledger.sqlite.key").chmod(0o644), {_PERMISSIONS}),
        (_tell_seed, {_SECRETS}),
        (_hide_seed, {_SECRETS}),
        (_tell_key, {_SECRETS}),
        (_tell_loss, {_EXACT}),
        (_text("metrics_README.md", "`seconds`", "`minutes`"), {_EXACT}),
        (_statement(subject__run="0" * 16), {_SUBJECT}),
        (_statement(subject__date="2999-01-01T00:00:00Z"), {_SUBJECT}),
        (_statement(subject__date="2020-01-01T00:00:00Z"), {_SUBJECT}),
        (_statement(code_version="0.1.0"), {_SUBJECT}),
        (_statement(audits=["audited: consistent"]), {_SUBJECT, _TEXT}),
        (_other_key, {_SUBJECT}),
        (_without_digests, {_SUBJECT}),
        (lambda folder: _edit(folder / "config.json", versions__tff_dpftrl="0.1.0"), {_OPTIONS}),
        (_statement(subject__tensorflow="3.0"), {_SUBJECT}),
        (_statement(subject__note="approved"), {_SUBJECT}),
        (_statement(subject={}), {_SUBJECT}),
        (_model(_other_weights), {_SUBJECT}),
        (_text("config.json", '"versions"', ' "versions"'), {_SUBJECT}),
        (_metrics("epsilon", "3.5"), {_METRICS}),
        (_metrics("epsilon", ""), {_METRICS}),
        (_metrics("clients", "14"), {_ROWS}),
        (_model(_other_weights), {_MODEL}),
        (_model(_other_description), {_MODEL}),
        (_model(_hidden_text), {_MODEL}),
        (lambda folder: (folder / "vocabulary.json").unlink(), {_FILES}),
        (lambda folder: (folder / "private" / "ledger.sqlite.key").unlink(), {_FILES}),
        (lambda folder: (folder / "privacy_statement.json").write_text("{"), {_FILES}),
        (_copy_of_ledger, {_FILES}),
    ],
)
def test_planted_faults_are_found_by_name(finished, plant, found):
    plant(finished)
    assert found <= _violated(finished)


@pytest.mark.parametrize(
    ("held_out", "expected"), [("0.1111111111111111", set()), ("0.5", {_EXACT})]
)
def test_a_share_that_held_out_users_have_too_is_no_exact_figure(finished, held_out, expected):
    for column, share in (("top1", "0.1111111111111111"), ("eval_top1_in_vocab", held_out)):
        _metrics(column, share)(finished)
    _edit(finished / "held_out.json", note="0.1111111111111111")
    assert _violated(finished) == expected


def test_a_check_over_nothing_is_not_tested(finished):
    for path in _tables(finished):
        path.write_text(re.sub(r"\d\.\d{5,}", "0.5", path.read_text()))
    found = {one.test: one for one in run_folder.recount_run(finished).findings}[_EXACT]
    assert (found.outcome, found.says[:9]) == ("not tested", "no figure")


@pytest.mark.parametrize("name", ["english", "docs"])
def test_words_called_the_package_s_are_compared_with_its_own(name, tmp_path, monkeypatch):
    own = vocabulary.Vocabulary(("so", "it", "is"), "a list")
    make = "english" if name == "english" else "standard_library"
    monkeypatch.setattr(vocabulary, make, lambda size, lower_case: own)
    run = types.SimpleNamespace(folder=tmp_path, config={"vocabulary": name})
    outcomes = []
    for words in (own, dataclasses.replace(own, words=("so", "it", "me"))):
        vocabulary_file.write(tmp_path / "vocabulary.json", words, tokenizer.Tokenizer(True))
        outcomes.append(file_checks.vocabulary("words", run))
    assert outcomes[0].outcome == "consistent"
    # Other versions of Python have other docstrings.
    assert outcomes[1].outcome == ("violated" if name == "english" else "not tested")
    assert outcomes[1].says.startswith("1 of 3 words are not in ")


def test_a_fault_is_no_more_than_its_own(finished):
    """Nothing else is called violated where one thing is wrong."""
    _both_epsilons(finished)
    assert _violated(finished) == {_EPSILON}
    found = run_folder.recount_run(finished)
    assert found.verdict == "VIOLATED: statement: ε"
    assert "computed anew" in found.to_markdown()


_FORGED = {
    "setting": "Nobody has to be trusted.",
    "output": "The final model only.",
    "adjacency": "Add or remove: neighbouring data sets differ in all data of one user.",
    "unit_of_privacy": "device",
    "mechanism": "tree",
    "accounting": "Exact.",
    "covered": ["Everything."],
    "not_covered": [],
    "assumptions": [],
    "caveats": [],
    "headline_caveats": ["An auditor has approved of it."],
    "no_guarantee": ["None is needed."],
    "from_whom": "From everybody.",
    "profile": [[0.0, 0.01]],
    "parameters__clients_per_round": 1000,
    "parameters__clip_norm_inflation": 0.5,
    "parameters__data": "public text",
    "parameters__approved_by": "nobody",
}


@pytest.mark.parametrize("has_records", [True, False])
@pytest.mark.parametrize("entry", _FORGED)
def test_a_forged_sentence_is_found_though_both_files_say_it(finished, entry, has_records):
    if not has_records:
        shutil.rmtree(finished / "private")
    assert "violated" not in _outcomes(finished).values()
    changes = {entry: _FORGED[entry]}
    if entry == "no_guarantee":
        changes |= {"epsilon": None, "rho_zcdp": None}
    _forge(finished, **changes)
    found = run_folder.recount_run(finished)
    (whole,) = [finding for finding in found.findings if finding.test == _SENTENCES]
    assert whole.outcome == "violated" and entry.rpartition("__")[2] in whole.says
    assert found.verdict.startswith("VIOLATED")


def test_epsilon_that_falls_between_the_recounted_rows_is_found(finished, monkeypatch):
    monkeypatch.setattr(statement_checks, "_ROWS_RECOUNTED", {terms_lib.DP_FTRL: 2})
    assert _METRICS not in _violated(finished)
    for path in _tables(finished):
        header, *rows = path.read_text().splitlines()
        column = header.split(",").index("epsilon")
        cells = rows[3].split(",")
        cells[column] = str(float(cells[column]) / 2)
        rows[3] = ",".join(cells)
        path.write_text("\n".join([header, *rows]) + "\n")
    assert _violated(finished) == {_METRICS}


def test_a_mechanism_of_others_is_neither_confirmed_nor_accused(finished, monkeypatch):
    def unknown(parameters, num_rounds):
        raise arithmetic.UnknownMechanismError(parameters["mechanism"])

    monkeypatch.setattr(arithmetic, "_coefficients", unknown)
    found = run_folder.recount_run(finished)
    outcomes = {finding.test: finding.outcome for finding in found.findings}
    assert outcomes[_SENSITIVITY] == outcomes[_METRICS] == "not tested"
    assert outcomes[_LEDGER] == outcomes[_CHECKPOINT] == outcomes[_FILES] == "consistent"
    assert found.verdict.startswith("nothing contradicts the claim")
    assert found.verdict.endswith("without a proof of the mechanism 'blt'")
    # What does not hang on the mechanism is still found.
    shutil.copy(finished / "private" / "ledger.sqlite.key", finished / "key")
    assert _FILES in _violated(finished)


def test_a_cell_of_a_sweep_is_a_run(finished):
    (finished / "cell.json").write_text("{}")
    (finished / "sweep.log").write_text("")
    assert run_folder.recount_run(finished).verdict == "consistent with the claim"


def test_files_that_are_compared_with_nothing_are_named(finished):
    says = {finding.test: finding.says for finding in run_folder.recount_run(finished).findings}
    assert "compared the content of" in says[_FILES] and "held_out.json" in says[_FILES]


def test_the_text_of_another_version_is_neither_compared_nor_called_verified(finished):
    _forge(finished, code_version="0.2.0")
    found = run_folder.recount_run(finished)
    assert not found.is_violated and found.verdict.startswith("nothing contradicts the claim")
    assert found.verdict.endswith("without the code of version 0.2.0, which wrote its text")
    by_name = {one.test: one for one in found.findings}
    for name in (_TEXT, _SENTENCES):
        assert by_name[name].outcome == "not tested"
        assert "written by version 0.2.0: its text is not compared" in by_name[name].says
    assert by_name[_EPSILON].outcome == "consistent"
    _text("privacy_statement.md", "User-level (ε = ", "User-level (ε = 0.")(finished)
    assert _violated(finished) == {_TEXT}
    _both_epsilons(finished)
    assert _EPSILON in _violated(finished)


def test_a_line_that_differs_is_named_with_what_it_should_be(finished):
    _text("privacy_statement.md", "It is not assumed that", "It is assumed that")(finished)
    lines = (finished / "privacy_statement.md").read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, start=1) if "It is assumed that" in line]
    caveats = json.loads((finished / "privacy_statement.json").read_text())["caveats"]
    says = {one.test: one.says for one in run_folder.recount_run(finished).findings}
    assert f"line {number} is " in says[_TEXT] and "by the JSON '- " in says[_TEXT]
    _forge(finished, caveats=caveats[1:])
    says = {one.test: one.says for one in run_folder.recount_run(finished).findings}
    assert "caveats, line 1 is missing in the statement, and by the records" in says[_SENTENCES]


def test_an_audit_in_the_statement_is_no_forgery(finished):
    path = finished / "privacy_statement.json"
    stated = privacy_statement.PrivacyStatement.from_json(path.read_text())
    reporting.write_statement(finished, stated.with_audit("audited: by somebody", is_refuted=True))
    assert not _violated(finished)


def test_what_is_no_run_is_refused(tmp_path, finished):
    with pytest.raises(ValueError, match="There is no run in .* does not exist"):
        run_folder.recount_run(tmp_path / "nothing")
    (finished / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="a part is missing"):
        run_folder.recount_run(finished)


def test_a_run_in_use_is_refused(finished):
    declared = schema_lib.MinSep(toy_run.NUM_ROUNDS, 3, 2)
    with ledger_lib.Ledger.open(finished / "private" / "ledger.sqlite", declared):
        with pytest.raises(ValueError, match="in use by another process"):
            run_folder.recount_run(finished)


def test_a_ledger_that_was_half_written_is_left_to_its_run(finished, tmp_path):
    path = finished / "private" / "ledger.sqlite"
    journal = path.with_name("ledger.sqlite-journal")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")  # Pages go to the file before the commit.
        connection.execute("BEGIN IMMEDIATE")
        for client in range(3000):
            connection.execute("INSERT INTO asked VALUES (6, ?)", (client,))
        killed = path.read_bytes(), journal.read_bytes()
        connection.execute("ROLLBACK")
    path.write_bytes(killed[0])
    journal.write_bytes(killed[1])
    with pytest.raises(ValueError, match="killed while it wrote the ledger: run tff-dpftrl report"):
        run_folder.recount_run(finished)
    assert (path.read_bytes(), journal.read_bytes()) == killed
    report.report(finished)  # It takes back what was half written.
    journal.touch()  # An empty one, which undoes nothing.
    journal.chmod(0o600)
    assert not _violated(finished)


_KINDS = {
    "tree": {
        "mechanism": "tree",
        "adaptive_clipping": True,
        "clipped_count_stddev": 1.0,
        "restart_warmup": 2,
        "restart_every": 2,
    },
    "bandmf": {"mechanism": "bandmf", "min_sep": 2},
    "target": {"mechanism": "bisr", "noise_multiplier": None, "target_epsilon": 30.0},
    "identity": {"mechanism": "identity", "secagg_bits": 16, "iterate_averaging": 0.5},
    "none": {"mechanism": "none", "noise_multiplier": None},
    "simulated": {
        "mechanism": "bandtoep",
        "simulate_report_goal": 50,
        "simulate_population": 5000,
    },
    "budget": {"mechanism": "lambda-cgd", "max_epsilon": 25.0},
    "accuracy": {"mechanism": "tree", "stop_at_accuracy": 1e-4},
    "dp-fedavg": {"algorithm": "dp-fedavg", "min_sep": None},
    "cyclic": {"sampling": "cyclic", "mechanism": "bandtoep", "bands": 2},
    "cyclic, simulated": {
        "sampling": "cyclic",
        "mechanism": "bandmf",
        "noise_multiplier": None,
        "target_epsilon": 9.0,
        "simulate_report_goal": 50,
        "simulate_population": 5000,
    },
    "bins": {
        "sampling": "bins",
        "mechanism": "lambda-cgd",
        "min_sep": None,
        "clients_per_round": 20,
    },
    "b-min-sep": {"sampling": "b-min-sep", "mechanism": "bifr"},
    "seeded": {"deterministic_noise_seed": 7},
}
_SAMPLED = ("dp-fedavg", "cyclic", "cyclic, simulated", "bins", "b-min-sep")


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_runs_of_every_kind_are_consistent(corpus, tmp_path, kind):
    folder = tmp_path / "run"
    options = {"buffers": None, **_SECRET, **_KINDS[kind]}
    from tff_dpftrl.training import run

    run.train(toy_run.config(corpus, **options), folder, progress=lambda line: None)
    found = _outcomes(folder)
    assert set(found.values()) <= {"consistent", "not tested"}
    assert found[_EPSILON] == found[_LEDGER] == found[_CHECKPOINT] == "consistent"
    assert found.get(_SAMPLING) == (None if kind not in _SAMPLED else "consistent")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": "example", "group_size": 2, "compute_budget": 8, "noise_multiplier": 0.7},
        {
            "sampling": "passes",
            "group_size": 2,
            "cohort_size": 8,
            "noise_multiplier": 0.7,
            "delta": 1e-6,
        },
    ],
    ids=["users", "examples", "passes"],
)
def test_fine_tuning_is_consistent(toy, tmp_path, options):
    folder = tmp_path / "run"
    config = toy_finetuning.config(toy, **options, **_SECRET)
    finetuning_run.finetune(config, folder, progress=lambda line: None)
    found = _outcomes(folder)
    assert set(found.values()) <= {"consistent", "not tested"}
    assert found[_EPSILON] == found[_LEDGER] == found[_CHECKPOINT] == "consistent"
    assert found.get(_SAMPLING) == (None if options.get("sampling") == "passes" else "consistent")
    _edit(folder / "privacy_statement.json", epsilon=0.1)
    assert _EPSILON in _violated(folder)


@pytest.mark.slow
def test_a_run_of_somebodys_own_model_is_consistent(tmp_path):
    rows = {f"user {i}": np.full([1 + i % 3, 2], i, np.float32) for i in range(40)}
    users = example_sampling.Users(tuple(rows), np.array(list(map(len, rows.values()))))
    made = plan_lib.make_plan(
        users,
        sampling="user",
        group_size=2,
        expected_units=10,
        num_steps=3,
        delta=1e-4,
        noise_multiplier=1.5,
    )
    custom_run.finetune(
        tmp_path / "run",
        custom_run.Model(
            lambda weights, batch: tf.reduce_sum(tf.square(weights[0] - batch), axis=1),
            [np.zeros(2, np.float32)],
        ),
        custom_run.Examples(
            users, lambda examples: np.stack([rows[user][example] for user, example in examples])
        ),
        made,
        custom_run.Steps(clip_norm=1.0, optimizer=lambda: tf.keras.optimizers.SGD(0.1)),
        custom_run.Evaluation(lambda weights: {"error": 0.0}, every=2),
        progress=lambda line: None,
    )
    found = _outcomes(tmp_path / "run")
    assert set(found.values()) <= {"consistent", "not tested"}
    assert found[_EPSILON] == found[_CHECKPOINT] == found[_MODEL] == found[_FILES] == "consistent"
    assert found[_NOISE] == "not tested"
