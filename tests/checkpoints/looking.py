"""Reading rows as the database has them, and finding sessions without touching them."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast.kernel.operation import Op, SyncBound, large_query, rows


class Look(SyncBound):
    """Raw reads of one store."""

    def __init__(self, store: holdfast.Store) -> None:
        self.store = store
        self.driver = store.driver

    @large_query
    def rows(self, /, sql: str, **parameters: object) -> Op[list[dict[str, Any]]]:
        """Return the rows of a SELECT."""
        return (yield from rows(sql, **parameters))
