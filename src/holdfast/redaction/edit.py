"""Replacing secrets in the bytes of a text, from left to right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

PLACEHOLDER: Final = re.compile(
    rb"\$\{|\$\(|\$[A-Za-z_]+\Z|\{\{|\{[\w.\[\]\"']*\}|<[\w .-]+>?|%\(|%s|[*x.]{3,}\Z|\[redacted:"
)


def hidden(kind: str) -> str:
    """Return the replacement for a secret of a kind."""
    return f"[redacted:{kind}]"


class Edit:
    """Builds a text with some parts replaced."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.done = 0
        self._pieces: list[bytes] = []
        self.kinds: set[str] = set()

    def cut(self, start: int, end: int, kind: str) -> None:
        """Replace the bytes from start to end; start must not be before `done`."""
        self._pieces += (self.raw[self.done : start], hidden(kind).encode())
        self.done = end
        self.kinds.add(kind)

    def text(self) -> bytes:
        """Return the edited text, the same object if nothing was cut."""
        if not self._pieces:
            return self.raw
        return b"".join((*self._pieces, self.raw[self.done :]))


def _is_real(secret: bytes) -> bool:
    return PLACEHOLDER.match(secret) is None


def replace_all(
    pattern: re.Pattern[bytes],
    kind: str,
    raw: bytes,
    is_secret: Callable[[bytes], bool] = _is_real,
) -> bytes:
    """Replace the group of each match if it is a secret."""
    edit = Edit(raw)
    for found in pattern.finditer(raw):
        if is_secret(found[1]):
            edit.cut(*found.span(1), kind)
    return edit.text()
