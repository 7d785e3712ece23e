"""Ids seen in a file, kept on disk so that memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apsw

from ..errors import StoreUnavailable

SETTINGS = ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", "PRAGMA cache_size = -2000")
CREATE_IDS = "CREATE TABLE ids (kind TEXT, id TEXT, PRIMARY KEY (kind, id)) WITHOUT ROWID"
ADD_ID = "INSERT INTO ids (kind, id) VALUES (?, ?)"


class SeenIds:
    """The ids of each kind, in a temporary file without a name."""

    def __init__(self) -> None:
        # An empty name stands for a temporary file that SQLite creates when needed, and removes.
        self._connection = apsw.Connection("")
        for statement in (*SETTINGS, CREATE_IDS, "BEGIN"):
            self._connection.execute(statement).fetchall()

    def add(self, kind: str, ids: Iterable[str]) -> str | None:
        """Add ids; return the first that was there already, if any."""
        last = ""

        def each() -> Iterator[tuple[str, str]]:
            nonlocal last
            for last in ids:
                yield kind, last

        try:
            self._connection.executemany(ADD_ID, each())
        except apsw.ConstraintError:
            return last
        except apsw.Error as error:
            raise StoreUnavailable(f"the temporary directory cannot be used: {error}") from error
        return None
