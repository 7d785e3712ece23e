"""Opening a store to look at it: nothing is created, migrated or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from ...errors import CorruptStore, NotAStore, NotFound
from ...records import Finding, MigrationState, StoreInfo
from ..driver import Runner
from ..opening import existing, require_psycopg
from ..operation import Call
from ..schema import SchemaOps, formats, newest
from ..settings import Settings
from ..sqlite import SqliteReadEngine
from ..url import PostgresTarget, SqliteTarget, Target
from .contents import content_findings
from .server import server_findings
from .sqlite import file_findings, library_finding, page_findings


def inspect(target: Target, settings: Settings) -> StoreInfo:
    """Return what a store is. Raises NotFound where there is none."""
    with looking(target, settings) as driver:
        return info_of(driver, target)


def check(target: Target, settings: Settings, *, full: bool) -> list[Finding]:
    """Examine a store. Raises only where there is nothing to examine."""
    found = [Finding("store", "ok", place(target))]
    if isinstance(target, SqliteTarget):
        found += [library_finding(), *file_findings(existing(target))]
    try:
        with looking(target, settings) as driver:
            if isinstance(target, PostgresTarget):
                found += server_findings(driver, target.schema)
            elif isinstance(driver, SqliteReadEngine):
                found += page_findings(driver, full=full)
            info = info_of(driver, target)
            found.append(format_finding(info))
            if info.format == info.newest:
                found += content_findings(driver, settings.nouns)
    except NotAStore as error:
        # Whatever else was found is about a file that is none of ours.
        return [Finding("database", "problem", f"{error}.")]
    except CorruptStore as error:
        found.append(Finding("database", "problem", f"{error}."))
    return found


def info_of(driver: Runner, target: Target) -> StoreInfo:
    """Read what a store is."""
    where = place(target)
    ops = SchemaOps(target.schema if isinstance(target, PostgresTarget) else None, where)
    applied = driver.run(Call(SchemaOps.applied, ops))
    if not applied:
        raise NotFound(f"there is no store in {where}; `holdfast migrate` creates it")
    times = {row["version"]: row["applied_at"] for row in applied}
    names = formats() | {row["version"]: row["name"] for row in applied}
    return StoreInfo(
        where=where,
        dialect="sqlite" if isinstance(target, SqliteTarget) else "postgres",
        store_id=driver.run(Call(SchemaOps.store_id, ops)),
        format=max(times),
        newest=newest(),
        migrations=tuple(
            MigrationState(version=version, name=names[version], applied_at=times.get(version))
            for version in sorted(names)
        ),
    )


def format_finding(info: StoreInfo) -> Finding:
    """Compare a store's format with the one this Holdfast writes."""
    message = f"The store has format {info.format}, this Holdfast writes format {info.newest}."
    if info.format < info.newest:
        return Finding("schema format", "warning", message, "Run `holdfast migrate`.")
    if info.format > info.newest:
        return Finding("schema format", "problem", message, "Install a newer Holdfast.")
    return Finding("schema format", "ok", message)


@contextmanager
def looking(target: Target, settings: Settings) -> Iterator[Runner]:
    """Lend a driver that only reads."""
    if isinstance(target, PostgresTarget):
        require_psycopg()
        from ..postgres import PostgresDriver, PostgresEngine

        with closing(PostgresDriver(PostgresEngine(target, settings))) as driver:
            yield driver
    else:
        with SqliteReadEngine(existing(target), settings, target.vfs) as engine:
            yield engine


def place(target: Target) -> str:
    """Return where a store lies, without its password."""
    if isinstance(target, PostgresTarget):
        return f"schema {target.schema!r} of {target.shown}"
    return str(target.path)
