"""The archive: a file of JSON lines that keeps checkpoints which were removed from a store.

The first line names the format and the store. Every further line is one checkpoint. Its channels
are whole if `after` is null; otherwise they are what changed since that version of the session,
which stands on an earlier line. A list that grew says how many items it `kept` and which came
behind them. In a store with a cipher a line holds its checkpoint sealed.

A line is durable before its checkpoint is removed. So a prune that was killed may archive some
versions again, and may leave half a line at the end, whose checkpoint is still in the store.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..arguments import require_path
from ..checkpoints.deltas import Delta
from ..clock import iso
from ..codec import Cipher, Codec, Limits, from_json, to_json
from ..errors import (
    CorruptRecord,
    HoldfastError,
    InvalidArgument,
    SchemaMismatch,
    StoreBusy,
    StoreUnavailable,
)
from ..kernel.newfile import sync_directory
from ..records import Checkpoint

VERSION = 1
MARK = '{"holdfast_archive":'
READ_BYTES = 65_536
# A line may hold many values at once, each of which was within the store's own limits.
LINE_LIMITS = Limits(value_bytes=2**31 - 1, record_bytes=2**31 - 1, depth=256)


class Archive:
    """An archive that is open for appending; one process at a time."""

    def __init__(self, path: str | Path, store_id: str) -> None:
        self._path = _place_of(path)
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = self._begin(store_id)
        except BlockingIOError as error:
            self.close()
            raise StoreBusy(f"another process writes to the archive {self._path}") from error
        except OSError as error:
            self.close()
            raise self._unusable(error) from error
        except BaseException:
            self.close()
            raise

    def append(self, lines: Sequence[str]) -> None:
        """Add lines; they are durable when this returns, and gone if it raises."""
        try:
            self._end = self._write(self._end, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise self._unusable(error) from error

    def close(self) -> None:
        """Let another process write."""
        os.close(self._descriptor)

    def _begin(self, store_id: str) -> int:
        """Check what the file holds and return where to go on; half a line is cut off."""
        size = os.fstat(self._descriptor).st_size
        first = os.pread(self._descriptor, READ_BYTES, 0)
        if not MARK.encode().startswith(first[: len(MARK)]):
            raise InvalidArgument(f"{self._path} exists and is not an archive; name another file")
        if b"\n" in first:
            require_header(first.partition(b"\n")[0], self._path)
            end = self._last_line_end(size)
            os.ftruncate(self._descriptor, end)
            return end
        os.ftruncate(self._descriptor, 0)
        header = f'{MARK}{VERSION},"store_id":{to_json(store_id)}}}\n'
        end = self._write(0, header.encode())
        sync_directory(self._path.parent)
        return end

    def _last_line_end(self, size: int) -> int:
        end = size
        while end:
            start = max(0, end - READ_BYTES)
            found = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _write(self, start: int, content: bytes) -> int:
        written = 0
        while written < len(content):
            written += os.pwrite(self._descriptor, content[written:], start + written)
        os.fsync(self._descriptor)
        return start + written

    def _unusable(self, error: OSError) -> HoldfastError:
        return StoreUnavailable(f"cannot write the archive {self._path}: {error.strerror}")


def _place_of(path: object) -> Path:
    """Return where an archive may lie, or say why it cannot."""
    found = require_path(path)
    if os.path.isdir(found):
        raise InvalidArgument(f"{found} is a directory; name a file in it")
    if not os.path.isdir(found.parent):
        raise InvalidArgument(f"there is no directory {found.parent}; create it first")
    return found


def require_header(line: bytes, path: Path) -> None:
    """Refuse a file that is no archive, or one of a newer format."""
    try:
        header = from_json(line)
        version = header["holdfast_archive"]
    except (HoldfastError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not an archive") from error
    if version != VERSION:
        raise SchemaMismatch(
            f"{path} is an archive of format {version}, this Holdfast reads {VERSION}; upgrade it"
        )


def archive_line(
    codec: Codec, checkpoint: Checkpoint, after: int | None, delta: Delta, removed: list[str]
) -> str:
    """Return one checkpoint as a line: what changed since version `after`, or all of it."""
    channels: dict[str, Any] = {}
    for name, value in delta.after.items():
        kept = delta.shared.get(name)
        channels[name] = {"value": value} if kept is None else {"kept": kept, "items": value}
    record = {
        "session_id": checkpoint.session_id,
        "version": checkpoint.version,
        "epoch": checkpoint.epoch,
        "kind": checkpoint.kind,
        "data": checkpoint.data,
        "metadata": checkpoint.metadata,
        "item_id": checkpoint.item_id,
        "idempotency_key": checkpoint.idempotency_key,
        "state_sequence": checkpoint.state_sequence,
        "created_at": iso(checkpoint.created_at),
        "after": after,
        "channels": channels,
        "removed_channels": removed,
    }
    text = to_json(record)
    if not codec.has_cipher:
        return text
    sealed = codec.seal(text.encode(), context=("archive",))
    return to_json({"sealed": base64.b64encode(sealed).decode()})


def read_archive(path: str | Path, *, cipher: Cipher | None = None) -> Iterator[dict[str, Any]]:
    """Yield the archived checkpoints with all their channels, in the order of their removal."""
    codec = Codec(LINE_LIMITS, cipher=cipher)
    place = Path(path)
    known: dict[tuple[str, int], dict[str, Any]] = {}
    with place.open("rb") as file:
        require_header(file.readline().rstrip(b"\n"), place)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            record = _record(codec, line, f"{place} line {number}")
            session_id, after = record["session_id"], record.pop("after")
            before = known.pop((session_id, after), None) if after is not None else {}
            if before is None:
                raise CorruptRecord(
                    f"{place} line {number} goes on from version {after}, which is not before it"
                )
            record["channels"] = _channels(before, record["channels"], record)
            known[session_id, record["version"]] = record["channels"]
            yield record


def _channels(
    before: dict[str, Any], changes: dict[str, Any], record: dict[str, Any]
) -> dict[str, Any]:
    channels = dict(before)
    for name in record.pop("removed_channels"):
        del channels[name]
    for name, change in changes.items():
        if "kept" in change:
            channels[name] = [*before[name][: change["kept"]], *change["items"]]
        else:
            channels[name] = change["value"]
    return channels


def _record(codec: Codec, line: bytes, where: str) -> dict[str, Any]:
    try:
        record = from_json(line, LINE_LIMITS)
        if "sealed" in record:
            sealed = base64.b64decode(record["sealed"], validate=True)
            record = from_json(codec.unseal(sealed, context=("archive",)), LINE_LIMITS)
        return dict(record)
    except (InvalidArgument, ValueError, TypeError) as error:
        raise CorruptRecord(f"{where} is damaged: {error}") from error
