"""SQLite: one writer with group commit, readers with snapshots, safe for many processes."""

from .driver import AsyncSqliteDriver, SqliteDriver, SqliteEngine
from .look import SqliteLook

__all__ = ["AsyncSqliteDriver", "SqliteDriver", "SqliteEngine", "SqliteLook"]
