"""What people do from page to page: by keyboard, in two tabs, with the tab hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, expect

import holdfast
from holdfast.server.options import Options
from tests.server.live import Live, live
from tests.ui.browsers import RULES, looking, press, sign_in
from tests.ui.content import ITEM, doubt, fill, kinds_of_pages


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"url": f"sqlite:///{tmp_path_factory.mktemp('journeys')}/store.db"}


@pytest.fixture(scope="module")
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place) as store:
        fill(store)
        yield store


@pytest.fixture(scope="module")
def server(store: holdfast.Store, place: dict[str, Any]) -> Iterator[Live]:
    tools = {each.name: each for each in (pay,)}
    with live(Options(tools=tools), **place) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Live) -> Iterator[Page]:
    with looking(browser, server.url) as page:
        sign_in(page, server.url, server.secret)
        yield page


@holdfast.tool(effect="mutate", verify=lambda *_: holdfast.Landed({"receipt": 1}))
def pay(hotel: str) -> None:
    """Never called."""


def test_a_key_is_restored_with_the_keyboard_alone(page: Page, store: holdfast.Store) -> None:
    session = store.session("restored")
    for city in ("Rome", "Oslo", "Paris"):
        session.state.set("plan", {"city": city, "nights": 2})
    page.goto("/ui/")
    press(page, "restored")
    page.wait_for_url("**/ui/sessions/restored")
    press(page, "State")
    page.wait_for_url("**/state")
    press(page, "plan")
    page.wait_for_url("**/state/plan")
    press(page, "Compare version 1 with now")
    expect(page.locator("main")).to_contain_text('removed:"Rome"')
    expect(page.locator("main")).to_contain_text('added:"Paris"')
    press(page, "Why", "x")
    press(page, "Restore version 1")
    page.wait_for_url("**/state/plan")
    expect(page.get_by_role("heading", name="Now: version 4")).to_be_visible()
    entry = session.state.entry("plan")
    assert entry is not None
    assert (entry.version, entry.value) == (4, {"city": "Rome", "nights": 2})
    assert store.latest_events(limit=1)[0].data["reason"] == "x"
    last = store.audit.list(limit=1_000)[-1]
    told = (last.actor, last.action, last.subject, last.reason)
    assert told[1:] == ("state_set", "restored plan", "version 4")
    assert told[0] != "local"


def test_of_two_tabs_that_edit_a_key_the_second_sees_both_values(
    page: Page, store: holdfast.Store
) -> None:
    state = store.session("edited").state
    state.set("plan", {"city": "Rome"})
    other = page.context.new_page()
    refused = "status of 409"
    for tab in (page, other):
        tab.goto("/ui/sessions/edited/state/plan")
        press(tab, "Change it")
        tab.get_by_label("Why").fill("a better city")
    page.get_by_label("Value, as JSON").fill('{"city": "Oslo"}')
    page.get_by_role("button", name="Set the key").click()
    expect(page.get_by_role("heading", name="Now: version 2")).to_be_visible()
    # What is typed stays while the page shows what others write.
    other.get_by_label("Value, as JSON").fill('{"city": "Paris"}')
    expect(other.get_by_role("heading", name="Now: version 2")).to_be_visible()
    complaints: list[str] = []
    other.on("console", lambda told: complaints.append(told.text))
    other.get_by_role("button", name="Set the key").click()
    expect(other.get_by_role("alert")).to_contain_text("Nothing was written")
    expect(other.get_by_role("alert")).to_be_focused()
    now = other.get_by_role("region", name="The current value")
    expect(now).to_contain_text("Oslo")
    differs = other.get_by_role("region", name="What your value would change")
    expect(differs).to_contain_text("Paris")
    found = Axe().run(other, options=RULES)
    assert found.violations_count == 0, found.generate_report()
    assert all(refused in each for each in complaints)
    assert state.get("plan") == {"city": "Oslo"}
    expect(other.get_by_label("Why")).to_have_value("a better city")
    other.get_by_role("button", name="Set the key").click()
    expect(other.get_by_role("heading", name="Now: version 3")).to_be_visible()
    assert state.get("plan") == {"city": "Paris"}
    assert [(each.key, each.expected, each.current) for each in state.conflicts()] == [
        ("plan", 1, 2)
    ]


AWAY = """
window.away = false;
Object.defineProperty(document, "hidden", { get: () => window.away });
window.turn = (away) => {
  window.away = away;
  document.dispatchEvent(new Event("visibilitychange"));
};
"""


def test_a_hidden_tab_stops_and_catches_up(page: Page, store: holdfast.Store) -> None:
    seen: list[str] = []
    page.add_init_script(AWAY)
    page.goto("/ui/sessions")
    expect(page.locator("#live")).to_contain_text("Live")
    other = page.context.new_page()
    other.goto("/ui/sessions")
    expect(other.locator("#live")).to_contain_text("Live")
    page.evaluate("turn(true)")
    page.on("request", lambda asked: seen.append(asked.url))
    store.session("seen-by-one")
    expect(other.get_by_role("link", name="seen-by-one")).to_be_visible()
    assert seen == []
    expect(page.get_by_role("link", name="seen-by-one")).to_have_count(0)
    page.evaluate("turn(false)")
    expect(page.get_by_role("link", name="seen-by-one")).to_have_count(1)


SPOKEN = """
window.now = 1e12;
Date.now = () => window.now;
document.addEventListener("DOMContentLoaded", () => {
  window.spoken = 0;
  const region = document.querySelector("#live-spoken");
  const count = () => { window.spoken += 1; };
  if (region) new MutationObserver(count).observe(region, { childList: true });
});
"""


def test_updates_are_spoken_once_in_five_seconds(page: Page, store: holdfast.Store) -> None:
    page.add_init_script(SPOKEN)
    page.goto("/ui/sessions")
    expect(page.locator("#live")).to_contain_text("Live")
    for number in range(3):
        store.session(f"spoken-{number}")
        expect(page.get_by_role("link", name=f"spoken-{number}")).to_be_visible()
    assert page.evaluate("window.spoken") == 1
    page.evaluate("window.now += 4999")
    store.session("spoken-too-soon")
    expect(page.get_by_role("link", name="spoken-too-soon")).to_be_visible()
    assert page.evaluate("window.spoken") == 1
    page.evaluate("window.now += 1")
    store.session("spoken-again")
    expect(page.get_by_role("link", name="spoken-again")).to_be_visible()
    assert page.evaluate("window.spoken") == 2


def test_no_page_scrolls_sideways_at_twice_its_size(browser: Browser, server: Live) -> None:
    zoomed: Any = {"viewport": {"width": 640, "height": 400}, "device_scale_factor": 2}
    with looking(browser, server.url, **zoomed) as page:
        sign_in(page, server.url, server.secret)
        for path in kinds_of_pages():
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= 640, path


@pytest.mark.parametrize(("motion", "name"), [("reduce", "none"), ("no-preference", "changed")])
def test_changed_rows_flash_unless_motion_is_not_wanted(
    browser: Browser, server: Live, store: holdfast.Store, motion: Any, name: str
) -> None:
    state = store.session(f"flashes-{motion}").state
    state.set("n", 1)
    with looking(browser, server.url, reduced_motion=motion) as page:
        sign_in(page, server.url, server.secret)
        page.goto(f"/ui/sessions/flashes-{motion}/state")
        expect(page.locator("#live")).to_contain_text("Live")
        state.set("n", 2)
        row = page.locator("tr.changed")
        expect(row).to_contain_text("2")
        assert row.evaluate("(each) => getComputedStyle(each).animationName") == name


def test_every_moment_has_two_times(page: Page) -> None:
    for path in kinds_of_pages():
        page.goto(path)
        times = "all => all.map((each) => [each.dateTime, each.title, each.textContent])"
        for exact, title, words in page.eval_on_selector_all("main time", times):
            assert exact == title
            assert exact.endswith("Z"), path
            assert words, path


def test_what_is_typed_stays_while_the_page_asks_again(page: Page, store: holdfast.Store) -> None:
    store.work.submit("typed", queue="typed", id="typed")
    store.work.claim("worker-6", queues=["typed"], lease_seconds=3_600)
    page.goto("/ui/work/typed")
    actions = page.get_by_role("region", name="Actions")
    actions.get_by_text("curl").first.click()
    actions.get_by_label("Why").fill("it hangs")
    actions.get_by_role("button", name="Release").focus()
    for _ in range(3):
        with page.expect_event("response"):
            pass
    expect(actions.get_by_label("Why")).to_have_value("it hangs")
    expect(actions.get_by_text("-d reason=TEXT")).to_be_visible()
    actions.get_by_role("button", name="Release").press("Enter")
    expect(page.get_by_role("row").filter(has_text="taken away")).to_contain_text("it hangs")


def test_every_action_works_with_the_keyboard_alone(page: Page, place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        id, other = doubt(store.session("keys"), "pay"), doubt(store.session("keys"), "lend")
        page.goto(f"/ui/effects/{id}")
        press(page, "Verify")
        expect(page.locator("main")).to_contain_text("verified")
        assert store.effect(id).result == {"receipt": 1}
        id = other
        store.work.submit("later", delay_seconds=3_600, id="later-on")
        store.work.submit("hangs", queue="hung", id="hung")
        [held] = store.work.claim("worker-9", queues=["hung"], lease_seconds=3_600)
        parked = store.session("keys-too", agent="letters").wait_for_approval("Send it?")
        page.goto(f"/ui/effects/{id}")
        press(page, "It landed", "Space")
        press(page, "How you know", "a")
        press(page, "Decide")
        expect(page.locator("main")).to_contain_text("completed")
        page.goto("/ui/work/hung")
        press(page, "Why", "x")
        press(page, "Release")
        expect(page.get_by_role("row").filter(has_text="taken away")).to_contain_text("x")
        assert store.work.get("hung").fence == held.fence + 1
        page.goto("/ui/work/later-on")
        press(page, "Make it ready now")
        expect(page.locator("main")).not_to_contain_text("Make it ready now")
        press(page, "Cancel")
        expect(page.get_by_role("button", name="Submit it again")).to_be_visible()
        press(page, "Submit it again")
        expect(page.locator("main")).to_contain_text("Redriven from")
        page.goto(f"/ui/pauses/{parked.pause_id}")
        press(page, "Reject")
        expect(page.locator("main")).to_contain_text("rejected")


def test_versions_and_the_frame_work_with_the_keyboard_alone(
    page: Page, store: holdfast.Store
) -> None:
    session = store.session("keys-of-versions")
    session.save({"n": 1})
    session.save({"n": 2})
    page.goto("/ui/sessions/keys-of-versions/checkpoints")
    press(page, "Compare the two")
    expect(page.get_by_role("heading", name="Version 1 compared with version 2")).to_be_visible()
    page.goto("/ui/sessions/keys-of-versions/checkpoints/1")
    press(page, "Name of the fork", "F")
    press(page, "Fork at version 1")
    expect(page.get_by_role("heading", name="F", exact=True)).to_be_visible()
    page.goto("/ui/sessions/keys-of-versions/checkpoints/1")
    press(page, "Rewind this session", "Space")
    press(page, "Rewind to version 1")
    expect(page.locator("main")).to_contain_text("Rewound toversion 1")
    page.goto(f"/ui/work/{ITEM}")
    press(page, "Search", "t")
    page.keyboard.type("rip-hotels")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/sessions/trip-hotels")
    press(page, "Timeline")
    page.wait_for_url("**/timeline")
    expect(page.locator("#live")).to_contain_text("Live")
    press(page, "Pause")
    expect(page.locator("#live")).to_contain_text("Paused")
    press(page, "Theme")
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    press(page, "Sign out")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
