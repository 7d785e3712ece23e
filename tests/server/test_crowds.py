"""Many at once: followers, one of which takes nothing, and connections that say nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.server.processes import client_of, made_token, server_process

WRITES = 120
VALUE = "x" * 300_000
STREAM = "/sessions/one/state/stream"


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has."""
    [line] = [
        each
        for each in Path(f"/proc/{pid}/status").read_text().splitlines()
        if each.startswith("VmRSS:")
    ]
    return int(line.split()[1]) * 1024


class Crowd:
    """The followers of one server."""

    def __init__(self, url: str, secret: str, stack: AsyncExitStack) -> None:
        self._url = url.replace("http", "ws", 1)
        self._bearer = {"authorization": f"Bearer {secret}"}
        self._stack = stack

    async def follow(self, path: str, **given: Any) -> ClientConnection:
        connecting = connect(
            self._url + path,
            additional_headers=self._bearer,
            compression=None,
            ping_interval=None,
            open_timeout=120,
            max_size=None,
            proxy=None,
            **given,
        )
        return await self._stack.enter_async_context(connecting)


async def sequences(following: ClientConnection, count: int) -> list[int]:
    async with asyncio.timeout(300):
        return [json.loads(await following.recv())["sequence"] for _ in range(count)]


async def sequences_to_the_end(following: ClientConnection) -> list[int]:
    found: list[int] = []
    try:
        while True:
            found += await sequences(following, 1)
    except ConnectionClosed:
        return found


async def write_and_follow(url: str, secret: str, followers: int, first: int) -> None:
    """Write for all followers while one of them takes nothing; each gets each change once."""
    async with AsyncExitStack() as stack:
        crowd = Crowd(url, secret, stack)
        stuck_path = f"{STREAM}?kinds=state_event&after_sequence="
        quick = [await crowd.follow(f"{STREAM}?values=false") for _ in range(followers)]
        # One message fills its queue, and it reads nothing more from its socket.
        stuck = await crowd.follow(f"{stuck_path}{first}", max_queue=1)
        reading = [asyncio.create_task(sequences(each, WRITES)) for each in quick]
        limits = httpx.Timeout(300)
        bearer = {"authorization": f"Bearer {secret}", "if-match": "*"}
        async with httpx.AsyncClient(base_url=url, headers=bearer, timeout=limits) as client:
            path = "/sessions/one/state/keys/k"
            for _ in range(WRITES):
                answer = await client.put(path, json={"value": VALUE})
                assert answer.status_code == 200
        expected = list(range(first + 1, first + WRITES + 1))
        assert all(found == expected for found in await asyncio.gather(*reading))
        taken = await sequences_to_the_end(stuck)
        assert taken == expected[: len(taken)]
        assert len(taken) < WRITES
        last = first + len(taken)
        assert (stuck.close_code, stuck.close_reason) == (1013, f"after={last}")
        again = await crowd.follow(f"{stuck_path}{last}")
        assert await sequences(again, WRITES - len(taken)) == expected[len(taken) :]


@pytest.mark.parametrize(
    ("followers", "rounds"), [(199, 1), pytest.param(998, 4, marks=pytest.mark.slow)]
)
def test_one_of_many_followers_takes_nothing(tmp_path: Path, followers: int, rounds: int) -> None:
    """It is closed with its place and goes on there; what waits for it does not pile up."""
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    secret = made_token(place)
    sizes: list[int] = []
    # On a busy machine, it takes long until the one that takes nothing has missed too much.
    with server_process("--port=0", "--limit=ping_seconds=3600", **place) as (process, told):
        for number in range(rounds):
            asyncio.run(write_and_follow(told["url"], secret, followers, number * WRITES))
            sizes.append(resident_bytes(process.pid))
    # The first rounds fill what the allocator keeps; after that it is flat.
    assert sizes[-1] <= max(sizes[:-1] or sizes) * 1.1, sizes


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_thousand_connections_that_say_nothing(tmp_path: Path, rounds: int) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    secret = made_token(place)
    sizes: list[int] = []
    with (
        server_process("--port=0", **place) as (process, told),
        client_of(told, secret) as client,
    ):
        address = urlsplit(told["url"])
        for _ in range(rounds):
            with ExitStack() as stack:
                for number in range(1_000):
                    idle = socket.create_connection((address.hostname, address.port), 60)
                    stack.enter_context(idle)
                    if number % 2:
                        # Half of them have begun a request.
                        idle.sendall(b"PUT /sessions/one/state HTTP/1.1\r\nHost: loc")
                answer = client.put(
                    "/sessions/one/state/keys/k", json={"value": 1}, headers={"if-match": "*"}
                )
                assert answer.status_code == 200
                sizes.append(resident_bytes(process.pid))
        assert client.get("/sessions/one/state/keys/k").json()["value"] == 1
    assert sizes[-1] < sizes[0] * 1.2, sizes
