"""Manifests: which channels a checkpoint has, and where the value of each lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..codec import Codec, Raw
from ..errors import CorruptRecord
from .lines import Ref

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
    fields: dict[str, list[Any]] = {}
    for channel, entry in manifest.items():
        if isinstance(entry, Ref):
            fields[channel] = [_OPEN if entry.is_open else _CLOSED, entry.line_id, entry.length]
            if entry.base:
                fields[channel] += [entry.base, entry.skip]
        elif isinstance(entry, Stored):
            fields[channel] = [_VALUE, entry.line_id]
        else:
            fields[channel] = [_INLINE, Raw(entry.body)]
    return codec.compose(fields, name="channels")


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
