"""A PostgreSQL proxy that cuts the wire at a chosen moment of a chosen COMMIT.

It reads just enough of the protocol to see which message makes the server commit: a simple query,
or the Execute of a statement that was parsed as COMMIT, alone or inside a pipeline. From that
message on, nothing that the client sends is forwarded, and nothing that the server responds is
delivered.

It listens on the loopback interface, in its own thread, and does not support TLS: a client that
asks for it is refused, and `dsn` tells clients not to ask.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from .closing import Closing

Moment: TypeAlias = Literal["before", "after", "before-late", "all-late"]

COMMIT = r"(.*;)?\s*(COMMIT|END)(\s+(WORK|TRANSACTION))?(\s+AND(\s+NO)?\s+CHAIN)?\s*;?\s*"
ENCRYPTION_REQUESTS = (80877103, 80877104)
SYNC = b"S\x00\x00\x00\x04"
CHUNK_BYTES = 65536
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

T = TypeVar("T")


class Cut:
    """One requested cut; `wait` for it, then read the server's response to the commit."""

    def __init__(self, moment: Moment, statement: str, delay_seconds: float) -> None:
        self.moment = moment
        self.statement = re.compile(statement, re.IGNORECASE | re.DOTALL)
        self.delay_seconds = delay_seconds
        self.answer: str | None = None
        self.finished = threading.Event()

    def wait(self, timeout_seconds: float = 10.0) -> str | None:
        """Wait until the cut is over and return the server's response, such as "COMMIT", if any."""
        if not self.finished.wait(timeout_seconds):
            raise TimeoutError(f"the cut was not over after {timeout_seconds} seconds")
        return self.answer


class PostgresProxy(Closing):
    """A TCP proxy in front of the server of a postgresql:// URL; Unix sockets work too."""

    def __init__(self, dsn: str) -> None:
        if not dsn.startswith(("postgresql://", "postgres://")):
            raise ValueError("the address of the server must be a postgresql:// URL")
        url = urlsplit(dsn)
        parameters = dict(parse_qsl(url.query))
        host = parameters.get("hostaddr") or parameters.get("host") or url.hostname
        self._host = unquote(host or "localhost")
        self._port = int(parameters.get("port") or url.port or 5432)
        self._cuts: list[Cut] = []
        self._cuts_lock = threading.Lock()
        self._links: set[_Link] = set()
        self._flowing = asyncio.Event()
        # A second socket reserves the port while nobody listens on it.
        self._placeholder = _bound_socket(0)
        self.port: int = self._placeholder.getsockname()[1]
        self._listener: asyncio.Server | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="postgres-proxy", daemon=True
        )
        self._thread.start()
        self.thaw()
        self._call(self._listen())

    def close(self) -> None:
        """Reset every connection and stop."""
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._placeholder.close()

    def dsn(self, dsn: str) -> str:
        """Return the URL that reaches the database of `dsn` through this proxy."""
        url = urlsplit(dsn)
        parameters = dict(parse_qsl(url.query, keep_blank_values=True))
        for name in ("host", "hostaddr", "port"):
            parameters.pop(name, None)
        parameters.update(sslmode="disable", gssencmode="disable")
        login, at, _ = url.netloc.rpartition("@")
        query = urlencode(parameters, quote_via=quote)
        return url._replace(netloc=f"{login}{at}127.0.0.1:{self.port}", query=query).geturl()

    @property
    def connections(self) -> int:
        """How many client connections are open."""
        return len(self._links)

    def cut_next_commit(
        self, moment: Moment, *, delay_seconds: float = 0.5, statement: str = COMMIT
    ) -> Cut:
        """Cut at the next commit, or at the next statement that matches the pattern `statement`.

        "before" drops the connection and never forwards the commit. "after" forwards it, waits for
        the server's response, swallows that and resets the client. "before-late" resets the client
        at once and forwards the commit only after `delay_seconds`; "all-late" also forwards what
        the client sent after it in the same batch.
        """
        cut = Cut(moment, statement, delay_seconds)
        with self._cuts_lock:
            self._cuts.append(cut)
        return cut

    def cancel_cuts(self) -> None:
        """Cancel the cuts that have not happened yet."""
        with self._cuts_lock:
            self._cuts.clear()

    def cut_all(self) -> None:
        """Reset every open connection."""
        self._call(self._reset_links())

    def refuse(self, seconds: float | None = None) -> None:
        """Refuse new connections for this long, or until `accept`; open ones stay open."""
        self._call(self._refuse(seconds))

    def accept(self) -> None:
        """Accept new connections again."""
        self._call(self._accept())

    def freeze(self) -> None:
        """Hold every byte in both directions, new connections included, until `thaw`."""
        self._call(self._set_flowing(False))

    def thaw(self) -> None:
        """Forward the held bytes."""
        self._call(self._set_flowing(True))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _listen(self, delay_seconds: float = 0) -> None:
        await asyncio.sleep(delay_seconds)
        self._listener = await asyncio.start_server(self._serve, sock=_bound_socket(self.port))

    async def _refuse(self, seconds: float | None) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
        if self._listener is not None:
            for listening in self._listener.sockets:
                self._loop.remove_reader(listening.fileno())
            # Accepted connections reach their tasks first, because nothing else would close them.
            for _ in range(5):
                await asyncio.sleep(0)
            self._listener.close()
        if seconds is not None:
            self._reopening = asyncio.create_task(self._listen(seconds))

    async def _accept(self) -> None:
        await self._refuse(None)
        await self._listen()

    async def _reset_links(self) -> None:
        for link in self._links:
            link.reset()

    async def _shut_down(self) -> None:
        await self._refuse(None)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await self._reset_links()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer)
        self._links.add(link)
        try:
            # Python 3.11 logs a cancelled handler as an error.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await link.run()
        finally:
            link.close()
            self._links.discard(link)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._host.startswith("/"):
            return await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        return await asyncio.open_connection(self._host, self._port)

    def _take_cut(self, statement: str) -> Cut | None:
        with self._cuts_lock:
            for cut in self._cuts:
                if cut.statement.fullmatch(statement):
                    self._cuts.remove(cut)
                    return cut
        return None


class _Link:
    """One client's connection, and the connection to the server on its behalf."""

    def __init__(
        self, proxy: PostgresProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._from_client, self._to_client = reader, writer
        self._to_server: asyncio.StreamWriter | None = None
        self._statements: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}
        # The requests for which the server still owes a ReadyForQuery, start-up first.
        self._unanswered: deque[bytes] = deque([b"startup"])
        self._cut: Cut | None = None

    def reset(self) -> None:
        """Drop both sides at once; the client sees a connection reset."""
        self._reset_client()
        if self._to_server is not None:
            self._to_server.transport.abort()

    def close(self) -> None:
        """Close both sides in order."""
        self._to_client.close()
        if self._to_server is not None:
            self._to_server.close()

    async def run(self) -> None:
        """Forward both ways until either side ends, or a cut is carried out."""
        startup = await self._read_startup()
        from_server, self._to_server = await self._proxy._connect()
        # Without their own buffers, draining them means that the kernel has every byte.
        self._to_client.transport.set_write_buffer_limits(high=0)
        self._to_server.transport.set_write_buffer_limits(high=0)
        self._to_server.write(startup)
        answers = asyncio.create_task(self._forward_answers(from_server))
        requests = asyncio.create_task(self._forward_requests(self._to_server))
        try:
            await asyncio.wait((answers, requests), return_when=asyncio.FIRST_COMPLETED)
            if self._cut is not None:
                await self._carry_out(self._cut, await requests, self._to_server, answers)
        finally:
            answers.cancel()
            requests.cancel()
            await asyncio.gather(answers, requests, return_exceptions=True)

    def _reset_client(self) -> None:
        with suppress(OSError):
            connection = self._to_client.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._to_client.transport.abort()

    async def _carry_out(
        self, cut: Cut, commit: bytes, to_server: asyncio.StreamWriter, answers: asyncio.Task[None]
    ) -> None:
        try:
            if cut.moment != "after":
                self._reset_client()
            if cut.moment in {"before-late", "all-late"}:
                await asyncio.sleep(cut.delay_seconds)
            if cut.moment != "before":
                to_server.write(commit)
                await answers
        finally:
            self._reset_client()
            cut.finished.set()

    async def _read_startup(self) -> bytes:
        while True:
            header = await self._from_client.readexactly(8)
            await self._proxy._flowing.wait()
            length, code = struct.unpack("!ii", header)
            if code not in ENCRYPTION_REQUESTS:
                return header + await self._from_client.readexactly(length - 8)
            self._to_client.write(b"N")

    async def _forward_requests(self, to_server: asyncio.StreamWriter) -> bytes:
        """Forward until the client ends, or return the message at which a cut happens."""
        buffer = bytearray()
        while chunk := await self._from_client.read(CHUNK_BYTES):
            buffer += chunk
            await self._proxy._flowing.wait()
            passing = bytearray()
            for message in _messages(buffer):
                kind = message[:1]
                statement = self._executed(kind, message[5:])
                if statement is not None:
                    self._cut = self._proxy._take_cut(statement)
                if self._cut is not None or kind in {b"Q", b"S", b"F"}:
                    self._unanswered.append(kind)
                if self._cut is not None:
                    to_server.write(passing)
                    if buffer and self._cut.moment == "all-late":
                        return message + bytes(buffer)
                    return message if kind == b"Q" else message + SYNC
                passing += message
            to_server.write(passing)
            await to_server.drain()
        return b""

    async def _forward_answers(self, from_server: asyncio.StreamReader) -> None:
        """Forward until the server ends or has answered the commit that is being cut."""
        buffer = bytearray()
        answer = None
        while chunk := await from_server.read(CHUNK_BYTES):
            buffer += chunk
            await self._proxy._flowing.wait()
            messages = list(_messages(buffer))
            if self._cut is None:
                self._to_client.write(b"".join(messages))
            for message in messages:
                match message[:1]:
                    case b"C":
                        answer = message[5:-1].decode()
                    case b"E":
                        answer = f"ERROR {_sqlstate(message)}"
                    case b"G" if self._unanswered[0] == b"S":
                        # The server ignores a Sync that arrives during a COPY.
                        self._unanswered.popleft()
                    case b"Z":
                        self._unanswered.popleft()
                        if self._cut is not None and not self._unanswered:
                            self._cut.answer = answer
                            return
                        answer = None
            if self._cut is None:
                await self._to_client.drain()

    def _executed(self, kind: bytes, body: bytes) -> str | None:
        """Follow one request and return the statement that it makes the server run, if any."""
        match kind:
            case b"P":
                name, statement, _ = body.split(b"\0", 2)
                self._statements[name] = statement.decode(errors="replace")
            case b"B":
                portal, name, _ = body.split(b"\0", 2)
                self._portals[portal] = self._statements.get(name, "")
            case b"E":
                return self._portals.get(body.split(b"\0", 1)[0], "")
            case b"Q":
                return body[:-1].decode(errors="replace")
        return None


def _messages(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete messages off the front of the buffer."""
    while len(buffer) >= 5:
        end = 1 + int.from_bytes(buffer[1:5], "big")
        if len(buffer) < end:
            return
        message = bytes(buffer[:end])
        del buffer[:end]
        yield message


def _sqlstate(error: bytes) -> str:
    fields = error[5:].split(b"\0")
    return next((field[1:].decode() for field in fields if field[:1] == b"C"), "")


def _bound_socket(port: int) -> socket.socket:
    # asyncio disables Nagle's delay only if the protocol is named.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound
