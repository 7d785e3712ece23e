"""The outcome of a call that has returned waits a moment for others, and not for a slow tool."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast import Result, ToolUse
from holdfast.effects import recorder, turns
from holdfast.kernel.driver import Hooks, Point
from holdfast.kernel.flow import wait
from holdfast.testing.subject import Colour, Subject, done
from tests.checkpoints.colours import both_colours
from tests.crash.children import Child

WAIT_SECONDS = 60.0


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def statuses(store: holdfast.Store) -> dict[str | None, str]:
    return {effect.call_id: effect.status for effect in store.effects(session="s")}


def uses(act: Callable[[str], str], *names: str) -> list[ToolUse]:
    tool = holdfast.tool(effect="mutate", name="act")(act)
    return [ToolUse(tool, {"name": name}, name) for name in names]


def in_recorder() -> bool:
    return threading.current_thread().name == "holdfast-recorder"


@both_colours
async def test_an_outcome_is_recorded_while_the_next_tool_runs(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))

    def act(name: str) -> str:
        with holdfast.open(**subject.place) as other:
            if name == "b":
                until(lambda: statuses(other)["a"] == "completed")
            if name == "c":
                until(lambda: statuses(other)["b"] == "completed")
            seen.append(list(statuses(other).values()))
        return name

    seen: list[list[str]] = []
    answers = await done(session.call_all(uses(act, "a", "b", "c")))
    assert [answer.value for answer in answers] == ["a", "b", "c"]
    assert seen == [
        ["issued", "issued", "issued"],
        ["completed", "issued", "issued"],
        ["completed", "completed", "issued"],
    ]


@both_colours
async def test_calls_of_which_none_is_slow_share_their_commits(subject: Subject) -> None:
    def probe(point: Point) -> None:
        if point.boundary == "commit" and point.moment == "after":
            commits.append(point.call)

    def act(name: str) -> str:
        if name == "last":
            # It lasts until the recorder has written all that is before it.
            until(lambda: len(commits) == 2)
        return name

    commits: list[str] = []
    store = await subject.open(hooks=Hooks(probe=probe))
    session = await done(store.session("s"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "HOLD_SECONDS", 1.0)
        commits.clear()
        await done(session.call_all(uses(act, *"abcdefg", "last")))
    assert commits == ["Ledger.take_all", "Ledger.finish_all", "Ledger.finish_all"]


@both_colours
async def test_a_recorder_that_fails_leaves_the_outcome_to_the_turn(subject: Subject) -> None:
    def probe(point: Point) -> None:
        if in_recorder() and point.moment == "before":
            failed.set()
            raise holdfast.StoreUnavailable("not now")

    def act(name: str) -> str:
        if name == "b":
            assert failed.wait(WAIT_SECONDS)
        return name

    failed = threading.Event()
    store = await subject.open(hooks=Hooks(probe=probe))
    session = await done(store.session("s"))
    answers = await done(session.call_all(uses(act, "a", "b")))
    assert [answer.value for answer in answers] == ["a", "b"]
    found = await done(store.effects(session="s"))
    assert [effect.status for effect in found] == ["completed", "completed"]


def slow_recorder() -> tuple[Hooks, threading.Event, threading.Event]:
    """Return hooks with which the recorder begins to write, and goes on when it is let."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    def probe(point: Point) -> None:
        if in_recorder() and point.boundary == "commit" and point.moment == "before":
            has_begun.set()
            assert may_go_on.wait(WAIT_SECONDS)

    return Hooks(probe=probe), has_begun, may_go_on


@both_colours
async def test_a_turn_does_not_end_before_the_recorder_has(subject: Subject) -> None:
    def act(name: str) -> str:
        if name == "b":
            assert has_begun.wait(WAIT_SECONDS)
            threading.Timer(0.1, may_go_on.set).start()
        return name

    hooks, has_begun, may_go_on = slow_recorder()
    store = await subject.open(hooks=hooks)
    session = await done(store.session("s"))
    answers = await done(session.call_all(uses(act, "a", "b")))
    assert may_go_on.is_set()
    assert [answer.value for answer in answers] == ["a", "b"]
    found = await done(store.effects(session="s"))
    assert [effect.status for effect in found] == ["completed", "completed"]


def test_an_interrupt_while_the_recorder_writes_loses_no_outcome(place: dict[str, Any]) -> None:
    def act(name: str) -> str:
        if name == "b":
            assert has_begun.wait(WAIT_SECONDS)
            threading.Timer(0.1, may_go_on.set).start()
            raise KeyboardInterrupt
        return name

    hooks, has_begun, may_go_on = slow_recorder()
    with holdfast.open(**place, hooks=hooks) as store:
        session = store.session("s")
        with pytest.raises(KeyboardInterrupt):
            session.call_all(uses(act, "a", "b", "c"))
        assert statuses(store) == {"a": "completed", "b": "unknown", "c": "failed"}


def test_another_interrupt_while_it_waits_for_a_recorder_that_fails_loses_no_outcome(
    place: dict[str, Any],
) -> None:
    asyncio.run(cancel_twice(place))


async def cancel_twice(place: dict[str, Any]) -> None:
    has_begun, may_fail = threading.Event(), threading.Event()
    is_acting = asyncio.Event()

    def fail(returned: Any) -> Any:
        if in_recorder():
            has_begun.set()
            assert may_fail.wait(WAIT_SECONDS)
            raise holdfast.StoreUnavailable("not now")
        return ended(returned)

    @holdfast.tool(effect="mutate")
    async def act(name: str) -> str:
        if name == "b":
            is_acting.set()
            await asyncio.Event().wait()
        return name

    def wait_again(*given: Any) -> Any:
        waits.release()
        return wait(*given)

    ended, waits = turns._ended, threading.Semaphore(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "_ended", fail)
        patch.setattr(turns, "wait", wait_again)
        async with holdfast.aopen(**place) as store:
            session = await store.session("s")
            calls = [ToolUse(act, {"name": name}, name) for name in "abc"]
            task = asyncio.ensure_future(session.call_all(calls))
            await is_acting.wait()
            await asyncio.to_thread(has_begun.wait, WAIT_SECONDS)
            for _ in range(3):
                task.cancel()
                assert await asyncio.to_thread(waits.acquire, timeout=WAIT_SECONDS)
            may_fail.set()
            await asyncio.wait([task])
            found = await store.effects(session="s")
    assert {each.call_id: each.status for each in found} == {
        "a": "completed", "b": "unknown", "c": "failed",
    }  # fmt: skip


@both_colours
async def test_the_recorder_ends_with_the_store(subject: Subject) -> None:
    def recorders() -> int:
        return sum(each.name == "holdfast-recorder" for each in threading.enumerate())

    store = await subject.open()
    session = await done(store.session("s"))
    for number in range(3):
        await done(session.call_all(uses(lambda name: name, f"a{number}", f"b{number}")))
    assert recorders() == 1
    await done(store.close())
    assert recorders() == 0


def live(place: dict[str, Any], colour: Colour, say: Callable[[str], None]) -> None:
    """Make a quick call and a slow one, inside which this process is killed."""

    def act(name: str) -> str:
        if name == "slow":
            say("inside")
            time.sleep(WAIT_SECONDS)
        return name

    calls = uses(act, "quick", "slow", "behind")

    async def run() -> None:
        async with holdfast.aopen(**place) as store:
            await (await store.session("s")).call_all(calls)

    if colour == "async":
        asyncio.run(run())
    else:
        with holdfast.open(**place) as store:
            store.session("s").call_all(calls)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_killed_inside_a_slow_tool_what_returned_before_it_is_not_in_doubt(
    place: dict[str, Any], colour: Colour
) -> None:
    child = Child(lambda say: live(place, colour, say))
    assert child.lines.readline() == "inside\n"
    with holdfast.open(**place) as store:
        until(lambda: statuses(store)["quick"] == "completed")
        child.kill()
        child.wait()
        assert statuses(store) == {"quick": "completed", "slow": "issued", "behind": "issued"}
        [replayed] = store.session("s").call_all(uses(lambda name: f"{name} again", "quick"))
        assert isinstance(replayed, Result)
        assert (replayed.value, replayed.replayed) == ("quick", True)
