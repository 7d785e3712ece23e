"""Subscriptions of clients that use a version of the protocol before 2026-07-28."""

from __future__ import annotations

import asyncio
import contextlib

from mcp.server.session import ServerSession
from mcp.server.subscriptions import ResourceUpdated, ServerEvent

from ..answers.problems import Refusal
from ..kernel.operation import Async
from ..session import Session
from .changes import Changes

SUBSCRIPTIONS_MAX = 1_024


class Subscriptions:
    """The subscriptions of one connection's client, all of them in one tree."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._uris: set[str] = set()
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None

    async def add(self, uri: str, session: Session[Async], client: ServerSession) -> None:
        """Notify the client from now on when a resource changes."""
        if len(self._uris | {uri}) > SUBSCRIPTIONS_MAX:
            raise Refusal("too_large", "too many subscriptions", limit=SUBSCRIPTIONS_MAX)
        self._uris.add(uri)
        if self._telling is None or self._telling.done():
            following = asyncio.Event()
            self._telling = asyncio.create_task(self._tell(session, client, following))
            waiting = asyncio.create_task(following.wait())
            await asyncio.wait({waiting, self._telling}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    def remove(self, uri: str) -> None:
        """Stop notifying the client of changes to a resource."""
        self._uris.discard(uri)

    async def close(self) -> None:
        """Stop following the tree."""
        if self._telling is not None:
            self._telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._telling

    async def _tell(
        self, session: Session[Async], client: ServerSession, following: asyncio.Event
    ) -> None:
        async with self._changes.following(session) as reader:
            reader.add_done_callback(lambda _: self._wake.set())
            unsubscribe = self._changes.subscribe(self._note)
            following.set()
            try:
                while not reader.done():
                    await self._wake.wait()
                    self._wake.clear()
                    changed, self._changed = self._changed, set()
                    for uri in sorted(changed):
                        await client.send_resource_updated(uri)
            finally:
                unsubscribe()

    def _note(self, event: ServerEvent) -> None:
        """Remember a change; several changes of one resource become one notification."""
        if isinstance(event, ResourceUpdated) and event.uri in self._uris:
            self._changed.add(event.uri)
            self._wake.set()
