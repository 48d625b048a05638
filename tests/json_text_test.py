"""JSON of others: deep nesting is refused like any other mistake, and nobody forgets to."""

import json
import pathlib
import re

import pytest

from tff_dpftrl import json_text, validation

_PACKAGE = pathlib.Path(json_text.__file__).parent
# They read what this package has just written, by another process of it.
_OWN = {
    "data/docstrings.py",
    "runtime/plans/measured_run.py",
    "sweeps/cell_worker.py",
    "sweeps/population_check.py",
}
_COPIES = {
    "cli/audit.py",
    "cli/report.py",
    "cli/task.py",
    "finetuning/custom_run.py",
    "mechanisms/serialization.py",
    "numpy_noise/stream.py",
    "runs/statement_subject.py",
}


@pytest.mark.parametrize("value", [None, 1.5, "ß", [], {"a": [{}, [1, "]"]]}, ["[" * 200]])
def test_what_json_writes_is_read(value):
    text = json.dumps(value)
    assert json_text.parse(text) == value
    assert json_text.parse(text.encode()) == value


@pytest.mark.parametrize("levels", [100, 101, 900, 100_000])
@pytest.mark.parametrize("one", [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused_from_a_level_on(levels, one):
    text = one[0] * levels + "1" + one[1] * levels
    if levels == 100:
        json_text.parse(text)
        return
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match="nested more than 100 levels"):
            json_text.parse(given)


def test_many_brackets_side_by_side_are_no_nesting():
    assert len(json_text.parse("[" + "[]," * 10_000 + "{}]")) == 10_001


@pytest.mark.parametrize("text", ["", "{", "nul", b"\xff", "1" * 5000])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError):
        json_text.parse(text)


def test_all_json_of_others_is_read_here():
    parsers = {
        str(path.relative_to(_PACKAGE))
        for path in _PACKAGE.rglob("*.py")
        if re.search(r"\bjson\.loads?\(", path.read_text(encoding="utf-8"))
    }
    parsers -= {"json_text.py", "data/docstring_extraction.py"}  # The latter is a program alone.
    assert parsers == _OWN | _COPIES


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", None])
def test_a_file_that_holds_no_object_is_refused_by_name(content, tmp_path):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(validation.UsageError, match=r"a\.json.*Restore it\.$"):
        json_text.read_object(path)


def test_an_object_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"ε": 8}', encoding="utf-8-sig")
    assert json_text.read_object(tmp_path / "a.json") == {"ε": 8}


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": {"b": [1, 1e999]}}', "x.json: a b must be a finite number, got inf"),
        ('{"a": NaN}', "x.json: a must be a finite number, got nan"),
        ('{"a": -1' + "0" * 400 + "}", "x.json: a must be a finite number, got -1000"),
        (r'{"a": ["\ud800"]}', r"x.json: a must be a text that can be encoded, got '\\ud800'"),
        (r'{"\ud800": 1}', "x.json: a name must be a text that can be encoded"),
        ("[]", "x.json is no JSON object"),
    ],
)
def test_json_from_outside_is_of_plain_values(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(validation.UsageError, match=rf"{message}.* Take another\.$"):
        json_text.read_outside(tmp_path / "x.json", remedy="Take another.")


def test_json_from_outside_is_read(tmp_path):
    content = {"ε": [10**300, -1.5, True, None, {"": "ß"}]}
    (tmp_path / "x.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    assert json_text.read_outside(tmp_path / "x.json") == content
    (tmp_path / "x.json").rename(tmp_path.parent / "elsewhere.json")
    (tmp_path / "x.json").symlink_to("../elsewhere.json")
    with pytest.raises(validation.UsageError, match=r"'x\.json' leads out of the folder"):
        json_text.read_outside(tmp_path / "x.json")
