"""Callers that are not sessions: a request, its progress, and its durable answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Literal

from ..arguments import require_seconds
from ..errors import InvalidArgument, StoreBusy, StoreReadOnly
from ..feed.events import EVENTS_PER_READ_MAX
from ..kernel.flow import Flow, flow, invoke, perform, wait
from ..kernel.operation import Async, C, Handle, Sync
from ..kernel.signals import TREE_TOPIC
from ..leases import uptime_seconds
from ..peers import PeerCall, StorePeers
from ..peers.answers import expire_call, seconds_left
from ..peers.asks import Timeout
from ..peers.settlement import answer_topic
from ..store import AsyncStore, StoreHandle, sync_twin
from .courier import Courier, Credentials, require_credentials, routed
from .transports import Transport, require_transport

POLL_SECONDS = 1.0
WAIT_SECONDS_MAX = 7 * 24 * 3600.0

log = logging.getLogger("holdfast.mesh")


class Mesh(Handle[C]):
    """Asks agents on behalf of callers that are not sessions, such as a web server.

    With a `transport`, it sends requests and receives answers in the background from the first
    request until it is closed; the `credentials` hook returns the headers of each message.
    """

    def __init__(
        self,
        store: StoreHandle[C],
        transport: Transport | Literal["database"] | None = None,
        *,
        credentials: Credentials | None = None,
    ) -> None:
        if not isinstance(store, StoreHandle):
            raise InvalidArgument(f"a mesh needs a store, not {type(store).__name__}")
        require_credentials(credentials)
        carrier = require_transport(transport)
        self._courier: Courier | None = None
        if carrier is not None:
            store = routed(store, carrier)
            self._courier = Courier(carrier, None, credentials)
        super().__init__(store.runtime)
        self._store: StoreHandle[Any] = store
        self._gate = threading.Lock()

    @flow
    def close(self) -> Flow[None]:
        """Stop sending and receiving; what was not sent is left to another mesh of the store."""
        if self._courier is not None:
            yield from invoke(self._courier.stop)

    def __enter__(self: Mesh[Sync]) -> Mesh[Sync]:
        return self

    def __exit__(self: Mesh[Sync], *_: object) -> None:
        self.close()

    async def __aenter__(self: Mesh[Async]) -> Mesh[Async]:
        return self

    async def __aexit__(self: Mesh[Async], *_: object) -> None:
        await self.close()

    def _start(self, courier: Courier) -> None:
        """Start sending and receiving, unless already started."""
        store: Any = self._store
        with self._gate:
            if not courier.is_open:
                courier.open(sync_twin(store) if isinstance(store, AsyncStore) else store)

    @flow
    def request(
        self,
        agent: str,
        input: Any = None,
        *,
        request_id: str | None = None,
        user: str | None = None,
        timeout_seconds: Timeout = "never",
        wait_seconds: float | None = None,
        on_progress: Callable[[Any], object] | None = None,
    ) -> Flow[PeerCall]:
        """Ask an agent, and wait for its answer, which stays readable for a week.

        The same `request_id` is the same request: a caller that reconnects gets its answer, and
        nothing runs twice. `on_progress` is called with every note of the agent and of its peers.
        If the answer has not come after `wait_seconds`, the call is returned as it is, with the
        state `open`.
        """
        require_wait(wait_seconds)
        given: dict[str, Any] = {"request_id": request_id, "user": user}
        call = yield from perform(
            StorePeers.request,
            self._store,
            agent,
            input,
            timeout_seconds=timeout_seconds,
            **given,
        )
        return (yield from self._waited(call, wait_seconds, on_progress))

    @flow
    def wait(
        self,
        request_id: str,
        *,
        wait_seconds: float | None = None,
        on_progress: Callable[[Any], object] | None = None,
    ) -> Flow[PeerCall]:
        """Wait for the answer to a request that any process made before.

        Raises AskNotFound if there is no such request, or its answer was removed. Earlier notes of
        progress are reported too.
        """
        require_wait(wait_seconds)
        call = yield from perform(StorePeers.peer_call, self._store, request_id)
        return (yield from self._waited(call, wait_seconds, on_progress))

    def _waited(
        self,
        call: PeerCall,
        wait_seconds: float | None,
        on_progress: Callable[[Any], object] | None,
    ) -> Flow[PeerCall]:
        """Return a call with its answer, or as it is when the time is up."""
        if call.state != "open" and on_progress is None:
            return call
        if self._courier is not None and not self._courier.is_open:
            yield from invoke(self._start, self._courier)
        ends_at = None if wait_seconds is None else uptime_seconds() + wait_seconds
        signals, topic = self.runtime.signals, answer_topic(call.id)
        if on_progress is not None or call.session_id is not None:
            topic = f"{TREE_TOPIC}{call.root_id}"
        after = 0
        while True:
            seen = signals.count(topic)
            if on_progress is None:
                call = yield from perform(StorePeers.peer_call, self._store, call.id)
            else:
                call, events = yield from perform(StorePeers._followed, self._store, call.id, after)
                for event in events:
                    after = event.position
                    if event.kind == "peer_progressed":
                        yield from invoke(on_progress, event.data["note"])
                if len(events) == EVENTS_PER_READ_MAX:
                    continue
            if call.state != "open":
                return call
            due_seconds = yield from self._until_due(call)
            if due_seconds <= 0:
                continue
            left = POLL_SECONDS if ends_at is None else ends_at - uptime_seconds()
            if left <= 0:
                return call
            yield from wait(min(left, due_seconds, POLL_SECONDS), topic, seen)

    def _until_due(self, call: PeerCall) -> Flow[float]:
        """Return how long to wait for an open call; 0 if it is over, such as past its deadline.

        Its store may have no worker that times it out: then whoever waits for it does.
        """
        runtime = self.runtime
        if call.deadline_at is None or runtime.is_remote or runtime.settings.mode == "read":
            return POLL_SECONDS
        left = yield from perform(seconds_left, runtime, call.id)
        if left is None or left > 0:
            return left or 0.0
        try:
            yield from perform(expire_call, runtime, call.id)
        except (StoreBusy, StoreReadOnly) as error:
            log.info("call %s, which is past its deadline, cannot be ended now: %s", call.id, error)
            return POLL_SECONDS
        return 0.0


def require_wait(wait_seconds: float | None) -> None:
    """Check how long a caller waits; None waits without a limit."""
    if wait_seconds is not None:
        require_seconds("wait_seconds", wait_seconds, WAIT_SECONDS_MAX)
