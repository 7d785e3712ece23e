"""Wake-ups between processes on PostgreSQL: LISTEN and NOTIFY on a connection of their own.

One connection serves all stores of a process that listen at the same address; those of one schema
share their signals. A ring is sent at once, those that follow shortly after it together, outside
every transaction: NOTIFY inside each commit made writers queue behind one another. That a tree has
changed is sent only where somebody is known to listen for it. A lost ring costs latency only.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import psycopg
from psycopg import sql

from ..signals import EVERY_TREE, Signals, is_of_trees
from ..threads import Flag, Thread
from ..url import PostgresTarget
from .connections import connect
from .followers import Followers
from .pipeline import Link, Message, Slot

COALESCE_SECONDS = 0.01
RECONNECT_SECONDS_MIN = 0.05
RECONNECT_SECONDS_MAX = 5.0
TOPIC_BYTES_MAX = 4_000
# When more trees than this have changed, they are not told one by one.
TREES_TOLD_MAX = 8
PIPE_BYTES = 65_536
LISTEN, UNLISTEN = sql.SQL("LISTEN {}"), sql.SQL("UNLISTEN {}")


class Wakeups:
    """What the stores of one schema in this process wait for and ring."""

    def __init__(self, schema: str, bell: Doorbell | None) -> None:
        """Without a doorbell there is nothing to hear of others: then we poll."""
        self.channel = f"holdfast_{schema}"
        self.tree_channel = f"holdfast_trees_{schema}"
        self.followers = Followers(schema, is_awaited=bell is not None)
        self.follows = False
        """Whether changes of trees are waited for here."""
        self._bell = bell
        is_alone = bell is None
        forward, listen = (None, None) if is_alone else (self._forward, self._listen)
        self.signals = Signals(forward=forward, listen=listen)

    @property
    def channels(self) -> set[str]:
        """What to listen to."""
        return {self.channel, self.tree_channel} if self.follows else {self.channel}

    def _listen(self, topic: str) -> None:
        assert self._bell is not None
        self.follows |= is_of_trees(topic)
        self._bell.start(self.channels)

    def _forward(self, topic: str) -> None:
        assert self._bell is not None
        if not is_of_trees(topic):
            self._bell.ring(self.channel, topic)
        elif self.followers.are_there:
            self._bell.ring(self.tree_channel, topic)


class Notifier:
    """One store's part in the wake-ups of its process."""

    def __init__(self, target: PostgresTarget, limit_seconds: float) -> None:
        self.schema = target.schema
        self.limit_seconds = limit_seconds
        self._bell = None
        if target.listen_dsn is None:
            self._wakeups = Wakeups(self.schema, None)
        else:
            self._bell, self._wakeups = _bells.join(self, target.listen_dsn)

    @property
    def signals(self) -> Signals:
        """What is rung and waited for."""
        return self._wakeups.signals

    @property
    def followers(self) -> Followers:
        """Those in other processes who listen for changes of trees."""
        return self._wakeups.followers

    def close(self) -> None:
        """Send what is waiting, and with the last store stop listening; within a limit."""
        if self._bell is not None:
            _bells.leave(self, self._bell)


class Doorbell:
    """A thread that forwards rings to other processes and theirs to us; started when needed."""

    def __init__(self, dsn: str, limit_seconds: float) -> None:
        self._dsn = dsn
        self._limit_seconds = limit_seconds
        self._users: weakref.WeakSet[Notifier] = weakref.WeakSet()
        self._wakeups: dict[str, Wakeups] = {}
        # A signal handler may ring while its thread is in here.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = Flag()
        self._heard: set[str] = set()
        """The channels that are listened to."""
        self._topics: set[tuple[str, str]] = set()
        self._topics_lock = threading.RLock()
        self._read_end, self._write_end = -1, -1

    def join(self, user: Notifier) -> Wakeups:
        """Serve one store more."""
        with self._starting:
            self._users.add(user)
            return self._wakeups.setdefault(user.schema, Wakeups(user.schema, self))

    def leave(self, user: Notifier) -> bool:
        """Serve a store no more; return whether it was the last."""
        with self._starting:
            self._users.discard(user)
            return not self._users

    def start(self, channels: set[str]) -> None:
        """Begin to listen to channels; where that has been done, this does nothing."""
        if channels <= self._heard:
            return
        with self._starting:
            if self._stopping.is_set:
                return
            if self._thread is None:
                self._read_end, self._write_end = os.pipe()
                # A full pipe wakes the thread as well as one more byte would.
                os.set_blocking(self._write_end, False)
                self._thread = Thread(self._serve, "holdfast-doorbell")
            # An interrupt may have come between the two.
            if self._thread.ident is None:
                self._thread.start()
        self._nudge()

    def ring(self, channel: str, topic: str) -> None:
        """Tell the other processes: at once, or together with others while rings come fast."""
        with self._topics_lock:
            self._topics.add((channel, topic[:TOPIC_BYTES_MAX]))
        self.start({channel})
        self._nudge()

    def close(self, limit_seconds: float) -> None:
        """Send what is waiting and stop, within a limit."""
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
        pause = RECONNECT_SECONDS_MIN
        while not self._stopping.is_set:
            began = time.monotonic()
            try:
                with contextlib.closing(self._connect()) as link:
                    self._forward(link)
            except psycopg.Error:
                if time.monotonic() - began > RECONNECT_SECONDS_MAX:
                    pause = RECONNECT_SECONDS_MIN
                self._stopping.wait(random.uniform(pause / 2, pause))
                pause = min(pause * 2, RECONNECT_SECONDS_MAX)

    def _connect(self) -> Link:
        self._heard = set()
        connection = connect(self._dsn, self._limit_seconds, "holdfast-doorbell")
        link = Link(connection, Slot(), prepares=False)
        link.listen(self._hear)
        # A NOTIFY is a transaction; nothing is lost with one that a crash undoes.
        link.run([Message("SET synchronous_commit = off")], self._limit_seconds)
        return link

    def _hear(self, channel: str, topic: str) -> None:
        for each in self._served():
            if channel in each.channels:
                each.signals.ring_here(None if topic == EVERY_TREE else topic)

    def _served(self) -> list[Wakeups]:
        with self._starting:
            return [self._wakeups[schema] for schema in {user.schema for user in self._users}]

    def _listen(self, link: Link) -> None:
        """Listen to what stores wait for now, and no more to the rest."""
        served = self._served()
        wanted = {channel: each for each in served for channel in each.channels}
        new = wanted.keys() - self._heard
        messages = [_naming(LISTEN, channel) for channel in sorted(new)]
        # Those who make changes of trees look for who has said that it listens.
        announced = {wanted[channel] for channel in new if channel == wanted[channel].tree_channel}
        messages += [Message(each.followers.announcement) for each in announced]
        gone = self._heard - wanted.keys()
        messages += [_naming(UNLISTEN, channel) for channel in sorted(gone)]
        left = (each for each in self._wakeups.values() if each.tree_channel in gone)
        messages += [Message(each.followers.farewell) for each in left]
        if messages:
            link.run(messages, self._limit_seconds)
        self._heard = set(wanted)
        for each in {wanted[channel] for channel in new}:
            # Rings may have been missed while nobody listened.
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
        notify = [Message("SELECT pg_notify($1, $2)", each) for each in _told(topics)]
        try:
            if notify:
                link.run(notify, self._limit_seconds)
        except psycopg.Error:
            with self._topics_lock:
                self._topics.update(topics)
            self._nudge()
            raise


def _naming(statement: sql.SQL, channel: str) -> Message:
    return Message(statement.format(sql.Identifier(channel)).as_string())


def _told(topics: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield what is sent of rings, given with their channels in order."""
    for channel, group in groupby(topics, key=itemgetter(0)):
        rung = [topic for _, topic in group]
        if len(rung) > TREES_TOLD_MAX and all(map(is_of_trees, rung)):
            rung = [EVERY_TREE]
        yield from ((channel, topic) for topic in rung)


class Doorbells:
    """Those of this process, by the address that they listen at."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as a forked child does: threads and connections are its parent's."""
        self._lock = threading.RLock()
        self._found: dict[str, Doorbell] = {}

    def join(self, user: Notifier, dsn: str) -> tuple[Doorbell, Wakeups]:
        """Serve one store more."""
        with self._lock:
            bell = self._found.setdefault(dsn, Doorbell(dsn, user.limit_seconds))
            return bell, bell.join(user)

    def leave(self, user: Notifier, bell: Doorbell) -> None:
        """Serve a store no more; with the last one, its doorbell is closed."""
        with self._lock:
            is_last = bell.leave(user)
            if is_last:
                self._found = {dsn: each for dsn, each in self._found.items() if each is not bell}
        if is_last:
            bell.close(user.limit_seconds)


_bells = Doorbells()
os.register_at_fork(after_in_child=_bells.forget)
