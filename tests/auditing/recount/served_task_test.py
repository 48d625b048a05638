"""Tests of the recount of served tasks, without server and store: untouched ones, and forged."""

import csv
import dataclasses
import json
import shutil

import pytest

from tests.reports import listed_files
from tests.runtime.plans import small_tasks
from tests.runtime.tasks import tiny_task
from tff_dpftrl import version
from tff_dpftrl.accounting import privacy_statement, statement_sentences, statement_text
from tff_dpftrl.auditing.recount import record_checks, run_folder
from tff_dpftrl.cli import main
from tff_dpftrl.runs import statement_subject
from tff_dpftrl.runtime.plans import predicates, tensor_values
from tff_dpftrl.runtime.store import digests, sql
from tff_dpftrl.runtime.tasks import making, task_folder, task_report, task_state

_SENTENCES, _EPSILON = "statement: every sentence", "statement: ε"
_CHAIN, _STATE, _SEED = (
    "store: one chain of rounds",
    "state: numbers and rounds",
    "seed of the noise",
)
_REPORTS, _CHARGED = "participation: reports of the devices", "statement: participation"
_NOISE = "metrics: noise of the released rounds"
_METRICS, _MODEL = "metrics: rows of the store", "released model and state"


@pytest.fixture(scope="module", autouse=True)
def untested_plans():
    """Leaves out the test of the plans, and next to nothing to chance.

    The noise of the tasks has no known seed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicates, "check_task", lambda *_: {})
        patch.setattr(record_checks, "_NOISE_ERROR_RATE", 1e-9)
        yield


def _made(parent, **options):
    """Makes a task, runs two rounds, skips one, and writes its report with records."""
    tiny_task.write_corpora(parent)
    config = tiny_task.config(parent, **options)
    making.make(config, parent / "task", small_tasks.KEY, progress=lambda line: None)
    folder = task_folder.read(parent / "task")
    is_secure = options.get("secure_aggregation", False)
    run = tiny_task.run_secure_round if is_secure else tiny_task.run_round
    with sql.SqlStore(parent / "store") as store:
        rounds = tiny_task.begun(folder, store)
        run(rounds)
        rounds.add(
            rounds.task.served.task.server_step.skip(rounds.commit.model, rounds.commit.state)
        )
        run(rounds)
    report = ["task", "report", str(parent / "task"), "--store", str(parent / "store")]
    assert main.main([*report, "--records", "--no-held-out", "--output", str(parent / "r")]) == 0
    return parent / "r"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    parent = tmp_path_factory.mktemp("task")
    return _made(parent, mechanism="blt", noise_multiplier=3.0, num_rounds=8, max_epsilon=2.5)


@pytest.fixture
def report(untouched, tmp_path):
    return shutil.copytree(untouched, tmp_path / "report")


def _violated(folder):
    found = run_folder.recount_run(folder)
    return {finding.test for finding in found.findings if finding.outcome == "violated"}


def test_an_untouched_report_is_consistent(untouched, capsys):
    assert main.main(["audit", "--run", str(untouched)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("consistent with the claim (21 of 21 tests could be done)")
    stated = json.loads((untouched / "privacy_statement.json").read_text())
    charged = stated["parameters"]["num_rounds_charged"]
    assert 3 < charged < 8  # The budget decides.
    assert f"in {charged} rounds, of which 3 are done" in shown
    listed_files.check(untouched)


def test_pages_of_a_report_are_among_what_is_looked_through(report, capsys):
    for flags in ((), ("--private",)):
        assert main.main(["report", str(report), "--html", *flags]) == 0
    assert "Task served to devices" in capsys.readouterr().out
    for name in ("report.html", "README.md"):
        text = (report / name).read_text()
        assert "Do not publish it." not in text and "for one device" in text
    assert "Do not publish it." in (report / "private" / "report.html").read_text()
    assert _violated(report) == set()
    *_, last = csv.DictReader((report / "private" / "metrics.csv").read_text().splitlines())
    (report / "report.html").write_text(last["client_work/train/loss"])
    (found,) = _violated(report)
    assert "exact figures" in found


def test_without_private_the_rest_is_recounted(report, capsys):
    shutil.rmtree(report / "private")
    assert main.main(["audit", "--run", str(report)]) == 4
    shown = capsys.readouterr().out
    assert "cannot be derived without private/ (rows of the store" in shown
    assert "consistent   statement: every sentence" in shown
    assert "violated" not in shown


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"mechanism": "identity", "adaptive_clipping": True, "iterate_averaging": 0.9},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "mechanism": "tree",
                "secagg_bits": 20,
                "secure_aggregation": "honest-but-curious",
                "least_group": 3,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"noise_multiplier": 0.0}, marks=pytest.mark.slow),
    ],
    ids=["adaptive and averaged", "secure", "without noise"],
)
def test_other_tasks_are_consistent(tmp_path, options):
    found = run_folder.recount_run(_made(tmp_path, **options))
    assert not found.is_violated, found.to_markdown()


def _edited(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=1) + "\n")


def _forge(folder, **changes):
    """Changes the statement in both files alike."""
    path = folder / "privacy_statement.json"

    def change(values):
        for name, value in changes.items():
            part, _, last = name.rpartition("__")
            (values[part] if part else values)[last] = value

        del values["subject"][privacy_statement.DIGEST]

    _edited(path, change)
    forged = privacy_statement.PrivacyStatement.from_json(path.read_text())
    forged = statement_subject.bound(folder, forged)
    path.write_text(statement_text.to_json(forged))
    path.with_suffix(".md").write_text(statement_text.markdown(forged))


def _rows(folder, change):
    """Changes rows of the store, and makes all digests again, as whoever has the store can."""

    def again(values):
        head, rounds = values["head"], values["rounds"]
        change(head, rounds, folder / "private")
        known = digests.content_digests(
            (folder / "private" / "model").read_bytes(), (folder / "private" / "state").read_bytes()
        )
        rounds[-1] |= known
        previous = head["first_digest"]
        for row in rounds:
            row["digest"] = previous = digests.round_digest(row, previous)
        last = {name: rounds[-1][name] for name in ("epoch", "metrics", "digest")}
        head.update(known | last | {"rounds_done": len(rounds)})

    _edited(folder / "private" / "rows.json", again)


def _of_metrics(index, **changes):
    def change(head, rounds, private):
        del head, private
        metrics = json.loads(rounds[index]["metrics"])
        rounds[index]["metrics"] = json.dumps(metrics | changes)

    return lambda folder: _rows(folder, change)


def _of_state(change):
    def changed(head, rounds, private):
        del head, rounds
        terms = task_folder.read(private.parent / "task")
        leaves = terms.server.prepare.inputs
        state = task_state.TaskState.from_bytes(
            (private / "state").read_bytes(), terms.terms.digest()
        )
        arrays = tensor_values.from_bytes(state.tensors, leaves)
        tensors = {leaf.label: array.copy() for leaf, array in zip(leaves, arrays, strict=True)}
        change(tensors)
        state = dataclasses.replace(state, tensors=tensor_values.to_bytes([*tensors.values()]))
        (private / "state").write_bytes(state.to_bytes())

    return lambda folder: _rows(folder, changed)


def _known_seed(tensors):
    tensors["aggregator/seed"][:] = [0] * (tensors["aggregator/seed"].size - 1) + [7]


def _other_weights(tensors):
    tensors["global_model_weights/trainable/0"] += 1.0


def _less_noise(tensors):
    tensors["aggregator/buffer"] *= 0.5


def _earlier_round(tensors):
    tensors["aggregator/round_index"] -= 1


def _half_epsilon(folder):
    stated = json.loads((folder / "privacy_statement.json").read_text())
    _forge(folder, epsilon=stated["epsilon"] / 2)


def _fewer_charged(folder):
    stated = json.loads((folder / "privacy_statement.json").read_text())
    _forge(
        folder, parameters__num_rounds_charged=3, accounted=stated["accounted"] | {"num_rounds": 3}
    )


def _lost_round(folder):
    _edited(folder / "private" / "rows.json", lambda values: values["rounds"].pop(1))


def _changed_byte(folder):
    path = folder / "private" / "state"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _other_row(folder):
    (row,) = json.loads((folder / "private" / "rows.json").read_text())["rounds"][2:]
    loss = str(json.loads(row["metrics"])["client_work/train/loss"])
    path = folder / "private" / "metrics.csv"
    assert loss in path.read_text()
    path.write_text(path.read_text().replace(loss, "0.5"))


def _less_noise_in_the_last_round(folder):
    _of_metrics(2, **{"aggregator/noise_stddev": 2.9})(folder)
    path = folder / "private" / "metrics.csv"
    *before, last = path.read_text().splitlines()
    assert ",1.0,3.0," in last
    path.write_text("\n".join([*before, last.replace(",1.0,3.0,", ",1.0,2.9,"), ""]))


def _reported_elsewhere(folder):
    _forge(folder, observed={"num_rounds": 3, "min_sep": None, "max_participations": 9})


@pytest.mark.parametrize(
    "plant, found",
    [
        (_half_epsilon, {_EPSILON}),
        (lambda folder: _forge(folder, parameters__contradicting_reports=3), {_SENTENCES}),
        (_less_noise_in_the_last_round, {_NOISE}),
        (_fewer_charged, {_CHARGED, "statement: sensitivity"}),
        (_lost_round, {_CHAIN, _METRICS, _REPORTS}),
        (_changed_byte, {_CHAIN}),
        (_of_metrics(-1, **{"participation/max_participations": 7}), {_REPORTS, _METRICS}),
        (_of_metrics(1, skipped=False), {_REPORTS, _METRICS}),
        (_other_row, {_METRICS}),
        (_of_state(_known_seed), {_SEED}),
        (_of_state(_other_weights), {_MODEL}),
        (_of_state(_less_noise), {"noise in the state"}),
        (_of_state(_earlier_round), {_STATE}),
        (_reported_elsewhere, {_CHARGED}),
        (_of_metrics(2, **{"aggregator/noise_stddev": 2.9}), {_METRICS}),
        (lambda folder: (folder / "private" / "state").chmod(0o644), {"permissions of private/"}),
        (lambda folder: (folder / "notes.txt").write_text("x"), {"files: missing or unknown"}),
        (
            lambda folder: (folder / "other_tasks.json").write_text('{"another": 0.5}'),
            {_SENTENCES},
        ),
    ],
)
def test_planted_faults_are_found_by_name(report, plant, found):
    plant(report)
    named = _violated(report)
    assert found & named and named <= {*found, _SENTENCES, _CHARGED}, named
    assert main.main(["audit", "--run", str(report)]) == 3


@pytest.mark.parametrize("has_records", [True, False])
@pytest.mark.parametrize(
    "entry, value",
    [
        ("setting", "Nobody has to be trusted."),
        ("adjacency", "Add or remove: neighbouring data sets differ in all data of one user."),
        ("covered", ["Everything."]),
        ("not_covered", []),
        ("assumptions", [statement_sentences.REPORTED_BY_DEVICES]),
        ("caveats", []),
        ("headline_caveats", ["An auditor has approved of it."]),
        ("parameters__data", "public text"),
        ("parameters__secure_aggregation", "active-server"),
    ],
)
def test_a_forged_sentence_is_found_though_both_files_say_it(report, entry, value, has_records):
    if not has_records:
        shutil.rmtree(report / "private")
    _forge(report, **{entry: value})
    assert _SENTENCES in _violated(report)


def test_a_task_that_was_changed_after_it_was_signed_is_refused(report, capsys):
    _edited(report / "task" / "terms.json", lambda values: values.update(noise_multiplier=6.0))
    assert main.main(["audit", "--run", str(report)]) == 2
    assert "signature is not valid" in capsys.readouterr().err


def test_a_report_without_records_says_what_to_do(report, capsys):
    shutil.rmtree(report / "task")
    assert main.main(["audit", "--run", str(report)]) == 2
    assert "task report --records" in " ".join(capsys.readouterr().err.split())


def test_an_evaluation_promises_nothing_to_audit(untouched, tmp_path):
    task = task_folder.read(untouched / "task")
    evaluates = dataclasses.replace(
        task, terms=dataclasses.replace(task.terms, kind="evaluation", model_of="x")
    )
    with sql.SqlStore(untouched.parent / "store") as store:
        rows = store.rows("tests", task.name)
        with pytest.raises(ValueError, match="report it without records"):
            task_report.write(evaluates, store, tmp_path / "r", rows_of_store=rows)


def test_the_outcome_is_added_to_the_statement(report):
    assert main.main(["audit", "--run", str(report), "--state"]) == 0
    assert (
        f"21 of 21 tests could be done); tff_dpftrl {version.__version__}"
        in (report / "privacy_statement.md").read_text()
    )
    assert main.main(["audit", "--run", str(report)]) == 0
