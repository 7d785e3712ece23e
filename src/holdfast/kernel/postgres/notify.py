"""Wake-ups between processes on PostgreSQL: LISTEN and NOTIFY on a dedicated connection.

One connection serves all stores of a process that listen at the same address; those of one schema
share their signals. A ring is sent at once, and rings that follow it shortly are coalesced. They
are sent outside every transaction: NOTIFY inside each commit made writers queue behind one another.
Nothing is sent while no other process listens, and changes of trees only if one follows them. A
lost ring only costs latency.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import psycopg
from psycopg import sql

from ..backoff import Backoff
from ..signals import EVERY_TREE, Signals, is_of_trees
from ..threads import Latch, Thread
from ..url import PostgresTarget
from .connections import connect
from .followers import Announcement, Followers, OtherListeners
from .pipeline import Link, Message, Slot

COALESCE_SECONDS = 0.01
RECONNECT_SECONDS_MIN = 0.05
RECONNECT_SECONDS_MAX = 5.0
# The server takes 7,999 bytes in one notification, and a character has at most four.
PAYLOAD_BYTES_MAX = 7_999
TOPIC_CHARACTERS_MAX = 1_999
# Between the topics of one notification: the unit separator.
SEPARATOR = "\x1f"
# What a process sends when it begins to listen, so that the others send their rings.
HELLO = ""
# When more trees than this have changed, one ring of EVERY_TREE is sent instead.
TREES_NAMED_MAX = 8
PIPE_BYTES = 65_536
NOTIFY = "SELECT pg_notify($1, $2)"
LISTEN, UNLISTEN = sql.SQL("LISTEN {}"), sql.SQL("UNLISTEN {}")


class Wakeups:
    """The signals that the stores of one schema in this process share."""

    def __init__(self, schema: str, listener: Listener | None) -> None:
        """Without a listener, waiters poll."""
        self.channel = f"holdfast_{schema}"
        self.tree_channel = f"holdfast_trees_{schema}"
        self.followers = Followers(schema, is_awaited=listener is not None)
        self.others = OtherListeners(schema)
        self.follows = False
        """Whether this process waits for changes of trees."""
        self._listener = listener
        is_alone = listener is None
        forward, listen = (None, None) if is_alone else (self._forward, self._listen)
        self.signals = Signals(forward=forward, listen=listen)

    @property
    def channels(self) -> set[str]:
        """The channels to listen to."""
        return {self.channel, self.tree_channel} if self.follows else {self.channel}

    def announcement(self, channel: str) -> Announcement:
        """Return what is announced by a process that listens to a channel."""
        is_of_trees = channel == self.tree_channel
        return self.followers.announcement if is_of_trees else self.others.announcement

    def _listen(self, topic: str) -> None:
        assert self._listener is not None
        self.follows |= is_of_trees(topic)
        self._listener.start(self.channels)

    def _forward(self, topic: str) -> None:
        assert self._listener is not None
        if not self.others.may_be_there():
            return
        if not is_of_trees(topic):
            self._listener.ring(self.channel, topic)
        elif self.followers.are_there:
            self._listener.ring(self.tree_channel, topic)


class Notifier:
    """One store's share in the wake-ups of its process."""

    def __init__(self, target: PostgresTarget, limit_seconds: float) -> None:
        self.schema = target.schema
        self.limit_seconds = limit_seconds
        self._listener = None
        if target.listen_dsn is None:
            self._wakeups = Wakeups(self.schema, None)
        else:
            self._listener, self._wakeups = _listeners.join(self, target.listen_dsn)

    @property
    def signals(self) -> Signals:
        """The store's signals."""
        return self._wakeups.signals

    @property
    def followers(self) -> Followers:
        """What is known about other processes that listen for changes of trees."""
        return self._wakeups.followers

    def close(self) -> None:
        """Send pending rings and, with the last store, stop listening; within a time limit."""
        if self._listener is not None:
            _listeners.leave(self, self._listener)


class Listener:
    """A thread that sends rings to other processes and receives theirs; started when needed."""

    def __init__(self, dsn: str, limit_seconds: float) -> None:
        self._dsn = dsn
        self._limit_seconds = limit_seconds
        self._users: weakref.WeakSet[Notifier] = weakref.WeakSet()
        self._wakeups: dict[str, Wakeups] = {}
        # A signal handler may ring while its thread holds the lock.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = Latch()
        self._heard: set[str] = set()
        """The channels it listens to now."""
        self._topics: set[tuple[str, str]] = set()
        self._topics_lock = threading.RLock()
        self._read_end, self._write_end = -1, -1

    def join(self, user: Notifier) -> Wakeups:
        """Add a store."""
        with self._starting:
            self._users.add(user)
            return self._wakeups.setdefault(user.schema, Wakeups(user.schema, self))

    def leave(self, user: Notifier) -> bool:
        """Remove a store; return whether it was the last."""
        with self._starting:
            self._users.discard(user)
            return not self._users

    def start(self, channels: set[str]) -> None:
        """Start to listen to channels, unless it does already."""
        if channels <= self._heard:
            return
        with self._starting:
            if self._stopping.is_set:
                return
            if self._thread is None:
                self._read_end, self._write_end = os.pipe()
                # The pipe only wakes the thread; if it is full, the thread wakes anyway.
                os.set_blocking(self._write_end, False)
                self._thread = Thread(self._serve, "holdfast-listener")
            # An earlier call may have been interrupted before it started the thread.
            if self._thread.ident is None:
                self._thread.start()
        self._nudge()

    def ring(self, channel: str, topic: str) -> None:
        """Notify other processes: at once, or coalesced while rings come fast."""
        with self._topics_lock:
            self._topics.add((channel, topic[:TOPIC_CHARACTERS_MAX]))
        self.start({channel})
        self._nudge()

    def close(self, limit_seconds: float) -> None:
        """Send pending rings and stop, within a time limit."""
        self._stopping.set()
        with self._starting:
            thread = self._thread
        if thread is None or thread.ident is None:
            return
        self._nudge()
        thread.join(limit_seconds + 1.0)
        if not thread.is_alive():
            os.close(self._read_end)
            os.close(self._write_end)
            self._read_end = self._write_end = -1

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"!")

    def _serve(self) -> None:
        backoff = Backoff(RECONNECT_SECONDS_MIN, RECONNECT_SECONDS_MAX)
        while not self._stopping.is_set:
            began = time.monotonic()
            try:
                with contextlib.closing(self._connect()) as link:
                    self._forward(link)
            except psycopg.Error:
                backoff.forget(time.monotonic() - began)
                self._stopping.wait(backoff.pause_seconds())

    def _connect(self) -> Link:
        self._heard = set()
        connection = connect(self._dsn, self._limit_seconds, "holdfast-listener")
        link = Link(connection, Slot(), prepares=False)
        link.listen(self._hear)
        # Each NOTIFY is a transaction; one that is lost in a crash does no harm.
        link.run([Message("SET synchronous_commit = off")], self._limit_seconds)
        for each in self._served():
            # Another may have begun to listen while nothing could be heard.
            self._hear_another(each)
        return link

    def _hear(self, channel: str, payload: str) -> None:
        topics = payload.split(SEPARATOR)
        for each in self._served():
            if channel in each.channels:
                self._hear_another(each)
                for topic in topics:
                    each.signals.ring_here(None if topic == EVERY_TREE else topic)

    def _hear_another(self, heard: Wakeups) -> None:
        """Note that another process may listen, and make good for rings it was not sent."""
        if heard.others.hear():
            with self._topics_lock:
                self._topics.add((heard.channel, EVERY_TREE))
            self._nudge()

    def _served(self) -> list[Wakeups]:
        with self._starting:
            return [self._wakeups[schema] for schema in {user.schema for user in self._users}]

    def _listen(self, link: Link) -> None:
        """LISTEN to the channels that stores wait for now, and UNLISTEN the rest."""
        served = self._served()
        wanted = {channel: each for each in served for channel in each.channels}
        new = wanted.keys() - self._heard
        gone = self._heard - wanted.keys()
        # Whoever has something to tell looks for the announcements first.
        messages = [Message(wanted[channel].announcement(channel).made) for channel in new]
        begun = [each for each in served if each.channel in new]
        messages += [Message(NOTIFY, (each.channel, HELLO)) for each in begun]
        for each in self._wakeups.values():
            left = {each.channel, each.tree_channel} & gone
            messages += [Message(each.announcement(channel).revoked) for channel in left]
        messages += [_naming(UNLISTEN, channel) for channel in sorted(gone)]
        messages += [_naming(LISTEN, channel) for channel in sorted(new)]
        if messages:
            link.run(messages, self._limit_seconds)
        self._heard = set(wanted)
        for each in {wanted[channel] for channel in new}:
            # Rings may have been missed before this.
            each.signals.ring_here(None)

    def _forward(self, link: Link) -> None:
        quiet_at = 0.0
        arrivals, either = select.poll(), select.poll()
        arrivals.register(link.descriptor, select.POLLIN)
        either.register(link.descriptor, select.POLLIN)
        either.register(self._read_end, select.POLLIN)
        while True:
            self._listen(link)
            if self._read_end in dict(either.poll()):
                while (early := quiet_at - time.monotonic()) > 0 and not self._stopping.is_set:
                    arrivals.poll(early * 1000)
                    link.read_notifications()
                os.read(self._read_end, PIPE_BYTES)
                self._send(link)
                if self._stopping.is_set:
                    return
                quiet_at = time.monotonic() + COALESCE_SECONDS
            link.read_notifications()

    def _send(self, link: Link) -> None:
        with self._topics_lock:
            topics = sorted(self._topics)
            self._topics.clear()
        try:
            heard = self._heard_by_others(link, {channel for channel, _ in topics})
            rung = [each for each in topics if each[0] in heard]
            notify = [Message(NOTIFY, each) for each in _condensed(rung)]
            if notify:
                link.run(notify, self._limit_seconds)
        except psycopg.Error:
            with self._topics_lock:
                self._topics.update(topics)
            self._nudge()
            raise

    def _heard_by_others(self, link: Link, channels: set[str]) -> set[str]:
        """Return those channels that another process may listen to."""
        heard = set()
        for each in list(self._wakeups.values()):
            if found := channels & {each.channel, each.tree_channel}:
                others, times_heard = each.others, each.others.times_heard
                if others.is_look_due():
                    [reply] = link.run([Message(others.look)], self._limit_seconds)
                    others.note(reply.rows[0]["are_there"], times_heard)
                if others.may_be_there():
                    heard |= found
        return heard


def _naming(statement: sql.SQL, channel: str) -> Message:
    return Message(statement.format(sql.Identifier(channel)).as_string())


def _condensed(topics: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the notifications to send for rings, which are sorted by channel.

    Many trees become one ring of EVERY_TREE; other rings share notifications.
    """
    for channel, group in groupby(topics, key=itemgetter(0)):
        rung = [topic for _, topic in group]
        if len(rung) > TREES_NAMED_MAX and all(map(is_of_trees, rung)):
            rung = [EVERY_TREE]
        texts: list[str] = []
        size = 0
        for topic in rung:
            length = len(topic.encode()) + 1
            if size + length > PAYLOAD_BYTES_MAX:
                yield channel, SEPARATOR.join(texts)
                texts, size = [], 0
            texts.append(topic)
            size += length
        yield channel, SEPARATOR.join(texts)


class Listeners:
    """The listeners of this process, by address."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start afresh in a forked child: threads and connections are its parent's."""
        self._lock = threading.RLock()
        self._by_dsn: dict[str, Listener] = {}

    def join(self, user: Notifier, dsn: str) -> tuple[Listener, Wakeups]:
        """Add a store to the listener of its address."""
        with self._lock:
            listener = self._by_dsn.setdefault(dsn, Listener(dsn, user.limit_seconds))
            return listener, listener.join(user)

    def leave(self, user: Notifier, listener: Listener) -> None:
        """Remove a store; with the last one, its listener is closed."""
        with self._lock:
            is_last = listener.leave(user)
            if is_last:
                self._by_dsn = {
                    dsn: each for dsn, each in self._by_dsn.items() if each is not listener
                }
        if is_last:
            listener.close(user.limit_seconds)


_listeners = Listeners()
os.register_at_fork(after_in_child=_listeners.forget)
