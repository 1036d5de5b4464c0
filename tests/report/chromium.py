"""A headless Chromium for the page's tests, and why there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WHY_NOT = "no Chromium on this machine (`make browser` installs it where it may: as root on Debian or Ubuntu)"


@contextmanager
def chromium() -> Iterator[object]:
    """A started browser; skips the test where none is installed."""
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip(WHY_NOT)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
