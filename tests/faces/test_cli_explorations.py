"""`holdfast explorations`: what a store keeps of explorations, on both databases."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.clock import VirtualClock
from holdfast.explorations import KeptStep
from holdfast.worlds import (
    Exploration,
    MemorySystem,
    Progress,
    World,
    action,
    explore,
    invariant,
)
from holdfast.worlds.journal import drive, journal_of
from holdfast.worlds.recording import Recording
from holdfast.worlds.reports import to_data
from holdfast.worlds.stored import list_explorations, read_exploration
from holdfast.worlds.values import encode
from tests.faces import forked
from tests.faces.test_cli_sessions import Run, data, lines, quick

__all__ = ["quick"]

STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SHOP = "shop.world:make_shop"


def stock(world: World) -> dict[str, Any]:
    shop = world.systems["shop"]
    assert isinstance(shop, MemorySystem)
    found: dict[str, Any] = shop.data
    return found


def make_shop() -> World:
    return World({"shop": MemorySystem({"stock": 1, "boxes": 0})})


@action(requires=lambda world: stock(world)["stock"] > -2)
def buy(world: World) -> None:
    stock(world)["stock"] -= 1


@action(parameters={"boxes": [1, 2]}, requires=lambda world, boxes: stock(world)["boxes"] < boxes)
def pack(world: World, boxes: int) -> None:
    stock(world)["boxes"] = boxes
    if stock(world)["stock"] < 0:
        raise ValueError("nothing is left \x1b[31mto pack")


@invariant(severity="critical")
def stock_is_never_negative(world: World) -> bool:
    return int(stock(world)["stock"]) >= 0


def explored(store: holdfast.Store, id: str, **options: Any) -> Exploration:
    # Paths that were shrunk by trying are not written down.
    given: dict[str, Any] = {"store": store, "id": id, "shrinks": False, **options}
    return explore(make_shop, [buy, pack], [stock_is_never_negative], **given)


def counts(result: Exploration) -> tuple[int, int, int]:
    return len(result.graph.states), result.steps, len(result.violations)


def listed(store: holdfast.Store) -> list[tuple[int, int, int]]:
    return [(each.states, each.steps, each.violations) for each in list_explorations(store)]


def test_explorations_are_listed_by_pages_and_nothing_else_is(
    place: dict[str, Any], quick: Run
) -> None:
    with holdfast.open(**place) as store:
        store.session("a-session")
    [empty] = lines(quick("explorations", "list"))
    assert empty.startswith("No explorations. `holdfast explore MODULE:WORLD --url ")
    with holdfast.open(**place) as store:
        part = explored(store, SHOP, max_steps=6)
        World({"shop": MemorySystem({"stock": 1})}, store=store, id="a-world").close()
        whole = explored(store, "another")
        assert listed(store) == [counts(part), counts(whole)]
    table = lines(quick("explorations", "list"))
    assert table[0].split() == [
        "number", "id", "status", "states", "steps", "violations", "updated",
    ]  # fmt: skip
    assert table[1].split()[1:6] == [SHOP, "idle", *map(str, counts(part))]
    assert table[2].split()[1:6] == ["another", "completed", *map(str, counts(whole))]
    page = data(quick("explorations", "list", "--limit=1", "--json"))
    assert [each["id"] for each in page["explorations"]] == [SHOP]
    assert f"--after {page['next_after']}" in quick("explorations", "list", "--limit=1").stdout
    after = f"--after={page['next_after']}"
    rest = data(quick("explorations", "list", after, "--json"))
    assert [each["id"] for each in rest["explorations"]] == ["another"]
    for wrong in ("--limit=0", "--limit=1001", "--after=-1"):
        assert quick("explorations", "list", wrong).returncode == 2


@pytest.mark.parametrize(("workers", "limits"), [(1, (3, 7, 10_000)), (2, (7, 10_000))])
def test_the_list_counts_what_the_exploration_itself_counts(
    tmp_path: Path, workers: int, limits: tuple[int, ...]
) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        for steps in limits:
            options = {"max_steps": steps, "commit_every": 4, "workers": workers}
            result = explored(store, "shop", resume=True, **options)
            assert listed(store) == [counts(result)]
            assert result.ended == ("max_steps" if steps < 10_000 else "complete")


def test_an_exploration_is_shown_with_shortest_paths_and_how_to_go_on(
    place: dict[str, Any], quick: Run
) -> None:
    with holdfast.open(**place) as store:
        part = explored(store, SHOP, max_steps=10, strategy="dfs")
        assert part.violations
        whole = explored(store, "another")
    told = data(quick("explorations", "show", SHOP, "--json"))
    assert sorted(told["found"], key=repr) == sorted(to_data(part)["violations"], key=repr)
    assert (told["status"], told["steps"], told["has_graph"]) == ("idle", 10, True)
    assert told["left_to_try"] > 0
    assert (told["actions"], told["invariants"]) == (["buy", "pack"], ["stock_is_never_negative"])
    url = f"--url {shlex.quote(place['url'])}"
    shown = quick("explorations", "show", SHOP).stdout
    assert f"`holdfast explore {SHOP} --resume {url}" in shown
    assert f"`holdfast explore {SHOP} --clean {url}" in shown
    shown = quick("explorations", "show", "another").stdout
    assert "[critical] stock_is_never_negative in" in shown
    assert "\n  buy() → buy()\n" in shown
    assert "\n  buy() → buy() → pack(boxes=1)\n" in shown
    assert "nothing is left" in shown
    assert "\x1b" not in shown
    assert "Everything was tried." in shown
    assert "--resume" not in shown
    assert f"`holdfast explore MODULE:WORLD --id another --clean {url}" in shown
    told = data(quick("explorations", "show", "another", "--json"))
    assert (told["left_to_try"], len(told["found"])) == (0, len(whole.violations))


def test_what_is_no_exploration_is_named(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place) as store:
        store.session("a-session")
        explored(store, "shop", max_steps=3)
        with drive(store, "shop") as session:
            odd = KeptStep(from_id="nowhere", candidate=999, to_id=None, body=b"\x80")
            journal_of(session).add([], [odd])
    for id, code, said in (
        ("a-session", 3, "session a-session is not an exploration"),
        ("nothing", 3, "there is no session 'nothing'"),
        ("shop", 7, "The stored exploration shop cannot be read"),
    ):
        found = quick("explorations", "show", id)
        assert (found.returncode, said in found.stderr) == (code, True), found.stderr
    assert quick("explorations", "list").returncode == 0


def test_totals_are_moved_and_outlive_the_graph(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path, quick: Run
) -> None:
    clock = VirtualClock(1_700_000_000_000)
    with holdfast.open(**place, clock=clock) as store:
        result = explored(store, "shop")
        store.export(tmp_path / "export")
        clock.advance(100 * 86_400)
        store.prune()
        assert listed(store) == [counts(result)]
        assert not read_exploration(store, "shop").has_graph
    assert "Its graph was removed by retention" in quick("explorations", "show", "shop").stdout
    with holdfast.open(**other) as store:
        store.import_sessions(tmp_path / "export")
        assert listed(store) == [counts(result)]
        assert len(read_exploration(store, "shop").result.violations) == len(result.violations)


def test_a_running_exploration_is_shown_as_far_as_it_has_come(
    place: dict[str, Any], quick: Run
) -> None:
    shown: list[str] = []

    def look(now: Progress) -> None:
        if now.steps == 3:
            told = data(quick("explorations", "show", "shop-of-today", "--json"))
            assert (told["status"], told["steps"], told["states"]) == ("running", 3, now.states)
            shown.append(quick("explorations", "show", "shop-of-").stdout)

    with holdfast.open(**place) as store:
        explored(store, "shop-of-today", on_progress=look)
    assert "A process is exploring now." in shown[0]
    assert "--resume" not in shown[0]


def test_what_a_foreign_file_says_was_explored_is_checked(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        explored(store, "shop", max_steps=3)
        for settings in (1, {}, {"actions": [["", b"\x80"]], "invariants": []}):
            with drive(store, "shop") as session:
                journal_of(session).set_settings(encode(settings, "settings"))
            with pytest.raises(holdfast.CorruptRecord, match="exploration shop cannot be read"):
                read_exploration(store, "shop")


def test_an_exploration_is_read_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def meanwhile(read: Callable[[Recording], Iterator[Any]]) -> Callable[[Recording], Any]:
        def reading(recording: Recording) -> Iterator[Any]:
            nonlocal reads
            reads += 1
            if reads == 2:
                explored(store, "shop", resume=True, max_steps=4)
            return read(recording)

        return reading

    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        explored(store, "shop", max_steps=1)
        for name in ("_all_states", "_all_steps"):
            monkeypatch.setattr(Recording, name, meanwhile(getattr(Recording, name)))
        assert read_exploration(store, "shop").result.steps == 1
        assert read_exploration(store, "shop").result.steps == 4


def test_a_long_id_leaves_the_other_columns_whole(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    id = "a_shop_in_the_city.worlds:make_world_with_all"
    with holdfast.open(url) as store:
        explored(store, id, max_steps=6)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HOLDFAST_")}

    def look(*arguments: str) -> list[str]:
        words = ["explorations", *arguments, f"--url={url}"]
        code, text = forked.show(words, directory=tmp_path, environment=kept)
        assert code == 0
        return STYLES.sub("", text).splitlines()

    shown = look("list")
    assert max(map(len, shown)) <= 80
    heading, row = shown[:2]
    assert heading.split()[-2:] == ["violations", "updated"]
    assert id.startswith(row.split()[1])
    assert look("show", row.split()[1])[0].split()[:2] == ["exploration", id]
