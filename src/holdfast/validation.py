"""The check that a value is plain data, and errors that name the path of what is not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from .errors import InvalidValue, LimitExceeded, TooDeep

FLOAT_MAX: Final = sys.float_info.max

_SURROGATE: Final = re.compile("[\ud800-\udfff]")

ValuePath: TypeAlias = "str | tuple[ValuePath, str | int]"


def measure(value: object, path: ValuePath, room: int, depth: int, level: int = 1) -> int:
    """Refuse what is not plain data; return the remaining room, in bytes, after its nodes."""
    is_dict = type(value) is dict
    if not is_dict and type(value) is not list:
        if not _is_scalar(value):
            raise _refusal(value, path)
        return room
    nodes: Any = value
    if level > depth:
        raise too_deep(show(path), depth)
    # A node takes at least a byte. Counting them bounds the walk of a few lists that contain each
    # other so often that they would expand to billions of nodes.
    room -= len(nodes)
    if room < 0:
        return room
    for key, item in nodes.items() if is_dict else enumerate(nodes):
        if is_dict and type(key) is not str:
            raise _refused_key(key, path)
        kind = type(item)
        if kind is str or kind is int or item is None or kind is bool:
            continue
        if kind is dict or kind is list:
            room = measure(item, (path, key), room, depth, level + 1)
            if room < 0:
                return room
        elif not _is_scalar(item):
            raise _refusal(item, (path, key))
    return room


def _is_scalar(value: object) -> bool:
    if type(value) is float:
        return -FLOAT_MAX <= value <= FLOAT_MAX
    return value is None or type(value) in (bool, int, str)


def _scalars(value: object, path: ValuePath) -> Iterator[tuple[object, ValuePath]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, (path, key)
            yield from _scalars(item, (path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _scalars(item, (path, index))
    else:
        yield value, path


def refuse_scalars(value: object, path: ValuePath, digits: int) -> None:
    """Refuse text that is not valid Unicode, and integers with too many digits."""
    bound = 10**digits
    for scalar, place in _scalars(value, path):
        if isinstance(scalar, str) and _SURROGATE.search(scalar):
            problem = f"{show(place)} has a lone surrogate: it is not Unicode text."
            raise InvalidValue(problem, path=show(place))
        if isinstance(scalar, int) and not -bound < scalar < bound:
            raise LimitExceeded(
                f"{show(place)} is an integer of more than {digits:,} digits (Limits.digits).",
                limit=digits,
                actual=digits + 1,
                path=show(place),
            )


class Repeated:
    """Placeholder for a JSON object with a duplicate key, until its path is known."""

    def __init__(self, key: str) -> None:
        self.key = key


_HINTS: Final = {
    name: hint
    for names, hint in {
        "tuple deque range dict_keys dict_values generator": "use list() of it",
        "set frozenset": "use a sorted list",
        "bytes bytearray memoryview": "use text, for example base64",
        "date time": "use its isoformat()",
        "timedelta": "use its total_seconds()",
        "Decimal Fraction UUID PurePath str": "use str() of it",
        "BaseModel": 'use its model_dump(mode="json")',
        "Struct": "use msgspec.to_builtins() of it",
        "generic ndarray": "use its tolist()",
        "coroutine": "await it first",
        "int": "use int() of it",
        "float": "use float() of it",
        "list": "use list() of it",
        "dict": "use dict() of it",
    }.items()
    for name in names.split()
}


def _refusal(value: object, path: ValuePath) -> InvalidValue:
    where, kind = show(path), type(value)
    if isinstance(value, Repeated):
        problem = f"has the key {json.dumps(value.key[:60])} twice"
    elif kind is float:
        problem = f"is {value}: JSON has only finite numbers within the range of a float"
    else:
        problem = f"is of type {kind.__qualname__}, which is not plain JSON data{_hint(kind)}"
    return InvalidValue(f"{where} {problem}.", path=where)


def _hint(kind: type) -> str:
    if hasattr(kind, "__dataclass_fields__"):
        return "; use dataclasses.asdict() of it"
    names = [base.__name__ for base in kind.__mro__]
    if "Enum" in names:
        return "; use its .value"
    return next((f"; {_HINTS[name]}" for name in names if name in _HINTS), "")


def _refused_key(key: object, path: ValuePath) -> InvalidValue:
    where = show(path)
    problem = f"{where} has a key of type {type(key).__qualname__}; keys must be of type str."
    return InvalidValue(problem, path=where)


def too_deep(where: str, depth: int) -> TooDeep:
    """Return the error for a value with too many levels."""
    return TooDeep(
        f"{where} is more than {depth} levels deep (Limits.depth), or contains itself.",
        limit=depth,
        actual=depth + 1,
        path=where,
    )


def too_large(where: str, actual: int, limit: int, name: str) -> LimitExceeded:
    """Return the error for something that takes at least `actual` bytes."""
    return LimitExceeded(
        f"{where} takes {actual:,} bytes or more; the limit is {limit:,} (Limits.{name}).",
        limit=limit,
        actual=actual,
        path=where,
    )


def show(path: ValuePath) -> str:
    """Return a path in readable form: `value.items[3]["a b"]`."""
    keys: list[str | int] = []
    while not isinstance(path, str):
        path, key = path
        keys.append(key)
    return path + "".join(map(_step, reversed(keys)))


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    if len(key) > 60:
        key = key[:57] + "..."
    return f".{key}" if key.isascii() and key.isidentifier() else f"[{json.dumps(key)}]"
