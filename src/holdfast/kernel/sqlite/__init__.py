"""SQLite: one writer with group commit, readers with snapshots, safe for many processes."""

from .async_driver import AsyncSqliteDriver
from .driver import SqliteDriver
from .readonly import SqliteReader

__all__ = ["AsyncSqliteDriver", "SqliteDriver", "SqliteReader"]
