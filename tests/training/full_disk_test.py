"""What a run is left with when the disk fills up, at every page, and how it goes on."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests import small_disk
from tests.training import toy_run
from tff_dpftrl.cli import main
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import committed_rounds, manifest

disk = small_disk.disk
corpus = toy_run.corpus

_SCHEMA = schema_lib.MinSep(num_rounds=3, min_sep=2, max_participations=2)


def _state(rounds_done):
    noise = np.full(700 * (rounds_done + 1), rounds_done, np.float64)  # More room every round.
    return {"model": np.full(700, rounds_done + 0.5, np.float32), "aggregator": [noise]}


def _commit_rounds(folder, confirmed):
    """Begins and commits the rounds that are left, as a run does."""
    folder = folder / "private"
    if committed_rounds.CommittedRounds.exist(folder):
        rounds = committed_rounds.CommittedRounds.open(folder, _SCHEMA)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        rounds = committed_rounds.CommittedRounds.create(folder, _SCHEMA, _state(0), {})
    with rounds:
        snapshot, _ = rounds.restore()
        done = rounds.rounds_done
        assert done - len(confirmed) in (0, 1)
        np.testing.assert_array_equal(snapshot.part("model")[0], _state(done)["model"])
        for t in range(done, _SCHEMA.num_rounds):
            rounds.begin(t, [f"user {t % 2}, {number}" for number in range(20)])
            rounds.commit(t, _state(t + 1), {"round": t + 1})
            confirmed.append(t)
        return rounds.observed()


def test_rounds_are_whole_on_a_disk_that_fills_up(disk):
    confirmed, observed, failures = [], set(), set()
    for folder, failure in small_disk.at_every_page(
        disk, lambda path: _commit_rounds(path, confirmed)
    ):
        if failure is not None:
            assert "\n" not in str(failure)
            failures.add(len(confirmed))
        observed.add(str(_commit_rounds(folder, confirmed)))
        assert len(list((folder / "private" / "checkpoints").iterdir())) == 1
        assert not list(folder.rglob(".*"))
        confirmed.clear()
    assert len(failures) >= 3 and len(observed) == 1


_MADE = ("model.npz", "best_model.npz", "held_out.json", "vocabulary.json")


def _content(output):
    """Returns what is the same in every run; the date and the key of a run are its own."""
    statement = json.loads((output / "privacy_statement.json").read_text())
    subject = statement.pop("subject")
    text = (output / "privacy_statement.md").read_text()
    for name, value in subject.items():
        text = text.replace(f"- {name}: {value}\n", "")
    digest = subject["model_sha256"]
    made = [(output / name).read_bytes() for name in _MADE]
    return made, text, toy_run.rows(output), statement, digest


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mechanism": "tree", "buffers": None}])
def test_a_run_goes_on_to_the_same_bits_from_wherever_the_disk_was_full(
    disk, corpus, tmp_path, capsys, options
):
    config = toy_run.config(corpus, num_rounds=3, eval_every=2, **options)
    flags = ["--config", str(tmp_path / "config.toml")]
    lines = [f"{k} = {json.dumps(v)}" for k, v in config.to_dict().items() if v is not None]
    (tmp_path / "config.toml").write_text("\n".join(lines))

    def command(folder, *more):
        return main.main(["train", *more, "--output", str(folder / "run")])

    assert command(tmp_path, *flags) == 0
    expected = _content(tmp_path / "run")
    capsys.readouterr()

    def train(folder):
        if command(folder, *flags):
            raise OSError(capsys.readouterr().err)

    begun = failures = 0
    for folder, failure in small_disk.at_every_page(disk, train):
        if failure is not None:
            failures += 1
            *_, said = [line for line in str(failure).splitlines() if "tff-dpftrl train: " in line]
            assert "No space left" in said or "disk is full" in said or "I/O error" in said
            assert "Traceback" not in str(failure)
            assert not list((folder / "run").glob(".*.unfinished"))
            is_run = manifest.exists(folder / "run")
            begun += is_run
            assert command(folder, *(["--resume"] if is_run else flags)) == 0
            capsys.readouterr()
        assert _content(folder / "run") == expected
        shutil.rmtree(folder)
    assert 5 < begun < failures


@pytest.mark.slow
def test_a_run_on_a_read_only_disk_says_so_and_goes_on_later(disk, corpus, tmp_path, capsys):
    config = toy_run.config(corpus, num_rounds=1, eval_every=1)
    lines = [f"{k} = {json.dumps(v)}" for k, v in config.to_dict().items() if v is not None]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    new = ["train", "--config", str(tmp_path / "config.toml"), "--output", str(disk.folder / "run")]
    with disk.read_only():
        assert main.main(new) in (1, 2)
        said = capsys.readouterr().err
        assert "Traceback" not in said and ("Read-only" in said or "not writable" in said)
    assert main.main(new) == 0
    resume = ["train", "--resume", "--output", str(disk.folder / "run")]
    before = _content(disk.folder / "run")
    with disk.read_only():
        assert main.main(resume) in (1, 2)
        said = capsys.readouterr().err
        assert "Traceback" not in said and "read" in said.lower() and "only" in said
    assert main.main(resume) == 0
    assert _content(disk.folder / "run") == before
