"""The picture of a state graph: every state has a place, and there are never too many."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from holdfast.worlds import Exploration, MemorySystem, World, action, drawing, explore, invariant
from holdfast.worlds.drawing import DRAWN_MAX, draw


def explored(wide: int, deep: int, wrong: tuple[int, ...] = ()) -> Exploration:
    """Explore a world that begins with a choice of `wide` numbers, and then counts."""
    system = MemorySystem({"choice": -1, "n": 0})

    @action(
        parameters={"choice": list(range(wide))},
        requires=lambda *_, **__: system.data["choice"] < 0,
    )
    def choose(_: World, choice: int) -> None:
        system.data["choice"] = choice

    @action(requires=lambda _: system.data["choice"] >= 0 and system.data["n"] < deep)
    def count(_: World) -> None:
        system.data["n"] += 1

    @invariant
    def is_right(_: World) -> bool:
        return system.data["choice"] not in wrong or system.data["n"] < deep

    return explore(World({"s": system}), [choose, count], [is_right], shrinks=False)


def circles(svg: str) -> list[tuple[int, int]]:
    found = re.findall(r'<circle cx="(\d+)" cy="(\d+)"', svg)
    return [(int(x), int(y)) for x, y in found]


def test_every_state_has_a_place_of_its_own_in_the_column_of_its_depth() -> None:
    result = explored(5, 3)
    picture = draw(result)
    ElementTree.fromstring(picture.svg)
    places = circles(picture.svg)
    assert len(places) == len(set(places)) == len(result.graph.states) == 1 + 5 * 4
    assert picture.left_out == 0
    columns = {x: sum(x == other for other, _ in places) for x, _ in places}
    assert sorted(columns.values()) == [1, 5, 5, 5, 5]


def test_what_does_not_fit_into_a_column_shares_a_place() -> None:
    result = explored(40, 1, wrong=(39,))
    picture = draw(result)
    places = circles(picture.svg)
    assert len(places) == 1 + 24 + 24
    assert picture.left_out == 2 * (40 - 23)
    assert picture.svg.count(">17 more<") == 2
    # What is wrong has a place of its own, although it was seen last.
    assert picture.svg.count('class="state wrong"') == 1
    assert picture.svg.count('class="edge way"') == 2
    assert ">choose(choice=39)<" in picture.svg


def test_a_picture_has_a_limit_whatever_is_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "DRAWN_MAX", 30)
    wide = draw(explored(20, 5))
    alone = len(circles(wide.svg)) - wide.svg.count('class="state bundle"')
    assert alone <= 30
    assert wide.left_out == 1 + 20 * 6 - alone
    deep = draw(explored(1, 90))
    assert len(circles(deep.svg)) == 30 + 30
    monkeypatch.setattr(drawing, "DRAWN_MAX", DRAWN_MAX)
    deep = draw(explored(1, 90))
    assert len(circles(deep.svg)) == 60
    assert deep.left_out == 92 - 60
    monkeypatch.setattr(drawing, "_EDGES_MAX", 10)
    few = draw(explored(20, 2, wrong=(3,)))
    assert few.svg.count('class="edge') == 10
    assert few.svg.count('class="edge way"') == 3


def test_a_step_that_leads_nowhere_new_is_drawn_lighter() -> None:
    system = MemorySystem({"n": 0})

    @action
    def stay(_: World) -> None:
        """Change nothing."""

    @action
    def turn(_: World) -> None:
        system.data["n"] = 1 - system.data["n"]

    svg = draw(explore(World({"s": system}), [stay, turn])).svg
    assert svg.count('class="edge again"') == 3
    assert svg.count('class="edge"') == 1
