"""The dashboard on the demo's data, and the pictures that are taken of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from typer.testing import CliRunner

from holdfast.cli import app as app_module
from holdfast.cli import demo as demo_module
from tests.ui import pictures
from tests.ui.browsers import looking

SHOW = "from holdfast.cli.demo import _show; _show({url!r}, 0, as_json=True)"


def test_the_demo_shows_a_newsroom_that_is_at_work(browser: Browser, tmp_path: Path) -> None:
    code = SHOW.format(url=f"sqlite:///{tmp_path}/demo.db")
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            with looking(browser, told["url"]) as page:
                page.goto(told["dashboard"])
                page.wait_for_url(f"{told['url']}/ui/")
                expect(page.get_by_role("link", name="Newsletter 12")).to_be_visible()
                page.get_by_role("link", name="Explorations").click()
                page.get_by_role("link", name="newsletter:make_world").click()
                expect(page.get_by_role("img", name="17 states")).to_be_visible()
                found = page.get_by_role("region", name="Violations")
                expect(found.get_by_role("heading", level=3)).to_have_count(2)
                page.get_by_role("link", name="Overview").click()
                page.get_by_role("link", name="News desk").click()
                page.get_by_role("link", name="State").click()
                read = page.get_by_role("row").filter(has_text="wires_read").get_by_role("cell")
                # It goes on without the page being loaded again.
                seen = read.first.inner_text()
                expect(read.first).not_to_have_text(seen)
        finally:
            process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("serve", [[], ["--serve", "--port", "0"]])
def test_the_demo_serves_when_it_is_asked_to(
    serve: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(demo_module, "_play", lambda *_: ([], []))
    monkeypatch.setattr(demo_module, "_show", lambda *given, **_: shown.append(given[1]))
    monkeypatch.setattr("holdfast.cli.demo.timeline.Timeline.conclude", lambda *_: None)
    result = CliRunner().invoke(app_module.app, ["demo", *serve])
    assert result.exit_code == 0, result.output
    assert shown == ([0] if serve else [])


def test_pictures_are_in_the_docs_and_small(tmp_path: Path) -> None:
    for name in pictures.PAGES:
        picture = pictures.PLACE / f"{name}.png"
        assert picture.stat().st_size < 130_000, name
    docs = (pictures.PLACE.parent / "dashboard.md").read_text()
    assert all(f"pictures/{name}.png" in docs for name in pictures.PAGES)
