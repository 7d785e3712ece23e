"""One attempt: a handler runs under a lease, and its outcome is written once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import random
import threading
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal

from ..arguments import shown
from ..checkpoints.diff import printable
from ..clock import iso
from ..errors import (
    CommitUnknown,
    HoldfastError,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    LimitExceeded,
    NotFound,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
    WorkCancelled,
    WorkFailed,
)
from ..kernel.flow import is_async
from ..kernel.operation import Async, Row, Sync
from ..leases import Guard, Kept
from ..work.items import Item, error_text
from ..work.transitions import Ending
from .items import RunningItem

Handler = Callable[[Any], Any]
Outcome = Literal["completed", "retried", "parked", "failed", "cancelled", "released", "lost"]

# What passes by itself: it is tried again for as long as the lease lives.
PASSING = (StoreBusy, StoreUnavailable, StoreFull, CommitUnknown)
BACKOFF_SECONDS = 0.05
BACKOFF_SECONDS_MAX = 5.0
STOPPED = (asyncio.CancelledError, concurrent.futures.CancelledError)

log = logging.getLogger("holdfast.worker")


class Attempt:
    """A claimed item on its way through a handler."""

    def __init__(
        self,
        row: Row,
        store: Any,
        lease_seconds: float,
        asked_at: float,
        told: Callable[[Attempt, Row | None], None],
    ) -> None:
        self.number: int = row["number"]
        guard = Guard("work item", row["id"], self.number, row["fence"])
        self.kept = Kept(self, guard, lease_seconds, asked_at, told)
        self.is_cancelled = False
        self.is_draining = False
        self.is_ending = False
        self.successor: Attempt | None = None
        self.unknown: CommitUnknown | None = None
        """A commit that has written the end of this attempt, or not: to be settled first."""
        self._settle = store.settle
        self._output: Any = None
        self._body = b""
        self._gate = threading.Lock()
        self._is_told = False
        self._is_given_up = threading.Event()
        self._interrupt: Callable[[], None] | None = None
        self.item: RunningItem[Sync] = RunningItem(store.runtime, row, self)
        self.given: RunningItem[Any] = self.item

    def begin(self) -> bool:
        """Decide, once, who has the attempt: a thread that runs it, or who gives it back."""
        return self._gate.acquire(blocking=False)

    @property
    def is_lost(self) -> bool:
        """Whether the lease must be taken for lost."""
        return self.kept.is_lost

    def lose(self) -> Outcome:
        """The lease is lost for good: say so, once, and tell the handler to stop."""
        self.kept.lose()
        if not self._is_told:
            self._is_told = True
            log.warning(
                "work item %s: the lease with fence %s is lost or was not renewed in time; its "
                "handler can write nothing more",
                self.item.id,
                self.item.fence,
            )
            self._stop()
        return "lost"

    def cancel(self) -> None:
        """Tell the handler that its item was cancelled."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._stop()

    def give_up(self) -> None:
        """Nobody waits for the handler any more; its item is being released."""
        self._is_given_up.set()
        self._stop()

    def run(self, handler: Handler, async_store: Any, loop: Any) -> Outcome | None:
        """Run the handler on this thread, or in the loop, and write its outcome.

        None if it has returned: then `ending` is to be written, by itself or with others.
        """
        if self.is_lost:
            return self.lose()
        try:
            output = self._call(handler, async_store, loop)
        except BaseException as error:
            return self.raised(error)
        return self.returned(output)

    async def run_here(self, handler: Handler, async_store: Any) -> Callable[[], Outcome | None]:
        """Run an async handler in this loop; return what writes its outcome, as `run` does.

        That is for another thread: it may have to wait.
        """
        if self.is_lost:
            return self.lose
        self.given = self._copy(async_store)
        try:
            output = await self._coroutine(handler)
        except BaseException as error:
            return partial(self.raised, error)
        return partial(self.returned, output)

    def raised(self, error: BaseException) -> Outcome:
        """Write what an exception of the handler leads to."""
        if isinstance(error, LeaseLost):
            # Another lease may be the one that it lost.
            is_ours = error.fields.get("id") == self.item.id
            return self._denied(error) if is_ours else self._fail(error)
        if isinstance(error, (WorkCancelled, *STOPPED)):
            return self._stopped(error)
        return self._fail(error)

    def returned(self, output: Any) -> Outcome | None:
        """Take in what the handler has returned."""
        if (ended := self._ended) is not None:
            return _outcome_of(ended)
        try:
            self._body = self.item.runtime.codec.encode(output, name="output")
        except (InvalidValue, LimitExceeded) as error:
            # Another run would bring the same.
            return self._fail(WorkFailed(f"the output cannot be stored: {error}"))
        except HoldfastError as error:
            return self._fail(error)
        self._output = output
        self.is_ending = True
        return None

    @property
    def ending(self) -> Ending:
        """The end of an attempt whose handler has returned."""
        return Ending("completed", "completed", output=self._body)

    def completed(self, row: Row | None) -> Outcome:
        """Take in that the ending was written, or that there was no lease left to write it."""
        if row is None:
            log.info("work item %s cannot be completed: its lease is lost", self.item.id)
            return self.lose()
        self.item._take(row)
        return "completed"

    def complete(self) -> Outcome:
        """Write the ending by itself."""
        try:
            return self._write(lambda: self.item.complete(self._output), "completed")
        except HoldfastError as error:
            return self._fail(error)

    def release(self) -> Outcome:
        """Give the item back; no retry is spent."""
        return self._write(self.item.release, "released")

    def refuse(self, reason: str) -> Outcome:
        """End the attempt without a handler; another worker may have one."""
        return self._fail(reason)

    def _call(self, handler: Handler, async_store: Any, loop: Any) -> Any:
        if is_async(handler):
            if async_store is None:
                with asyncio.Runner() as runner:
                    return runner.run(self._coroutine(handler))
            self.given = self._copy(async_store)
            return asyncio.run_coroutine_threadsafe(self._coroutine(handler), loop).result()
        result = handler(self.given)
        if inspect.isawaitable(result):
            if isinstance(result, Coroutine):
                result.close()
            raise InvalidArgument(
                f"the handler of {shown(self.item.type)} returned an awaitable; "
                "write it as `async def`"
            )
        return result

    def _copy(self, async_store: Any) -> RunningItem[Async]:
        """Return the item for a handler of an async store."""
        copy: RunningItem[Async] = RunningItem(async_store.runtime, {}, self)
        copy._adopt(self.item)
        return copy

    async def _coroutine(self, handler: Handler) -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._interrupt = lambda: _call_soon(loop, task.cancel)
        if self.is_lost or self.is_cancelled or self._is_given_up.is_set():
            task.cancel()
        try:
            return await handler(self.given)
        finally:
            self._interrupt = None

    def _stop(self) -> None:
        if (interrupt := self._interrupt) is not None:
            interrupt()

    def _stopped(self, error: BaseException) -> Outcome:
        """Say what becomes of a handler that was stopped, or that stopped by itself."""
        if self.is_lost:
            return self.lose()
        if self.is_cancelled:
            return self._write(self.item.cancel, "cancelled")
        if self._is_given_up.is_set():
            return "released"
        return self._fail(error)

    def _fail(self, error: object) -> Outcome:
        retry, delay_seconds = True, None
        raised = error
        if isinstance(error, WorkFailed):
            retry, delay_seconds = bool(error.retry), error.delay_seconds
            error = str(error)
        fail = partial(self.item.fail, retry=retry)
        try:
            outcome = self._write(partial(fail, error, delay_seconds=delay_seconds), "failed")
        except InvalidArgument as wrong:
            outcome = self._write(partial(fail, f"{error} ({wrong})"), "failed")
        self._log_failure(raised, outcome)
        return outcome

    def _log_failure(self, error: object, outcome: Outcome) -> None:
        """Say in one line what failed and what follows; secrets and control characters are out."""
        item = self.item
        redact = item.runtime.redactor.redact
        follows = {
            "retried": f"tried again at {iso(item.available_at)}, "
            f"{item.retry_count} of {item.max_retries} retries used",
            "parked": f"it waits for effect {item.waits_for_effect} to be resolved",
            "failed": "it failed for good",
        }
        log.warning(
            "work item %s (%s), attempt %s: %s; %s",
            item.id,
            item.type,
            item.attempts,
            printable(error_text(error, redact)),
            follows.get(outcome, outcome),
        )
        if isinstance(error, BaseException) and log.isEnabledFor(logging.DEBUG):
            log.debug("%s", redact("".join(traceback.format_exception(error))))

    def _write(self, write: Callable[[], object], outcome: Outcome) -> Outcome:
        """End the attempt in the store; while that cannot be reached the lease is the limit."""
        if (ended := self._ended) is not None:
            return _outcome_of(ended)
        self.is_ending = True
        pause = BACKOFF_SECONDS
        while not self.is_lost:
            try:
                if self.unknown is not None and self._settle(self.unknown.id):
                    return outcome
                self.unknown = None
                write()
            except PASSING as error:
                if isinstance(error, CommitUnknown):
                    self.unknown = error
                log.warning("work item %s cannot be ended now: %s", self.item.id, error)
                self._is_given_up.wait(random.uniform(pause / 2, pause))
                if self._is_given_up.is_set():
                    break
                pause = min(pause * 2, BACKOFF_SECONDS_MAX)
            except (LeaseLost, NotFound) as error:
                return self._denied(error)
            except StoreError as error:
                log.error("work item %s cannot be ended: %s", self.item.id, error)
                break
            else:
                return outcome if outcome == "completed" else _outcome_of(self.item)
        return self.lose() if self.is_lost else "lost"

    @property
    def delay_seconds(self) -> float:
        """How long the item waits for its next attempt."""
        ended = self._ended or self.item
        return max(0.0, (ended.available_at - ended.updated_at) / 1000)

    @property
    def has_ended(self) -> bool:
        """Whether the attempt is over, or is being brought to its end."""
        return self.is_ending or self._ended is not None

    @property
    def _ended(self) -> Item[Any] | None:
        """The handle through which the handler, or the worker, has ended the attempt."""
        for handle in (self.given, self.item):
            if handle.status != "in_progress":
                return handle
        return None

    def _denied(self, error: HoldfastError) -> Outcome:
        if (ended := self._ended) is not None:
            return _outcome_of(ended)
        log.info("%s", error)
        return self.lose()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        log.debug("the event loop is closed; its handlers have ended")


def _outcome_of(item: Item[Any]) -> Outcome:
    """Return what a handle that ended its attempt says of it."""
    match item.status:
        case "completed" | "failed" | "cancelled":
            return item.status
        case _ if item.state == "review":
            return "parked"
        case _ if item.error is None:
            return "released"
    return "retried"
