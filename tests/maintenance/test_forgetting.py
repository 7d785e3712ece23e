"""Pruning forgets effects that nobody can ask for again, and never one that matters."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.clock import VirtualClock
from holdfast.effects import noun

DAY = 24 * 3600.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(place: dict[str, Any], clock: VirtualClock) -> Any:
    with holdfast.open(**place, durability="normal", clock=clock) as opened:
        yield opened


@holdfast.tool(effect="mutate")
def charge(cents: int) -> int:
    return cents


@holdfast.tool(effect="mutate")
def lose(cents: int) -> None:
    raise ConnectionError("no answer")


@holdfast.tool(effect="mutate", on_unknown="retry")
def stumble(cents: int) -> None:
    raise ConnectionError("no answer")


def tools(store: holdfast.Store) -> list[str]:
    return [effect.tool for effect in store.effects()]


def test_a_once_key_goes_seven_days_after_its_completion(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    store.once("invoice", lambda: 1)
    clock.advance(6.9 * DAY)
    assert store.prune().effects == 0
    clock.advance(0.2 * DAY)
    assert store.prune().effects == 1
    assert store.effects() == []


def test_a_key_that_has_not_expired_stays(store: holdfast.Store, clock: VirtualClock) -> None:
    store.once("for ever", lambda: 1, ttl_seconds=None)
    store.once("a month", lambda: 2, ttl_seconds=30 * DAY)
    clock.advance(29 * DAY)
    assert store.prune().effects == 0
    assert store.once("a month", lambda: 3, ttl_seconds=30 * DAY).value == 2
    clock.advance(10_000 * DAY)
    assert store.prune().effects == 1
    assert store.once("for ever", lambda: 4, ttl_seconds=None).value == 1


def test_effects_of_a_deleted_session_go_after_ninety_days(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    session = store.session("s")
    session.call(charge, cents=1)
    with pytest.raises(ConnectionError):
        session.call(stumble, cents=1)
    store.session("kept").call(charge, cents=2)
    session.delete()
    clock.advance(89 * DAY)
    assert store.prune().effects == 0
    # A retry that comes late, through a new session of the same id, finds what was done.
    assert store.session("s").call(charge, cents=1).replayed
    clock.advance(2 * DAY)
    assert store.prune().effects == 2
    clock.advance(1_000 * DAY)
    assert store.prune().effects == 0
    # What the new session was answered stays with it.
    assert [effect.session_id for effect in store.effects()] == ["kept", "s"]


def test_the_ninety_days_count_from_the_deletion(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    session = store.session("s")
    session.call(charge, cents=1)
    clock.advance(1_000 * DAY)
    session.delete()
    clock.advance(89 * DAY)
    assert store.prune().effects == 0
    assert store.session("s").call(charge, cents=1).replayed
    clock.advance(2 * DAY)
    assert store.prune().effects == 1


def test_the_feed_tells_of_effects_that_were_pruned(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    root = store.session("root")
    child = store.session("child", parent=root)
    for number in range(2):
        store.once(f"child {number}", lambda: 1, session=child)
    store.once("root", lambda: 1, session=root)
    store.once("other", lambda: 1, session=store.session("other"))
    store.once("no session", lambda: 1)
    store.session("gone").call(charge, cents=1)
    store.session("gone").delete()
    clock.advance(1_000 * DAY)
    assert store.prune(history_days=10_000).effects == 6

    def told(root_id: str) -> list[Any]:
        events = store.events(root_id)
        pruned = [event for event in events if event.kind == "effects_pruned"]
        return sorted((event.session_id, event.data) for event in pruned)

    assert told("root") == [("child", {"count": 2}), ("root", {"count": 1})]
    assert told("other") == [("other", {"count": 1})]
    assert told("gone") == []
    assert store.prune(history_days=10_000).effects == 0
    assert told("other") == [("other", {"count": 1})]


def test_what_is_in_doubt_or_under_way_is_never_forgotten(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    session = store.session("s")
    with pytest.raises(holdfast.Unresolved):
        session.call(lose, cents=1)
    begun = session.begin(charge, {"cents": 2})
    assert isinstance(begun, holdfast.Issued)
    with pytest.raises(holdfast.Unresolved):
        store.once("key", lose, request={"cents": 3})
    session.delete(force=True)
    clock.advance(10_000 * DAY)
    assert store.prune(key_days=0, effect_days=0).effects == 0
    assert sorted(effect.status for effect in store.effects()) == ["issued", "unknown", "unknown"]


def test_a_fork_keeps_the_effects_of_the_session_it_came_from(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    origin = store.session("origin")
    origin.save(a=1)
    origin.call(charge, cents=1)
    origin.save(a=2)
    fork = origin.fork(2, id="fork")
    origin.delete()
    clock.advance(1_000 * DAY)
    assert store.prune().effects == 0
    assert fork.call(charge, cents=1).replayed
    fork.delete()
    clock.advance(1_000 * DAY)
    assert store.prune().effects == 2
    assert store.effects() == []


def test_many_go_in_small_transactions(
    store: holdfast.Store, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noun, "PRUNED_PER_PASS", 3)
    for number in range(8):
        store.once(f"key {number}", lambda: 1)
    store.once("kept", lambda: 1, ttl_seconds=None)
    clock.advance(8 * DAY)
    assert store.prune().effects == 8
    assert len(store.effects()) == 1


@pytest.mark.parametrize("name", ["key_days", "effect_days"])
def test_an_age_that_is_none_is_refused(store: holdfast.Store, name: str) -> None:
    with pytest.raises(holdfast.InvalidArgument, match=f"{name} must be"):
        store.prune(**{name: -1})  # type: ignore[arg-type]
