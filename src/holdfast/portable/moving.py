"""Exports and imports as a store offers them, in both colours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codec import Codec
from ..effects import Ledger
from ..errors import InvalidArgument, StoreUnavailable
from ..kernel.backup import sync_directory
from ..kernel.flow import Flow, flow, invoke
from ..kernel.operation import Call
from ..kernel.outside import require_own
from .checking import check
from .exporting import Exporter
from .frames import ExportFile, ExportWriter, Source
from .importing import Importer, already_there
from .legacy import LegacyDatabase


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    path: str
    bytes: int
    sessions: int
    checkpoints: int
    effects: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import wrote; `notes` say what could not be taken over as it was."""

    sessions: int
    checkpoints: int
    effects: int = 0
    notes: tuple[str, ...]


class PortableOps:
    """Moves sessions between stores."""

    codec: Codec
    driver: Any
    ledger: Ledger

    @flow
    def export(self, path: str | Path, sessions: Iterable[object] | None = None) -> Flow[Exported]:
        """Write sessions to a new file, one consistent moment of them; without names, all.

        A session brings its whole tree, the trees it was forked from, and their effects. With a
        cipher the file is encrypted. Nothing is left behind if it fails.
        """
        require_own(self.driver, "export")
        ids = None if sessions is None else _ids(sessions)
        exported: Exported = yield from invoke(_export, self.driver, self.codec, path, ids)
        return exported

    @flow
    def import_sessions(self, path: str | Path, *, allow_plaintext: bool = False) -> Flow[Imported]:
        """Read an export into this store, all of it or nothing; ids and versions stay the same.

        Everything is checked before anything is written. A session that exists is refused. An
        export without encryption is refused by a store with a cipher, unless it is allowed.
        """
        require_own(self.driver, "import")
        place = _existing(path)

        def read() -> Source:
            codec = self.codec.widened()
            return ExportFile(place, codec, allow_plaintext=allow_plaintext)

        mark = self.ledger.salts.mark
        imported: Imported = yield from invoke(_import, self.driver, self.codec, mark, read)
        return imported

    @flow
    def import_legacy(self, path: str | Path) -> Flow[Imported]:
        """Adopt the sessions of an older SQLite format, all of them or none; it is only read."""
        require_own(self.driver, "import")
        place = _existing(path)

        def read() -> Source:
            return LegacyDatabase(place, self.codec)

        mark = self.ledger.salts.mark
        imported: Imported = yield from invoke(_import, self.driver, self.codec, mark, read)
        return imported


def _ids(sessions: Iterable[object]) -> list[str]:
    if isinstance(sessions, str | bytes) or not isinstance(sessions, Iterable):
        raise InvalidArgument("sessions must be a list of sessions or of their ids")
    ids = [getattr(session, "id", session) for session in sessions]
    if not ids:
        raise InvalidArgument("sessions is empty; leave it out to export all")
    for id in ids:
        if not isinstance(id, str):
            raise InvalidArgument(f"a session is named by its id, not by {id!r}")
    return list(map(str, ids))


def _existing(path: object) -> Path:
    if not isinstance(path, str | Path) or str(path) in {"", "."} or "\0" in str(path):
        raise InvalidArgument(f"path must name a file, not {path!r}")
    found = Path(os.path.realpath(path))
    if os.path.isdir(found):
        raise InvalidArgument(f"{found} is a directory; name a file in it")
    if not os.path.exists(found):
        raise InvalidArgument(f"there is no file {found}")
    return found


def _export(driver: Any, codec: Codec, place: object, ids: list[str] | None) -> Exported:
    """Write beside the wanted name first, so that it never names half an export."""
    if not isinstance(place, str | Path) or str(place) in {"", "."} or "\0" in str(place):
        raise InvalidArgument(f"path must name a new file, not {place!r}")
    path = Path(os.path.realpath(place))
    if os.path.lexists(path):
        raise InvalidArgument(f"{path} exists already; name a new file")
    if not os.path.isdir(path.parent):
        raise InvalidArgument(f"there is no directory {path.parent}; create it first")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w+b") as file:
            writer = ExportWriter(file, codec.widened(), os.urandom(16).hex())
            call = Call(Exporter.write, Exporter(codec), (writer, ids))
            counts: dict[str, int] = driver.twin().run(call)
            writer.end()
            size = file.tell()
        os.replace(partial, path)
        sync_directory(path.parent)
        return Exported(path=str(path), bytes=size, **counts)
    except OSError as error:
        raise StoreUnavailable(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _import(driver: Any, codec: Codec, mark: str, read: Any) -> Imported:
    source: Source = read()
    ids = check(codec, source)
    twin = driver.twin()
    importer = Importer(codec, mark)
    existing = twin.run(Call(Importer.existing, importer, (ids,)))
    if existing is not None:
        raise already_there(existing)
    counts = twin.run(Call(Importer.write, importer, (source,)))
    return Imported(**counts, notes=source.notes())
