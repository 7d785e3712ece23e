"""Agents as services: a function for requests, another for sessions that go on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..arguments import require_text, shown
from ..errors import InvalidArgument, SessionEnded, WorkFailed
from ..kernel.flow import drive, drive_async, is_async
from ..peers import Answered, Parked, PeerRequest, Resumption
from ..peers.asks import REQUEST, RESUME, queue_of
from ..store import AsyncStore, Store
from ..worker import Handler, RunningItem, Worker

OnRequest: TypeAlias = Callable[[PeerRequest[Any]], Any]
OnResume: TypeAlias = Callable[[Resumption[Any]], Any]
S = TypeVar("S", bound=Store | AsyncStore)


class Service:
    """An agent that serves requests; any number of processes may serve the same name.

    `on_request` gets a request with its session, `on_resume` a session that goes on after a pause;
    both may be `async`. What they return is the answer. To wait they `return session.pause(…)`: if
    the answers are in, `on_resume` is called at once. An exception uses up a retry of their work
    item, and the last one is an `error` answer.
    """

    def __init__(self, name: str, on_request: OnRequest, on_resume: OnResume | None = None) -> None:
        self.name = require_text("name", name)
        for label, function in (("on_request", on_request), ("on_resume", on_resume)):
            is_missing = function is None and label == "on_resume"
            if not is_missing and not callable(function):
                raise InvalidArgument(f"{label} must be a function, not {shown(function)}")
        self._on_request = on_request
        self._on_resume = on_resume or self._cannot_resume

    def __repr__(self) -> str:
        return f"<Service {self.name}>"

    def worker(self, store: S, *, instances: int = 4, **options: Any) -> Worker[S]:
        """Return a worker that serves up to `instances` sessions at once; `options` are its own."""
        for name in ("queues", "concurrency", "handlers"):
            if name in options:
                raise InvalidArgument(f"{name} of a service's worker are given by the service")
        handler = self._handle_async if self.is_async else self._handle
        handlers: dict[str, Handler] = {REQUEST: handler, RESUME: handler}
        queues = [queue_of(self.name)]
        return Worker(store, handlers, queues=queues, concurrency=instances, **options)

    def serve(self, store: Store | AsyncStore, *, instances: int = 4, **options: Any) -> Any:
        """Serve until stopped by a signal; with an async store, await the call."""
        worker: Any = self.worker(store, instances=instances, **options)
        return worker.run()

    def _handle(self, item: RunningItem[Any]) -> Any:
        return drive(self._steps(item), lambda step: step())

    async def _handle_async(self, item: RunningItem[Any]) -> Any:
        return await drive_async(self._steps(item), _awaited)

    def _steps(self, item: RunningItem[Any]) -> Generator[Callable[[], Any], Any, Any]:
        """Begin with an item, and go on until the session waits or has its answer."""
        is_new = item.type == REQUEST
        try:
            given = yield item.receive if is_new else item.resume
        except SessionEnded:
            # An earlier attempt has ended the session, and died before it could say so.
            return None
        result = yield partial(self._on_request if is_new else self._on_resume, given)
        while isinstance(result, Answered):
            resumption = yield given.session.resumption
            result = yield partial(self._on_resume, resumption)
        return None if isinstance(result, Parked) else result

    @property
    def is_async(self) -> bool:
        """Whether one of its functions is `async`, so that it needs an async store."""
        return any(map(is_async, (self._on_request, self._on_resume)))

    def _cannot_resume(self, resumption: Resumption[Any]) -> None:
        raise WorkFailed(
            f"agent {self.name} has no on_resume, so session {resumption.session.id} cannot go on"
        )


async def _awaited(step: Callable[[], Any]) -> Any:
    """Run a step of a handler; a sync store and a plain function give their results at once."""
    result = step()
    return await result if inspect.isawaitable(result) else result
