"""Validation of arguments: text, whole numbers, durations, times, paths, and plain data.

Errors about plain data name the path of what cannot be stored.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import sys
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

from .clock import EPOCH, TIME_MS_MAX
from .errors import InvalidArgument, InvalidValue, LimitExceeded, TooDeep, escaped

NAME_CHARACTERS_MAX = 256
SHOWN_CHARACTERS_MAX = 200
PATH_CHARACTERS_MAX = 4_096
# The largest that both databases hold.
WHOLE_MAX = 2**63 - 1
DIGITS_SHOWN_MAX = 40
FLOAT_MAX: Final = sys.float_info.max
_SURROGATE: Final = re.compile("[\ud800-\udfff]")

T = TypeVar("T")
ValuePath: TypeAlias = "str | tuple[ValuePath, str | int]"


class _Bounded(reprlib.Repr):
    """A repr of bounded depth and length; Python's own fails on deep lists and huge integers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN_CHARACTERS_MAX // 2

    def repr_int(self, x: int, level: int) -> str:
        if abs(x) < 10**DIGITS_SHOWN_MAX:
            return str(x)
        return f"an integer of more than {DIGITS_SHOWN_MAX} digits"


def shown(value: object) -> str:
    """Return any value as text for a message: short, and without control characters."""
    try:
        text = _Bounded().repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    text = escaped(text)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"


def require_text(label: str, text: object, most: int = NAME_CHARACTERS_MAX) -> str:
    """Return text of 1 to `most` printable characters."""
    if not isinstance(text, str) or not 0 < len(text) <= most or not text.isprintable():
        raise InvalidArgument(
            f"{label} must be text of 1 to {most} printable characters, not {shown(text)}"
        )
    return text


def id_of_item(item: object) -> str | None:
    """Return the id of a work item, given as a handle or an id."""
    item_id = getattr(item, "id", item)
    return None if item_id is None else require_text("item", item_id)


def require_new_id(label: str, id: object, most: int = NAME_CHARACTERS_MAX) -> str:
    """Return an id that a caller has chosen for something new.

    In a path these two are not names but steps: whatever has such an id has no URL.
    """
    if isinstance(id, str) and id in {".", ".."}:
        raise InvalidArgument(f"{label} must not be {shown(id)}, which cannot be part of a URL")
    return require_text(label, id, most)


def require_text_or_none(label: str, text: object, most: int = NAME_CHARACTERS_MAX) -> None:
    """Refuse anything but None and such text."""
    if text is not None:
        require_text(label, text, most)


def require_whole(label: str, number: object, least: int, most: int = WHOLE_MAX) -> int:
    """Return a whole number within its bounds."""
    if type(number) is not int or not least <= number <= most:
        is_too_large = type(number) is int and number > most
        is_open = most == WHOLE_MAX and not is_too_large
        bounds = f"a whole number from {least} up" if is_open else f"{least} to {most}"
        raise InvalidArgument(f"{label} must be {bounds}, not {shown(number)}")
    return number


def require_limit(limit: object, most: int) -> int:
    """Return a valid page size."""
    return require_whole("limit", limit, 1, most)


def require_seconds(
    label: str, seconds: object, most: float, *, least: float = 0, may_be_least: bool = True
) -> int:
    """Return a duration in milliseconds."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if (
        not is_number
        or not least <= cast("float", seconds) <= most
        or (seconds == least and not may_be_least)
    ):
        bounds = f"{least:g} to" if may_be_least else f"above {least:g} and at most"
        raise InvalidArgument(f"{label} must be {bounds} {most:.0f}, not {shown(seconds)}")
    return round(cast("float", seconds) * 1000)


def require_one_of(label: str, value: object, known: Collection[T]) -> T:
    """Return the value if it is one of the known words."""
    if not isinstance(value, str) or value not in known:
        words = ", ".join(map(str, known))
        raise InvalidArgument(f"{label} must be one of {words}, not {shown(value)}")
    return cast("T", value)


def require_path(path: object, what: str = "a file") -> Path:
    """Return the real path of a valid file name, whether the file exists or not."""
    text = str(path) if isinstance(path, str | Path) else ""
    is_text = text not in {"", "."} and "\0" not in text and len(text) <= PATH_CHARACTERS_MAX
    try:
        # A name from the file system may contain surrogate escapes, which os.fsencode accepts.
        os.fsencode(text)
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise InvalidArgument(f"path must name {what}, not {shown(path)}")
    return Path(os.path.realpath(text))


def milliseconds_of(label: str, moment: object) -> int:
    """Return a time in milliseconds UTC, given as such or as an aware datetime."""
    milliseconds: Any = moment
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise InvalidArgument(
                f"{label} needs a time zone, like datetime.now(UTC): {shown(moment)}"
            )
        milliseconds = (moment - EPOCH) // timedelta(milliseconds=1)
    if type(milliseconds) is not int or not 0 <= milliseconds <= TIME_MS_MAX:
        raise InvalidArgument(
            f"{label} must be a datetime, or a time in milliseconds UTC, of the years 1970 to "
            f"9999, not {shown(moment)}"
        )
    return milliseconds


def measure(value: object, path: ValuePath, room: int, depth: int, level: int = 1) -> int:
    """Refuse what is not plain data; return the remaining room, in bytes, after its nodes."""
    kind = type(value)
    is_dict = kind is dict
    if not is_dict and kind is not list:
        if kind is not str and kind is not int and not _is_scalar(value):
            raise _refusal(value, path)
        return room
    nodes: Any = value
    if level > depth:
        raise too_deep(shown_path(path), depth)
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
    refuse_surrogates(value, path)
    bound = 10**digits
    for scalar, place in _scalars(value, path):
        if isinstance(scalar, int) and not -bound < scalar < bound:
            where = shown_path(place)
            raise LimitExceeded(
                f"{where} is an integer of more than {digits:,} digits (Limits.digits).",
                limit=digits,
                actual=digits + 1,
                path=where,
            )


def refuse_surrogates(value: object, path: ValuePath) -> None:
    """Refuse text that is not valid Unicode."""
    for scalar, place in _scalars(value, path):
        if isinstance(scalar, str) and _SURROGATE.search(scalar):
            problem = f"{shown_path(place)} has a lone surrogate: it is not Unicode text."
            raise InvalidValue(problem, path=shown_path(place))


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
    where, kind = shown_path(path), type(value)
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
    where = shown_path(path)
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


def shown_path(path: ValuePath) -> str:
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
