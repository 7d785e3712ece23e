"""Killing a process before every statement and COMMIT of a list of steps, each a write."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import holdfast
from holdfast.testing.crashes import CrashPoints
from tests.crash.children import boundaries, run

Step = Callable[[holdfast.Session, holdfast.Store], Any]
Shape = Callable[[holdfast.Store, str], Any]


def kill_at_every_statement(
    place: dict[str, Any],
    steps: Mapping[str, Step],
    shape: Shape,
    prepare: Callable[[holdfast.Session], object] = holdfast.Session.info,
) -> list[int]:
    """Do the steps in a session, dying at each place in turn; each step is done whole or not.

    `shape` returns all that the steps leave, without times; the session's id may occur in it.
    Nobody dies while `prepare` runs. The places are returned.
    """
    shapes: list[Any] = []
    with holdfast.open(**place) as store:
        session = store.session("reference")
        prepare(session)
        shapes.append(shape(store, "reference"))
        for step in steps.values():
            step(session, store)
            shapes.append(shape(store, "reference"))
    known = [repr(each) for each in shapes]
    counting = CrashPoints()

    def count(say: Callable[[str], None]) -> None:
        _live(place, "counted", steps, prepare, counting, lambda line: None)
        say(repr(boundaries(counting, set())))

    status, lines = run(count)
    assert status == 0
    places: list[int] = eval(lines[-1])
    assert len(places) > 2 * len(steps)
    killed: list[tuple[str, int]] = []
    for die_at in places:
        status, told = run(
            lambda say, die_at=die_at: _live(  # type: ignore[misc]
                place, f"k{die_at}", steps, prepare, CrashPoints(die_at), say
            )
        )
        assert status == -signal.SIGKILL, die_at
        killed.append((f"k{die_at}", len(told)))
    with holdfast.open(**place) as store:
        for id, acknowledged in killed:
            found = repr(shape(store, id)).replace(id, "reference")
            # Killed after its COMMIT, a step is whole although nobody was told.
            assert found in known[acknowledged : acknowledged + 2], id
    found_problems = holdfast.store.check(place["url"], namespace=place.get("namespace"))
    assert [each for each in found_problems if each.level == "problem"] == []
    return places


def _live(
    place: dict[str, Any],
    id: str,
    steps: Mapping[str, Step],
    prepare: Callable[[holdfast.Session], object],
    points: CrashPoints,
    say: Callable[[str], None],
) -> None:
    points.is_armed = False
    with holdfast.open(**place, hooks=points.hooks) as store:
        session = store.session(id)
        prepare(session)
        points.is_armed = True
        for step in steps.values():
            step(session, store)
            say(str(len(points.points)))
        points.is_armed = False
