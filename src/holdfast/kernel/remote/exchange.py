"""One call of a client: how it is sent and retried, written once for sync and async.

Writes are numbered in lanes. A lane has one write in progress; the server stores its last outcome
in the write's own transaction. So a write whose response was lost is sent again under its number,
and gets the stored outcome instead of being run a second time.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...arguments import refuse_surrogates
from ...errors import (
    CommitUnknown,
    Forbidden,
    HoldfastError,
    IdempotencyKeyReused,
    InvalidArgument,
    LimitExceeded,
    RequestOutOfOrder,
    StoreReadOnly,
    StoreUnavailable,
)
from ...wire import LANE, MEDIA_TYPE, NUMBER, Wire
from ..backoff import Backoff
from ..driver import Point, Settings
from ..operation import Call, Handle

IDS_MIN = 4
PAUSE_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0
PROBLEM = "application/problem+json"
# The statuses of our server, or of a proxy in front of it, while it is unavailable.
AWAY = frozenset({429, 502, 503, 504})
# After these errors the number that a lane is at is unknown or has changed.
LANE_LOST = (CommitUnknown, RequestOutOfOrder, IdempotencyKeyReused)


@dataclass(slots=True)
class Lane:
    """A series of numbered writes; one is in progress at a time."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    last: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the server."""

    path: str
    body: bytes
    headers: dict[str, str]
    seconds: float
    """How long to wait for the response."""


@dataclass(frozen=True, slots=True)
class Response:
    """The server's response."""

    status: int
    media_type: str
    body: bytes
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next attempt."""

    seconds: float


Step: TypeAlias = Request | Pause
Exchange: TypeAlias = Generator[Step, Any, Any]


class NotSent(Exception):
    """The server could not be reached, so it has not seen the request."""


class AnswerLost(Exception):
    """The request was sent, but no complete response arrived: the server may have run it."""


class Lanes:
    """The idle lanes of one store."""

    def __init__(self) -> None:
        self._free: list[Lane] = []

    def take(self) -> Lane:
        """Return a free lane, or a new one."""
        try:
            return self._free.pop()
        except IndexError:
            return Lane()

    def give(self, lane: Lane) -> None:
        """Take back a lane whose last write got its response."""
        self._free.append(lane)


@dataclass(frozen=True, slots=True)
class Client:
    """What the calls of one store share."""

    url: str
    settings: Settings
    limit_seconds: float
    """How long a call waits for a server that is unreachable or does not respond."""
    lanes: Lanes = field(default_factory=Lanes)


def exchange(client: Client, call: Call[Any]) -> Exchange:
    """Send a call until it gets a response, and return its result or raise its error."""
    if call.operation.mode == "write" and client.settings.mode == "read":
        raise StoreReadOnly(operation=call.name)
    try:
        return (yield from _exchange(client, call, client.lanes))
    except RequestOutOfOrder:
        # The server has removed the lane, because nothing was written on it for a day.
        return (yield from _exchange(client, call, Lanes()))


def _exchange(client: Client, call: Call[Any], lanes: Lanes) -> Exchange:
    wire = Wire(getattr(call.instance, "runtime", None))
    headers, lane = {}, None
    if call.operation.mode == "write":
        # The client chooses ids, so it knows them even if it is interrupted before the response.
        most = max(
            (len(each) for each in call.arguments if isinstance(each, list | tuple)), default=0
        )
        new_id = client.settings.services.new_id
        call.ids += [new_id() for _ in range(len(call.ids), IDS_MIN + most)]
    body = _encoded(wire, call)
    if call.operation.mode == "write":
        # A lane that an interrupt kept from being given back is never used again.
        lane = lanes.take()
        headers = {LANE: lane.id, NUMBER: str(lane.last + 1)}
    response = yield from _answer(client, call.name, body, headers, lane)
    if response.media_type != MEDIA_TYPE:
        if lane is not None and response.status >= 500:
            problem = f"the server at {client.url} responded with status {response.status}"
            raise _unknown(problem, lane)
        if lane is not None:
            lanes.give(lane)
        raise _refused(client.url, response)
    answer = wire.decode(response.body)
    if lane is not None and not isinstance(answer, LANE_LOST):
        lane.last += not isinstance(answer, BaseException)
        lanes.give(lane)
    if isinstance(answer, BaseException):
        raise answer
    result, row = answer
    if isinstance(call.instance, Handle):
        call.instance._take_answer(result, row)
    return result


def _encoded(wire: Wire, call: Call[Any]) -> bytes:
    """Return a call as bytes, or name the argument that no encoding has."""
    try:
        return wire.encode([call.instance, list(call.arguments), dict(call.keywords), call.ids])
    except UnicodeEncodeError as error:
        _self, *names = inspect.signature(call.operation.function).parameters
        for name, value in [*zip(names, call.arguments, strict=False), *call.keywords.items()]:
            refuse_surrogates(value, name)
        raise InvalidArgument(f"{call.name} was given text that is not Unicode") from error


def _answer(
    client: Client, name: str, body: bytes, headers: dict[str, str], lane: Lane | None
) -> Generator[Step, Any, Response]:
    ends_at = time.monotonic() + client.limit_seconds
    path, probe = f"/call/{name}", client.settings.hooks.probe or (lambda point: None)
    backoff, is_sent, why = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX), False, ""
    while (left := ends_at - time.monotonic()) > 0:
        least = 0.0
        probe(Point("request", "before", name, path))
        try:
            response: Response = yield Request(path, body, headers, left)
        except NotSent as error:
            why = str(error)
        except AnswerLost as error:
            is_sent, why = True, str(error)
        else:
            probe(Point("request", "after", name, path))
            if response.status not in AWAY or response.media_type == MEDIA_TYPE:
                return response
            # Our own server refuses before it runs anything; a proxy may have forwarded the call.
            is_sent = is_sent or response.media_type != PROBLEM
            why = f"it responds with status {response.status}"
            least = response.retry_after_seconds or 0.0
        yield Pause(min(max(least, backoff.pause_seconds()), max(0.0, left)))
    problem = (
        f"the server at {client.url} cannot be reached or does not respond: {why or 'no time left'}"
    )
    if lane is None or not is_sent:
        raise StoreUnavailable(problem)
    raise _unknown(problem, lane)


def _unknown(problem: str, lane: Lane) -> CommitUnknown:
    """Return the error for a write that may have been made; its lane is not used again."""
    return CommitUnknown(
        f"{problem}; call store.settle(id) later", id=f"lane-{lane.id}:{lane.last + 1}"
    )


def _refused(url: str, response: Response) -> HoldfastError:
    """Return the error for a response that does not come from an operation."""
    if response.status == 401:
        return Forbidden(
            f"the server at {url} does not accept this token; set HOLDFAST_TOKEN, or pass "
            "token= in Python"
        )
    if response.status == 413:
        return LimitExceeded("the call is larger than the server accepts; nothing was written")
    if response.status in {403, 404, 421}:
        return Forbidden(f"the server at {url} refused this call with status {response.status}")
    return StoreUnavailable(f"the server at {url} responded with status {response.status}")
