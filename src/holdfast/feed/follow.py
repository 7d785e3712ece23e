"""Following a feed: each event once, in order, as it is committed.

Wake-ups are hints; with polling alone the same events arrive later. Followers of one feed in one
process share what any of them has read, so that a hundred of them cost one reader.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ..kernel.flow import Flow, Give, Stream, Wait, perform
from ..kernel.operation import Handle, Op, PerStore, Runtime, query
from ..kernel.signals import LOCAL_TOPIC, TREE_TOPIC
from ..records import Event
from ..wire import travels
from .events import read_events, require_position

E = TypeVar("E")
K = TypeVar("K", bound=Hashable)

POLL_SECONDS = 0.25
POLL_SECONDS_MAX = 3_600.0
EVENTS_PER_READ = 200
PAGES_REMEMBERED = 16
# Removed events must not be delivered for long.
PAGE_SECONDS_MAX = 5.0
FEEDS_REMEMBERED = 100
# How long a follower may take to read before another one does.
READ_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class Page(Generic[K, E]):
    """The events that one read found after a place in a feed, and the place after them."""

    events: Sequence[E]
    after: K
    is_end: bool
    """Whether the end of the feed was reached."""
    read_at: float = field(default_factory=time.monotonic)
    places: Mapping[K, int] = field(default_factory=dict)
    """For the place after each event but the last, if it is known, how many come before it."""

    def rest(self, after: K) -> Page[K, E]:
        """Return what follows a place inside the page."""
        return Page(self.events[self.places[after] :], self.after, self.is_end, self.read_at)


def page_of(events: Sequence[E], place: Callable[[E], int], after: int) -> Page[int, E]:
    """Return the page of a read of at most EVENTS_PER_READ events after a number."""
    last = place(events[-1]) if events else after
    places = {place(event): count for count, event in enumerate(events[:-1], 1)}
    return Page(events, last, is_end=len(events) < EVENTS_PER_READ, places=places)


class Tail(Generic[K, E]):
    """The most recent pages of one feed that followers in this process have read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: OrderedDict[K, Page[K, E]] = OrderedDict()
        self._end: K | None = None
        self._ring = -1
        self._end_read_at = 0.0
        self._reading_since: dict[K, float] = {}
        self._is_awaited = False

    def page(self, after: K, since: float) -> Page[K, E] | None:
        """Return the page after a place, or the rest of one, if it was read since a moment."""
        with self._lock:
            page = self._pages.get(after)
            if page is None:
                # Reads at different moments end at different places.
                around = (each for each in reversed(self._pages.values()) if after in each.places)
                page = next((each.rest(after) for each in around), None)
            oldest = max(since, time.monotonic() - PAGE_SECONDS_MAX)
            return None if page is None or page.read_at < oldest else page

    def is_read(self, after: K, ring: int, oldest: float) -> bool:
        """Whether a place is known to be the end, read after a ring and not too long ago."""
        with self._lock:
            return after == self._end and self._ring >= ring and self._end_read_at >= oldest

    def may_read(self, after: K) -> bool:
        """Whether to read now: at each place one follower reads for all."""
        now = time.monotonic()
        with self._lock:
            is_free = now - self._reading_since.get(after, 0.0) > READ_SECONDS_MAX
            if is_free:
                self._reading_since[after] = now
            return is_free

    def put(self, after: K, page: Page[K, E], ring: int) -> None:
        """Remember the page after a place, read when the feed had this ring count."""
        with self._lock:
            self._reading_since.pop(after, None)
            if page.events:
                self._pages[after] = page
                if len(self._pages) > PAGES_REMEMBERED:
                    self._pages.popitem(last=False)
            if page.is_end:
                self._end, self._end_read_at = page.after, page.read_at
                self._ring = max(self._ring, ring)

    def may_wait(self) -> bool:
        """Become the follower that waits for a change; False if there is one already."""
        with self._lock:
            is_first, self._is_awaited = not self._is_awaited, True
            return is_first

    def has_waited(self) -> None:
        """Stop being the follower that waits for a change."""
        with self._lock:
            self._is_awaited = False

    def give_up(self, after: K) -> None:
        """Let another follower read after a place, where a read has failed."""
        with self._lock:
            self._reading_since.pop(after, None)


class Tails(PerStore):
    """The tails of the feeds followed in this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = threading.Lock()
        self._tails: OrderedDict[str, Tail[Any, Any]] = OrderedDict()

    def tail(self, name: str) -> Tail[Any, Any]:
        """Return the tail of a feed; beyond FEEDS_REMEMBERED the oldest is dropped."""
        with self._lock:
            if name not in self._tails and len(self._tails) >= FEEDS_REMEMBERED:
                self._tails.popitem(last=False)
            return self._tails.setdefault(name, Tail())


def follow(
    runtime: Runtime,
    feed: str,
    topic: str,
    read: Callable[[K], Flow[Page[K, E]]],
    after: K,
    poll_seconds: float,
    *,
    wait: bool = True,
) -> Stream[E]:
    """Yield what `read` finds after a place in a feed, for ever or, without `wait`, to its end."""
    tail: Tail[K, E] = Tails.of(runtime).tail(feed)
    signals, is_read = runtime.signals, f"{LOCAL_TOPIC}read {feed}"
    # What was read before does not count at first: the place must be valid now.
    since = time.monotonic()
    while True:
        ring, read_ring = signals.count(topic), signals.count(is_read)
        seconds = signals.poll_seconds(topic, poll_seconds)
        page = tail.page(after, since) if wait else None
        oldest = max(since, time.monotonic() - seconds)
        if not wait or (page is None and not tail.is_read(after, ring, oldest)):
            if wait and not tail.may_read(after):
                yield Wait(READ_SECONDS_MAX / 20, is_read, read_ring)
                continue
            try:
                page = yield from read(after)
            except BaseException:
                tail.give_up(after)
                signals.ring_here(is_read)
                raise
            tail.put(after, page, ring)
            if page.events:
                signals.ring_here(is_read)
        since = 0.0
        if page is not None:
            for event in page.events:
                yield Give(event)
            after = page.after
        if page is None or page.is_end:
            if not wait:
                return
            if page is None or not page.events:
                yield from _wait(runtime, tail, (topic, ring), (is_read, read_ring), seconds)


def _wait(
    runtime: Runtime,
    tail: Tail[Any, Any],
    changed: tuple[str, int],
    is_read: tuple[str, int],
    seconds: float,
) -> Flow[None]:
    """Wait for a change: one follower for all, the others until it has read."""
    is_first = tail.may_wait()
    topic, seen = changed if is_first else is_read
    # The first one polls for all; the others look only in case that it has been lost.
    longer = 0.0 if is_first else READ_SECONDS_MAX
    try:
        yield Wait(seconds + longer, topic, seen)
    except BaseException:
        if is_first:
            tail.has_waited()
            runtime.signals.ring_here(is_read[0])
        raise
    if is_first:
        tail.has_waited()


@travels
class TreeReader(Handle):
    """Reads the feed of one tree for its followers."""

    @query
    def begin(self, root_id: str, after: int) -> Op[None]:
        """Refuse a tree or a position that does not exist."""
        yield from require_position(root_id, after)

    @query
    def read(self, root_id: str, after: int) -> Op[list[Event]]:
        """Return the next events after a position."""
        return (yield from read_events(self.runtime.codec, root_id, after, EVENTS_PER_READ))


def follow_tree(runtime: Runtime, root_id: str, after: int, poll_seconds: float) -> Stream[Event]:
    """Yield the events of a tree after a position, for ever."""
    reader = TreeReader(runtime)
    yield from perform(TreeReader.begin, reader, root_id, after)

    def read(after: int) -> Flow[Page[int, Event]]:
        found = yield from perform(TreeReader.read, reader, root_id, after)
        return page_of(found, attrgetter("position"), after)

    topic = TREE_TOPIC + root_id
    yield from follow(runtime, topic, topic, read, after, poll_seconds)
