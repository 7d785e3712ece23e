"""`holdfast feed`: everything that happens in a tree of sessions, as lines of JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from ..kernel.files import new_file
from ..records import Event
from ..store import Store
from . import output
from .command import Answer, Commands, SessionId, argument, option

EVENTS_PER_PAGE = 1_000

app = Commands("Follow or export everything that happens in a tree of sessions.")

Since = Annotated[int, option("POSITION", "Only events after this position.")]
Kinds = Annotated[list[str] | None, option("KIND", "Only those of this kind; repeatable.")]


def _lines(events: Iterable[Event], kinds: list[str] | None) -> Iterator[str]:
    wanted = set(kinds or ())
    for event in events:
        if not wanted or event.kind in wanted:
            yield output.json_line(output.data(event))


def _all(store: Store, root_id: str, after: int) -> Iterator[Event]:
    while found := store.events(root_id, after=after, limit=EVENTS_PER_PAGE):
        yield from found
        after = found[-1].position


@app.command(mode="read")
def follow(store: Store, session: SessionId, since: Since = 0, kind: Kinds = None) -> Answer:
    """Print the events of a session's tree as they come, one a line. Ctrl-C ends it."""
    root_id = store.find_session(session).root_id
    for line in _lines(store.follow(root_id, after=since), kind):
        print(line, flush=True)
    return Answer(None, "")


@app.command(mode="read")
def export(
    store: Store,
    session: SessionId,
    file: Annotated[Path, argument("FILE", "The new file, or - for stdout.")],
    since: Since = 0,
    kind: Kinds = None,
) -> Answer:
    """Write the events of a session's tree to a file, one a line."""
    root_id = store.find_session(session).root_id
    lines = _lines(_all(store, root_id, since), kind)
    if str(file) == "-":
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return Answer(None, lambda: ())
    count = 0
    with new_file(file) as partial, Path(partial).open("w", encoding="utf-8") as out:
        for line in lines:
            out.write(f"{line}\n")
            count += 1
    data: dict[str, Any] = {"path": str(file.resolve()), "events": count}
    return Answer(data, f"Wrote {count:,} events to {file.resolve()}.")
