"""The Model Context Protocol: shared state of a session's tree as tools and resources."""

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
    """Add Holdfast's tools and resources to a server of your own.

    `store` is open in the server's event loop, or a function that returns it for a request, such as
    `lambda request: request.lifespan_context["store"]`. All calls act for `session`, which is
    started if there is none, or else for the session of the environment (`$AGENT_SESSION_ID`).
    """
    from .registration import register

    register(server, store, session)
