"""The Model Context Protocol."""

from __future__ import annotations

from ...mcp.caller import SESSION_HEADER
from ..endpoints import Endpoints
from ..mcp import Relayed
from ..messages import Call

routes = Endpoints()


@routes.add("POST", "/mcp", "read", body=bytes, takes=(SESSION_HEADER,), is_hidden=True)
async def serve_mcp(call: Call) -> Relayed:
    """Serve a request of the Model Context Protocol; each tool requires its own permission."""
    return await call.context.mcp.relayed(call)
