"""The options of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..effects import Tool
from ..maintenance.retention import require_days
from .sign_in import SignIn

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of the server; `GET /limits` returns them."""

    body_bytes: int = 4_194_304
    header_bytes: int = 16_384
    page: int = 1_000
    backlog_events: int = 1_000
    backlog_bytes: int = 16_777_216
    """How much may be queued for one follower that is not reading."""
    frame_bytes: int = 1_048_576
    wrong_tokens_per_minute: int = 10
    requests_per_second: int | None = None
    """Per token; None means no limit."""
    streams_per_token: int = 1_000
    connections: int = 4_000
    ping_seconds: float = 20.0
    """The interval of pings on a WebSocket, and how long the client may take to respond."""
    request_seconds: float = 30.0
    """How long a client may take to send a request."""
    wait_seconds: float = 60.0
    """How long a request may wait for an agent's answer."""
    idempotency_hours: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a server is reached, and what it allows."""

    hosts: frozenset[str] = LOOPBACK
    """The host names by which requests may address the server, without a port."""
    origins: frozenset[str] = frozenset()
    """The origins of pages that may use the server, besides its own."""
    base_path: str = ""
    is_read_only: bool = False
    work_days: float = 30
    """How long finished work items are kept."""
    sweep_interval_seconds: float = 10.0
    """How often to look for expired leases and due items."""
    is_secure: bool = False
    """Whether the server itself uses TLS, so that its cookies are marked Secure."""
    tools: Mapping[str, Tool[..., Any]] = field(default_factory=dict)
    """The tools, by name, whose verify and undo hooks the dashboard calls."""
    sign_in: SignIn = field(default_factory=SignIn)
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        require_days(self.work_days)
