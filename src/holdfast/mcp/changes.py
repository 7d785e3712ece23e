"""Notifications of changes to shared state: each process follows the event log itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from mcp.server.subscriptions import ResourceUpdated, ServerEvent

from ..kernel.operation import Async
from ..session import Session
from .uris import Address

log = logging.getLogger("holdfast.mcp")

Listener = Callable[[ServerEvent], None]
# After notifying this many listeners, the event loop gets a turn to answer requests.
LISTENERS_AT_ONCE = 16
# Changes of one resource within this time are combined into one notification.
PAUSE_SECONDS = 0.05


@dataclass(slots=True)
class _Reader:
    """The task that follows one tree on behalf of all its listeners."""

    task: asyncio.Task[None]
    listeners: int = 0


class Changes:
    """A bus of committed changes, whichever process made them; writers publish nothing to it."""

    def __init__(self) -> None:
        self._listeners: dict[object, Listener] = {}
        self._readers: dict[str, _Reader] = {}

    async def publish(self, event: ServerEvent) -> None:
        """Do nothing: every change arrives through the event log."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call a listener for every change in the trees that are being followed."""
        token = object()
        self._listeners[token] = listener

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    @contextlib.asynccontextmanager
    async def following(self, session: Session[Async]) -> AsyncIterator[asyncio.Task[None]]:
        """Follow a session's tree from now on; the yielded task ends if following fails."""
        # The version is read first, so that no commit after the acknowledgement is missed.
        after = await session.state.version()
        reader = self._readers.get(session.root_id)
        if reader is None or reader.task.done():
            task = asyncio.create_task(self._follow(session, after))
            reader = self._readers[session.root_id] = _Reader(task)
        reader.listeners += 1
        try:
            yield reader.task
        finally:
            reader.listeners -= 1
            if not reader.listeners:
                reader.task.cancel()
                if self._readers.get(session.root_id) is reader:
                    del self._readers[session.root_id]

    async def _follow(self, session: Session[Async], after: int) -> None:
        changed: set[Address] = set()
        has_more = asyncio.Event()
        following: Any = session.state.watch_changes(after=after)
        try:
            async with asyncio.TaskGroup() as tasks, contextlib.aclosing(following) as changes:
                tasks.create_task(self._tell(changed, has_more))
                async for change in changes:
                    keys = [entry.key for entry in change.entries]
                    changed |= {Address(session.root_id, key) for key in (None, *keys)}
                    has_more.set()
        except* Exception:
            log.exception("cannot follow the state of %s; its subscriptions end", session.root_id)

    async def _tell(self, changed: set[Address], has_more: asyncio.Event) -> None:
        while True:
            await has_more.wait()
            has_more.clear()
            uris = sorted(map(str, changed))
            changed.clear()
            for uri in uris:
                await self._hand_out(ResourceUpdated(uri=uri))
            await asyncio.sleep(PAUSE_SECONDS)

    async def _hand_out(self, event: ServerEvent) -> None:
        for number, listener in enumerate(list(self._listeners.values()), 1):
            listener(event)
            if number % LISTENERS_AT_ONCE == 0:
                await asyncio.sleep(0)
