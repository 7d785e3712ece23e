"""Plain data in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..system import System
from ..values import canonical, decode, encode


class MemorySystem(System):
    """A dict of plain data, `data`, that actions change in place."""

    is_in_process = True
    is_atomic = True
    is_interruptible = True
    not_covered: ClassVar[tuple[str, ...]] = (
        "references into the data that are kept elsewhere: they still point to the old objects",
        "one object in two places of the data: it becomes two",
    )

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = dict(data or {})

    def checkpoint(self, name: str) -> bytes:
        """Return the data as bytes, or raise InvalidValue naming what is not plain data."""
        return encode(self.data, "data")

    def rollback(self, token: bytes) -> None:
        """Replace the content of `data`, which stays the same dict."""
        content = decode(token)
        self.data.clear()
        self.data.update(content)

    def keep(self, token: bytes) -> bytes:
        """Return the token, which is valid in every process."""
        return token

    def restore(self, kept: bytes) -> None:
        """Replace the content of `data`."""
        self.rollback(kept)

    def identity(self) -> bytes | None:
        """Return the canonical form of the data, unless `observe` shows something else."""
        is_data = type(self).observe is MemorySystem.observe
        return canonical(self.data, "data") if is_data else None

    def observe(self) -> object:
        """Return a copy of the data."""
        return decode(encode(self.data, "data"))
