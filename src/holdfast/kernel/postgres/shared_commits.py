"""Calls of one process share transactions (group commit) if they write to the same tree, or if each
creates a tree: no other transaction can wait for that one, or make it wait.

While the transaction of one call is under way, others gather behind it; then the first of them
leads: it sends all of them in one transaction, and passes the lead on. One that has waited too long
does so without being asked. A group is committed as a whole or not at all. If it fails, each of its
calls is sent alone: sharing saves round trips, syncs and locks, and nothing depends on it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from ..driver import Execution, Settings
from ..operation import Row

GROUP_MAX = 32
# After a group has failed, its calls are sent alone for this long.
APART_SECONDS = 1.0
# Stands for all trees that calls create; no tree has this id.
NEW_TREES = ""
FAILED_KEPT = 100


def _nobody() -> None:
    return None


class Member:
    """A call that may share a transaction. Its turn comes with the lead, or with its outcome."""

    def __init__(self, execution: Execution[Any]) -> None:
        self.execution = execution
        self.has_come = False
        self.wake: Callable[[], object] | None = None
        self.answers: list[list[Row]] | None = None
        self.error: Exception | None = None
        self.is_alone = False
        """Whether the call must be sent alone."""
        self.led_by: Callable[[], Member | None] = _nobody
        """The call that sends this one; nobody if it was interrupted."""
        self.mark: tuple[str, int] = ("", 0)
        """The mark of the transaction in which that call sends it."""

    def come(
        self,
        answers: list[list[Row]] | None = None,
        error: Exception | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        """Say what became of the call, and wake it."""
        self.answers, self.error, self.is_alone = answers, error, is_alone
        self.has_come = True
        if self.wake is not None:
            self.wake()


class Gathering:
    """The calls that write to one tree, or that create theirs. The first leads."""

    def __init__(self) -> None:
        # A signal handler may enter while its thread holds the lock.
        self._lock = threading.RLock()
        # Weak references: a call that was interrupted, at any instruction, is gone.
        self._leader: Callable[[], Member | None] = _nobody
        self._waiting: deque[Callable[[], Member | None]] = deque()
        self._apart_until = 0.0

    def join(self, member: Member) -> None:
        """Take the lead, or wait behind the others."""
        with self._lock:
            if self._leader() is None:
                self._leader = weakref.ref(member)
                member.has_come = True
            else:
                self._waiting.append(weakref.ref(member))

    def leave(self, member: Member) -> bool:
        """Stop waiting; False if the call did not wait, or somebody has taken it along."""
        own = weakref.ref(member)
        with self._lock:
            if own not in self._waiting:
                return False
            self._waiting.remove(own)
            return True

    def _next(self) -> Member | None:
        while self._waiting:
            if (member := self._waiting.popleft()()) is not None:
                return member
        return None

    def gather(self, leader: Member, mark: tuple[str, int]) -> list[Member]:
        """Return the calls that are to be sent with the leader's, in a transaction of that mark."""
        group: list[Member] = []
        with self._lock:
            while len(group) < GROUP_MAX and (member := self._next()) is not None:
                member.led_by, member.mark = weakref.ref(leader), mark
                group.append(member)
        return group

    def keep_apart(self) -> None:
        """Note that a group has failed; the next may fail for the same reason."""
        self._apart_until = time.monotonic() + APART_SECONDS
        _failed.append(self)

    @property
    def is_apart(self) -> bool:
        """Whether calls are to be sent alone for now."""
        return time.monotonic() < self._apart_until

    def pass_on(self, member: Member) -> None:
        """Let the next one lead, if this one did."""
        with self._lock:
            if self._leader() is member:
                following = self._next()
                self._leader = _nobody if following is None else weakref.ref(following)
                if following is not None:
                    following.come()


_gatherings: weakref.WeakValueDictionary[Hashable, Gathering] = weakref.WeakValueDictionary()
# Otherwise what is known about them would be gone with their last call.
_failed: deque[Gathering] = deque(maxlen=FAILED_KEPT)


def gathering_of(
    where: Hashable, settings: Settings, execution: Execution[Any]
) -> Gathering | None:
    """Return the calls that may share a transaction with this one; None if it must be alone.

    `where` is the schema, and the event loop that drives the call. Calls of a loop gather
    apart from others: a thread that waits for one of them may be the one that runs the loop.
    """
    if len(execution.locked) != 1 or settings.is_clock_virtual or settings.hooks.probe is not None:
        return None
    (root_id,) = execution.locked
    options = (settings.durability, settings.busy_timeout_seconds)
    tree = NEW_TREES if root_id in execution.created else root_id
    key = (os.getpid(), where, tree, *options)
    # Two calls may make one each, which costs no more than a chance to share.
    return _gatherings.get(key) or _gatherings.setdefault(key, Gathering())
