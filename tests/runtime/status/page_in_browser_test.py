"""The status page in headless Chromium."""

import asyncio
import json
import threading
import time

import pytest

from tests import chromium
from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events
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
        return {"epsilon": 1.2345, "delta": 1e-6}

    def _history(self, task):
        metrics = {"committed_at": watched.START, "loss": 2.5, BAD_METRIC: 1.0, "words": BAD_TEXT}
        return [{"round": i} | metrics for i in range(self.told.rounds[task])]

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
    for _ in range(2):
        server.tell("round", "train")
    server.tell("begin", "train", 6)
    server.tell("report", "train", 2)
    eventually(lambda: text_of(browser, "#tasks td")[1], "2 of 4 reports, 6 devices")
    assert text_of(browser, "#tasks td")[2] == "2 of 50"
    outlook = lambda: text_of(browser, "#outlook p")  # noqa: E731
    assert outlook()[0].startswith("Round 3 waits for reports: 2 of 4 have come, from 6 devices")
    browser.execute_script("document.getElementById('to-1').focus()")
    server.tell("report", "train", 2)
    eventually(outlook, ["Round 3 has its 4 reports: sum, noise and commit follow."])
    assert browser.execute_script("return document.activeElement.id") == "to-1"
    assert browser.execute_script("return window.isTheSamePage") is True
    assert not browser.find_element("id", "silent").is_displayed()


def test_pictures_are_shown(browser):
    drawn = "return Array.from(document.querySelectorAll('#past img'), e => e.naturalWidth > 100)"
    eventually(lambda: browser.execute_script(drawn), [True, True])
    assert text_of(browser, "#privacy .big") == ["ε = 1.235"]


def test_names_and_values_are_text(browser, server):
    server.tell("round", BAD)
    server.tell("round", BAD)
    server.tell("tell", BAD_TEXT)
    server.tell("on_event", events.RoundLost(BAD, 1, "attempt", BAD_TEXT[:50], {}))
    browser.find_element("id", "to-1").click()
    eventually(lambda: text_of(browser, "#task h2"), [f"Task {BAD}"])
    eventually(lambda: BAD_METRIC in text_of(browser, "#past th"), True)
    assert text_of(browser, "#privacy li") == [BAD_TEXT]
    eventually(lambda: BAD_TEXT[:50] in text_of(browser, "#outcomes th"), True)
    assert browser.execute_script("return window.hit") is None
    assert text_of(browser, "iframe, body script, object, embed, :not(.charts) > img") == []
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
    sizes = "const all = document.documentElement; return [all.scrollWidth, all.clientWidth]"
    scrolled, visible = browser.execute_script(sizes)
    assert scrolled == visible and width - 20 <= visible <= width


def test_a_report_is_a_click_away_and_runs_no_script(browser, server):
    server.reports.mkdir()
    written = "<title>a report</title><script>window.hit = 'report'</script>"
    (server.reports / "report.html").write_text(written)
    eventually(lambda: text_of(browser, "#report a"), ["report.html"])
    browser.find_element("css selector", "#report a").click()
    eventually(lambda: browser.title, "a report")
    assert browser.execute_script("return window.hit") is None
    browser.back()
    browser.get_log("browser")  # The script, refused by the policy of the report.


def test_the_page_needs_no_script(browser, server):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(server.status.address)
        assert text_of(browser, "h1") == ["keyboard"]
        assert len(browser.find_elements("css selector", "#tasks tbody tr")) == 2
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    browser.get(server.status.address)


def test_the_console_is_empty_and_nobody_else_was_asked(browser, server):
    assert browser.get_log("browser") == []
    asked = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    own = (server.status.address + "/", "chrome://", "data:")  # And the browser's first tab.
    assert [url for url in asked if not url.startswith(own)] == []
    for path in ("/", "/page.js", "/page.css", "/?task=1"):
        assert any(url.startswith(server.status.address + path) for url in asked), path


def test_a_server_that_is_gone_is_told(browser, server):
    server.stop()
    eventually(lambda: browser.find_element("id", "silent").is_displayed(), True)
    assert text_of(browser, ".lost h1") == ["keyboard"]
