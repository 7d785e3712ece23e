"""`holdfast state`: look at the shared state of a tree, change it, and look back in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

from ..checkpoints.diff import brief
from ..codec import from_json, to_json
from ..errors import InvalidArgument, NotFound
from ..formatting import plural
from ..kernel.files import new_file
from ..state import Entry, Reducer, StateSnapshot
from ..store import Store
from . import output
from .command import (
    Answer,
    Commands,
    Limit,
    SessionId,
    Yes,
    argument,
    confirm,
    known_id,
    option,
    page,
    read_json,
    require_file,
    session_ids,
)

app = Commands("Show the shared state of a tree, change it, and read its history.")

# A negative number is a value and no option.
NEGATIVE = {"ignore_unknown_options": True}
Key = Annotated[str, argument("KEY", "The key.")]
Value = Annotated[str, argument("VALUE", "The value as JSON; - reads stdin.")]
IfVersion = Annotated[
    int | None, option("N", "Only if the key has this version; 0: only if it does not exist.")
]
At = Annotated[int | None, option("SEQUENCE", "As it was at this sequence.", "--at")]
IdempotencyKey = Annotated[
    str | None, option("KEY", "A repeated command with this key changes nothing.")
]


def _written(entry: Entry) -> Answer:
    state = "is deleted" if entry.is_deleted else "is written"
    text = f"{entry.key} {state}: version {entry.version}, sequence {entry.sequence}."
    return Answer(output.data(entry), text)


@app.command(mode="read")
def get(
    store: Store,
    session: SessionId,
    key: Annotated[str | None, argument("[KEY]", "Without one, the whole state.")] = None,
    at_sequence: At = None,
    prefix: Annotated[str | None, option("TEXT", "Only keys that begin with it.")] = None,
) -> Answer:
    """Show the value of a key, or the whole state."""
    state = store.find_session(session).state
    if key is not None and prefix is not None:
        raise InvalidArgument("name a KEY, or pass --prefix for those that begin with it")
    if key is None:
        found = _beginning(state.snapshot(at_sequence), prefix or "")
        return Answer(output.data(found), lambda: [output.json_lines(found.document)])
    if at_sequence is not None:
        old = state.snapshot(at_sequence)
        if key not in old.versions:
            raise NotFound(f"there was no key {key!r} at sequence {at_sequence}", key=key)
        data = {"key": key, "value": old[key], "version": old.versions[key]}
        return Answer(data, lambda: [output.json_lines(old[key])])
    entry = state.entry(key)
    if entry is None:
        raise NotFound(f"there is no key {key!r} in the state of {state.root_id}", key=key)
    return Answer(output.data(entry), lambda: [output.json_lines(entry.value)])


def _beginning(found: StateSnapshot, prefix: str) -> StateSnapshot:
    """Return a snapshot of the keys that begin with a text."""
    named = ("document", "versions", "writers", "times")
    kept: dict[str, Any] = {
        name: {key: each for key, each in getattr(found, name).items() if key.startswith(prefix)}
        for name in named
    }
    return replace(found, **kept)


@app.command(mode="read")
def keys(
    store: Store,
    session: SessionId,
    updated_by: Annotated[
        str | None, option("SESSION", "Only those it wrote last.", offers=session_ids)
    ] = None,
) -> Answer:
    """List the keys."""
    wrote = known_id(store, updated_by)
    found = store.find_session(session).state.keys(updated_by=wrote)
    return Answer({"keys": found}, "\n".join(map(output.text_of, found)) or "No keys.")


@app.command("set", mode="write", context_settings=NEGATIVE)
def set_key(
    store: Store,
    session: SessionId,
    key: Key,
    value: Value,
    if_version: IfVersion = None,
    idempotency_key: IdempotencyKey = None,
) -> Answer:
    """Set a key."""
    state = store.find_session(session).state
    return _written(
        state.set(
            key, read_json(value, "VALUE"), if_version=if_version, idempotency_key=idempotency_key
        )
    )


@app.command(mode="write")
def delete(
    store: Store, session: SessionId, key: Key, if_version: IfVersion = None, yes: Yes = False
) -> Answer:
    """Delete a key. Its history stays, and its versions never repeat."""
    state = store.find_session(session).state
    confirm(f"Delete {key!r} from the state of {state.root_id}?", yes=yes)
    return _written(state.delete(key, if_version=if_version))


@app.command(mode="write", context_settings=NEGATIVE)
def increment(
    store: Store,
    session: SessionId,
    key: Key,
    delta: Annotated[str, argument("[DELTA]", "How much to add.")] = "1",
    idempotency_key: IdempotencyKey = None,
) -> Answer:
    """Add to a number."""
    entry = store.find_session(session).state.increment(
        key, from_json(delta, name="DELTA"), idempotency_key=idempotency_key
    )
    return Answer(output.data(entry), f"{key} is {entry.value}, version {entry.version}.")


@app.command(mode="write")
def append(
    store: Store,
    session: SessionId,
    key: Key,
    items: Annotated[str, argument("ITEMS", "A list as JSON; - reads stdin.")],
    idempotency_key: IdempotencyKey = None,
) -> Answer:
    """Append items to a list."""
    state = store.find_session(session).state
    return _written(state.append(key, read_json(items, "ITEMS"), idempotency_key=idempotency_key))


@app.command(mode="write")
def merge(
    store: Store,
    session: SessionId,
    key: Key,
    patch: Annotated[str, argument("PATCH", "An object as JSON; null removes a member.")],
) -> Answer:
    """Merge a patch into an object (RFC 7396)."""
    return _written(store.find_session(session).state.merge(key, read_json(patch, "PATCH")))


@app.command(mode="write", context_settings=NEGATIVE)
def reduce(
    store: Store, session: SessionId, key: Key, value: Value, idempotency_key: IdempotencyKey = None
) -> Answer:
    """Change a key by its reducer."""
    state = store.find_session(session).state
    return _written(state.reduce(key, read_json(value, "VALUE"), idempotency_key=idempotency_key))


@app.command(mode="read")
def rules(store: Store, session: SessionId) -> Answer:
    """List the schemas and reducers of keys."""
    found = store.find_session(session).state.rules()
    columns: output.Columns = {
        "key": "key",
        "reducer": lambda each: each.reducer or "",
        "schema": lambda each: "" if each.schema is None else to_json(each.schema),
        "by": "updated_by",
        "written": "updated_at",
    }
    return Answer(
        {"rules": [output.data(each) for each in found]},
        lambda: [output.table(found, columns, drop=("by", "written"), empty="No rules.")],
    )


@app.command("set-rule", mode="write")
def set_rule(
    store: Store,
    session: SessionId,
    key: Key,
    schema: Annotated[str | None, option("SCHEMA", "A JSON Schema; - reads stdin.")] = None,
    reducer: Annotated[
        str | None, option("NAME", "One of last, sum, min, max, append, add, merge.")
    ] = None,
) -> Answer:
    """Give a key a schema that its values must match, a reducer, or both."""
    state = store.find_session(session).state
    given = None if schema is None else read_json(schema, "--schema")
    state.set_rule(key, schema=given, reducer=cast("Reducer | None", reducer))
    return Answer({"key": key, "schema": given, "reducer": reducer}, f"{key} has this rule now.")


@app.command("delete-rule", mode="write")
def delete_rule(store: Store, session: SessionId, key: Key) -> Answer:
    """Remove the schema and the reducer of a key; its value stays."""
    store.find_session(session).state.delete_rule(key)
    return Answer({"key": key}, f"{key} has no rule any more.")


@app.command(mode="read")
def history(
    store: Store,
    session: SessionId,
    key: Key,
    before: Annotated[int | None, option("SEQUENCE", "Continue below this sequence.")] = None,
    limit: Limit = 20,
) -> Answer:
    """List the value after each change of a key, newest first."""
    found = store.find_session(session).state.history(key, before=before, limit=limit)
    columns: output.Columns = {
        "sequence": "sequence",
        "version": "version",
        "by": "updated_by",
        "written": "updated_at",
        "value": lambda each: "(deleted)" if each.is_deleted else to_json(each.value),
    }
    return page(
        "history", found, output.data, columns, limit=limit, position="sequence", more="before",
        drop=("by",), empty="No history.",
    )  # fmt: skip


@app.command(mode="read")
def watch(
    store: Store,
    session: SessionId,
    since: Annotated[int, option("SEQUENCE", "Only mutations after this sequence.")] = 0,
) -> Answer:
    """Print mutations as they are committed, one JSON object per line. Ctrl-C ends it."""
    for event in store.find_session(session).state.watch(after=since):
        print(output.json_line(output.data(event)), flush=True)
    return Answer(None, "")


@app.command(mode="read")
def diff(
    store: Store,
    session: SessionId,
    before: Annotated[int, argument("BEFORE", "The sequence to compare.")],
    after: Annotated[int, argument("AFTER", "The sequence to compare with.")],
) -> Answer:
    """Compare the state at two sequences."""
    found = store.find_session(session).state.diff(before, after)

    def shown() -> Iterator[Any]:
        from rich.text import Text

        width = output.console().width
        if not found.changes:
            yield f"The state is the same at {before} and {after}."
        for each in found.changes:
            sides = (
                ("-", "red", each.version_before, each.before),
                ("+", "green", each.version_after, each.after),
            )
            for sign, style, version, value in sides:
                if version:
                    # A key may fill three lines of a terminal; the value is what is compared.
                    key = Text(output.text_of(each.key))
                    key.truncate(width // 2, overflow="ellipsis")
                    line = Text.assemble(f"{sign} ", key, f": {brief(value)}", style=style)
                    line.truncate(width, overflow="ellipsis")
                    yield line

    return Answer(output.data(found), shown)


@app.command(mode="read")
def conflicts(
    store: Store,
    session: SessionId,
    before: Annotated[int | None, option("NUMBER", "Continue below this number.")] = None,
    limit: Limit = 20,
) -> Answer:
    """List writes that were refused because another writer was first, newest first."""
    found = store.find_session(session).state.conflicts(before=before, limit=limit)
    columns: output.Columns = {
        "number": "number",
        "key": "key",
        "expected": "expected",
        "current": "current",
        "attempt": "attempt",
        "retried": lambda each: "yes" if each.is_retried else "no",
        "by": "updated_by",
        "written": "created_at",
    }
    return page(
        "conflicts", found, output.data, columns, limit=limit, more="before",
        drop=("number", "attempt", "by"), empty="No conflicts.",
    )  # fmt: skip


@app.command(mode="write")
def restore(
    store: Store,
    session: SessionId,
    at_sequence: Annotated[int, argument("SEQUENCE", "The sequence to restore.")],
    yes: Yes = False,
) -> Answer:
    """Give every key the value it had at a sequence, under new versions."""
    state = store.find_session(session).state
    confirm(f"Restore the state of {state.root_id} to sequence {at_sequence}?", yes=yes)
    found = state.restore(at_sequence)
    return Answer(
        output.data(found),
        f"The state is as it was at {at_sequence}; its version is {found.version}.",
    )


@app.command(mode="read")
def export(
    store: Store,
    session: SessionId,
    file: Annotated[
        Path, argument("FILE", "The new JSON file; it must not exist yet.", callback=require_file)
    ],
    at_sequence: At = None,
) -> Answer:
    """Write the whole state to a file, as one JSON object."""
    found = store.find_session(session).state.snapshot(at_sequence)
    with new_file(file) as partial:
        Path(partial).write_text(to_json(found.document, indent=2) + "\n", "utf-8")
    data = {"path": str(file.resolve()), "keys": len(found.document), "version": found.version}
    return Answer(data, f"Wrote {plural(len(found.document), 'key')} to {file.resolve()}.")
