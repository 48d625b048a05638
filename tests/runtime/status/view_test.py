import html
import json
import math
import re

import numpy as np
import pytest

from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.status import past, view

BAD = "<img src=x onerror=\"window.hit='task'\">"
NOTHING = view.Details(None, "", None, "")
PRIVACY = {
    "epsilon": 1.2345,
    "delta": 1e-6,
    "rho_zcdp": 0.03,
    "num_rounds": 2,
    "skipped_rounds": 1,
    "next_epsilon": 1.31111,
    "declared_epsilon": 2.5,
    "budget_epsilon": 2.0,
    "declared": {"num_rounds": 50, "min_sep": 7, "max_participations": 3},
    "observed": {"num_rounds": 2, "min_sep": 9, "max_participations": 2},
}


def text(page):
    """The text of a page, without tags."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page)))


def test_a_server_that_has_seen_nothing_has_a_page():
    said = text(view.page(watched.Watched().seen, 0, {}, NOTHING))
    for words in (
        "No alerts.",
        "nobody leads",
        "waiting for devices",
        "nothing was released yet, or the task is not private",
        "They are being read.",
        "No report is written yet",
    ):
        assert words in said, words


def test_everything_about_a_task_is_there():
    told = watched.Watched("train", "evaluate", num_rounds=50)
    told.lead(3)
    for _ in range(2):
        told.round()
    told.lose(reason="too few reports")
    told.tell(versions={"tensorflow": "2.21.0"})
    told.seen.session_refused("expired token")
    told.seen.sent_away("enough devices are waiting", False)
    told.begin(devices=6)
    told.report(count=2)
    told.on_event(events.StoreFailed("x"))
    rows = [{"round": i, "committed_at": watched.START, "loss": 2.5} for i in range(1)]
    rows.append({"round": 1, "committed_at": watched.START + 1, "skipped": True})
    shown = past.of_history(rows)
    written = [("report.html", watched.START)]
    details = view.Details(PRIVACY, "", shown, "", written)
    said = text(view.page(told.seen, 0, {"train": PRIVACY}, details))
    for words in (
        "lease epoch 3",
        "Population: The store failed",
        "train reporting 2 of 4 reports, 6 devices 2 of 50 1",
        "1.235 of 2",  # Rounded up.
        "Round 3 waits for reports: 2 of 4 have come, from 6 devices",
        "The last attempt was abandoned: too few reports.",
        "ε = 1.235",
        "Charged: 2 committed rounds, 1 of them skipped.",
        "With one more round, such as one that runs: ε = 1.312.",
        "All rounds that there may be: ε = 2.",
        "61.8 % of the budget of ε = 2",  # Rounded up.
        "least separation, rounds (MinS) 7 9",
        "most times of a device (MaxP) 3 2",
        "report.html (2023-11-14 22:00:00 UTC)",
        "2 skipped 2023-11-14 22:00:01 UTC",
        "1 committed 2023-11-14 22:00:00 UTC",
        "1 round released",
        "loss 2.5",
        "do not publish",
        "accepted 10 100 %",
        "too few reports 1",
        "connected 4",
        "participating 4",
        "rounds committed 2 2 2 2",
        "-v[]+^ 1 100.0 %",
        "expired token 1",
        "enough devices are waiting 1",
        "tensorflow 2.21.0 1",
    ):
        assert words in said, words


def test_no_guarantee_is_said_with_its_reasons():
    told = watched.Watched()
    figures = {"epsilon": None, "no_guarantee": ["No noise."], "headline_caveats": ["Beware."]}
    details = view.Details(figures, "", None, "")
    said = text(view.page(told.seen, 0, {"train": figures}, details))
    assert "no guarantee" in said and "No guarantee No noise." in said and "Beware." in said
    assert "ε = " not in said


def test_what_cannot_be_read_is_told():
    details = view.Details(None, "cannot be read (OSError)", None, "cannot be read (OSError)")
    said = text(view.page(watched.Watched().seen, 0, {}, details))
    assert said.count("cannot be read (OSError)") == 2


def test_names_and_values_are_text():
    told = watched.Watched(BAD)
    told.round(BAD)
    told.lose(BAD, reason=BAD)
    told.tell(BAD, versions={"python": BAD})
    told.seen.session_refused(BAD)
    told.seen.sent_away(BAD, False)
    told.on_event(events.TooFewDevices(BAD, 1, 4))
    rows = [{"round": i, "committed_at": i, BAD: 1.0, "x": BAD} for i in range(1)]
    caveats = {"headline_caveats": [BAD], "unit_of_privacy": BAD, "stopped": BAD, "min_sep": BAD}
    for figures in ({"epsilon": 1.0}, {"epsilon": None, "no_guarantee": BAD}, {"epsilon": BAD}):
        figures = {name: BAD for name in PRIVACY} | caveats | figures
        details = view.Details(figures, BAD, past.of_history(rows), "", [(BAD, math.inf)])
        page = view.page(told.seen, 0, {BAD: figures}, details)
        assert BAD in html.unescape(page)
        tags = re.findall(r"<([a-z0-9]+)", page)
        assert "img" not in tags and "iframe" not in tags
        assert tags.count("script") == 1 and 'onerror="' not in page


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, None),
        (math.nan, None),
        (10**400, None),
        (True, True),
        (("a", 1.5), ["a", 1.5]),
        ({"a": {"b": None}}, {"a": {"b": None}}),
        ("x" * 1000, "x" * 500),
        (b"bytes", "b'bytes'"),
        ([[[[["deep"]]]]], [[[["['deep']"]]]]),
        (list(range(1000)), list(range(100))),
        ({"a": np.float32(0.5), "c": np.int64(3)}, {"a": 0.5, "c": 3}),
    ],
)
def test_what_others_make_has_a_bounded_size(value, expected):
    found = view.plain(value)
    assert found == expected
    json.dumps(found, allow_nan=False)
