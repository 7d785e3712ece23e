"""`holdfast migrate`: bring a store to the newest format, or show where it stands."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import store
from ..clock import iso
from ..errors import NotFound
from ..records import StoreInfo
from .options import AsJson, Namespace, Url
from .output import console, print_json


def migrate(
    url: Url = None,
    namespace: Namespace = None,
    status: Annotated[
        bool, typer.Option("--status", help="Show the migrations and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a store, or bring it to the newest format."""
    if status:
        info, done = store.inspect(url, namespace=namespace), set[int]()
    else:
        before = _applied(url, namespace)
        store.open(url, namespace=namespace).close()
        info = store.inspect(url, namespace=namespace)
        done = {migration.version for migration in info.migrations} - before
    if as_json:
        print_json(_as_data(info, done))
    elif status:
        _show(info)
    else:
        _tell(info, done)


def _applied(url: str | None, namespace: str | None) -> set[int]:
    try:
        found = store.inspect(url, namespace=namespace).migrations
    except NotFound:
        return set()
    return {migration.version for migration in found if migration.applied_at is not None}


def _as_data(info: StoreInfo, done: set[int]) -> dict[str, object]:
    return {
        "store": info.where,
        "store_id": info.store_id,
        "dialect": info.dialect,
        "format": info.format,
        "newest": info.newest,
        "applied_now": sorted(done),
        "migrations": [
            {
                "version": migration.version,
                "name": migration.name,
                "applied_at": None if migration.applied_at is None else iso(migration.applied_at),
            }
            for migration in info.migrations
        ],
    }


def _tell(info: StoreInfo, done: set[int]) -> None:
    out = console()
    for migration in info.migrations:
        if migration.version in done:
            out.print(f"[green]applied[/] {migration.version:04} {migration.name}")
    state = "now has" if done else "already has"
    out.print(f"{info.where} {state} format {info.format}, the newest.", markup=False)


def _show(info: StoreInfo) -> None:
    from rich.table import Table

    table = Table("version", "name", "applied at", box=None, pad_edge=False, header_style="bold")
    for migration in info.migrations:
        if migration.applied_at is None:
            applied = "[yellow]pending[/]"
        else:
            applied = iso(migration.applied_at)
            if migration.version > info.newest:
                applied += " [red]by a newer Holdfast[/]"
        table.add_row(f"{migration.version:04}", migration.name, applied)
    out = console()
    out.print(info.where, markup=False)
    out.print(table)
