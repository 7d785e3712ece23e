"""Wake-ups for clients: a WebSocket that reports which of a client's topics were signalled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from ..answers.problems import Refusal
from ..errors import HoldfastError
from ..kernel.signals import LOCAL_TOPIC, TREE_TOPIC, Signals
from ..wire import TOPICS_MAX, Topics
from .channels import TICK_SECONDS
from .stream import Looking, Receive, Send, closing, until_gone

TOPIC_CHARACTERS_MAX = 1_000
_decode = msgspec.json.Decoder(Topics).decode
_encode = msgspec.json.encode


class Ringing:
    """The topics of one client, and those that were signalled but not yet reported to it."""

    def __init__(self, signals: Signals, root_id: str | None) -> None:
        """A client that is limited to a tree is woken only by changes in that tree."""
        self._signals = signals
        self._root_id = root_id
        self._leaving: dict[str, Callable[[], None]] = {}
        self._rung: set[str] = set()
        self._rung_lock = threading.Lock()
        self._has_rung = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.check: Callable[[], Awaitable[None]] | None = None
        """Raises when the token no longer permits listening."""

    async def serve(self, send: Send, receive: Receive) -> None:
        """Report signalled topics until the client disconnects."""
        await send({"type": "websocket.accept"})
        try:
            await until_gone(self._told(send), self._asked(receive))
        except (Refusal, HoldfastError) as error:
            code, reason = closing(error, "")
            await send({"type": "websocket.close", "code": code, "reason": reason})
        finally:
            for leave in self._leaving.values():
                leave()

    async def _told(self, send: Send) -> None:
        looking = Looking(self.check)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._has_rung.wait()
            self._has_rung.clear()
            with self._rung_lock:
                rung, self._rung = self._rung, set()
            await looking.look(is_idle=not rung)
            if rung:
                await send({"type": "websocket.send", "text": _encode(sorted(rung)).decode()})

    async def _asked(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.receive":
                self._take(message)
            elif message["type"] == "websocket.disconnect":
                return

    def _take(self, message: Any) -> None:
        """Start and stop listening to the topics in a message."""
        try:
            topics = _decode(message.get("text") or message.get("bytes") or b"")
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise Refusal("invalid_request", "a message must list topics") from None
        for topic in topics.leave:
            if topic in self._leaving:
                self._leaving.pop(topic)()
        new = dict.fromkeys(each for each in topics.listen if each not in self._leaving)
        if len(self._leaving) + len(new) > TOPICS_MAX:
            raise Refusal("too_large", f"a client can listen to at most {TOPICS_MAX:,} topics")
        for topic in new:
            if len(topic) > TOPIC_CHARACTERS_MAX or topic.startswith(LOCAL_TOPIC):
                raise Refusal("invalid_request", "this is not a topic of a store")
            wanted = topic if self._root_id is None else TREE_TOPIC + self._root_id
            self._leaving[topic] = self._signals.watch([wanted], partial(self._ring, topic))
            # A signal before this moment may have been missed.
            self._ring(topic)

    def _ring(self, topic: str) -> None:
        """Record that a topic was signalled; may be called on any thread."""
        with self._rung_lock:
            is_first = not self._rung
            self._rung.add(topic)
        if is_first:
            # The event loop may be closing.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._has_rung.set)
