"""The context of a world: the values that its actions pass on to later ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import Any

from ..arguments import shown
from ..errors import InvalidValue


class Context(MutableMapping[str, Any]):
    """Values by name that are rolled back with the world; `get` returns None for a missing name."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(values or {})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Context({self._values!r})"

    def set(self, name: str, value: Any) -> None:
        """Set a value; the same as `context[name] = value`."""
        self._values[name] = value

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()

    def to_dict(self) -> dict[str, Any]:
        """Return the values as a new dict; the values themselves are not copied."""
        return dict(self._values)

    def copied(self) -> dict[str, Any]:
        """Return a deep copy of the values; raise InvalidValue naming one that cannot be copied."""
        return copied(self._values)

    def restore(self, values: dict[str, Any]) -> None:
        """Replace all values with these."""
        self._values = values


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of named values; an object that two names share stays shared."""
    if not values:
        return {}
    memo: dict[int, Any] = {}
    copy: dict[str, Any] = {}
    for name, value in values.items():
        try:
            copy[name] = deepcopy(value, memo)
        except Exception as error:
            raise InvalidValue(
                f"context[{shown(name)}] cannot be copied: {error}. Keep connections and other "
                "live objects in the world's clients, which a rollback does not touch.",
                path=f"context.{name}",
            ) from error
    return copy
