"""The options of a server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..answers.problems import CONFLICT_BYTES
from ..arguments import shown
from ..codec import Limits
from ..effects import Tool
from ..errors import InvalidArgument
from ..maintenance.retention import require_days
from ..replies.noun import KEPT_MS
from .sign_in import SignIn

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of the server; `GET /limits` returns them."""

    body_bytes: int = 4_194_304
    header_bytes: int = 16_384
    json_nodes: int = 100_000
    """How many values the JSON of a request may contain, nested ones included."""
    json_keys: int = 10_000
    """How many keys an object in the JSON of a request may have."""
    json_string_bytes: int = 1_048_576
    """How many bytes of UTF-8 a string or a key in the JSON of a request may have."""
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
    head_seconds: float = 5.0
    """How long a client that has begun a request may take to send its headers; the handshake of a
    WebSocket consists of these."""
    request_seconds: float = 30.0
    """How long a client may take to send a request."""
    wait_seconds: float = 60.0
    """How long a request may wait for an agent's answer."""
    conflict_bytes: int = CONFLICT_BYTES
    """How many bytes of current values the response to a conflict includes; others are omitted."""
    idempotency_hours: int = field(default=KEPT_MS // 3_600_000, init=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            number = getattr(self, each.name)
            if number is not None and not 0 <= number < math.inf:
                raise InvalidArgument(f"the limit {each.name} must not be {number}")


def limits_of(given: Iterable[str]) -> tuple[ServerLimits, Limits]:
    """Return the limits of a server and its store; those given as NAME=NUMBER, others default."""
    numbers: dict[str, int | float] = {}
    known = {each.name: each.type for each in (*fields(ServerLimits), *fields(Limits)) if each.init}
    for each in given:
        name, _, number = each.partition("=")
        if name not in known:
            raise InvalidArgument(
                f"--limit {shown(each)}: there is no limit {shown(name)}; one of {', '.join(known)}"
            )
        try:
            numbers[name] = float(number) if known[name] == "float" else int(number)
        except ValueError:
            raise InvalidArgument(f"--limit {shown(each)}: not a number") from None
    ours = {each.name for each in fields(Limits)}
    return (
        ServerLimits(**{name: each for name, each in numbers.items() if name not in ours}),  # type: ignore[arg-type]
        Limits(**{name: int(each) for name, each in numbers.items() if name in ours}),
    )


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
