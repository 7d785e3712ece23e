"""Trees that are cancelled and deleted in several transactions, and what is seen between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

import holdfast
from holdfast import SessionBusy, SessionEnded, trees
from holdfast.kernel import driver
from holdfast.kernel.driver import Hooks, Trace
from holdfast.kernel.postgres.pipeline import Link
from holdfast.store import check
from holdfast.testing.nouns import Counter
from holdfast.testing.subject import Colour, Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.internals import engine_of
from tests.maintenance.stores import sound
from tests.maintenance.test_deletion import canaries, fill

CHILDREN = 9
REST_SECONDS = 0.05


class Stopped(Exception):
    """Somebody was killed between two transactions."""


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SESSIONS_AT_ONCE": 3,
        "SESSIONS_PER_PASS": 3,
        "SESSIONS_CLOSED_PER_PASS": 4,
        "SESSIONS_PER_PAGE": 5,
        "ROWS_PER_PASS": 7,
        "EVENTS_PER_PASS": 11,
    }.items():
        monkeypatch.setattr(trees, name, value)


async def grow(store: Any, children: int = CHILDREN) -> Any:
    """A top below a root, its children, and one below the first of them; each has two versions."""
    root = await done(store.session("root"))
    top = await done(store.session("top", parent=root))
    await done(top.save(x=0))
    for number in range(children):
        child = await done(store.session(f"c{number}", parent=top))
        await done(child.append("log", [number]))
        await done(child.append("log", [number]))
    await done(store.session("below", parent="c0"))
    return top


def members(children: int = CHILDREN) -> list[str]:
    return ["top", *(f"c{number}" for number in range(children)), "below"]


def stopping(after: int, call: str) -> Hooks:
    """Stop whoever has made that many calls of a name."""
    seen = 0

    def trace(trace: Trace) -> None:
        nonlocal seen
        seen += trace.call == call
        if seen == after:
            seen = -1_000
            raise Stopped

    return Hooks(trace=trace)


def in_sync(case: Callable[[Subject], Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a case that stops callers by an error, which only a sync store hands on."""

    def test(place: dict[str, Any], tmp_path: Path) -> None:
        async def run() -> None:
            subject = Subject(place, "sync", tmp_path)
            try:
                await case(subject)
            finally:
                await subject.close()

        asyncio.run(run())

    test.__name__ = case.__name__
    return test


async def statuses(store: Any) -> dict[str, str]:
    return {info.id: info.status for info in await done(store.sessions(limit=1_000))}


def unfinished(subject: Subject) -> list[tuple[str, str]]:
    found = check(**subject.place)
    return [(each.message, each.advice) for each in found if each.check == "sessions"]


@both_colours
async def test_a_tree_of_many_passes_leaves_nothing(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    top = await grow(store)
    await fill(store, await done(store.session("full", parent="c1")))
    await done(store.work.submit("t", session="c2"))
    told: list[tuple[int, int]] = []
    deleted = await done(top.delete(force=True, progress=lambda *counts: told.append(counts)))
    assert deleted == [*members(), "full"]
    assert told[-1] == (len(deleted), len(deleted))
    assert [count for count, _ in told] == sorted({count for count, _ in told})
    assert await statuses(store) == {"root": "active"}
    assert await canaries(store) == {"result", "landed"}
    assert await done(store.work.list()) == []
    events = await done(store.events("root", limit=1_000))
    counts = [event.data["sessions"] for event in events if event.kind == "session_deleted"]
    assert sum(counts) == len(deleted)
    assert max(counts) <= trees.SESSIONS_PER_PASS
    others = [each for each in events if each.kind != "session_deleted" and each.data]
    assert {event.session_id for event in others} == {"root"}
    if subject.colour == "sync":
        sound(store)


@both_colours
async def test_no_transaction_grows_with_the_tree(subject: Subject) -> None:
    costs: list[int] = []
    for children in (20, 60):
        traces: list[Trace] = []
        store = await subject.open(durability="normal", hooks=Hooks(trace=traces.append))
        top = await grow(store, children)
        traces.clear()
        if children == 20:
            await done(top.cancel())
        await done(top.delete(force=True))
        costs.append(max(trace.statements for trace in traces))
    assert costs[1] <= costs[0]


def test_a_pass_costs_the_same_however_many_sessions_it_removes(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "ROWS_PER_PASS", 1_000)
    costs: list[int] = []
    for at_once in (4, 12):
        monkeypatch.setattr(trees, "SESSIONS_PER_PASS", at_once)
        traces: list[Trace] = []
        with holdfast.open(**place, hooks=Hooks(trace=traces.append)) as store:
            top = asyncio.run(grow(store, 12))
            top.delete(force=True)
        removals = [each.statements for each in traces if each.call == "Tree.remove_some"]
        costs.append(max(removals))
    assert costs[1] == costs[0]


@both_colours
async def test_what_others_have_written_costs_a_deletion_nothing(subject: Subject) -> None:
    """One session is deleted at once, and more are emptied in as many passes."""
    costs: list[list[int]] = []
    traces: list[Trace] = []
    store = await subject.open(durability="normal", hooks=Hooks(trace=traces.append))
    root = await done(store.session("root"))
    for number, events in enumerate((1, 3 * trees.EVENTS_PER_PASS)):
        for count in range(events):
            await done(root.append("log", [count]))
        one = await done(store.session(f"one {number}", parent=root))
        await done(one.append("log", [1]))
        several = await done(store.session(f"several {number}", parent=root))
        for child in range(trees.SESSIONS_AT_ONCE):
            await done(store.session(f"below {number} {child}", parent=several))
        traces.clear()
        await done(one.delete(force=True))
        assert [trace.call for trace in traces] == ["Tree.delete_at_once"]
        await done(several.delete(force=True))
        emptied = [trace.statements for trace in traces if trace.call == "Tree.empty_events"]
        costs.append([*emptied, max(trace.statements for trace in traces)])
    assert costs[1] == costs[0]
    events = await done(store.events("root", limit=1_000))
    assert {event.session_id for event in events if event.data} == {"root"} | {
        event.session_id for event in events if event.kind == "session_deleted"
    }


@both_colours
async def test_events_of_another_tree_with_the_same_ids_are_left_alone(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    for children in (0, trees.SESSIONS_AT_ONCE):
        # At positions at which the other tree has its own.
        for root, appended in ((f"a{children}", 1), (f"b{children}", 3 * children + 3)):
            beside = await done(store.session(root))
            for count in range(appended):
                await done(beside.append("log", [count]))
            top = await done(store.session(f"top {children}", parent=root))
            for child in range(children):
                await done(store.session(f"{children} {child}", parent=top))
            await done(top.delete(force=True))
            events = await done(store.events(root, limit=1_000))
            kept = [event for event in events if event.data and event.kind != "session_deleted"]
            assert {event.session_id for event in kept} == {root}
            assert len(kept) == sum(event.session_id == root for event in events)


# A change in one of these is a change of how long writers of a tree wait for a pass over it.
ROUND_TRIPS = {
    "Tree.cancel_some": 7,
    # Two are for the audit trail, in the first pass of a deletion.
    "Tree.close": 7,
    "Tree.empty_events": 3,
    "Tree.remove_some": 5,
}


def test_a_pass_is_few_round_trips(
    postgres_dsn: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips, caller, exchange = 0, threading.get_ident(), Link.exchange

    def counted(self: Link, *arguments: Any) -> Any:
        nonlocal trips
        # Another thread tells other processes of events.
        trips += threading.get_ident() == caller
        return exchange(self, *arguments)

    def trace(trace: Trace) -> None:
        nonlocal trips
        made.setdefault(trace.call, set()).add(trips)
        trips = 0

    made: dict[str, set[int]] = {}
    monkeypatch.setattr(Link, "exchange", counted)
    monkeypatch.setattr(trees, "ROWS_PER_PASS", 1_000)
    hooks = Hooks(trace=trace)
    with holdfast.open(postgres_dsn, namespace=namespace, hooks=hooks) as store:
        top = asyncio.run(grow(store))
        top.cancel()
        top.delete(force=True)
    assert {call: max(made[call]) for call in ROUND_TRIPS} == ROUND_TRIPS


@pytest.mark.parametrize("colour", get_args(Colour))
@pytest.mark.parametrize("change", ["cancel", "delete"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_passes_are_short_and_wait_while_others_write(
    colour: Colour, change: str, is_shared: bool, place: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    async def case() -> None:
        subject = Subject(place, colour, tmp_path)
        try:
            await change_beside(await subject.open())
        finally:
            await subject.close()

    async def change_beside(store: Any) -> None:
        def note(count: int, _: int) -> None:
            counts.append(count)
            noted.append(time.monotonic())
            if on_sqlite:
                rests.append(engine_of(store).writer.rest_until)
                is_over.append(noted[-1] >= rests[-1])
            if is_shared:
                Counter(other).add()

        top = await grow(store, 30)
        given = {"force": True} if change == "delete" else {}
        await done(getattr(top, change)(**given, progress=note))

    counts: list[int] = []
    noted: list[float] = []
    rests: list[float] = []
    is_over: list[bool] = []
    on_sqlite = "namespace" not in place
    monkeypatch.setattr(trees, "SESSIONS_PER_PASS", 8)
    monkeypatch.setattr(trees, "ROWS_PER_PASS", 1_000)
    monkeypatch.setattr(driver, "REST_SECONDS", REST_SECONDS)
    with holdfast.open(**place) as other:
        asyncio.run(case())
    # The first pass does not know of others yet, and the last has what is left.
    sizes = [after - before for before, after in pairwise(counts)][1:-1]
    # PostgreSQL does not tell whether others write.
    assert set(sizes) == {4 if is_shared or not on_sqlite else 8}
    if not on_sqlite:
        assert all(after - before >= REST_SECONDS for before, after in pairwise(noted))
    elif is_shared:
        assert all(is_over[2:])
        assert all(before < after for before, after in pairwise(rests[1:]))


@in_sync
async def test_a_deletion_that_was_stopped_goes_on(subject: Subject) -> None:
    for number, call in enumerate(("Tree.close", "Tree.empty_events", "Tree.remove_some") * 2):
        store = await subject.open(durability="normal", hooks=stopping(1 + number // 3, call))
        top = await grow(store)
        await raises(Stopped, partial(top.delete, force=True))
        found = await statuses(store)
        assert (found["root"], found["top"]) == ("active", "deleting")
        if call != "Tree.close":
            assert set(found.values()) == {"active", "deleting"}
            assert list(found.values()).count("active") == 1
        ((message, advice),) = unfinished(subject)
        assert message == "Session 'top' and its descendants are still deleting."
        assert "`holdfast sessions delete top --force`" in advice
        for refused in (
            partial(top.save, x=1),
            partial(top.fork, 1),
            partial(top.lease, "me", 1),
            partial(store.session, "top", reopen=True),
            partial(store.session, "new", parent="top"),
            partial(store.work.submit, "t", session="top"),
        ):
            error = await raises(SessionEnded, refused)
            assert str(error) == (
                "session top is deleting; to delete it again, by force, finishes that"
            )
        await done(top.delete(force=True))
        assert await statuses(store) == {"root": "active"}
        assert unfinished(subject) == [("No cancellation or deletion is unfinished.", "")]
        sound(store)


@in_sync
async def test_what_runs_in_a_large_tree_stops_before_anything_is_removed(
    subject: Subject,
) -> None:
    store = await subject.open(durability="normal", hooks=stopping(1, "Tree.empty_events"))
    top = await grow(store)
    for _ in range(10):
        await done(store.work.submit("t", session="c5"))
    (item,) = await done(store.work.claim("worker"))
    driven = await done(store.find_session("c7"))
    driven.fence = (await done(driven.lease("driver", 600))).fence
    await raises(SessionBusy, top.delete)
    await raises(Stopped, lambda: top.delete(force=True))
    assert await done(store.work.claim("worker")) == []
    await raises(holdfast.LeaseLost, item.complete)
    await raises(holdfast.LeaseLost, lambda: driven.save(x=1))


@both_colours
async def test_a_large_tree_that_may_not_be_deleted_stays_as_it_is(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    top = await grow(store)
    for id in members()[1:-1]:
        await done((await done(store.find_session(id))).end())
    before = await statuses(store)
    error = await raises(SessionBusy, top.delete)
    assert error.session_id == "below"
    assert await statuses(store) == before
    await done((await done(store.find_session("below"))).end())
    assert await done(top.delete()) == members()


def test_a_session_that_is_opened_meanwhile_is_not_deleted_unforced(place: Any) -> None:
    def trace(trace: Trace) -> None:
        # It was checked, and is reopened before it is closed.
        if trace.call == "Tree.check" and not reopened:
            reopened.append(other.session("c8", reopen=True))

    reopened: list[holdfast.Session] = []
    hooks = Hooks(trace=trace)
    with holdfast.open(**place) as other, holdfast.open(**place, hooks=hooks) as store:
        asyncio.run(grow(other))
        for id in members()[1:]:
            other.find_session(id).end()
        top = store.find_session("top")
        with pytest.raises(SessionBusy) as caught:
            top.delete()
        assert caught.value.session_id == "c8"
        assert store.find_session("c8").info().status == "active"
        assert top.delete(force=True) == members()


@in_sync
async def test_a_cancellation_that_was_stopped_goes_on(subject: Subject) -> None:
    hooks = stopping(2, "Tree.cancel_some")
    store = await subject.open(durability="normal", hooks=hooks)
    top = await grow(store)
    for _ in range(20):
        await done(store.work.submit("t", session="c1"))
    await done((await done(store.find_session("c3"))).end())
    await raises(Stopped, top.cancel)
    child = await done(store.find_session("c8"))
    found = await statuses(store)
    assert found["top"] == "cancelling"
    assert "active" in {found[id] for id in members()}
    ((_, advice),) = unfinished(subject)
    assert "`holdfast sessions cancel top`" in advice
    for refused in (
        lambda: top.save(x=1),
        lambda: store.session("top", reopen=True),
        lambda: store.session("new", parent="top"),
        lambda: child.fork(1),
    ):
        error = await raises(SessionEnded, refused)
        assert str(error) == "session top is cancelling; to cancel it again finishes that"
    # Who was not reached yet may start another: it is reached later.
    await done(store.session("late", parent="below"))
    assert (await done(top.cancel()))[0] == "top"
    found = await statuses(store)
    assert found.pop("root") == "active"
    assert found.pop("c3") == "completed"
    assert set(found.values()) == {"cancelled"}
    assert {item.status for item in await done(store.work.list())} == {"cancelled"}
    history = await done(top.history(kind="state_transition"))
    assert [each.data for each in history] == [
        {"from": "cancelling", "to": "cancelled"},
        {"from": "active", "to": "cancelling"},
    ]
    again = await done(store.session("top", reopen=True))
    assert (await done(again.info())).status == "active"


@both_colours
async def test_a_tree_moves_in_one_transaction_however_large(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await subject.open(durability="normal", hooks=Hooks(trace=traces.append))
    await grow(store)
    traces.clear()
    await done(store.export(subject.directory / "moved", ["top"], move=True))
    assert [each.call for each in traces].count("PortableOps._leave") == 1
    assert not any(each.call.startswith("Tree.") for each in traces)
    assert set((await statuses(store)).values()) == {"cancelled"}
