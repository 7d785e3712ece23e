"""Pages as they are sent: safe, whole without a browser's help, and with a JSON twin."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

import holdfast
from holdfast.server.ages import QueueAges
from holdfast.server.options import Options
from holdfast.server.ui.pages import timeline
from holdfast.server.ui.templates import compact, pretty
from holdfast.work.reports import WorkCount
from tests.server.serving import Served, error, serving
from tests.ui.content import ASKER, CHILD, EXPLORED, ITEM, LETTER, ROOT, fill, pages

HTML = {"accept": "text/html"}


@pytest.fixture(scope="module")
def filled(database: dict[str, Any]) -> Iterator[Served]:
    with holdfast.open(**database) as store:
        fill(store)
    with serving(**database) as served:
        yield served


@pytest.mark.parametrize("path", pages())
def test_every_page_is_safe_and_has_a_twin(filled: Served, path: str) -> None:
    answer = filled.get(path, headers=HTML)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=|<style|javascript:", answer.text)
    for form in re.findall(r"<form[^>]*method=\"post\".*?</form>", answer.text, re.S):
        assert 'name="csrf"' in form
    assert answer.text.count("<h1") == 1
    twin = re.search(r'href="([^"]*)">This page as JSON', answer.text)
    assert twin is not None
    data = filled.get(html.unescape(twin[1]))
    assert data.headers["content-type"] == "application/json"
    assert isinstance(data.json(), dict)
    curl = re.search(r'id="twin-curl">(.*?)</code>', answer.text)
    assert curl is not None
    asked = re.search(r"http://localhost(/[^ ']*)", html.unescape(curl[1]))
    assert asked is not None
    assert filled.get(asked[1]).status_code == 200


def test_sessions_are_filtered_and_paged_newest_first(filled: Served) -> None:
    def rows(path: str) -> list[str]:
        text = filled.get(path, headers=HTML).text
        found: list[str] = re.findall(r'<tr data-row="([^"]*)"', text)
        return found

    assert rows("/ui/sessions") == [
        EXPLORED,
        "ask-agenda",
        "ask-weather",
        ASKER,
        LETTER,
        CHILD,
        ROOT,
    ]
    assert rows("/ui/sessions?agent=booker&status=active") == [CHILD]
    first = filled.get("/ui/sessions?limit=6", headers=HTML).text
    following = re.search(r'href="([^"]*)" rel="next"', first)
    assert following is not None
    second = html.unescape(following[1])
    assert rows(second) == [ROOT]
    assert "First page" in filled.get(second, headers=HTML).text
    assert "No session matches" in filled.get("/ui/sessions?agent=x", headers=HTML).text
    assert error(filled.get("/ui/sessions?status=odd")) == (422, "invalid_request")


def test_sessions_are_listed_with_their_children_and_costs(filled: Served) -> None:
    told = filled.get("/ui/sessions?format=json").json()
    assert (told["children"][ROOT], told["children"][CHILD]) == (1, 0)
    assert told["costs"][ROOT] == {"usd": "0.01", "tree_usd": "0.01"}
    assert told["costs"][CHILD] == {"usd": "0", "tree_usd": "0.01"}
    page = filled.get("/ui/sessions", headers=HTML).text
    row = re.search(rf'<tr data-row="{ROOT}">.*?</tr>', page, re.S)
    assert row is not None
    cells = re.findall(r'<td class="number">(.*?)</td>', row[0], re.S)
    assert cells[1:] == ["1", "$0.0100"]
    overview = filled.get("/ui/", headers=HTML).text
    assert ("$0.0100" in overview, ">Children<" in overview) == (True, False)


def test_spend_is_shown_in_pages(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        for name in ("a", "b", "c"):
            store.session(name).spend("m", usd="0.5")
    with serving(**place) as served:
        path, seen = "/ui/spend?by=session&limit=2", []
        while path:
            page = served.get(path, headers=HTML).text
            assert "This page</th>" in page
            seen.append(re.findall(r'<tr data-row="(\w)"', page))
            following = re.search(r'href="([^"]*)" rel="next"', page)
            path = html.unescape(following[1]) if following else ""
        assert seen == [["a", "b"], ["c"]]
        assert "Together</th>" in served.get("/ui/spend?by=session", headers=HTML).text


def test_a_problem_is_a_page_for_people_and_json_for_programs(filled: Served) -> None:
    page = filled.get("/ui/nothing", headers=HTML)
    assert (page.status_code, "There is no such page" in page.text) == (404, True)
    assert "content-security-policy" in page.headers
    assert error(filled.get("/ui/nothing")) == (404, "not_found")
    assert error(filled.get("/nothing", headers=HTML)) == (404, "not_found")


def test_files_are_kept_for_ever_under_their_hash(filled: Served) -> None:
    text = filled.get("/ui/", headers=HTML).text
    found = re.findall(r'(?:src|href)="(/ui/static/[^"]*)"', text)
    assert len(found) >= 4
    for path in found:
        answer = filled.get(path, token=None)
        assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True)


def test_a_limited_token_sees_its_own_tree(filled: Served) -> None:
    async def made() -> str:
        other = await filled.store.session("other", reopen=True)
        return (await filled.store.tokens.create("limited", session=other)).secret

    secret = filled.runner.run(made())
    assert filled.get("/ui/", token=secret).headers["location"] == "/ui/sessions"
    page = filled.get("/ui/sessions", token=secret).text
    assert (f">{CHILD}<" in page, ">other<" in page) == (False, True)


def test_a_limited_token_is_offered_only_what_it_may_do(filled: Served) -> None:
    async def made() -> str:
        created = await filled.store.tokens.create("of-trip", permission="write", session=ROOT)
        return created.secret

    given = {"token": filled.runner.run(made()), "headers": HTML}
    page = filled.get("/ui/sessions", **given).text
    offered = re.findall(r'href="(/ui/[^"]*)"', page[page.index("<nav") : page.index("</nav>")])
    assert offered == ["/ui/sessions"]
    # The fork of a root would be another tree.
    for id, offers in ((ROOT, False), (CHILD, True)):
        page = filled.get(f"/ui/sessions/{id}/checkpoints/1", **given).text
        assert ("Fork at version 1" in page, "Rewind to version 1" in page) == (offers, True)


MARK = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
TURNED = "\u202e\u2066\u200f\x1b[31m\xad\u2060\u3164\U000e0041"


def test_what_agents_wrote_is_shown_as_text(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        fill(store, MARK, TURNED)
        [effect] = store.effects(status="unknown")
        waits = [f"/ui/pauses/{each.id}" for each in store.pauses()]
    seen = 0
    with serving(**place) as served:
        key = f"/ui/sessions/{ROOT}/state/plan{quote(MARK, safe='')}"
        for path in (*pages(), *waits, f"/ui/effects/{effect.id}", key, f"{key}/diff?a=1"):
            answer = served.get(path, headers=HTML)
            assert answer.status_code == 200, path
            text = answer.text
            assert "<script>alert" not in text
            assert "&lt;script&gt;alert" in text or "Rome" not in text
            assert "7 * 7" in text or "alert" not in text
            assert not set(TURNED) - {"[", "3", "1", "m"} & set(text), path
            for tag in re.findall(r"<[^>]*alert[^>]*>", text):
                # Inside a tag it stands in an attribute, which it cannot leave.
                assert "&#34;&#39;&amp;" in tag or "%22%27%26" in tag, tag
            seen += text.count("&lt;script&gt;alert")
    assert seen > 40


def test_a_value_is_edited_with_what_is_not_seen_in_it(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    value = {"text": f"a{TURNED}\r\x7f\U0001d173b", "emoji": "👩\u200d🚀"}
    with holdfast.open(**place) as store:
        store.session(ROOT).state.set("k", value)
    with serving(**place) as served:
        page = served.get(f"/ui/sessions/{ROOT}/state/k", headers=HTML).text
    found = re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.S)
    assert found is not None
    assert json.loads(html.unescape(found[1])) == value
    assert "👩\u200d🚀" in page


@pytest.mark.parametrize(
    "version", ["0", "x", "2147483648", "1" + "0" * 5_000, "0" * 10 + "1" * 5_000]
)
def test_a_version_that_cannot_be_is_not_found(filled: Served, version: str) -> None:
    answer = filled.get(f"/ui/sessions/{ROOT}/checkpoints/{version}")
    assert error(answer) == (404, "checkpoint_not_found")


def test_a_fork_and_a_rewind_need_the_right_to_write(filled: Served) -> None:
    async def made() -> str:
        return (await filled.store.tokens.create("reader")).secret

    reader = filled.runner.run(made())
    path = f"/ui/sessions/{ROOT}/checkpoints/2"
    assert "Fork at version 2" in filled.get(path, headers=HTML).text
    assert "Fork at version 2" not in filled.get(path, headers=HTML, token=reader).text
    for action in ("fork", "rewind"):
        refused = filled.post(f"{path}/{action}", data={"name": "x"}, token=reader)
        assert error(refused) == (403, "forbidden")
    unsure = filled.post(f"{path}/rewind", data={"expected_version": "5"})
    assert error(unsure) == (422, "invalid_request")
    stale = filled.post(f"{path}/rewind", data={"expected_version": "4", "agreed": "yes"})
    assert error(stale) == (409, "version_conflict")
    assert error(filled.get(f"/ui/sessions/{ROOT}/checkpoints/99")) == (404, "checkpoint_not_found")
    assert error(filled.get(f"/ui/sessions/{ROOT}/checkpoints/x")) == (404, "checkpoint_not_found")
    assert error(filled.get("/ui/sessions/none/effects")) == (404, "session_not_found")


def test_versions_are_drawn_with_the_branches_that_rewinds_left(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        session = store.session("s")
        for number in range(5):
            session.save({"n": number})
        session.rewind(2)  # version 6
        session.save({"n": 6})
        session.rewind(4)  # version 8, on what the first rewind had left
    with serving(**place) as served:
        text = served.get("/ui/sessions/s/checkpoints", headers=HTML).text
    rows = re.findall(r'<tr data-row="(\d+)".*?aria-label="([^"]*)"', text, re.S)
    left = [int(version) for version, label in rows if label == "left by a rewind"]
    assert [int(version) for version, _ in rows] == list(range(8, 0, -1))
    assert left == [7, 6, 5]
    assert text.count("rewound to version") == 2


def test_the_history_of_a_key_says_what_changed(filled: Served) -> None:
    text = filled.get(f"/ui/sessions/{ROOT}/state/plan", headers=HTML).text
    versions = re.findall(r'id="change-\d+">(Version \d)', text)
    assert versions == ["Version 2", "Version 1"]
    assert re.search(r"removed:</span><pre><bdi>1<.*?added:</span><pre><bdi>2<", text, re.S)
    assert error(filled.get(f"/ui/sessions/{ROOT}/state/none")) == (404, "key_not_found")
    past = filled.get(f"/ui/sessions/{ROOT}/state?at=1&format=json").json()
    assert past["keys"]["plan"]["value"]["nights"] == 1
    assert list(past["keys"]) == ["plan"]
    board = filled.get(f"/ui/sessions/{ROOT}/state", headers=HTML).text
    assert "Refused writes" in board


def test_a_large_state_is_shown_in_part(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    document: dict[str, Any] = {f"key-{number:05}": number for number in range(9_999)}
    with holdfast.open(**place) as store:
        state = store.session("s").state
        state.initialize({**document, "large": "x" * 900_000})
    with serving(**place) as served:
        text = served.get("/ui/sessions/s/state?limit=999", headers=HTML).text
        assert text.count("<tr data-row=") == 200
        following = re.search(r'href="([^"]*)" rel="next"', text)
        assert following is not None
        second = served.get(html.unescape(following[1]), headers=HTML).text
        assert re.findall(r'<tr data-row="([^"]*)"', second)[::199] == ["key-00200", "key-00399"]
        large = served.get("/ui/sessions/s/state?prefix=large", headers=HTML).text
        assert len(large) < 100_000
        assert "characters in all" in large
        narrowed = served.get("/ui/sessions/s/state?prefix=key-0000", headers=HTML).text
        assert narrowed.count("<tr data-row=") == 10


@pytest.fixture
def empty(tmp_path: Any) -> Iterator[Served]:
    with serving(Options(), url=f"sqlite:///{tmp_path}/store.db") as served:
        yield served


def test_an_empty_board_says_what_to_do_next(empty: Served) -> None:
    assert "There is no work yet" in empty.get("/ui/work", headers=HTML).text
    assert "Nothing is in doubt" in empty.get("/ui/in-doubt", headers=HTML).text
    assert "Nothing has been spent yet" in empty.get("/ui/spend", headers=HTML).text
    assert "No session waits" in empty.get("/ui/pauses", headers=HTML).text
    assert "Nothing has happened yet" in empty.get("/ui/events", headers=HTML).text
    assert "No write was refused" in empty.get("/ui/conflicts", headers=HTML).text
    assert "Nothing has been explored yet" in empty.get("/ui/explorations", headers=HTML).text
    assert "The store has not been pruned yet" in empty.get("/ui/storage", headers=HTML).text


def test_an_empty_store_says_what_to_do_next(empty: Served) -> None:
    for path in ("/ui/", "/ui/sessions"):
        assert "There are no sessions yet" in empty.get(path, headers=HTML).text


def test_every_moment_of_a_timeline_has_its_own_state_and_versions(filled: Served) -> None:
    feed = filled.get(f"/sessions/{ROOT}/feed").json()["events"]
    sequence, versions = 0, {}
    for event in feed:
        if event["type"] == "state_changed":
            sequence = event["data"]["sequence"]
        if event["type"] == "checkpoint_saved":
            versions[event["session_id"]] = event["data"]["version"]
        at = event["position"]
        for until in ("", f"&until={at}"):
            page = filled.get(f"/ui/sessions/{CHILD}/timeline?at={at}&format=json{until}").json()
            assert (page["at"], page["state_sequence"]) == (at, sequence)
            assert page["versions"] == versions
    assert sequence > 2


def test_the_state_of_a_moment_is_looked_for_in_earlier_events(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.state.set("n", 1)
        for number in range(450):
            session.spend("model", input_tokens=number)
        session.state.set("n", 2)
    with serving(**place) as served:

        def sequence(at: int) -> Any:
            path = f"/ui/sessions/s/timeline?at={at}&until={at}&format=json"
            return served.get(path).json()["state_sequence"]

        assert [sequence(at) for at in (1, 2, 3, 202, 400, 452, 453)] == [0, 1, 1, 1, 1, 1, 2]
        monkeypatch.setattr(timeline, "LOOK_EVENTS", 10)
        assert sequence(400) is None
        page = served.get("/ui/sessions/s/timeline?at=400&until=400", headers=HTML).text
        assert "No event near this one shows which state it was" in page
        page = served.get("/ui/sessions/s/timeline", headers=HTML).text
        assert page.count("data-position=") == 200
        assert "Earlier</a>" in page
        earlier = served.get("/ui/sessions/s/timeline?until=200", headers=HTML).text
        assert "Later</a>" in earlier
        same = served.get("/ui/sessions/s/moments?a=3&b=452&format=json").json()
        assert same["state"] == []
        far = served.get("/ui/sessions/s/moments?a=2&b=453&format=json").json()
        assert far["state"][0]["values"][0]["after"] == 2


def test_two_moments_differ_in_the_same_however_they_are_read(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(**place) as store:
        state = store.session("s").state
        state.set("a", 1)
        state.set("b", {"n": 1})
        state.merge("b", {"n": 2})
        state.delete("a")
        state.batch([{"op": "set", "key": "a", "value": 3}, {"op": "delete", "key": "b"}])
        state.replace({"c": 1, "a": 3})
        state.set("d", [1])
    with serving(**place) as served:
        newest = served.get("/ui/sessions/s/timeline?format=json").json()["newest"]

        def states() -> list[Any]:
            pairs = [(a, b) for a in range(1, newest + 1) for b in range(1, newest + 1)]
            paths = (f"/ui/sessions/s/moments?a={a}&b={b}&format=json" for a, b in pairs)
            return [served.get(path).json()["state"] for path in paths]

        alone = states()
        monkeypatch.setattr(timeline, "KEYS_MAX", -1)
        assert states() == alone
        monkeypatch.setattr(timeline, "KEYS_MAX", 20)
        monkeypatch.setattr(timeline, "BETWEEN_MAX", 2)
        assert states() == alone
        assert sum(map(bool, alone)) > newest


def test_of_many_differences_the_first_are_shown(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.state.initialize({f"key-{number:03}": number for number in range(250)})
        session.save({"first": 0})
        session.save({f"channel-{number:03}": number for number in range(250)})
    with serving(**place) as served:
        moments = served.get("/ui/sessions/s/moments?a=1&b=2", headers=HTML).text
        assert (moments.count("<h3"), "50 more keys differ" in moments) == (200, True)
        diff = served.get("/ui/sessions/s/diff?a=1&b=2", headers=HTML).text
        assert (diff.count("<h3"), "more channels differ" in diff) == (200, True)


def test_a_timeline_without_its_old_events_says_so(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.state.set("n", 1)
        session.end()
        store.prune(history_days=0)
        store.session("s", reopen=True)
    with serving(**place) as served:
        page = served.get("/ui/sessions/s/timeline?format=json").json()
        assert 0 < len(page["events"]) < page["newest"]
        assert page["state_sequence"] == 1
        old = served.get("/ui/sessions/s/timeline?until=1", headers=HTML)
        assert (old.status_code, "No events of this tree are kept" in old.text) == (200, True)
        assert error(served.get("/ui/sessions/s/moments?a=1&b=2")) == (410, "history_compacted")


def test_events_are_filtered_paged_and_exported(filled: Served) -> None:
    def events(path: str) -> list[tuple[str, int, str]]:
        told = filled.get(path).json()["events"]
        return [(each["root_session_id"], each["position"], each["type"]) for each in told]

    async def known() -> list[Any]:
        return await filled.store.latest_events(limit=1_000)

    everything = [(e.root_id, e.position, e.kind) for e in filled.runner.run(known())]
    assert events("/ui/events?format=json&limit=200") == everything
    found, path = [], "/ui/events?limit=7"
    while path:
        found += events(f"{path}&format=json")
        following = re.search(r'href="([^"]*)" rel="next"', filled.get(path, headers=HTML).text)
        path = html.unescape(following[1]) if following else ""
    assert found == everything
    tree = [each for each in everything if each[0] == ROOT]
    states = [each for each in tree if each[2].startswith("state")]
    wanted = f"/ui/events?session={CHILD}&kind=state&format=json"
    assert 0 < len(events(wanted)) < len(states)
    assert events(f"{wanted}&limit=1") == events(wanted)[:1]
    exported = filled.get("/ui/events/export?kind=state")
    assert "attachment" in exported.headers["content-disposition"]
    lines = [json.loads(line) for line in exported.text.splitlines()]
    assert [(each["root_session_id"], each["position"], each["type"]) for each in lines] == states
    for wrong in ("x", "0 tree", "7", "-1 tree"):
        refused = filled.get("/ui/events", params={"cursor": wrong})
        assert error(refused) == (422, "invalid_request")
    assert error(filled.get("/ui/events?session=none")) == (404, "session_not_found")


def test_conflicts_of_all_trees_are_shown_by_hour(filled: Served) -> None:
    told = filled.get("/ui/conflicts?format=json").json()
    [conflict] = told["conflicts"]
    assert (conflict["root_id"], conflict["key"]) == (ROOT, "budget/euro")
    assert (sum(told["per_hour"]), len(told["per_hour"])) == (1, 24)
    page = filled.get("/ui/conflicts", headers=HTML).text
    assert f'href="/ui/sessions/{ROOT}/state/budget%2Feuro"' in page


def test_storage_tells_of_prunes(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.prune(keep=7)
    with serving(**place) as served:
        told = served.get("/ui/storage?format=json").json()
        assert [each["actor"] for each in told["prunes"]] == ["local"]
        assert told["size"]["bytes"] > 10_000
        assert "keep=7" in served.get("/ui/storage", headers=HTML).text


def test_a_page_that_fails_says_so_and_tells_no_details(
    filled: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise ValueError("a secret of the inside")

    monkeypatch.setattr(holdfast.AsyncStore, "size", broken)
    answer = filled.get("/ui/storage", headers=HTML)
    assert (answer.status_code, "Something went wrong here" in answer.text) == (500, True)
    assert "secret" not in answer.text


def test_an_item_that_changed_hands_is_not_released(filled: Served) -> None:
    held = filled.get("/ui/work/runs?format=json").json()["item"]
    assert "Release</button>" in filled.get("/ui/work/runs", headers=HTML).text
    other = {"data": {"reason": "it hangs", "fence": str(held["fence"] + 1)}}
    assert error(filled.post("/ui/work/runs/release", **other)) == (409, "version_conflict")
    silent = {"data": {"reason": " ", "fence": str(held["fence"])}}
    assert error(filled.post("/ui/work/runs/release", **silent)) == (422, "invalid_request")
    without = filled.post(f"/ui/effects/{_doubtful(filled)}/verify", data={})
    assert error(without) == (422, "invalid_request")


def _doubtful(filled: Served) -> str:
    told = filled.get("/ui/in-doubt?format=json").json()
    id: str = told["effects"][0]["id"]
    return id


def test_an_approval_needs_its_own_right(filled: Served) -> None:
    async def made() -> Any:
        tokens = filled.store.tokens
        tree = await filled.store.session("other", reopen=True)
        limited = await tokens.create("of one tree", permission="admin", session=tree)
        writer = await tokens.create("writer", permission="write")
        return writer.secret, limited.secret, await filled.store.pauses(reason="approval")

    writer, limited, [pause] = filled.runner.run(made())
    path = f"/ui/pauses/{pause.id}"
    assert "Approve</button>" in filled.get(path, headers=HTML).text
    page = filled.get(path, headers=HTML, token=writer).text
    assert ("Approve</button>" in page, "needs a token for" in page) == (False, True)
    decide = {"data": {"verdict": "approve"}}
    for token in (writer, limited):
        assert error(filled.post(f"{path}/decide", token=token, **decide)) == (403, "forbidden")
    assert error(filled.get(path, token=limited)) == (404, "not_found")
    long = {"data": {"verdict": "reject", "note": "x" * 1_001}}
    assert error(filled.post(f"{path}/decide", **long)) == (422, "invalid_request")
    assert error(filled.post("/ui/pauses/none/decide", **decide)) == (404, "not_found")


def test_search_finds_by_the_beginning_of_an_id_by_agent_number_and_key(filled: Served) -> None:
    def found(text: str, **given: Any) -> tuple[list[str], list[str]]:
        told = filled.get("/ui/search", params={"q": text, "format": "json"}, **given).json()
        return [each["id"] for each in told["sessions"]], [each["name"] for each in told["others"]]

    assert found("trip") == ([ROOT, CHILD], [])
    assert found("booker") == ([CHILD], [])
    assert found(f"{ROOT} budget")[1] == ["budget/euro"]
    assert found(ITEM) == ([], ["mail, work item 1"])
    assert {"search, effect 1", "mail, work item 1"} <= set(found("1")[1])
    assert found(" ") == found("none") == found("none budget") == ([], [])
    alone = filled.get("/ui/search", params={"q": CHILD}, headers=HTML)
    assert (alone.status_code, alone.headers["location"]) == (303, f"/ui/sessions/{CHILD}")
    key = filled.get("/ui/search", params={"q": f"{ROOT} budget"}, headers=HTML)
    assert key.headers["location"] == f"/ui/sessions/{ROOT}/state/budget%2Feuro"

    async def made() -> str:
        other = await filled.store.session("other", reopen=True)
        return (await filled.store.tokens.create("searching", session=other)).secret

    secret = filled.runner.run(made())
    for text in ("trip", "1", ITEM, f"{ROOT} budget"):
        assert found(text, token=secret) == ([], []), text
    assert found("other", token=secret) == (["other"], [])


def test_the_oldest_waiting_item_of_each_minute_is_remembered() -> None:
    ages = QueueAges()

    def counted(*seconds: float, status: Any = "pending") -> list[WorkCount]:
        given: dict[str, Any] = {"type": "t", "status": status, "items": 1}
        return [WorkCount(**given, average_age_seconds=0, oldest_age_seconds=s) for s in seconds]

    assert ages.seconds(0) == [0.0] * 60
    for minute, seconds in ((100, (5, 9)), (100, (7,)), (101, ()), (102, (3,))):
        ages.note(minute * 60_000 + 1, counted(*seconds))
    ages.note(102 * 60_000, counted(99, status="in_progress"))
    assert ages.seconds(102 * 60_000)[-3:] == [9, 0, 3]
    assert ages.seconds(159 * 60_000)[:3] == [9, 0, 3]
    ages.note(160 * 60_000, counted(1))
    assert ages.seconds(160 * 60_000)[:3] == [0, 3, 0]
    # What is too old is forgotten, not only left out.
    assert ages.seconds(102 * 60_000)[-3:] == [0, 0, 3]


def test_ages_are_told_by_the_clock_of_the_store(tmp_path: Any) -> None:
    clock = holdfast.VirtualClock()
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db", "clock": clock}
    with holdfast.open(**place) as store:
        store.session("s")
    clock.advance(300)
    with serving(**place) as served:
        assert re.search(r"<time[^>]*>5 min ago</time>", served.get("/ui/sessions").text)


def test_a_session_tells_which_agents_it_asked(filled: Served) -> None:
    told = filled.get(f"/ui/sessions/{ASKER}/peers?format=json").json()
    assert [(each["agent"], each["state"]) for each in told["asks"]] == [
        ("weather", "ok"),
        ("agenda", "open"),
    ]
    page = filled.get(f"/ui/sessions/{ASKER}/peers", headers=HTML).text
    assert re.search(r"peers: 1 answered, 1 open", page)
    assert "offer" in page
    assert "It waits for peers" in filled.get(f"/ui/sessions/{ASKER}", headers=HTML).text


def test_no_more_of_a_value_is_encoded_than_is_shown() -> None:
    class Loud:
        def __str__(self) -> str:
            raise AssertionError("it is beyond what is shown")

    for encoded in (pretty, compact):
        text = encoded({"a": ["x" * 300], "b": Loud()}, 200)
        assert text.startswith("{")
        assert text.endswith("x\n… this is the beginning")
        assert len(text) < 250
        assert encoded("y" * 300, 200).endswith("… 302 characters in all")
        assert json.loads(encoded({"a": [1, None, "é"]}, 200)) == {"a": [1, None, "é"]}
