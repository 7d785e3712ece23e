"""The pages in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, expect

import holdfast
from holdfast.server.options import Options
from tests.server.live import Live, live
from tests.server.processes import free_port, server_process, token_file
from tests.ui.browsers import RULES, WAIT_MS, looking, sign_in
from tests.ui.content import ITEM, doubt, fill, kinds_of_pages


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('ui')}/store.db"}
    with holdfast.open(**place) as store:
        fill(store)
    return place


@pytest.fixture(scope="module")
def server(place: dict[str, Any]) -> Iterator[Live]:
    with live(**place) as server:
        yield server


def secret_of(server: Live) -> str:
    return server.bearer["authorization"].removeprefix("Bearer ")


@pytest.fixture
def page(browser: Browser, server: Live) -> Iterator[Page]:
    with looking(browser, server.url) as page:
        sign_in(page, server.url, secret_of(server))
        yield page


def in_another_process(place: dict[str, Any], code: str) -> None:
    """Run lines with an open `store` in a process of their own."""
    lines = f"import holdfast\nwith holdfast.open(**{place!r}) as store:\n    {code}"
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=120)


def test_the_printed_address_signs_in_and_survives_a_restart(
    browser: Browser, tmp_path: Any
) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    port = f"--port={free_port()}"
    with server_process(port, **place) as (_, told), looking(browser, told["url"]) as page:
        page.goto(told["dashboard"])
        page.wait_for_url(f"{told['url']}/ui/")
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        expect(page.get_by_text("There are no sessions yet")).to_be_visible()
        expect(page.locator("#live")).to_contain_text("Live")
        page.goto(f"{told['url']}/ui/sessions")
        expect(page.locator("#live")).to_contain_text("Live")
    assert token_file(place).exists()


def test_a_page_that_asks_again_and_again_tells_that_the_server_is_away(
    browser: Browser, tmp_path: Any
) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    port = free_port()
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    with server_process(f"--port={port}", **place) as (_, told):
        page.goto(told["dashboard"])
        page.wait_for_url(f"{told['url']}/ui/")
        page.goto(f"{told['url']}/ui/work")
        expect(page.locator("#live")).to_contain_text("Live")
    expect(page.locator("#live")).to_contain_text("Reconnecting")
    in_another_process(place, "store.work.submit('while-away')")
    with server_process(f"--port={port}", **place):
        expect(page.get_by_role("cell", name="while-away")).to_be_visible()
        expect(page.locator("#live")).to_contain_text("Live")
    context.close()


def test_an_open_page_of_a_revoked_token_asks_to_sign_in(
    browser: Browser, server: Live, place: dict[str, Any]
) -> None:
    with holdfast.open(**place) as store:
        created = store.tokens.create("leaver")
        context = browser.new_context()
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        sign_in(page, server.url, created.secret, "/ui/sessions")
        expect(page.locator("#live")).to_contain_text("Live")
        store.tokens.revoke(created.id)
        page.wait_for_url(f"{server.url}/ui/login?next=**")
        expect(page.get_by_label("Token")).to_be_visible()
        context.close()


def test_an_open_page_of_what_was_removed_says_so(
    browser: Browser, server: Live, place: dict[str, Any]
) -> None:
    with holdfast.open(**place) as store:
        session = store.session("removed")
        context = browser.new_context()
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        sign_in(page, server.url, secret_of(server), "/ui/sessions/removed")
        expect(page.locator("#live")).to_contain_text("Live")
        session.delete()
        expect(page.locator("#live")).to_contain_text("Removed")
        expect(page.get_by_role("button", name="Pause")).to_be_hidden()
        context.close()


def test_a_page_goes_on_when_the_server_was_started_again(browser: Browser, tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    port = free_port()
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    with server_process(f"--port={port}", **place) as (_, told):
        page.goto(told["dashboard"])
        page.wait_for_url(f"{told['url']}/ui/")
        expect(page.locator("#live")).to_contain_text("Live")
    expect(page.locator("#live")).to_contain_text("Reconnecting")
    in_another_process(place, "store.session('while-away')")
    with server_process(f"--port={port}", **place):
        expect(page.get_by_role("link", name="while-away")).to_be_visible(timeout=WAIT_MS)
        expect(page.locator("#live")).to_contain_text("Live")
    context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_accessible(
    browser: Browser, server: Live, place: dict[str, Any], theme: Any
) -> None:
    with holdfast.open(**place) as store:
        pauses = [f"/ui/pauses/{each.id}" for each in store.pauses(state="waiting", limit=2)]
        [effect] = store.effects(status="unknown", limit=1)
    narrow: Any = {"width": 320, "height": 700}
    with looking(browser, server.url, color_scheme=theme) as page:
        sign_in(page, server.url, secret_of(server))
        for path in (*kinds_of_pages(), *pauses, f"/ui/effects/{effect.id}"):
            page.goto(path)
            found = Axe().run(page, options=RULES)
            assert found.violations_count == 0, f"{path}: {found.generate_report()}"
            page.set_viewport_size(narrow)
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, path
            page.set_viewport_size({"width": 1280, "height": 720})


def test_the_login_page_is_accessible_and_tells_of_a_wrong_token(
    browser: Browser, server: Live
) -> None:
    with looking(browser, server.url) as page:
        page.goto("/ui/login")
        assert Axe().run(page, options=RULES).violations_count == 0
    context = browser.new_context(base_url=server.url)
    page = context.new_page()
    page.goto("/ui/sessions?status=active")
    page.get_by_label("Token").fill("hf_wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("unknown")
    expect(page.get_by_label("Token")).to_be_focused()
    page.keyboard.type(secret_of(server))
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/sessions?status=active")
    context.close()


def test_the_theme_is_chosen_and_kept(page: Page) -> None:
    shown = "getComputedStyle(document.documentElement).colorScheme"
    page.get_by_role("button", name="Theme: system").click()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate(shown) == "dark"
    page.goto("/ui/sessions")
    page.get_by_role("button", name="Theme: dark").click()
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    assert page.evaluate(shown) == "light"


def test_a_session_of_another_process_appears_by_itself(page: Page, place: dict[str, Any]) -> None:
    page.goto("/ui/sessions")
    expect(page.locator("#live")).to_contain_text("Live")
    page.evaluate("window.kept = true")
    in_another_process(place, "store.session('made-elsewhere')")
    expect(page.get_by_role("link", name="made-elsewhere")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#live")).to_contain_text("Paused")
    in_another_process(place, "store.session('made-meanwhile')")
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("link", name="made-meanwhile")).to_be_visible()
    assert page.evaluate("window.kept") is True


def test_two_versions_are_compared_forked_and_gone_back_to(page: Page, server: Live) -> None:
    with_session(server, "versions")
    page.goto("/ui/sessions/versions/checkpoints")
    page.get_by_role("radio", name="with version 3").check()
    page.get_by_role("radio", name="Compare version 1").check()
    # What was chosen stays when the page is updated meanwhile.
    server.client.post("/sessions/versions/checkpoints", json={"channels": {"n": 3}})
    expect(page.get_by_role("radio", name="with version 4")).to_be_visible()
    expect(page.get_by_role("radio", name="Compare version 1")).to_be_focused()
    page.get_by_role("button", name="Compare the two").click()
    expect(page.get_by_role("heading", name="Version 1 compared with version 3")).to_be_visible()
    expect(page.locator("main")).to_contain_text("removed:1")
    expect(page.locator("main")).to_contain_text("added:3")
    page.goto("/ui/sessions/versions/checkpoints/2")
    page.get_by_label("Name of the fork").fill("Another try")
    page.get_by_role("button", name="Fork at version 2").click()
    expect(page.get_by_role("heading", name="Another try")).to_be_visible()
    page.goto("/ui/sessions/versions/checkpoints/2")
    # From the box to the button with the keyboard alone.
    page.get_by_role("checkbox", name="Rewind this session").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Version 5")).to_be_visible()
    expect(page.locator("main")).to_contain_text("Rewound toversion 2")
    answer = server.client.get("/sessions/versions/checkpoints/latest").json()
    assert answer["channels"] == {"n": 2}


def with_session(server: Live, id: str) -> None:
    server.client.post("/sessions", json={"id": id})
    for number in (1, 2, 3):
        server.client.post(f"/sessions/{id}/checkpoints", json={"channels": {"n": number}})


def test_a_checkpoint_of_another_process_appears_by_itself(
    page: Page, place: dict[str, Any]
) -> None:
    in_another_process(place, "store.session('grows').append('transcript', [])")
    page.goto("/ui/sessions/grows/transcript")
    expect(page.locator("#live")).to_contain_text("Live")
    said = "[{'role': 'user', 'content': 'said elsewhere'}]"
    in_another_process(place, f"store.session('grows').append('transcript', {said})")
    expect(page.get_by_text("said elsewhere")).to_be_visible()


def test_deciding_what_is_in_doubt_lets_the_agent_go_on(page: Page, place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("payer")
        id = doubt(session, "pay")
        page.goto("/ui/in-doubt")
        row = page.get_by_role("row").filter(has_text="pay")
        row.get_by_role("link").first.click()
        page.wait_for_url(f"**/ui/effects/{id}")
        page.get_by_role("radio", name="It landed").check()
        page.get_by_label("How you know").fill("seen in the bank")
        page.get_by_label("Result, as JSON").fill('{"receipt": 7}')
        page.get_by_role("button", name="Decide").click()
        expect(page.locator("main")).to_contain_text("seen in the bank")
        expect(page.get_by_role("button", name="Decide")).to_have_count(0)
        effect = store.effect(id)
        assert (effect.status, effect.result, effect.note) == (
            "completed", {"receipt": 7}, "seen in the bank",
        )  # fmt: skip
        again = session.begin("pay", {"hotel": ""}, "call-pay")
        assert isinstance(again, holdfast.Replay)
        assert again.result.value == {"receipt": 7}
        actions = {(each.action, each.subject) for each in store.audit.list()}
        assert ("effect_resolved", id) in actions


def test_a_person_approves_with_the_keyboard_and_the_session_goes_on(
    page: Page, place: dict[str, Any]
) -> None:
    with holdfast.open(**place) as store:
        for name, verdict in (("sender", "Approve"), ("spender", "Reject")):
            page.goto("/ui/pauses?reason=approval")
            expect(page.locator("#live")).to_contain_text("Live")
            parked = store.session(name, agent=name).wait_for_approval({"send": name})
            row = page.locator(f'tr[data-row="{parked.pause_id}"]')
            row.get_by_role("link").first.focus()
            page.keyboard.press("Enter")
            page.get_by_label("Why").focus()
            page.keyboard.type("I looked at it")
            page.keyboard.press("Tab")
            if verdict == "Reject":
                page.keyboard.press("Tab")
            expect(page.get_by_role("button", name=verdict)).to_be_focused()
            page.keyboard.press("Enter")
            expect(page.locator("main")).to_contain_text("I looked at it")
            expect(page.get_by_role("button", name=verdict)).to_have_count(0)
            [item] = store.work.claim("worker", queues=[f"agent:{name}"])
            decision = item.resume().decision
            assert decision is not None
            assert (decision.is_approved, decision.note) == (
                verdict == "Approve", "I looked at it",
            )  # fmt: skip
            expect(page.locator("main")).to_contain_text("resumed")


def test_a_read_only_server_shows_no_forms_and_refuses_them(
    browser: Browser, place: dict[str, Any]
) -> None:
    with holdfast.open(**place) as store:
        doubtful = store.effects(status="unknown")[0]
        pause = store.pauses(reason="approval", state="waiting")[0]
    with live(Options(is_read_only=True), **place) as server:
        with looking(browser, server.url) as page:
            sign_in(page, server.url, secret_of(server))
            expect(page.get_by_text("Read-only")).to_be_visible()
            places = (
                "sessions/trip/checkpoints/2", f"effects/{doubtful.id}", f"pauses/{pause.id}",
                f"work/{ITEM}",
            )  # fmt: skip
            for path in places:
                page.goto(f"/ui/{path}")
                forms = page.locator("main form[method=post]")
                expect(forms).to_have_count(0)
        actions = (
            "sessions/trip/checkpoints/2/fork", f"effects/{doubtful.id}/resolve",
            f"pauses/{pause.id}/decide", f"work/{ITEM}/redrive",
        )  # fmt: skip
        for action in actions:
            refused = server.client.post(f"/ui/{action}", data={"csrf": ""})
            assert refused.json()["error"] == "read_only"


def test_a_key_of_another_process_appears_and_the_past_is_played_back(
    page: Page, place: dict[str, Any]
) -> None:
    in_another_process(place, "store.session('counts').state.set('n', 10)")
    page.goto("/ui/sessions/counts/state")
    expect(page.locator("#live")).to_contain_text("Live")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="n", exact=True))
    expect(row).to_contain_text("10")
    lines = "[store.session('counts').state.increment('n') for _ in range(3)]"
    in_another_process(place, lines)
    expect(row).to_contain_text("13")
    page.reload()
    scrubber = page.get_by_role("slider")
    scrubber.focus()
    for key, value in (("Home", ""), ("ArrowRight", "10"), ("ArrowRight", "11"), ("End", "13")):
        page.keyboard.press(key)
        if value:
            expect(row).to_contain_text(value)
        else:
            expect(page.get_by_text("The tree shares no state at this sequence")).to_be_visible()
    for value in ("12", "11", "10"):
        page.keyboard.press("ArrowLeft")
        expect(row).to_contain_text(value)
    expect(page.get_by_text("This is the past.")).to_be_visible()


def test_a_timeline_is_played_back_and_grows(page: Page, place: dict[str, Any]) -> None:
    lines = "s = store.session('played'); [s.state.set('n', n * 11) for n in range(1, 5)]"
    in_another_process(place, lines)
    page.goto("/ui/sessions/played/timeline")
    expect(page.locator("#live")).to_contain_text("Live")
    scrubber = page.get_by_role("slider")
    moment = page.locator('[data-region="moment"]')
    row = moment.get_by_role("row").filter(has=page.get_by_role("link", name="n", exact=True))
    expect(row).to_contain_text("44")
    in_another_process(place, "store.session('played').state.set('n', 55)")
    # Who looks at the newest event goes with it.
    expect(row).to_contain_text("55")
    expect(scrubber).to_have_value(re.compile("[67]"))
    scrubber.focus()
    page.keyboard.press("Home")
    expect(moment).to_contain_text("The tree shared no state.")
    for value in ("11", "22", "33"):
        page.keyboard.press("ArrowRight")
        expect(row).to_contain_text(value)
    page.keyboard.press("ArrowLeft")
    expect(row).to_contain_text("22")
    assert "at=3" in page.url
    page.reload()
    expect(row).to_contain_text("22")
    page.get_by_label("Speed").select_option("4")
    scrubber.focus()
    page.keyboard.press("Space")
    expect(row).to_contain_text("55")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.locator('[data-position="2"]').click()
    expect(row).to_contain_text("11")
    page.get_by_label("Compare it with event").fill("4")
    page.get_by_role("button", name="Compare the two moments").click()
    expect(page.get_by_role("heading", name="Event 4 compared with event 2")).to_be_visible()
    expect(page.locator("main")).to_contain_text("removed:33")
    expect(page.locator("main")).to_contain_text("added:11")


def test_a_late_update_does_not_bring_a_reader_of_the_past_to_the_present(
    page: Page, place: dict[str, Any]
) -> None:
    lines = "s = store.session('late'); [s.state.set('n', n * 11) for n in range(1, 5)]"
    in_another_process(place, lines)
    page.goto("/ui/sessions/late/state")
    expect(page.locator("#live")).to_contain_text("Live")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="n", exact=True))
    expect(row).to_contain_text("44")
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    # The next update of the present is on its way until the reader has gone back.
    page.route("**/ui/sessions/late/state", hold)
    in_another_process(place, "store.session('late').state.set('n', 55)")
    while not held:
        page.wait_for_timeout(10)
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    expect(row).to_contain_text("33")
    expect(page).to_have_url(re.compile(r"\?at="))
    with page.expect_response(lambda answer: "at=" in answer.url):
        for each in held:
            each.continue_()
    expect(page.get_by_text("This is the past.")).to_be_visible()
    expect(row).to_contain_text("33")


def test_work_is_steered_and_claims_are_seen(page: Page, place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        for name in ("waits", "dies"):
            store.work.submit("board", queue="board", id=name, delay_seconds=3_600)
        page.goto("/ui/work?type=board")
        waits = page.locator('tr[data-row="waits"]')
        expect(waits).to_contain_text("waits for time")
        waits.get_by_role("link").click()
        page.get_by_role("button", name="Make it ready now").click()
        expect(page.get_by_role("button", name="Make it ready now")).to_have_count(0)
        page.goto("/ui/work?type=board")
        store.work.claim("worker-7", queues=["board"], lease_seconds=3_600)
        expect(waits).to_contain_text("worker-7")
        page.goto("/ui/work/dies")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Submit it again").click()
        expect(page.get_by_text("Redriven from")).to_be_visible()
        assert store.work.get("dies").status == "cancelled"
        assert len(store.work.list(type="board")) == 3


def test_a_hanging_worker_loses_its_item(page: Page, place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.work.submit("hangs", queue="hangs", id="hangs")
        [held] = store.work.claim("worker-8", queues=["hangs"], lease_seconds=3_600)
        page.goto("/ui/work/hangs")
        page.get_by_label("Why").fill("it hangs")
        page.keyboard.press("Enter")
        expect(page.get_by_role("row").filter(has_text="taken away")).to_contain_text("it hangs")
        with pytest.raises(holdfast.LeaseLost):
            held.complete("too late")
        assert store.work.get("hangs").fence == held.fence + 1


def test_what_tools_can_verify_and_undo_is_asked_of_them(
    browser: Browser, place: dict[str, Any]
) -> None:
    options = Options(tools={each.name: each for each in (reserve, order)})
    with holdfast.open(**place) as store:
        session = store.session("guest")
        session.save({"n": 1})
        session.call(reserve, seat=4)
        doubts = {name: doubt(session, name) for name in ("order", "order_twice", "other")}
        with live(options, **place) as server, looking(browser, server.url) as page:
            sign_in(page, server.url, secret_of(server))
            page.goto(f"/ui/effects/{doubts['other']}")
            expect(page.get_by_role("button", name="Decide")).to_be_visible()
            expect(page.get_by_role("button", name="Verify")).to_have_count(0)
            RESERVED["is_known"] = False
            page.goto(f"/ui/effects/{doubts['order']}")
            page.get_by_role("button", name="Verify").click()
            expect(page.get_by_text("could not tell")).to_be_visible()
            assert store.effect(doubts["order"]).status == "unknown"
            RESERVED["is_known"] = True
            page.get_by_role("button", name="Verify").focus()
            page.keyboard.press("Enter")
            expect(page.locator("main")).to_contain_text("verified")
            assert store.effect(doubts["order"]).result == {"order": 1}
            page.goto("/ui/sessions/guest/checkpoints/1")
            expect(page.locator("main")).to_contain_text("the tools of this server undo 1")
            page.get_by_role("checkbox", name="Rewind this session").check()
            page.get_by_role("button", name="Rewind to version 1").click()
            expect(page.get_by_role("heading", name="Version 2")).to_be_visible()
            assert RESERVED["seats"] == [-4]
            # What no tool could undo is listed.
            standing = page.locator('[data-region="standing"]')
            expect(standing.get_by_role("listitem")).to_have_count(3)
            expect(standing).not_to_contain_text("reserve")


RESERVED: dict[str, Any] = {"seats": [], "is_known": False}


def _give_back(arguments: dict[str, Any], result: Any, key: str) -> None:
    RESERVED["seats"].append(-arguments["seat"])


def _is_ordered(arguments: dict[str, Any], key: str) -> Any:
    return holdfast.Landed({"order": 1}) if RESERVED["is_known"] else holdfast.Unknown("busy")


@holdfast.tool(effect="mutate", undo=_give_back)
def reserve(seat: int) -> int:
    return seat


@holdfast.tool(effect="mutate", verify=_is_ordered)
def order(hotel: str) -> None:
    """Never called."""


def test_reading_works_without_javascript(browser: Browser, server: Live) -> None:
    with looking(browser, server.url, java_script_enabled=False) as page:
        sign_in(page, server.url, secret_of(server))
        for path in kinds_of_pages():
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.locator("#live")).to_be_hidden()
            expect(page.get_by_role("button", name="Copy")).to_have_count(0)
        page.goto("/ui/sessions")
        page.get_by_label("Agent").fill("booker")
        page.get_by_role("button", name="Filter").click()
        expect(page.get_by_role("link", name="trip-hotels")).to_be_visible()
        expect(page.get_by_role("link", name="Trip", exact=True)).to_have_count(0)


def test_everything_stands_below_a_base_path(browser: Browser, place: dict[str, Any]) -> None:
    options = Options(base_path="/tools/holdfast")
    with live(options, **place) as server, looking(browser, server.url) as page:
        sign_in(page, server.url, secret_of(server))
        for path in kinds_of_pages():
            page.goto(f"{server.url}{path}")
            places = page.eval_on_selector_all(
                "a[href], link[href], form[action]",
                "found => found.map((each) => each.href ?? each.action)",
            )
            assert all(each.startswith(f"{server.url}/ui/") for each in places)
        expect(page.locator("#live")).to_contain_text("Live")
