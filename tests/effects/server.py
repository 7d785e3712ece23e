"""A receiver of effects in a process of its own, which outlives the agents and counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import apsw
import psycopg

Moment = Callable[[str], None]

INTENTS = """
SELECT count(*) FROM {table} WHERE (session_id = {mark} OR key = 'once:' || {mark})
    AND status = 'issued'
"""


@dataclass(frozen=True)
class Seen:
    """What the receiver saw of one thing: how often it was done, and what it answered first."""

    count: int
    receipt: str | None
    had_intent: list[bool]
    """Of each time: whether the intent was to be read in the database at that moment."""


@dataclass(frozen=True)
class Receiver:
    """The address of the receiver, and how it is talked to."""

    port: int

    def act(
        self,
        what: str,
        key: str,
        place: dict[str, str],
        *,
        honours: bool = False,
        delay_seconds: float = 0.0,
        is_held: bool = False,
        moment: Moment = lambda name: None,
    ) -> str:
        """Do a thing and return its receipt; `moment` is called on the way.

        A request that is held is done when it is let go, whatever became of who sent it.
        """
        request = {
            "what": what,
            "key": key,
            "place": place,
            "honours": honours,
            "delay_seconds": delay_seconds,
            "is_held": is_held,
        }
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            moment("sent")
            select.select([connection], [], [])
            moment("acted")
            with connection.makefile() as lines:
                receipt: str = json.loads(lines.readline())
        return receipt

    async def act_async(self, what: str, key: str, place: dict[str, str], **given: Any) -> str:
        """Do what `act` does, in an event loop; cancelled, the request goes on."""
        moment: Moment = given.pop("moment", lambda name: None)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.closing(writer):
            request = {"what": what, "key": key, "place": place, **given}
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            moment("sent")
            answer = await reader.readline()
            moment("acted")
        receipt: str = json.loads(answer)
        return receipt

    def look(self, what: str) -> Seen:
        """Ask what was seen of a thing."""
        return Seen(**self._ask({"look": what}))

    def let_go(self, what: str) -> None:
        """Have the requests for a thing done that are held; return when one was."""
        self._ask({"let_go": what})

    def _ask(self, question: dict[str, str]) -> Any:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(json.dumps(question).encode() + b"\n")
            with connection.makefile() as lines:
                return json.loads(lines.readline())


class _Server:
    """What happens in the receiver's process."""

    def __init__(self) -> None:
        self._receipts: dict[str, list[str]] = defaultdict(list)
        self._had_intent: dict[str, list[bool]] = defaultdict(list)
        self._by_key: dict[str, str] = {}
        self._readers: dict[str, Callable[[str], bool]] = {}
        self._may_go: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._was_done: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._answer, sock=listening)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Who asked may be dead by now; what was asked for is done all the same.
        with contextlib.suppress(ConnectionError):
            if line := await reader.readline():
                writer.write(json.dumps(await self._do(json.loads(line))).encode() + b"\n")
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def _do(self, request: dict[str, Any]) -> Any:
        if "look" in request:
            receipts = self._receipts[request["look"]]
            return {
                "count": len(receipts),
                "receipt": receipts[0] if receipts else None,
                "had_intent": self._had_intent[request["look"]],
            }
        if "let_go" in request:
            self._may_go[request["let_go"]].set()
            return await self._was_done[request["let_go"]].wait()
        await asyncio.sleep(request.get("delay_seconds", 0))
        what, key = request["what"], request["key"]
        if request.get("is_held"):
            await self._may_go[what].wait()
            self._was_done[what].set()
        if request.get("honours") and key in self._by_key:
            return self._by_key[key]
        self._had_intent[what].append(self._has_intent(request["place"], what))
        receipt = f"{what}#{len(self._receipts[what]) + 1}"
        self._receipts[what].append(receipt)
        self._by_key[key] = receipt
        return receipt

    def _has_intent(self, place: dict[str, str], what: str) -> bool:
        """Read the ledger as a stranger to the agent does, in a connection of our own."""
        name = place.get("namespace", place["url"])
        if name not in self._readers:
            self._readers[name] = _reader(place)
        return self._readers[name](what)


def _reader(place: dict[str, str]) -> Callable[[str], bool]:
    if place["url"].startswith("sqlite"):
        path = place["url"].removeprefix("sqlite:///")
        file = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        file.set_busy_timeout(10_000)
        sql = INTENTS.format(table="hf_effects", mark="?1")
        return lambda what: bool(file.execute(sql, (what,)).get)
    server = psycopg.connect(place["url"], autocommit=True)
    sql = INTENTS.format(table=f"{place['namespace']}.hf_effects", mark="%(what)s::text")

    def has_intent(what: str) -> bool:
        found = server.execute(sql, {"what": what}).fetchone()
        return bool(found and found[0])

    return has_intent


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver until the end of the block."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        # Should the test runner die, its end of the pipe is closed: what it forked must not stay.
        ended, running = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(running)
            watch = threading.Thread(target=lambda: os._exit(len(os.read(ended, 1))), daemon=True)
            watch.start()
            try:
                asyncio.run(_Server().serve(listening))
            finally:
                os._exit(0)
        os.close(ended)
        port = listening.getsockname()[1]
    try:
        yield Receiver(port)
    finally:
        os.close(running)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
