"""The pages of explorations: what was found, drawn and told in part, live, and out of reach."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

import holdfast
from holdfast.explorations import KeptStep
from holdfast.server.ui.pages import explorations
from holdfast.worlds import changes
from holdfast.worlds.journal import drive, journal_of
from holdfast.worlds.reports import violation_data
from holdfast.worlds.stored import read_exploration
from holdfast.worlds.values import encode
from tests.server.live import live
from tests.server.serving import Served, error, serving
from tests.ui.browsers import looking, sign_in
from tests.ui.content import CHILD, EXPLORED, ROOT, fill_exploration

HTML = {"accept": "text/html"}
PAGE = f"/ui/explorations/{EXPLORED}"


@pytest.fixture(scope="module")
def filled(database: dict[str, Any]) -> Iterator[Served]:
    with holdfast.open(**database) as store:
        store.session(CHILD, parent=store.session(ROOT))
        fill_exploration(store, most=6)
    with serving(**database) as served:
        yield served


def test_a_page_tells_what_the_whole_exploration_found(
    filled: Served, database: dict[str, Any]
) -> None:
    told = filled.get(f"{PAGE}?format=json&limit=200").json()
    with holdfast.open(**database) as store:
        whole = read_exploration(store, EXPLORED)
    graph = whole.result.graph
    assert told["is_whole"] is True
    assert told["found_farther"] == 0
    nearest = sorted(whole.result.violations, key=lambda each: len(each.path))
    assert [each["path"] for each in told["found"]] == [
        violation_data(each)["path"] for each in nearest
    ]
    assert {each["invariant"] for each in told["found"]} == {
        "never two", "count raises ValueError",
    }  # fmt: skip
    assert [each["id"] for each in told["states"]] == list(graph.states)
    numbers = {id: number for number, id in enumerate(graph.states, 1)}
    for each in told["states"]:
        state = graph.states[each["id"]]
        assert each["depth"] == state.depth
        seen = {one.system: changes.readable(one.data) for one in state.observations}
        assert each["observations"] == seen
        if state.found_by is None:
            assert (each["parent"], each["by"], each["changes"]) == (None, None, [])
        else:
            parent = graph.states[state.found_by.from_id]
            assert (each["parent"], each["by"]) == (numbers[parent.id], str(state.found_by.step))
            assert each["changes"] == changes.changes(parent, state)
        runs = graph.transitions_from(each["id"])
        assert each["leads"] == [{"step": str(run), "to": numbers[run.to_id]} for run in runs]


def test_states_are_paged_and_the_picture_has_them_all(filled: Served) -> None:
    numbers, path, text = [], f"{PAGE}?limit=3", ""
    while path:
        text = filled.get(path, headers=HTML).text
        assert text[text.index("State graph") :].count("<circle cx=") == 8
        numbers += [each["number"] for each in filled.get(f"{path}&format=json").json()["states"]]
        following = re.search(r'href="([^"]*)" rel="next"', text)
        path = html.unescape(following[1]) if following else ""
    assert numbers == list(range(1, 9))
    assert text.count('class="state wrong"') == 1 + 1 + 1  # two, too much, and the legend
    assert text.count("<title>") > 8


def test_of_a_large_exploration_the_beginning_is_shown(
    filled: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorations, "EDGES", 4)
    told = filled.get(f"{PAGE}?format=json").json()
    assert told["is_whole"] is False
    assert [each["invariant"] for each in told["found"]] == ["never two"]
    assert told["found_farther"] > 0
    assert told["never_possible"] == []
    page = filled.get(PAGE, headers=HTML).text
    assert re.search(r"first 4 of \d+ steps", page)
    assert "There are more, farther away" in page
    monkeypatch.setattr(explorations, "EDGES", 1)
    page = filled.get(PAGE, headers=HTML).text
    assert "lie beyond what this page reads" in page


def test_what_was_found_is_read_along_its_own_index(
    filled: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = filled.get(f"{PAGE}?format=json").json()["found"]
    monkeypatch.setattr(explorations, "FINDINGS", 1)
    told = filled.get(f"{PAGE}?format=json").json()
    # The first step of all has found nothing.
    assert [each["invariant"] for each in told["found"]] == ["never two"]
    assert told["found"][0] in everything


def test_what_was_found_travels_in_exports(filled: Served, tmp_path: Any) -> None:
    async def exported() -> None:
        await filled.store.export(tmp_path / "file.jsonl")

    filled.runner.run(exported())
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/other.db"}
    with holdfast.open(**place) as store:
        store.import_sessions(tmp_path / "file.jsonl")
    with serving(**place) as other:
        told, known = (each.get(f"{PAGE}?format=json").json() for each in (other, filled))
    assert told["found"] == known["found"] != []
    assert told["states"] == known["states"]


def test_long_paths_and_many_violations_are_told_in_part(
    filled: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorations, "PATH_STEPS", 2)
    page = filled.get(PAGE, headers=HTML).text
    assert "2 earlier steps not shown" in page
    assert 'start="3"' in page
    monkeypatch.setattr(explorations, "VIOLATIONS", 1)
    page = filled.get(PAGE, headers=HTML).text
    assert page.count('class="violation"') == 1
    assert "There are more, farther away" in page


def test_what_is_no_exploration_or_of_another_tree_is_not_found(filled: Served) -> None:
    assert error(filled.get(f"/ui/explorations/{ROOT}")) == (404, "not_found")
    assert error(filled.get("/ui/explorations/none")) == (404, "session_not_found")

    async def made() -> str:
        return (await filled.store.tokens.create("of a tree", session=ROOT)).secret

    secret = filled.runner.run(made())
    assert error(filled.get(PAGE, token=secret)) == (404, "session_not_found")
    assert error(filled.get("/ui/explorations", token=secret))[0] == 403


def test_an_exploration_is_found_by_its_id(filled: Served) -> None:
    told = filled.get("/ui/search", params={"q": EXPLORED, "format": "json"}).json()
    assert {"kind": "exploration", "name": EXPLORED} in told["others"]


def test_explorations_are_listed_newest_first(filled: Served, database: dict[str, Any]) -> None:
    with holdfast.open(**database) as store:
        fill_exploration(store, id="second", most=1)
    first = filled.get("/ui/explorations?limit=1&format=json").json()
    assert [each["id"] for each in first["explorations"]] == ["second"]
    path = f"/ui/explorations?limit=1&format=json&cursor={first['next_cursor']}"
    [older] = filled.get(path).json()["explorations"]
    assert (older["id"], older["status"], older["violations"]) == (EXPLORED, "completed", 2)
    page = filled.get("/ui/explorations/second", headers=HTML).text
    assert "Everything was tried" in page


def test_one_whose_graph_was_pruned_says_so(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        fill_exploration(store)
        store.prune(history_days=0)
    with serving(**place) as served:
        page = served.get(PAGE, headers=HTML)
        assert (page.status_code, "removed by retention" in page.text) == (200, True)
        assert "State graph" not in page.text


def test_what_no_known_step_leads_to_is_farther_away(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        fill_exploration(store)
        wrong = {"invariant": "never two", "severity": "high", "message": "m", "is_checked": True}
        violation = {**wrong, "state_id": "lost", "path": []}
        body = {"outcome": None, "found": {"violations": [violation], "warnings": []}}
        lost: dict[str, Any] = {"body": encode(body, "step"), "has_findings": True}
        steps = [
            KeptStep(from_id="nowhere", candidate=0, to_id="lost", **lost),
            KeptStep(from_id="lost", candidate=1, to_id=None, **lost),
        ]
        with drive(store, EXPLORED) as session:
            journal_of(session).add([], steps)
    with serving(**place) as served:
        told = served.get(f"{PAGE}?format=json").json()
        assert told["found_farther"] == 2
        assert served.get(PAGE, headers=HTML).status_code == 200


def test_one_that_was_stopped_says_how_to_go_on(tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        fill_exploration(store, max_steps=1)
        fill_exploration(store, id="shop.world:make_shop", max_steps=1)
    with serving(**place) as served:
        page = served.get(PAGE, headers=HTML).text
        assert f"holdfast explore MODULE:WORLD --id {EXPLORED} --resume" in page
        page = served.get("/ui/explorations/shop.world:make_shop", headers=HTML).text
        assert "holdfast explore shop.world:make_shop --resume" in page


def test_a_running_exploration_grows_on_the_page(browser: Browser, tmp_path: Any) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    steps = threading.Semaphore(0)

    def run() -> None:
        with holdfast.open(**place) as store:
            fill_exploration(store, most=4, on_progress=lambda _: steps.acquire())

    explorer = threading.Thread(target=run)
    with live(**place) as server, looking(browser, server.url) as page:
        sign_in(page, server.url, server.secret)
        page.goto("/ui/explorations")
        expect(page.get_by_text("Nothing has been explored yet")).to_be_visible()
        explorer.start()
        try:
            row = page.locator(f'tr[data-row="{EXPLORED}"]')
            expect(row).to_contain_text("running")
            row.get_by_role("link").click()
            expect(page.get_by_text("A process is exploring now")).to_be_visible()
            rows = page.locator('[data-region="states"] tbody tr')
            before = rows.count()
            steps.release(2)
            expect(rows).not_to_have_count(before)
        finally:
            steps.release(10_000)
            explorer.join()
        expect(page.get_by_text("Everything was tried")).to_be_visible()
        expect(page.get_by_role("heading", name="never two")).to_be_visible()
        expect(rows).to_have_count(6)
