"""The shared state of a tree: all keys at any moment, the history of one, refused writes."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Annotated
from urllib.parse import quote

import msgspec

from ....answers.shapes import HistoryShape, version_shape
from ....checkpoints.diff import Diff, compare
from ....errors import KeyNotFound
from ....state.records import Entry
from ...messages import Call
from ...pages import next_cursor, place_of
from ..templates import api_path
from ..views import ROWS_MAX, ListQuery, PageQuery, Pages, View, page_size
from .session import session_view

routes = Pages()
CONFLICTS = 20
Sequence = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class StateQuery(PageQuery):
    """At which sequence, and keys that begin with what."""

    at: Sequence | None = None
    prefix: str = ""


@routes.page("/sessions/{id}/state", StateQuery)
async def state_page(call: Call) -> View:
    """Show the keys of the tree's shared state, now or at a sequence."""
    state, query = call.session.state, call.query
    newest = await state.version()
    at = None if query.at is None or query.at >= newest else query.at
    snapshot = await state.snapshot(at)
    keys = sorted(key for key in snapshot.document if key.startswith(query.prefix))
    shown = keys[:ROWS_MAX]
    events = await state.events(after=max(snapshot.version - 1, 0), limit=1)
    conflicts = await state.conflicts(limit=CONFLICTS)
    told = {
        key: {
            "value": snapshot.document[key],
            "version": snapshot.versions[key],
            "updated_by": snapshot.writers[key],
        }
        for key in shown
    }
    return await session_view(
        call,
        "state",
        data={
            "sequence": snapshot.version,
            "keys": told,
            "conflicts": [asdict(each) for each in conflicts],
        },
        path=api_path("/state", at_sequence=at),
        words=("state", "get", call.session.root_id),
        snapshot=snapshot,
        keys=shown,
        left_out=len(keys) - len(shown),
        newest=newest,
        event=events[0] if events and snapshot.version else None,
        is_past=at is not None,
        query=query,
        conflicts=conflicts,
    )


@routes.page("/sessions/{id}/state/{key}", ListQuery)
async def key_page(call: Call) -> View:
    """Show what each change of a key left, the newest first, and what differs between them."""
    key, limit, state = call.path["key"], page_size(call), call.session.state
    found = await state.history(key, before=place_of(call), limit=limit + 1)
    if not found:
        raise KeyNotFound(f"there is no key {key!r}", key=key)
    shown = found[:limit]
    cursor = next_cursor(shown, limit, "sequence") if len(found) > limit else None
    return await session_view(
        call,
        "key",
        data=HistoryShape([version_shape(each) for each in shown], cursor),
        path=f"/state/keys/{quote(key, safe='')}/history",
        words=("state", "history", call.session.root_id, key),
        key=key,
        changes=_changes(found)[:limit],
        next_cursor=cursor,
    )


def _changes(found: list[Entry]) -> list[tuple[Entry, Diff | None]]:
    """Return each entry with what differs from the one before it, as far as that is known."""
    changes: list[tuple[Entry, Diff | None]] = [
        (newer, compare(_document(older), _document(newer))) for newer, older in pairwise(found)
    ]
    return [*changes, (found[-1], None)]


def _document(entry: Entry) -> dict[str, object]:
    return {} if entry.is_deleted else {entry.key: entry.value}
