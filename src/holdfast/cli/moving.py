"""`holdfast checkpoints export` and `import`, and `holdfast import`, also of older formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import store
from ..records import Imported
from ..words import plural
from .options import AsJson, Namespace, Url
from .output import console, print_json
from .showing import say

File = Annotated[Path, typer.Argument(metavar="FILE", help="The file to read.")]
AllowPlaintext = Annotated[
    bool,
    typer.Option("--allow-plaintext", help="Also if it is not encrypted and the store has a key."),
]
StoreKeys = Annotated[
    bool,
    typer.Option(
        "--store-keys",
        help="Also take keys that count beyond its sessions; only from where you trust it.",
    ),
]


def export_sessions(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The new file; it must not exist yet.")
    ],
    sessions: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SESSION]...", help="Which sessions; without one, all."),
    ] = None,
    url: Url = None,
    namespace: Namespace = None,
    move: Annotated[
        bool, typer.Option("--move", help="Then cancel them here, with their work.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write sessions to one file. Each brings its tree, and the trees it was forked from."""
    from rich.filesize import decimal

    with store.open(
        url, namespace=namespace, mode="write" if move else "read", migrate=False
    ) as opened:
        found = [opened.find_session(session) for session in sessions or ()]
        exported = opened.export(file, found or None, move=move)
    if as_json:
        print_json(exported.to_dict())
        return
    say(
        f"Exported {plural(exported.sessions, 'session')} with "
        f"{plural(exported.checkpoints, 'checkpoint')} to "
        f"{exported.path} ({decimal(exported.bytes)})."
    )
    if move:
        trees = plural(len(exported.moved), "tree")
        say(f"Cancelled {trees} here; the work goes on where you import it.")


def import_export(
    file: File,
    url: Url = None,
    namespace: Namespace = None,
    allow_plaintext: AllowPlaintext = False,
    store_keys: StoreKeys = False,
    as_json: AsJson = False,
) -> None:
    """Read an exported file. All of it or nothing; a session that exists is refused."""
    with store.open(url, namespace=namespace) as opened:
        imported = opened.import_sessions(
            file, allow_plaintext=allow_plaintext, store_keys=store_keys
        )
    _tell(imported, as_json=as_json)


def import_file(
    file: File,
    url: Url = None,
    namespace: Namespace = None,
    legacy: Annotated[
        bool, typer.Option("--legacy", help="The file is an SQLite database of an older format.")
    ] = False,
    allow_plaintext: AllowPlaintext = False,
    store_keys: StoreKeys = False,
    as_json: AsJson = False,
) -> None:
    """Read an exported file, or adopt an older database. All of it or nothing."""
    if not legacy:
        import_export(file, url, namespace, allow_plaintext, store_keys, as_json)
        return
    with store.open(url, namespace=namespace) as opened:
        imported = opened.import_legacy(file)
    _tell(imported, as_json=as_json)


def _tell(imported: Imported, *, as_json: bool) -> None:
    if as_json:
        print_json(imported.to_dict())
        return
    out = console()
    for note in imported.notes:
        out.print(f"Note: {note}", style="yellow", markup=False)
    sessions = plural(imported.sessions, "session")
    say(f"Imported {sessions} with {plural(imported.checkpoints, 'checkpoint')}.")
