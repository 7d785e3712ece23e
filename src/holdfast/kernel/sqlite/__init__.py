"""SQLite: one writer with group commit, readers with snapshots, safe for many processes."""

from .driver import AsyncSqliteDriver, SqliteDriver, SqliteEngine

__all__ = ["AsyncSqliteDriver", "SqliteDriver", "SqliteEngine"]
