"""The status page in headless Chromium."""

import asyncio
import json
import sys
import threading
import time

import pytest

from tests import chromium
from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events, population
from tff_dpftrl.runtime.status import page

BAD = "<img src=x onerror=\"window.hit='task'\">"
BAD_METRIC = "</title><script>window.hit='metric'</script>"
BAD_TEXT = "<iframe src=\"javascript:window.parent.hit='text'\"></iframe>"


class ServerThread:
    """A status page and what it shows, on an event loop of its own."""

    def __init__(self, folder):
        self.reports = folder / "report"
        self.told = watched.Watched("train", BAD, num_rounds=50)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        shown = page.Shown(
            self.told.seen,
            privacy=self._privacy,
            history=self._history,
            reports=lambda task: self.reports,
        )
        self.status = page.StatusServer([shown])
        self.wait_for(self.status.start())

    def _privacy(self, task):
        if task == BAD:
            return {"epsilon": None, "delta": 1e-6, "no_guarantee": [BAD_TEXT]}
        return {
            "epsilon": 1.2345,
            "delta": 1e-6,
            "rho_zcdp": 0.03,
            "num_rounds": 2,
            "skipped_rounds": 1,
            "next_epsilon": 1.3111,
            "declared_epsilon": 2.5,
            "budget_epsilon": 2.0,
            "declared": {"num_rounds": 50, "min_sep": 7, "max_participations": 3},
            "observed": {"num_rounds": 2, "min_sep": 9, "max_participations": 2},
        }

    def _history(self, task):
        metrics = {"loss": 2.5, BAD_METRIC: 1.0, "words": BAD_TEXT, "devices/reports": 4}
        quantiles = {"p10": 1.5, "median": 2.0, "p90": 3.5, "resolution": 0.05}
        metrics |= {f"train/loss/{name}": value for name, value in quantiles.items()}
        rounds = [
            {"round": i, "committed_at": watched.START + i, "epoch": 1}
            for i in range(self.told.rounds[task] + 1)
        ]
        skipped = rounds.pop() | {population.SKIPPED: 1}
        return [*(each | metrics for each in rounds), skipped]

    def wait_for(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def tell(self, method, *arguments):
        """Lets events happen, on the server's thread."""

        async def happen():
            getattr(self.told, method)(*arguments)

        self.wait_for(happen())

    def stop(self):
        self.wait_for(self.status.stop())

    def close(self):
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = ServerThread(tmp_path_factory.mktemp("task"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser(server, tmp_path_factory):
    with chromium.started(tmp_path_factory.mktemp("browser")) as found:
        found.get(server.status.address)
        found.execute_script("window.isTheSamePage = true")
        yield found


def eventually(get, expected):
    for _ in range(200):
        found = get()
        if found == expected:
            return
        time.sleep(0.05)
    raise AssertionError(f"still {found!r}, not {expected!r}")


def text_of(browser, selector):
    """The texts of elements, read in one step: the page may change between two."""
    return browser.execute_script(
        "return Array.from(document.querySelectorAll(arguments[0]), e => e.textContent)", selector
    )


def test_rounds_advance_without_a_reload(browser, server):
    server.tell("lead", 3)
    eventually(lambda: text_of(browser, "#population"), ["keyboard"])
    for done in (1, 2):
        server.tell("round", "train")
        eventually(
            lambda: text_of(browser, "#tasks [data-label='Rounds done']")[0], f"{done} of 50"
        )
    server.tell("begin", "train", 6)
    server.tell("report", "train", 2)
    round_cells = "#tasks .round .muted"
    eventually(lambda: text_of(browser, round_cells)[0], "2 of 4 reports, 6 devices")
    eventually(lambda: text_of(browser, "#tasks .state"), ["reporting", "waiting for devices"])
    eventually(lambda: text_of(browser, "#tiles .value")[:3], ["4", "0", "4"])
    assert browser.execute_script("return window.isTheSamePage") is True
    assert text_of(browser, "#contact") == ["live"]


def test_privacy_and_history_of_the_chosen_task_are_shown(browser, server):
    eventually(lambda: text_of(browser, "#task .big"), ["ε = 1.24"])  # Rounded up.
    card = text_of(browser, "#task .card")[0]
    assert "61.8\u202f% of the budget of ε = 2" in card  # Rounded up.
    assert "Charged: 2 committed rounds, 1 of them skipped." in card
    assert "With one more round, such as one that runs: ε = 1.32." in card
    assert "All rounds that there may be: ε = 2." in card
    eventually(lambda: text_of(browser, "[data-label='ε so far, of all']")[0], "1.24 of 2")
    assert "least separation, rounds (MinS)79" in card
    assert "most times of a device (MaxP)32" in card
    eventually(lambda: len(text_of(browser, "#metrics svg path")), 5)
    titles = text_of(browser, "#metrics h4")
    assert titles[0] == "loss " and titles[2:] == ["train/loss of single devices "]
    assert text_of(browser, "#metrics .legend")[2] == "p10 1.5median ± 0.05 2p90 3.5"
    # Of the three rounds of the history, one was skipped, and has no metrics.
    assert text_of(browser, "#metrics-note")[0].startswith("Of 2 released rounds. ")


def test_it_says_what_a_round_waits_for(browser, server):
    outlook = lambda: text_of(browser, "#outlook p")  # noqa: E731
    eventually(
        lambda: outlook()[0][:57], "Round 3 waits for reports: 2 of 4 have come, from 6 devic"
    )
    server.tell("report", "train", 2)
    eventually(outlook, ["Round 3 has its 4 reports: sum, noise and commit follow."])
    server.tell("lose", "train", BAD_TEXT)
    server.tell("on_event", events.SelectionProgress("train", 1, 6, selectors=3))
    server.tell("on_event", events.SelectionProgress("train", 1, 6, 0, False, 3, 2))
    eventually(
        outlook,
        [
            "Too few devices have checked in: 1 devices wait, and a round needs 4 at least: "
            "waiting for more.",
            "Connected in all: 2 devices.",
            "2 of 3 Selectors have not answered for 6 seconds: devices that wait there do not "
            "count.",
            f"The last attempt was abandoned: {BAD_TEXT}.",
        ],
    )


def test_the_report_is_one_click_away_and_runs_no_script(browser, server):
    assert text_of(browser, "#report")[0].startswith("No report is written yet")
    server.reports.mkdir()
    (server.reports / "report.html").write_text(
        "<style>b { color: rgb(1, 2, 3) }</style><b>a report</b>"
        "<script>document.body.textContent = 'hit'</script>"
    )
    eventually(lambda: text_of(browser, "#report a"), ["report.html"])
    page_window = browser.current_window_handle
    browser.find_element("css selector", "#report a").click()
    (other,) = set(browser.window_handles) - {page_window}
    browser.switch_to.window(other)
    try:
        bold = browser.find_element("css selector", "b")
        assert browser.current_url == server.status.address + "/report/0/report.html"
        assert bold.text == "a report"
        assert bold.value_of_css_property("color") == "rgba(1, 2, 3, 1)"
    finally:
        browser.close()
        browser.switch_to.window(page_window)
    refused = browser.get_log("browser")  # The script, by the policy of the report.
    assert all("/report/0/report.html" in entry["message"] for entry in refused)


def test_names_and_values_are_text(browser, server):
    server.tell("round", BAD)
    server.tell("tell", "-v[!")
    server.tell("tell", BAD_TEXT)
    server.tell("on_event", events.RoundLost(BAD, 1, "attempt", BAD_TEXT[:50], {}))
    server.tell("on_event", events.TooFewDevices(BAD, 1, 4))
    browser.find_elements("css selector", "#tasks button")[1].click()
    eventually(lambda: text_of(browser, "#task-title"), [f"Task {BAD}"])
    eventually(lambda: text_of(browser, "#task .big"), ["No guarantee"])
    assert text_of(browser, "#task li") == [BAD_TEXT]
    eventually(lambda: BAD_TEXT[:50] in "".join(text_of(browser, "#task td")), True)
    titles = ["loss ", f"{BAD_METRIC} ", "train/loss of single devices "]
    eventually(lambda: text_of(browser, "#metrics h4"), titles)
    eventually(lambda: text_of(browser, ".alert b"), [BAD])
    eventually(lambda: sorted(text_of(browser, "#sessions code")), ["-v[!", "other"])
    assert browser.execute_script("return window.hit") is None
    assert text_of(browser, "img, iframe, body script, object, embed") == []
    # An attempt at a script inside the page is stopped by the policy.
    browser.execute_script(
        "const made = document.createElement('script'); made.textContent = 'window.hit = 1';"
        "document.body.append(made); made.remove();"
    )
    assert browser.execute_script("return window.hit") is None
    refused = [entry["message"] for entry in browser.get_log("browser")]
    assert len(refused) == 1 and "Content Security Policy" in refused[0]


@pytest.mark.parametrize("width", [390, 1400])
def test_everything_fits_in_the_width(browser, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    for _ in range(2):  # Charts follow in the next frame.
        browser.execute_async_script("requestAnimationFrame(() => arguments[0]())")
    sizes = "const all = document.documentElement; return [all.scrollWidth, all.clientWidth]"
    scrolled, visible = browser.execute_script(sizes)
    assert scrolled == visible and width - 20 <= visible <= width
    charts = "return Array.from(document.querySelectorAll('svg.chart'), e => e.clientWidth)"
    drawn = browser.execute_script(charts)
    assert len(drawn) >= 9 and min(drawn) > 200


def test_times_can_be_chosen(browser, server):
    browser.find_element("id", "window-week").find_element("xpath", "..").click()
    eventually(lambda: text_of(browser, "#charts .unit")[1], "per hour")
    browser.find_element("id", "window-minutes").find_element("xpath", "..").click()
    eventually(lambda: text_of(browser, "#charts .unit")[1], "per 5 s")


def test_the_console_is_empty_and_nobody_else_was_asked(browser, server):
    assert browser.get_log("browser") == []
    asked = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    own = (server.status.address + "/", "chrome://", "data:")  # And the browser's first tab.
    assert [url for url in asked if not url.startswith(own)] == []
    for path in ("/", "/page.js", "/charts.js", "/page.css", "/task.json?task=1", "/data.json"):
        assert any(url.startswith(server.status.address + path) for url in asked), path


def test_a_server_that_is_gone_is_told(browser, server):
    server.stop()
    eventually(lambda: text_of(browser, "#contact")[0][:13], "no answer for")
    assert text_of(browser, "main.stale #population, main.stale #tasks td.name")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
