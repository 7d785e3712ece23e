"""The readers that followers share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest
from uvicorn.protocols.utils import ClientDisconnected

from holdfast import Compacted, StoreUnavailable
from holdfast.records import Event
from holdfast.server.channels import Backlog, Hub, Lagging, Source
from holdfast.server.frames import EventFrames, Frames
from holdfast.server.protocol import WebSocketProtocol
from holdfast.server.stream import TRY_AGAIN, Following, closing
from tests.server.serving import Served

SECONDS_MAX = 60


def frames(position: int) -> Frames[Any]:
    event = Event(
        root_id="root", position=position, session_id="root", kind="kind", data={}, created_at=0
    )
    return EventFrames(event, str(position))


def test_who_comes_after_a_reader_failed_has_one_that_works() -> None:
    """Those that it failed may still be taking what they have: nobody may join them."""

    async def main() -> None:
        readers = 0
        fails, failed, goes_on = (asyncio.Event() for _ in range(3))

        async def follow(after: int) -> AsyncGenerator[Frames[Any], None]:
            nonlocal readers
            readers += 1
            if readers == 1:
                yield frames(1)
                await fails.wait()
                asyncio.get_running_loop().call_soon(failed.set)
                raise StoreUnavailable("the database is away")
            await goes_on.wait()
            yield frames(2)
            await asyncio.Event().wait()

        async def head() -> int:
            return readers

        async def page(after: int) -> list[Frames[Any]]:
            return []

        hub = Hub(Backlog(10, 1_000), lambda: False)
        source = Source("feed", head, page, follow)
        first = hub.subscribe(source, 0)
        await first.begin()
        fails.set()
        async with asyncio.timeout(SECONDS_MAX):
            await failed.wait()
            second = hub.subscribe(source, None)
            await second.begin()
            goes_on.set()
            assert await second.next() == frames(2)
            assert await first.next() == frames(1)
            with pytest.raises(StoreUnavailable):
                await first.next()
            for follower in (first, second):
                await follower.close()
            assert not hub._followed, "a channel that nobody follows is kept"

    asyncio.run(main())


def test_what_is_delivered_at_once_never_overtakes_what_is_queued() -> None:
    async def main() -> None:
        async def follow(after: int) -> AsyncGenerator[Frames[Any], None]:
            await asyncio.Event().wait()
            yield frames(0)

        async def head() -> int:
            return 0

        async def page(after: int) -> list[Frames[Any]]:
            return []

        hub = Hub(Backlog(10, 10_000), lambda: False)
        follower = hub.subscribe(Source("feed", head, page, follow), None)
        await follower.begin()
        following = Following(follower)
        written: list[bytes] = []
        is_writable = True

        def write_now(packed: bytes) -> bool:
            if is_writable:
                written.append(packed)
            return is_writable

        follower.deliver_now = partial(following.delivered, write_now)
        taking = asyncio.create_task(follower.next())
        await asyncio.sleep(0)
        follower.put(frames(1))
        assert (len(written), following.last) == (1, "1")
        is_writable = False
        follower.put(frames(2))
        assert (len(written), following.last) == (1, "1")
        # The second waits for the task that takes it, so the third waits behind it.
        is_writable = True
        follower.put(frames(3))
        assert len(written) == 1
        async with asyncio.timeout(SECONDS_MAX):
            assert await taking == frames(2)
            assert await follower.next() == frames(3)
        taking = asyncio.create_task(follower.next())
        await asyncio.sleep(0)
        follower.put(frames(3))
        follower.put(frames(4))
        assert (len(written), following.last) == (2, "4")
        taking.cancel()
        await follower.close()

    asyncio.run(main())


@pytest.mark.parametrize(("after", "begins"), [(None, "7"), (5, "5")])
def test_a_follower_knows_where_it_begins_before_the_first_change(
    after: int | None, begins: str
) -> None:
    async def main() -> None:
        async def follow(after: int) -> AsyncGenerator[Frames[Any], None]:
            await asyncio.Event().wait()
            yield frames(0)

        async def head() -> int:
            return 7

        async def page(place: int) -> list[Frames[Any]]:
            return [frames(number) for number in range(place + 1, 8)]

        hub = Hub(Backlog(10, 10_000), lambda: False)
        following = Following(hub.subscribe(Source("feed", head, page, follow), after))
        async with asyncio.timeout(SECONDS_MAX):
            await following.begin()
            assert following.last == begins
            await following.follower.close()

    asyncio.run(main())


def test_a_cursor_that_is_too_long_does_not_break_the_close_of_a_socket() -> None:
    assert closing(Lagging("slow"), "x" * 117) == (TRY_AGAIN, "after=" + "x" * 117)
    assert closing(Lagging("slow"), "x" * 118) == (TRY_AGAIN, "continue after the last event")
    assert closing(Compacted("gone", oldest=7), "x" * 200)[1] == "oldest=7"


def test_a_client_that_is_gone_before_its_stream_begins_is_no_failure(
    local: Served, caplog: pytest.LogCaptureFixture
) -> None:
    root, _ = local.tree()
    scope = {
        "type": "websocket",
        "scheme": "ws",
        "raw_path": f"/sessions/{root}/feed".encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), *encoded(local.bearer)],
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.disconnect"}

    async def send(message: Any) -> None:
        raise BrokenPipeError

    local.runner.run(local.api(scope, receive, send))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    counted = local.get("/metrics").text
    assert 'route="/sessions/{id}/feed",status="500"' not in counted
    assert "holdfast_followers 0" in counted


@pytest.mark.parametrize("kind", ["websocket.accept", "websocket.send"])
def test_nothing_is_sent_to_a_connection_that_is_closing(kind: str) -> None:
    """The loop reports that it was lost only when it has a turn."""

    class Closing(asyncio.Transport):
        def is_closing(self) -> bool:
            return True

    protocol = WebSocketProtocol.__new__(WebSocketProtocol)
    protocol.transport = Closing()
    with pytest.raises(ClientDisconnected):
        asyncio.run(protocol.send({"type": kind, "text": "change"}))


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
