"""`holdfast mcp`: the tools for one session over stdin and stdout."""

from __future__ import annotations

from typing import Any

from mcp.server.stdio import stdio_server

from .. import store as stores
from .bound import BoundReach, bound_reach
from .caller import Claim
from .service import Request, Service


async def serve_stdio(claim: Claim, **place: Any) -> None:
    """Serve until the client closes stdin; nothing but the protocol is written to stdout.

    A missing store raises NotFound: a mistyped URL would show the client an empty one.
    """
    async with stores.aopen(**place, migrate=False) as store:
        reach = await bound_reach(store, claim)

        async def reach_of(_: Request) -> BoundReach:
            return reach

        service = Service(reach_of, is_one_connection=True)
        server = service.server()
        # The SDK redirects stdout, so anything printed by mistake goes to stderr.
        async with stdio_server() as (read, write):
            try:
                await server.run(read, write, server.create_initialization_options())
            finally:
                await service.close()
