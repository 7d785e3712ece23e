"""Schemas and reducers of keys: stored as data, kept to by every write, in every place."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.ciphers import AesGcm
from holdfast.kernel.operation import rows
from holdfast.state import State
from holdfast.state.schemas import Schemas

SMALL = {"type": "integer", "maximum": 10}
LOOP = {"anyOf": [{"$ref": "#"}]}


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place) as store:
        yield store


@pytest.fixture
def state(store: holdfast.Store) -> State:
    return store.session("root").state


REDUCED: dict[Any, tuple[list[Any], str, Any]] = {
    "last": ([[1], "two", None], "set", None),
    "sum": ([2, 0.5, -1], "increment", 1.5),
    "min": ([5, 2.0, 2, 7], "min", 2.0),
    "max": ([5, -3, 10**400], "max", 10**400),
    "append": ([["a"], [], ["a", "b"]], "append", ["a", "a", "b"]),
    "add": (["a", "b", "a"], "add", ["a", "b"]),
    "merge": ([{"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": None}}], "merge", {"a": {"c": 2}}),
}


@pytest.mark.parametrize("reducer", REDUCED)
def test_a_reducer_makes_one_value_of_many(state: State, reducer: Any) -> None:
    values, operation, wanted = REDUCED[reducer]
    state.set_rule("k", reducer=reducer)
    entries = [state.reduce("k", value) for value in values]
    assert repr(entries[-1].value) == repr(state.get("k")) == repr(wanted)
    assert [each.version for each in entries] == list(range(1, len(values) + 1))
    assert {event.operation for event in state.events()} == {operation}
    state.batch([{"op": "reduce", "key": "k", "value": each} for each in values])
    assert [each.value for each in reversed(state.history("k"))][: len(values)] == [
        each.value for each in entries
    ]


def test_large_values_under_a_reducer_are_replayed_from_their_steps(state: State) -> None:
    state.set_rule("most", reducer="max")
    state.set_rule("least", reducer="min")
    whole = [10**600 + number for number in range(40)]
    for number in whole:
        state.reduce("most", number)
        state.reduce("least", -number)
    for at in range(1, 81):
        assert state.snapshot(at)["most"] == whole[(at - 1) // 2]
    assert [each.value for each in state.history("least")] == [-each for each in reversed(whole)]


def test_what_a_reducer_cannot_take_changes_nothing(state: State) -> None:
    for reducer in ("sum", "min", "max", "append", "merge"):
        state.set_rule("k", reducer=reducer)
        with pytest.raises(holdfast.InvalidArgument, match=f"reducer of 'k' is {reducer}"):
            state.reduce("k", "text")
    state.set("k", True)
    for reducer, value in {"min": 1, "max": 1, "sum": 1, "append": [1], "add": 1}.items():
        state.set_rule("k", reducer=reducer)  # type: ignore[arg-type]
        with pytest.raises(holdfast.TypeConflict, match="'k' is a boolean"):
            state.reduce("k", value)
    with pytest.raises(holdfast.NotFound, match="'other' has no reducer"):
        state.reduce("other", 1)
    state.set_rule("other", schema={})
    with pytest.raises(holdfast.NotFound, match="'other' has no reducer"):
        state.batch([{"op": "set", "key": "k", "value": 2}, {"op": "reduce", "key": "other",
                                                             "value": 1}])  # fmt: skip
    assert (state.snapshot().document, state.version()) == ({"k": True}, 1)


WRITES: dict[str, Callable[[State], Any]] = {
    "set": lambda s: s.set("n", "text"),
    "a set with a version": lambda s: s.set("n", 11, if_version=2),
    "increment": lambda s: s.increment("n", 7),
    "a fraction": lambda s: s.increment("n", 0.5),
    "reduce": lambda s: s.reduce("n", 7),
    "append": lambda s: s.append("xs", ["c"]),
    "add": lambda s: s.add("xs", "c"),
    "remove": lambda s: s.batch([
        {"op": "remove", "key": "xs", "item": "a"}, {"op": "remove", "key": "xs", "item": "b"}]),
    "merge": lambda s: s.merge("o", {"a": "text"}),
    "merge away": lambda s: s.merge("o", {"a": None}),
    "a batch that would end well": lambda s: s.batch([
        {"op": "increment", "key": "n", "delta": 7}, {"op": "increment", "key": "n", "delta": -7}]),
    "replace": lambda s: s.replace({"free": 1, "n": 11}),
    "patch": lambda s: s.patch({"free": 1, "o": {"a": "text"}}),
    "update": lambda s: s.update("n", lambda value: value * 100),
    "restore": lambda s: s.restore(1),
    "a new key": lambda s: s.set("new", 11),
}  # fmt: skip


def test_every_write_of_a_key_is_checked_against_its_schema(
    store: holdfast.Store, state: State
) -> None:
    state.set("n", 99)
    state.append("log", [1])
    store.session("root").append("turns", [1])
    state.batch([
        {"op": "set", "key": "n", "value": 4}, {"op": "set", "key": "xs", "value": ["a", "b"]},
        {"op": "set", "key": "o", "value": {"a": 1, "b": 2}},
    ])  # fmt: skip
    list_of_two = {"type": "array", "minItems": 1, "maxItems": 2}
    state.set_rule("n", schema=SMALL, reducer="sum")
    state.set_rule("xs", schema=list_of_two)
    state.set_rule("o", schema={"required": ["a"], "properties": {"a": {"$ref": "#/$defs/i"}},
                                "$defs": {"i": {"type": "integer"}}})  # fmt: skip
    state.set_rule("new", schema=SMALL)
    before, feed = state.snapshot(), len(store.events("root"))
    for name, write in WRITES.items():
        with pytest.raises(holdfast.InvalidValue, match="would not match its schema") as caught:
            write(state)
        assert caught.value.path.split(".")[0] in {"n", "xs", "o", "new"}, name
        assert state.snapshot() == before, name
    with pytest.raises(holdfast.InvalidValue):
        store.find_session("root").fork(1, id="fork", state="copy")
    assert len(store.events("root")) == feed
    assert [each.id for each in store.sessions()] == ["root"]
    state.increment("n", 6)
    state.replace({"xs": ["z"], "o": {"a": 5}, "free": "text"})
    state.restore(before.version)
    assert state.snapshot().document == before.document
    state.delete("n")
    with pytest.raises(holdfast.InvalidValue):
        state.set("n", 11)
    state.delete_rule("n")
    state.set("n", 11)


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": (True, "must be an object"),
    "an unknown type": ({"type": "number!"}, r"cannot be used at \$\.type"),
    "a bad pattern": ({"properties": {"a": {"pattern": "("}}}, "is not a 'regex'"),
    "an address": ({"$ref": "http://127.0.0.1:{port}/x"}, "are not fetched"),
    "a nested address": (
        {"properties": {"default": {"$ref": "http://127.0.0.1:{port}/x"}}}, "are not fetched"),
    "a file": ({"items": {"$ref": "file:///etc/passwd"}}, "are not fetched"),
    "a missing part": ({"$ref": "#/$defs/missing"}, "is not part of it"),
    "a dynamic address": ({"$dynamicRef": "http://127.0.0.1:{port}/x#m"}, "are not fetched"),
    "an unknown dialect": ({"$schema": "http://127.0.0.1:{port}/x"}, "is not known"),
    "a dialect of number": ({"$schema": 7}, "is not known"),
    "an id of number": ({"$id": 7}, "is not of type 'string'"),
    "an address behind a reference": (
        {"properties": {"a": {"$ref": "#/b"}}, "b": {"$ref": "http://127.0.0.1:{port}/x"}},
        "are not fetched"),
    "a reference to no schema": (
        {"properties": {"a": {"$ref": "#/title"}}, "title": "t"}, "'t' is not of type 'object'"),
    "a reference to a bad schema": (
        {"properties": {"a": {"$ref": "#/b"}}, "b": {"type": "number!"}}, "cannot be used at"),
    "a reference into a number": ({"$ref": "#/minimum/0", "minimum": 1}, "TypeError"),
    "what the library cannot walk": (
        {"$schema": "http://json-schema.org/draft-03/schema#", "extends": {"type": "any"}},
        "cannot be used: AttributeError"),
    "a loop": (LOOP, "refers to itself endlessly"),
    "a multiple of nothing": ({"multipleOf": 0}, "cannot be used"),
    "bytes": ({"const": b""}, "bytes"),
    "too large": ({"const": "x" * 2**21}, "1,048,576"),
    "a value that stands": ({"type": "string"}, "'n' would not match its schema"),
    "a long one that does not fit": ({"maximum": 1, "title": "x" * 500}, "than the maximum"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    with holdfast.open(f"sqlite:///{tmp_path_factory.mktemp('rules')}/store.db") as store:
        store.session("root").state.set("n", 5)
        yield store


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_used_is_refused_and_never_fetched(
    name: str, shared: holdfast.Store
) -> None:
    state, (schema, words) = shared.find_session("root").state, REFUSED[name]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = str(server.getsockname()[1])
        with pytest.raises(holdfast.InvalidArgument, match=words):
            state.set_rule("n", schema=_with_port(schema, port))
        with pytest.raises(BlockingIOError):
            server.accept()
    assert state.rules() == []
    assert [event.kind for event in shared.events("root")] == ["session_created", "state_changed"]


def _with_port(schema: Any, port: str) -> Any:
    if isinstance(schema, dict):
        return {name: _with_port(each, port) for name, each in schema.items()}
    return schema.replace("{port}", port) if isinstance(schema, str) else schema


def test_other_dialects_and_references_inside_are_followed(shared: holdfast.Store) -> None:
    state = shared.session("dialects").state
    state.set_rule("old", schema={
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"one": {"const": 1}}, "items": [{"$ref": "#/definitions/one"}],
    })  # fmt: skip
    state.set("old", [1, 2])
    with pytest.raises(holdfast.InvalidValue, match=r"at old\[0\]: 1 was expected"):
        state.set("old", [2])
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    state.set_rule("tree", schema=tree)
    state.set("tree", {"next": {"next": {}}})
    with pytest.raises(holdfast.InvalidValue, match=r"at tree\.next\.next: 5 is not of type"):
        state.set("tree", {"next": {"next": 5}})
    state.set_rule("huge", schema={"multipleOf": 0.5})
    with pytest.raises(holdfast.InvalidValue, match="cannot be checked"):
        state.set("huge", 10**400)
    state.set_rule("loop", schema={"if": {"type": "object"}, "then": {"$ref": "#"}})
    with pytest.raises(holdfast.InvalidValue, match="cannot be checked"):
        state.set("loop", {})
    state.set("loop", [])
    long = {"items": {"const": "x" * 5_000}}
    state.set_rule("long", schema=long)
    with pytest.raises(holdfast.InvalidValue) as caught:
        state.set("long", ["y" * 5_000])
    assert len(str(caught.value)) < 600


def test_items_of_any_kind_are_unique_at_a_cost_that_grows_with_their_number(
    shared: holdfast.Store,
) -> None:
    state = shared.session("unique").state
    state.set_rule("members", schema={"uniqueItems": True})
    for equal in ([1, 1.0], [{"a": [1]}, "x", {"a": [1.0]}], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]):
        with pytest.raises(holdfast.InvalidValue, match="has non-unique elements"):
            state.set("members", equal)
    state.set("members", [1, True, "1", [1], {"1": 1}, 0, False, None, "null", {"1": True}])
    body = shared.runtime.codec.encode({"uniqueItems": True}, name="schema")
    check = partial(Schemas.of(shared.runtime).require_fit, body, "members")
    steps = [calls_of(partial(check, [{"n": n} for n in range(count)])) for count in (500, 1_000)]
    assert steps[1] < 3 * steps[0]


def calls_of(function: Callable[[], Any]) -> int:
    """Return how many functions were called on this thread."""
    count = 0

    def note(_frame: Any, kind: str, _argument: Any) -> None:
        nonlocal count
        count += kind == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_process_without_the_library_refuses_such_writes(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(**place) as store:
        state = store.session("root").state
        state.set_rule("n", schema=SMALL, reducer="sum")
    for name in ("jsonschema", "jsonschema.validators"):
        monkeypatch.setitem(sys.modules, name, None)
    with holdfast.open(**place) as store:
        state = store.session("root").state
        writes: list[Callable[[], Any]] = [
            lambda: state.set("n", 1),
            lambda: state.reduce("n", 1),
            lambda: state.replace({"free": 1, "n": 2}),
            lambda: state.set_rule("m", schema=SMALL),
        ]
        for write in writes:
            with pytest.raises(holdfast.MissingPackage, match=r"holdfast-agents\[schema\]"):
                write()
        assert (state.version(), len(state.rules())) == (0, 1)
        state.set("free", 1)
        state.set_rule("free", reducer="sum")
        assert state.reduce("free", 2).value == 3
        state.delete_rule("n")
        state.set("n", "text")


def test_rules_are_listed_deleted_and_told(store: holdfast.Store, state: State) -> None:
    child = store.session("child", parent="root")
    child.state.set_rule("b", reducer="add")
    state.set_rule("a", schema=SMALL, reducer="max")
    start = len(store.events("root"))
    state.set_rule("a", schema=SMALL, reducer="max")
    assert len(store.events("root")) == start
    found = state.rules()
    assert [(each.key, each.schema, each.reducer, each.updated_by) for each in found] == [
        ("a", SMALL, "max", "root"), ("b", None, "add", "child"),
    ]  # fmt: skip
    assert state.version() == 0
    state.set_rule("a", reducer="min")
    assert child.state.rules()[0].schema is None
    state.delete_rule("a")
    with pytest.raises(holdfast.NotFound, match="'a' has no rule"):
        state.delete_rule("a")
    told = [(e.kind, e.session_id, e.data) for e in store.events("root") if "rule" in e.kind]
    assert told == [
        ("state_rule_set", "child", {"key": "b", "has_schema": False, "reducer": "add"}),
        ("state_rule_set", "root", {"key": "a", "has_schema": True, "reducer": "max"}),
        ("state_rule_set", "root", {"key": "a", "has_schema": False, "reducer": "min"}),
        ("state_rule_deleted", "root", {"key": "a"}),
    ]
    bad: list[tuple[str, Any]] = [("a", None), ("a", "avg"), ("", "sum"), ("\n", "sum")]
    for key, reducer in bad:
        with pytest.raises(holdfast.InvalidArgument):
            state.set_rule(key, reducer=reducer)
    child.end()
    with pytest.raises(holdfast.SessionEnded):
        child.state.set_rule("a", reducer="sum")


def test_rules_are_bounded(place: dict[str, Any]) -> None:
    with holdfast.open(**place, limits=holdfast.Limits(keys_per_root=2)) as store:
        state = store.session("root").state
        for key in "aba":
            state.set_rule(key, reducer="sum")
        state.set_rule("a", reducer="max")
        with pytest.raises(holdfast.LimitExceeded, match="rules for 3 keys"):
            state.set_rule("c", reducer="sum")
        assert [each.key for each in state.rules()] == ["a", "b"]


def test_rules_travel_with_their_tree_are_copied_and_go_with_it(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "sessions.export"
    with holdfast.open(**place) as store:
        root = store.session("root")
        root.state.set_rule("n", schema=SMALL, reducer="sum")
        root.state.set_rule("later", reducer="append")
        root.state.set("n", 3)
        root.append("log", [1])
        rules = root.state.rules()
        store.export(file)
        copy = root.fork(1, id="copy", state="copy")
        assert [(each.key, each.schema, each.reducer) for each in copy.state.rules()] == [
            (each.key, each.schema, each.reducer) for each in rules
        ]
        assert root.fork(1, id="empty").state.rules() == []
        assert copy.state.reduce("n", 1).value == 4
        with pytest.raises(holdfast.InvalidValue):
            copy.state.reduce("n", 7)
        root.delete()
        assert store.session("root").state.rules() == []
        assert len(copy.state.rules()) == 2
    with holdfast.open(**other) as store:
        store.import_sessions(file)
        state = store.find_session("root").state
        assert state.rules() == rules
        with pytest.raises(holdfast.InvalidValue):
            state.reduce("n", 8)
        assert state.reduce("later", [1]).value == [1]


def test_a_reduced_value_counts_once_in_an_item_that_is_tried_again(store: holdfast.Store) -> None:
    root = store.session("root")
    for reducer in ("sum", "append", "max"):
        root.state.set_rule(reducer, reducer=reducer)
    store.work.submit("count", session=root)
    for _ in range(2):
        [item] = store.work.claim("worker")
        for _ in range(2):
            item.state.reduce("sum", 5)
        item.state.reduce("append", ["a"])
        item.state.reduce("max", 7)
        item.fail("it broke", delay_seconds=0)
    assert root.state.snapshot().document == {"append": ["a"], "max": 7, "sum": 10}


def test_a_schema_is_encrypted_as_values_are(tmp_path: Path) -> None:
    cipher = AesGcm({"one": b"k" * 32}, "one")
    path = tmp_path / "store.db"
    with holdfast.open(f"sqlite:///{path}", cipher=cipher) as store:
        state = store.session("root").state
        state.set_rule("k", schema={"title": "the-secret-title"})
        assert state.rules()[0].schema == {"title": "the-secret-title"}
        store.backup(tmp_path / "copy.db")
    assert b"the-secret-title" not in (tmp_path / "copy.db").read_bytes()


def test_doctor_tells_of_a_rule_without_a_tree(
    place: dict[str, Any], store: holdfast.Store
) -> None:
    def break_it(tx: holdfast.Transaction) -> holdfast.Op[None]:
        columns = "root_id, key, reducer, updated_by, updated_at"
        yield from rows(f"INSERT INTO hf_state_rules ({columns}) VALUES ('x', 'k', 'sum', 'x', 1)")

    store.run(break_it)
    found = holdfast.store.check(place["url"], namespace=place.get("namespace"))
    [problem] = [each for each in found if each.level == "problem"]
    assert (problem.check, "missing trees: x." in problem.message) == ("state", True)
