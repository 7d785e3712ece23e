"""Looking back over all trees: events and conflicts, newest first; how large a store is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place, clock=holdfast.VirtualClock()) as store:
        yield store


def test_the_newest_events_of_all_trees_are_paged_back_to_the_first(store: holdfast.Store) -> None:
    for number in range(9):
        store.session(f"tree-{number % 3}").state.set("n", number)
    everything = store.latest_events()
    assert (everything[0].root_id, everything[0].data["key"]) == ("tree-2", "n")
    assert [each.kind for each in everything[-2:]] == ["state_changed", "session_created"]
    found: list[Any] = []
    while page := store.latest_events(
        before=(found[-1].root_id, found[-1].position) if found else None, limit=4
    ):
        found += page
        assert len(found) <= len(everything)
    assert found == everything
    assert {(each.root_id, each.position) for each in found} == {
        (each.root_id, each.position) for each in store.follow_all(wait=False)
    }
    for root in ("tree-0", "tree-1", "tree-2"):
        positions = [each.position for each in found if each.root_id == root]
        assert positions == sorted(positions, reverse=True)


@pytest.mark.parametrize("before", ["tree", ("tree",), ("tree", 0), (1, 1)])
def test_a_place_that_is_none_is_refused(store: holdfast.Store, before: Any) -> None:
    for listed in (store.latest_events, store.conflicts):
        with pytest.raises(holdfast.InvalidArgument):
            listed(before=before)


def test_conflicts_of_all_trees_are_listed_and_counted_by_hour(place: dict[str, Any]) -> None:
    clock = holdfast.VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        assert (store.conflicts(), sum(store.conflicts_per_hour())) == ([], 0)
        for hour, root in enumerate(("a", "b", "a", "b", "a")):
            session = store.session(root)
            for _ in range(hour):
                with contextlib.suppress(holdfast.VersionConflict):
                    session.state.set(f"key-{hour}", 1, if_version=7)
            clock.advance(3_600)
        clock.advance(-1)
        everything = store.conflicts()
        hours = [int(each.key.removeprefix("key-")) for each in everything]
        assert hours == [4, 4, 4, 4, 3, 3, 3, 2, 2, 1]
        assert {each.root_id for each in everything} == {"a", "b"}
        found = store.conflicts(limit=3)
        last = found[-1]
        found += store.conflicts(before=(last.root_id, last.number))
        assert found == everything
        assert store.conflicts_per_hour(hours=6) == [0, 0, 1, 2, 3, 4]
        assert store.conflicts_per_hour(hours=2) == [3, 4]


def test_a_store_tells_how_large_it_is(store: holdfast.Store) -> None:
    before = store.size()
    assert before.bytes > 10_000
    store.session("s").save({"large": "x" * 900_000})
    assert store.size().bytes > before.bytes + 500_000
    assert (before.free_bytes is None) == ("postgres" in store.url)
