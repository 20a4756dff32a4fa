"""Headless Chromium for tests, if it is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser. Without one, skip the test and say what to install."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium, or make browser")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"], handle_sigint=False
        )
        try:
            yield browser
        finally:
            browser.close()
