"""Following a feed: each event once, in order, as it is committed.

Wake-ups are hints; with polling alone the same events arrive later. Followers of one feed in one
process share what any of them has read, so that a hundred of them cost one reader.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ..dataclass import dataclass
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
        # A signal handler may enter while its thread holds the lock.
        self._lock = threading.RLock()
        self._pages: OrderedDict[K, Page[K, E]] = OrderedDict()
        self._end: K | None = None
        self._ring = -1
        self._end_read_at = 0.0
        self._reading: dict[K, tuple[object, float]] = {}
        self._first: object | None = None
        self._first_seconds = 0.0

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

    def may_read(self, after: K, follower: object) -> bool:
        """Whether to read now: at each place one follower reads for all."""
        now = time.monotonic()
        with self._lock:
            _, since = self._reading.get(after, (None, -READ_SECONDS_MAX))
            is_free = now - since > READ_SECONDS_MAX
            if is_free:
                self._reading[after] = (follower, now)
            return is_free

    def put(self, after: K, page: Page[K, E], ring: int) -> None:
        """Remember the page after a place, read when the feed had this ring count."""
        with self._lock:
            self._reading.pop(after, None)
            if page.events:
                self._pages[after] = page
                if len(self._pages) > PAGES_REMEMBERED:
                    self._pages.popitem(last=False)
            # A read may end after one that began later, and know less.
            if page.is_end and ring >= self._ring:
                self._end, self._end_read_at, self._ring = page.after, page.read_at, ring

    def may_wait(self, follower: object, seconds: float) -> bool:
        """Whether to wait for a change and read for all; another one does if it looks as often."""
        with self._lock:
            is_first = (
                self._first is None or self._first is follower or seconds < self._first_seconds
            )
            if is_first:
                self._first, self._first_seconds = follower, seconds
            return is_first

    def leave(self, follower: object) -> bool:
        """Stop reading and waiting for all; return whether the others must do so themselves."""
        with self._lock:
            is_first = self._first is follower
            if is_first:
                self._first = None
            read = [after for after, (reader, _) in self._reading.items() if reader is follower]
            for after in read:
                del self._reading[after]
            return is_first or bool(read)


class Tails(PerStore):
    """The tails of the feeds followed in this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = threading.RLock()
        self._tails: OrderedDict[str, Tail[Any, Any]] = OrderedDict()

    def tail(self, name: str) -> Tail[Any, Any]:
        """Return the tail of a feed; beyond FEEDS_REMEMBERED the oldest is dropped."""
        with self._lock:
            if name not in self._tails and len(self._tails) >= FEEDS_REMEMBERED:
                self._tails.popitem(last=False)
            return self._tails.setdefault(name, Tail())


class Follower(Generic[K, E]):
    """One follower of a tail: it reads and waits for the others too, or they do so for it."""

    def __init__(self, runtime: Runtime, feed: str) -> None:
        self._tail: Tail[K, E] = Tails.of(runtime).tail(feed)
        self._signals = runtime.signals
        self._is_read = f"{LOCAL_TOPIC}read {feed}"
        self._owes_ring = False

    def reads(self) -> tuple[str, int]:
        """Return the topic of what others have read, and how often it was rung."""
        return self._is_read, self._signals.count(self._is_read)

    def known(self, after: K, since: float) -> Page[K, E] | None:
        """Return what was read after a place since a moment."""
        return self._tail.page(after, since)

    def may_read(self, after: K, ring: int, oldest: float) -> bool | None:
        """Whether to read now; None if the place is known to be the end."""
        if self._tail.is_read(after, ring, oldest):
            return None
        return self._tail.may_read(after, self)

    def read(self, after: K, ring: int, read: Callable[[K], Flow[Page[K, E]]]) -> Flow[Page[K, E]]:
        """Read for all."""
        self._owes_ring = True
        page = yield from read(after)
        self._tail.put(after, page, ring)
        self._owes_ring = bool(page.events)
        return page

    def waiting(self, changed: tuple[str, int], reads: tuple[str, int], seconds: float) -> Wait:
        """Return how to wait: one polls for all, the others look only in case that it is lost."""
        if self._tail.may_wait(self, seconds):
            return Wait(seconds, *changed)
        return Wait(seconds + READ_SECONDS_MAX, *reads)

    def step_back(self) -> None:
        """Leave reading and waiting to the others; after an interrupt, call it again."""
        owes_ring, self._owes_ring = self._owes_ring, True
        if self._tail.leave(self) or owes_ring:
            self._signals.ring_here(self._is_read)
        self._owes_ring = False


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
    follower: Follower[K, E] = Follower(runtime, feed)
    # What was read before does not count at first: the place must be valid now.
    since = time.monotonic()
    try:
        while True:
            ring, reads = runtime.signals.count(topic), follower.reads()
            seconds = runtime.signals.poll_seconds(topic, poll_seconds)
            page = follower.known(after, since) if wait else None
            if page is None:
                oldest = max(since, time.monotonic() - seconds)
                may_read = follower.may_read(after, ring, oldest) if wait else True
                if may_read is False:
                    yield Wait(READ_SECONDS_MAX / 20, *reads)
                    continue
                if may_read:
                    page = yield from follower.read(after, ring, read)
            since = 0.0
            if page is not None and page.events:
                # Whoever is given events may take any time.
                follower.step_back()
                for event in page.events:
                    yield Give(event)
            elif wait and (page is None or page.is_end):
                yield follower.waiting((topic, ring), reads, seconds)
            if page is not None:
                after = page.after
                if page.is_end and not wait:
                    return
    finally:
        # Wherever an error or an interrupt has hit.
        follower.step_back()


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
