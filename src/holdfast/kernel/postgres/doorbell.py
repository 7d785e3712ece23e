"""Wake-ups between processes on PostgreSQL: LISTEN and NOTIFY on a connection of their own.

A ring is sent at once, those that follow shortly after it together, outside every transaction:
NOTIFY inside each commit made writers queue behind one another. A lost ring costs latency only.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

import psycopg
from psycopg import sql

from ..signals import Signals

COALESCE_SECONDS = 0.01
RECONNECT_SECONDS_MAX = 5.0
TOPIC_BYTES_MAX = 4_000


class Doorbell:
    """A thread that forwards rings to other processes and theirs to us; started when needed."""

    def __init__(self, dsn: str | None, schema: str, signals: Signals) -> None:
        self._dsn = dsn or ""
        self._channel = f"holdfast_{schema}"
        self._signals = signals
        # A signal handler may ring while its thread is in here.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._topics: set[str] = set()
        self._topics_lock = threading.RLock()
        self._read_end, self._write_end = -1, -1
        if dsn is not None:
            signals.on_ring = self.ring
            signals.on_wait = self.start

    def start(self) -> None:
        """Begin to listen; further calls do nothing."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._stopping:
                self._read_end, self._write_end = os.pipe()
                self._thread = threading.Thread(
                    target=self._serve, name="holdfast-doorbell", daemon=True
                )
                self._thread.start()

    def ring(self, topic: str) -> None:
        """Tell the other processes: at once, or together with others while rings come fast."""
        with self._topics_lock:
            self._topics.add(topic[:TOPIC_BYTES_MAX])
            is_first = len(self._topics) == 1
        self.start()
        if is_first:
            self._nudge()

    def close(self) -> None:
        """Send what is waiting and stop."""
        with self._starting:
            self._stopping = True
        if self._thread is not None:
            self._nudge()
            self._thread.join()
            os.close(self._read_end)
            os.close(self._write_end)

    def _nudge(self) -> None:
        os.write(self._write_end, b"!")

    def _serve(self) -> None:
        pause = 0.05
        while not self._stopping:
            try:
                with psycopg.connect(
                    self._dsn, autocommit=True, application_name="holdfast-doorbell"
                ) as connection:
                    # A NOTIFY is a transaction; nothing is lost with one that a crash undoes.
                    connection.execute("SET synchronous_commit = off")
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
                    # Rings may have been missed while there was no connection.
                    self._signals.ring_here(None)
                    pause = 0.05
                    self._forward(connection)
            except psycopg.Error:
                select.select([self._read_end], [], [], pause)
                pause = min(pause * 2, RECONNECT_SECONDS_MAX)

    def _forward(self, connection: psycopg.Connection) -> None:
        is_asked, quiet_at = False, 0.0
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._read_end, select.POLLIN)
        while True:
            wait = max(0.0, quiet_at - time.monotonic()) * 1000 if is_asked else None
            if self._read_end in dict(poll.poll(wait)):
                os.read(self._read_end, 4096)
                is_asked = True
            if is_asked and (self._stopping or time.monotonic() >= quiet_at):
                self._send(connection)
                if self._stopping:
                    return
                is_asked, quiet_at = False, time.monotonic() + COALESCE_SECONDS
            for notification in connection.notifies(timeout=0):
                if notification.pid != connection.info.backend_pid:
                    self._signals.ring_here(notification.payload)

    def _send(self, connection: psycopg.Connection) -> None:
        with self._topics_lock:
            topics = sorted(self._topics)
            self._topics.clear()
        try:
            for topic in topics:
                connection.execute("SELECT pg_notify(%s, %s)", (self._channel, topic))
        except psycopg.Error:
            with self._topics_lock:
                self._topics.update(topics)
            with contextlib.suppress(OSError):
                self._nudge()
            raise
