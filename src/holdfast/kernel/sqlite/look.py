"""Reading an SQLite file without changing it or leaving anything beside it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import apsw

from ...errors import HoldfastError
from ..attempt import Attempt
from ..entrance import Entrance
from ..operation import Call
from ..settings import Settings
from ..signals import Signals
from ..sql import Dialect
from .connection import fetch, look, require_place, require_store, translate
from .inherited import close_inherited
from .time import seen_clock

R = TypeVar("R")


class SqliteLook:
    """Runs queries on a file that may be damaged, of another format, or not ours."""

    dialect = "sqlite"

    def __init__(self, path: Path, vfs: str | None, settings: Settings) -> None:
        self.path = path
        self.entrance = Entrance()
        self.signals = Signals()
        self._texts = Dialect(None)
        self._settings = settings
        self._clock = settings.clock
        require_place(path, vfs)
        close_inherited()
        try:
            self._connection = look(path, vfs)
            try:
                require_store(self._connection)
            except BaseException:
                self._connection.close()
                raise
        except apsw.Error as error:
            raise translate(error, path) from error
        # A file that is damaged or of another format may not tell its time.
        with suppress(HoldfastError):
            if not settings.is_clock_virtual:
                self._clock = seen_clock(self) or settings.clock

    def run(self, call: Call[R]) -> R:
        """Run a query in one snapshot."""
        attempt = Attempt(call, self._settings.services)
        now_ms = self._clock.now_ms()
        try:
            self._connection.execute("BEGIN")
            try:
                while attempt.queries:
                    connection, texts = self._connection, self._texts
                    attempt.reply(
                        [
                            fetch(connection, texts.statement(query.sql), query, now_ms)
                            for query in attempt.queries
                        ]
                    )
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
        except apsw.Error as error:
            raise translate(error, self.path) from error
        return attempt.result

    def pragma(self, name: str, value: int | None = None) -> list[tuple[object, ...]]:
        """Set or ask a pragma and return its rows."""
        text = f"PRAGMA {name}" if value is None else f"PRAGMA {name}({value})"
        try:
            return list(self._connection.execute(text))
        except apsw.Error as error:
            raise translate(error, self.path) from error

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> SqliteLook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
