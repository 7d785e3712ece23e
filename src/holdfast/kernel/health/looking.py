"""Opening a store to look at it: nothing is created, migrated or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import CorruptStore, InvalidArgument, NotAStore, NotFound
from ..opening import single_postgres
from ..operation import Call, SyncDriver
from ..schema import SchemaOps, migrations, newest
from ..settings import Settings
from ..url import PostgresTarget, SqliteTarget, Target, redact
from .findings import Finding, MigrationState, StoreInfo
from .postgres import server_findings
from .sqlite import SqliteLook, file_findings, page_findings
from .store import guarded, store_findings


def inspect(target: Target, settings: Settings) -> StoreInfo:
    """Return what a store is. Raises NotFound where there is none."""
    schema = target.schema if isinstance(target, PostgresTarget) else None
    where = place(target)
    ops = SchemaOps(schema, where)
    with looking(target, settings) as driver:
        applied = driver.run(Call(SchemaOps.applied, ops))
        if not applied:
            raise NotFound(f"there is no store in {where}; `holdfast migrate` creates it")
        store_id = driver.run(Call(SchemaOps.store_id, ops))
    known = {migration.version: migration.name for migration in migrations()}
    names = known | {row["version"]: row["name"] for row in applied}
    times = {row["version"]: row["applied_at"] for row in applied}
    return StoreInfo(
        where=where,
        dialect=driver.dialect,
        store_id=store_id,
        format=max(times),
        newest=newest(),
        migrations=tuple(
            MigrationState(version=version, name=names[version], applied_at=times.get(version))
            for version in sorted(names)
        ),
    )


def check(target: Target, settings: Settings, *, full: bool) -> list[Finding]:
    """Examine a store. Raises only where there is nothing to examine."""
    found = []
    if isinstance(target, SqliteTarget):
        found += file_findings(existing(target))
    try:
        with looking(target, settings) as driver:
            if isinstance(driver, SqliteLook):
                found += page_findings(driver, full=full)
            else:
                found += server_findings(driver)
            found += guarded("schema format", lambda: format_findings(target, settings))
            found += store_findings(driver)
    except (CorruptStore, NotAStore) as error:
        found.append(Finding("database", "problem", str(error)))
    return found


def format_findings(target: Target, settings: Settings) -> list[Finding]:
    """Compare a store's format with the one this Holdfast writes."""
    info = inspect(target, settings)
    message = f"format {info.format}, this Holdfast writes format {info.newest}"
    if info.format < info.newest:
        return [Finding("schema format", "warning", message, "Run `holdfast migrate`.")]
    if info.format > info.newest:
        return [Finding("schema format", "problem", message, "Install a newer Holdfast.")]
    return [Finding("schema format", "ok", message)]


@contextmanager
def looking(target: Target, settings: Settings) -> Iterator[SyncDriver]:
    """Lend a driver that only reads."""
    if isinstance(target, PostgresTarget):
        with single_postgres(target, settings) as driver:
            yield driver
    else:
        look = SqliteLook(existing(target), settings)
        try:
            yield look
        finally:
            look.close()


def existing(target: SqliteTarget) -> SqliteTarget:
    """Refuse a file that does not exist, and a temporary one, which never does."""
    if target.path is None:
        raise InvalidArgument("sqlite:// is a new temporary store each time; name a file")
    if not target.path.exists():
        raise NotFound(f"there is no store {target.path}; `holdfast migrate` creates it")
    return target


def place(target: Target) -> str:
    """Return where a store lies, without its password."""
    if isinstance(target, PostgresTarget):
        return f"schema {target.schema!r} of {redact(target.dsn)}"
    return str(target.path)
