"""The Model Context Protocol: the shared state of a session's tree as tools and resources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp.server import MCPServer
    from mcp.server.context import ServerRequestContext

    from ..store import AsyncStore

__all__ = ["register_tools"]


def register_tools(
    server: MCPServer[Any],
    store: AsyncStore | Callable[[ServerRequestContext[Any, Any]], AsyncStore],
    *,
    session: str | None = None,
) -> None:
    """Add Holdfast's tools and resources to your own MCP server.

    `store` is a store opened in the server's event loop, or a function that returns one for a
    request, such as `lambda request: request.lifespan_context["store"]`. All calls act for
    `session`, which is created if it does not exist; without it, for the session that the
    environment names (`$AGENT_SESSION_ID`).
    """
    from .registration import register

    register(server, store, session)
