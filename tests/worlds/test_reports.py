"""Reports: each can be read by what it is for, and says what was found."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from holdfast.errors import InvalidArgument
from holdfast.worlds import Exploration, MemorySystem, World, action, explore, write_report
from holdfast.worlds.changes import changes, readable
from holdfast.worlds.reports import to_data, to_dot, to_html, to_junit, to_mermaid
from tests.worlds.counter_shop import ACTIONS, make_world, stock_is_never_negative


@pytest.fixture
def result() -> Exploration:
    return explore(make_world, ACTIONS, [stock_is_never_negative])


def test_the_data_holds_the_whole_graph_and_every_path(result: Exploration) -> None:
    found = json.loads(json.dumps(to_data(result)))
    states = {state["id"] for state in found["states"]}
    assert len(states) == len(result.graph.states)
    assert {run["to"] for run in found["transitions"]} | {
        run["from"] for run in found["transitions"]
    } == states
    assert len(found["violations"]) == len(result.violations)
    [shortest, *_] = sorted(found["violations"], key=lambda each: len(each["path"]))
    assert shortest["path"] == [{"action": "refund", "arguments": {}}]
    assert (found["is_complete"], found["has_passed"], found["ended"]) == (True, False, "complete")


def test_junit_has_a_failure_for_each_violation_and_one_case_if_all_is_well(
    result: Exploration,
) -> None:
    suite = ElementTree.fromstring(to_junit(result))
    assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
    assert len(suite.findall("testcase")) == len(result.violations)
    result.violations.clear()
    suite = ElementTree.fromstring(to_junit(result))
    assert (suite.attrib["failures"], suite.attrib["tests"]) == ("0", "1")


def test_the_diagrams_name_every_state_and_mark_the_wrong_ones(result: Exploration) -> None:
    wrong = {violation.state_id for violation in result.violations}
    dot = to_dot(result)
    assert dot.count(" -> ") == len(result.graph.transitions)
    assert dot.count("color=red, font") == len(wrong)
    mermaid = to_mermaid(result)
    assert mermaid.startswith("stateDiagram-v2\n")
    assert mermaid.count(" --> ") == len(result.graph.transitions) + 1
    assert mermaid.count(" wrong\n") == len(wrong)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_nothing_else_and_shows_what_changed(result: Exploration) -> None:
    page = to_html(result)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.count("circle") == len(result.graph.states)
    assert "script" not in tags.seen
    assert re.findall(r"(?:src|href)=|url\(|https?:", page) == []
    assert "shop.stock: 2 → 1" in page


def test_whatever_states_and_errors_hold_is_escaped() -> None:
    system = MemorySystem({"<b>": "</title><script>\x1b", "n": 0})

    @action(name='<i>"quoted"', parameters={"by": ["</li>;:"]})
    def wrong(world: World, by: str) -> None:
        system.data["n"] = 1
        raise OSError("</failure>\x00<script>")

    result = explore(World({"<s>": system}), [wrong])
    page = to_html(result)
    assert "<script" not in page
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert ElementTree.fromstring(to_junit(result)).attrib["failures"] == "1"
    assert '\\"quoted\\"' in to_dot(result)
    assert "#59;" in to_mermaid(result)


def test_values_that_json_lacks_are_readable() -> None:
    value = {b"k\xff": {3, 1}, 2: (float("nan"), b"x"), "d": None}
    assert readable(value) == {"k\\xff": [1, 3], "2": ["nan", "x"], "d": None}


@pytest.mark.parametrize("name", ["r.json", "r.xml", "r.html", "r.mmd", "r.dot"])
def test_the_end_of_the_name_decides_on_the_form(
    name: str, result: Exploration, tmp_path: Path
) -> None:
    assert write_report(result, tmp_path / name).read_text()
    with pytest.raises(InvalidArgument, match=r"one of \.json, \.xml"):
        write_report(result, tmp_path / "r.pdf")


def test_what_has_no_encoding_and_huge_numbers_are_written(tmp_path: Path) -> None:
    system = MemorySystem({"n": 0})

    @action(parameters={"name": ["\udc80", 10**5000]})
    def put(world: World, name: object) -> None:
        system.data["n"] = name
        raise OSError("\udc80")

    result = explore(World({"n": system}), [put])
    for name in ("r.json", "r.xml", "r.html", "r.mmd", "r.dot"):
        assert write_report(result, tmp_path / name).read_text(encoding="utf-8")
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    shown = [state["observations"]["n"]["n"] for state in found["states"]]
    assert shown == [0, "\udc80", hex(10**5000)]


def test_a_label_of_mermaid_has_each_character_once() -> None:
    @action(parameters={"x": ["a:b;c#d<i>"]}, limit=1)
    def put(world: World, x: str) -> None: ...

    lines = to_mermaid(explore(World({"n": MemorySystem({})}), [put])).splitlines()
    [label] = [line.partition(" : ")[2] for line in lines if " : " in line]
    assert label == "put(x='a#58;b#59;c#35;d#60;i#62;')"


def test_a_change_of_the_type_alone_is_a_change() -> None:
    system = MemorySystem({"n": 1, "list": [1]})

    @action
    def change(world: World) -> None:
        system.data.update(n=True, list=[1.0])

    graph = explore(World({"s": system}), [change]).graph
    before, after = graph.states.values()
    assert changes(before, after) == ["s.list: [1] → [1.0]", "s.n: 1 → True"]
