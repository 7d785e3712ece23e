"""Pruning forgets events and state history of trees that ended, and says where the rest begins."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.clock import VirtualClock
from holdfast.feed.portable import TreeRecord
from holdfast.maintenance import read_archive
from holdfast.state.retention import Compaction
from holdfast.testing.crashes import CrashPoints
from tests.crash.children import boundaries, run
from tests.maintenance.test_forgetting import DAY, clock, store
from tests.state.test_moving import frames, write

__all__ = ["clock", "store"]


def problems(place: dict[str, Any]) -> list[Any]:
    found = holdfast.store.check(place["url"], namespace=place.get("namespace"))
    return [each for each in found if each.level == "problem"]


def went(store: holdfast.Store, **options: Any) -> tuple[int, int]:
    pruned = store.prune(**options)
    return pruned.events, pruned.state_changes


def live(store: holdfast.Store, id: str) -> holdfast.Session:
    root = store.session(id)
    child = store.session(f"{id}-child", parent=root)
    root.append("log", [1])
    for number in range(4):
        child.state.increment("n", number)
        child.state.append("xs", ["x" * 300, number])
    child.state.set("gone", 1)
    child.state.delete("gone")
    child.end()
    return root


def ended(store: holdfast.Store, id: str = "tree") -> holdfast.Session:
    root = live(store, id)
    root.end()
    return root


def test_a_tree_that_ended_keeps_its_history_for_thirty_days(
    store: holdfast.Store, clock: VirtualClock, place: dict[str, Any]
) -> None:
    root, open_root = ended(store), live(store, "open")
    events, document = store.events("tree", limit=1_000), root.state.snapshot()
    kept = store.events("open", limit=1_000), open_root.state.events()
    clock.advance(29 * DAY)
    assert went(store) == (0, 0)
    clock.advance(DAY + 3600)
    pruned = store.prune()
    assert (pruned.events, pruned.state_changes > 5) == (len(events), True)
    assert went(store) == (0, 0)
    readers: list[Callable[[], Any]] = [
        lambda: store.events("tree"),
        lambda: store.events("tree", after=len(events) - 1),
        lambda: next(iter(store.follow("tree"))),
    ]
    for read in readers:
        with pytest.raises(holdfast.Compacted) as caught:
            read()
        assert caught.value.oldest_position == len(events)
    with pytest.raises(holdfast.Compacted):
        next(iter(root.state.watch()))
    with pytest.raises(holdfast.Compacted):
        root.state.snapshot(document.version - 1)
    assert store.events("tree", after=len(events)) == []
    assert root.state.snapshot() == root.state.snapshot(document.version) == document
    assert (store.events("open", limit=1_000), open_root.state.events()) == kept
    assert root.at(1)["log"] == [1]
    # Who goes on, goes on from there.
    again = store.session("tree", reopen=True)
    assert again.state.increment("n").version == document.versions["n"] + 1
    assert again.state.set("gone", 2).version == 3
    first, *others = store.events("tree", after=len(events))
    assert (first.position, first.kind) == (len(events) + 1, "session_resumed")
    assert [event.kind for event in others][-2:] == ["state_changed", "state_changed"]
    assert problems(place) == []


def test_a_tree_that_is_opened_again_while_it_is_pruned_keeps_its_history(
    store: holdfast.Store,
) -> None:
    root = live(store, "tree")
    history = root.state.events()
    compaction: Any = Compaction(store.runtime, "tree")
    assert not compaction.raise_floor(root.state.version(), only_ended=True)
    assert root.state.events() == history
    root.end()
    assert compaction.raise_floor(root.state.version(), only_ended=True)
    with pytest.raises(holdfast.Compacted):
        root.state.events()


def test_changes_that_stay_are_looked_at_once(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many stay, a pass looks at a bounded number, all of them after the pass before."""
    monkeypatch.setattr("holdfast.state.retention.ROWS_PER_PASS", 10)
    root = store.session("tree")
    for number in range(25):
        root.state.set(f"stays {number:02}", number)
    for number in range(30):
        root.state.set("changes", number)
    root.end()
    before = root.state.snapshot().document
    compaction: Any = Compaction(store.runtime, "tree")
    floor = root.state.version()
    assert compaction.raise_floor(floor, only_ended=True)
    assert compaction.remove_events(floor, (40, "")) == (10, (49, "changes"))
    after, passes = (0, ""), []
    while after is not None:
        count, after = compaction.remove_events(floor, after)
        passes.append(count)
    # Of the 29 that go, 14 are in front of where the first pass began, and 5 behind its end.
    assert passes == [0, 0, 5, 10, 4]
    assert root.state.snapshot().document == before


def test_what_is_younger_stays_and_nothing_in_front_of_it_is_missing(
    store: holdfast.Store, clock: VirtualClock, place: dict[str, Any]
) -> None:
    root = live(store, "tree")
    old, sequence = len(store.events("tree", limit=1_000)), root.state.version()
    clock.advance(20 * DAY)
    for number in range(3):
        root.state.set(f"late {number}", number)
    root.end()
    clock.advance(11 * DAY)
    assert went(store, session=root) == (0, 0)
    assert store.prune().events == old
    found = store.events("tree", after=old)
    assert [event.position for event in found] == list(range(old + 1, old + len(found) + 1))
    assert [event.data["key"] for event in found[:3]] == ["late 0", "late 1", "late 2"]
    assert [event.sequence for event in root.state.events(after=sequence)] == [
        sequence + n for n in (1, 2, 3)
    ]
    assert "late 0" not in root.state.snapshot(sequence).document
    assert problems(place) == []


def test_many_events_go_in_passes_and_those_of_a_deleted_tree_too(
    store: holdfast.Store, clock: VirtualClock, place: dict[str, Any]
) -> None:
    root = store.session("tree")
    root.state.batch([{"op": "append", "key": "xs", "items": [n]} for n in range(1_000)])
    root.end()
    whole = store.events("tree", limit=2_000)
    assert len(whole) > 1_000
    ended(store, "deleted").delete()
    clock.advance(31 * DAY)
    count = len(store.events("deleted", limit=1_000))
    assert store.prune().events == len(whole) + count
    assert root.state.get("xs") == list(range(1_000))
    with pytest.raises(holdfast.Compacted):
        store.events("deleted")
    assert problems(place) == []
    again = store.session("deleted")
    assert [event.kind for event in store.events("deleted", after=count)] == ["session_created"]
    assert again.state.set("n", 1).version > 4


def test_what_an_idempotency_key_stands_for_stays_seven_days(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    root = store.session("tree")
    first = root.state.increment("n", 5, idempotency_key="once")
    root.state.increment("n", 1)
    root.end()
    clock.advance(1)
    assert store.prune(history_days=0).state_changes == 0
    again = store.session("tree", reopen=True)
    assert again.state.increment("n", 5, idempotency_key="once") == first
    again.end()
    clock.advance(8 * DAY)
    assert store.prune(history_days=0).state_changes == 1
    assert store.prune(history_days=0).state_changes == 0
    assert root.state.get("n") == 6


def test_who_follows_all_trees_gets_what_is_left_once(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    ended(store, "first")
    seen = list(store.follow_all(wait=False))
    ended(store, "second")
    clock.advance(31 * DAY)
    assert store.prune().events > len(seen)
    assert list(store.follow_all(wait=False)) == []
    last = store.last_cursor()
    again = store.session("first", reopen=True)
    again.state.set("k", 1)
    for each in (seen[0], seen[-1]):
        with pytest.raises(holdfast.Compacted):
            list(store.follow_all(after=each.cursor, wait=False))
    for after in (None, last):
        found = list(store.follow_all(after=after, wait=False))
        assert {each.root_id for each in found} == {"first"}
        positions = [each.position for each in found]
        assert positions == list(range(len(seen) + 1, len(seen) + 1 + len(found)))
        assert found[-1].kind == "state_changed"


def test_the_archive_has_all_that_went(
    store: holdfast.Store, clock: VirtualClock, tmp_path: Path
) -> None:
    file = tmp_path / "removed.jsonl"
    root = ended(store)
    for number in range(4):
        store.session("long").append("log", [number])
    events, changes = store.events("tree", limit=1_000), root.state.events()
    clock.advance(31 * DAY)
    pruned = store.prune(keep=1, archive=file)
    assert pruned.archived == pruned.checkpoints + len(events) + len(changes)
    found = list(read_archive(file, record="event"))
    assert [(each["position"], each["kind"], each["data"]) for each in found] == [
        (each.position, each.kind, each.data) for each in events
    ]
    told = list(read_archive(file, record="state_change"))
    assert [(each["sequence"], each["operation"], each["key"], each["value"]) for each in told] == [
        (each.sequence, each.operation, each.key, each.value) for each in changes
    ]
    assert {each["root_id"] for each in told} == {"tree"}
    long = [each for each in read_archive(file) if each["session_id"] == "long"]
    assert [each["version"] for each in long] == [1, 2, 3]
    assert len(list(read_archive(file))) == pruned.checkpoints
    with pytest.raises(holdfast.InvalidArgument, match="record must be one of"):
        read_archive(file, record="session")  # type: ignore[arg-type]


def test_floors_travel_with_their_tree(
    store: holdfast.Store, clock: VirtualClock, place: dict[str, Any], other: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    file = tmp_path / "sessions.export"
    ended(store)
    half = ended(store, "half")
    clock.advance(20 * DAY)
    again = store.session("half", reopen=True)
    again.state.set("late", 1)
    again.end()
    clock.advance(11 * DAY)
    store.prune()
    floors = {root: floor_of(store, root) for root in ("tree", "half")}
    store.export(file)
    with holdfast.open(**other) as second:
        second.import_sessions(file)
        assert {root: floor_of(second, root) for root in floors} == floors
        kinds = [event.kind for event in second.events("half", after=floors["half"])]
        assert (kinds[0], kinds.count("state_changed")) == ("session_resumed", 1)
        assert second.find_session("half").state.snapshot() == half.state.snapshot()
    assert problems(other) == []
    records = frames(file)
    for number, record in enumerate(records):
        if not isinstance(record, TreeRecord):
            continue
        for floor in (0, record.floor - 1, record.floor + 1, record.position + 1):
            changed = [*records]
            changed[number] = msgspec.structs.replace(record, floor=floor)
            forged = tmp_path / f"{number}-{floor}"
            write(forged, changed)
            with holdfast.open("sqlite://") as third:
                with pytest.raises(holdfast.CorruptRecord):
                    third.import_sessions(forged)
                assert third.sessions() == []


def floor_of(store: holdfast.Store, root: str) -> int:
    with pytest.raises(holdfast.Compacted) as caught:
        store.events(root)
    return int(caught.value.oldest_position)


def prune_armed(place: dict[str, Any], points: CrashPoints) -> None:
    points.is_armed = False
    with holdfast.open(**place, hooks=points.hooks) as store:
        points.is_armed = True
        store.prune(history_days=0)
        points.is_armed = False


def test_a_prune_killed_at_every_statement_leaves_no_hole_and_can_go_on(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with holdfast.open(**place) as store:
        ended(store, "counted")

    def count(say: Callable[[str], None]) -> None:
        counting = CrashPoints()
        prune_armed(place, counting)
        say(repr(boundaries(counting, set())))

    status, lines = run(count)
    assert status == 0
    places: list[int] = eval(lines[-1])
    assert len(places) > 10
    for die_at in places:
        id = f"k{die_at}"
        with holdfast.open(**place) as store:
            document = ended(store, id).state.snapshot()
            events = len(store.events(id, limit=1_000))
        status, _ = run(lambda say, at=die_at: prune_armed(place, CrashPoints(at)))  # type: ignore[misc]
        assert status == -signal.SIGKILL, die_at
        assert problems(place) == []
        with holdfast.open(**place) as store:
            store.prune(history_days=0)
            assert store.find_session(id).state.snapshot() == document
            assert floor_of(store, id) == events
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: killed at {len(places)} points of a prune")
