"""The page of a results folder, and a comparison, in headless Chromium."""

import base64
import re

import pytest

from tests import chromium
from tests.reports import made_up
from tff_dpftrl.reports import comparison, page, results

_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.started(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module", params=["publishable", "private", "comparison"])
def file(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = [made_up.write_run(folder / name, learning_rate=name) for name in ("a", made_up.IMAGE)]
    (runs[0] / "privacy.png").write_bytes(_PNG)
    if request.param == "comparison":
        html = comparison.of(runs).to_html()
    else:
        html = page.of(results.read(runs[0], private=request.param == "private"))
    (folder / "page.html").write_text(html, encoding="utf-8")
    return folder / "page.html"


def _open(browser, file, *, scheme="light", width=1200, media=""):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    emulated = {"media": media, "features": features}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(file.as_uri())


def test_nothing_is_run_nothing_is_fetched_and_nothing_is_refused(browser, file):
    browser.get_log("performance")
    browser.get_log("browser")
    _open(browser, file)
    assert browser.execute_script("return window.hit") is None
    assert browser.get_log("browser") == []  # Neither errors nor what the policy would block.
    urls = re.findall(r'"url":"((?:https?|ftp|ws)[^"]*)"', str(browser.get_log("performance")))
    assert urls == []
    assert browser.execute_script("return document.scripts.length") == 0
    loaded = browser.execute_script("return [...document.images].map(i => i.naturalWidth)")
    assert loaded.count(1) == ("Comparison" not in browser.title) and len(loaded) >= 3
    assert all(width == 1 or width > 600 for width in loaded)


def test_it_has_landmarks_ordered_headings_and_names_for_all_pictures(browser, file):
    _open(browser, file)
    levels = browser.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => +h.tagName[1])"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    problems = browser.execute_script("""
      const all = s => [...document.querySelectorAll(s)];
      return [
        ...['header', 'main', 'footer'].filter(s => all(s).length != 1),
        ...all('img').filter(i => !i.alt).map(() => 'img'),
        ...all('table').filter(t => !t.caption || !t.querySelector('th[scope=col]')).map(() => 't'),
        ...all('section').filter(s => !document.getElementById(s.getAttribute('aria-labelledby'))),
      ]""")
    assert problems == [] and browser.execute_script("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(browser, file, scheme):
    _open(browser, file, scheme=scheme)
    least, where = browser.execute_script("""
      const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(part);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const behind = e => { for (; e; e = e.parentElement) {
        const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; }
        return 'rgb(255, 255, 255)'; };
      let worst = [99, ''];
      for (const e of document.querySelectorAll('body *')) {
        if (![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) continue;
        const a = light(getComputedStyle(e).color), b = light(behind(e));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < worst[0]) worst = [ratio, e.tagName + ' ' + e.className];
      }
      return worst""")
    assert least >= 4.5, where
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(17, 21, 27)") == (scheme == "dark")


def test_a_phone_shows_it_without_scrolling_sideways(browser, file):
    _open(browser, file, width=360)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= 360


def test_it_prints_black_on_white_also_from_a_dark_screen(browser, file):
    _open(browser, file, scheme="dark", media="print")
    colours = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    assert colours == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"]
    pages = base64.b64decode(printed).count(b"/Type /Page\n")
    assert 1 <= pages <= 8
