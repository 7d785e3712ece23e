"""`holdfast export` and `holdfast import`, also of older formats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from .. import store as stores
from ..formatting import plural
from ..kernel.portable import LEFT_MAX
from ..portable.api import require_importable
from ..records import Imported
from .command import Answer, DatabaseUrl, Namespace, argument, flag, require_file

File = Annotated[Path, argument("FILE", "The file to read.", callback=require_file)]
AllowPlaintext = Annotated[
    bool,
    flag("--allow-plaintext", "Accept a file that is not encrypted although the store has a key."),
]
StoreKeys = Annotated[
    bool,
    flag(
        "--store-keys",
        "Also import keys that apply to the whole store; only from a source you trust.",
    ),
]


def export_file(
    file: Annotated[
        Path, argument("FILE", "The new file; it must not exist yet.", callback=require_file)
    ],
    sessions: Annotated[
        list[str] | None, argument("[SESSION]...", "The sessions to export; all by default.")
    ] = None,
    move: Annotated[
        bool, flag("--move", "Then cancel them in this store, with their work.")
    ] = False,
    url: DatabaseUrl = None,
    namespace: Namespace = None,
) -> Answer:
    """Write sessions to one file. Each brings its tree, and the trees it was forked from."""
    mode: Any = "write" if move else "read"
    with stores.open(url, namespace=namespace, mode=mode, migrate=False) as store:
        found = [store.find_session(session) for session in sessions or ()]
        exported = store.export(file, found or None, move=move)

    def shown() -> Iterator[str]:
        from rich.filesize import decimal

        yield (
            f"Exported {plural(exported.sessions, 'session')} with "
            f"{plural(exported.checkpoints, 'checkpoint')} to "
            f"{exported.path} ({decimal(exported.bytes)})."
        )
        if exported.left_behind:
            counts = (_counted(*each) for each in exported.left_behind.items())
            yield f"Not exported, as they belong to no session: {' and '.join(counts)}."
        if move:
            trees = plural(len(exported.moved), "tree")
            yield f"Cancelled {trees} here; the work continues where you import the file."

    return Answer(exported.to_dict(), shown)


def _counted(name: str, count: int) -> str:
    """Return how many there are; a count that reached its limit may be more."""
    told = plural(count, name.removesuffix("s").replace("_", " "))
    return told if count < LEFT_MAX else f"{told} or more"


def import_file(
    file: File,
    legacy: Annotated[
        bool, flag("--legacy", "The file is an SQLite database of an older format.")
    ] = False,
    allow_plaintext: AllowPlaintext = False,
    store_keys: StoreKeys = False,
    url: DatabaseUrl = None,
    namespace: Namespace = None,
) -> Answer:
    """Import an exported file or an older database, all of it or nothing.

    A session that exists is refused.
    """
    # Before a store is created, which would stay behind.
    require_importable(file, is_legacy=legacy)
    with stores.open(url, namespace=namespace) as store:
        if legacy:
            return _imported(store.import_legacy(file))
        keys = {"allow_plaintext": allow_plaintext, "store_keys": store_keys}
        return _imported(store.import_sessions(file, **keys))


def _imported(imported: Imported) -> Answer:
    def shown() -> Iterator[Any]:
        from rich.text import Text

        yield from (Text(f"Note: {note}", style="yellow") for note in imported.notes)
        sessions = plural(imported.sessions, "session")
        yield f"Imported {sessions} with {plural(imported.checkpoints, 'checkpoint')}."

    return Answer(imported.to_dict(), shown)
