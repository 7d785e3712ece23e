"""Pages of lists: opaque cursors, and the link to the next page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec

from ..answers.problems import Refusal
from .messages import Answer, Call

PAGE = 100

Limit = Annotated[int, msgspec.Meta(ge=1, description="Return at most this many; capped at 1,000.")]
Cursor = Annotated[str, msgspec.Meta(description="`next_cursor` of the previous page.")]


class PageQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which page of a list to return."""

    limit: Limit = PAGE
    cursor: Cursor | None = None


def limit_of(call: Call) -> int:
    """Return the number of items on a page."""
    wanted: int = call.query.limit
    return min(wanted, call.context.options.limits.page)


def place_of(call: Call) -> int | None:
    """Return the number that the request's cursor encodes."""
    cursor = call.query.cursor
    if cursor is None:
        return None
    try:
        return int(base64.urlsafe_b64decode(cursor.encode("ascii")).decode("ascii"))
    except (ValueError, binascii.Error):
        raise _foreign() from None


def name_of(call: Call) -> str | None:
    """Return the name that the request's cursor encodes."""
    cursor = call.query.cursor
    if cursor is None:
        return None
    try:
        return base64.urlsafe_b64decode(cursor.encode()).decode()
    except ValueError:
        raise _foreign() from None


def moment_of(call: Call) -> tuple[int | None, str | None]:
    """Return the sequence and the name that the request's cursor encodes."""
    pinned = name_of(call)
    if pinned is None:
        return None, None
    sequence, _, name = pinned.partition(" ")
    if not sequence.isascii() or not sequence.isdecimal() or len(sequence) > 15 or not name:
        raise _foreign()
    return int(sequence), name


def _foreign() -> Refusal:
    return Refusal("invalid_request", "the cursor does not belong to this list", pointer="cursor")


def next_cursor(found: list[Any], limit: int, number: str, at: int | None = None) -> str | None:
    """Return the cursor after a full page; a short one is the last. It pins the sequence `at`."""
    if len(found) < limit:
        return None
    place = str(getattr(found[-1], number))
    pinned = place if at is None else f"{at} {place}"
    return base64.urlsafe_b64encode(pinned.encode()).decode()


def page(
    call: Call,
    found: list[Any],
    limit: int,
    number: str,
    shape: Callable[[list[Any], str | None], Any],
    shown: Callable[[Any], Any],
) -> Answer:
    """Return a page of a list in its shape, with each of what was found as it is shown."""
    cursor = next_cursor(found, limit, number)
    return paged(call, shape(list(map(shown, found)), cursor), cursor)


def paged(call: Call, body: Any, cursor: str | None) -> Answer:
    """Return a page with the link to the next one."""
    headers = {}
    if cursor is not None:
        given: Mapping[str, Any] = msgspec.to_builtins(call.query)
        kept = {name: value for name, value in given.items() if value is not None}
        query = urlencode({**kept, "cursor": cursor})
        headers["link"] = f'<{call.instance}?{query}>; rel="next"'
    return Answer(200, body, headers)
