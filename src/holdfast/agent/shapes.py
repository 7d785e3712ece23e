"""Typed records over plain data that give back exactly the bytes they were read from.

A record keeps what it does not know in `extra`, and the order of the keys it was read with. Written
again unchanged, it is the same data: unknown fields stay, a missing field stays missing, and None,
{} and missing are three different things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar, TypeVar

from ..arguments import shown
from ..errors import InvalidValue

S = TypeVar("S", bound="Shape")
Reader = Callable[[Any, str], Any]
Writer = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The base of every record; its own fields are never written under these names."""

    extra: dict[str, Any] = field(default_factory=dict, repr=False)
    keys: tuple[str, ...] | None = field(default=None, repr=False, compare=False)

    ALWAYS: ClassVar[frozenset[str]] = frozenset()
    TYPES: ClassVar[Mapping[str, type | tuple[type, ...]]] = {}
    READERS: ClassVar[Mapping[str, Reader]] = {}
    WRITERS: ClassVar[Mapping[str, Writer]] = {}

    def to_plain(self) -> dict[str, Any]:
        """Return the record as plain data, in the order in which it was read."""
        written: dict[str, Any] = {}
        known = {each.name: each for each in _fields(type(self))}
        for name in self.keys or ():
            if name in known:
                written[name] = self._write(name)
            elif name in self.extra:
                written[name] = self.extra[name]
        for name, each in known.items():
            is_kept = name in self.ALWAYS and self.keys is None
            if name not in written and (is_kept or getattr(self, name) != _default(each)):
                written[name] = self._write(name)
        return {**written, **{name: self.extra[name] for name in self.extra if name not in written}}

    def _write(self, name: str) -> Any:
        value = getattr(self, name)
        writer = self.WRITERS.get(name)
        return value if writer is None else writer(value)


def read(shape: type[S], data: Any, where: str) -> S:
    """Return plain data as a record, or raise InvalidValue naming the field that does not fit."""
    if type(data) is not dict:
        raise InvalidValue(f"{where} must be a dict, not {type(data).__name__}", path=where)
    values: dict[str, Any] = {}
    extra = dict(data)
    for each in _fields(shape):
        if each.name in extra:
            values[each.name] = _read(shape, each.name, extra.pop(each.name), where)
        elif _default(each) is MISSING:
            raise InvalidValue(f"{where} has no {shown(each.name)}", path=f"{where}.{each.name}")
    return shape(**values, extra=extra, keys=tuple(data))


def _read(shape: type[Shape], name: str, value: Any, where: str) -> Any:
    wanted = shape.TYPES.get(name)
    is_number = type(value) is bool and wanted is int
    if wanted is not None and (not isinstance(value, wanted) or is_number):
        names = wanted if isinstance(wanted, tuple) else (wanted,)
        words = " or ".join("None" if each is type(None) else each.__name__ for each in names)
        raise InvalidValue(
            f"{where}.{name} must be {words}, not {type(value).__name__}", path=f"{where}.{name}"
        )
    reader = shape.READERS.get(name)
    return value if reader is None else reader(value, f"{where}.{name}")


def _fields(shape: type[Shape]) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(shape) if each.name not in {"extra", "keys"}]


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return each.default
