"""Exports and imports as a store offers them, in both colours."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arguments import require_path, shown
from ..codec import Codec
from ..effects import Ledger
from ..errors import CorruptRecord, InvalidArgument, Refused, SessionBusy
from ..kernel.flow import Flow, flow, invoke
from ..kernel.handle import C, Handle
from ..kernel.newfile import new_file
from ..kernel.operation import Call, Lock, Op, one, operation, rows
from ..kernel.outside import require_own
from ..session import Session
from ..words import plural
from .checking import check
from .exporting import Exporter, Written
from .frames import ExportFile, ExportWriter, Source
from .importing import Importer, already_there, spent_by_another
from .legacy import LegacyDatabase

# So many of the trees that cannot be moved are named in the message.
NAMED_MAX = 10
POSITION = "SELECT position FROM hf_trees WHERE root_id = :root_id"
ROOTS = "SELECT id, number FROM hf_sessions WHERE id = :root_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote; `moved` are the roots of the trees that were cancelled here."""

    path: str
    bytes: int
    sessions: int
    checkpoints: int
    effects: int = 0
    items: int = 0
    spends: int = 0
    moved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import wrote; `notes` say what could not be taken over as it was."""

    sessions: int
    checkpoints: int
    effects: int = 0
    items: int = 0
    spends: int = 0
    notes: tuple[str, ...]


class PortableOps(Handle[C]):
    """Moves sessions between stores."""

    @flow
    def export(
        self, path: str | Path, sessions: Iterable[object] | None = None, *, move: bool = False
    ) -> Flow[Exported]:
        """Write sessions to a new file, one consistent moment of them; without names, all.

        A session brings its whole tree, the trees it was forked from, and their effects, work items
        and spend. With a cipher the file is encrypted. Nothing is left behind if it fails.

        `move` cancels the trees here, with their items, in one transaction; then the file gets its
        name. SessionBusy names those that were written to meanwhile: all go on here.
        """
        require_own(self.runtime.driver, "export")
        ids = None if sessions is None else _ids(sessions)
        exported: Exported = yield from invoke(_export, self, path, ids, move=move)
        return exported

    @operation
    def _leave(self, positions: dict[str, int]) -> Op[None]:
        """Cancel trees that were exported at a position, unless one was written to since."""
        changed = []
        for root_id, position in sorted(positions.items()):
            yield Lock(root_id)
            tree = yield from one(POSITION, root_id=root_id)
            if tree is None or tree["position"] != position:
                changed.append(root_id)
        if changed:
            raise _written_to(changed)
        for root_id in sorted(positions):
            for row in (yield from rows(ROOTS, root_id=root_id)):
                session: Session[C] = Session(self.runtime, row["id"], row["number"], root_id)
                yield from Session.cancel(session)

    @flow
    def import_sessions(
        self, path: str | Path, *, allow_plaintext: bool = False, store_keys: bool = False
    ) -> Flow[Imported]:
        """Read an export into this store, all of it or nothing; ids and versions stay the same.

        Everything is checked before anything is written. A session that exists is refused. An
        export without encryption is refused by a store with a cipher, unless it is allowed. Work
        that was not finished waits for review. What counts beyond the file's own sessions (`once`
        and global keys, keys of unfinished items, effects of sessions that are not in it) is
        refused, unless `store_keys` says that the file can be trusted with it.
        """
        require_own(self.runtime.driver, "import")
        place = _existing(path)

        def read() -> Source:
            return ExportFile(place, self.runtime.codec, allow_plaintext=allow_plaintext)

        mark = Ledger.of(self.runtime).salts.mark
        arguments = (self.runtime.driver, self.runtime.codec, mark, read)
        imported: Imported = yield from invoke(_import, *arguments, store_keys=store_keys)
        return imported

    @flow
    def import_legacy(self, path: str | Path) -> Flow[Imported]:
        """Adopt the sessions of an older SQLite format, all of them or none; it is only read."""
        require_own(self.runtime.driver, "import")
        place = _existing(path)

        def read() -> Source:
            return LegacyDatabase(
                place, Ledger.of(self.runtime).pen, Ledger.of(self.runtime).salts.key
            )

        mark = Ledger.of(self.runtime).salts.mark
        arguments = (self.runtime.driver, self.runtime.codec, mark, read)
        imported: Imported = yield from invoke(_import, *arguments, store_keys=True)
        return imported


def _written_to(root_ids: list[str]) -> SessionBusy:
    names = ", ".join(map(repr, root_ids[:NAMED_MAX]))
    if len(root_ids) > NAMED_MAX:
        names += f" and {len(root_ids) - NAMED_MAX} more"
    was = "was" if len(root_ids) == 1 else "were"
    return SessionBusy(
        f"{plural(len(root_ids), 'tree')} {was} written to during the export: {names}. Nothing was "
        "moved, and no file was left: every tree goes on here. Stop what drives them and export "
        "again",
        session_ids=root_ids,
    )


def _ids(sessions: Iterable[object]) -> list[str]:
    if isinstance(sessions, str | bytes) or not isinstance(sessions, Iterable):
        raise InvalidArgument("sessions must be a list of sessions or of their ids")
    ids = [getattr(session, "id", session) for session in sessions]
    if not ids:
        raise InvalidArgument("sessions is empty; leave it out to export all")
    for id in ids:
        if not isinstance(id, str):
            raise InvalidArgument(f"a session is named by its id, not by {shown(id)}")
    return list(map(str, ids))


def _existing(path: object) -> Path:
    found = require_path(path)
    if os.path.isdir(found):
        raise InvalidArgument(f"{found} is a directory; name a file in it")
    if not os.path.exists(found):
        raise InvalidArgument(f"there is no file {found}")
    return found


def _export(ops: PortableOps[Any], place: object, ids: list[str] | None, *, move: bool) -> Exported:
    """Write beside the wanted name first: it never names half an export, or one of a failed move.

    A file that could be imported while its trees go on here would let everything happen twice.
    """
    codec, driver = ops.runtime.codec, ops.runtime.driver.twin()
    with new_file(place) as partial:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w+b") as file:
            writer = ExportWriter(file, codec.widened(), os.urandom(16).hex())
            call = Call(Exporter.write, Exporter(codec), (writer, ids))
            written: Written = driver.run(call)
            writer.end()
            size = file.tell()
        if move:
            driver.run(Call(PortableOps._leave, ops, (written.positions,)))
    counts: dict[str, Any] = dict(written.counts)
    moved = tuple(written.positions) if move else ()
    return Exported(path=os.path.realpath(str(place)), bytes=size, **counts, moved=moved)


def _import(driver: Any, codec: Codec, mark: str, read: Any, *, store_keys: bool) -> Imported:
    source: Source = read()
    ids, gone = check(codec, source, takes_store_keys=store_keys)
    twin = driver.twin()
    importer = Importer(codec, mark)
    existing = twin.run(Call(Importer.existing, importer, (ids,)))
    if existing is not None:
        raise already_there(existing)
    others = None if store_keys else twin.run(Call(Importer.existing, importer, (sorted(gone),)))
    if others is not None:
        raise spent_by_another(source.label, others)
    try:
        counts = twin.run(Call(Importer.write, importer, (source,)))
    except Refused as error:
        raise CorruptRecord(f"{source.label} cannot be imported: {error}") from error
    return Imported(**counts, notes=source.notes())
