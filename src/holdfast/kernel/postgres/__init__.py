"""PostgreSQL: psycopg 3 pools in both colours, for many machines on one store."""

from .driver import AsyncPostgresDriver, PostgresDriver
from .join import AsyncJoinedDriver, JoinedDriver, single

__all__ = ["AsyncJoinedDriver", "AsyncPostgresDriver", "JoinedDriver", "PostgresDriver", "single"]
