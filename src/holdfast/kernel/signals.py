"""Wake-ups: hints that something changed, never the truth. Who waits re-reads the database.

Take `seen = signals.count(topic)`, look at the database, then wait for a ring after `seen`: a ring
between the look and the wait is not lost. Rings from other processes arrive through the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable

TOPICS_MAX = 1_000
EVERY_TREE = "trees"
"""The topic that is rung together with that of any tree."""
_TREE = "tree "


def tree_topic(root_id: str) -> str:
    """Return the topic that is rung when a session tree has new events."""
    return _TREE + root_id


def is_of_trees(topic: str) -> bool:
    """Whether a topic is that of one tree, or of all."""
    return topic == EVERY_TREE or topic.startswith(_TREE)


class Signals:
    """Topics that can be rung and waited for, by threads and event loops alike."""

    def __init__(
        self,
        *,
        forward: Callable[[str], None] | None = None,
        listen: Callable[[str], None] | None = None,
    ) -> None:
        """`forward` carries rings to other processes, `listen` begins to hear theirs.

        `listen` is called before every wait, with its topic.
        """
        # A signal handler may ring while its thread is in here.
        self._lock = threading.RLock()
        self._rings = 0
        self._last: dict[str, int] = {}
        self._last_of_all = 0
        self._waiters: dict[object, tuple[str | None, Callable[[], object]]] = {}
        self._forward = forward
        self._listen = listen

    def count(self, topic: str) -> int:
        """Return a number that has grown when the topic was rung since."""
        return self._last.get(topic, self._last_of_all)

    def ring(self, topic: str) -> None:
        """Wake who waits for the topic, here and, through the driver, in other processes."""
        self.ring_here(topic)
        if self._forward is not None:
            self._forward(topic)

    def ring_here(self, topic: str | None) -> None:
        """Wake the waiters of this process; None means that any topic may have changed."""
        with self._lock:
            self._rings += 1
            if topic is None or len(self._last) >= TOPICS_MAX:
                # Too many to remember them all count as rung: who looks once more loses nothing.
                self._last_of_all = self._rings
                self._last = {}
            topics = [] if topic is None else [topic]
            if topic is not None and topic.startswith(_TREE):
                topics.append(EVERY_TREE)
            for each in topics:
                self._last[each] = self._rings
            wakes = [
                wake
                for wanted, wake in list(self._waiters.values())
                if wanted is not None and (topic is None or wanted in topics)
            ]
        for wake in wakes:
            wake()

    def wait(self, topic: str | None, seen: int, seconds: float) -> bool:
        """Block until the topic is rung after `seen`; False when the seconds have passed."""
        # Unlike an Event it can be rung by a signal handler of the thread that waits.
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
        """Wait in the event loop until the topic is rung after `seen`, or the seconds passed."""
        event = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            if self._register(event, topic, seen, lambda: loop.call_soon_threadsafe(event.set)):
                return True
            async with asyncio.timeout(seconds):
                return await event.wait()
        except TimeoutError:
            return False
        finally:
            self._forget(event)

    def watch(self, topics: Iterable[str], wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` at every ring of these topics, until what is returned is called."""
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
        """Add a waiter, and say whether its topic was rung already."""
        if topic is not None and self._listen is not None:
            self._listen(topic)
        with self._lock:
            self._waiters[waiter] = (topic, wake)
            return topic is not None and self.count(topic) > seen

    def _forget(self, waiter: object) -> None:
        with self._lock:
            self._waiters.pop(waiter, None)
