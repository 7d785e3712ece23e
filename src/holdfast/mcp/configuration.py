"""The configuration to paste into an MCP client."""

from __future__ import annotations

import sys
from typing import Any

NAME = "holdfast"
# Clients substitute it from their environment, so the secret itself is in no file.
BEARER = "Bearer ${HOLDFAST_TOKEN}"


def stdio_configuration(url: str, session: str) -> dict[str, Any]:
    """Return the configuration of a client that starts `holdfast mcp` itself."""
    arguments = ["-m", "holdfast", "mcp", "--url", url, "--session", session]
    return _named({"command": sys.executable, "args": arguments})


def http_configuration(url: str, session: str | None) -> dict[str, Any]:
    """Return the configuration of a client that connects to a server."""
    headers = {"Authorization": BEARER}
    if session is not None:
        headers["X-Agent-Session-Id"] = session
    return _named({"type": "http", "url": f"{url}/mcp", "headers": headers})


def _named(server: dict[str, Any]) -> dict[str, Any]:
    return {"mcpServers": {NAME: server}}
