"""Headless Chromium for tests of pages: Debian's packages chromium and chromium-driver."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium import common, webdriver  # noqa: E402
from selenium.webdriver.chrome import options as options_lib  # noqa: E402
from selenium.webdriver.chrome import service as service_lib  # noqa: E402


@contextlib.contextmanager
def started(folder: pathlib.Path) -> Iterator[webdriver.Chrome]:
    """Starts a browser that reaches nothing but this machine, or skips the test without one."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = options_lib.Options()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",  # It is for root, too, and shows nothing but our page.
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--window-size=1400,1000",
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    try:
        found = webdriver.Chrome(options, service_lib.Service(driver, env=environment))
    except common.WebDriverException as error:
        if "TEST_SRCDIR" in os.environ:  # Bazel's sandbox may keep it from what it needs.
            pytest.skip(f"chromium does not start in this sandbox: {error.msg}")
        raise
    try:
        yield found
    finally:
        found.quit()
