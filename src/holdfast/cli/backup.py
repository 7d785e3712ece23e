"""`holdfast backup`: copy a live store into a file that is a store itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import store
from .options import AsJson, Namespace, Url
from .output import console, print_json


def backup(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The new SQLite file; it must not exist yet.")
    ],
    url: Url = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Copy a live store. The copy is one moment of it and a store itself."""
    from rich.filesize import decimal
    from rich.progress import Progress

    errors = console(stderr=True)
    with (
        store.open(url, namespace=namespace, mode="read") as opened,
        Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress,
    ):
        task = progress.add_task("Copying", total=None)
        opened.backup(path, lambda done, total: progress.update(task, completed=done, total=total))
    target = path.resolve()
    count = target.stat().st_size
    if as_json:
        print_json({"path": str(target), "bytes": count})
    else:
        console().print(f"Backed up to {target} ({decimal(count)}).", markup=False)
