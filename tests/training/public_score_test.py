"""Tests of tff_dpftrl.training.public_score."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tests.training import toy_model, toy_run
from tff_dpftrl import validation
from tff_dpftrl.data import user_text
from tff_dpftrl.training import public_score

_TEXT = {"a": ["the front end", "front isn't the end"], "b": ["the ß ."]}


def test_a_model_is_scored_by_all_characters_of_the_text(tmp_path):
    """A model that knows nothing needs log2(ids) bits for each target."""
    text = user_text.UserText.from_mapping("public", _TEXT)
    nothing = [np.zeros_like(weight) for weight in toy_model.weights()]
    folder = toy_model.write(tmp_path / "nothing", last=nothing)
    # Each text's words and its end; the second one is longer than the model's sequence.
    targets, characters = (3 + 1) + (4 + 1) + (3 + 1), sum(map(len, sum(_TEXT.values(), [])))
    bits = math.log2(toy_model.MODEL.vocabulary_size - 1) * targets / characters
    found = public_score.bits_per_character(folder, text)
    assert found == pytest.approx(bits, rel=0.1)
    other = public_score.bits_per_character(toy_model.write(tmp_path / "other"), text)
    assert other != pytest.approx(found)
    broken = [np.full_like(weight, np.nan) for weight in nothing]
    assert math.isnan(
        public_score.bits_per_character(toy_model.write(tmp_path / "nan", last=broken), text)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A protected corpus and a public one."""
    found = tmp_path_factory.mktemp("text")
    toy_run.write_corpus(found)
    toy_run.write_public_corpus(found)
    return found


def _protected(folder):
    return toy_run.config(folder).text


def test_text_of_the_protected_users_is_refused(folder, tmp_path):
    copy = tmp_path / "public.jsonl"
    lines = (folder / "users.jsonl").read_text().splitlines()
    for part in (lines, lines[:20]):
        copy.write_text("\n".join(part) + "\n")
        with pytest.raises(validation.UsageError, match="is the text that they protect, a copy"):
            public_score.read(str(copy), _protected(folder))
    assert len(public_score.read(str(folder / "public.jsonl"), _protected(folder))) == 40


def test_the_process_prints_a_score_for_each_folder(folder, tmp_path, capsys):
    folders = [str(toy_model.write(tmp_path / name)) for name in ("a", "b")]
    request = {
        "folders": folders,
        "text": str(folder / "public.jsonl"),
        "protected": dataclasses.asdict(_protected(folder)),
    }
    public_score._main(**json.loads(json.dumps(request)))
    answer = json.loads(capsys.readouterr().out)
    first, second = answer["scores"]
    assert first == second > 0
    text = public_score.read(str(folder / "public.jsonl"), _protected(folder))
    assert answer["digest"] == text.digest()
