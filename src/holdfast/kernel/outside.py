"""What a store does outside the transactions of its operations."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidArgument
from .url import PostgresTarget, Target


def require_own(driver: Any, what: str) -> None:
    """Refuse a store that lives inside somebody's own transaction."""
    owner = getattr(driver, "engine", driver)
    if not hasattr(owner, "require_usable"):
        raise InvalidArgument(f"a store inside somebody's own transaction cannot {what}")
    owner.require_usable()


def vacuum_store(driver: Any, target: Target) -> None:
    """Rewrite an SQLite file without its free pages, or vacuum the tables on PostgreSQL."""
    require_own(driver, "be vacuumed")
    if isinstance(target, PostgresTarget):
        from .postgres.copying import vacuum

        vacuum(target.dsn, target.schema)
    else:
        driver.engine.vacuum()
