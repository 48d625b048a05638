"""Tests of `reports.readme` and of the table in `reports.files`."""

import dataclasses
import json
import pathlib
import re

import pytest

from tests.reports import listed_files, made_up
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.reports import files, page, readme, results


def _written(folder: pathlib.Path) -> tuple[dict, str]:
    readme.write(folder)
    _, block, text = (folder / "README.md").read_text().split("---\n", 2)
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with what `make docs` installs")
    return yaml.safe_load(block), text


def test_it_is_a_model_card_of_hugging_face(tmp_path):
    card, text = _written(made_up.write_run(tmp_path / "run", vocabulary="english"))
    assert card["language"] == "en" and "license" not in card
    assert "differential-privacy" in card["tags"] and card["library_name"] == "tff_dpftrl"
    (model,) = card["model-index"]
    (result,) = model["results"]
    assert model["name"] == "run"
    assert result["dataset"]["type"] == f"{made_up.SCRIPT}.csv"
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values == {"accuracy": 0.2, "cross-entropy": 1.0}
    assert re.findall("^## (.*)", text, re.MULTILINE) == [
        "Intended use",
        "Training data",
        "Privacy",
        "Evaluation",
        "Limits",
        "Files",
        "What to type next",
    ]


def test_it_says_what_each_file_is_and_who_may_see_it(tmp_path):
    _, text = _written(made_up.write_run(tmp_path / "run"))
    rows = dict(re.findall(r"^\| `(.*?)` \| .* \| (.*?) \|$", text, re.MULTILINE))
    assert rows["private/"] == "**never hand it on**"
    assert rows["metrics.csv"] == "**the operator only**"
    assert rows["privacy_statement.md"] == rows["model.npz"] == "may be published"
    # It has figures of held-out users.
    assert rows["README.md"] == "may be published where its content may be seen"
    assert "tff-dpftrl audit --run run --state" in text and "curves.png" not in rows


_COVERED = (
    *("model.npz", "weights.npz", "best_model.npz"),
    *("hugging_face/", "hugging_face_adapters/", "counts.csv"),
)


@pytest.mark.parametrize("claim", ["guaranteed", "without noise", "refuted", "none"])
def test_a_model_is_for_others_only_where_a_guarantee_covers_it(claim, tmp_path):
    stated = made_up.stated(noise_multiplier=0.0 if claim == "without noise" else 2.0)
    if claim == "refuted":
        stated = stated.with_audit("audited: VIOLATED", is_refuted=True)
    folder = made_up.write_run(tmp_path / "run", stated)
    for name in _COVERED:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_bytes(b"")
    if claim == "none":
        (folder / "privacy_statement.json").unlink()
    found = results.read(folder)
    rows = re.findall(r"^\| `(.*?)` \| (.*) \| (.*?) \|$", readme.of(found), re.MULTILINE)
    withheld = {name for name, what, _ in rows if what.endswith("; no guarantee covers it")}
    operators = {name for name, _, who in rows if who == "**the operator only**"}
    assert withheld == (set() if claim == "guaranteed" else set(_COVERED))
    assert operators == withheld | {"metrics.csv"}
    assert page.of(found).count("no guarantee covers it<") == len(withheld)


def test_a_model_of_public_text_needs_no_guarantee(tmp_path):
    (tmp_path / "model.npz").write_bytes(b"")
    (model,) = (
        file
        for file in files.present(tmp_path, "pretraining", has_guarantee=False)
        if file.name == "model.npz"
    )
    assert model.publish == "yes, but" and model.what.endswith("has to be public")


def test_nothing_private_and_no_markup_of_others_is_in_it(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    _, text = _written(folder)
    whole = (folder / "README.md").read_text()
    for secret in (made_up.EXACT_LOSS, made_up.EXACT_TOP1, str(made_up.BIGRAMS), "1618", "/home/"):
        assert secret not in whole
    assert "bigrams" not in whole or "trigrams" in whole
    bare = re.sub(r"\\.", "", text)  # Without what is escaped.
    assert made_up.SCRIPT[1:7] in text and "<" not in bare and "](" not in bare
    with pytest.raises(ValueError, match="may be published"):
        readme.of(results.read(folder, private=True))


def test_the_caveats_stand_beside_epsilon(tmp_path):
    claim = made_up.stated().with_audit("audited: VIOLATED", is_refuted=True)
    _, text = _written(made_up.write_run(tmp_path / "run", claim))
    assert all(caveat in text for caveat in claim.headline_caveats)
    without = made_up.stated(noise_multiplier=0.0)
    card, text = _written(made_up.write_run(tmp_path / "without", without))
    assert "No differential privacy guarantee." in text and "ε =" not in text
    assert "differential-privacy" not in card["tags"]


def test_a_run_that_a_choice_was_made_among_is_not_to_be_published(tmp_path):
    stated = made_up.stated()
    caveats = (sentences.ONE_OF_A_CHOICE, *stated.headline_caveats)
    stated = dataclasses.replace(stated, headline_caveats=caveats)
    found = results.read(made_up.write_run(tmp_path / "run", stated))
    text = readme.of(found)
    rows = dict(re.findall(r"^\| `(.*?)` \| .* \| (.*?) \|$", text, re.MULTILINE))
    assert set(rows.values()) == {"**never hand it on**"} and {"model.npz", "README.md"} <= set(
        rows
    )
    assert sentences.ONE_OF_A_CHOICE in text and sentences.ONE_OF_A_CHOICE in page.of(found)
    assert not text.startswith("---") and "tff-dpftrl export" not in text


def test_a_refuted_claim_is_not_advertised(tmp_path):
    claim = made_up.stated().with_audit("audited: VIOLATED", is_refuted=True)
    card, text = _written(made_up.write_run(tmp_path / "run", claim))
    assert "differential-privacy" not in card["tags"]
    assert "An audit has refuted what is claimed here: rely on none of it." in text
    assert "audited: VIOLATED" in text and "Protected is" not in text


def test_small_and_large_metrics_are_numbers_of_yaml(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    (folder / "metrics.csv").write_text("round,eval_loss,eval_top1_in_vocab\n1,1e+16,1e-05\n")
    card, _ = _written(folder)
    (result,) = card["model-index"][0]["results"]
    assert [one["value"] for one in result["metrics"]] == [1e-5, 1e16]


def test_a_name_of_a_column_is_no_link_and_hides_nothing(tmp_path):
    parameters = dict(made_up.stated().parameters) | {"user": "![a](b)\n\n## End"}
    claim = dataclasses.replace(made_up.stated(), parameters=parameters)
    _, text = _written(made_up.write_run(tmp_path / "run", claim))
    assert "![" not in text and "where 50 % would be chance" in text


def test_protected_held_out_users_were_measured_but_not_for_all_to_see(tmp_path):
    for held_out, says in (("public", "has not been measured"), ("protected", "in `private/`.")):
        folder = made_up.write_run(tmp_path / held_out, held_out_users=held_out)
        (folder / "metrics.csv").write_text("round,epsilon\n1,1.5\n")
        _, text = _written(folder)
        _, _, evaluation = text.partition("## Evaluation\n\n")
        assert says in evaluation.partition("\n")[0]


@pytest.mark.parametrize(
    ("words", "publish"),
    [
        ({"is_public": True}, "yes, but"),
        ({"is_public": False, "is_noised": True}, "yes, but"),
        ({"is_public": False}, "no"),
        ({}, "yes, but"),  # Of an earlier version.
    ],
)
@pytest.mark.parametrize("kind", ["training", "pretraining", "task", "handed on"])
def test_words_counted_without_noise_are_for_the_operator(words, publish, kind, tmp_path):
    (tmp_path / "vocabulary.json").write_text(json.dumps(words))
    (file,) = (
        one
        for one in files.present(tmp_path, kind, has_guarantee=True)
        if one.name == "vocabulary.json"
    )
    assert file.publish == publish


def test_a_sweep_says_that_it_has_exact_figures_of_protected_users(tmp_path):
    (tmp_path / "summary.csv").write_text("clip_norm,eval_loss,eval_loss_se,epsilon\n1,5.5,0.1,2\n")
    for definition in (
        {"options": {"held_out_users": "protected"}},
        {"options": {}, "axes": {"held_out_users": ["public", "protected"]}},
    ):
        (tmp_path / "sweep.json").write_text(json.dumps(definition))
        found = results.read(tmp_path)
        assert found.settings == [{"clip_norm": "1", "epsilon": "2"}]
        assert "exact figures of them" in readme.of(found)
    (tmp_path / "sweep.json").write_text(json.dumps({"options": {}}))
    found = results.read(tmp_path)
    assert "eval_loss" in found.settings[0] and "exact figures of them" not in readme.of(found)


def test_a_sweep_has_no_card(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({"options": {}}))
    for name in "ab":
        made_up.write_run(tmp_path / "cells" / name)
    readme.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Sweep") and "choosing among runs" in text
    assert f"compare-runs {tmp_path.name}/cells/a {tmp_path.name}/cells/b" in text


@pytest.mark.parametrize("file", files.FILES, ids=lambda file: file.name)
def test_the_reference_page_says_the_same_of_each_file(file):
    if file.kinds:
        pytest.skip("of folders that the page describes in a paragraph")
    said = listed_files.explained()[file.name]
    if file.publish == "yes, but":
        assert not said.startswith(("no", "never")) and said != "yes"
    else:
        assert re.match(rf"{file.publish}\b", said)
