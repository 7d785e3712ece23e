"""Handlers that still run although their item is no longer this worker's.

A thread cannot be stopped, and a coroutine may refuse to. Such a handler can write nothing more, so
its slot goes to other items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import AskNotFound, HoldfastError
from ..formatting import plural
from ..leases import Kept
from ..peers.asks import REQUEST, RESUME
from ..store import Store
from .attempts import HandlerRun, log

# How long a handler that can write nothing more may take to stop.
STOP_SECONDS = 2.0


class AbandonedHandlers:
    """The abandoned handlers of a worker: at most `most`, as each needs a thread of its own."""

    def __init__(self, most: int, resized: Callable[[int], None]) -> None:
        self._most = most
        self._resized = resized
        self._runs: dict[Kept, HandlerRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def has_item(self, number: int) -> bool:
        """Whether a handler of this item is among them."""
        return any(each.number == number for each in self._runs.values())

    def has_room(self, attempt: HandlerRun) -> bool:
        """Whether one more handler can be abandoned; if not, log that once for this one."""
        if len(self._runs) < self._most:
            return True
        if not attempt.is_stuck:
            attempt.is_stuck = True
            log.error(
                "%s; its slot stays taken, because %s already without a slot. Restart this "
                "process, and let long handlers call check() or use timeouts of their own",
                _still_runs(attempt),
                _such(len(self._runs)),
            )
        return False

    def add(self, attempt: HandlerRun) -> None:
        """Give the slot of a handler to others."""
        self._runs[attempt.kept] = attempt
        self._resized(len(self._runs))
        such = _such(len(self._runs))
        log.warning("%s; its slot is free again, %s now", _still_runs(attempt), such)

    def remove(self, attempt: HandlerRun) -> bool:
        """Forget a handler that has ended; False if it was not abandoned."""
        if self._runs.pop(attempt.kept, None) is None:
            return False
        self._resized(len(self._runs))
        such = _such(len(self._runs))
        log.info("%s has ended at last; %s now", _handler_of(attempt), such)
        return True

    def leave(self) -> None:
        """Log which handlers still run when the worker ends."""
        for attempt in self._runs.values():
            log.warning("%s; the worker ends without it", _still_runs(attempt))


def log_losses(store: Store, attempts: Iterable[HandlerRun]) -> None:
    """Log why attempts have lost their lease, each once: a cancelled item is not a fault."""
    for attempt in attempts:
        if attempt.is_loss_logged:
            continue
        attempt.is_loss_logged = True
        attempt.why_lost = _fate(store, attempt) if attempt.is_refused else None
        follows = "has stopped" if attempt.has_returned else "is told to stop"
        if attempt.why_lost is not None:
            log.info("%s %s; its handler %s", _name_of(attempt), attempt.why_lost, follows)
            continue
        log.warning(
            "work item %s: the lease with fence %s is lost or was not renewed in time; its "
            "handler can write nothing more",
            attempt.item.id,
            attempt.item.fence,
        )


def _fate(store: Store, attempt: HandlerRun) -> str | None:
    """Return what ended the item of an attempt; None if another attempt follows."""
    item = attempt.item
    try:
        if store.work.get(item.id).status != "cancelled":
            return None
        if _is_call(attempt) and store.peer_call(item.session_id or "").state == "timeout":
            return "timed out"
    except AskNotFound:
        return "was cancelled"
    except HoldfastError as error:
        log.debug("why work item %s was lost is not known: %s", item.id, error)
        return None
    return "was cancelled"


def _is_call(attempt: HandlerRun) -> bool:
    return attempt.item.type in {REQUEST, RESUME}


def _name_of(attempt: HandlerRun) -> str:
    item = attempt.item
    what = f"call {item.session_id}" if item.type == REQUEST else f"work item {item.id}"
    return f"{what} ({item.type})"


def _handler_of(attempt: HandlerRun) -> str:
    return f"the handler of {_name_of(attempt)}"


def _still_runs(attempt: HandlerRun) -> str:
    what = "call" if _is_call(attempt) else "item"
    since = f"its {what} {attempt.why_lost}" if attempt.why_lost else "its lease was lost"
    return f"{_handler_of(attempt)} still runs after {since}"


def _such(count: int) -> str:
    return f"{plural(count, 'such handler')} {'runs' if count == 1 else 'run'}"
