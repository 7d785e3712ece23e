"""Wake-ups: hints that something may have changed. Waiters always re-read the database.

Take `seen = signals.count(topic)`, read the database, then wait for a ring after `seen`: a ring
between the read and the wait is not lost. Rings from other processes arrive through the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable

TOPICS_MAX = 1_000
EVERY_TREE = "trees"
"""The topic that is rung with the topic of any tree."""
TREE_TOPIC = "tree "
"""The prefix of a session tree's id in the topic of its new events."""
LOCAL_TOPIC = "local "
"""The prefix of topics rung only by this process, never by a change in the database."""
# Where every ring arrives, polling is only for what nobody has thought of.
HEARD_POLL_SECONDS = 15.0


def is_of_trees(topic: str) -> bool:
    """Whether a topic is that of one tree or of all trees."""
    return topic == EVERY_TREE or topic.startswith(TREE_TOPIC)


class Signals:
    """Topics that threads and event loops can ring and wait for."""

    def __init__(
        self,
        *,
        forward: Callable[[str], None] | None = None,
        listen: Callable[[str], None] | None = None,
        hears: Callable[[str], bool] | None = None,
    ) -> None:
        """`forward` sends rings to other processes; `listen` starts to receive theirs.

        `listen` is called with the topic before every wait. `hears` tells whether all rings of a
        topic arrive at present; when that ends, all topics are rung.
        """
        # A signal handler may ring while its thread holds the lock.
        self._lock = threading.RLock()
        self._rings = 0
        self._last: dict[str, int] = {}
        self._last_of_all = 0
        self._waiters: dict[object, tuple[str | None, Callable[[], object]]] = {}
        self._forward = forward
        self._listen = listen
        self._hears = hears

    def count(self, topic: str) -> int:
        """Return a number that grows with every ring of the topic."""
        return self._last.get(topic, self._last_of_all)

    def poll_seconds(self, topic: str, seconds: float) -> float:
        """Return how long to wait for a topic before looking regardless; seldom if it is heard."""
        is_heard = self._hears is not None and self._hears(topic)
        return max(seconds, HEARD_POLL_SECONDS) if is_heard else seconds

    def awaited(self) -> set[str]:
        """Return the topics that are waited for at this moment."""
        with self._lock:
            return {topic for topic, _ in self._waiters.values() if topic is not None}

    def ring(self, topic: str) -> None:
        """Wake the topic's waiters in this process and, through the driver, in others."""
        self.ring_here(topic)
        if self._forward is not None:
            self._forward(topic)

    def ring_here(self, topic: str | None) -> None:
        """Wake the topic's waiters in this process; None rings every topic that is not local."""
        with self._lock:
            self._rings += 1
            if topic is None or len(self._last) >= TOPICS_MAX:
                # With too many to remember, all count as rung: an extra read does no harm.
                self._last_of_all = self._rings
                self._last = {}
            if topic is not None:
                self._last[topic] = self._rings
                if topic.startswith(TREE_TOPIC):
                    self._last[EVERY_TREE] = self._rings
            wakes = self._wakes(topic) if self._waiters else ()
        for wake in wakes:
            wake()

    def _wakes(self, topic: str | None) -> list[Callable[[], object]]:
        """Return the wake functions of the topic's waiters; None means every topic not local."""
        waiters = list(self._waiters.values())
        if topic is None:
            return [
                wake for wanted, wake in waiters if wanted and not wanted.startswith(LOCAL_TOPIC)
            ]
        also = EVERY_TREE if topic.startswith(TREE_TOPIC) else topic
        return [wake for wanted, wake in waiters if wanted in {topic, also}]

    def wait(self, topic: str | None, seen: int, seconds: float) -> bool:
        """Block until the topic is rung after `seen`; return False on timeout."""
        # Unlike an Event, a lock can be released by a signal handler of the waiting thread.
        silent = threading.Lock()
        silent.acquire()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):
                silent.release()

        try:
            is_rung = self._register(silent, topic, seen, wake)
            return is_rung or silent.acquire(timeout=max(0.0, seconds))
        finally:
            self._forget(silent)

    async def wait_async(self, topic: str | None, seen: int, seconds: float) -> bool:
        """Wait in the event loop until the topic is rung after `seen`; return False on timeout."""
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        woken: asyncio.Future[bool] = loop.create_future()

        def settle(is_rung: bool) -> None:
            if not woken.done():
                woken.set_result(is_rung)

        def wake() -> None:
            # A running task returns to the loop; outside one the loop may sleep and must be woken.
            if threading.get_ident() == thread and asyncio.current_task(loop) is not None:
                settle(True)
            else:
                # A loop that was closed in the middle of a wait has no waiter left to wake.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(settle, True)

        timer = None
        try:
            if self._register(woken, topic, seen, wake):
                return True
            timer = loop.call_later(seconds, settle, False)
            return await woken
        finally:
            if timer is not None:
                timer.cancel()
            self._forget(woken)

    def watch(self, topics: Iterable[str], wake: Callable[[], object]) -> Callable[[], None]:
        """Subscribe `wake` to these topics; return the function that unsubscribes it."""
        waiters = {object(): (topic, wake) for topic in topics}
        for topic, _ in waiters.values():
            if self._listen is not None:
                self._listen(topic)
        with self._lock:
            self._waiters.update(waiters)

        def forget() -> None:
            for waiter in waiters:
                self._forget(waiter)

        return forget

    def _register(
        self, waiter: object, topic: str | None, seen: int, wake: Callable[[], object]
    ) -> bool:
        """Add a waiter; return whether its topic was rung already."""
        if topic is not None and self._listen is not None:
            self._listen(topic)
        with self._lock:
            self._waiters[waiter] = (topic, wake)
            return topic is not None and self.count(topic) > seen

    def _forget(self, waiter: object) -> None:
        with self._lock:
            self._waiters.pop(waiter, None)
