"""Calls and their results as bytes, between a client and its server.

Everything is MessagePack. Plain data travels as it is; the rest is an extension:

    1  an integer beyond 64 bits       5  a record or a handle, by the name of its class
    2  a tuple                         6  an error
    3  a set                           7  a time with its zone
    4  a dict whose keys are not text  8  a decimal number
    9  something else, of which        10 a Counter
       only the type's name travels

Records and handles are of a closed set: the classes that are marked with `travels`. A value of any
other type arrives as an object that no operation accepts, so that the server refuses it with the
error that an embedded store raises. No code travels, and none is looked up by name outside the set.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from . import errors
from .arguments import shown
from .errors import HoldfastError, InvalidArgument

MEDIA_TYPE: Final = "application/vnd.holdfast+msgpack"
# The headers of a call that writes.
LANE: Final = "Holdfast-Lane"
NUMBER: Final = "Holdfast-Number"
# The WebSocket of a store's wake-ups: the client sends `Topics`, the server those signalled.
RINGS_PATH: Final = "/call"
TOPICS_MAX: Final = 1_000
TOPICS_PER_MESSAGE: Final = 100
_INTEGER: Final = 1
_TUPLE: Final = 2
_SET: Final = 3
_PAIRS: Final = 4
_OBJECT: Final = 5
_ERROR: Final = 6
_TIME: Final = 7
_DECIMAL: Final = 8
_OTHER: Final = 9
_COUNTER: Final = 10
# No store accepts a value this deep, so what is deeper need not arrive complete to be refused.
_DEPTH_MAX: Final = 300
_NAME_CHARACTERS_MAX: Final = 100
# How many placeholder classes are created for the unknown names in a message.
_STRANGERS_MAX: Final = 100
# Larger dicts and sets must have text or small integers as keys; other keys could be chosen to
# have the same hash.
_MIXED_MAX: Final = 15
_LARGE_MAPS: Final = (b"\xde", b"\xdf")
_ERRORS: Final = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HoldfastError)
}
_SCALARS: Final = frozenset({str, bytes, bool, float, type(None)})
_encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T", bound=type)
_known: dict[str, type] = {}


class Topics(msgspec.Struct, forbid_unknown_fields=True):
    """The topics that a client starts and stops waiting for."""

    listen: list[str] = []
    leave: list[str] = []

    @classmethod
    def messages(cls, listen: Collection[str], leave: Collection[str]) -> Iterator[bytes]:
        """Return a change as messages of bounded size."""
        for name, topics in (("leave", sorted(leave)), ("listen", sorted(listen))):
            for start in range(0, len(topics), TOPICS_PER_MESSAGE):
                some = topics[start : start + TOPICS_PER_MESSAGE]
                yield msgspec.json.encode(cls(**{name: some}))


def travels(cls: T) -> T:
    """Allow instances of a class to be sent: a dataclass by its fields, others by two methods.

    Those are `_to_wire(self)`, which returns the parts, and `_from_wire(runtime, *parts)`, a class
    method. A subclass that is not marked is sent as its marked base.
    """
    if cls.__name__ in _known or not _can_travel(cls):
        raise TypeError(f"{cls.__name__} cannot travel, or another class of that name does")
    _known[cls.__name__] = cls
    return cls


def _can_travel(cls: type) -> bool:
    return is_dataclass(cls) or hasattr(cls, "_to_wire")


class Wire:
    """Encodes values and decodes them into handles of one store."""

    def __init__(self, runtime: Any, *, extensions_max: int | None = None) -> None:
        self._runtime = runtime
        self._extensions_left = math.inf if extensions_max is None else extensions_max
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)
        self._strangers: dict[str, type] = {}
        self._may_have_large_maps = False

    def encode(self, value: Any) -> bytes:
        """Return a value as bytes."""
        return _encode(_plain(value, 0))

    def decode(self, data: bytes) -> Any:
        """Return the value that bytes encode, or raise InvalidArgument if they are malformed."""
        try:
            self._may_have_large_maps = any(each in data for each in _LARGE_MAPS)
            return self._decoded(data)
        except RecursionError:
            raise InvalidArgument("what was sent is nested too deeply") from None
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"what was sent cannot be read: {error}") from None

    def _decoded(self, data: bytes | memoryview) -> Any:
        if self._may_have_large_maps and not has_text_keys(data):
            raise InvalidArgument("what was sent has a map whose keys are not text")
        return self._decoder.decode(data)

    def _parts(self, data: memoryview) -> Any:
        self._extensions_left -= 1
        if self._extensions_left < 0:
            raise InvalidArgument("what was sent has too many parts; send it in several calls")
        return self._decoded(data)

    def _extension(self, code: int, data: memoryview) -> Any:
        match code, self._parts(data):
            case 1, bytes(number):
                return int.from_bytes(number, "big", signed=True)
            case 2, list(parts):
                return tuple(parts)
            case 3, list(parts):
                _require_harmless(parts)
                return set(parts)
            case 4, list(parts):
                _require_harmless([key for key, _ in parts])
                return dict(parts)
            case 5, [str(name), *rest]:
                return self._revive(name, rest)
            case 6, [str(name), str(message), dict(given)]:
                return _ERRORS.get(name, HoldfastError)(message, **given)
            case 6, [str(name), str(message), None]:
                return _stranger(name, Exception)(message)
            case 7, str(text):
                return datetime.fromisoformat(text)
            case 8, str(text):
                return _decimal(text)
            case 9, str(text):
                return self._stranger(text)()
            case 10, dict(counts):
                return Counter(counts)
        raise InvalidArgument(f"what was sent has an unknown extension {code}")

    def _stranger(self, name: str) -> type:
        if name not in self._strangers:
            if len(self._strangers) >= _STRANGERS_MAX:
                return object
            self._strangers[name] = _stranger(name)
        return self._strangers[name]

    def _revive(self, name: str, parts: list[Any]) -> Any:
        cls = _known.get(name)
        if cls is None:
            raise InvalidArgument(f"what was sent names {shown(name)}, which is not known here")
        names, hints = _fields(cls)
        if len(names) != len(parts):
            raise InvalidArgument(f"{name} has {len(names)} fields, not {len(parts)}")
        given = dict(zip(names, parts, strict=True))
        for field, value in given.items():
            if not fits(value, hints[field]):
                raise InvalidArgument(f"{name}.{field} cannot be {type(value).__name__}")
        if hasattr(cls, "_from_wire"):
            return cls._from_wire(self._runtime, **given)
        return cls(**given)


def _plain(value: Any, depth: int) -> Any:
    """Return a value as types that MessagePack can encode."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth > _DEPTH_MAX:
        return _extension(_OTHER, kind.__name__)
    depth += 1
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        return _extension(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if kind is list:
        return [_plain(each, depth) for each in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _plain(each, depth) for key, each in value.items()}
        pairs = [[_plain(key, depth), _plain(each, depth)] for key, each in value.items()]
        return _extension(_PAIRS, pairs)
    if kind is tuple:
        return _extension(_TUPLE, [_plain(each, depth) for each in value])
    return _special(value, kind, depth)


def _special(value: Any, kind: type, depth: int) -> msgspec.msgpack.Ext:
    for base in kind.__mro__:
        if _known.get(base.__name__) is base:
            parts = _parts(value, base)
            return _extension(_OBJECT, [base.__name__, *(_plain(each, depth) for each in parts)])
    if kind is Counter:
        return _extension(_COUNTER, dict(value))
    if isinstance(value, set | frozenset):
        return _extension(_SET, [_plain(each, depth) for each in value])
    if isinstance(value, BaseException):
        return _error(value, depth)
    if kind is datetime:
        return _extension(_TIME, value.isoformat())
    if kind is Decimal:
        return _extension(_DECIMAL, str(value))
    return _extension(_OTHER, kind.__name__)


def _error(error: BaseException, depth: int) -> msgspec.msgpack.Ext:
    if isinstance(error, HoldfastError):
        fields = {name: _plain(each, depth) for name, each in error.fields.items()}
        return _extension(_ERROR, [type(error).__name__, str(error), fields])
    return _extension(_ERROR, [type(error).__name__, str(error), None])


def _parts(value: Any, base: type) -> Sequence[Any]:
    if hasattr(base, "_to_wire"):
        found: Sequence[Any] = value._to_wire()
        return found
    return [getattr(value, name) for name in _fields(base)[0]]


def _extension(code: int, parts: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(parts))


def _require_harmless(keys: list[Any]) -> None:
    """Refuse many keys of a type whose hashes an attacker could make collide."""
    if len(keys) > _MIXED_MAX and not all(map(_is_harmless, keys)):
        raise InvalidArgument("what was sent has a large set or dict of other than text")


def _is_harmless(key: Any) -> bool:
    return type(key) is str or (type(key) is int and -(2**63) <= key < 2**64)


def has_text_keys(data: bytes | memoryview) -> bool:
    """Whether all maps in MessagePack data have text as keys; truncated data is not examined.

    This is checked before data is decoded, because decoding builds dicts with any keys.
    """
    at, left, is_map = 0, 1, False
    outer: list[tuple[int, bool]] = []
    while True:
        while not left:
            if not outer:
                return True
            left, is_map = outer.pop()
        if at >= len(data):
            return True
        first = data[at]
        if is_map and left % 2 == 0 and not (0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB):
            return False
        left -= 1
        at, inside, has_map = _header(data, at, first)
        if inside:
            outer.append((left, is_map))
            left, is_map = inside, has_map


# After the first byte: the number of bytes that encode a length, and of those besides it.
_TELL: Final = {
    **dict(zip(range(0xC4, 0xCA), [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1)], strict=True)),
    **dict(zip(range(0xCA, 0xCC), [(0, 4), (0, 8)], strict=True)),
    **dict(zip(range(0xCC, 0xD4), [(0, 1), (0, 2), (0, 4), (0, 8)] * 2, strict=True)),
    **dict(zip(range(0xD4, 0xD9), [(0, 2), (0, 3), (0, 5), (0, 9), (0, 17)], strict=True)),
    **dict(zip(range(0xD9, 0xDC), [(1, 0), (2, 0), (4, 0)], strict=True)),
}


def _header(data: bytes | memoryview, at: int, first: int) -> tuple[int, int, bool]:
    """Return where the next value begins, how many values this one contains, and if it is a map."""
    at += 1
    if 0x80 <= first <= 0x8F:
        return at, 2 * (first & 0x0F), True
    if 0x90 <= first <= 0x9F:
        return at, first & 0x0F, False
    if 0xA0 <= first <= 0xBF:
        return at + (first & 0x1F), 0, False
    if 0xDC <= first <= 0xDF:
        size = 2 if first % 2 == 0 else 4
        count = int.from_bytes(data[at : at + size], "big")
        is_map = first >= 0xDE
        return at + size, count * (2 if is_map else 1), is_map
    told, besides = _TELL.get(first, (0, 0))
    length = int.from_bytes(data[at : at + told], "big")
    return at + told + length + besides, 0, False


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise InvalidArgument(f"{shown(text)} is not a decimal number") from None


@cache
def _fields(cls: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the names of the fields of a class that are sent, in order, and their types."""
    if hasattr(cls, "_from_wire"):
        _runtime, *given = inspect.signature(cls._from_wire).parameters.values()
        names = (each.name for each in given if each.kind is each.POSITIONAL_OR_KEYWORD)
        return tuple(names), typing.get_type_hints(cls._from_wire)
    return tuple(each.name for each in fields(cls) if each.init), typing.get_type_hints(cls)


def _stranger(name: str, base: type = object) -> type:
    """Return a placeholder for a class that is not sent; errors show its name."""
    is_name = len(name) <= _NAME_CHARACTERS_MAX and name.isidentifier()
    return type(name if is_name else "object", (base,), {})


def fits(value: Any, hint: Any) -> bool:
    """Whether a decoded value matches a type annotation."""
    if hint is Any or isinstance(hint, TypeVar):
        return True
    origin, given = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in given)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in given)
    if origin is tuple:
        return isinstance(value, tuple) and _are(value, given)
    if origin in _CONTAINERS:
        return _CONTAINERS[origin](value, given)
    if hint is float:
        return type(value) in (int, float)
    if hint in (None, type(None)):
        return value is None
    kind = origin or hint
    return type(value) is kind if kind in (int, bool) else isinstance(value, kind)


def _are(values: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(fits, values, hints))


def _is_sequence(value: Any, given: tuple[Any, ...]) -> bool:
    return isinstance(value, list | tuple) and all(fits(each, given[0]) for each in value)


def _is_mapping(value: Any, given: tuple[Any, ...]) -> bool:
    return isinstance(value, dict) and all(
        fits(key, given[0]) and fits(each, given[1]) for key, each in value.items()
    )


_CONTAINERS: Final[dict[Any, Callable[[Any, tuple[Any, ...]], bool]]] = {
    list: lambda value, given: type(value) is list and _is_sequence(value, given),
    Sequence: _is_sequence,
    dict: _is_mapping,
    Mapping: _is_mapping,
}
