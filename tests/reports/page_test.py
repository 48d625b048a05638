"""Tests of `reports.page` on the text of the page; page_in_browser_test.py looks at it."""

import base64
import dataclasses
import json
import math
import os
import re
import shutil
import sys

import pytest

from tests.reports import made_up
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.participation import observed
from tff_dpftrl.reports import page, results

_PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
_SECRETS = (
    *(made_up.EXACT_LOSS[:8], made_up.EXACT_TOP1[:8], "3.14", "27.2", "0.1618", "16.2"),
    *("/home/secret", "37", "1.414"),
)


def _of(folder, **options) -> str:
    return page.of(results.read(folder, **options))


def test_it_has_the_whole_statement_and_what_was_measured(tmp_path):
    found = _of(made_up.write_run(tmp_path / "run"))
    for heading in ("Privacy", "Participation", "Results", "Configuration", "Files"):
        assert re.search(rf"<h2[^>]*>{heading}</h2>", found)
    claim = made_up.stated()
    for sentence in (*claim.not_covered, *claim.caveats, claim.setting, claim.adjacency):
        assert page.markup.text(sentence) in found
    assert found.count('<img alt="') == 3 and "5 at round 1 to 20 at round 4" in found
    assert "No guarantee covers what they say about the people in that data" in found
    assert "share of next words that the first guess found, of words in the vocabulary" in found
    assert "top1_in_vocab" not in found[: found.index("Configuration</h2>")]


def test_the_default_page_has_nothing_that_must_not_be_published(tmp_path):
    found = _of(made_up.write_run(tmp_path / "run"))
    body = found[found.index("<body") :]
    shown = re.sub(r'src="data:.*?"|<h3.*?Mechanism and parameters.*?</ul>', "", body, flags=re.S)
    assert not [secret for secret in _SECRETS if secret in shown]
    assert page._PRIVATE not in found


def test_the_operators_page_has_all_under_a_banner(tmp_path):
    found = _of(made_up.write_run(tmp_path / "run"), private=True)
    assert page._PRIVATE in found and "/home/secret/users.csv" in found
    assert all(name in found for name in ("unigrams", "bigrams", "trigrams", "training cohort"))
    assert "3.14" in found and "27.2 at round 1" in found and "16.2 at round 1" in found


def test_it_names_neither_scripts_nor_other_files(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    (folder / "privacy.png").write_bytes(_PNG)
    found = _of(folder, private=True)
    assert not re.search(r"<(script|link|iframe|object|base|form)\b", found)
    sources = re.findall(r'(?:src|href|srcset|xlink:href)="(.*?)"', found)
    assert len(sources) == 4
    assert all(re.fullmatch(r"data:image/png;base64,[\w+/=]+", source) for source in sources)
    assert "url(" not in found and "@import" not in found and " onerror='" not in found


def test_a_picture_that_is_none_or_too_large_is_left_out(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    for content in (made_up.SCRIPT.encode(), _PNG + bytes(5 * 2**20)):
        (folder / "privacy.png").write_bytes(content)
        assert "Trade-off of an attacker" not in _of(folder)
    (folder / "privacy.png").unlink()
    (tmp_path / "home.png").write_bytes(_PNG)
    (folder / "privacy.png").symlink_to("../home.png")
    assert "Trade-off of an attacker" not in _of(folder)
    (folder / "privacy.png").unlink()
    os.mkfifo(folder / "privacy.png")
    _of(folder)


def _chart(series, **labels):
    return page.chart(series, **{"title": "Loss", "x_label": "round", "y_label": "nats"} | labels)


def _picture(drawn):
    source = re.search(r'src="data:image/png;base64,(.*?)"', drawn)[1]
    return base64.b64decode(source, validate=True)


def test_a_chart_is_a_picture_and_says_in_words_what_it_shows():
    drawn = _chart({"a": ([0, 5, 10], [0.0, 10.0, 5.0]), "b": ([1], [1e4]), "none": ([], [])})
    said = re.search(r'alt="(.*?)"', drawn)[1]
    assert said == (
        "Loss. nats by round. a: from 0 at round 0 to 5 at round 10; "
        "b: from 10,000 at round 1 to 10,000 at round 1."
    )
    assert _picture(drawn).startswith(_PNG[:8]) and _chart({"a": ([], [])}) == ""


def test_equal_curves_make_equal_charts_and_others_do_not():
    curves = {"a": ([1, 2], [3.0, 4.0])}
    assert _chart(curves) == _chart(curves)
    assert _picture(_chart(curves)) != _picture(_chart({"a": ([1, 2], [3.0, 4.5])}))
    assert _picture(_chart(curves)) != _picture(_chart({"_a": ([1, 2], [3.0, 4.0])}))


@pytest.mark.parametrize(
    "xs, ys", [([1], [0.0]), ([1, 2], [2.0, 2.0]), ([1, 2], [-1.0, 1e-9]), ([1, 2], [1e300, 0.0])]
)
def test_any_values_are_drawn_but_those_that_are_not_finite(xs, ys):
    assert "nan" not in _chart({"a": ([0, *xs], [math.nan, *ys])})
    assert _chart({"a": (xs, [math.inf] * len(ys))}) == ""


def test_too_many_curves_are_counted():
    drawn = _chart({f"run {i}": ([1, 2], [i, i]) for i in range(page.MOST_SERIES + 3)})
    assert "run 7: from 7 at" in drawn and "run 8" not in drawn and "3 more are not drawn" in drawn


def test_labels_are_escaped_and_are_no_formulas():
    labels = {"title": made_up.IMAGE, "x_label": "$\\bad", "y_label": made_up.SCRIPT}
    drawn = _chart({f"{made_up.SCRIPT * 9} $x^$ 中": ([1], [1])}, **labels)
    assert "<script" not in drawn and drawn.count("<") == 1


def test_without_matplotlib_the_page_has_its_tables_and_says_what_to_install(monkeypatch, tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    whole = _of(folder)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = _of(folder)
    assert found.count("Charts are left out: they need matplotlib, which is not installed") == 1
    assert found.count("<table") == whole.count("<table") and "<img" not in found


def test_it_shows_a_recount_or_how_to_make_one(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    assert "tff-dpftrl audit --run run --state" in _of(folder)
    findings = [{"test": "a", "outcome": "consistent", "says": made_up.SCRIPT}]
    audit = {"verdict": "consistent with the claim", "findings": findings}
    (folder / "audit.json").write_text(json.dumps(audit))
    found = _of(folder)
    assert "consistent with the claim" in found and "was not recounted" not in found
    assert "Tests of the recount" not in found
    assert "Tests of the recount" in _of(folder, private=True)
    claim = made_up.stated().with_audit("audited: recount: VIOLATED", is_refuted=True)
    (folder / "privacy_statement.json").write_text(statement_text.to_json(claim))
    assert "audited: recount: VIOLATED" in _of(folder)


def test_epsilon_and_delta_of_a_table_are_rounded_up_and_noise_down():
    assert page._short("epsilon", "1.00001") == "1.001"
    assert page._short("delta", "0.000501123") == "0.0005012"
    assert page._short("noise_multiplier", "1.23459") == "1.234"
    assert page._short("loss", "1.00001") == "1"


def test_participation_is_on_record_or_what_devices_report(tmp_path):
    once = dataclasses.replace(made_up.stated(), observed=observed.Participation(4, None, 1))
    reported = dataclasses.replace(once, assumptions=(sentences.REPORTED_BY_DEVICES,))
    for claim, whose in ((once, "on record"), (reported, "reported by devices")):
        found = _of(made_up.write_run(tmp_path / whose, claim))
        (row,) = re.findall(r"<tr>(?:(?!</tr>).)*none was seen twice.*?</tr>", found, re.S)
        assert f">{whose}<" in row and found.count(">on record<") == (whose == "on record")


def test_who_was_sampled_has_to_stay_secret(tmp_path):
    claim = dataclasses.replace(made_up.stated(), accounted=None)
    says = "who took part must stay in private/"
    assert says in _of(made_up.write_run(tmp_path / "sampled", claim))
    without = dataclasses.replace(made_up.stated(noise_multiplier=0.0), accounted=None)
    assert says not in _of(made_up.write_run(tmp_path / "without", without))


def test_what_is_missing_is_said(tmp_path):
    folder = made_up.write_run(tmp_path / "run")
    for path in ("metrics.csv", "config.json"):
        (folder / path).unlink()
    shutil.rmtree(folder / "private")
    found = _of(folder)
    assert "There is no private/" in found and "There is no metrics.csv" in found
    assert "Results that were handed on" in found
