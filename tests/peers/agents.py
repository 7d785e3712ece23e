"""Small steps that many tests of peers begin with."""

from __future__ import annotations

from typing import Any

from holdfast import VirtualClock
from holdfast.testing.subject import Subject, done


async def opened(subject: Subject, **given: Any) -> tuple[Any, VirtualClock]:
    clock = VirtualClock()
    return await subject.open(clock=clock, durability="normal", **given), clock


async def planner(store: Any, id: str = "plan", **given: Any) -> Any:
    return await done(store.session(id, agent="planner", user="ann", **given))


async def claim(store: Any, agent: str, **given: Any) -> Any:
    """Claim the one item that waits for an agent, as one of its instances does."""
    items = await done(store.work.claim("an instance", queues=f"agent:{agent}", limit=10, **given))
    assert len(items) == 1, f"{len(items)} items of {agent}"
    return items[0]


async def waiting_items(store: Any, agent: str) -> list[Any]:
    listed = await done(store.work.list(queue=f"agent:{agent}", status="pending"))
    return [item.type for item in listed]


async def serve(store: Any, agent: str, output: Any) -> Any:
    """Serve one request of an agent, and return it."""
    item = await claim(store, agent)
    request = await done(item.receive())
    await done(item.complete(output))
    return request


async def resume(store: Any, agent: str = "planner") -> tuple[Any, Any]:
    item = await claim(store, agent)
    return item, await done(item.resume())


async def status(store: Any, id: str) -> str:
    info = await done((await done(store.find_session(id))).info())
    return str(info.status)


async def states(session: Any) -> list[str]:
    """The states of a session's pauses, oldest first."""
    return [pause.state for pause in await done(session.pauses())]


def results(answers: Any) -> list[tuple[str, Any]]:
    return [(answer.status, answer.result) for answer in answers]
