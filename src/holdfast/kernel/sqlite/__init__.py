"""SQLite: one writer with group commit, readers with snapshots, safe for many processes."""

from .driver import AsyncSqliteDriver, SqliteDriver, SqliteEngine
from .readonly import SqliteReader

__all__ = ["AsyncSqliteDriver", "SqliteDriver", "SqliteEngine", "SqliteReader"]
