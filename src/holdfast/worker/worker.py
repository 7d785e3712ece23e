"""The worker: runs handlers on a sync or async store until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

from ..arguments import require_seconds, require_text, require_text_or_none, require_whole, shown
from ..effects.tools import by_name
from ..errors import InvalidArgument
from ..kernel.flow import in_thread, require_function
from ..leases import default_holder, lease_milliseconds
from ..maintenance.retention import require_days
from ..sessions.rows import BOOT_MARK
from ..store import AsyncStore, Store, sync_twin
from ..work.claims import CLAIM_MAX, require_queues
from .attempts import AttemptOutcome, Handler
from .inbox import Inbox, ServiceTurn
from .loop import WorkerLoop, WorkerOptions

S = TypeVar("S", bound=Store | AsyncStore)

CONCURRENCY_MAX = 500
SECONDS_MAX = 24 * 3600
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Worker(Generic[S]):
    """Runs the handlers of work items until it is stopped. Any number of workers may run at once.

    `handlers` maps each type to a function that takes the item and returns the output. A plain
    function runs in a thread. An async one runs in the loop of an async store, or in a loop of its
    own with a sync store. An exception uses up a retry, except WorkFailed, whose `retry` and
    `delay_seconds` decide; Unresolved, which parks the item until the effect is resolved; and
    SessionBusy, InProgress and StoreBusy, which are retried.

    A handler whose item was cancelled, or whose lease is lost, is told to stop. If it does not, its
    slot goes to other items, for up to `concurrency` such handlers at once.
    """

    def __init__(
        self,
        store: S,
        handlers: Mapping[str, Handler],
        *,
        concurrency: int = 4,
        queues: Sequence[str] | str | None = None,
        lease_seconds: float = 30,
        holder: str | None = None,
        instance: str | None = None,
        poll_seconds: float = 1,
        sweep_interval_seconds: float = 10,
        prefetch: int = 0,
        drain_seconds: float = 30,
        work_days: float | None = 30,
        tools: Any = None,
        inbox: Inbox | None = None,
        turn: ServiceTurn | None = None,
    ) -> None:
        if not isinstance(store, Store | AsyncStore):
            raise InvalidArgument(f"a worker needs a store, not {type(store).__name__}")
        require_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        require_whole("prefetch", prefetch, 0, CLAIM_MAX - concurrency)
        lease_milliseconds(lease_seconds)
        for label, seconds, least in (
            ("poll_seconds", poll_seconds, 0.001),
            ("sweep_interval_seconds", sweep_interval_seconds, 0.001),
            ("drain_seconds", drain_seconds, 0),
        ):
            require_seconds(label, seconds, SECONDS_MAX, least=least)
        if work_days is not None:
            require_days(work_days)
        by_name(tools)
        boot = default_holder() if holder is None else holder
        require_text_or_none("instance", instance)
        name = boot if instance is None else f"{instance}{BOOT_MARK}{boot}"
        require_text("holder", name)
        self.store = store
        self._options = WorkerOptions(
            handlers=_require_handlers(handlers),
            queues=require_queues(sorted(handlers) if queues is None else queues),
            concurrency=concurrency,
            prefetch=prefetch,
            lease_seconds=lease_seconds,
            boot=boot,
            instance=instance,
            holder=name,
            poll_seconds=poll_seconds,
            sweep_interval_seconds=sweep_interval_seconds,
            drain_seconds=drain_seconds,
            work_days=work_days,
            tools=tools,
            inbox=inbox,
            turn=turn,
        )
        self._loop: WorkerLoop | None = None
        self._stops_before = 0

    @property
    def holder(self) -> str:
        """The holder name in this worker's leases."""
        return self._options.holder

    @property
    def counts(self) -> Counter[AttemptOutcome]:
        """Attempts by outcome: completed, retried, parked, failed, cancelled, released, lost."""
        return Counter() if self._loop is None else self._loop.counts.copy()

    @property
    def abandoned(self) -> int:
        """How many handlers still run although their item was cancelled, timed out or lost.

        Each was told to stop and can write nothing more; its slot is used by other items.
        """
        return 0 if self._loop is None else len(self._loop.abandoned)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._loop is not None and self._loop.stops > 0

    @property
    def is_stopped_at_once(self) -> bool:
        """Whether `stop` was called a second time, before it had drained."""
        return self._loop is not None and self._loop.stops > 1

    @overload
    def run(self: Worker[Store], *, until_empty: bool = ...) -> None: ...
    @overload
    def run(self: Worker[AsyncStore], *, until_empty: bool = ...) -> Coroutine[Any, Any, None]: ...
    def run(self, *, until_empty: bool = False) -> Any:
        """Run items until stopped; with `until_empty`, until nothing is ready or running.

        In the main thread SIGTERM and SIGINT drain it: no more items are claimed, running ones may
        finish for `drain_seconds`, the rest is released without using up a retry. A second signal
        releases everything at once. With an async store, await the call.
        """
        if self._loop is not None:
            raise InvalidArgument("a worker runs only once; make another one")
        if until_empty and self._options.inbox is not None:
            raise InvalidArgument(
                "a worker with a transport cannot know that no more requests will arrive"
            )
        if isinstance(self.store, Store):
            return self._run_sync(self.store, until_empty)
        return self._run_async(self.store, until_empty)

    def stop(self) -> None:
        """Drain and return from `run`; called again, release everything at once.

        Safe in any thread and in signal handlers.
        """
        if self._loop is None:
            self._stops_before += 1
        else:
            self._loop.stop()

    def _begin(self, loop: WorkerLoop) -> WorkerLoop:
        """Set the loop, and stop it if `stop` was called before `run`."""
        self._loop = loop
        for _ in range(self._stops_before):
            loop.stop()
        return loop

    def _run_sync(self, store: Store, until_empty: bool) -> None:
        loop = self._begin(WorkerLoop(self._options, store))
        with _signals(loop):
            loop.run(until_empty=until_empty)

    async def _run_async(self, store: AsyncStore, until_empty: bool) -> None:
        event_loop = asyncio.get_running_loop()
        twin = await asyncio.to_thread(sync_twin, store)
        loop = self._begin(WorkerLoop(self._options, twin, store, event_loop))
        with _signals(loop):
            await _until_ended(loop, until_empty)


async def _until_ended(loop: WorkerLoop, until_empty: bool) -> None:
    """Run the loop in a thread; on cancellation, stop it and wait until it has ended."""
    ended = asyncio.wrap_future(in_thread(functools.partial(loop.run, until_empty=until_empty)))
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            cancelled = error
            loop.stop()
    if cancelled is not None:
        ended.exception()  # Retrieved, so that asyncio does not warn about it.
        raise cancelled
    ended.result()


@contextlib.contextmanager
def _signals(loop: WorkerLoop) -> Iterator[None]:
    """Stop the loop on a signal. Only the main thread may install signal handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: loop.stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _require_handlers(handlers: Mapping[str, Handler]) -> Mapping[str, Handler]:
    if not isinstance(handlers, Mapping) or not handlers:
        raise InvalidArgument("handlers must be a non-empty dict such as {'mail': send_mail}")
    for type_, handler in handlers.items():
        require_function(f"the handler of {shown(type_)}", handler)
    return dict(handlers)
