"""Followers of a server's shared state, in a process of their own, until it is ended."""

from __future__ import annotations

import asyncio
import os
import sys

from websockets.asyncio.client import connect


async def follow(url: str, count: int) -> None:
    """Connect and take whatever comes, all but one."""
    bearer = {"Authorization": f"Bearer {os.environ['HOLDFAST_TOKEN']}"}
    address = url.replace("http", "ws", 1) + "/sessions/root/state/stream"
    opened = [
        await connect(address, additional_headers=bearer, compression=None, proxy=None)
        for _ in range(count)
    ]
    print("ready", flush=True)

    async def take(number: int) -> None:
        async for _ in opened[number]:
            pass

    # The last one is stuck: it takes nothing.
    await asyncio.gather(*map(take, range(count - 1)))


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], int(sys.argv[2])))
