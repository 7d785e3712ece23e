"""Counts, sizes and times as people read them."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Return a number of bytes."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def ago(at_ms: int, now_ms: int) -> str:
    """Return how long ago a time was, or how far it lies ahead, in its largest unit."""
    seconds = abs(now_ms - at_ms) // 1000
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if seconds >= length:
            amount = f"{seconds // length:,} {unit}"
            return f"{amount} ago" if at_ms < now_ms else f"in {amount}"
    return "now"
