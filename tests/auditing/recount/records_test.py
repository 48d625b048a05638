"""Tests of tff_dpftrl.auditing.recount.records."""

import sys

import pytest

from tff_dpftrl.auditing.recount import records


@pytest.mark.parametrize("part", ["2", "2,1.4", "2,1.48"])
def test_a_row_that_a_crash_cut_short_is_left_out(tmp_path, part):
    path = tmp_path / "metrics.csv"
    path.write_text("round,epsilon\n1,1.25\n" + part)
    assert records.read_rows(path, []) == [{"round": "1", "epsilon": "1.25"}]
    path.write_text("round,epsilon\n1,1.25\n2,1.48\n")
    assert [row["round"] for row in records.read_rows(path, [])] == ["1", "2"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
