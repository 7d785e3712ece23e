"""Exports and imports as a store offers them, in both colours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..arguments import require_path, shown
from ..errors import CorruptRecord, InvalidArgument, Refused, SessionBusy
from ..feed.portable import read_positions
from ..formatting import plural
from ..kernel.files import new_file
from ..kernel.flow import Flow, flow, invoke
from ..kernel.operation import C, Call, Handle, Lock, Op, Runtime, operation
from ..records import Exported, Imported
from ..session import Session
from ..sessions.portable import find_number
from ..trees import Tree
from .file import ExportFile, ExportWriter, Format, Source, read_header
from .plan import Plan
from .transfer import Exporter, Importer, check

# So many of the trees that cannot be moved are named in the message.
NAMED_MAX = 10


class PortableOps(Handle[C]):
    """Moves sessions between stores."""

    @flow
    def export(
        self, path: str | Path, sessions: Iterable[object] | None = None, *, move: bool = False
    ) -> Flow[Exported]:
        """Write sessions to a new file; without names, all that exist now.

        A session brings its whole tree, the trees it was forked from, and their effects, work items
        and spend. Named sessions are read from one snapshot; without names, each tree is, together
        with those that share history with it by forks, so that no snapshot grows old. With a cipher
        the file is encrypted. Nothing is left behind if it fails.

        `move` cancels the trees here, with their items, in one transaction; then the file gets its
        name. SessionBusy names those that were written to meanwhile: all continue here.
        """
        self.runtime.driver.require_own("export")
        ids = None if sessions is None else _ids(sessions)
        exported: Exported = yield from invoke(_export, self, path, ids, move=move)
        return exported

    @operation
    def _leave(self, positions: dict[str, int]) -> Op[None]:
        """Cancel trees that were exported at a position, unless one was written to since."""
        for root_id in sorted(positions):
            yield Lock(root_id)
        now = yield from read_positions(positions)
        changed = [id for id, position in sorted(positions.items()) if now.get(id) != position]
        if changed:
            raise _written_to(changed)
        for root_id in sorted(positions):
            number = yield from find_number(root_id)
            if number is not None:
                session: Session[C] = Session(self.runtime, root_id, number, root_id)
                yield from Tree.of(session).cancel_whole()

    @flow
    def import_sessions(
        self, path: str | Path, *, allow_plaintext: bool = False, store_keys: bool = False
    ) -> Flow[Imported]:
        """Read an export into this store, all of it or nothing; ids and versions stay the same.

        Everything is checked before anything is written. A session that exists is refused. An
        export without encryption is refused by a store with a cipher, unless it is allowed.
        Unfinished work waits for review. What applies beyond the file's own sessions (`once` and
        global keys, keys of unfinished items, effects of sessions that are not in it) is refused,
        unless `store_keys` says that the file can be trusted with it.
        """
        self.runtime.driver.require_own("import")
        place = _existing(path)

        def read() -> Source:
            runtime = self.runtime
            format = Format(runtime.nouns)
            return ExportFile(place, runtime.codec, format, allow_plaintext=allow_plaintext)

        imported: Imported = yield from invoke(_import, self.runtime, read, is_trusted=store_keys)
        return imported

    @flow
    def import_legacy(self, path: str | Path) -> Flow[Imported]:
        """Import the sessions of an older SQLite format, all or none; that file is only read."""
        from .legacy import LegacyDatabase

        self.runtime.driver.require_own("import")
        place = _existing(path)

        def read() -> Source:
            return LegacyDatabase(place, self.runtime)

        imported: Imported = yield from invoke(_import, self.runtime, read, is_trusted=True)
        return imported


def require_importable(path: object, *, is_legacy: bool = False) -> None:
    """Raise what the beginning of a file says against an import; no store is needed for it."""
    place = _existing(path)
    if is_legacy:
        from .legacy import recognise

        recognise(place)
    else:
        read_header(place)


def _written_to(root_ids: list[str]) -> SessionBusy:
    names = ", ".join(map(repr, root_ids[:NAMED_MAX]))
    if len(root_ids) > NAMED_MAX:
        names += f" and {len(root_ids) - NAMED_MAX} more"
    was = "was" if len(root_ids) == 1 else "were"
    return SessionBusy(
        f"{plural(len(root_ids), 'tree')} {was} written to during the export: {names}. Nothing was "
        "moved, and no file was left: every tree continues here. Stop what drives them and export "
        "again",
        session_ids=root_ids,
    )


def _ids(sessions: Iterable[object]) -> list[str]:
    if isinstance(sessions, str | bytes) or not isinstance(sessions, Iterable):
        raise InvalidArgument("sessions must be a list of sessions or of their ids")
    ids = [getattr(session, "id", session) for session in sessions]
    if not ids:
        raise InvalidArgument("sessions is empty; omit it to export all")
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
    runtime, driver = ops.runtime, ops.runtime.driver.twin()
    left: dict[str, int] = {}
    if ids is None:
        left = driver.run(Call(Exporter.left_behind, Exporter(runtime)))
    with new_file(place) as partial:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w+b") as file:
            format, export_id = Format(runtime.nouns), os.urandom(16).hex()
            writer = ExportWriter(file, runtime.codec.widened(), format, export_id)
            positions = _write_groups(runtime, writer, ids, keep_positions=move)
            writer.end()
            size = file.tell()
        if move:
            driver.run(Call(PortableOps._leave, ops, (positions,)))
    path, moved = os.path.realpath(str(place)), tuple(positions) if move else ()
    more: dict[str, Any] = {"path": path, "bytes": size, "moved": moved, "left_behind": left}
    return Exported.counted(writer.counts, **more)


def _write_groups(
    runtime: Runtime, writer: ExportWriter, ids: list[str] | None, *, keep_positions: bool
) -> dict[str, int]:
    """Write the groups of trees, each from a snapshot of its own."""
    driver, exporter, positions = runtime.driver.twin(), Exporter(runtime), dict[str, int]()
    with contextlib.closing(Plan(runtime)) as plan:
        driver.run(Call(Plan.read, plan, (ids,)))
        writer.begin(plan.store_id)
        for group in plan.groups():
            writer.begin_group()
            found = driver.run(Call(Exporter.write, exporter, (writer, group)))
            if keep_positions:
                positions |= found
    return positions


def _import(runtime: Runtime, read: Callable[[], Source], *, is_trusted: bool) -> Imported:
    source, importer, driver = read(), Importer(runtime), runtime.driver.twin()
    for seen in check(runtime.nouns, runtime.codec, source, is_trusted=is_trusted):
        driver.run(Call(Importer.require_absent, importer, (seen, source.label, is_trusted)))
    try:
        counts = driver.run(Call(Importer.write, importer, (source,)))
    except Refused as error:
        raise CorruptRecord(f"{source.label} cannot be imported: {error}") from error
    return Imported.counted(counts, notes=source.notes())
