"""The official client, over every transport and in both eras of the protocol."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

import holdfast
from holdfast.codec import from_json
from holdfast.mcp.bound import BoundReach, bound_reach
from holdfast.mcp.caller import Claim
from holdfast.mcp.service import Service

Mode = Literal["auto", "legacy"]
MODES: tuple[Mode, ...] = ("auto", "legacy")


@contextlib.asynccontextmanager
async def over_http(
    url: str, secret: str, mode: Mode = "auto", *, session: str | None = None
) -> AsyncIterator[Client]:
    """Connect to a server's /mcp, for a session that the header names."""
    sent = {"authorization": f"Bearer {secret}"}
    if session is not None:
        sent["x-agent-session-id"] = session
    async with (
        httpx2.AsyncClient(headers=sent, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


def stdio_parameters(
    *options: str, code: str | None = None, env: dict[str, str] | None = None
) -> StdioServerParameters:
    """Return how `holdfast mcp` is started; `code` runs first in its process."""
    command = ["-m", "holdfast"]
    if code is not None:
        command = ["-c", f"{code}\nfrom holdfast.cli import main; main()"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return StdioServerParameters(
        command=sys.executable, args=[*command, "mcp", *options], env=kept | (env or {})
    )


@contextlib.asynccontextmanager
async def over_stdio(
    *options: str,
    mode: Mode = "auto",
    code: str | None = None,
    errors: Any = subprocess.DEVNULL,
    env: dict[str, str] | None = None,
) -> AsyncIterator[Client]:
    """Start `holdfast mcp` and connect to it; `errors` gets what it writes to stderr."""
    transport = stdio_client(stdio_parameters(*options, code=code, env=env), errlog=errors)
    async with Client(transport, mode=mode) as client:
        yield client


@contextlib.asynccontextmanager
async def in_memory(
    session: str, place: dict[str, Any], mode: Mode = "auto", on_message: Any = None
) -> AsyncIterator[tuple[Client, holdfast.AsyncStore]]:
    """Connect without a transport, to a store on any database."""
    async with holdfast.aopen(**place) as store:
        reach = await bound_reach(store, Claim("option", session))

        async def reach_of(_: object) -> BoundReach:
            return reach

        service = Service(reach_of, is_one_connection=True)
        async with Client(service.server(), mode=mode, message_handler=on_message) as client:
            yield client, store
        await service.close()


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    """Return the result of a call that must succeed; its text and its structure must agree."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.structured_content
    return agreed(result)


async def refused(client: Client, tool: str, **arguments: Any) -> Any:
    """Return the problem of a call that must fail."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    return agreed(result)


def agreed(result: Any) -> Any:
    [content] = result.content
    assert from_json(content.text) == result.structured_content
    return result.structured_content
