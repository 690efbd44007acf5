"""A headless Chromium, the system's own: what a reader of a report has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

SETTLE_MS = 30_000  # until every chart must be drawn, on a busy machine


@pytest.fixture(scope="module")  # not longer: Playwright keeps an event loop running, in which no other can run
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("These tests open reports in Chromium, which is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@dataclass
class Reader:
    """Opens files offline, and notes what a page should not do. Owner: one test."""

    browser: Browser
    complaints: list[str] = field(default_factory=list)  # errors of the console and of scripts, dialogs
    requests: list[str] = field(default_factory=list)  # all but that of the file itself
    contexts: list[BrowserContext] = field(default_factory=list)

    def open(
        self,
        file: Path,
        width: int = 1280,
        scheme: Literal["light", "dark"] = "light",
        scripts: bool = True,
    ) -> Page:
        """The page with every chart in the open drawn."""
        size = {"width": width, "height": 900}
        context = self.browser.new_context(
            viewport=size,  # type: ignore[arg-type]
            color_scheme=scheme,
            offline=True,
            java_script_enabled=scripts,
        )
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        self.requests.remove(file.as_uri())
        if scripts:
            settle(page)
        return page

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def settle(page: Page) -> None:
    """Waits until every chart that has a place to be drawn in is drawn."""
    waiting = "details:not([open]) .chart, .chart[data-state=drawn]"
    page.wait_for_function(f"[...document.querySelectorAll('.chart')].every(c => c.matches('{waiting}'))", timeout=SETTLE_MS)


@pytest.fixture
def reader(chromium: Browser) -> Iterator[Reader]:
    """Fails the test when a page complained or wanted anything from anywhere."""
    found = Reader(chromium)
    yield found
    for context in found.contexts:
        context.close()
    assert found.complaints == []
    assert [url for url in found.requests if not url.startswith("data:")] == []
