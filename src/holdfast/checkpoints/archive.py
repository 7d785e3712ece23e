"""Archived checkpoints, each a line of JSON in a file that keeps what was removed from a store.

A checkpoint's channels are whole if `after` is null; otherwise they are what changed since that
version of the session, which stands on an earlier line. A list that grew says how many items it
`kept` and which came behind them. In a store with a cipher a line holds its checkpoint sealed.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..clock import iso
from ..codec import Cipher, Codec, Limits, from_json, to_json
from ..errors import CorruptRecord, InvalidArgument
from ..kernel.files import require_header
from ..records import Checkpoint
from .read import Delta

# A line may hold many values at once, each of which was within the store's own limits.
LINE_LIMITS = Limits(value_bytes=2**31 - 1, record_bytes=2**31 - 1, depth=256)


def archive_line(
    codec: Codec, checkpoint: Checkpoint, after: int | None, delta: Delta, removed: list[str]
) -> str:
    """Return one checkpoint as a line: what changed since version `after`, or all of it."""
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
