"""Shared state, one rule at a time, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast.clock import VirtualClock
from holdfast.kernel.operation import rows
from holdfast.state import State


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place) as store:
        yield store


@pytest.fixture
def state(store: holdfast.Store) -> State:
    return store.session("root").state


def test_a_root_and_all_its_descendants_share_one_state(store: holdfast.Store) -> None:
    root = store.session("root")
    child = store.session("child", parent=root)
    grandchild = store.session("grandchild", parent=child)
    root.state.set("config", {"mode": "parallel"})
    entry = grandchild.state.set("found", [1])
    assert (entry.updated_by, entry.version, entry.sequence) == ("grandchild", 1, 2)
    assert root.state.snapshot().document == {"config": {"mode": "parallel"}, "found": [1]}
    assert child.state.keys(updated_by=grandchild) == ["found"]
    assert store.session("other").state.keys() == []


def listed(entries: list[holdfast.state.Entry]) -> list[str]:
    return [each.key for each in entries]


def test_keys_are_listed_by_name_writer_and_change(store: holdfast.Store) -> None:
    root = store.session("root")
    child = store.session("child", parent=root)
    state = root.state
    state.replace({"a": 1, "b/1": [1], "b/2": {"x": 1}, "c": None})
    child.state.set("b/1", [2])
    state.delete("a")
    assert listed(state.entries()) == ["b/1", "b/2", "c"]
    assert listed(state.entries(prefix="b/")) == ["b/1", "b/2"]
    assert listed(state.entries(prefix="b/", after="b/1", limit=1)) == ["b/2"]
    assert listed(state.entries(updated_by=child)) == ["b/1"] == listed(state.entries(since=1))
    assert listed(state.entries(updated_by="root", prefix="b/")) == ["b/2"]
    assert listed(state.entries(since=3)) == listed(state.entries(updated_by="nobody")) == []
    [entry] = state.entries(since=1, values=True)
    assert (entry.value, entry.version, entry.is_deleted) == ([2], 2, False)
    assert state.entries(since=1)[0].value is None
    for wrong in ({"updated_by": 7}, {"since": -1}, {"prefix": "\n"}, {"limit": 0}):
        with pytest.raises(holdfast.InvalidArgument):
            state.entries(**wrong)


def test_keys_are_listed_as_of_a_sequence(store: holdfast.Store) -> None:
    root = store.session("root")
    child, state = store.session("child", parent=root), root.state
    state.replace({f"k{n}": [n] for n in range(6)})
    state.append("k1", ["more"])
    state.delete("k2")
    at = state.version()
    then = state.snapshot(at)
    # Changed, deleted, made again and new since.
    for n in range(40):
        state.append("k1", [n])
    child.state.set("k0", "new")
    state.delete("k3")
    state.set("k2", "again")
    for n in range(5):
        state.set(f"k00{n}", n)
    for limit in (1, 2, 3, 100):
        found: list[holdfast.state.Entry] = []
        while page := state.entries(
            at_sequence=at, after=found[-1].key if found else None, limit=limit, values=True
        ):
            assert len(page) <= limit
            found += page
        assert {each.key: each.value for each in found} == then.document
        assert {each.key: each.version for each in found} == then.versions
        assert {each.key: each.updated_by for each in found} == then.writers
        assert {each.key: each.updated_at for each in found} == then.times
        assert not any(each.is_deleted for each in found)
    assert {each.value for each in state.entries(at_sequence=at)} == {None}
    assert listed(state.entries(at_sequence=at, since=1)) == ["k1"]
    assert listed(state.entries(at_sequence=at, prefix="k0")) == ["k0"]
    assert state.entries(at_sequence=at, updated_by=child) == []
    assert listed(state.entries(at_sequence=state.version())) == listed(state.entries())
    with pytest.raises(holdfast.SequenceInFuture):
        state.entries(at_sequence=state.version() + 1)
    state.compact(before=state.version())
    with pytest.raises(holdfast.Compacted):
        state.entries(at_sequence=at)


def test_history_tells_each_change_between_two_sequences(state: State) -> None:
    state.set("n", 1, idempotency_key="first")
    state.increment("n", 2)
    state.set("other", 1)
    state.delete("n")
    told = [(each.sequence, each.operation, each.value) for each in state.history("n")]
    assert told == [(4, "delete", None), (2, "increment", 3), (1, "set", 1)]
    assert [each.idempotency_key for each in state.history("n")] == [None, None, "first"]
    assert [each.sequence for each in state.history("n", after=1)] == [4, 2]
    assert [each.value for each in state.history("n", after=1, before=4)] == [3]
    assert state.history("n", after=4) == []
    with pytest.raises(holdfast.InvalidArgument, match="after"):
        state.history("n", after=-1)


@pytest.mark.parametrize("value", [None, {}, [], 0, False, "", -0.0, 2**200, {"a": [None]}])
def test_a_value_comes_back_as_it_was_set(state: State, value: Any) -> None:
    assert state.set("k", value).value == value
    entry = state.entry("k")
    assert entry is not None
    assert (repr(entry.value), entry.version) == (repr(value), 1)
    assert state.get("missing", default="d") == "d"
    assert state.entry("missing") is None


def test_a_compare_and_swap_needs_the_current_version(state: State) -> None:
    state.set("k", "a", if_version=0)
    state.set("k", "b", if_version=1)
    before = state.version()
    for expected in (0, 1, 3):
        with pytest.raises(holdfast.VersionConflict) as caught:
            state.set("k", "c", if_version=expected)
        told: dict[str, Any] = dict(caught.value.fields)
        assert told.pop("updated_at") > 0
        assert told == {
            "key": "k", "current_version": 2, "expected_version": expected, "current_value": "b",
            "deleted_version": None, "updated_by": "root",
        }  # fmt: skip
    with pytest.raises(holdfast.VersionConflict, match="does not exist"):
        state.delete("missing", if_version=4)
    assert state.version() == before
    conflicts = state.conflicts()
    assert [(each.key, each.expected, each.current) for each in conflicts] == [
        ("missing", 4, 0), ("k", 3, 2), ("k", 1, 2), ("k", 0, 2),
    ]  # fmt: skip
    assert {(each.updated_by, each.attempt, each.is_retried) for each in conflicts} == {
        ("root", 1, False)
    }


def test_an_old_version_never_matches_again_after_delete_and_re_create(state: State) -> None:
    assert state.set("k", 1).version == 1
    deleted = state.delete("k")
    assert (deleted.version, deleted.is_deleted, deleted.value) == (2, True, None)
    assert state.get("k") is None
    with pytest.raises(holdfast.NotFound):
        state.delete("k")
    assert state.set("k", 2, if_version=0).version == 3
    with pytest.raises(holdfast.VersionConflict):
        state.set("k", 3, if_version=1)


def test_also_across_compaction_and_the_deletion_of_the_root(store: holdfast.Store) -> None:
    state = store.session("root").state
    for number in range(5):
        state.set("k", number)
    state.delete("k")
    state.set("other", 1)
    state.compact(state.version())
    assert state.set("k", "new").version == 7
    store.session("root").delete()
    again = store.session("root").state
    assert (again.keys(), again.version()) == ([], 8)
    assert again.set("k", "newer").version == 8


def test_operations_create_a_missing_key_and_refuse_a_wrong_type(state: State) -> None:
    assert state.increment("n", 2).value == 2
    assert state.increment("n", -0.5).value == 1.5
    assert state.append("xs", [1]).value == [1]
    assert state.append("xs", [[2], 3]).value == [1, [2], 3]
    assert state.merge("o", {"a": {"b": 1}, "gone": None}).value == {"a": {"b": 1}}
    assert state.merge("o", {"a": {"b": None, "c": [1]}}).value == {"a": {"c": [1]}}
    state.set("flag", True)
    before = state.version()
    wrong: list[Callable[[], Any]] = [
        lambda: state.increment("flag"),
        lambda: state.increment("xs"),
        lambda: state.append("n", [1]),
        lambda: state.merge("xs", {"a": 1}),
        lambda: state.add("o", 1),
        lambda: state.remove("flag", 1),
    ]
    for operate in wrong:
        with pytest.raises(holdfast.TypeConflict):
            operate()
    assert state.version() == before


def test_a_set_has_no_equal_members_and_keeps_the_order_of_arrival(state: State) -> None:
    for item in (1, True, 1.0, "1", {"a": 1, "b": 2}, {"b": 2, "a": 1}, 1):
        state.add("set", item)
    found = state.remove("set", True).value
    assert list(map(repr, found)) == ["1", "1.0", "'1'", "{'a': 1, 'b': 2}"]
    state.set("list", [1, 1])
    with pytest.raises(holdfast.TypeConflict, match="equal members"):
        state.add("list", 2)


def test_a_batch_is_all_or_nothing_and_sequential_inside(state: State) -> None:
    state.set("a", 1)
    done = state.batch(
        [
            {"op": "set", "key": "a", "value": 2, "if_version": 1},
            {"op": "increment", "key": "a"},
            {"op": "set", "key": "b", "value": [], "if_version": 0},
            {"op": "append", "key": "b", "items": [1]},
            {"op": "delete", "key": "a", "if_version": 3},
        ]
    )
    assert [(each.key, each.version, each.sequence) for each in done] == [
        ("a", 2, 2), ("a", 3, 3), ("b", 1, 4), ("b", 2, 5), ("a", 4, 6),
    ]  # fmt: skip
    assert state.snapshot().document == {"b": [1]}
    operations = [
        {"op": "set", "key": "c", "value": 1},
        {"op": "set", "key": "b", "value": 2, "if_version": 9},
        {"op": "increment", "key": "c"},
    ]
    with pytest.raises(holdfast.VersionConflict) as caught:
        state.batch(operations)
    assert caught.value.results == [
        {"key": "c", "status": "not_applied"},
        {
            "key": "b",
            "status": "conflict",
            "current_version": 2,
            "expected_version": 9,
            "current_value": [1],
        },
        {"key": "c", "status": "not_applied"},
    ]
    with pytest.raises(holdfast.TypeConflict):
        state.batch([{"op": "set", "key": "d", "value": 1}, {"op": "increment", "key": "b"}])
    assert (state.keys(), state.version()) == (["b"], 6)


def test_a_document_write_is_one_event_and_raises_only_what_it_changes(state: State) -> None:
    state.set("same", 1)
    state.set("gone", 1)
    replaced = state.replace({"same": 1, "new": {"a": 1}}, if_version=2)
    assert (replaced.version, replaced.versions) == (3, {"same": 1, "new": 1})
    patched = state.patch({"new": {"b": 2}, "same": None})
    assert patched.document == {"new": {"a": 1, "b": 2}}
    assert [(event.sequence, event.operation, event.key) for event in state.events()] == [
        (1, "set", "same"), (2, "set", "gone"), (3, "full_replace", None), (4, "patch", None),
    ]  # fmt: skip
    replacing, patching = state.events(after=2)
    assert (replacing.value, replacing.deleted) == ({"new": {"a": 1}}, ("gone",))
    assert (patching.value, patching.deleted) == ({"new": {"b": 2}, "same": None}, ("same",))
    with pytest.raises(holdfast.VersionConflict) as caught:
        state.replace({}, if_version=3)
    assert (caught.value.current_version, caught.value.current_value) == (4, patched.document)
    assert [each.sequence for each in state.history("new")] == [4, 3]


def test_a_patch_with_operators_is_one_event(state: State) -> None:
    state.replace({"list": [1], "n": 1, "object": {"a": 1}, "gone": 1, "plain": 1})
    patch = {
        "list": {"$append": [2]},
        "n": {"$increment": 2},
        "object": {"$set": {"b": None}},
        "gone": {"$delete": True},
        "missing": {"$delete": True},
        "counters.new": {"$increment": 1},
        "plain": {"$set": {"$append": [1], "b": 2}},
    }
    patched = state.patch(patch, operators=True)
    assert patched.document == {
        "list": [1, 2], "n": 3, "object": {"b": None}, "counters.new": 1,
        "plain": {"$append": [1], "b": 2},
    }  # fmt: skip
    [event] = state.events(after=1)
    assert (event.operation, event.key, event.value) == ("patch", None, patch)
    assert state.entry("n", at_sequence=1).value == 1  # type: ignore[union-attr]
    assert state.entry("n", at_sequence=0) is None
    assert state.entry("gone", at_sequence=2) is None
    with pytest.raises(holdfast.SequenceInFuture) as caught:
        state.entry("n", at_sequence=3)
    assert caught.value.head_sequence == 2
    with pytest.raises(holdfast.TypeConflict):
        state.patch({"n": {"$append": [1]}, "list": 1}, operators=True)
    for wrong in (
        {"$append": 1}, {"$increment": "1"}, {"$delete": False},
        {"$push": [1]}, {"$": 1}, {"$append": [1], "b": 2}, {"$append": [1], "$set": 1},
    ):  # fmt: skip
        for deep in (True, False):
            with pytest.raises(holdfast.InvalidArgument):
                state.patch({"n": 7, "k": wrong}, operators=True, deep=deep)
    assert state.get("n") == 3
    # Without operators such an object is data like any other.
    assert state.patch({"list": {"$append": [2]}})["list"] == {"$append": [2]}
    assert state.patch({"object": {"c": 1}}, deep=False)["object"] == {"c": 1}
    assert state.version() == 4


def test_changes_tell_what_each_mutation_left(state: State) -> None:
    state.replace({"list": ["x" * 300], "gone": 1})
    state.append("list", ["y"])
    state.patch({"gone": None, "new": 1})
    state.increment("n", 2)
    found = [
        (change.event.sequence, [(e.key, e.version, e.is_deleted) for e in change.entries])
        for change in state.changes()
    ]
    assert found == [
        (1, [("gone", 1, False), ("list", 1, False)]),
        (2, [("list", 2, False)]),
        (3, [("gone", 2, True), ("new", 1, False)]),
        (4, [("n", 1, False)]),
    ]
    second = state.changes(after=1, limit=1)[0].entries[0]
    assert second.value == ["x" * 300, "y"]
    assert next(state.watch_changes(after=3)) == state.changes(after=3)[0]


def test_a_first_document_needs_a_state_without_keys(state: State) -> None:
    first = state.initialize({"a": 1})
    assert (first.version, first.versions, first.writers) == (1, {"a": 1}, {"a": "root"})
    with pytest.raises(holdfast.VersionConflict) as caught:
        state.initialize({"b": 1})
    assert (caught.value.current_version, caught.value.current_value) == (1, {"a": 1})
    state.delete("a")
    assert state.initialize({"a": 2}).versions == {"a": 3}
    assert [event.operation for event in state.events()] == ["init", "delete", "init"]


def test_a_conflict_tells_who_came_first_and_what_was_deleted(state: State) -> None:
    state.set("k", 1)
    state.delete("k")
    with pytest.raises(holdfast.VersionConflict) as caught:
        state.set("k", 2, if_version=1)
    assert (caught.value.current_version, caught.value.deleted_version) == (0, 2)
    assert caught.value.updated_by == "root"
    with pytest.raises(holdfast.KeyNotFound):
        state.delete("k")
    assert [state.set("k", 1).is_created, state.set("k", 2).is_created] == [True, False]


def test_what_was_read_can_be_required_to_be_unchanged(state: State) -> None:
    state.set("price", 10)
    state.set("order", 1, if_unchanged={"price": 1, "missing": 0})
    state.set("price", 11)
    with pytest.raises(holdfast.VersionConflict) as caught:
        state.increment("order", if_unchanged={"price": 1})
    assert (caught.value.key, state.get("order")) == ("price", 1)


def test_a_repeated_request_changes_nothing_and_returns_what_the_first_did(state: State) -> None:
    first = state.increment("n", 5, idempotency_key="one")
    state.increment("n", 1)
    assert state.increment("n", 5, idempotency_key="one") == first
    assert state.get("n") == 6
    operations = [{"op": "add", "key": "s", "item": 1}, {"op": "increment", "key": "n"}]
    done = state.batch(operations, idempotency_key="two")
    assert state.batch(operations, idempotency_key="two") == done
    patched = state.patch({"n": None}, idempotency_key="three")
    state.set("n", 0)
    assert state.patch({"n": None}, idempotency_key="three") == patched
    assert state.get("n") == 0
    with pytest.raises(holdfast.RequestMismatch):
        state.increment("n", 6, idempotency_key="one")


def test_update_calls_again_with_what_another_writer_left(state: State) -> None:
    seen: list[Any] = []

    def bump(value: Any) -> Any:
        seen.append(value)
        if len(seen) < 3:
            state.increment("n", 10)
        return (value or 0) + 1

    assert state.update("n", bump).value == 21
    assert seen == [None, 10, 20]
    assert [(each.attempt, each.is_retried) for each in state.conflicts()] == [(2, True), (1, True)]
    seen.clear()
    with pytest.raises(holdfast.VersionConflict):
        state.update("n", bump, retries=1)
    assert [(each.attempt, each.is_retried) for each in state.conflicts(limit=2)] == [
        (2, False), (1, True),
    ]  # fmt: skip


def test_any_moment_can_be_read_compared_and_restored(state: State) -> None:
    documents: list[dict[str, Any]] = [{}]
    for number in range(80):
        match number % 4:
            case 0:
                state.append("log", [f"{number}" * 100])
            case 1:
                state.merge("map", {str(number): "x" * 100, str(number - 16): None})
            case 2:
                state.add("set", number % 20 + 10_000)
            case 3 if "n" in documents[-1] and number % 16 == 3:
                state.delete("n")
            case _:
                state.increment("n", number)
        documents.append(state.snapshot().document)
    assert state.version() == 80
    for sequence, document in enumerate(documents):
        assert state.snapshot(at_sequence=sequence).document == document
    entries = {each.sequence: each for each in state.history("log")}
    assert all(documents[at]["log"] == entry.value for at, entry in entries.items())
    pages = state.history("map", limit=7) + state.history(
        "map", before=state.history("map", limit=7)[-1].sequence
    )
    assert pages == state.history("map")
    difference = state.diff(40, 80)
    assert {each.key: (each.before, each.after) for each in difference.changes} == {
        key: (documents[40].get(key), documents[80].get(key))
        for key in documents[80].keys() | documents[40].keys()
        if documents[40].get(key) != documents[80].get(key)
    }
    versions = state.snapshot().versions
    restored = state.restore(40)
    assert restored.document == documents[40]
    changed = {each.key for each in difference.changes}
    for key, version in restored.versions.items():
        assert version - versions.get(key, 0) == (key in changed)


def test_below_the_floor_history_is_gone_and_above_it_reads_as_before(state: State) -> None:
    documents: list[dict[str, Any]] = [{}]
    for number in range(120):
        state.append("log", ["y" * 100, number]) if number % 3 else state.set(f"k{number % 7}", 1)
        if number % 10 == 9:
            state.delete(f"k{(number - number % 3) % 7}")
            documents.append(state.snapshot().document)
        documents.append(state.snapshot().document)
    at = {len(documents[:index]): document for index, document in enumerate(documents)}
    newest, floor = state.version(), state.version() // 2
    whole = {n: state.snapshot(at_sequence=n).document for n in range(floor, newest + 1)}
    removed = state.compact(floor)
    assert removed > 20
    assert state.compact(floor) == 0
    for sequence, document in whole.items():
        assert state.snapshot(at_sequence=sequence).document == document
    assert len(at) == len(documents)
    with pytest.raises(holdfast.Compacted) as caught:
        state.snapshot(at_sequence=floor - 1)
    assert caught.value.oldest_sequence == floor
    for read in (lambda: state.events(after=0), lambda: state.restore(0)):
        with pytest.raises(holdfast.Compacted):
            read()
    assert state.events(after=floor)[0].sequence == floor + 1
    with pytest.raises(holdfast.InvalidArgument, match="not yet"):
        state.snapshot(at_sequence=newest + 1)


def test_every_mutation_is_an_event_of_the_feed(store: holdfast.Store) -> None:
    root = store.session("root")
    child = store.session("child", parent=root)
    start = len(store.events("root"))
    child.state.set("k", 1)
    root.state.batch([{"op": "increment", "key": "n"}, {"op": "delete", "key": "k"}])
    root.state.replace({"a": 1, "b": 2})
    found = store.events("root", after=start)
    assert {event.kind for event in found} == {"state_changed"}
    assert [(event.session_id, event.data) for event in found] == [
        ("child", {"sequence": 1, "operation": "set", "key": "k", "version": 1}),
        ("root", {"sequence": 2, "operation": "increment", "key": "n", "version": 1}),
        ("root", {"sequence": 3, "operation": "delete", "key": "k", "version": 2}),
        ("root", {"sequence": 4, "operation": "full_replace"}),
    ]


def test_a_summary_is_bounded_and_says_what_it_left_out(state: State) -> None:
    for number in range(20):
        state.set(f"k{number}", number)
    state.set("large", "x" * 5_000)
    found = state.summary(max_keys=5, max_bytes=60)
    assert found.document == {"k19": 19, "k18": 18, "k17": 17, "k16": 16, "k15": 15}
    assert (found.key_count, found.is_truncated, found.left_out[:2]) == (21, True, ("large", "k14"))
    assert not store_of_one(state).is_truncated


def store_of_one(state: State) -> holdfast.StateSummary:
    state.replace({"only": 1})
    return state.summary()


def test_who_lost_the_lease_or_has_ended_cannot_write(store: holdfast.Store) -> None:
    session = store.session("root")
    with session.drive("one") as driven:
        driven.state.set("k", 1)
        assert store.session("child", parent=session).state.set("k", 2).version == 2
    with pytest.raises(holdfast.LeaseLost):
        driven.state.set("k", 3)
    session.end()
    with pytest.raises(holdfast.SessionEnded):
        session.state.set("k", 4)
    assert session.state.get("k") == 2


def test_state_and_checkpoints_change_in_one_transaction(store: holdfast.Store) -> None:
    session = store.session("root")
    session.state.set("n", 1)
    session.append("log", ["before"])
    session.state.set("n", 2)
    session.append("log", ["after"])

    def back(tx: holdfast.Transaction) -> Any:
        inside = tx.within(session)
        checkpoint = yield from inside.at(1)
        yield from inside.state.restore(checkpoint.state_sequence)
        return (yield from inside.move_back(1))

    store.run(back)
    latest = session.latest()
    assert latest is not None
    assert (latest["log"], session.state.get("n"), session.state.version()) == (["before"], 1, 3)

    def fails(tx: holdfast.Transaction) -> Any:
        yield from tx.state(session).set("n", 9)
        yield from tx.state(session).set("n", 10, if_version=1)

    with pytest.raises(holdfast.VersionConflict):
        store.run(fails)
    assert (session.state.get("n"), session.state.version()) == (1, 3)


def test_limits_are_told_and_nothing_is_written(place: dict[str, Any]) -> None:
    limits = holdfast.Limits(value_bytes=2_000, keys_per_root=3, batch_operations=4)
    with holdfast.open(**place, limits=limits) as store:
        state = store.session("root").state
        for key in "abc":
            state.set(key, key)
        state.delete("a")
        state.set("a", 2)
        for write in (
            lambda: state.set("d", 1),
            lambda: state.replace({str(number): 1 for number in range(4)}),
            lambda: state.batch([{"op": "increment", "key": "a"}] * 5),
            lambda: state.batch([]),
            lambda: state.set("b", "x" * 2_001),
            lambda: state.append("e", ["x" * 2_001]),
        ):
            before = state.version()
            with pytest.raises(holdfast.LimitExceeded):
                write()
            assert state.version() == before
        assert state.snapshot().document == {"a": 2, "b": "b", "c": "c"}


def test_the_same_in_an_event_loop(place: dict[str, Any]) -> None:
    asyncio.run(in_an_event_loop(place))


async def in_an_event_loop(place: dict[str, Any]) -> None:
    async with holdfast.aopen(**place) as store:
        root = await store.session("root")
        assert (await root.state.increment("n")).value == 1
        with pytest.raises(holdfast.VersionConflict):
            await root.state.set("n", 5, if_version=0)
        assert len(await root.state.conflicts()) == 1

        async def double(value: Any) -> Any:
            return value * 2

        assert (await root.state.update("n", double)).value == 2
        assert (await root.state.snapshot(at_sequence=1))["n"] == 1
        assert await root.state.compact(2) == 1
        assert "## Child Results" in await holdfast.resume_prompt(root)


def test_a_fork_of_a_root_may_begin_with_the_state_of_its_version(store: holdfast.Store) -> None:
    root = store.session("root")
    for number in range(3):
        root.state.increment("n")
        root.state.set(f"k{number}", number)
        root.append("log", [number])
    root.state.delete("k0")
    assert root.fork(2, id="empty").state.snapshot().document == {}
    copy = root.fork(2, id="copy", state="copy")
    assert copy.state.snapshot() == holdfast.StateSnapshot(
        root_id="copy",
        version=1,
        document={"k0": 0, "k1": 1, "n": 2},
        versions={"k0": 1, "k1": 1, "n": 1},
    )
    copy.state.set("k0", "own")
    # Version 1 was written in the tree of the first root.
    assert copy.fork(1, id="again", state="copy").state.get("n") == 1
    assert [event.operation for event in copy.state.events()] == ["init", "set"]
    assert root.state.get("k1") == 1
    child = store.session("child", parent=root)
    child.append("log", [1])
    with pytest.raises(holdfast.InvalidArgument, match="is not a root"):
        child.fork(1, state="copy")
    with pytest.raises(holdfast.InvalidArgument, match="state must be"):
        root.fork(1, state="move")  # type: ignore[arg-type]
    root.state.compact(root.state.version())
    with pytest.raises(holdfast.Compacted):
        root.fork(1, id="late", state="copy")
    assert [each.id for each in store.sessions()] == ["root", "empty", "copy", "again", "child"]


def test_a_resume_prompt_has_both_parts_and_says_what_it_cut(store: holdfast.Store) -> None:
    root = store.session("root")
    state = root.state
    assert holdfast.resume_prompt(root) == (
        "## Session State Summary\n{}\n\n## Child Results\n(none)\n"
    )
    for number in range(12):
        state.set(f"k{number}", number)
    text = holdfast.resume_prompt(
        root, {"anna": "é" * 100, "ben": {"n": 1}}, max_keys=2, max_bytes=100
    )
    assert text == (
        '## Session State Summary\n{\n  "k11": 11,\n  "k10": 10\n}\n'
        '(left out: 10 keys of 12; "k9", "k8")\n\n'
        f'## Child Results\n- anna: "{"é" * 24} (cut: 153 of 202 bytes)\n' + '- ben: {"n":1}\n'
    )
    bad: Any = ["a"]
    with pytest.raises(holdfast.InvalidArgument, match="answers must be"):
        holdfast.resume_prompt(root, bad)


def test_a_deleted_tree_is_not_found_whatever_is_asked(store: holdfast.Store) -> None:
    root = store.session("root")
    state = root.state
    state.set("k", 1)
    root.delete(force=True)
    reads: list[Callable[[], Any]] = [
        lambda: state.get("k"),
        lambda: state.entry("k"),
        state.keys,
        state.version,
        state.snapshot,
        lambda: state.snapshot(0),
        lambda: state.history("k"),
        state.events,
        lambda: state.diff(0, 1),
        state.summary,
        state.conflicts,
        state.rules,
        lambda: state.set("k", 1),
        lambda: state.compact(0),
        lambda: next(iter(state.watch())),
        lambda: holdfast.resume_prompt(root),
    ]
    for read in reads:
        with pytest.raises(holdfast.SessionNotFound):
            read()
    assert store.session("root").state.keys() == []


def test_an_entry_shares_nothing_with_what_was_given(state: State) -> None:
    given: dict[str, Any] = {"a": [1]}
    entry = state.set("k", given)
    [appended] = state.batch([{"op": "append", "key": "xs", "items": [given]}])
    given["a"].append(2)
    assert (entry.value, appended.value) == ({"a": [1]}, [{"a": [1]}])
    entry.value["a"].append(3)
    assert state.get("k") == {"a": [1]}


def test_integers_have_up_to_4096_digits(state: State) -> None:
    largest = 10**4096 - 1
    assert state.set("n", largest).value == state.get("n") == largest
    with pytest.raises(holdfast.LimitExceeded, match="4,096 digits"):
        state.increment("n")
    assert state.get("n") == largest


def test_a_refused_batch_tells_what_is_stored_and_no_later_operation_hides_it(state: State) -> None:
    for _ in range(4):
        state.set("k", [])
    operations = [
        {"op": "delete", "key": "k", "if_version": 1},
        {"op": "append", "key": "k", "items": [1]},
        {"op": "delete", "key": "missing"},
        {"op": "increment", "key": "k"},
        {"op": "set", "key": "other", "value": 1, "if_version": 3},
    ]
    with pytest.raises(holdfast.VersionConflict) as caught:
        state.batch(operations)
    assert (caught.value.current_version, caught.value.current_value) == (4, [])
    assert [each["status"] for each in caught.value.results] == [
        "conflict", "not_applied", "not_applied", "not_applied", "conflict",
    ]  # fmt: skip
    assert [(each.key, each.current) for each in state.conflicts()] == [("k", 4)]


def test_a_request_is_compared_to_the_last_character(state: State) -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    state.set(composed, 1, idempotency_key="key")
    with pytest.raises(holdfast.RequestMismatch):
        state.set(decomposed, 1, idempotency_key="key")
    both = {composed: 1, decomposed: 2}
    assert state.set("m", both, idempotency_key="both").value == both
    assert state.patch(both, idempotency_key="document").document == {**both, "m": both}
    state.set("n", 1, if_unchanged={"m": 1}, idempotency_key="read")
    with pytest.raises(holdfast.RequestMismatch):
        state.set("n", 1, if_unchanged={"m": 2}, idempotency_key="read")


def test_a_request_is_remembered_across_compaction(state: State) -> None:
    first = state.increment("n", 5, idempotency_key="one")
    operations = [{"op": "append", "key": "xs", "items": ["x" * 300]}] * 3
    done = state.batch(operations, idempotency_key="two")
    state.set("gone", 1, idempotency_key="three")
    state.delete("gone")
    state.patch({"n": 9}, idempotency_key="four")
    for number in range(3):
        state.append("old", ["y" * 300, number])
    # The value follows from rows that go; what the key stands for is kept whole.
    grown = state.append("old", ["z"], idempotency_key="five")
    for number in range(50):
        state.increment("n", number)
        state.append("xs", [number])
        state.append("old", [number])
    document = state.snapshot().document
    state.compact(state.version())
    assert state.increment("n", 5, idempotency_key="one") == first
    assert state.batch(operations, idempotency_key="two") == done
    assert state.set("gone", 1, idempotency_key="three").version == 1
    assert state.append("old", ["z"], idempotency_key="five") == grown
    with pytest.raises(holdfast.Compacted):
        state.patch({"n": 9}, idempotency_key="four")
    assert state.snapshot().document == document
    assert state.compact(0) == 0


def test_large_numbers_overflow_with_a_clear_error(state: State) -> None:
    state.set("whole", 10**400)
    state.set("half", 0.5)
    for key, delta in (("whole", 0.5), ("half", 10**400)):
        with pytest.raises(holdfast.InvalidValue, match="is not finite"):
            state.increment(key, delta)
    with pytest.raises(holdfast.InvalidArgument, match="must be a function"):
        state.update("half", 5)  # type: ignore[arg-type]


def test_ten_thousand_keys_are_written_at_once(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        state = store.session("root").state
        document = {f"k{number}": number for number in range(10_000)}
        assert state.replace(document).document == document
        assert state.version() == 1


def test_a_key_is_as_old_as_its_last_creation(place: dict[str, Any]) -> None:
    clock = VirtualClock()

    def ages(tx: holdfast.Transaction) -> holdfast.Op[Any]:
        [row] = yield from rows("SELECT created_at, updated_at FROM hf_state_entries")
        return row["created_at"], row["updated_at"]

    with holdfast.open(**place, clock=clock) as store:
        state = store.session("root").state
        first = state.set("k", 1).updated_at
        clock.advance(1)
        assert store.run(ages) == (first, first)
        second = state.set("k", 2).updated_at
        assert store.run(ages) == (first, second)
        state.delete("k")
        clock.advance(1)
        third = state.set("k", 3).updated_at
        assert store.run(ages) == (third, third)
        assert first < second < third
