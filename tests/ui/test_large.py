"""Large and hostile content: pages stay small, usable and safe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

import holdfast
from tests.server.live import Live, live
from tests.ui.browsers import looking, sign_in
from tests.ui.content import fill, pages

KEYS, VERSIONS = 10_000, 5_000
PAGE_CHARACTERS_MAX = 1_500_000
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\u2066txt.exe\u2069 \u0627\u0644\u0639"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('large')}/store.db"}
    with holdfast.open(**place) as store:
        _fill_large(store)
        fill(store)
    with live(**place) as server:
        yield server


def _fill_large(store: holdfast.Store) -> None:
    large = store.session("large", name="</h1><img src=x>")
    table = {f"row-{number}": {"text": HOSTILE, "n": [number] * 20} for number in range(6_000)}
    large.append("transcript", [{"role": "tool", "content": table}])
    large.append("transcript", [{"role": "user", "content": HOSTILE + "x" * 1_000_000}])
    document: dict[str, Any] = {f"key-{number:05}": number for number in range(KEYS - 2)}
    large.state.initialize({**document, "table": table, "text": HOSTILE * 2_000})
    many = store.session("many")

    def versions(tx: Any, start: int) -> Any:
        session = yield from tx.find_session("many")
        for number in range(start, start + 50):
            yield from session.save({"n": number})

    for start in range(0, VERSIONS - 2, 50):
        store.run(versions, start)
    many.rewind(VERSIONS // 2)


@pytest.fixture
def page(browser: Browser, server: Live) -> Iterator[Page]:
    with looking(browser, server.url) as page:
        sign_in(page, server.url, server.secret)
        yield page


def test_large_and_hostile_content_is_shown_in_part_and_as_text(page: Page, server: Live) -> None:
    paths = (
        "large", "large/transcript", "large/checkpoints", "large/checkpoints/2",
        "large/diff?a=1&b=2", "large/state", "large/state?prefix=t", "large/state/table",
        "large/timeline", "many", "many/checkpoints", "many/timeline", "many/checkpoints/1",
    )  # fmt: skip
    for path in paths:
        page.goto(f"/ui/sessions/{path}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert len(page.content()) < PAGE_CHARACTERS_MAX, path
        assert page.locator("main tr").count() <= 2 * 201, path
        assert page.locator("main img").count() == 0
        assert not {"\u202e", "\u2066"} & set(page.locator("body").inner_text()), path
    page.goto("/ui/sessions/large/transcript")
    folded = page.get_by_role("group").first
    folded.locator("summary").click()
    expect(folded).to_contain_text("this is the beginning")
    # The page goes on to be live.
    expect(page.locator("#live")).to_contain_text("Live")
    said = {"channels": {"transcript": [{"role": "user", "content": "and now?"}]}}
    assert server.client.post("/sessions/large/checkpoints", json=said).status_code == 201
    expect(page.get_by_text("and now?")).to_be_visible()


def test_long_words_do_not_make_pages_wider_than_the_window(
    browser: Browser, tmp_path: Any
) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        fill(store, "w" * 150)
        long = store.session("s" * 256)
        long.state.set("k" * 256, 1)
        effect = store.effects(status="unknown")[0].id
        pauses = [f"/ui/pauses/{each.id}" for each in store.pauses()]
    narrow: Any = {"width": 320, "height": 700}
    with live(**place) as server, looking(browser, server.url, viewport=narrow) as page:
        sign_in(page, server.url, server.secret)
        of_long = [f"/ui/sessions/{long.id}{part}" for part in ("", "/state", "/timeline")]
        for path in (*pages(), *pauses, f"/ui/effects/{effect}", *of_long):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, path


def test_5_000_versions_are_walked_page_by_page(page: Page) -> None:
    page.goto("/ui/sessions/many/checkpoints?limit=200")
    seen = 0
    for _ in range(3):
        seen += page.locator("tbody tr").count()
        page.get_by_role("link", name="Next page").click()
        expect(page.get_by_role("link", name="First page")).to_be_visible()
    assert seen == 600
    page.get_by_role("link", name="First page").click()
    expect(page.get_by_text(f"rewound to version {VERSIONS // 2}")).to_be_visible()
