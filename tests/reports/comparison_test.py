"""Tests of `reports.comparison`."""

import json

import pytest

from tests.reports import made_up
from tff_dpftrl import validation
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.reports import comparison


def _compared(tmp_path, *claims):
    claims = claims or (made_up.stated(), made_up.stated())
    folders = [
        made_up.write_run(tmp_path / f"run{i}", claim, learning_rate=i)
        for i, claim in enumerate(claims)
    ]
    return comparison.of(folders)


def test_it_names_options_that_differ_and_no_others(tmp_path):
    found = _compared(tmp_path)
    assert found.labels == ["run0", "run1"]
    assert found.options() == {"learning_rate": ["0", "1"]}
    assert found.facts()["ε"][0] == found.facts()["ε"][1]
    assert found.accuracies()[-1] == ["4", "20.00%", "20.00%"]
    with_cache = found.facts()["top-1 accuracy with earlier text, held-out users"]
    assert with_cache == ["44.40%", "44.40%"]
    assert found.facts()["turns of one, on record or reported by devices"] == ["2", "2"]
    (only,) = found.warnings()  # They compare, but for what choosing among them costs.
    assert "choosing among runs" in only


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"unit": "device"}, "one user in run0, one device in run1"),
        ({"delta": 1e-7}, "δ is 1e-05 in run0, 1e-07 in run1"),
        ({"noise_multiplier": 0.0}, "There is no guarantee for run1."),
        ({"data": "other.csv"}, "Accuracy and loss do not compare"),
    ],
)
def test_it_says_what_does_not_compare(other, says, tmp_path):
    found = _compared(tmp_path, made_up.stated(), made_up.stated(**other))
    assert says in " ".join(found.warnings())
    assert says.split()[-1] in found.to_html()


def test_what_must_stand_beside_epsilon_stands_there(tmp_path):
    refuted = made_up.stated().with_audit("audited: VIOLATED", is_refuted=True)
    told = _compared(tmp_path, made_up.stated(), refuted).warnings()
    (beside,) = [line for line in told if line.startswith("Beside ε of")]
    assert "audited: VIOLATED" in beside


def test_other_neighbours_do_not_compare(tmp_path):
    stated = json.loads(statement_text.to_json(made_up.stated()))
    other = stated | {"adjacency": "add or remove one"}
    claim = type(made_up.stated()).from_json(json.dumps(other))
    assert "neighbouring data sets" in _compared(tmp_path, made_up.stated(), claim).warnings()[0]


def test_a_program_reads_curves_and_no_private_figures(tmp_path):
    found = _compared(tmp_path).as_dict()
    text = json.dumps(found, allow_nan=False)
    assert found["runs"][0]["curves"]["eval_loss"] == [(1, 4), (2, 3), (3, 2), (4, 1)]
    assert found["runs"][1]["observed"]["max_participations"] == 2
    for secret in (made_up.EXACT_LOSS[:8], made_up.EXACT_TOP1[:8], "1618", "/home/secret"):
        assert secret not in text and secret not in _compared(tmp_path / "html").to_html()
        (tmp_path / "html").rename(tmp_path / secret.replace("/", "_"))


def test_runs_of_one_name_have_longer_labels(tmp_path):
    folders = [made_up.write_run(tmp_path / name / "run") for name in "ab"]
    assert comparison.of(folders).labels == ["a/run", "b/run"]


def test_what_cannot_be_compared_is_refused_in_a_line(tmp_path):
    run = made_up.write_run(tmp_path / "run")
    begun = made_up.write_run(tmp_path / "begun")
    (begun / "privacy_statement.json").unlink()
    sweep, public = tmp_path / "sweep", tmp_path / "public"
    for folder, name in ((sweep, "sweep.json"), (public, "pretraining.json")):
        folder.mkdir()
        (folder / name).write_text("{}")
    for folders, says in (
        ([run], "two runs or more"),
        ([run, tmp_path / "sweep" / ".." / "run"], "is named twice"),
        ([run, begun], "has no statement yet"),
        ([run, sweep], "is a sweep"),
        ([run, public], "promises nothing"),
    ):
        with pytest.raises(validation.UsageError, match=says) as caught:
            comparison.of(folders)
        assert "\n" not in str(caught.value)
