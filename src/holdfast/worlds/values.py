"""Values of a world as bytes: to compare states by, and to hold in snapshots.

A value is None, bool, int, float, str, bytes, tuple, list, set, frozenset, dict, datetime, date,
Decimal or UUID, of exactly these types. Each has its own tag, so that 1, 1.0, True and "1" differ.
In the canonical form the keys of a dict and the members of a set are in order.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from math import isnan
from types import NoneType
from typing import Any, Final
from uuid import UUID

import msgspec

from ..arguments import ValuePath, shown_path
from ..errors import CorruptRecord, InvalidValue

_INTEGER, _TEXT, _NAN, _TUPLE, _SET, _FROZENSET, _DICT, _DATETIME, _DATE, _DECIMAL, _UUID = range(
    1, 12
)
_SCALARS: Final = frozenset((NoneType, bool, bytes))
_FLAT: Final = _SCALARS | {int, str}
_TEXTS: Final = frozenset((str,))
_LEVELS_MAX: Final = 64
_SPELLED: Final[dict[type, tuple[int, Callable[[Any], str]]]] = {
    datetime: (_DATETIME, datetime.isoformat),
    date: (_DATE, date.isoformat),
    Decimal: (_DECIMAL, str),
    UUID: (_UUID, str),
}
_Ext: Final = msgspec.msgpack.Ext


class _Writer:
    """Encodes values; a canonical writer sorts keys and members."""

    def __init__(self, *, is_canonical: bool) -> None:
        self._is_canonical = is_canonical
        order: Any = "deterministic" if is_canonical else None
        self._encode = msgspec.msgpack.Encoder(order=order).encode

    def encode(self, value: object, name: str) -> bytes:
        """Return a value as bytes; raise InvalidValue with the path of what is not plain data."""
        if type(value) is dict and _is_flat(value):
            # Most data is; what has no plain form after all, a very large number or a lone
            # surrogate, is found by the encoder.
            try:
                return self._encode(value)
            except (OverflowError, UnicodeEncodeError):
                pass
        try:
            return self._encode(self._tagged(value, name, 0))
        except RecursionError:
            problem = f"{name} is nested too deeply, or contains itself."
            raise InvalidValue(problem, path=name) from None

    def _tagged(self, value: Any, path: ValuePath, level: int) -> object:
        kind = type(value)
        if kind is dict:
            return self._mapping(value, path, level)
        if _is_plain(value):
            return value
        if kind is int:
            return _Ext(_INTEGER, hex(value).encode())
        if kind is str:
            return value if _is_unicode(value) else _Ext(_TEXT, _wide(value))
        if kind is float:
            return _Ext(_NAN, b"") if isnan(value) else value
        if kind is list:
            return self._items(value, path, level)
        if kind is tuple:
            return _Ext(_TUPLE, self._encode(self._items(value, path, _deeper(level))))
        if kind is set or kind is frozenset:
            inner = _deeper(level)
            members = sorted(self._encode(self._tagged(item, path, inner)) for item in value)
            return _Ext(_SET if kind is set else _FROZENSET, self._encode(members))
        if kind in _SPELLED:
            tag, spell = _SPELLED[kind]
            return _Ext(tag, spell(value).encode())
        raise InvalidValue(
            f"{shown_path(path)} is a {kind.__name__}, which cannot be part of a state; "
            "use plain data: text, numbers, bytes, lists, dicts, sets, dates.",
            path=shown_path(path),
        )

    def _items(
        self, items: list[object] | tuple[object, ...], path: ValuePath, level: int
    ) -> list[object]:
        return [
            item if _is_plain(item) else self._tagged(item, (path, index), level)
            for index, item in enumerate(items)
        ]

    def _mapping(self, mapping: dict[Any, object], path: ValuePath, level: int) -> object:
        tagged = {}
        for key, item in mapping.items():
            if type(key) is not str or not (key.isascii() or _is_unicode(key)):
                return self._pairs(mapping, path, _deeper(level))
            is_plain = type(item) in _SCALARS or _is_plain(item)
            tagged[key] = item if is_plain else self._tagged(item, (path, key), level)
        return tagged

    def _pairs(self, mapping: dict[Any, object], path: ValuePath, level: int) -> object:
        pairs = [
            (
                self._encode(self._tagged(key, path, level)),
                self._encode(self._tagged(item, (path, f"{key}"), level)),
            )
            for key, item in mapping.items()
        ]
        return _Ext(_DICT, self._encode(sorted(pairs) if self._is_canonical else pairs))


def _deeper(level: int) -> int:
    """Return the next level of values whose bytes are inside of others, which `decode` can read."""
    if level >= _LEVELS_MAX:
        raise RecursionError
    return level + 1


def _is_flat(mapping: dict[Any, Any]) -> bool:
    return _FLAT.issuperset(map(type, mapping.values())) and _TEXTS.issuperset(map(type, mapping))


def _is_plain(value: Any) -> bool:
    """Return whether a value is written as it is; most are, and they need no path."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    return value.isascii() if kind is str else kind in _SCALARS


def _is_unicode(text: str) -> bool:
    # File names that are not UTF-8 arrive with lone surrogates, which have no encoding.
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wide(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _extension(tag: int, data: memoryview) -> object:
    read = _READ.get(tag)
    if read is None:
        raise CorruptRecord(f"A snapshot holds a value of the unknown type {tag}.")
    return read(bytes(data))


_READ: Final[dict[int, Callable[[bytes], object]]] = {
    _INTEGER: lambda body: int(body, 16),
    _TEXT: lambda body: body.decode("utf-8", "surrogatepass"),
    _NAN: lambda body: float("nan"),
    _TUPLE: lambda body: tuple(decode(body)),
    _SET: lambda body: {decode(item) for item in decode(body)},
    _FROZENSET: lambda body: frozenset(decode(item) for item in decode(body)),
    _DICT: lambda body: {decode(key): decode(item) for key, item in decode(body)},
    _DATETIME: lambda body: datetime.fromisoformat(body.decode()),
    _DATE: lambda body: date.fromisoformat(body.decode()),
    _DECIMAL: lambda body: Decimal(body.decode()),
    _UUID: lambda body: UUID(body.decode()),
}
_canonical: Final = _Writer(is_canonical=True)
_ordered: Final = _Writer(is_canonical=False)
_decoder: Final = msgspec.msgpack.Decoder(ext_hook=_extension)


def canonical(value: object, name: str) -> bytes:
    """Return bytes that are the same for equal values, whatever the order of their keys."""
    return _canonical.encode(value, name)


def encode(value: object, name: str) -> bytes:
    """Return bytes from which `decode` restores the same value, with its keys in the same order."""
    return _ordered.encode(value, name)


def decode(body: bytes) -> Any:
    """Return the value that was encoded."""
    return _decoder.decode(body)
