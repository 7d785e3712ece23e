"""Promise 2 for what comes after a call: deciding, verifying and undoing are killed everywhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Landed, NotLanded, VirtualClock
from holdfast.testing.crashes import CrashPoints
from tests.crash.children import run
from tests.effects.cases import boundaries

HOUR_MS = 3_600_000
START_MS = 1_800_000_000_000


@dataclass
class Room:
    """What the tools change, in files: it outlives every process and counts."""

    folder: Path

    def note(self, name: str) -> int:
        with (self.folder / name).open("a") as file:
            file.write("x")
        return self.count(name)

    def count(self, name: str) -> int:
        path = self.folder / name
        return len(path.read_text()) if path.exists() else 0

    def tools(self) -> list[Any]:
        @holdfast.tool(effect="mutate", verify=lambda args, key: self._was_undone(key))
        def cancel(arguments: dict[str, Any], result: Any, idempotency_key: str) -> str:
            self.note(f"key {idempotency_key}")
            self.note(f"cancelled {arguments['what']}")
            return "cancelled"

        @holdfast.tool(effect="mutate", undo=cancel)
        def book(what: str) -> str:
            self.note(f"booked {what}")
            return what

        @holdfast.tool(effect="mutate", verify=lambda args, key: self._was_charged(args))
        def charge(what: str) -> str:
            self.note(f"charged {what}")
            raise ConnectionError("no answer")

        return [book, charge, cancel]

    def _was_undone(self, key: str) -> Any:
        return Landed("cancelled") if self.count(f"key {key}") else NotLanded()

    def _was_charged(self, arguments: dict[str, Any]) -> Any:
        return Landed("charged") if self.count(f"charged {arguments['what']}") else NotLanded()


Act = Callable[[holdfast.Store, Room, str], None]


def prepare(store: holdfast.Store, room: Room, id: str) -> None:
    """Make a session with two bookings, and a charge in doubt that nobody asked about yet."""
    book, charge, _ = room.tools()
    session = store.session(id)
    session.save(n=1)
    for what in ("a", "b"):
        session.call(book, what=f"{id} {what}")
    begun = session.begin(charge, {"what": id}, "c1")
    assert isinstance(begun, holdfast.Issued)
    room.note(f"charged {id}")
    begun.fail("no answer")


def doubt(store: holdfast.Store, id: str) -> list[holdfast.Effect]:
    return [e for e in store.effects(session=id, status="unknown") if e.tool == "charge"]


def resolve_landed(store: holdfast.Store, room: Room, id: str) -> None:
    for effect in doubt(store, id):
        store.resolve(effect.id, Landed("charged"), by="ann")


def resolve_not_landed(store: holdfast.Store, room: Room, id: str) -> None:
    for effect in doubt(store, id):
        store.resolve(effect.id, NotLanded(), by="ann")


def verify(store: holdfast.Store, room: Room, id: str) -> None:
    for effect in doubt(store, id):
        store.verify(effect.id, room.tools())


def compensate(store: holdfast.Store, room: Room, id: str) -> None:
    store.find_session(id).compensate(to=1, tools=room.tools())


def rewind(store: holdfast.Store, room: Room, id: str) -> None:
    if store.find_session(id).info().epoch == 1:
        store.find_session(id).rewind(1, tools=room.tools())


ACTS: dict[str, Act] = {
    "resolve landed": resolve_landed,
    "resolve not landed": resolve_not_landed,
    "verify": verify,
    "compensate": compensate,
    "rewind": rewind,
}


def judge(store: holdfast.Store, room: Room, name: str, id: str) -> None:
    """Hold what there is against what would be if nobody had died."""
    effects = store.effects(session=id)
    (charge,) = [effect for effect in effects if effect.tool == "charge"]
    decided = {
        "resolve landed": ("completed", "charged", "ann"),
        "resolve not landed": ("failed", None, "ann"),
        "verify": ("completed", "charged", None),
    }.get(name, ("unknown", None, None))
    assert (charge.status, charge.result) == decided[:2]
    assert name == "verify" or charge.decided_by == decided[2]
    told = [event.kind for event in store.events(id)]
    positions = [event.position for event in store.events(id)]
    assert positions == list(range(1, len(positions) + 1))
    is_undone = name in {"compensate", "rewind"}
    for what in ("a", "b"):
        assert room.count(f"booked {id} {what}") == 1
        assert room.count(f"cancelled {id} {what}") == is_undone
    booked = [effect for effect in effects if effect.tool == "book"]
    assert [effect.undone_by is not None for effect in booked] == [is_undone] * 2
    assert told.count("session_rewound") == (name == "rewind")


@pytest.mark.parametrize("name", ACTS)
def test_killed_at_every_point(place: dict[str, Any], tmp_path: Path, name: str) -> None:
    room, act = Room(tmp_path), ACTS[name]
    given: Any = {**place, "durability": "normal"}

    def live(id: str, die_at: int | None) -> tuple[int, list[int]]:
        def body(say: Callable[[str], None]) -> None:
            points = CrashPoints(die_at)
            points.is_armed = False
            clock = VirtualClock(START_MS)
            with holdfast.open(**given, clock=clock, hooks=points.hooks) as store:
                store.settle("nobody:1")
                prepare(store, room, id)
                clock.advance(60)
                points.is_armed = True
                act(store, room, id)
                points.is_armed = False
                say(json.dumps(boundaries(points)))

        status, lines = run(body)
        return status, json.loads(lines[0]) if lines else []

    status, places = live("whole", None)
    assert (status, len(places) > 2) == (0, True)
    # On a machine that is busy a heartbeat may come in between: a child may outlive its place.
    killed = [id for place in places if live(id := f"killed {place}", place)[0] == -signal.SIGKILL]
    assert len(killed) >= len(places) / 2
    later = VirtualClock(START_MS + HOUR_MS)
    with holdfast.open(**given, clock=later) as store:
        for id in ("whole", *killed):
            act(store, room, id)
            judge(store, room, name, id)
            act(store, room, id)
            judge(store, room, name, id)
