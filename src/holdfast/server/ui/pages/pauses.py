"""What sessions wait for: peers, times, and people who approve or reject."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec

from ....answers.shapes import PAUSE, PEER_CALL
from ....peers import Pause, PeerCall
from ....peers.records import PauseReason, PauseState
from ...messages import Answer, Call
from ...pages import next_cursor, place_of
from ...routes.peers import PausesShape, reached_pause
from ..forms import Around, Form
from ..templates import Commands, api_path
from ..views import ListQuery, PageQuery, Pages, View, page_size, see_other
from .session import session_view

routes = Pages()
SHOWN = 100
NOTE_CHARACTERS_MAX = 1_000
Place = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class PausesQuery(ListQuery):
    """Which pauses to list."""

    state: PauseState | Literal["any"] = "waiting"
    reason: PauseReason | Literal[""] = ""
    agent: str = ""


class PeersQuery(PageQuery):
    """The call and the pause before which to continue the lists."""

    calls_before: Place | None = None
    pauses_before: Place | None = None


class DecideForm(Form):
    """The decision, and its reason."""

    verdict: Literal["approve", "reject"]
    note: Annotated[str, msgspec.Meta(max_length=NOTE_CHARACTERS_MAX)] = ""


@routes.page("/pauses", PausesQuery, is_store_wide=True)
async def pauses_page(call: Call) -> View:
    """Show what sessions wait for, longest wait first."""
    query, limit = call.query, page_size(call)
    asked: dict[str, Any] = {
        "state": None if query.state == "any" else query.state,
        "reason": query.reason or None,
        "agent": query.agent or None,
    }
    found = await call.store.pauses(**asked, after=place_of(call) or 0, limit=limit)
    cursor = next_cursor(found, limit, "number")
    return View(
        template="pauses.html",
        title="Pauses",
        data=PausesShape(list(map(PAUSE, found)), cursor),
        commands=Commands.of(
            api_path("/pauses", **asked),
            "peers",
            "pauses",
            **{**asked, "state": None if query.state == "waiting" else query.state},
        ),
        given={"pauses": found, "query": query},
        next_cursor=cursor,
        live=("live",),
    )


@routes.page("/pauses/{id}")
async def pause_page(call: Call) -> View:
    """Show a pause with its answers so far; one that waits for a person can be decided."""
    pause = await reached_pause(call)
    session = await call.store.find_session(pause.session_id)
    calls = [] if pause.reason != "peers" else await session.asks(last=SHOWN)
    id = quote(pause.id, safe="")
    words = ("approvals", "show", pause.id) if pause.reason == "approval" else ("peers", "list")
    return View(
        template="pause.html",
        title=f"{pause.agent or pause.session_id} - pause {pause.number}",
        data={"pause": PAUSE(pause), "asks": list(map(PEER_CALL, calls))},
        commands=Commands.of(f"/pauses/{id}", *words),
        given={"pause": pause, "calls": calls},
        live=("sessions", pause.session_id, "live"),
    )


PAUSE_PAGE = Around(pause_page, lambda _: PageQuery())


@routes.form("/pauses/{id}/decide", DecideForm, "approve", on=PAUSE_PAGE, is_store_wide=True)
async def decide_form(call: Call) -> Answer:
    """Approve or reject what a session waits for; who decided, and why, is recorded."""
    pause, note = await reached_pause(call), call.body.note
    store = call.acting_store
    decide = store.approve if call.body.verdict == "approve" else store.reject
    await decide(pause.id, by=call.token.name, note=note or None)
    return see_other(f"{call.context.options.base_path}/ui/pauses/{quote(pause.id, safe='')}")


@routes.page("/sessions/{id}/peers", PeersQuery)
async def peers_page(call: Call) -> View:
    """Show which agents a session asked, and what it waits or waited for."""
    query, session = call.query, call.session
    calls: list[PeerCall] = await session.asks(last=SHOWN + 1, before=query.calls_before)
    pauses: list[Pause] = await session.pauses(last=SHOWN + 1, before=query.pauses_before)
    shown_calls, shown_pauses = calls[-SHOWN:], pauses[: -SHOWN - 1 : -1]
    earlier = {
        "calls_before": shown_calls[0].number if len(calls) > SHOWN else None,
        "pauses_before": shown_pauses[-1].generation if len(pauses) > SHOWN else None,
    }
    return await session_view(
        call,
        "peers",
        data={
            "pauses": list(map(PAUSE, reversed(shown_pauses))),
            "asks": list(map(PEER_CALL, shown_calls)),
            "earlier": earlier,
        },
        path="/asks",
        words=("peers", "list"),
        pauses=shown_pauses,
        calls=shown_calls,
        earlier=earlier,
        query=query,
    )
