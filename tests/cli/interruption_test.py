"""Tests that Ctrl-C and SIGTERM end the command at any moment, with one message."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests.cli import toy_corpus
from tff_dpftrl.cli import interruption

_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
_SMALL = (
    "--vocabulary-size 10 --embedding-size 4 --lstm-size 5 --sequence-length 6 --batch-size 4 "
    "--clients-per-round 3 --rounds 30 --min-sep 2 --mechanism tree --noise-multiplier 1"
).split()


def _start(output: pathlib.Path, *arguments: str, python=()) -> subprocess.Popen:
    # As a user has it: importing TFF, as other tests do, sets TensorFlow's level of logging.
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.Popen(
        [sys.executable, *python, "-m", "tff_dpftrl.cli.main", "train"]
        + [*arguments, "--output", str(output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture
def corpus(tmp_path):
    """Flags for forty users and a vocabulary."""
    toy_corpus.write(tmp_path, lengths=(4, 6, 9))
    data, words = tmp_path / "users.jsonl", tmp_path / "words.txt"
    return ["--data", str(data), "--vocabulary", str(words)]


def _check_moment(corpus, output, module, signum):
    """Sends the signal once `module` has been imported."""
    child = _start(output, *_SMALL, *corpus, python=("-X", "importtime"))
    seen = False
    said = []
    for line in child.stderr:
        if not line.startswith("import time:"):
            said.append(line)
        elif not seen and line.split("|")[-1].strip() == module:
            seen = True
            child.send_signal(signum)
    assert seen, "".join(said)
    assert child.wait() == _STATUS[signum]
    # Besides "Reading the data ..." and the like.
    (message,) = [line for line in said if line.strip() and not line.endswith(" ...\n")]
    assert re.match(r"tff-dpftrl( train)?: interrupted\.", message) and "--resume" not in message
    assert not output.exists()


@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("tff_dpftrl.training", signal.SIGTERM),
        ("tensorflow.core.protobuf", signal.SIGINT),
        pytest.param("tff_dpftrl.training", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("tensorflow.core.protobuf", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_starting_up_ends_with_one_line(corpus, tmp_path, module, signum):
    _check_moment(corpus, tmp_path / "run", module, signum)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "tensorflow.python.pywrap_tensorflow",
        "tensorflow.python.framework.ops",
        "tensorflow.python.keras",
        "tensorflow",
    ],
)
def test_a_signal_while_tensorflow_is_imported_is_never_lost(corpus, tmp_path, module):
    for attempt in range(5):
        _check_moment(corpus, tmp_path / f"run{attempt}", module, signal.SIGINT)


@pytest.mark.slow
def test_a_signal_while_training_says_how_to_go_on_and_that_works(corpus, tmp_path):
    output = tmp_path / "a run"
    child = _start(output, *_SMALL, *corpus)
    for signum in _STATUS:
        said = ""
        while "round/s" not in said and child.poll() is None:  # Until the progress bar is there.
            said += child.stderr.readline()
        child.send_signal(signum)
        said += child.stderr.read()
        assert child.wait() == _STATUS[signum], said
        assert "Traceback" not in said
        assert f"tff-dpftrl train --resume --output '{output}'" in said
        assert f"tff-dpftrl report '{output}'" in said
        child = _start(output, "--resume")
    _, said = child.communicate()
    assert child.returncode == 0, said


def test_a_reason_ends_with_one_full_stop():
    stop = interruption.Interruption("tff-dpftrl")
    for reason in ("the disk is full", "the disk is full."):
        assert stop.message(reason) == "\ntff-dpftrl: the disk is full.\n"
