"""Items that reach a worker from elsewhere than a claim, such as a transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from ..dataclass import dataclass
from ..kernel.operation import Definition, Row
from ..peers.uptake import Ended, Taken
from ..store import Store
from ..work.claims import Claim


class Envelope(Protocol):
    """The message that delivered an item; acknowledged when the end of the attempt is durable."""

    message: Any

    def ack(self) -> None:
        """Acknowledge the message, without waiting."""

    def extend(self) -> None:
        """Extend its acknowledgement deadline, whenever the item's lease is renewed."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """An item that was claimed in the commit that created it; `asked_at` is when that began."""

    row: Row
    envelope: Envelope
    asked_at: float


@dataclass(frozen=True, slots=True)
class Intake:
    """What a worker gives to its inbox: the claim to make, how many items it has room for."""

    store: Store
    claim: Claim
    room: Callable[[], int]
    accept: Callable[[Delivered], None]


ServiceTurn: TypeAlias = Definition[tuple[Ended, Taken]]
"""Ends attempts, claims items, and takes up what their handlers need of some, in one commit."""


class Inbox(Protocol):
    """Delivers items to a worker while it runs."""

    def start(self, intake: Intake) -> None:
        """Start to deliver items."""

    def stop(self) -> None:
        """Deliver no more; return once the last one was handed over."""
