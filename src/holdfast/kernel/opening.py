"""Opening a store: find the database, bring its schema up to date, hand back a driver."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..errors import HoldfastError, InvalidArgument
from .operation import Call, SyncDriver
from .schema import SchemaOps, is_behind
from .settings import Settings
from .sqlite import AsyncSqliteDriver, SqliteDriver, SqliteEngine, SqliteReadEngine
from .sqlite.time import store_clock
from .url import PostgresTarget, SqliteTarget, Target


def open_driver(target: Target, settings: Settings, *, migrate: bool) -> Any:
    """Return a sync driver for a store of the newest format."""
    engine = open_any(target, settings, migrate=migrate)
    if isinstance(target, SqliteTarget):
        return SqliteDriver(engine)
    return postgres_package().PostgresDriver(engine)


async def open_async_driver(target: Target, settings: Settings, *, migrate: bool) -> Any:
    """Return an async driver for a store of the newest format; blocking parts run in a thread."""
    engine = await asyncio.to_thread(open_any, target, settings, migrate=migrate)
    if isinstance(target, SqliteTarget):
        return AsyncSqliteDriver(engine)
    return postgres_package().AsyncPostgresDriver(engine)


def open_any(target: Target, settings: Settings, *, migrate: bool) -> Any:
    """Open a store of the newest format; one that is only read is never migrated."""
    migrate = migrate and settings.mode == "write"
    if isinstance(target, PostgresTarget):
        return open_server(target, settings, migrate=migrate)
    if settings.mode == "write":
        return open_engine(target, settings, migrate=migrate)
    engine = SqliteReadEngine(existing(target), settings, target.vfs)
    try:
        bring_up_to_date(engine, None, str(target.path), settings, migrate=False)
    except BaseException:
        engine.close()
        raise
    return engine


def existing(target: SqliteTarget) -> Path:
    """Refuse a file that does not exist, and a temporary one, which never does."""
    if target.path is None:
        raise InvalidArgument("sqlite:// is a new temporary store each time; name a file")
    if not os.path.exists(target.path):
        is_behind(0, where=str(target.path), allowed=False)
    return target.path


def join(target: Target, settings: Settings, connection: object, *, is_async: bool) -> Any:
    """Return a driver inside the caller's own transaction; PostgreSQL only."""
    if isinstance(target, SqliteTarget):
        raise InvalidArgument(
            "within() needs a PostgreSQL store: two SQLite libraries on one file lose their locks"
        )
    package = postgres_package()
    driver = package.AsyncJoinedDriver if is_async else package.JoinedDriver
    return driver(connection, target.schema, settings)


def open_engine(target: SqliteTarget, settings: Settings, *, migrate: bool) -> SqliteEngine:
    """Open an SQLite file of the newest format; a temporary one is removed when it is closed."""
    path, directory = target.path, None
    if path is None:
        directory = Path(tempfile.mkdtemp(prefix="holdfast-"))
        path = directory / "store.db"
    else:
        look_first(path, target.vfs, settings, migrate=migrate)
    engine = SqliteEngine(path, settings, target.vfs)
    if directory is not None:
        engine.on_close = lambda: shutil.rmtree(directory, ignore_errors=True)
    try:
        bring_up_to_date(engine, None, str(path), settings, migrate=migrate)
        if not settings.is_clock_virtual:
            engine.writer.clock = store_clock(engine) or settings.clock
    except BaseException:
        engine.close()
        raise
    engine.writer.is_marking = True
    return engine


def look_first(path: Path, vfs: str | None, settings: Settings, *, migrate: bool) -> None:
    """Refuse a file of the wrong format before anything is written to it or beside it."""
    if os.path.exists(f"{path}-journal"):
        # Before what a crash has cut short is undone, which is a write, the file cannot be read.
        return
    current = 0
    if os.path.exists(path):
        with SqliteReadEngine(path, settings, vfs) as engine:
            current = engine.run(Call(SchemaOps.format, SchemaOps(None, str(path))))
    if current or not migrate:
        is_behind(current, where=str(path), allowed=migrate)


def open_server(target: PostgresTarget, settings: Settings, *, migrate: bool) -> Any:
    """Connect to a PostgreSQL schema and bring it up to date."""
    package = postgres_package()
    engine = package.PostgresEngine(target, settings)
    try:
        where = f"schema {target.schema!r}"
        driver = package.PostgresDriver(engine)
        bring_up_to_date(driver, target.schema, where, settings, migrate=migrate)
    except BaseException:
        engine.close()
        raise
    engine.protocol.is_marking = settings.mode == "write"
    return engine


def bring_up_to_date(
    driver: SyncDriver, schema: str | None, where: str, settings: Settings, *, migrate: bool
) -> None:
    """Apply what is missing; refuse a newer store, or any change if it is not allowed."""
    ops = SchemaOps(schema, where)
    current = driver.run(Call(SchemaOps.format, ops))
    if is_behind(current, where=where, allowed=migrate):
        given = (settings.services.new_id(), settings.nouns)
        driver.run(Call(SchemaOps.migrate, ops, given))


def postgres_package() -> Any:
    """Return the PostgreSQL driver, imported when it is first needed."""
    try:
        from . import postgres
    except ImportError as error:
        hint = "PostgreSQL needs psycopg: pip install 'holdfast-agents[postgres]'"
        raise HoldfastError(hint) from error
    return postgres
