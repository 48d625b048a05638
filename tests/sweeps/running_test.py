"""Tests of tff_dpftrl.sweeps.running."""

import sys

import pytest

from tff_dpftrl.sweeps import folder as folder_lib
from tff_dpftrl.sweeps import running


@pytest.mark.parametrize(
    "log, reason",
    [
        (
            "tff-dpftrl train: warning: slow\ntff-dpftrl train: InternalError: a defect\n"
            "Every committed round is kept. Go on with:\n  tff-dpftrl train --resume\n",
            "tff-dpftrl train: InternalError: a defect",
        ),
        ("Killed\n", "Killed"),
        ("", "ended with status 70"),
    ],
)
def test_the_reason_of_a_failure_is_the_error_and_not_the_advice(tmp_path, log, reason):
    (tmp_path / folder_lib.LOG).write_text(log)
    assert running._why(tmp_path, 70) == reason


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
