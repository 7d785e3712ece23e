"""Archives of what was removed from a store: one line of JSON per checkpoint, event or change.

A checkpoint's channels are complete if `after` is null; otherwise they are the changes since that
version of the session, which is on an earlier line. A list that grew has the number of items it
`kept` and the items after them. In a store with a cipher, records are encrypted.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from ..arguments import require_one_of
from ..clock import iso
from ..codec import Cipher, Codec, Limits, from_json
from ..errors import CorruptRecord, InvalidArgument
from ..kernel.files import archived, require_header
from ..records import Checkpoint
from .read import Delta

Archived = Literal["checkpoint", "event", "state_change"]
# A line may contain many values, each of which was within the store's own limits.
LINE_LIMITS = Limits(value_bytes=2**31 - 1, record_bytes=2**31 - 1, depth=256)


def archive_line(
    codec: Codec, checkpoint: Checkpoint, after: int | None, delta: Delta, removed: list[str]
) -> str:
    """Return one checkpoint as a line: the changes since version `after`, or all of it."""
    channels: dict[str, Any] = {}
    for name, value in delta.after.items():
        kept = delta.shared.get(name)
        channels[name] = {"value": value} if kept is None else {"kept": kept, "items": value}
    record = {
        **{name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__},
        "created_at": iso(checkpoint.created_at),
        "after": after,
        "channels": channels,
        "removed_channels": removed,
    }
    return archived(codec, "checkpoint", record)


def read_archive(
    path: str | Path, *, record: Archived = "checkpoint", cipher: Cipher | None = None
) -> Iterator[dict[str, Any]]:
    """Yield archived records of a kind, in the order of their removal: checkpoints with all their
    channels, events of feeds, or changes of shared state.
    """
    require_one_of("record", record, get_args(Archived))
    records = _records(path, cipher)
    wanted = (found for kind, found, _ in records if kind == record)
    return _checkpoints(records) if record == "checkpoint" else wanted


def _checkpoints(records: Iterator[tuple[str, dict[str, Any], str]]) -> Iterator[dict[str, Any]]:
    known: dict[tuple[str, int], dict[str, Any]] = {}
    for kind, record, where in records:
        if kind != "checkpoint":
            continue
        session_id, after = record["session_id"], record.pop("after")
        before = known.pop((session_id, after), None) if after is not None else {}
        if before is None:
            raise CorruptRecord(f"{where} continues version {after}, which is not before it")
        record["channels"] = _channels(before, record["channels"], record)
        known[session_id, record["version"]] = record["channels"]
        yield record


def _records(path: str | Path, cipher: Cipher | None) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the kind, the fields and the place of each line."""
    codec = Codec(LINE_LIMITS, cipher=cipher)
    place = Path(path)
    with place.open("rb") as file:
        require_header(file.readline().rstrip(b"\n"), place)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            where = f"{place} line {number}"
            record = _record(codec, line, where)
            kind = record.pop("record", None)
            if kind not in get_args(Archived):
                raise CorruptRecord(f"{where} is damaged: it is not a record of a known kind")
            yield kind, record, where


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
