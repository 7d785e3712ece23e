"""Manifests: which channels a checkpoint has, and where the value of each lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..codec import Codec
from ..errors import CorruptRecord
from ..plain import too_large
from .lines import Ref, list_header

INLINE_BYTES_MAX = 128

_INLINE, _VALUE, _OPEN, _CLOSED = range(4)


@dataclass(frozen=True, slots=True)
class Inline:
    """A small value, kept as its body in the manifest itself."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that is the only item of a line."""

    line_id: int


Entry: TypeAlias = Inline | Stored | Ref
Manifest: TypeAlias = Mapping[str, Entry]


def checkpoint_context(number: int, version: int, part: str) -> tuple[str, ...]:
    """Return the place that a part of a checkpoint is bound to."""
    return "hf_checkpoints", str(number), str(version), part


def pack(codec: Codec, manifest: Manifest, context: tuple[str, ...]) -> bytes:
    """Return a manifest as a record."""
    return codec.seal(write(codec, manifest), context=context)


def write(codec: Codec, manifest: Manifest) -> bytes:
    """Return a manifest as a body. A small value is in it as it is: it was checked already."""
    body = bytearray(_map_header(len(manifest)))
    for channel, entry in manifest.items():
        body += codec.encode(channel) + _body(codec, entry)
    limit = codec.limits.value_bytes
    if len(body) > limit:
        raise too_large("channels", len(body), limit, "value_bytes")
    return bytes(body)


def unpack(codec: Codec, record: bytes, context: tuple[str, ...]) -> dict[str, Entry]:
    """Return the manifest of a checkpoint."""
    return read(codec, codec.unseal(record, context=context))


def read(codec: Codec, body: bytes) -> dict[str, Entry]:
    """Return the manifest that a body holds."""
    return {channel: _entry(codec, fields) for channel, fields in codec.decode(body).items()}


def closed(manifest: Manifest) -> dict[str, Entry]:
    """Return a manifest for another head: its lists cannot be appended to in place."""
    return {
        channel: entry.closed() if isinstance(entry, Ref) else entry
        for channel, entry in manifest.items()
    }


def line_ids(manifest: Manifest) -> set[int]:
    """Return the lines that a manifest names itself, without the lines their pieces lie in."""
    return {entry.line_id for entry in manifest.values() if not isinstance(entry, Inline)}


def _map_header(count: int) -> bytes:
    """Return the MessagePack header of a dict, before its keys and values."""
    if count < 16:
        return bytes([0x80 | count])
    return b"\xde" + count.to_bytes(2) if count < 2**16 else b"\xdf" + count.to_bytes(4)


def _body(codec: Codec, entry: Entry) -> bytes:
    match entry:
        case Inline(body):
            return list_header(2) + codec.encode(_INLINE) + body
        case Stored(line_id):
            return codec.encode([_VALUE, line_id])
        case Ref():
            mark = _OPEN if entry.is_open else _CLOSED
            fields = [mark, entry.line_id, entry.length]
            return codec.encode([*fields, entry.base, entry.skip] if entry.base else fields)


def _entry(codec: Codec, fields: list[Any]) -> Entry:
    match fields:
        case [0, value]:
            # It was within the limits when it was saved; those of today may be narrower.
            body = codec.encode_unchecked(value)
            return Inline(codec.encode(value) if body is None else body)
        case [_, *numbers] if any(type(number) is not int for number in numbers):
            pass
        case [1, line_id]:
            return Stored(line_id)
        case [(2 | 3) as mark, line_id, length]:
            return Ref(line_id, length, is_open=mark == _OPEN)
        case [(2 | 3) as mark, line_id, length, base, skip]:
            return Ref(line_id, length, base, skip, is_open=mark == _OPEN)
    raise CorruptRecord("a manifest names a channel in a way that this Holdfast does not know")
