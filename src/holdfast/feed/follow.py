"""Following a feed: each event once and in order, as it comes.

Rings are hints; with polling alone the same events come, later. Followers of one tree in one
process share what any of them has read, so that a hundred of them cost one reader.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from ..kernel.flow import Give, Stream, Wait, perform
from ..kernel.operation import Handle, Op, PerStore, Runtime, query
from ..records import Event
from .events import read_events

POLL_SECONDS = 0.25
POLL_SECONDS_MAX = 3_600.0
EVENTS_PER_LOOK = 200
EVENTS_REMEMBERED = 1_000
TREES_REMEMBERED = 100
# Another follower that began to read has this long before it is taken for dead.
READ_SECONDS_MAX = 1.0


def topic_of(root_id: str) -> str:
    """Return what is rung when something happens in a tree."""
    return f"feed {root_id}"


class Tail:
    """The newest events of a tree that a follower in this process has read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=EVENTS_REMEMBERED)
        self._ring = -1
        self._read_at = 0.0
        self._reading_since = 0.0

    def after(self, position: int) -> list[Event] | None:
        """Return remembered events that follow a position without a hole; None if unknown."""
        with self._lock:
            if not self._events or self._events[0].position > position + 1:
                return None
            return [event for event in self._events if event.position > position]

    def is_read(self, ring: int, poll_seconds: float) -> bool:
        """Whether somebody has read to the end since a ring, and not too long ago."""
        with self._lock:
            return self._ring >= ring and time.monotonic() - self._read_at < poll_seconds

    def may_read(self) -> bool:
        """Whether nobody else is reading; from now on, this one is."""
        now = time.monotonic()
        with self._lock:
            is_free = now - self._reading_since > READ_SECONDS_MAX
            if is_free:
                self._reading_since = now
            return is_free

    def put(self, events: Sequence[Event], ring: int, *, is_end: bool) -> None:
        """Remember what was read after a ring; with less than was asked for, that is the end."""
        with self._lock:
            self._reading_since = 0.0
            if is_end:
                self._ring, self._read_at = max(self._ring, ring), time.monotonic()
            last = self._events[-1].position if self._events else None
            fresh = [event for event in events if last is None or event.position > last]
            if fresh and last is not None and fresh[0].position != last + 1:
                self._events.clear()
            self._events.extend(fresh)


class Tails(PerStore):
    """The tails of the trees that are followed in this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = threading.Lock()
        self._tails: dict[str, Tail] = {}

    def of_tree(self, root_id: str) -> Tail:
        """Return a tree's tail; of many, the one that was asked for first is forgotten."""
        with self._lock:
            if root_id not in self._tails and len(self._tails) >= TREES_REMEMBERED:
                del self._tails[next(iter(self._tails))]
            return self._tails.setdefault(root_id, Tail())


class FeedReader(Handle):
    """Reads the feed of one tree for its followers."""

    @query
    def read(self, root_id: str, after: int) -> Op[list[Event]]:
        """Return the next events after a position."""
        return (yield from read_events(self.runtime.codec, root_id, after, EVENTS_PER_LOOK))


def follow(runtime: Runtime, root_id: str, after: int, poll_seconds: float) -> Stream[Event]:
    """Give the events of a tree after a position, for ever."""
    tail, topic, signals = Tails.of(runtime).of_tree(root_id), topic_of(root_id), runtime.signals
    reader = FeedReader(runtime)
    while True:
        ring = signals.count(topic)
        found = tail.after(after)
        if found is None or (not found and not tail.is_read(ring, poll_seconds)):
            # Who is far behind reads for itself; of those at the end one reads for all.
            if found is not None and not tail.may_read():
                yield Wait(READ_SECONDS_MAX / 20, f"read {topic}", signals.count(f"read {topic}"))
                continue
            found = yield from perform(FeedReader.read, reader, root_id, after)
            tail.put(found, ring, is_end=len(found) < EVENTS_PER_LOOK)
            signals.ring_here(f"read {topic}")
        for event in found:
            after = event.position
            yield Give(event)
        if not found:
            yield Wait(poll_seconds, topic, ring)
