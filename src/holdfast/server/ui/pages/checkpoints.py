"""Versions of a session: their branches, one of them, two compared; fork and rewind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import msgspec

from ....answers.problems import Refusal
from ....answers.shapes import CHECKPOINT, EFFECT, LOADED
from ....arguments import NAME_CHARACTERS_MAX
from ....records import Checkpoint
from ...messages import Answer, Call
from ...pages import next_cursor, place_of
from ...routes.checkpoints import CheckpointsShape, DiffShape
from ..forms import Around, Form
from ..views import ROWS_MAX, ListQuery, PageQuery, Pages, View, page_size, see_other
from .session import session_view

routes = Pages()
ITEMS = 50
REWINDS_MAX = 1_000
Number = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class DiffQuery(PageQuery):
    """The two versions to compare."""

    a: Number
    b: Number


class ForkForm(Form):
    """The name of the fork."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] = ""


class RewindForm(Form):
    """The version that the page was rendered for, and the reader's confirmation."""

    expected_version: Number
    agreed: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A version, and how it is drawn beside its neighbours."""

    checkpoint: Checkpoint
    is_on_path: bool
    rewound_to: int | None
    goes_up: bool
    goes_down: bool
    joins: bool
    """Whether an abandoned branch begins here."""


@routes.page("/sessions/{id}/checkpoints", ListQuery)
async def checkpoints_page(call: Call) -> View:
    """Show the versions of a session, newest first, with the branches that rewinds left behind."""
    limit, session = page_size(call), call.session
    found = await session.history(before=place_of(call), limit=limit)
    transitions = await session.history(kind="state_transition", limit=REWINDS_MAX)
    cursor = next_cursor(found, limit, "version")
    return await session_view(
        call,
        "checkpoints",
        data=CheckpointsShape(list(map(CHECKPOINT, found)), cursor),
        path="/checkpoints",
        words=("checkpoints", "list", session.id),
        rows=_drawn(found, transitions),
        next_cursor=cursor,
    )


def rewound_to(checkpoint: Checkpoint) -> int | None:
    """Return the version that a rewind went back to; None for any other version."""
    data = checkpoint.data
    version = data.get("rewound_to") if isinstance(data, dict) else None
    return version if checkpoint.kind == "state_transition" and isinstance(version, int) else None


def _drawn(found: list[Checkpoint], transitions: list[Checkpoint]) -> list[Row]:
    """Return the rows of a page; which versions are on the path follows from the rewinds."""
    rewinds = {each.version: back for each in transitions if (back := rewound_to(each)) is not None}
    spans = _path(rewinds)

    def on_path(version: int) -> bool:
        return any(low <= version <= high for low, high in spans)

    rows = []
    for each in found:
        version, back = each.version, rewinds.get(each.version)
        is_on_path = on_path(version)
        is_next_left = not on_path(version + 1) and version + 1 not in rewinds
        rows.append(
            Row(
                each,
                is_on_path,
                back,
                goes_up=is_next_left and not is_on_path,
                goes_down=back is None,
                joins=is_on_path and is_next_left,
            )
        )
    return rows


def _path(rewinds: dict[int, int]) -> list[tuple[int, int]]:
    """Return the spans of versions that lead to the newest one, newest first."""
    spans, high = [], 2**31
    while high > 0:
        low = max((each for each in rewinds if each <= high), default=0)
        spans.append((low, high))
        high = rewinds.get(low, 0)
    return spans


@routes.page("/sessions/{id}/checkpoints/{version}")
async def checkpoint_page(call: Call) -> View:
    """Show one version with its channels; it can be forked and rewound to."""
    version = _number(call.path["version"])
    loaded = await call.session.at(version, last=ITEMS)
    back = rewound_to(loaded)
    standing = await call.session.standing(version if back is None else back)
    return await session_view(
        call,
        "version",
        data={"checkpoint": LOADED(loaded), "standing": list(map(EFFECT, standing))},
        path=f"/checkpoints/{version}",
        words=("checkpoints", "show", call.session.id, str(version)),
        checkpoint=loaded,
        rewound_to=back,
        standing=standing,
        undoable={name for name, each in call.context.options.tools.items() if each.undo},
    )


@routes.page("/sessions/{id}/diff", DiffQuery)
async def diff_page(call: Call) -> View:
    """Show what differs between two versions."""
    a, b = call.query.a, call.query.b
    found = await call.session.diff(a, b)
    return await session_view(
        call,
        "diff",
        data=DiffShape(found.to_dict()["channels"]),
        path=f"/diff?a={a}&b={b}",
        words=("checkpoints", "diff", call.session.id, str(a), str(b)),
        diff=found,
        shown=ITEMS,
        most=ROWS_MAX,
        a=a,
        b=b,
    )


VERSION_PAGE = Around(checkpoint_page, lambda _: PageQuery())


@routes.form("/sessions/{id}/checkpoints/{version}/fork", ForkForm, on=VERSION_PAGE)
async def fork_form(call: Call) -> Answer:
    """Start a session that shares the history up to a version."""
    if call.token.root_id == call.session.id:
        raise Refusal("forbidden", "a fork of a root is a new tree, which the token does not reach")
    version = _number(call.path["version"])
    forked = await call.acting.fork(version, name=call.body.name or None)
    return see_other(_page(call, forked.id))


@routes.form("/sessions/{id}/checkpoints/{version}/rewind", RewindForm, on=VERSION_PAGE)
async def rewind_form(call: Call) -> Answer:
    """Continue from an older version; the rewind's page lists the effects that were not undone."""
    if call.body.agreed != "yes":
        raise Refusal("invalid_request", "tick the box to confirm the rewind", pointer="agreed")
    version, info = _number(call.path["version"]), await call.session.info()
    if info.version != call.body.expected_version:
        raise Refusal(
            "version_conflict",
            f"the session is at version {info.version}, and the page was loaded at version "
            f"{call.body.expected_version}; look at it again",
        )
    tools = list(call.context.options.tools.values())
    rewound = await call.acting.rewind(version, tools=tools)
    return see_other(_page(call, call.session.id, "checkpoints", str(rewound.version)))


def _page(call: Call, *parts: str) -> str:
    path = "/".join(quote(part, safe="") for part in parts)
    return f"{call.context.options.base_path}/ui/sessions/{path}"


def _number(given: str) -> int:
    if given.isascii() and given.isdecimal() and len(given) < 11 and 0 < int(given) < 2**31:
        return int(given)
    raise Refusal("checkpoint_not_found", f"there is no version {given!r}")
