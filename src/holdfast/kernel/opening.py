"""Opening a store: find the database, migrate its schema, return a driver."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from ..errors import InvalidArgument, StoreUnavailable
from .driver import AsyncDriver, Driver, Settings, SyncDriver
from .operation import Call
from .schema import SchemaOps, is_behind
from .sqlite import AsyncSqliteDriver, SqliteDriver, SqliteReader
from .url import PostgresTarget, RemoteTarget, SqliteTarget, Target

if TYPE_CHECKING:
    from .postgres import PostgresDriver
    from .remote import RemoteDriver


def open_driver(target: Target, settings: Settings, *, migrate: bool) -> SyncDriver:
    """Return a sync driver for a store of the newest format."""
    if isinstance(target, SqliteTarget):
        return open_file(target, settings, migrate=migrate)
    if isinstance(target, RemoteTarget):
        return open_remote(target, settings)
    return open_server(target, settings, migrate=migrate)


async def open_async_driver(target: Target, settings: Settings, *, migrate: bool) -> AsyncDriver:
    """Return an async driver for a store of the newest format; blocking parts run in a thread."""
    if isinstance(target, SqliteTarget):
        return AsyncSqliteDriver(
            await asyncio.to_thread(open_file, target, settings, migrate=migrate)
        )
    if isinstance(target, RemoteTarget):
        remote = open_remote(target, settings)
        from .remote import AsyncRemoteDriver

        return AsyncRemoteDriver(remote)
    server = await asyncio.to_thread(open_server, target, settings, migrate=migrate)
    from .postgres import AsyncPostgresDriver

    return AsyncPostgresDriver(server)


def open_remote(target: RemoteTarget, settings: Settings) -> RemoteDriver:
    """Return a driver that has its calls run by a server."""
    from ..extras import required

    with required("the client of a server", "client"):
        from .remote import RemoteDriver
    return RemoteDriver(target, settings)


def open_file(
    target: SqliteTarget, settings: Settings, *, migrate: bool
) -> SqliteDriver | SqliteReader:
    """Open an SQLite file of the newest format, for writing or for reading."""
    if settings.mode == "write":
        return open_for_writing(target, settings, migrate=migrate)
    reader = SqliteReader(existing(target), settings, target.vfs)
    bring_up_to_date(reader, None, str(target.path), migrate=False)
    return reader


def existing(target: SqliteTarget) -> Path:
    """Return the path of a file that exists; refuse a temporary store, which never does."""
    if target.path is None:
        raise InvalidArgument("sqlite:// is a new temporary store each time; name a file")
    try:
        os.stat(target.path)
    except PermissionError as error:
        reason = f"{target.path} cannot be used: {error.strerror}; nothing was written"
        raise StoreUnavailable(reason) from None
    except OSError:
        is_behind(0, where=str(target.path), allowed=False)
    return target.path


def join(target: Target, settings: Settings, connection: object, *, is_async: bool) -> Driver:
    """Return a driver that joins the caller's transaction; PostgreSQL only."""
    if isinstance(target, RemoteTarget):
        raise InvalidArgument("within() needs the database itself, not a server before it")
    if isinstance(target, SqliteTarget):
        raise InvalidArgument(
            "within() needs a PostgreSQL store: two SQLite libraries in one process lose each "
            "other's locks"
        )
    require_psycopg()
    from .postgres import AsyncJoinedDriver, JoinedDriver

    driver = AsyncJoinedDriver if is_async else JoinedDriver
    return driver(connection, target.schema, settings)


def open_for_writing(target: SqliteTarget, settings: Settings, *, migrate: bool) -> SqliteDriver:
    """Open an SQLite file of the newest format; a temporary one is removed on close."""
    path, directory = target.path, None
    if path is None:
        directory = Path(tempfile.mkdtemp(prefix="holdfast-"))
        path = directory / "store.db"
    else:
        require_format(path, target.vfs, settings, migrate=migrate)
    driver = SqliteDriver(path, settings, target.vfs, removed_on_close=directory)
    bring_up_to_date(driver, None, str(path), migrate=migrate)
    try:
        driver.keep_time()
    except BaseException:
        driver.close()
        raise
    return driver


def require_format(path: Path, vfs: str | None, settings: Settings, *, migrate: bool) -> None:
    """Refuse a file of the wrong format before anything is written to it or beside it."""
    if os.path.exists(f"{path}-journal"):
        # A hot journal must be rolled back, which is a write, before the file can be read.
        return
    current = 0
    if os.path.exists(path):
        with closing(SqliteReader(path, settings, vfs)) as reader:
            current = reader.run(Call(SchemaOps.format, SchemaOps(None, str(path))))
    if current or not migrate:
        is_behind(current, where=str(path), allowed=migrate)


def open_server(target: PostgresTarget, settings: Settings, *, migrate: bool) -> PostgresDriver:
    """Connect to a PostgreSQL schema and migrate it, unless it is opened for reading."""
    require_psycopg()
    from .postgres import PostgresDriver

    driver = PostgresDriver(target, settings)
    may_migrate = migrate and settings.mode == "write"
    bring_up_to_date(driver, target.schema, f"schema {target.schema!r}", migrate=may_migrate)
    return driver


def bring_up_to_date(driver: SyncDriver, schema: str | None, where: str, *, migrate: bool) -> None:
    """Apply pending migrations; refuse a newer store, or any migration without `migrate`.

    The driver is closed if this fails.
    """
    ops, settings = SchemaOps(schema, where), driver.settings
    try:
        current = driver.run(Call(SchemaOps.format, ops))
        if is_behind(current, where=where, allowed=migrate):
            given = (settings.services.new_id(), settings.nouns)
            driver.run(Call(SchemaOps.migrate, ops, given))
    except BaseException:
        driver.close()
        raise


def require_psycopg() -> None:
    """Raise an error that says what to install if psycopg cannot be imported."""
    from ..extras import required

    with required("PostgreSQL", "postgres"):
        from . import postgres  # noqa: F401 - imported when it is first needed


class Closable(Protocol):
    """Something with an async `close`."""

    def close(self) -> Awaitable[None]:
        """Close it."""
        ...


C = TypeVar("C", bound=Closable)


class Opening(Coroutine[Any, Any, C]):
    """The coroutine that opens a store: `await` it, or use it with `async with`."""

    def __init__(self, opening: Coroutine[Any, Any, C], call: str) -> None:
        self._opening = opening
        self._call = call

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            # It is not closed: who only asks whether it has something may still await it.
            raise AttributeError(f"it has no {name} before it is open: `await {self._call}` first")

        def __enter__(self) -> NoReturn:
            self.close()
            raise InvalidArgument(f"this is opened by `async with {self._call}`, not by `with`")

        def __exit__(self, *_: object) -> None:
            """Do nothing; `with` looks for it first."""

    def __await__(self) -> Generator[Any, Any, C]:
        return self._opening.__await__()

    async def __aenter__(self) -> C:
        self._opened = await self._opening
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        await self._opened.close()

    def send(self, value: Any, /) -> Any:
        """Resume, as the task that runs this does."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error inside, as a cancelled task does."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """Close a coroutine that was never awaited."""
        self._opening.close()
