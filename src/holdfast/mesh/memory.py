"""A transport within one process, for tests: it can lose, repeat and reorder messages."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from ..arguments import require_seconds, require_whole
from .transports import Message

ACK_SECONDS_MAX = 24 * 3600


class Memory:
    """Carries messages within a process.

    Every `lose_every`-th message that is sent is lost, every `repeat_every`-th delivered twice; 0
    means none. With `reorder`, messages are delivered in a random order determined by `seed`.
    """

    name = "memory"

    def __init__(
        self,
        *,
        lose_every: int = 0,
        repeat_every: int = 0,
        reorder: bool = False,
        seed: int = 0,
        ack_seconds: float = 30.0,
        resend_seconds: float = 5.0,
    ) -> None:
        require_whole("lose_every", lose_every, 0)
        require_whole("repeat_every", repeat_every, 0)
        require_seconds("ack_seconds", ack_seconds, ACK_SECONDS_MAX, least=0.001)
        require_seconds("resend_seconds", resend_seconds, ACK_SECONDS_MAX, least=0.001)
        self.resend_seconds = resend_seconds
        self.sent = 0
        """How many messages were sent, lost ones included."""
        self._ack_seconds = ack_seconds
        self._lose_every = lose_every
        self._repeat_every = repeat_every
        self._chance = random.Random(seed) if reorder else None
        self._changed = threading.Condition()
        self._waiting: defaultdict[str, list[MemoryDelivery]] = defaultdict(list)

    def send(self, address: str, message: Message) -> None:
        """Deliver a message, unless it is one of those to be lost."""
        with self._changed:
            self.sent += 1
            if self._lose_every and self.sent % self._lose_every == 0:
                return
            is_repeated = self._repeat_every and self.sent % self._repeat_every == 0
            for _ in range(2 if is_repeated else 1):
                queue = self._waiting[address]
                place = len(queue) if self._chance is None else self._chance.randint(0, len(queue))
                queue.insert(place, MemoryDelivery(self, address, message))
            self._changed.notify_all()

    def receive(self, address: str, limit: int, wait_seconds: float) -> Sequence[MemoryDelivery]:
        """Return messages that are waiting or were not acknowledged in time."""
        ends_at = time.monotonic() + wait_seconds
        with self._changed:
            while True:
                now = time.monotonic()
                waiting = self._waiting[address]
                ready = [each for each in waiting if each.ready_at <= now][:limit]
                if ready or now >= ends_at:
                    for each in ready:
                        each.ready_at = now + self._ack_seconds
                    return ready
                due_at = min((each.ready_at for each in waiting), default=ends_at)
                self._changed.wait(max(0.0, min(due_at, ends_at) - now))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _set(self, delivery: MemoryDelivery, ready_in_seconds: float | None) -> None:
        """Set when a message is delivered again; None for never."""
        with self._changed:
            waiting = self._waiting[delivery.address]
            if delivery not in waiting:
                return
            if ready_in_seconds is None:
                waiting.remove(delivery)
            else:
                delivery.ready_at = time.monotonic() + ready_in_seconds
            self._changed.notify_all()


class MemoryDelivery:
    """A message in memory; until `ready_at` it is reserved for its receiver."""

    def __init__(self, transport: Memory, address: str, message: Message) -> None:
        self.message = message
        self.address = address
        self.ready_at = 0.0
        self._transport = transport

    def ack(self) -> None:
        """Remove the message."""
        self._transport._set(self, None)

    def nack(self, delay_seconds: float = 0.0) -> None:
        """Deliver it again."""
        self._transport._set(self, delay_seconds)

    def extend(self) -> None:
        """Keep it reserved for its receiver."""
        self._transport._set(self, self._transport._ack_seconds)
