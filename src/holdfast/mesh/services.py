"""Agents as services: one function for requests, another for sessions that resume."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from ..arguments import require_text
from ..effects.tools import by_name
from ..errors import InvalidArgument, SessionEnded, WorkFailed
from ..kernel.flow import Flow, drive, drive_async, flow, is_async, require_function
from ..kernel.operation import C
from ..peers import Answered, Ask, Parked, PeerRequest, Resumption
from ..peers.asks import REQUEST, RESUME, queue_of
from ..peers.handle import GRACE_SECONDS_MAX, SessionPeers
from ..peers.uptake import serve_turn
from ..session import Session
from ..store import AsyncStore, Store
from ..worker import Handler, RunningItem, Worker
from .courier import Courier, Credentials, Identified, minted, require_credentials, routed
from .transports import Transport, require_transport

OnRequest: TypeAlias = Callable[[PeerRequest[Any]], Any]
OnResume: TypeAlias = Callable[[Resumption[Any]], Any]
S = TypeVar("S", bound=Store | AsyncStore)


class Service:
    """An agent that serves requests; any number of processes may serve the same name.

    `on_request` takes a request with its session, `on_resume` a session that resumes after a pause;
    both may be `async`. What they return is the answer. To wait, they `return session.pause(…)`: if
    the answers have already arrived, `on_resume` is called at once. An exception uses up a retry of
    their work item, and the last one becomes an `error` answer. With `stateless=False`, a pause
    waits in memory for its answers, up to an hour, before it releases the session. `tools` are
    those that its functions call: each of its processes verifies the effects that another one left
    behind, when it starts and now and then.
    """

    def __init__(
        self,
        name: str,
        on_request: OnRequest,
        on_resume: OnResume | None = None,
        *,
        stateless: bool = True,
        tools: Any = None,
    ) -> None:
        self.name = require_text("name", name)
        self._tools = by_name(tools)
        for label, function in (("on_request", on_request), ("on_resume", on_resume)):
            if function is not None or label == "on_request":
                require_function(label, function)
        self._on_request = on_request
        self._on_resume = on_resume or self._cannot_resume
        self._is_stateless = stateless

    def __repr__(self) -> str:
        return f"<Service {self.name}>"

    def worker(
        self,
        store: S,
        transport: Transport | Literal["database"] | None = None,
        *,
        instances: int = 4,
        credentials: Credentials | None = None,
        **options: Any,
    ) -> Worker[S]:
        """Return a worker that serves up to `instances` sessions at once; `options` are a worker's.

        Requests also arrive through the `transport`, and requests of its sessions are sent through
        it, with the headers that the `credentials` hook returns for each message; None is the
        database.
        """
        for name in ("queues", "concurrency", "handlers", "inbox", "turn"):
            if name in options:
                raise InvalidArgument(f"a service sets the {name} of its worker; omit {name}")
        require_credentials(credentials)
        carrier = require_transport(transport)
        if carrier is not None:
            store = routed(store, carrier)
            options["inbox"] = Courier(carrier, self.name, credentials)
        handle = self._handle_async if self.is_async else self._handle
        handler: Handler = partial(handle, credentials)
        handlers = {REQUEST: handler, RESUME: handler}
        queues = [queue_of(self.name)]
        options["turn"] = serve_turn
        options["tools"] = [*self._tools.values(), *by_name(options.get("tools")).values()]
        return Worker(store, handlers, queues=queues, concurrency=instances, **options)

    def serve(
        self,
        store: Store | AsyncStore,
        transport: Transport | Literal["database"] | None = None,
        *,
        instances: int = 4,
        **options: Any,
    ) -> Any:
        """Serve until stopped by a signal; with an async store, await the call."""
        worker: Any = self.worker(store, transport, instances=instances, **options)
        return worker.run()

    def _handle(self, credentials: Credentials | None, item: RunningItem[Any]) -> Any:
        return drive(self._steps(credentials, item), lambda step: step())

    async def _handle_async(self, credentials: Credentials | None, item: RunningItem[Any]) -> Any:
        return await drive_async(self._steps(credentials, item), _awaited)

    def _steps(
        self, credentials: Credentials | None, item: RunningItem[Any]
    ) -> Generator[Callable[[], Any], Any, Any]:
        """Start with an item, and continue until the session waits or has its answer."""
        is_new = item.type == REQUEST
        given: Any = item.taken_up
        try:
            if given is None:
                given = yield item.receive if is_new else item.resume
        except SessionEnded:
            # An earlier attempt ended the session, and died before it could complete the item.
            return None
        if is_new:
            envelope = item.attempt.envelope
            headers = {} if envelope is None else dict(envelope.message.headers)
            request = replace(given, **self._given(given.session), headers=headers)
            result = yield partial(self._on_request, request)
        else:
            result = yield from self._go_on(credentials, given)
        while isinstance(result, Answered):
            resumption = yield given.session.resumption
            result = yield from self._go_on(credentials, resumption)
        return None if isinstance(result, Parked) else result

    def _go_on(
        self, credentials: Credentials | None, resumption: Resumption[Any]
    ) -> Generator[Callable[[], Any], Any, Any]:
        """Call `on_resume` with newly created credentials."""
        session, headers = resumption.session, dict[str, str]()
        if credentials is not None:
            info = yield session.info
            identified = Identified(
                kind="resume",
                agent=self.name,
                ask_id=session.id,
                session_id=session.id,
                root_id=session.root_id,
                user=info.user,
            )
            headers = yield partial(minted, credentials, identified)
        given = replace(resumption, **self._given(session), headers=headers)
        return (yield partial(self._on_resume, given))

    def _given(self, session: Any) -> dict[str, Any]:
        """Return the session that is passed to the functions, and the store that it belongs to."""
        runtime = session.runtime
        return {
            "session": session if self._is_stateless else HeldSession.of(session),
            "store": AsyncStore(runtime) if runtime.is_async else Store(runtime),
        }

    @property
    def is_async(self) -> bool:
        """Whether one of its functions is `async`, so that it needs an async store."""
        return any(map(is_async, (self._on_request, self._on_resume)))

    def _cannot_resume(self, resumption: Resumption[Any]) -> None:
        raise WorkFailed(
            f"agent {self.name} has no on_resume, so session {resumption.session.id} cannot resume"
        )


class HeldSession(Session[C]):
    """A session whose pause waits for its answers in memory first, and keeps its lease."""

    @classmethod
    def of(cls, session: Session[C]) -> HeldSession[C]:
        """Return another handle of a session that an item drives."""
        here = (session.runtime, session.id, session.number, session.root_id, session.name)
        return cls(
            *here,
            fence=session._place.fence,
            guard=session.guard,
            holder=session.holder,
            item=session.item,
        )

    @flow
    def pause(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        context: Any = None,
        *,
        need: int | Literal["all", "any"] = "all",
        rest: Literal["cancel", "keep"] = "cancel",
        asks: Sequence[Ask] = (),
    ) -> Flow[Parked | Answered]:
        """Wait for answers in memory; after an hour release the session, like any other."""
        given: dict[str, Any] = {"need": need, "rest": rest, "grace_seconds": GRACE_SECONDS_MAX}
        given |= {"asks": asks}
        return (yield from SessionPeers.answers(self, context, **given))


async def _awaited(step: Callable[[], Any]) -> Any:
    """Run a step of a handler, and await its result if it has to be awaited."""
    result = step()
    return await result if inspect.isawaitable(result) else result
