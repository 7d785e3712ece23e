"""PostgreSQL through psycopg 3, sync and async, for many machines on one store."""

from .driver import AsyncPostgresDriver, PostgresDriver
from .join import AsyncJoinedDriver, JoinedDriver

__all__ = ["AsyncJoinedDriver", "AsyncPostgresDriver", "JoinedDriver", "PostgresDriver"]
