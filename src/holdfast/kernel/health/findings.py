"""What a look at a store gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `advice` says what to do when it is not ok."""

    check: str
    level: Level
    message: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationState:
    """One migration of a store; `applied_at` is None while it is pending."""

    version: int
    name: str
    applied_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """What a store is: where it lies, its id and its format."""

    where: str
    dialect: str
    store_id: str
    format: int
    newest: int
    migrations: tuple[MigrationState, ...]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Return a number of bytes as people read it."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
