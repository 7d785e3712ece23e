"""Export files that are made by hand: one of everything, changed as an attacker would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

import holdfast
from holdfast.codec import Codec
from holdfast.portable import file as format
from holdfast.store import NOUNS
from holdfast.worlds import MemorySystem, World, action, explore, invariant


@holdfast.tool(effect="mutate")
def pay(cents: int) -> dict[str, int]:
    return {"cents": cents}


def make_world() -> World:
    return World({"m": MemorySystem({"n": 0})})


@action
def step(world: World) -> int:
    system: Any = world.systems["m"]
    system.data["n"] += 1
    return int(system.data["n"])


@invariant
def is_small(world: World) -> bool:
    system: Any = world.systems["m"]
    return bool(system.data["n"] < 3)


def open_at(place: dict[str, Any], **arguments: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal", **arguments)


def fill(store: holdfast.Store) -> None:
    """One of everything that an export can hold, and little of it."""
    session = store.session("a", name="A", agent="x", metadata={"n": 2**70})
    for number in range(66):
        session.append("transcript", [{"n": number}])
    session.save(plan={"x": "y" * 200}, small=1)
    session.record("iteration_start", {"iteration": 1})
    session.pin(1, "why")
    session.attest(2, {"ok": True})
    session.call(pay, cents=1, call_id="c1")
    item = store.work.submit("job", {"n": 1}, session=session)
    store.work.submit("job", {"n": 2}, session=session)
    store.work.claim("w", queues=["job"])[0].complete({"done": item.id})
    store.work.claim("w", queues=["job"])[0].fail("broken")
    session.spend("m", usd="0.25", input_tokens=3, details={"d": 1})
    for number in range(3):
        session.state.append("log", ["x" * 300, number])
    session.state.patch({"log": None, "doc": {"a": 1}})
    session.state.increment("n", idempotency_key="k")
    session.state.set_rule("n", schema={"type": "integer"}, reducer="sum")
    session.fork(30, id="b").append("transcript", ["forked"])
    child = store.session("c", parent=session)
    child.save(v=[1, 2, 3])
    child.rewind(1)
    child.save(v=[9])
    fill_peers(store)
    explore(make_world, [step], [is_small], max_steps=3, store=store, id="w")


def fill_peers(store: holdfast.Store) -> None:
    """A call, a request, a pause and artifacts, open and closed."""
    planner = store.session("p", agent="planner")
    planner.add_artifact("map", data={"x": 1})
    planner.add_artifact("map", uri="file:///map", media_type="image/png")
    asked = planner.ask("a", {"q": 1}, correlation={"tool_call": "c"})
    store.progress(asked.id, "half")
    planner.ask("b", 2)
    planner.pause({"step": 1}, need=2)
    store.answer(asked.id, {"a": 1}, artifacts=[holdfast.Artifact(name="n", data=1)])
    store.request("planner", {"q": 2}, request_id="r")
    approval = store.session("q", agent="planner").wait_for_approval("May I?")
    store.approve(approval.pause_id, by="ann", note="yes")


def read(file: Path) -> list[Any]:
    return list(format.ExportFile(file, Codec(), format.Format(NOUNS)).records())


def craft(file: Path, frames: list[Any], codec: Codec | None = None) -> None:
    """Write an export whose digests are right, whatever it says; bytes stand as they are."""
    with file.open("wb") as opened:
        writer = format.ExportWriter(opened, codec or Codec(), format.Format(NOUNS), "crafted")
        writer.begin("nowhere")
        for each in frames:
            if isinstance(each, bytes):
                writer.append(each)
            else:
                writer.write(each)
        writer.end()


def changed(frames: list[Any], kind: type[Any], **changes: Any) -> list[Any]:
    return [
        msgspec.structs.replace(each, **changes) if isinstance(each, kind) else each
        for each in frames
    ]


def firsts(frames: list[Any]) -> list[Any]:
    """Return the first record of each kind."""
    return list({type(each): each for each in reversed(frames)}.values())
