"""Translation of PostgreSQL's errors, and which of them end a connection."""

from __future__ import annotations

import psycopg
from psycopg import errors as pg

from ...errors import (
    HoldfastError,
    Refused,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

_FULL = ("53100",)
_BUSY = ("55P03", "57014", "53300")
_NOT_PREPARED = ("26000", "42P05")


def is_connection_lost(error: Exception) -> bool:
    """Whether the connection is lost, so that the server may not have seen the last statement."""
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    if isinstance(error, pg.NotNullViolation) and error.diag.table_name == "hf_writers":
        # The writer's row was closed by `settle`, which takes the connection for lost.
        return True
    return error.sqlstate.startswith(("08", "57P", "25P03"))


def is_read_only(error: Exception) -> bool:
    """Whether the server accepts no writes; after a failover another connection may find one."""
    return isinstance(error, pg.ReadOnlySqlTransaction)


def translate(error: psycopg.Error) -> HoldfastError:
    """Return our error for one of PostgreSQL's."""
    state = error.sqlstate or ""
    reason = " ".join(str(error).split())
    if is_connection_lost(error):
        return StoreUnavailable(f"PostgreSQL cannot be reached: {reason}; nothing was written")
    if is_read_only(error):
        return StoreUnavailable(f"PostgreSQL is read-only: {reason}; nothing was written")
    if state in _FULL:
        return StoreFull(f"PostgreSQL has no space left: {reason}; nothing was written")
    if state in _BUSY:
        return StoreBusy(f"PostgreSQL timed out: {reason}; nothing was written")
    if state in _NOT_PREPARED:
        return StoreError(
            f"PostgreSQL reports {state}: {reason}; nothing was written. A pooler in front of it "
            "does not support prepared statements: add `prepare=off` to the URL"
        )
    if state.startswith("23"):
        return Refused(f"the database refused the change: {reason}")
    return StoreError(f"PostgreSQL reports {state or 'an error'}: {reason}")
