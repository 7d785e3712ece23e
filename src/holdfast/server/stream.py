"""Following over HTTP: server-sent events and WebSockets, with one sender for both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..answers.problems import Refusal
from ..errors import Compacted, HoldfastError
from .channels import TICK_SECONDS, Lagging, Subscription
from .frames import Frames
from .messages import Answer, encode
from .problems import answer_of

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
WriteNow = Callable[[bytes], bool]

COMMENT_SECONDS = 15.0
CLOSE_SECONDS = 5.0
RETRY_MS = 2_000
# Close codes of WebSockets: try again later, the server stops, and 4000 + the HTTP status.
TRY_AGAIN, STOPPING, OWN_CODES = 1013, 1012, 4000
# A control frame has up to 125 bytes, two of which are the code.
REASON_CHARACTERS_MAX = 123

SSE_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class Follower(Protocol):
    """Returns the changes of a feed, one after another."""

    @property
    def place(self) -> str:
        """The place after which the next change comes; "" if that is not known."""
        ...

    async def begin(self) -> None:
        """Begin to follow; an error that prevents following is raised here."""

    async def next(self) -> Frames[Any] | None:
        """Return the next change, or None at intervals, so that access can be checked again."""

    async def close(self) -> None:
        """Stop following."""


class Alone:
    """A follower with its own reader."""

    def __init__(self, frames: AsyncGenerator[Frames[Any], None], place: str) -> None:
        self._frames = frames
        self.place = place
        self._next: asyncio.Task[Frames[Any]] | None = None

    async def begin(self) -> None:
        """Do nothing: reading starts with the first change."""

    async def next(self) -> Frames[Any] | None:
        """Return the next change, or None if there was none for some time."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._frames))
        done, _ = await asyncio.wait({self._next}, timeout=TICK_SECONDS)
        if not done:
            return None
        found, self._next = self._next, None
        frames = found.result()
        self.place = frames.place
        return frames

    async def close(self) -> None:
        """Stop following."""
        if self._next is not None:
            self._next.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._next
        await self._frames.aclose()


@dataclass(slots=True)
class Following:
    """What a handler returns for a client that follows: the feed, and the messages it wants."""

    follower: Follower
    kinds: frozenset[str] | None = None
    values: bool = True
    check: Callable[[], Awaitable[None]] | None = None
    """Raises when the token no longer permits following."""
    last: str = ""
    """The place of the last change that was sent completely, or where following began."""

    async def begin(self) -> None:
        """Begin to follow; a client that is told nothing else knows where to continue."""
        await self.follower.begin()
        self.last = self.follower.place

    def wanted(self, frames: Frames[Any]) -> list[tuple[str, str]]:
        """Return the messages of a change that the client wants."""
        return frames.of(self.kinds, values=self.values)

    def delivered(self, write_now: WriteNow, frames: Frames[Any]) -> bool:
        """Deliver a change at once if possible, and return whether it was."""
        packed = frames.packed(self.kinds, values=self.values)
        is_done = not packed or write_now(packed)
        if is_done:
            self.last = frames.place
        return is_done


class Looking:
    """Checks at intervals that a client may still follow, even while there is much to send."""

    def __init__(self, check: Callable[[], Awaitable[None]] | None) -> None:
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._looked_at = self._loop.time()

    async def look(self, *, is_idle: bool) -> None:
        """Check, if it is time to or there is nothing else to do; raise if following must end."""
        now = self._loop.time()
        if self._check is not None and (is_idle or now - self._looked_at >= TICK_SECONDS):
            self._looked_at = now
            await self._check()


@dataclass(frozen=True, slots=True)
class Wire:
    """How changes, keep-alives and the end are sent."""

    deliver: Callable[[Frames[Any]], Awaitable[None]]
    pause: Callable[[], Awaitable[None]]
    ended: Callable[[Exception], Awaitable[None]]


async def start_events(send: Send, *, is_over: bool = False) -> None:
    """Send the headers of a stream; one that `is_over` has nothing else."""
    headers = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if is_over:
        await send({"type": "http.response.body", "body": b""})


async def send_events(following: Following, send: Send, receive: Receive) -> None:
    """Send changes as server-sent events until the client disconnects."""
    await following.begin()
    await start_events(send)

    async def body(text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def deliver(frames: Frames[Any]) -> None:
        parts = following.wanted(frames)
        # Only the last message of a change carries its place, so that a reconnect never splits one.
        ids = [""] * (len(parts) - 1) + [f"id: {frames.place}\n"]
        text = "".join(
            f"{id}event: {kind}\ndata: {data}\n\n"
            for id, (kind, data) in zip(ids, parts, strict=False)
        )
        if text:
            await body(text)

    async def ended(error: Exception) -> None:
        told = {"error": "lagging", "after": following.last}
        if not isinstance(error, Lagging):
            told = answer_of(error, "").body
        await body(f"event: ended\ndata: {encode(told).decode()}\n\n")

    begun = f"id: {following.last}\n" if following.last else ""
    await body(f"{begun}retry: {RETRY_MS}\n\n")
    wire = Wire(deliver, lambda: body(": \n\n"), ended)
    await until_gone(_pump(following, wire), _disconnected(receive))
    with contextlib.suppress(Exception):
        await send({"type": "http.response.body", "body": b""})


async def send_frames(
    following: Following, send: Send, receive: Receive, *, write_now: WriteNow | None = None
) -> None:
    """Send changes as WebSocket messages until the client disconnects.

    With `write_now`, a client that has read everything so far gets the frames of a change, which
    are built once for all followers, without waking a task of its own.
    """
    await send({"type": "websocket.accept"})

    async def deliver(frames: Frames[Any]) -> None:
        for _, text in following.wanted(frames):
            await send({"type": "websocket.send", "text": text})

    async def ended(error: Exception) -> None:
        code, reason = closing(error, following.last)
        await send({"type": "websocket.close", "code": code, "reason": reason})

    async def pause() -> None:
        """Do nothing: a WebSocket has its own pings."""

    try:
        await following.begin()
    except HoldfastError as error:
        await ended(error)
        return
    if write_now is not None and isinstance(following.follower, Subscription):
        following.follower.deliver_now = partial(following.delivered, write_now)
    await until_gone(_pump(following, Wire(deliver, pause, ended)), _disconnected(receive))


async def refuse_websocket(answer: Answer, scope: MutableMapping[str, Any], send: Send) -> None:
    """Respond to a handshake with a problem."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": OWN_CODES + answer.status})
        return
    headers = [(b"content-type", answer.content_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    start = {"status": answer.status, "headers": headers}
    await send({"type": "websocket.http.response.start", **start})
    await send({"type": "websocket.http.response.body", "body": answer.content()})


async def _pump(following: Following, wire: Wire) -> None:
    """Send changes until following ends."""
    loop = asyncio.get_running_loop()
    spoken = loop.time()
    looking = Looking(following.check)
    try:
        while True:
            frames = await following.follower.next()
            await looking.look(is_idle=frames is None)
            if frames is not None:
                await wire.deliver(frames)
                following.last, spoken = frames.place, loop.time()
            elif loop.time() - spoken >= COMMENT_SECONDS:
                spoken = loop.time()
                await wire.pause()
    except (Lagging, Refusal, HoldfastError) as error:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await wire.ended(error)


async def _disconnected(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] in {"http.disconnect", "websocket.disconnect"}:
            return


async def until_gone(sending: Awaitable[None], going: Awaitable[None]) -> None:
    """Send until everything is sent or the client has gone."""
    tasks = {asyncio.ensure_future(sending), asyncio.ensure_future(going)}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        # An OSError means that the client disconnected while something was being sent.
        if not task.cancelled() and not isinstance(task.exception(), OSError):
            task.result()


def closing(error: Exception, last: str) -> tuple[int, str]:
    """Return the code and reason to close a WebSocket with; the reason says where to continue.

    A cursor that is too long for a reason is that of the last event that was sent.
    """
    reason = f"after={last}"
    if len(reason) > REASON_CHARACTERS_MAX:
        reason = "continue after the last event"
    if isinstance(error, Lagging):
        return TRY_AGAIN, reason
    if isinstance(error, Refusal) and error.code == "unavailable":
        return STOPPING, reason
    status = answer_of(error, "").status
    if isinstance(error, Compacted):
        reason = f"oldest={error.fields.get('oldest')}"
    return OWN_CODES + status, reason
