"""A real browser for the tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
# Only in tests: as root, Chromium cannot start its sandbox.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 30_000
STANDARD = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RULES = {"runOnly": STANDARD, "resultTypes": ["violations"]}
expect.set_options(timeout=WAIT_MS)


@contextmanager
def started() -> Iterator[Browser]:
    """Run a browser until the end of the block."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: pages are not tested in a browser (make programs)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def looking(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a page; what it complains about, and what it asks of others, fails the test."""
    context: BrowserContext = browser.new_context(
        **{"base_url": url, "reduced_motion": "reduce", **options}
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda told: problems.append(told.text) if told.type == "error" else None)
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(url) else problems.append(asked.url),
    )
    yield page
    context.close()
    assert problems == []


def sign_in(page: Page, url: str, secret: str, place: str = "/ui/") -> None:
    """Sign in with a token, as a person does."""
    page.goto(f"{url}{place}")
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{url}{place}")


def press(page: Page, name: str, key: str = "Enter") -> None:
    """Go to what has a name with Tab alone, and press a key there."""
    asked = """(name) => {
        const here = document.activeElement;
        const label = here.getAttribute("aria-label") ?? here.labels?.[0]?.textContent ?? "";
        const names = [here.textContent, label].map((text) => text.trim());
        return names.some((text) => text.startsWith(name) && !/^\\w/.test(text.slice(name.length)));
    }"""
    for _ in range(120):
        page.keyboard.press("Tab")
        if page.evaluate(asked, name):
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(outline) != "none", name
            page.keyboard.press(key)
            return
    raise AssertionError(f"{name} is not reached with Tab")
