"""Records of the store as interfaces return them: the same fields, with times in ISO 8601."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec

from ..clock import iso


class Shape:
    """How a record is returned: a type for the schema, and the conversion of a record to it."""

    def __init__(
        self,
        name: str,
        record: type,
        *,
        leave_out: Iterable[str] = (),
        names: Iterable[str] | None = None,
        more: dict[str, tuple[Any, Callable[[Any], Any]]] | None = None,
    ) -> None:
        hints = get_type_hints(record)
        listed = [each.name for each in fields(record)] if names is None else list(names)
        told = [each for each in listed if each not in set(leave_out)]
        self._more = more or {}
        self._names = told
        given = [(each, _told_type(each, hints[each])) for each in told]
        given += [(each, kind) for each, (kind, _) in self._more.items()]
        self.type: Any = msgspec.defstruct(
            name, given, namespace={"__doc__": " ".join((record.__doc__ or "").split())}
        )
        self.many: Any = GenericAlias(list, self.type)

    def __call__(self, record: Any) -> Any:
        """Return a record in this shape."""
        values = [_told(name, getattr(record, name)) for name in self._names]
        return self.type(*values, *(make(record) for _, make in self._more.values()))

    def optional(self, name: str) -> tuple[Any, Callable[[Any], Any]]:
        """Return the type and conversion of a field of another record that may hold this one."""

        def told(outer: Any) -> Any:
            inner = getattr(outer, name)
            return None if inner is None else self(inner)

        return self.type | None, told


def struct(name: str, about: str, **given: Any) -> Any:
    """Return the type of a response that holds records."""
    return msgspec.defstruct(name, list(given.items()), namespace={"__doc__": about})


def _told_type(name: str, hint: Any) -> Any:
    if name.endswith("_at"):
        return str if hint is int else str | None
    return hint


def _told(name: str, value: Any) -> Any:
    return iso(value) if name.endswith("_at") and value is not None else value
