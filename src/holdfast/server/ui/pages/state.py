"""The shared state of a tree: all keys at any moment, the history of one, refused writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from ....answers.shapes import HistoryShape, version_shape
from ....checkpoints.diff import Diff, compare
from ....errors import KeyNotFound, VersionConflict
from ....state.records import Entry
from ...messages import Answer, Call
from ...pages import moment_of, next_cursor, place_of
from ..blame import blame
from ..forms import Around, Form, json_field
from ..templates import Commands, api_path, pretty
from ..views import (
    ListQuery,
    PageQuery,
    Pages,
    View,
    page_size,
    see_other,
    shown,
    wants_page,
)
from .session import session_view

routes = Pages()
CONFLICTS = 20
EDITED_CHARACTERS = 64_000
REASON_CHARACTERS_MAX = 1_000
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=REASON_CHARACTERS_MAX)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class StateQuery(ListQuery):
    """The sequence to show, and the prefix of keys."""

    at: Sequence | None = None
    prefix: str = ""


class KeyDiffQuery(PageQuery):
    """The two sequences to compare; the second is by default the newest."""

    a: Sequence
    b: Sequence | None = None


class SetForm(Form):
    """A value as JSON, a reason, and the version that the page showed; 0 for a missing key."""

    subject = "value"

    value: Annotated[str, msgspec.Meta(min_length=1)]
    expected_version: Sequence
    reason: Reason


class RestoreForm(Form):
    """The sequence that had the value, a reason, and the version that the page showed."""

    sequence: Sequence
    expected_version: Sequence
    reason: Reason


@routes.page("/sessions/{id}/state", StateQuery)
async def state_page(call: Call) -> View:
    """Show the keys of the tree's shared state, now or at a sequence."""
    state, query, limit = call.session.state, call.query, page_size(call)
    newest = await state.version()
    at = None if query.at is None or query.at >= newest else query.at
    sequence = newest if at is None else at
    # Every page is live, so that the moment of the page before does not matter.
    _, after = moment_of(call)
    span = {"prefix": query.prefix, "after": after, "limit": limit}
    entries = await state.entries(**span, values=True, at_sequence=at)
    events = await state.events(after=max(sequence - 1, 0), limit=1)
    conflicts = await state.conflicts(limit=CONFLICTS)
    told = {
        each.key: {"value": each.value, "version": each.version, "updated_by": each.updated_by}
        for each in entries
    }
    cursor = next_cursor(entries, limit, "key", sequence)
    view = await session_view(
        call,
        "state",
        data={
            "sequence": sequence,
            "keys": told,
            "conflicts": [asdict(each) for each in conflicts],
            "next_cursor": cursor,
        },
        words=("state", "get"),
        entries=entries,
        sequence=sequence,
        newest=newest,
        event=events[0] if events and sequence else None,
        is_past=at is not None,
        query=query,
        conflicts=conflicts,
        next_cursor=cursor,
    )
    asked = {"at": at, "prefix": query.prefix or None}
    path = _read_by(call.session.id, at, query.prefix)
    view.commands = Commands.of(path, "state", "get", call.session.root_id, **asked)
    return view


def _read_by(id: str, at: int | None, prefix: str) -> str:
    """Return the API's address for what the page shows, or else the page's own as JSON."""
    of_session = f"/sessions/{quote(id, safe='')}/state"
    if not prefix:
        return api_path(of_session, at_sequence=at)
    if at is None:
        return api_path(f"{of_session}/keys", prefix=prefix, include="value")
    return api_path(f"/ui{of_session}", at=at, prefix=prefix, format="json")


@routes.page("/sessions/{id}/state/{key}", ListQuery)
async def key_page(call: Call) -> View:
    """Show a key: its value, who wrote each part of it, and what each change changed."""
    key, limit, state = call.path["key"], page_size(call), call.session.state
    found = await state.history(key, before=place_of(call), limit=limit + 1)
    if not found:
        raise KeyNotFound(f"there is no key {key!r}", key=key)
    page = found[:limit]
    cursor = next_cursor(page, limit, "sequence") if len(found) > limit else None
    parts, is_all = blame(found, is_whole=cursor is None)
    return await session_view(
        call,
        "key",
        data=HistoryShape([version_shape(each) for each in page], cursor),
        path=f"/state/keys/{quote(key, safe='')}/history",
        words=("state", "history", call.session.root_id, key),
        key=key,
        # On the pages of older changes the newest value is not known.
        entry=found[0] if call.query.cursor is None else None,
        text="" if found[0].is_deleted else _text(found[0].value),
        parts=parts,
        is_all=is_all,
        changes=_changes(found)[:limit],
        next_cursor=cursor,
    )


@routes.page("/sessions/{id}/state/{key}/diff", KeyDiffQuery)
async def key_diff_page(call: Call) -> View:
    """Show what differs between a key at two sequences; the first can be set again."""
    key, state = call.path["key"], call.session.state
    newest = (await state.history(key, limit=1) or [None])[0]
    if newest is None:
        raise KeyNotFound(f"there is no key {key!r}", key=key)
    a, b = [await _entry(call, at) for at in (call.query.a, call.query.b or newest.sequence)]
    diff = compare(_document(a, key), _document(b, key))
    return await session_view(
        call,
        "key_diff",
        data={
            "a": None if a is None else version_shape(a),
            "b": None if b is None else version_shape(b),
            "changes": diff.to_dict()["channels"],
        },
        path=f"/state/keys/{quote(key, safe='')}/history",
        words=("state", "history", call.session.root_id, key),
        key=key,
        a=a,
        b=b,
        ends=(call.query.a, call.query.b or newest.sequence),
        diff=diff,
        newest=newest,
    )


@routes.form("/sessions/{id}/state/{key}/set", SetForm, on=Around(key_page, lambda _: ListQuery()))
async def set_form(call: Call) -> Answer:
    """Set a key to what a person has typed, if it is still at the version that the page showed."""
    return await _set(call, json_field(call, call.body.value, "value"))


def _compared(sent: Mapping[str, str]) -> KeyDiffQuery:
    return KeyDiffQuery(a=int(sent["sequence"]))


@routes.form(
    "/sessions/{id}/state/{key}/restore", RestoreForm, on=Around(key_diff_page, _compared, "diff")
)
async def restore_form(call: Call) -> Answer:
    """Set a key to what it was at a sequence, if it is still at the version that was shown."""
    entry = await _entry(call, call.body.sequence)
    if entry is None:
        raise KeyNotFound(f"the key did not exist at sequence {call.body.sequence}", key="")
    return await _set(call, entry.value)


async def _set(call: Call, value: Any) -> Answer:
    """Set the key of the path; if another writer was first, the page shows both values."""
    key, reason = call.path["key"], call.body.reason
    given = {"if_version": call.body.expected_version, "reason": reason}
    try:
        await call.acting.state.set(key, value, **given)
    except VersionConflict:
        if not wants_page(call.headers):
            raise
        return await shown(call, await _conflict(call, key, value, reason))
    return see_other(_place(call))


async def _conflict(call: Call, key: str, value: Any, reason: str) -> View:
    """Return the page that shows the current value and the intended one, to be sent again."""
    current = await call.session.state.entry(key)
    view = await session_view(
        call,
        "key_conflict",
        data=None,
        words=("state", "history", call.session.root_id, key),
        status=409,
        key=key,
        current=current,
        expected=call.body.expected_version,
        text=_text(value),
        reason=reason,
        diff=compare(_document(current, key), {key: value}),
    )
    # The request's own address is that of a form.
    view.place, view.live, view.commands = _place(call), None, None
    return view


def _place(call: Call) -> str:
    """Return the address of the key's page."""
    path = "/".join(quote(part, safe="") for part in (call.session.id, "state", call.path["key"]))
    return f"{call.context.options.base_path}/ui/sessions/{path}"


async def _entry(call: Call, at: int) -> Entry | None:
    entry: Entry | None = await call.session.state.entry(call.path["key"], at_sequence=at)
    return entry


def _text(value: Any) -> str | None:
    """Return a value as it can be edited; None if it is too large for a page."""
    text = pretty(value, EDITED_CHARACTERS)
    return None if len(text) > EDITED_CHARACTERS else text


def _changes(found: list[Entry]) -> list[tuple[Entry, Diff | None]]:
    """Return each entry with what differs from the one before it, as far as that is known."""
    changes: list[tuple[Entry, Diff | None]] = [
        (newer, compare(_document(older, older.key), _document(newer, newer.key)))
        for newer, older in pairwise(found)
    ]
    return [*changes, (found[-1], None)]


def _document(entry: Entry | None, key: str) -> dict[str, object]:
    return {} if entry is None or entry.is_deleted else {key: entry.value}
