"""Items that would resume a session which has gone on without them: they change nothing."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.mesh import Service
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.peers.uptakes import taken_up
from tests.work.working import opened


async def answered(store: Any, agent: str) -> tuple[Any, Any]:
    """Return a session whose pause is ready, and the claimed item that would resume it."""
    session = await done(store.session(f"of {agent}", agent=agent))
    await done(session.ask("peer", 1, id=f"{agent} first"))
    await done(session.pause({"step": 1}))
    await done(store.answer(f"{agent} first", "one"))
    [item] = await done(store.work.claim("w", queues=f"agent:{agent}"))
    return session, item


async def gone_on(store: Any, agent: str) -> tuple[Any, Any]:
    """Return the same, after another item has driven the session to its next pause."""
    session, item = await answered(store, agent)
    await done(store.work.submit("step", session=session, queue=f"steps of {agent}"))
    [step] = await done(store.work.claim("w", queues=f"steps of {agent}"))
    driven = await done(step.drive())
    await done(driven.ask("peer", 2, id=f"{agent} second"))
    await done(driven.pause({"step": 2}))
    return session, item


async def taken_over(store: Any, agent: str) -> tuple[Any, Any]:
    """Return the same, after somebody has resumed the session without its item."""
    session, item = await answered(store, agent)
    resumption = await done(session.resumption())
    assert [answer.result for answer in resumption.answers] == ["one"]
    return session, item


async def states(store: Any, session: Any, agent: str) -> Any:
    pauses = await done(store.pauses(agent=agent))
    return (await done(session.info())).status, sorted(
        (each.generation, each.state) for each in pauses
    )


async def resumes_once(store: Any, agent: str) -> None:
    """The second answer is given to one item."""
    assert await done(store.answer(f"{agent} second", "two")) == "counted"
    [item] = await done(store.work.claim("w", queues=f"agent:{agent}"))
    resumption = await done(item.resume())
    assert (resumption.context, resumption.is_consumed) == ({"step": 2}, False)
    assert [answer.result for answer in resumption.answers] == ["two"]
    await done(item.complete("done"))
    assert await done(store.work.claim("w", queues=f"agent:{agent}")) == []


@both_colours
async def test_an_item_that_has_not_resumed_its_session_cannot_be_completed(
    subject: Subject,
) -> None:
    store = await opened(subject)
    session, item = await answered(store, "a")
    error = await raises(holdfast.InvalidArgument, lambda: item.complete("done"))
    assert "resume it before it is completed" in str(error)
    assert await states(store, session, "a") == ("waiting", [(1, "ready")])
    resumption = await done(item.resume())
    assert [answer.result for answer in resumption.answers] == ["one"]
    await done(item.complete("done"))
    assert await states(store, session, "a") == ("active", [(1, "closed")])


@both_colours
async def test_the_end_of_an_obsolete_item_leaves_the_next_pause(subject: Subject) -> None:
    store = await opened(subject)
    ends: dict[str, Any] = {
        "completed": lambda item: item.complete("done"),
        "failed": lambda item: item.fail("broken", retry=False),
        "cancelled": lambda item: item.cancel(),
    }
    for status, end in ends.items():
        session, item = await gone_on(store, status)
        await done(end(item))
        assert (await done(store.work.get(item.id))).status == status
        waits = ("waiting", [(1, "closed"), (2, "waiting")])
        assert await states(store, session, status) == waits, status
        await resumes_once(store, status)


@both_colours
async def test_an_obsolete_item_does_not_resume_a_session_that_waits(subject: Subject) -> None:
    store = await opened(subject)
    session, item = await gone_on(store, "a")
    error = await raises(holdfast.WorkFailed, item.resume)
    assert "has paused again" in str(error)
    waits = ("waiting", [(1, "closed"), (2, "waiting")])
    assert await states(store, session, "a") == waits
    await done(item.release())
    # A service that claims it with another takes up the other.
    await done(store.request("a", "new", request_id="r"))
    if subject.colour == "sync":
        found = taken_up(store, "a")
        assert [taken is None for id, taken in found.items() if id == item.id] == [True]
        assert len(found) == 2
        for id in found:
            store.work.release(id, reason="the test goes on")
    await _serve(store, [])
    assert (await done(store.work.get(item.id))).status == "failed"
    assert (await done(store.peer_call("r"))).state == "ok"
    assert await states(store, session, "a") == waits
    await done(store.answer("a second", "two"))
    await _serve(store, [["two"]])
    assert await states(store, session, "a") == ("active", [(1, "closed"), (2, "closed")])


@both_colours
async def test_an_item_that_was_overtaken_cannot_end_the_session(subject: Subject) -> None:
    store = await opened(subject)
    ends: dict[str, Any] = {
        "complete": lambda item: item.complete("done"),
        "fail": lambda item: item.fail("broken", retry=False),
        "resume": lambda item: item.resume(),
        "release": lambda item: item.release(),
    }
    for name, end in ends.items():
        for has_saved in (False, True):
            agent = f"{name} {has_saved}"
            session, item = await taken_over(store, agent)
            if has_saved:
                await done(session.save(step=2))
            await raises(holdfast.LeaseLost, partial(end, item))
            assert (await done(store.work.get(item.id))).status == "cancelled"
            pause = "closed" if has_saved else "resumed"
            assert await states(store, session, agent) == ("active", [(1, pause)])
            again = await done(session.resumption())
            assert again.is_consumed == has_saved


@both_colours
async def test_an_item_that_drives_may_ask_for_the_resumption_of_its_session(
    subject: Subject,
) -> None:
    store = await opened(subject)
    session, item = await answered(store, "a")
    driven = await done(item.drive())
    resumption = await done(driven.resumption())
    assert [answer.result for answer in resumption.answers] == ["one"]
    await done(item.complete("done"))
    assert (await done(store.work.get(item.id))).status == "completed"
    assert await states(store, session, "a") == ("active", [(1, "closed")])


@both_colours
async def test_whoever_takes_over_wins_or_loses_against_the_item_that_fails(
    subject: Subject,
) -> None:
    store, won = await opened(subject), list[str]()
    for number in range(20):
        session, item = await answered(store, str(number))
        calls = [session.resumption, partial(item.fail, "broken", retry=False)]
        results = await both(subject, calls if number % 2 else calls[::-1])
        taken, failed = results if number % 2 else results[::-1]
        status, _ = await states(store, session, str(number))
        if isinstance(failed, holdfast.LeaseLost):
            assert (status, taken.is_consumed) == ("active", False)
            await done(session.save(step=2))
            won.append("taker")
        else:
            assert status == "failed"
            assert isinstance(taken, holdfast.SessionEnded)
            won.append("item")
    assert set(won) == {"taker", "item"}


async def both(subject: Subject, calls: list[Any]) -> list[Any]:
    """Make two calls at once; return what each returned or raised."""
    is_async = subject.colour == "async"
    begun = [call() if is_async else asyncio.to_thread(call) for call in calls]
    return await asyncio.gather(*begun, return_exceptions=True)


async def _serve(store: Any, expected: list[Any]) -> None:
    """Serve until nothing is left to do; the answers that were given are the expected ones."""
    given: list[Any] = []

    def resume(resumption: holdfast.Resumption[Any]) -> str:
        given.append([answer.result for answer in resumption.answers])
        return "done"

    async def resume_async(resumption: holdfast.Resumption[Any]) -> str:
        return resume(resumption)

    is_async = isinstance(store, holdfast.AsyncStore)
    service = Service("a", lambda request: "served", resume_async if is_async else resume)
    worker: Any = service.worker(store, poll_seconds=0.05)
    run = worker.run(until_empty=True) if is_async else None
    await (run or asyncio.to_thread(worker.run, until_empty=True))
    assert given == expected


def test_the_next_turn_of_an_imported_session_closes_its_pause(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    """It was exported between its resumption and its turn."""
    with holdfast.open(**place) as store, holdfast.open(**other) as target:
        session = store.session("s", agent="a")
        session.ask("peer", 1, id="q")
        session.pause({"step": 1})
        store.answer("q", "one")
        assert session.resumption() is not None
        store.export(tmp_path / "file")
        target.import_sessions(tmp_path / "file")
        moved = target.find_session("s")
        assert [each.state for each in target.pauses(agent="a")] == ["resumed"]
        resumption = moved.resumption()
        assert resumption is not None
        assert [answer.result for answer in resumption.answers] == ["one"]
        moved.save(step=2)
        assert [each.state for each in target.pauses(agent="a")] == ["closed"]
