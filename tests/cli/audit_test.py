"""Tests of `tff-dpftrl audit`."""

import dataclasses
import json
import pathlib
import re
import shutil

import pytest

from tests.training import toy_run
from tff_dpftrl.accounting import privacy_statement, statement, statement_text
from tff_dpftrl.auditing import audit_report, claim
from tff_dpftrl.auditing.recount import run_folder
from tff_dpftrl.cli import audit, main
from tff_dpftrl.participation import ledger_file
from tff_dpftrl.runs import privacy, statement_subject

corpus = toy_run.corpus
trained = toy_run.trained


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, whose ε can be forged."""
    return pathlib.Path(shutil.copytree(trained.output, tmp_path / "run"))


def _edit(folder):
    path = folder / "privacy_statement.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"epsilon": 0.01}))


def _forge(folder):
    """Claims another ε, with the digests that whoever has the folder can make of it."""
    forged = statement_subject.bound(folder, dataclasses.replace(_stated(folder), epsilon=0.01))
    (folder / "privacy_statement.json").write_text(statement_text.to_json(forged) + "\n")


def test_a_run_that_keeps_its_promise(run, capsys):
    assert main.main(["audit", "--run", str(run)]) == 0
    printed = capsys.readouterr()
    assert re.match(r"consistent with the claim \(\d+ of 20 tests could be done\)\n", printed.out)
    assert "consistent   ledger: one history of rounds: 6 rounds are committed" in printed.out
    assert "statement: ε" in printed.err.splitlines()  # What is being done, as it is done.
    assert re.search(r" files, as bytes, decimal or hexadecimal\.\n", printed.out)
    assert printed.out.splitlines()[-1] == (
        "This believes the records. To test the mechanism itself, which clips and draws noise: "
        "tff-dpftrl audit --config FILE, with the run's options."
    )
    shown = re.search(r"ε = (\S+) at δ = (\S+) is what the records come to", printed.out)
    stated = _stated(run)
    assert stated.epsilon <= float(shown[1]) and stated.delta <= float(shown[2])


def test_a_run_that_is_handed_over_has_a_verdict_and_a_status_of_its_own(run, capsys):
    shutil.rmtree(run / "private")
    assert main.main(["audit", "--run", str(run)]) == audit.INCOMPLETE == 4
    printed = capsys.readouterr().out
    assert printed.startswith("nothing contradicts the claim, which cannot be derived without")
    assert "tests could be done)\n" in printed
    _forge(run)
    assert main.main(["audit", "--run", str(run)]) == audit.VIOLATED


@pytest.mark.parametrize("change", [_edit, _forge])
def test_a_violation_has_a_status_of_its_own(run, capsys, change):
    change(run)
    assert main.main(["audit", "--run", str(run)]) == audit.VIOLATED == 3
    printed = capsys.readouterr().out
    assert printed.startswith("VIOLATED") and "ε is 0.01 in the statement" in printed


def test_what_was_not_tested_at_all_is_no_success(run, monkeypatch, capsys):
    monkeypatch.setattr(
        run_folder,
        "recount_run",
        lambda folder, progress: audit_report.AuditReport(
            "run", claim.Claim(1.0, 1e-5), (), is_ours=True
        ),
    )
    assert main.main(["audit", "--run", str(run)]) == audit.INCOMPLETE
    assert capsys.readouterr().out.startswith("nothing was tested (0 of 0 tests could be done)")


def test_json_and_files(run, tmp_path, capsys):
    folder = tmp_path / "new" / "audit"
    command = ["audit", "--run", str(run), "--format", "json", "--output", str(folder)]
    assert main.main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "consistent with the claim"
    kept = audit_report.AuditReport.from_json((folder / "audit.json").read_text())
    assert json.loads(kept.to_json()) == printed
    assert {file.name for file in folder.iterdir()} == {"audit.md", "audit.json"}


def _stated(folder):
    return statement.PrivacyStatement.from_json((folder / "privacy_statement.json").read_text())


def _assert_bound(folder):
    """Asserts that a statement has the digests, keyed too, of what it says now."""
    values = json.loads((folder / "privacy_statement.json").read_text())
    made = statement_subject.digests(folder, values)
    assert set(made) == set(privacy_statement.DIGESTS)
    assert {name: values["subject"][name] for name in made} == made


def test_it_enters_the_statement_and_leaves_the_claim(run):
    before = _stated(run)
    for _ in range(2):  # The second time nothing is new.
        assert main.main(["audit", "--run", str(run), "--state"]) == 0
    after = _stated(run)
    assert set(after.diff(before)) == {"audits", "subject"}
    # It is about the same, of the same date: its digests alone are others.
    assert {
        name
        for name in after.subject.keys() | before.subject.keys()
        if after.subject.get(name) != before.subject.get(name)
    } == set(privacy_statement.DIGESTS)
    _assert_bound(run)
    (entry,) = after.audits
    assert entry.startswith("audited: recount of the run run: consistent with the claim")
    assert entry in (run / "privacy_statement.md").read_text()


def test_a_refuted_claim_says_so_in_its_statement(run):
    _forge(run)
    copy = run / "hugging_face" / "privacy_statement.json"
    copy.parent.mkdir()
    copy.write_text((run / copy.name).read_text())
    assert "no guarantee covers it" not in (run / "README.md").read_text()
    assert main.main(["audit", "--run", str(run), "--state"]) == audit.VIOLATED
    assert "committed round; no guarantee covers it" in (run / "README.md").read_text()
    for name in ("privacy_statement.json", "privacy_statement.md"):  # Beside the weights, too.
        assert (copy.parent / name).read_text() == (run / name).read_text()
    assert _stated(run).epsilon == 0.01  # An audit does not mend it.
    _assert_bound(run)
    headline = (run / "privacy_statement.md").read_text().split("\n## ")[0]
    assert "Take nobody to be protected: an audit has found" in headline


def _damage(folder):
    (folder / "privacy_statement.json").write_text("{")


@pytest.mark.parametrize(
    "change, reason",
    [(_edit, "edited after it was written"), (_damage, "cannot be read")],
)
def test_nothing_is_added_to_a_statement_that_cannot_be_read(run, capsys, change, reason):
    change(run)
    before = {path: path.read_bytes() for path in run.glob("*.*") if path.is_file()}
    assert main.main(["audit", "--run", str(run), "--state"]) == audit.VIOLATED
    printed = capsys.readouterr()
    assert printed.out.startswith("VIOLATED")
    assert reason in printed.err.splitlines()[-1]
    assert {path: path.read_bytes() for path in run.glob("*.*") if path.is_file()} == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--run", "nowhere"], "There is no run in nowhere"),
        (["--run", "."], "There is no run in ."),
        (["--run", ".", "--trials", "10"], "--trials is for --config"),
        (["--run", ".", "--kind", "task"], "--kind is for --config"),
        (["--run", ".", "--error-rate", "0.1"], "--error-rate is for --config"),
        (["--config", "options.toml", "--state"], "--state is for --run"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--config", "wrong.toml"], "unknown option 'nois'"),
        (["--config", "own.toml"], "has to be given in Python"),
    ],
)
def test_what_cannot_be_audited_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.toml").write_text("noise_multiplier = 1.0")
    (tmp_path / "wrong.toml").write_text("nois = 1.0")
    (tmp_path / "own.toml").write_text("noise_multiplier = 1.0\nmodel = 'own'")
    assert main.main(["audit", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tff-dpftrl audit: ") and message in line


@pytest.mark.parametrize("arguments", [[], ["--run", ".", "--config", "options.toml"]])
def test_either_a_run_or_a_config_is_audited(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(["audit", *arguments])
    assert exit_info.value.code == 2
    assert "--config" in capsys.readouterr().err


_OPTIONS = """\
num_rounds = 12
clients_per_round = 20
mechanism = "{}"
"""


def test_a_config_that_promises_nothing(tmp_path, capsys):
    file = tmp_path / "options.toml"
    file.write_text(_OPTIONS.format("none"))
    assert main.main(["audit", "--config", str(file), "--clients", "100"]) == 2
    assert "config promises nothing" in capsys.readouterr().err


def test_the_options_of_a_task_say_how_many_devices_there_are(tmp_path, capsys, monkeypatch):
    file = tmp_path / "task.toml"
    file.write_text(_OPTIONS.format("none") + 'population = "tests"\nnum_devices = 300')
    plan = privacy.DpFtrl.plan
    asked = []
    monkeypatch.setattr(
        privacy.DpFtrl,
        "plan",
        lambda self, clients, size: asked.append(clients) or plan(self, clients, size),
    )
    assert main.main(["audit", "--config", str(file)]) == 2
    assert "config promises nothing" in capsys.readouterr().err
    assert asked == [300]


_TASK = 'population = "tests"\nnum_devices = 200\n'


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", _TASK], ids=["training", "task"])
def test_a_config_that_keeps_its_promise(tmp_path, capsys, more):
    file, folder = tmp_path / "options.toml", tmp_path / "audit"
    file.write_text(more + _OPTIONS.format("identity") + "noise_multiplier = 2.0")
    flags = [
        *([] if more else ["--clients", "200"]),
        "--trials",
        "500",
        "--error-rate",
        "0.01",
        "--format",
        "json",
    ]
    command = ["audit", "--config", str(file), "--output", str(folder), *flags]
    assert main.main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "consistent with the claim"
    assert printed["confidence"] == pytest.approx(0.99)
    names = {"audit.md", "audit.json", "trade_off.png"}
    assert {file.name for file in folder.iterdir()} == names


def test_a_run_in_use_is_one_line(run, capsys):
    ledger = ledger_file.connect(run / "private" / "ledger.sqlite", exclusive=True)
    try:
        assert main.main(["audit", "--run", str(run)]) == 2
    finally:
        ledger.close()
    assert "is in use by another process" in capsys.readouterr().err


def test_the_verdict_is_told_where_its_files_cannot_be_written(run, capsys):
    assert main.main(["audit", "--run", str(run), "--output", str(run / "config.json")]) == 1
    assert capsys.readouterr().out.startswith("consistent with the claim")


def test_no_statement_can_be_added_to(run, capsys):
    (run / "privacy_statement.json").unlink()
    assert main.main(["audit", "--run", str(run), "--state"]) == 2
    printed = capsys.readouterr()
    assert "run tff-dpftrl report on the folder first" in printed.err and not printed.out
