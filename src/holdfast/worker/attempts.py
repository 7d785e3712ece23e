"""One attempt: run a handler under a lease, and record its outcome once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from .. import errors
from ..arguments import shown
from ..checkpoints.diff import printable
from ..clock import iso
from ..items import WorkItem
from ..kernel.flow import is_async
from ..kernel.operation import Async, C, Call, Row, Runtime, Sync
from ..leases import Guard, Kept
from ..peers import PeerRequest, Resumption
from ..peers.uptake import TakenUp
from ..redaction import log_origin
from ..work.items import Item, error_text
from ..work.transitions import BUSY, Transition, turn
from .inbox import Envelope

Handler = Callable[[Any], Any]
AttemptOutcome = Literal[
    "completed", "retried", "parked", "failed", "cancelled", "released", "lost"
]

# Retried for as long as the lease lasts.
TRANSIENT = (errors.StoreBusy, errors.StoreUnavailable, errors.StoreFull, errors.CommitUnknown)
BACKOFF_SECONDS = 0.05
BACKOFF_SECONDS_MAX = 5.0
STOPPED = (asyncio.CancelledError, concurrent.futures.CancelledError)

log = logging.getLogger("holdfast.worker")


class RunningItem(WorkItem[C]):
    """The work item passed to a handler, with its lease."""

    def __init__(self, runtime: Runtime, row: Row, attempt: HandlerRun) -> None:
        # Here the lease ends a little earlier than in the database, so clocks need not agree.
        super().__init__(runtime.checked(self._require_lease), row, attempt.kept.lease_seconds)
        self.attempt = attempt

    @property
    def is_cancelled(self) -> bool:
        """Whether cancellation was requested; the handler should stop."""
        return self.attempt.is_cancelled

    @property
    def is_draining(self) -> bool:
        """Whether the worker is stopping; a long handler may release its item and return."""
        return self.attempt.is_draining

    @property
    def is_lost(self) -> bool:
        """Whether the lease is lost or about to expire; nothing more can be written."""
        return self.attempt.kept.is_lost

    @property
    def taken_up(self) -> PeerRequest[C] | Resumption[C] | None:
        """The request or resumption that was taken up when the item was claimed, if it was."""
        taken = self.attempt.taken_up
        return None if taken is None else replace(taken.given, session=self._session(taken.fence))

    def check(self) -> None:
        """Raise WorkCancelled or LeaseLost if the handler should stop. Cheap enough for loops."""
        if self.is_cancelled:
            raise errors.WorkCancelled(
                f"work item {self.id} was cancelled; stop this attempt", id=self.id
            )
        self._require_lease()

    def _require_lease(self) -> None:
        if self.is_lost:
            raise self._guard().lost()


class HandlerRun:
    """The run of a handler for one claimed item."""

    def __init__(
        self,
        row: Row,
        store: Any,
        lease_seconds: float,
        asked_at: float,
        on_renewal: Callable[[HandlerRun, Row | None], None],
        *,
        envelope: Envelope | None = None,
        taken_up: TakenUp | None = None,
    ) -> None:
        self.number: int = row["number"]
        guard = Guard("work item", row["id"], self.number, row["fence"])
        self.kept = Kept(self, guard, lease_seconds, asked_at, on_renewal)
        self.is_cancelled = False
        self.is_draining = False
        self.is_ending = False
        self.successor: HandlerRun | None = None
        self.envelope = envelope
        self.unknown: errors.CommitUnknown | None = None
        """A commit with an unknown outcome that may have written the completion; settled first."""
        self.completion: tuple[Item[Any], Transition] | None = None
        """To be written once the handler has returned."""
        self._settle = store.settle
        self._gate = threading.Lock()
        self.is_refused = False
        """Whether the database has said that the lease is lost; it may know why."""
        self.why_lost: str | None = None
        self.is_loss_logged = False
        self.is_stuck = False
        """Whether its handler should be abandoned, but too many are."""
        self.has_returned = False
        self.dispatched_at = math.inf
        """When it was given to the threads or tasks; not as long as an earlier attempt runs."""
        self.stops_since: float | None = None
        """When the handler was told to stop."""
        self._is_losing = False
        self._is_given_up = threading.Event()
        self._interrupt: Callable[[], None] | None = None
        self.taken_up = taken_up
        """What was taken up for the handler when the item was claimed."""
        driven = {} if taken_up is None else {"driving_fence": taken_up.fence}
        self.item: RunningItem[Sync] = RunningItem(store.runtime, {**row, **driven}, self)
        self.given: RunningItem[Any] = self.item

    def begin(self) -> bool:
        """Claim the right to run or release the attempt; True for the first caller only."""
        return self._gate.acquire(blocking=False)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a thread or a task."""
        return self.dispatched_at < math.inf and not self._gate.locked()

    def lose(self) -> AttemptOutcome:
        """Mark the lease as lost, and stop the handler."""
        is_first = not self._is_losing
        self._is_losing = True
        self.kept.lose()
        if is_first:
            self._stop()
        return "lost"

    def cancel(self) -> None:
        """Tell the handler that its item was cancelled."""
        if not self.is_cancelled:
            self.is_cancelled, self.why_lost = True, "was cancelled"
            log.info(
                "work item %s (%s) was cancelled; its handler is told to stop",
                self.item.id,
                self.item.type,
            )
            self._stop()

    def end_cancelled(self) -> AttemptOutcome:
        """End a cancelled item whose handler does not stop; it can write nothing more."""
        outcome = self._write(self.item.cancel, "cancelled")
        self.kept.lose()
        return outcome

    def stops_for(self, seconds: float) -> bool:
        """Whether the handler still runs although it was told to stop that long ago."""
        if self.stops_since is None or self.has_ended or not self._gate.locked():
            return False
        return time.monotonic() - self.stops_since >= seconds

    def acknowledge(self) -> None:
        """Acknowledge the message that delivered the item, whose end or pause is durable."""
        if self.envelope is not None:
            self._tell(self.envelope.ack)

    def extend(self) -> None:
        """Extend the acknowledgement deadline of the message that delivered the item."""
        if self.envelope is not None:
            self._tell(self.envelope.extend)

    def _tell(self, tell: Callable[[], None]) -> None:
        """Tell the transport something; if it fails, the message comes again and is recognised."""
        try:
            tell()
        except Exception as error:
            log.warning(
                "the transport cannot be told of work item %s; its message may be redelivered: %s",
                self.item.id,
                type(error).__name__,
            )

    def give_up(self) -> None:
        """Stop waiting for the handler, whose item is about to be released."""
        self._is_given_up.set()
        self._stop()

    def run(self, handler: Handler, async_store: Any, loop: Any) -> AttemptOutcome | None:
        """Run the handler on this thread or in the loop; if it raised, write the failure.

        None if it returned: then `completion` has to be written, alone or with others.
        """
        if self.kept.is_lost:
            return self.lose()
        try:
            output = self._call(handler, async_store, loop)
        except BaseException as error:
            return self.raised(error)
        return self.returned(output)

    async def run_here(
        self, handler: Handler, async_store: Any
    ) -> Callable[[], AttemptOutcome | None]:
        """Run an async handler in this loop; return a callback that does the rest of `run`.

        The callback may block, so it belongs on another thread.
        """
        if self.kept.is_lost:
            return self.lose
        self.given = self._copy(async_store)
        output, error = await _output_or_error(self._coroutine(handler))
        return partial(self.returned, output) if error is None else partial(self.raised, error)

    def raised(self, error: BaseException) -> AttemptOutcome:
        """Write the outcome of a handler that raised."""
        self.has_returned = True
        error = decisive(error)
        # The lost lease may be of something else.
        if isinstance(error, errors.LeaseLost) and error.fields.get("id") == self.item.id:
            return self._denied(error)
        if isinstance(error, (errors.WorkCancelled, *STOPPED)):
            if self.kept.is_lost:
                return self.lose()
            if self.is_cancelled:
                return self._write(self.item.cancel, "cancelled")
            if self._is_given_up.is_set():
                return "released"
        return self.fail(error)

    def returned(self, output: Any) -> AttemptOutcome | None:
        """Prepare the completion of a handler that returned, unless it ended its item itself."""
        self.has_returned = True
        if (ended := self._ended) is not None:
            return _outcome_of(ended)
        try:
            body = self.item.runtime.codec.encode(output, name="output")
        except (errors.InvalidValue, errors.LimitExceeded) as error:
            # A retry would return the same.
            return self.fail(errors.WorkFailed(f"the output cannot be stored: {error}"))
        self.completion = (self.item, Transition("completed", "completed", body))
        self.is_ending = True
        return None

    def completed(self, row: Row | None) -> AttemptOutcome:
        """Return the outcome of a written completion; without a row the lease is lost."""
        if row is None:
            self.is_refused = True
            return self.lose()
        self.item._take(row)
        return "completed"

    def complete(self) -> AttemptOutcome:
        """Write the completion by itself."""
        try:
            return self._write(self._complete, "completed")
        except errors.HoldfastError as error:
            return self.fail(error)

    def _complete(self) -> None:
        call = Call(turn, None, ([self.completion], None))
        [row], _ = self.item.runtime.driver.run(call)
        if row is None:
            raise self.item._guard().lost()
        self.item._take(row)

    def release(self) -> AttemptOutcome:
        """Return the item to its queue, without using up a retry."""
        return self._write(self.item.release, "released")

    def fail(self, error: object) -> AttemptOutcome:
        """End the attempt with an error, and log it."""
        retry, delay_seconds = True, None
        raised = error
        if isinstance(error, errors.WorkFailed):
            retry, delay_seconds = bool(error.retry), error.delay_seconds
            error = str(error)
        fail = partial(self.item.fail, retry=retry)
        try:
            outcome = self._write(partial(fail, error, delay_seconds=delay_seconds), "failed")
        except errors.InvalidArgument as wrong:
            outcome = self._write(partial(fail, f"{error} ({wrong})"), "failed")
        self._log_failure(raised, outcome)
        return outcome

    def _log_failure(self, error: object, outcome: AttemptOutcome) -> None:
        """Log the failure and what follows in one line, redacted and printable."""
        item, redactor = self.item, self.item.runtime.redactor
        follows = {
            "retried": f"it is retried at {iso(item.available_at)}, "
            f"{item.retry_count} of {item.max_retries} retries used",
            "parked": f"it waits for effect {item.waits_for_effect} to be resolved",
            "failed": "it failed permanently",
        }
        log.warning(
            "work item %s (%s), attempt %s: %s; %s",
            item.id,
            item.type,
            item.attempts,
            printable(error_text(error, redactor.redact)),
            follows.get(outcome, outcome),
        )
        log_origin(log, redactor, error)

    def _call(self, handler: Handler, async_store: Any, loop: Any) -> Any:
        if is_async(handler):
            if async_store is None:
                with asyncio.Runner() as runner:
                    return runner.run(self._coroutine(handler))
            self.given = self._copy(async_store)
            return run_in_loop(self._coroutine(handler), loop)
        result = handler(self.given)
        if inspect.isawaitable(result):
            if isinstance(result, Coroutine):
                result.close()
            raise errors.InvalidArgument(
                f"the handler of {shown(self.item.type)} returned an awaitable; "
                "write it as `async def`"
            )
        return result

    def _copy(self, async_store: Any) -> RunningItem[Async]:
        """Return the item's handle for an async handler."""
        copy: RunningItem[Async] = RunningItem(async_store.runtime, {}, self)
        copy._adopt(self.item)
        return copy

    async def _coroutine(self, handler: Handler) -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def interrupt() -> None:
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                log.debug("the event loop is closed; its handlers have ended")

        self._interrupt = interrupt
        if self.kept.is_lost or self.is_cancelled or self._is_given_up.is_set():
            task.cancel()
        try:
            return await handler(self.given)
        finally:
            self._interrupt = None

    def _stop(self) -> None:
        if self.stops_since is None:
            self.stops_since = time.monotonic()
        if (interrupt := self._interrupt) is not None:
            interrupt()

    def _write(self, write: Callable[[], object], outcome: AttemptOutcome) -> AttemptOutcome:
        """Write the end of the attempt; retry an unavailable store while the lease lasts."""
        if (ended := self._ended) is not None:
            return _outcome_of(ended)
        self.is_ending = True
        pause = BACKOFF_SECONDS
        while not self.kept.is_lost:
            try:
                if self.unknown is not None and self._settle(self.unknown.id):
                    return outcome
                self.unknown = None
                write()
            except TRANSIENT as error:
                if isinstance(error, errors.CommitUnknown):
                    self.unknown = error
                log.warning("work item %s cannot be ended now: %s", self.item.id, error)
                self._is_given_up.wait(random.uniform(pause / 2, pause))
                if self._is_given_up.is_set():
                    break
                pause = min(pause * 2, BACKOFF_SECONDS_MAX)
            except (errors.LeaseLost, errors.NotFound) as error:
                return self._denied(error)
            except errors.StoreError as error:
                log.error("work item %s cannot be ended: %s", self.item.id, error)
                break
            else:
                return _outcome_of(self.item)
        return self.lose() if self.kept.is_lost else "lost"

    @property
    def delay_seconds(self) -> float:
        """How long until the item's next attempt."""
        ended = self._ended or self.item
        return max(0.0, (ended.available_at - ended.updated_at) / 1000)

    @property
    def has_ended(self) -> bool:
        """Whether the attempt has ended, or is being ended."""
        return self.is_ending or self._ended is not None

    @property
    def _ended(self) -> Item[Any] | None:
        """The handle through which the handler or the worker ended the attempt, if it ended."""
        return next(
            (each for each in (self.given, self.item) if each.stored_state != "in_progress"), None
        )

    def _denied(self, error: errors.HoldfastError) -> AttemptOutcome:
        if (ended := self._ended) is not None:
            return _outcome_of(ended)
        log.debug("%s", error)
        self.is_refused = True
        return self.lose()


def run_in_loop(running: Awaitable[Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Run a coroutine in the event loop of a program from another thread."""
    output, error = asyncio.run_coroutine_threadsafe(_output_or_error(running), loop).result()
    if error is not None:
        raise error
    return output


async def _output_or_error(running: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Catch everything: a task that raises SystemExit ends its event loop."""
    try:
        return await running, None
    except BaseException as error:
        return None, error


def decisive(error: BaseException) -> BaseException:
    """Return the error that decides what becomes of an attempt.

    Of a group, as a TaskGroup raises it, that is one of its errors if none of them uses up a retry.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [decisive(each) for each in error.exceptions]
    if not all(isinstance(each, (errors.Unresolved, *BUSY)) for each in found):
        return error
    return next((each for each in found if isinstance(each, errors.Unresolved)), found[0])


def _outcome_of(item: Item[Any]) -> AttemptOutcome:
    """Return the outcome of an attempt from the handle that ended it."""
    match item.status:
        case "completed" | "failed" | "cancelled":
            return item.status
        case _ if item.stored_state == "review":
            return "parked"
    return "released" if item.error is None else "retried"
