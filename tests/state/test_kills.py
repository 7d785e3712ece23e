"""SIGKILL before every statement and COMMIT of every mutation of shared state: all or nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.testing.crashes import CrashPoints
from tests.crash.children import boundaries, run

BATCH = [
    {"op": "increment", "key": "n", "delta": 2},
    {"op": "delete", "key": "k"},
    {"op": "append", "key": "xs", "items": [3]},
]
WHOLE = {"type": "integer"}
Step = Callable[[holdfast.Session, holdfast.Store], Any]
STEPS: dict[str, Step] = {
    "set": lambda session, store: session.state.set("k", "v" * 300),
    "swap": lambda session, store: session.state.set("k", "w" * 300, if_version=1),
    "increment": lambda session, store: session.state.increment("n", idempotency_key="once"),
    "append": lambda session, store: session.state.append("xs", ["x" * 300]),
    "append again": lambda session, store: session.state.append("xs", ["y"]),
    "merge": lambda session, store: session.state.merge("o", {"a": 1}),
    "add": lambda session, store: session.state.add("s", 1),
    "remove": lambda session, store: session.state.remove("s", 1),
    "batch": lambda session, store: session.state.batch(BATCH),
    "replace": lambda session, store: session.state.replace({"n": 3, "z": [1]}),
    "patch": lambda session, store: session.state.patch({"z": None, "q": {"w": 1}}),
    "restore": lambda session, store: session.state.restore(5),
    "set a rule": lambda session, store: session.state.set_rule("n", schema=WHOLE, reducer="sum"),
    "reduce": lambda session, store: session.state.reduce("n", 4),
    "delete a rule": lambda session, store: session.state.delete_rule("n"),
    "set another rule": lambda session, store: session.state.set_rule("q", reducer="merge"),
    "update": lambda session, store: session.state.update("n", lambda value: value + 1),
    "append a turn": lambda session, store: session.append("log", [1]),
    "fork": lambda session, store: session.fork(1, id=f"{session.id}-fork", state="copy"),
}


def shape(store: holdfast.Store, id: str) -> Any:
    """Everything that can be read of a tree's state, without times."""
    state = store.find_session(id).state
    newest = state.version()
    events = [(e.sequence, e.operation, e.key, e.version, e.value) for e in state.events()]
    assert [event[0] for event in events] == list(range(1, newest + 1))
    feed = [event.kind for event in store.events(id)]
    forks = [each.id.removeprefix(id) for each in store.sessions() if each.id == f"{id}-fork"]
    copies = [store.find_session(f"{id}-fork").state.snapshot().document for _ in forks]
    moments = [state.snapshot(at_sequence=at).document for at in range(newest + 1)]
    trees = [id, *(f"{id}-fork" for _ in forks)]
    rules = [
        (each.key, each.schema, each.reducer)
        for tree in trees
        for each in store.find_session(tree).state.rules()
    ]
    return moments, state.snapshot().versions, events, feed, forks, copies, rules


def live(place: dict[str, Any], id: str, points: CrashPoints, say: Callable[[str], None]) -> None:
    points.is_armed = False
    with holdfast.open(**place, hooks=points.hooks) as store:
        session = store.session(id)
        points.is_armed = True
        for step in STEPS.values():
            step(session, store)
            say(str(len(points.points)))
        points.is_armed = False


def test_killed_at_every_statement_all_or_nothing(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shapes: list[Any] = []
    with holdfast.open(**place) as store:
        session = store.session("reference")
        shapes.append(shape(store, "reference"))
        for step in STEPS.values():
            step(session, store)
            shapes.append(shape(store, "reference"))
    known = [repr(each) for each in shapes]
    counting = CrashPoints()

    def count(say: Callable[[str], None]) -> None:
        live(place, "counted", counting, lambda line: None)
        say(repr(boundaries(counting, set())))

    status, lines = run(count)
    assert status == 0
    places: list[int] = eval(lines[-1])
    assert len(places) > 2 * len(STEPS)
    killed: list[tuple[str, int]] = []
    for die_at in places:
        status, told = run(
            lambda say, die_at=die_at: live(  # type: ignore[misc]
                place, f"k{die_at}", CrashPoints(die_at), say
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
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: killed at {len(places)} points of state")
