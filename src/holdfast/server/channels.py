"""Followers of one feed: one reader for all of them, and a bounded queue for each."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..answers.problems import Refusal
from .frames import Frames

# Together with the cache of tokens, a revoked token can follow for at most 5 s more.
TICK_SECONDS = 3.0
FOLLOWERS_AT_ONCE = 16
# While requests are in progress, delivery of a change is postponed by up to this many pauses.
PAUSE_SECONDS, PATIENCE = 0.001, 50
# How long a client whose queue is full may go without reading anything.
STUCK_SECONDS = 60.0


class Lagging(Exception):
    """A follower reads too slowly; it must continue with a new request."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """How much may be queued for one follower."""

    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """A feed: its last place, the changes after a place, and those that are still to come."""

    name: str
    head: Callable[[], Awaitable[int]]
    page: Callable[[int], Awaitable[list[Frames[Any]]]]
    """Returns changes after a place, oldest first; an empty list at the end."""
    follow: Callable[[int], AsyncGenerator[Frames[Any], None]]


class Subscription:
    """One follower: older changes are read from the store, later ones arrive in its queue."""

    def __init__(self, channel: Channel, after: int | None) -> None:
        self._channel = channel
        self._after = after
        self._last = 0
        self._reached = 0
        self._is_behind = False
        self._page: deque[Frames[Any]] = deque()
        self._queue: deque[Frames[Any]] = deque()
        self._queued_bytes = 0
        self._has_more = asyncio.Event()
        self._is_ticked = False
        self._full_at: float | None = None
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_waiting = False
        self.deliver_now: Callable[[Frames[Any]], bool] | None = None
        """Delivers a change to a client that has received all before it, or returns False."""

    @property
    def place(self) -> str:
        """The place after which the next change comes."""
        return str(self._last)

    async def begin(self) -> None:
        """Begin to follow; an error that prevents following is raised here."""
        self._channel.subscriptions.add(self)
        await self._channel.start()
        self._task = asyncio.current_task()
        self._reached = self._channel.position
        self._last = self._reached if self._after is None else self._after
        if self._after is not None:
            self._is_behind = True
            await self._read_on()

    async def next(self) -> Frames[Any] | None:
        """Return the next change, or None at intervals, so that access can be checked again."""
        while self._is_behind and not self._page:
            await self._read_on()
        if self._page:
            return self._taken(self._page.popleft())
        while True:
            if self._is_ticked:
                self._is_ticked = False
                return None
            while self._queue:
                frames = self._queue.popleft()
                self._queued_bytes -= frames.size
                if int(frames.place) > self._last:
                    return self._taken(frames)
            if self._full_at is not None:
                raise Lagging
            if self._error is not None:
                raise self._error
            self._has_more.clear()
            self._is_waiting = True
            try:
                await self._has_more.wait()
            finally:
                self._is_waiting = False

    async def close(self) -> None:
        """Stop following."""
        self._channel.leave(self)

    def put(self, frames: Frames[Any]) -> None:
        """Queue a change; if the queue is full, the follower's next request reads it instead."""
        is_next = self._is_waiting and not self._has_more.is_set()
        if is_next and self.deliver_now is not None and self._deliver(frames):
            return
        if self._full_at is None and self._has_room(frames):
            self._queue.append(frames)
            self._queued_bytes += frames.size
        elif self._full_at is None:
            self._full_at = asyncio.get_running_loop().time()
        self._has_more.set()

    def _deliver(self, frames: Frames[Any]) -> bool:
        """Deliver a change to a client whose queue is empty."""
        assert self.deliver_now is not None
        if int(frames.place) > self._last:
            if not self.deliver_now(frames):
                return False
            self._taken(frames)
        return True

    def _has_room(self, frames: Frames[Any]) -> bool:
        """Whether a change can be queued; an empty queue takes one of any size."""
        most = self._channel.backlog
        is_short = len(self._queue) < most.events
        return not self._queue or (is_short and self._queued_bytes + frames.size <= most.bytes)

    def fail(self, error: Exception) -> None:
        """End the follower once it has received what is queued."""
        self._error = error
        self._has_more.set()

    def tick(self, now: float) -> None:
        """Let the follower check that it may continue; end one whose client has stopped reading."""
        self._is_ticked = True
        self._has_more.set()
        is_stuck = self._full_at is not None and now - self._full_at > STUCK_SECONDS
        if is_stuck and self._task is not None:
            self._task.cancel()

    async def _read_on(self) -> None:
        found = await self._channel.source.page(self._last)
        self._page.extend(found)
        self._is_behind = bool(found) and int(found[-1].place) < self._reached

    def _taken(self, frames: Frames[Any]) -> Frames[Any]:
        self._last = int(frames.place)
        return frames


class Channel:
    """The followers of one feed in this process, and the task that reads it for them."""

    def __init__(self, hub: Hub, source: Source, backlog: Backlog) -> None:
        self._hub = hub
        self.source = source
        self.backlog = backlog
        self.position = 0
        self.subscriptions: set[Subscription] = set()
        self._starting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to read, if this is the first follower."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._begin())
        await asyncio.shield(self._starting)

    def leave(self, subscription: Subscription) -> None:
        """Remove a follower; after the last one, reading ends."""
        self.subscriptions.discard(subscription)
        if not self.subscriptions:
            for task in (self._starting, self._reading):
                if task is not None:
                    task.cancel()
            self._hub.forget(self)

    async def _begin(self) -> None:
        self.position = await self.source.head()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self.source.follow(self.position)) as found:
                async for frames in found:
                    self.position = int(frames.place)
                    await self._hand_out(frames)
        except Exception as error:
            # New followers get a new channel, with a reader that works.
            self._hub.retire(self)
            for subscription in self.subscriptions:
                subscription.fail(error)

    async def _hand_out(self, frames: Frames[Any]) -> None:
        """Give a change to all followers in groups, so that requests are answered in between."""
        patience = PATIENCE
        followers = list(self.subscriptions)
        for start in range(0, len(followers), FOLLOWERS_AT_ONCE):
            await asyncio.sleep(0)
            while patience and self._hub.is_answering():
                patience -= 1
                await asyncio.sleep(PAUSE_SECONDS)
            for subscription in followers[start : start + FOLLOWERS_AT_ONCE]:
                subscription.put(frames)


class Hub:
    """The channels of one server."""

    def __init__(self, backlog: Backlog, is_answering: Callable[[], bool]) -> None:
        self._backlog = backlog
        self.is_answering = is_answering
        self._channels: dict[str, Channel] = {}
        self._followed: set[Channel] = set()
        self._ticking: asyncio.Task[None] | None = None

    def subscribe(self, source: Source, after: int | None) -> Subscription:
        """Return a new follower of a feed; all followers of a feed share one reader."""
        channel = self._channels.get(source.name)
        if channel is None:
            channel = self._channels[source.name] = Channel(self, source, self._backlog)
            self._followed.add(channel)
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        return Subscription(channel, after)

    def retire(self, channel: Channel) -> None:
        """Let no more followers join a channel."""
        if self._channels.get(channel.source.name) is channel:
            del self._channels[channel.source.name]

    def forget(self, channel: Channel) -> None:
        """Remove a channel that has no followers."""
        self.retire(channel)
        self._followed.discard(channel)
        if not self._followed and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def stop(self) -> None:
        """End all followers: the server is stopping."""
        for channel in self._followed:
            for subscription in channel.subscriptions:
                subscription.fail(Refusal("unavailable", "the server is stopping"))

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for channel in list(self._followed):
                for subscription in list(channel.subscriptions):
                    subscription.tick(loop.time())
