"""What the protocol asks of a driver: to connect, to send, to wait; and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..attempt import Boundary
from ..operation import Row


@dataclass(slots=True)
class Message:
    """One statement on its way: its text in the server's dialect and its values in order."""

    text: str
    values: Sequence[object] = ()
    boundary: Boundary = "statement"
    is_unread: bool = False
    """Set where nobody looks at the rows that come back."""


@dataclass(slots=True)
class Reply:
    """What the server answered to one message."""

    rows: list[Row]
    row_count: int


@dataclass(slots=True)
class Connect:
    """Make a connection in a place that was taken for it."""

    place: Any
    timeout_seconds: float


@dataclass(slots=True)
class Queue:
    """Wait until one's turn comes, or the seconds have passed."""

    turn: Any
    seconds: float


@dataclass(slots=True)
class Send:
    """Send a batch in one round trip; the answer is one `Reply` per message."""

    connection: Any
    messages: Sequence[Message]
    is_commit: bool = False
    """Whether the outcome must be known: it is waited for, also by a caller that was cancelled."""


@dataclass(slots=True)
class Sleep:
    """Wait before the next try."""

    seconds: float


Step: TypeAlias = Connect | Queue | Send | Sleep
