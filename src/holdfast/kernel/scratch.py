"""A place for a store that is removed again, on the disk or the server of another."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import InvalidArgument, StoreUnavailable
from .opening import require_psycopg
from .url import PostgresTarget, RemoteTarget, SqliteTarget, Target

PREFIX = "holdfast_scratch_"
CONNECT_SECONDS = 10.0


@contextmanager
def scratch(target: Target) -> Iterator[str]:
    """Yield the URL of an empty place beside a store, and remove whatever is there afterwards.

    For a file it is a directory beside it, so that the disk is the same; on PostgreSQL a schema
    of the same database. Close the store before the place is left.
    """
    if isinstance(target, RemoteTarget):
        raise InvalidArgument(
            "a server has no room for a temporary store; name the database that it serves"
        )
    if isinstance(target, SqliteTarget):
        beside = _directory(target)
        with TemporaryDirectory(prefix=PREFIX, dir=beside) as directory:
            yield replace(target, path=Path(directory, "store.db")).url
        return
    require_psycopg()
    place = replace(target, schema=PREFIX + secrets.token_hex(8))
    try:
        yield place.url
    finally:
        _drop(place)


def _directory(target: SqliteTarget) -> Path | None:
    beside = None if target.path is None else target.path.parent
    if beside is not None and not beside.is_dir():
        raise InvalidArgument(f"there is no directory {beside}")
    return beside


def _drop(place: PostgresTarget) -> None:
    import psycopg
    from psycopg import sql

    from .postgres.connections import connect

    drop = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(place.schema))
    try:
        with connect(place.dsn, CONNECT_SECONDS, "holdfast") as connection:
            # It tells of every table that goes with the schema.
            connection.execute("SET client_min_messages = warning")
            connection.execute(drop)
    except psycopg.Error as error:
        raise StoreUnavailable(
            f"the temporary schema {place.schema} could not be dropped: {error}; drop it by hand"
        ) from error
