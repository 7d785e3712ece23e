"""SIGKILL before every statement and COMMIT of every mutation of shared state: all or nothing."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from tests.crash.steps import Step, kill_at_every_statement

BATCH = [
    {"op": "increment", "key": "n", "delta": 2},
    {"op": "delete", "key": "k"},
    {"op": "append", "key": "xs", "items": [3]},
]
WHOLE = {"type": "integer"}
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
    "delete": lambda session, store: session.state.delete("n"),
    "clear": lambda session, store: session.state.replace({}),
    "initialize": lambda session, store: session.state.initialize({"n": 1}),
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


def test_killed_at_every_statement_all_or_nothing(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    places = kill_at_every_statement(place, STEPS, shape)
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: killed at {len(places)} points of state")
