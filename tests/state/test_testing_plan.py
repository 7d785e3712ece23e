"""The testing plan of the seed, test by test; its concurrency tests are in test_concurrency.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place) as store:
        yield store


def test_state_crud(store: holdfast.Store) -> None:
    """Create, read, update, delete keys."""
    state = store.session("root").state
    assert state.set("plan", {"step": 1}).version == 1
    assert state.get("plan") == {"step": 1}
    assert state.set("plan", {"step": 2}).version == 2
    assert (state.get("plan"), state.keys()) == ({"step": 2}, ["plan"])
    assert state.delete("plan").version == 3
    assert (state.get("plan"), state.entry("plan"), state.keys()) == (None, None, [])
    with pytest.raises(holdfast.NotFound):
        state.delete("plan")


def test_cas_enforcement(store: holdfast.Store) -> None:
    """A version mismatch is a conflict, which every interface tells as 409."""
    state = store.session("root").state
    state.set("owner", "ann", if_version=0)
    for stale in (0, 2):
        with pytest.raises(holdfast.VersionConflict) as caught:
            state.set("owner", "ben", if_version=stale)
        assert caught.value.http_status == 409
        assert (caught.value.current_version, caught.value.current_value) == (1, "ann")
    assert state.set("owner", "ben", if_version=1).version == 2


def test_atomic_operations(store: holdfast.Store) -> None:
    """Increment and append need no version."""
    state = store.session("root").state
    assert [state.increment("count", delta).value for delta in (1, 4, -2)] == [1, 5, 3]
    assert [state.append("log", [each]).value for each in "ab"] == [["a"], ["a", "b"]]
    assert state.snapshot().versions == {"count": 3, "log": 2}


def test_root_propagation(store: holdfast.Store) -> None:
    """A child inherits the root from its parent, and keeps it."""
    root = store.session("root")
    child = store.session("child", parent=root)
    grandchild = store.session("grandchild", parent=child)
    other = store.session("other")
    assert {each.root_id for each in (root, child, grandchild)} == {"root"}
    assert store.session("grandchild", parent=other).root_id == "root"
    assert other.root_id == "other"


def test_single_session_state(place: dict[str, Any]) -> None:
    """A root creates state, and another store reads it back."""
    with holdfast.open(**place) as store:
        store.session("root").state.set("k", {"a": [1, None, True]})
    with holdfast.open(**place) as store:
        assert store.find_session("root").state.get("k") == {"a": [1, None, True]}


def test_parent_child_sharing(store: holdfast.Store) -> None:
    """A root creates state, a child reads and updates it."""
    root = store.session("root")
    child = store.session("child", parent=root)
    made = root.state.set("task", "open")
    assert child.state.entry("task") == made
    changed = child.state.set("task", "done", if_version=made.version)
    entry = root.state.entry("task")
    assert entry is not None
    assert (entry.value, entry.version, entry.updated_by) == ("done", 2, "child")
    assert changed.sequence == root.state.version() == 2


def test_multi_level_hierarchy(store: holdfast.Store) -> None:
    """Root, child A and child B below it all share one state."""
    root = store.session("root")
    first = store.session("a", parent=root)
    second = store.session("b", parent=first)
    for session in (root, first, second):
        session.state.append("path", [session.id])
    assert {tuple(each.state.get("path")) for each in (root, first, second)} == {("root", "a", "b")}
    assert store.session("apart").state.get("path") is None
