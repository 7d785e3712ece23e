"""What a driver is opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..clock import Clock
from .attempt import Hooks, Services
from .nouns import Noun

Durability = Literal["full", "normal"]
StoreMode = Literal["write", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The choices that both drivers share."""

    services: Services
    nouns: Sequence[Noun]
    """Everything that the store keeps, each after what it stands on."""
    clock: Clock
    is_clock_virtual: bool = False
    durability: Durability = "full"
    mode: StoreMode = "write"
    busy_timeout_seconds: float = 10.0
    hooks: Hooks = field(default_factory=Hooks)
