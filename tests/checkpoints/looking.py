"""Reading rows as the database has them, and finding sessions without touching them."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.kernel.operation import Handle, Op, Sync, large_query, rows


class Look(Handle[Sync]):
    """Raw reads of one store."""

    def __init__(self, store: holdfast.Store) -> None:
        super().__init__(store.runtime)
        self.store = store

    @large_query
    def rows(self, /, sql: str, **parameters: object) -> Op[list[dict[str, Any]]]:
        """Return the rows of a SELECT."""
        return (yield from rows(sql, **parameters))
