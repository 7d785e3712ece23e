"""The feeds of all trees together: each event once, each tree in order, from every cursor on."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.clock import VirtualClock
from holdfast.feed import follow_all
from holdfast.server.stream import REASON_CHARACTERS_MAX
from tests.crash.children import Child
from tests.mesh.meshes import until
from tests.threads import begin

NEVER = 3_600.0
SECONDS_MAX = 120
Trees = dict[str, list[int]]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_all, "EVENTS_PER_READ", 5)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def by_tree(events: list[Any]) -> Trees:
    """Return the positions of each tree, as they came."""
    found: Trees = defaultdict(list)
    for event in events:
        found[event.root_id].append(event.position)
    return dict(found)


def place_of(event: Any) -> tuple[str, int]:
    """Return the tree and the position of an event, which no other has."""
    return event.root_id, event.position


def committed(store: holdfast.Store, trees: list[str]) -> Trees:
    return {
        root_id: [event.position for event in events]
        for root_id in trees
        if (events := store.events(root_id, limit=10_000))
    }


def until_now(store: holdfast.Store, after: str | None = None) -> list[Any]:
    return list(store.follow_all(after=after, wait=False))


def test_from_the_last_cursor_on_only_later_events_come(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        empty = store.last_cursor()
        store.session("tree").state.increment("n")
        cursor, ends_at = store.last_cursor(), time.monotonic() + SECONDS_MAX
        # On PostgreSQL it begins with the oldest transaction under way, maybe that of another test.
        while until_now(store, cursor):
            assert time.monotonic() < ends_at
            cursor = store.last_cursor()
        store.session("other")
        assert by_tree(until_now(store, cursor)) == {"other": [1]}
        assert by_tree(until_now(store, empty)) == {"tree": [1, 2], "other": [1]}


def test_every_event_comes_once_from_every_cursor_on(place: dict[str, Any]) -> None:
    trees = [f"tree-{number}" for number in range(4)]
    with holdfast.open(**place) as store:
        assert until_now(store) == []
        for number in range(24):
            store.session(trees[number * number % 4]).state.increment("n")

        def pair(tx: holdfast.Transaction) -> holdfast.Op[None]:
            for root_id in ("tree-0", "tree-1"):
                for _ in range(4):
                    session = yield from tx.find_session(root_id)
                    yield from session.state.increment("n")

        store.run(pair)
        events = until_now(store)
        assert by_tree(events) == committed(store, trees)
        assert {type(event.data) for event in events} == {dict}
        for number, event in enumerate(events, 1):
            rest = until_now(store, event.cursor)
            assert by_tree([*events[:number], *rest]) == by_tree(events)
        last = events[-1].cursor
        store.session("late").state.set("k", 1)
        assert by_tree(until_now(store, last)) == {"late": [1, 2]}


def test_followers_of_all_trees_are_woken(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        feeds = [store.follow_all(poll_seconds=NEVER) for _ in range(3)]
        for number in range(6):
            waiting = [begin(next, feed) for feed in feeds]
            store.session(f"tree-{number}")
            roots = {each.result(SECONDS_MAX).root_id for each in waiting}
            assert roots == {f"tree-{number}"}


def test_an_async_store_follows_all_trees(place: dict[str, Any]) -> None:
    async def main() -> None:
        async with holdfast.aopen(**place) as store:
            for number in range(8):
                await store.session(f"tree-{number}")
            found = [event async for event in store.follow_all(wait=False)]
            assert by_tree(found) == {f"tree-{number}": [1] for number in range(8)}
            live = store.follow_all(after=found[-1].cursor, poll_seconds=NEVER)
            waiting = asyncio.ensure_future(anext(live))
            await store.session("late")
            assert (await asyncio.wait_for(waiting, SECONDS_MAX)).root_id == "late"

    asyncio.run(main())


def test_writers_are_killed_and_readers_come_back(place: dict[str, Any]) -> None:
    trees = [f"tree-{number}" for number in range(5)]
    with holdfast.open(**place) as store:
        for root_id in trees:
            store.session(root_id)

        def write(seed: int) -> Callable[[Callable[[str], None]], None]:
            def run(tell: Callable[[str], None]) -> None:
                choose = random.Random(seed)
                with holdfast.open(**place) as other:
                    while True:
                        root_id = choose.choice(trees)
                        operations = [{"op": "increment", "key": "n"}] * choose.randint(1, 7)
                        other.find_session(root_id).state.batch(operations)
                        tell(root_id)

            return run

        events: list[Any] = []
        choose = random.Random(7)
        for attempt in range(3):
            children = [Child(write(attempt * 3 + number)) for number in range(3)]
            for _ in range(4):
                last = events[-1].cursor if events else None
                events += islice(store.follow_all(after=last), choose.randint(20, 60))
            for child in children:
                child.kill()
                child.wait()
        events += until_now(store, events[-1].cursor)
        assert by_tree(events) == committed(store, trees)


@pytest.mark.parametrize("seed", range(12))
def test_transactions_that_stay_open_and_commit_in_any_order(
    postgres_dsn: str, namespace: str, stack: ExitStack, seed: int
) -> None:
    """Whoever begins first may commit last, and so may who has the smaller transaction id."""
    choose = random.Random(seed)
    trees = [f"tree-{number}" for number in range(6)]
    store = stack.enter_context(holdfast.open(postgres_dsn, namespace=namespace))
    for root_id in trees:
        store.session(root_id)
    writers = [stack.enter_context(psycopg.connect(postgres_dsn)) for _ in range(3)]
    open_trees: dict[int, set[str]] = {}
    events: list[Any] = []
    for _ in range(60):
        number = choose.randrange(len(writers))
        writer, held = writers[number], open_trees.get(number)
        free = [each for each in trees if not any(each in h for h in open_trees.values())]
        action = choose.choice(["begin", "write", "write", "end", "other", "read", "read"])
        if action == "begin" and held is None:
            writer.execute("SELECT pg_current_xact_id()")
            open_trees[number] = set()
        elif action == "write" and held is not None and (held or free):
            # Only one tree in a transaction, so that no two wait for each other.
            root_id = choose.choice(sorted(held) or free)
            held.add(root_id)
            session = store.within(writer).find_session(root_id)
            for _ in range(choose.randint(1, 4)):
                session.state.increment("n")
        elif action == "end" and held is not None:
            (writer.commit if choose.random() < 0.7 else writer.rollback)()
            del open_trees[number]
        elif action == "other" and free:
            store.find_session(choose.choice(free)).state.increment("n")
        elif action == "read":
            after = events[-1].cursor if events else None
            count = choose.choice([1, 3, 10_000])
            events += islice(store.follow_all(after=after, wait=False), count)
    for writer in writers:
        writer.commit()
    events += until_now(store, events[-1].cursor if events else None)
    assert by_tree(events) == committed(store, trees)
    assert by_tree(until_now(store)) == committed(store, trees)


def test_an_imported_tree_comes_too_and_a_deleted_one_keeps_its_places(
    place: dict[str, Any], tmp_path: Path
) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/other.db") as other:
        for number in range(7):
            other.session("moved").state.set("k", number)
        other.export(tmp_path / "moved.holdfast")
    with holdfast.open(**place) as store:
        for number in range(7):
            store.session("here").state.set("k", number)
        events = until_now(store)
        store.import_sessions(tmp_path / "moved.holdfast")
        events += until_now(store, events[-1].cursor)
        assert by_tree(events) == committed(store, ["here", "moved"])
        store.find_session("here").delete()
        more = until_now(store, events[-1].cursor)
        assert by_tree([*events, *more]) == committed(store, ["here", "moved"])
        assert by_tree(until_now(store)) == committed(store, ["here", "moved"])


def test_what_is_pruned_is_not_given_and_what_comes_later_is(place: dict[str, Any]) -> None:
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        store.session("stays").state.increment("n")
        for number in range(7):
            store.session("goes").state.set("k", number)
        store.session("goes").end()
        events = until_now(store)
        clock.advance(40 * 24 * 3_600)
        # The last events of all go: their places must not be given again.
        assert store.prune().events > 0
        store.find_session("stays").state.increment("n")
        store.session("new")
        found = by_tree(until_now(store, events[-1].cursor))
        assert (found["stays"], found["new"]) == ([3], [1])
        kept = by_tree(until_now(store))
        assert (kept["stays"], kept["new"]) == ([1, 2, 3], [1])
        assert 1 not in kept.get("goes", [])


def test_a_copy_in_a_file_gives_each_tree_in_order(place: dict[str, Any], tmp_path: Path) -> None:
    trees = ["a", "b"]
    with holdfast.open(**place) as store:
        for number in range(12):
            store.session(trees[number % 2]).state.increment("n")
        # What is changed lies elsewhere in PostgreSQL's file than what came before and after it.
        child = store.session("child", parent="a")
        child.state.increment("n")
        child.delete()
        store.backup(tmp_path / "copy.db")
        with holdfast.open(f"sqlite:///{tmp_path}/copy.db") as copy:
            copy.session("a").state.increment("n")
            copy.runtime.driver.vacuum()
            assert by_tree(until_now(copy)) == committed(copy, trees)


def cursors(store: holdfast.Store) -> Iterator[str]:
    for event in store.follow_all(wait=False):
        yield event.cursor


def test_cursors_of_elsewhere_are_refused(place: dict[str, Any], tmp_path: Path) -> None:
    with holdfast.open(**place) as store, holdfast.open(f"sqlite:///{tmp_path}/o.db") as other:
        for each in (store, other):
            each.session("root")
        [foreign] = cursors(other)
        [own] = cursors(store)
        for cursor in (foreign, "x", "", own[:-8], "é" * 9, 7, b"x"):
            with pytest.raises(holdfast.InvalidArgument, match="after"):
                until_now(store, cursor)  # type: ignore[arg-type]
        with pytest.raises(holdfast.InvalidArgument, match="poll_seconds"):
            next(store.follow_all(poll_seconds=0))
        assert until_now(store, own) == []


@pytest.mark.parametrize(
    "forged",
    [
        '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        r'{"given": [["\u0000", 1, 1]], "number": -1}',
        r'{"last": ["\u0000", 1], "number": -1}',
        '{"prunes": [1, ["x"]]}',
        '{"horizon": -1, "number": -1}',
        "null",
    ],
)
def test_a_forged_cursor_is_refused(place: dict[str, Any], forged: str) -> None:
    with holdfast.open(**place) as store:
        store.session("root")
        [cursor] = cursors(store)
        origin, _ = json.loads(base64.urlsafe_b64decode(cursor))
        changed = f"[{json.dumps(origin)}, {forged}]".encode()
        with pytest.raises(holdfast.InvalidArgument, match="must be a cursor of follow_all"):
            until_now(store, base64.urlsafe_b64encode(changed).decode())


def test_the_last_cursor_fits_into_the_reason_of_a_closed_socket(place: dict[str, Any]) -> None:
    """Whoever follows from now on has seen no event whose cursor it could use instead."""
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        store.session("goes").end()
        clock.advance(40 * 24 * 3_600)
        assert store.prune().events > 0
        for name in ("one", "two"):
            store.session(name)
        # It names the transactions that run on the server at that moment, those of other tests too.
        until(lambda: len(f"after={store.last_cursor()}") < REASON_CHARACTERS_MAX, "it never fits")


def test_a_cursor_of_a_later_state_of_the_same_file_is_refused(
    tmp_path: Path, stack: ExitStack
) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.session("root")
        store.backup(tmp_path / "copy.db")
        store.session("later")
        *_, last = cursors(store)
    copy = stack.enter_context(holdfast.open(f"sqlite:///{tmp_path}/copy.db"))
    with pytest.raises(holdfast.InvalidArgument, match="ahead of this store"):
        until_now(copy, last)


def test_a_cursor_of_a_file_is_refused_by_a_copy_that_has_gone_on_differently(
    tmp_path: Path, stack: ExitStack
) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.session("root").state.increment("n")
        store.backup(tmp_path / "copy.db")
        *_, shared = cursors(store)
        store.find_session("root").state.increment("n")
        *_, own = cursors(store)
        end = store.last_cursor()
    copy = stack.enter_context(holdfast.open(f"sqlite:///{tmp_path}/copy.db"))
    # The same tree, position and kind as in the original, and one more.
    copy.find_session("root").state.increment("n")
    copy.find_session("root").state.increment("n")
    for cursor in (own, end):
        with pytest.raises(holdfast.InvalidArgument, match="another copy of this store"):
            until_now(copy, cursor)
    # What both have in common is one place.
    assert by_tree(until_now(copy, shared)) == {"root": [3, 4]}


def test_a_cursor_whose_next_events_were_pruned_is_refused(place: dict[str, Any]) -> None:
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        store.session("stays")
        store.session("goes").state.increment("n")
        store.session("goes").end()
        store.session("ends").end()
        store.find_session("stays").state.increment("n")
        events = until_now(store)
        seen = {(event.root_id, event.position): event.cursor for event in events}
        clock.advance(40 * 24 * 3_600)
        assert store.prune().events > 0
        gone = [each for each in events if each.root_id != "stays"]
        # Whoever had them all misses nothing.
        assert until_now(store, events[-1].cursor) == []
        assert by_tree(until_now(store)) == {"stays": [1, 2]}
        store.find_session("stays").state.increment("n")
        assert by_tree(until_now(store, events[-1].cursor)) == {"stays": [3]}
        for cursor in (events[0].cursor, seen["goes", 1]):
            with pytest.raises(holdfast.Compacted, match="start without a cursor") as caught:
                until_now(store, cursor)
            assert any(each.root_id in str(caught.value) for each in gone)


def test_who_starts_with_what_is_kept_can_resume_and_is_told_what_a_later_prune_takes(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_all, "EVENTS_PER_READ", 2)
    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        stays = store.session("stays")
        for name in ("first", "second"):
            store.session(name).end()
            stays.state.increment("n")
        clock.advance(40 * 24 * 3_600)
        store.session("second", reopen=True)
        assert store.prune().events > 0
        kept = until_now(store)
        assert "first" not in by_tree(kept)
        # Between trees no order is promised: it depends on what else runs on the server.
        for number, event in enumerate(kept, 1):
            after = until_now(store, event.cursor)
            assert by_tree(after) == by_tree(kept[number:])
            assert sorted(after, key=place_of) == sorted(kept[number:], key=place_of)
        at_end = store.last_cursor()
        live = store.follow_all(wait=False)
        begun = [next(live), next(live)]
        assert all(event in kept for event in begun)
        assert begun[0] != begun[1]
        store.find_session("second").end()
        clock.advance(40 * 24 * 3_600)
        assert store.prune().events > 0
        with pytest.raises(holdfast.Compacted, match="also of second"):
            list(live)
        for cursor in (kept[0].cursor, at_end):
            with pytest.raises(holdfast.Compacted, match="also of second"):
                until_now(store, cursor)
        left = until_now(store)
        assert by_tree(left) == {"stays": [1, 2, 3]}
        assert until_now(store, left[0].cursor) == left[1:]


def test_a_cursor_of_a_restored_schema_is_refused(
    postgres_dsn: str, namespace: str, stack: ExitStack
) -> None:
    """Its rows have the transaction ids of another place."""
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        store.session("root")
        [cursor] = cursors(store)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        events = f'"{namespace}".hf_events'
        connection.execute(f"CREATE TABLE {events}_new (LIKE {events} INCLUDING ALL)".encode())
        connection.execute(f"DROP TABLE {events}".encode())
        connection.execute(f"ALTER TABLE {events}_new RENAME TO hf_events".encode())
    store = stack.enter_context(holdfast.open(postgres_dsn, namespace=namespace))
    with pytest.raises(holdfast.InvalidArgument, match="another server"):
        until_now(store, cursor)
