"""Calls and wake-ups of our own client; they are not part of the documented interface."""

from __future__ import annotations

from ...answers.problems import Refusal
from ...wire import LANE, MEDIA_TYPE, NUMBER, RINGS_PATH
from ..calls import Sent
from ..endpoints import Endpoints
from ..messages import Answer, Call
from ..rings import Ringing

routes = Endpoints()


@routes.add("POST", "/call/{operation}", "read", body=bytes, media=MEDIA_TYPE, is_hidden=True)
async def call_operation(call: Call) -> Answer:
    """Run an operation by its name."""
    number = call.headers.get(NUMBER.lower()) or "0"
    if not number.isascii() or not number.isdigit() or len(number) > 18:
        raise Refusal("invalid_request", f"{NUMBER} must be a whole number")
    lane = call.headers.get(LANE.lower())
    sent = Sent(call.path["operation"], call.raw_body, lane, int(number))
    status, body = await call.context.calls.answer(call.token, sent)
    return Answer(status, body, content_type=MEDIA_TYPE)


@routes.add("GET", RINGS_PATH, "read", is_hidden=True, is_followed=True)
async def listen(call: Call) -> Ringing:
    """Report over a WebSocket which topics are signalled."""
    if not call.is_websocket:
        raise Refusal("not_found", "this route accepts only WebSockets")
    return Ringing(call.store.runtime.signals, call.token.root_id)
