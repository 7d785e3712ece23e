"""Callers that are no session: a request, its progress, and its durable answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arguments import require_seconds, require_text
from ..errors import InvalidArgument
from ..feed import read_events
from ..feed.events import EVENTS_PER_READ_MAX
from ..kernel.flow import Flow, flow, invoke, perform, wait
from ..kernel.operation import C, Handle, Op, query
from ..kernel.signals import TREE_TOPIC
from ..leases import uptime_seconds
from ..peers import PeerCall, StorePeers
from ..peers.asks import Timeout
from ..records import Event
from ..store import StoreHandle

POLL_SECONDS = 1.0
WAIT_SECONDS_MAX = 7 * 24 * 3600.0


class Mesh(Handle[C]):
    """Asks agents on behalf of callers that are no session, such as a web server."""

    def __init__(self, store: StoreHandle[C]) -> None:
        if not isinstance(store, StoreHandle):
            raise InvalidArgument(f"a mesh needs a store, not {type(store).__name__}")
        super().__init__(store.runtime)
        self._peers: StorePeers[Any] = StorePeers(store.runtime)

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

        The same `request_id` is the same request: who reconnects gets its answer, and nothing runs
        twice. `on_progress` is called with every note of the agent and of its peers. If the answer
        has not come after `wait_seconds`, the call is returned as it is, with the state `open`.
        """
        if wait_seconds is not None:
            require_seconds("wait_seconds", wait_seconds, WAIT_SECONDS_MAX)
        given: dict[str, Any] = {"request_id": request_id, "user": user}
        call = yield from perform(
            StorePeers.request,
            self._peers,
            agent,
            input,
            timeout_seconds=timeout_seconds,
            **given,
        )
        ends_at = None if wait_seconds is None else uptime_seconds() + wait_seconds
        signals, topic = self.runtime.signals, f"{TREE_TOPIC}{call.root_id}"
        after = 0
        while True:
            seen = signals.count(topic)
            call, events = yield from perform(Mesh._look, self, call.id, after)
            for event in events:
                after = event.position
                if event.kind == "peer_progressed" and on_progress is not None:
                    yield from invoke(on_progress, event.data["note"])
            left = POLL_SECONDS if ends_at is None else ends_at - uptime_seconds()
            if call.state != "open" or left <= 0:
                return call
            yield from wait(min(left, POLL_SECONDS), topic, seen)

    @query
    def _look(self, id: str, after: int) -> Op[tuple[PeerCall, list[Event]]]:
        """Return a request, and what happened in its tree since a position."""
        call = yield from StorePeers.peer_call(self._peers, require_text("id", id))
        found = yield from read_events(self.runtime.codec, call.root_id, after, EVENTS_PER_READ_MAX)
        return call, found
