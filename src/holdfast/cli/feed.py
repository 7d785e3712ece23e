"""`holdfast feed`: everything that happens in trees of sessions, as lines of JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from ..arguments import require_one_of, require_whole
from ..errors import InvalidArgument
from ..formatting import plural
from ..kernel.files import new_file
from ..records import EVENT_KINDS, Event, FollowedEvent
from ..store import Store
from . import output
from .command import Answer, Commands, argument, flag, option, session_ids

EVENTS_PER_PAGE = 1_000

app = Commands("Follow or export everything that happens in trees of sessions.")

Session = Annotated[
    str | None,
    argument("[SESSION]", "A session of the tree: its id, or its first characters.", session_ids),
]
AllTrees = Annotated[bool, flag("--all", "The events of all trees.")]
Since = Annotated[
    str | None,
    option("POSITION", "Only events after this position; with --all, after this cursor."),
]
Kinds = Annotated[list[str] | None, option("KIND", "Only those of this kind; repeatable.")]
Own = Annotated[bool, flag("--own", "Only those of SESSION itself, not of its whole tree.")]
EVENT_FIELDS = [field.name for field in dataclasses.fields(Event)]


def _lines(events: Iterable[Event], kinds: list[str] | None) -> Iterator[str]:
    wanted = {require_one_of("kind", each, EVENT_KINDS) for each in kinds or ()}
    return _shown(events, wanted)


def _shown(events: Iterable[Event], wanted: set[str]) -> Iterator[str]:
    for event in events:
        if not wanted or event.kind in wanted:
            fields = {name: getattr(event, name) for name in EVENT_FIELDS}
            if isinstance(event, FollowedEvent):
                fields["cursor"] = event.cursor
            yield output.json_line(output.with_iso_times(fields))


def _events(
    store: Store, session: str | None, all_trees: bool, since: str | None, own: bool, *, wait: bool
) -> Iterator[Event]:
    """Return the events that a command was asked for."""
    if all_trees != (session is None):
        raise InvalidArgument("name a SESSION, or pass --all for the events of all trees")
    if session is None:
        if own:
            raise InvalidArgument("--own needs a SESSION, whose events are meant")
        return store.follow_all(after=since, wait=wait)
    named, after = store.find_session(session), _position(since)
    root_id = named.root_id
    found = store.follow(root_id, after=after) if wait else _until_now(store, root_id, after)
    return (each for each in found if each.session_id == named.id) if own else found


def _position(since: str | None) -> int:
    is_number = since is not None and since.isascii() and since.isdigit()
    return require_whole("since", int(since) if since and is_number else since or 0, 0)


def _until_now(store: Store, root_id: str, after: int) -> Iterator[Event]:
    while found := store.events(root_id, after=after, limit=EVENTS_PER_PAGE):
        yield from found
        after = found[-1].position


@app.command(mode="read")
def follow(
    store: Store,
    session: Session = None,
    all_trees: AllTrees = False,
    since: Since = None,
    kind: Kinds = None,
    own: Own = False,
) -> Answer:
    """Print the events of a session's tree, or of all, one per line. Ctrl-C ends it."""
    for line in _lines(_events(store, session, all_trees, since, own, wait=True), kind):
        print(line, flush=True)
    return Answer(None, "")


@app.command(mode="read")
def export(
    store: Store,
    file: Annotated[Path, argument("FILE", "The new file, or - for stdout.")],
    session: Session = None,
    all_trees: AllTrees = False,
    since: Since = None,
    kind: Kinds = None,
    own: Own = False,
) -> Answer:
    """Write the events of a session's tree, or of all, to a file, one per line."""
    lines = _lines(_events(store, session, all_trees, since, own, wait=False), kind)
    if str(file) == "-":
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return Answer(None, lambda: ())
    count = 0
    with new_file(file) as partial, Path(partial).open("w", encoding="utf-8") as out:
        for line in lines:
            out.write(f"{line}\n")
            count += 1
    data: dict[str, Any] = {"path": str(file.resolve()), "events": count}
    return Answer(data, f"Wrote {plural(count, 'event')} to {file.resolve()}.")
