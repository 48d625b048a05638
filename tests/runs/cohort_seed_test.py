"""Tests of the secret seed of sampled cohorts."""

import stat

import pytest

from tff_dpftrl.runs import cohort_seed


def test_the_seed_is_long_secret_and_read_again(tmp_path):
    seed = cohort_seed.create(tmp_path)
    assert cohort_seed.read(tmp_path) == seed != cohort_seed.create(tmp_path)
    assert seed.bit_length() > 200
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_the_seed_there_is_no_going_on(tmp_path):
    with pytest.raises(ValueError, match="cannot go on with the same cohorts"):
        cohort_seed.read(tmp_path)
    cohort_seed.create(tmp_path)
    (tmp_path / "cohort_seed").write_text("not a number")
    with pytest.raises(ValueError, match="cannot go on with the same cohorts"):
        cohort_seed.read(tmp_path)
