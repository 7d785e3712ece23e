"""Stored records: dataclasses that preserve unknown fields and the order of fields.

A field's annotation decides which values are valid.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..arguments import shown
from ..errors import InvalidValue

S = TypeVar("S", bound="Shape")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The base of every record. Its own two fields are not part of the stored data."""

    extra: dict[str, Any] = field(default_factory=dict, repr=False)
    keys: tuple[str, ...] | None = field(default=None, repr=False, compare=False)

    ALWAYS: ClassVar[frozenset[str]] = frozenset()
    """Fields that are written even if they have their default."""
    ITEMS: ClassVar[Mapping[str, Callable[[Any, str], Any]]] = {}
    """Readers for fields whose items are not all of one shape."""

    def to_plain(self) -> dict[str, Any]:
        """Return the record as plain data, with fields in the order they were read."""
        written: dict[str, Any] = {}
        defaults = _defaults(type(self))
        for name in self.keys or ():
            if name in defaults:
                written[name] = self._plain(name)
            elif name in self.extra:
                written[name] = self.extra[name]
        for name, default in defaults.items():
            is_kept = name in self.ALWAYS and self.keys is None
            if name not in written and (is_kept or getattr(self, name) != default):
                written[name] = self._plain(name)
        return {**written, **{name: self.extra[name] for name in self.extra if name not in written}}

    def _plain(self, name: str) -> Any:
        value = getattr(self, name)
        origin: Any = get_origin(_hints(type(self))[name])
        return [each.to_plain() for each in value] if origin is tuple else value


def read(shape: type[S], data: Any, where: str) -> S:
    """Return a record from plain data, or raise InvalidValue naming the invalid field."""
    if type(data) is not dict:
        raise InvalidValue(f"{where} must be a dict, not {type(data).__name__}", path=where)
    values: dict[str, Any] = {}
    extra = dict(data)
    for name, default in _defaults(shape).items():
        if name in extra:
            values[name] = _read(shape, name, extra.pop(name), f"{where}.{name}")
        elif default is MISSING:
            raise InvalidValue(f"{where} has no {shown(name)}", path=f"{where}.{name}")
    return shape(**values, extra=extra, keys=tuple(data))


def _read(shape: type[Shape], name: str, value: Any, where: str) -> Any:
    hint = _hints(shape)[name]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            choices = ", ".join(get_args(hint))
            raise InvalidValue(f"{where} is {shown(value)}, not one of {choices}", path=where)
        return value
    _require_type(hint, value, where)
    if get_origin(hint) is not tuple:
        return value
    reader = shape.ITEMS.get(name) or functools.partial(read, get_args(hint)[0])
    return tuple(reader(each, f"{where}[{number}]") for number, each in enumerate(value))


def _require_type(hint: Any, value: object, where: str) -> None:
    wanted = _types(hint)
    is_flag = wanted == (int,) and isinstance(value, bool)
    if wanted and (is_flag or not isinstance(value, wanted)):
        words = " or ".join("None" if each is NoneType else each.__name__ for each in wanted)
        raise InvalidValue(f"{where} must be {words}, not {type(value).__name__}", path=where)


def _types(hint: Any) -> tuple[type, ...]:
    """Return the types that an annotation allows; () for any."""
    if hint is Any:
        return ()
    if isinstance(hint, UnionType):
        return tuple(each for part in get_args(hint) for each in _types(part))
    origin = get_origin(hint) or hint
    return (list, tuple) if origin is tuple else (origin,)


def _read_defaults(shape: Any) -> dict[str, Any]:
    fields = [each for each in dataclasses.fields(shape) if each.name not in {"extra", "keys"}]
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields
    }


_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)
_defaults: Callable[[Any], dict[str, Any]] = functools.cache(_read_defaults)
