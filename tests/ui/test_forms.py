"""A refused form is shown again: what is wrong beside its field, and what was typed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, expect

import holdfast
from holdfast.server.options import Options
from holdfast.server.routes import ENDPOINTS
from holdfast.server.ui.explanations import EXPLAINED, explained
from tests.server.live import Live, live
from tests.server.serving import Served, error, serving
from tests.ui.browsers import RULES, WAIT_MS, sign_in
from tests.ui.content import doubt

HTML = {"accept": "text/html"}
# Forms that send nothing that a person types or that could be refused.
NEVER_REFUSED = {"/ui/logout", "/ui/theme", "/ui/work/{id}/cancel"}


@dataclass(frozen=True)
class Case:
    """A form with something wrong: which page shows it again, at which field, with what words."""

    action: str
    sent: dict[str, str]
    page: str
    field: str | None
    words: str
    kept: tuple[str, str] | None = None
    status: int = 422


def cases(made: dict[str, str]) -> dict[str, Case]:
    """Return something wrong for each form, at each field that a person fills in."""
    effect, pause, key = (
        f"effects/{made['effect']}",
        f"pauses/{made['pause']}",
        "sessions/s/state/k",
    )
    version, long = "sessions/s/checkpoints/1", "x" * 2_001
    landed = {"verdict": "landed", "note": "seen", "result": ""}
    given = {"value": "5", "expected_version": "2", "reason": "why"}
    restored = {"sequence": "1", "expected_version": "2", "reason": "why"}
    return {
        "no verdict": Case(f"{effect}/resolve", {"note": "n"}, effect, "verdict", "Fill this in."),
        "spaces alone": Case(
            f"{effect}/resolve", landed | {"note": "  "}, effect, "note", "Fill this in.",
            ("verdict", "landed"),
        ),
        "a long note": Case(
            f"{effect}/resolve", landed | {"note": long}, effect, "note", "at most 2000 characters",
            ("note", long),
        ),
        "a result that is no JSON": Case(
            f"{effect}/resolve", landed | {"result": "{1"}, effect, "result",
            "The result is not JSON", ("note", "seen"),
        ),
        "a tool that is not there": Case(f"{effect}/verify", {}, effect, None, "lend"),
        "a long reason": Case(
            f"{pause}/decide", {"verdict": "approve", "note": long}, pause, "note",
            "at most 1000 characters", ("note", long),
        ),
        "nothing decided": Case(f"{pause}/decide", {"note": "n"}, pause, None, "Fill this in.",
                                ("note", "n")),
        "no reason": Case("work/hung/release", {"reason": " ", "fence": "1"}, "work/hung", "reason",
                          "Fill this in."),
        "another holder": Case(
            "work/hung/release", {"reason": "it hangs", "fence": "7"}, "work/hung", None,
            "The item is held with fence 1", ("reason", "it hangs"), 409,
        ),
        "not waiting": Case("work/hung/retry", {}, "work/hung", None, "in_progress"),
        "not ended": Case("work/hung/redrive", {}, "work/hung", None, "in_progress"),
        "a name of two lines": Case(f"{version}/fork", {"name": "a\nb"}, version, "name",
                                    "printable characters"),
        "a long name": Case(f"{version}/fork", {"name": "x" * 257}, version, "name",
                            "at most 256 characters", ("name", "x" * 257)),
        "not agreed": Case(f"{version}/rewind", {"expected_version": "2"}, version, "agreed",
                           "Tick the box"),
        "a newer version": Case(
            f"{version}/rewind", {"expected_version": "1", "agreed": "yes"}, version, None,
            "The session is at version 2", ("agreed", "yes"), 409,
        ),
        "a value that is no JSON": Case(f"{key}/set", given | {"value": "{1"}, key, "value",
                                        "The value is not JSON", ("reason", "why")),
        "no value": Case(f"{key}/set", given | {"value": " "}, key, "value", "Fill this in."),
        "a value of another kind": Case(f"{key}/set", given | {"value": '"text"'}, key, "value",
                                        "number", ("value", '"text"')),
        "a key without a reason": Case(f"{key}/set", given | {"reason": " "}, key, "reason",
                                       "Fill this in.", ("value", "5")),
        "a restore without a reason": Case(
            f"{key}/restore", restored | {"reason": ""}, f"{key}/diff?a=1", "reason",
            "Fill this in.",
        ),
        "nothing to restore": Case(
            f"{key}/restore", restored | {"sequence": "0"}, f"{key}/diff?a=0", None,
            "The key did not exist at sequence 0", status=404,
        ),
    }  # fmt: skip


@holdfast.tool(effect="mutate")
def lend(hotel: str) -> None:
    """Never called."""


def fill(store: holdfast.Store) -> dict[str, str]:
    session = store.session("s")
    session.save({"n": 1})
    session.save({"n": 2})
    session.state.set_rule("k", schema={"type": "number"})
    session.state.set("k", 1)
    session.state.set("k", 2)
    store.work.submit("hangs", queue="hung", id="hung")
    store.work.claim("worker", queues=["hung"], lease_seconds=3_600)
    return {
        "effect": doubt(session, "lend"),
        "pause": store.session("one", agent="a").wait_for_approval("Send?").pause_id,
    }


NAMES = list(cases({"effect": "", "pause": ""}))


@pytest.fixture(scope="module")
def made(database: dict[str, Any]) -> dict[str, str]:
    with holdfast.open(**database) as store:
        return fill(store)


@pytest.fixture(scope="module")
def served(database: dict[str, Any], made: dict[str, str]) -> Iterator[Served]:
    with serving(**database) as served:
        yield served


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_form_says_at_its_field_what_is_wrong(
    served: Served, made: dict[str, str], name: str
) -> None:
    case = cases(made)[name]
    before = served.get(f"/ui/{case.page}", headers=HTML).text
    answer = served.post(f"/ui/{case.action}", data=case.sent, headers=HTML)
    assert answer.status_code == case.status
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    text = answer.text
    form = case.action.rpartition("/")[2]
    if case.field is None:
        assert "aria-invalid" not in text
        note = re.search(r'role="alert" tabindex="-1" autofocus><p>(.*?)</p>', text)
    else:
        id = f"{form}-{case.field}-problem"
        assert f'aria-invalid="true" aria-describedby="{id}"' in text
        note = re.search(rf'id="{id}">(.*?)</p>', text)
    assert note is not None
    assert case.words in note[1]
    assert len(re.findall(r"\sautofocus", text)) == 1
    if case.kept:
        field, value = case.kept
        typed = re.escape(value.replace('"', "&#34;"))
        kept = (
            rf'<input name="{field}" value="{typed}"',
            rf'<input type="(radio|checkbox)" name="{field}" value="{typed}"[^>]* checked',
            rf'name="{field}"[^>]*>\n{typed}</textarea',
        )
        assert any(re.search(each, text) for each in kept)
    # It is the page of the form, under its own address, and is not taken for a live one.
    twin = re.search(r'href="([^"]*)">This page as JSON', text)
    assert twin is not None
    place = html.unescape(twin[1])
    assert re.split(r"[?&]", place)[:-1] == re.split(r"[?&]", f"/ui/{case.page}")
    assert served.get(place).status_code == 200
    heading = re.search(r"<h1>.*?</h1>", before, re.S)
    assert heading is not None
    assert heading[0] in text
    assert "data-live" not in text
    assert "data-poll" not in text
    # Programs get what the API tells them.
    told = served.post(f"/ui/{case.action}", data=case.sent)
    assert (told.status_code, told.headers["content-type"]) == (
        case.status, "application/problem+json",
    )  # fmt: skip
    assert served.get(f"/ui/{case.page}", headers=HTML).text.count("aria-invalid") == 0


def test_every_form_and_field_has_a_case() -> None:
    forms = {
        each.path
        for each in ENDPOINTS
        if each.is_page and each.method == "POST" and each.path != "/ui/login"
    }
    wanted = {path.rpartition("/")[2]: path for path in forms - NEVER_REFUSED}
    refused: dict[str, set[str | None]] = {}
    for case in cases({"effect": "", "pause": ""}).values():
        refused.setdefault(case.action.rpartition("/")[2], set()).add(case.field)
    assert set(refused) == set(wanted)
    fields = {
        "resolve": {"verdict", "note", "result"}, "decide": {"note"}, "release": {"reason"},
        "fork": {"name"}, "rewind": {"agreed"}, "set": {"value", "reason"}, "restore": {"reason"},
    }  # fmt: skip
    for form, named in fields.items():
        assert named <= refused[form], form


def test_a_form_whose_page_is_gone_ends_on_the_page_of_the_problem(served: Served) -> None:
    gone = served.post("/ui/work/none/release", data={"reason": "r", "fence": "1"}, headers=HTML)
    assert gone.status_code == 404
    assert "There is no such page" in gone.text
    sent = {"sequence": "x", "expected_version": "2", "reason": "r"}
    nowhere = served.post("/ui/sessions/s/state/k/restore", data=sent, headers=HTML)
    assert (nowhere.status_code, "sequence: Enter a whole number." in nowhere.text) == (422, True)
    foreign = served.post(
        "/ui/work/hung/release", data={"reason": "r", "fence": "1"}, headers=HTML, token=None
    )
    assert foreign.status_code == 401


def test_what_was_typed_is_shown_as_text(served: Served) -> None:
    hostile = '"><script>alert(1)</script>\u202e'
    sent = {"value": hostile, "expected_version": "2", "reason": hostile}
    text = served.post("/ui/sessions/s/state/k/set", data=sent, headers=HTML).text
    assert "<script>alert" not in text
    assert "\u202e" not in text
    assert 'value="&#34;&gt;&lt;script&gt;alert(1)&lt;/script&gt;\\u202e"' in text


def test_a_filter_that_finds_no_session_says_so_at_its_field(served: Served) -> None:
    answer = served.get("/ui/events?session=nobody&kind=state", headers=HTML)
    assert answer.status_code == 404
    assert 'aria-describedby="filter-session-problem"' in answer.text
    assert 'name="session" value="nobody"' in answer.text
    assert 'name="kind" value="state"' in answer.text
    assert error(served.get("/ui/events?session=nobody")) == (404, "session_not_found")
    # Beside no field of a form, a problem has its own page.
    wrong = served.get("/ui/events?cursor=wrong", headers=HTML)
    assert (wrong.status_code, "The page cannot be shown like this" in wrong.text) == (422, True)


def test_the_page_of_a_problem_has_what_other_pages_have(served: Served) -> None:
    for path in ("/ui/nothing", "/ui/sessions/none", "/ui/sessions?status=odd"):
        text = served.get(path, headers=HTML).text
        assert 'role="search"' in text, path
        assert "Sign out" in text, path
    odd = served.get("/ui/sessions?status=odd", headers=HTML).text
    assert "status: Choose one of the options." in odd
    nobody = served.post("/ui/work/x/retry", headers={**HTML, "sec-fetch-site": "none"}, token=None)
    assert nobody.status_code == 401
    assert "Sign out" not in nobody.text


def test_problems_are_told_in_words_for_people() -> None:
    busy = {
        "error": "unavailable",
        "title": "The store cannot serve the request now",
        "status": 503,
    }
    title, [advice] = explained({**busy, "detail": busy["title"]})
    assert title == "The store cannot be reached right now"
    assert "load the page again" in advice
    failed = {"error": "internal", "title": "The server failed", "status": 500}
    assert explained(failed) == (
        "The server failed", ["Something went wrong here; the log of the server says what."],
    )  # fmt: skip
    limit = {
        "error": "invalid_request", "title": "The request is invalid", "status": 422,
        "detail": "/limit: Expected `int` >= 1", "pointer": "/limit",
    }  # fmt: skip
    assert explained(limit)[1][0] == "limit: Enter a whole number of at least 1."
    unknown = {**limit, "detail": "the query: Object contains unknown field `x`", "pointer": ""}
    assert explained(unknown)[1][0] == "The page does not know “x”."
    for code, (heading, sentence) in EXPLAINED.items():
        assert sentence.endswith("."), code
        assert heading is None or heading[0].isupper(), code


@pytest.fixture(scope="module")
def browsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, dict[str, str]]]:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('forms')}/store.db"}
    with holdfast.open(**place) as store:
        made = fill(store)
    with live(Options(), **place) as server:
        yield server, made


def submit(page: Page, case: Case) -> None:
    """Send a form with something wrong; what a browser checks by itself is not checked here."""
    page.goto(f"/ui/{case.page}")
    page.evaluate(
        """([action, sent]) => {
            const form = [...document.forms].find((each) => each.action.endsWith(action))
                ?? Object.assign(document.createElement("form"), { method: "post", action });
            if (!form.isConnected) {
                form.append(document.querySelector("[name=csrf]").cloneNode());
                document.body.append(form);
            }
            form.noValidate = true;
            for (const each of [...form.elements]) if (each.name !== "csrf") each.remove();
            for (const [name, value] of Object.entries(sent)) {
                const field = document.createElement("textarea");
                Object.assign(field, { name, value });
                form.append(field);
            }
            form.submit();
        }""",
        [f"/ui/{case.action}", case.sent],
    )


@pytest.mark.parametrize("scripts", [True, False])
def test_the_field_that_is_wrong_has_the_focus_and_its_words(
    browser: Browser, browsed: tuple[Live, dict[str, str]], scripts: bool
) -> None:
    server, made = browsed
    context = browser.new_context(base_url=server.url, java_script_enabled=True)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    sign_in(page, server.url, server.secret)
    if not scripts:
        # Scripts of pages do not run; those of this test do.
        page.route("**/*.js", lambda route: route.fulfill(body="", content_type="text/javascript"))
    for name, case in cases(made).items():
        submit(page, case)
        if case.field is None:
            expect(page.get_by_role("alert").first).to_be_focused()
            expect(page.get_by_role("alert").first).to_contain_text(case.words)
        else:
            wrong = page.locator('[aria-invalid="true"]')
            expect(wrong).to_have_count(1)
            expect(wrong).to_have_accessible_description(re.compile(re.escape(case.words)))
            focused = page.locator(f'[name="{case.field}"]:focus')
            expect(focused).to_have_count(1)
        found = Axe().run(page, options=RULES)
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
    context.close()


def test_a_person_mends_what_was_wrong_and_sends_it_again(
    browser: Browser, browsed: tuple[Live, dict[str, str]]
) -> None:
    server, _ = browsed
    for enabled in (True, False):
        context = browser.new_context(base_url=server.url, java_script_enabled=enabled)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        sign_in(page, server.url, server.secret)
        page.goto("/ui/sessions/s/state/k")
        page.get_by_text("Change it").click()
        page.get_by_label("Value, as JSON").fill("3,")
        page.get_by_label("Why").fill("one more")
        page.get_by_role("button", name="Set the key").click()
        expect(page.get_by_label("Value, as JSON")).to_be_focused()
        expect(page.get_by_label("Value, as JSON")).to_have_value("3,")
        expect(page.get_by_role("alert")).to_contain_text("The value is not JSON")
        page.keyboard.press("End")
        page.keyboard.press("Backspace")
        page.get_by_role("button", name="Set the key").press("Enter")
        page.wait_for_url("**/ui/sessions/s/state/k")
        version = 3 if enabled else 4
        expect(page.get_by_role("heading", name=f"Now: version {version}")).to_be_visible()
        expect(page.locator('[aria-invalid="true"]')).to_have_count(0)
        context.close()


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_refused_form_can_be_read_in_every_size_and_theme(
    browser: Browser, browsed: tuple[Live, dict[str, str]], theme: Any, width: int
) -> None:
    server, made = browsed
    size: Any = {"width": width, "height": 700}
    context = browser.new_context(base_url=server.url, color_scheme=theme, viewport=size)
    page = context.new_page()
    sign_in(page, server.url, server.secret)
    for name in ("a value that is no JSON", "no verdict", "another holder"):
        submit(page, cases(made)[name])
        expect(page.get_by_role("alert").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        found = Axe().run(page, options=RULES)
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
    context.close()


def test_the_page_of_a_problem_is_accessible(
    browser: Browser, browsed: tuple[Live, dict[str, str]]
) -> None:
    server, _ = browsed
    context = browser.new_context(base_url=server.url)
    page = context.new_page()
    sign_in(page, server.url, server.secret)
    for path in ("/ui/nothing", "/ui/sessions?status=odd", "/ui/events?session=nobody"):
        page.goto(path)
        found = Axe().run(page, options=RULES)
        assert found.violations_count == 0, f"{path}: {found.generate_report()}"
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    context.close()
