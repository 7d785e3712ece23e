"""Wake-ups between processes on PostgreSQL: LISTEN and NOTIFY on a connection of their own.

A ring is sent at once, those that follow shortly after it together, outside every transaction:
NOTIFY inside each commit made writers queue behind one another. That a tree has changed is sent
only where somebody is known to listen for it. A lost ring costs latency only.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import time

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


class Notifier:
    """A thread that forwards rings to other processes and theirs to us; started when needed."""

    def __init__(self, target: PostgresTarget, limit_seconds: float) -> None:
        self.signals = Signals(forward=self.ring, listen=self.listen)
        self._dsn = target.listen_dsn or ""
        self._limit_seconds = limit_seconds
        self._channel = f"holdfast_{target.schema}"
        self._tree_channel = f"holdfast_trees_{target.schema}"
        self.followers = Followers(target.schema, is_awaited=bool(self._dsn))
        self._follows = False
        # A signal handler may ring while its thread is in here.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = Flag()
        self._topics: set[str] = set()
        self._topics_lock = threading.RLock()
        self._read_end, self._write_end = -1, -1

    def listen(self, topic: str) -> None:
        """Begin to listen for a topic, unless we are to poll."""
        self.start()
        if not self._follows and is_of_trees(topic):
            self._follows = True
            self._nudge()

    def start(self) -> None:
        """Start the thread; further calls do nothing, nor does the first if we are to poll."""
        if not self._dsn or (self._thread is not None and self._thread.ident is not None):
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

    def ring(self, topic: str) -> None:
        """Tell the other processes: at once, or together with others while rings come fast."""
        if not self._dsn or (is_of_trees(topic) and not self.followers.are_there):
            return
        with self._topics_lock:
            self._topics.add(topic[:TOPIC_BYTES_MAX])
        self.start()
        self._nudge()

    def close(self) -> None:
        """Send what is waiting and stop, within a limit."""
        self._stopping.set()
        with self._starting:
            thread = self._thread
        if thread is None or thread.ident is None:
            return
        self._nudge()
        thread.join(self._limit_seconds + 1.0)
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
                with contextlib.closing(self._listen()) as link:
                    # Rings may have been missed while there was no connection.
                    self.signals.ring_here(None)
                    self._forward(link)
            except psycopg.Error:
                if time.monotonic() - began > RECONNECT_SECONDS_MAX:
                    pause = RECONNECT_SECONDS_MIN
                self._stopping.wait(random.uniform(pause / 2, pause))
                pause = min(pause * 2, RECONNECT_SECONDS_MAX)

    def _listen(self) -> Link:
        connection = connect(self._dsn, self._limit_seconds, "holdfast-doorbell")
        link = Link(connection, Slot(), prepares=False)
        link.listen(self._hear)
        # A NOTIFY is a transaction; nothing is lost with one that a crash undoes.
        settings = Message("SET synchronous_commit = off")
        link.run([settings, _listening_to(self._channel)], self._limit_seconds)
        return link

    def _announce(self, link: Link) -> None:
        """Listen for changes of trees, and let those who make them know."""
        announcement = Message(self.followers.announcement)
        link.run([_listening_to(self._tree_channel), announcement], self._limit_seconds)
        self.signals.ring_here(None)

    def _hear(self, topic: str) -> None:
        self.signals.ring_here(None if topic == EVERY_TREE else topic)

    def _forward(self, link: Link) -> None:
        quiet_at = 0.0
        is_announced = False
        arrivals, either = select.poll(), select.poll()
        arrivals.register(link.descriptor, select.POLLIN)
        either.register(link.descriptor, select.POLLIN)
        either.register(self._read_end, select.POLLIN)
        while True:
            if self._follows and not is_announced:
                self._announce(link)
                is_announced = True
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
        trees = [each for each in topics if is_of_trees(each)]
        told = {topic: self._channel for topic in topics if not is_of_trees(topic)}
        told |= dict.fromkeys(
            trees if len(trees) <= TREES_TOLD_MAX else [EVERY_TREE], self._tree_channel
        )
        notify = [
            Message("SELECT pg_notify($1, $2)", [channel, topic]) for topic, channel in told.items()
        ]
        try:
            if notify:
                link.run(notify, self._limit_seconds)
        except psycopg.Error:
            with self._topics_lock:
                self._topics.update(topics)
            self._nudge()
            raise


def _listening_to(channel: str) -> Message:
    return Message(sql.SQL("LISTEN {}").format(sql.Identifier(channel)).as_string())
