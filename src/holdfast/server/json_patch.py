"""JSON Patch (RFC 6902): operations on a value, all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from ..answers.problems import Refusal

MEDIA: Final = "application/json-patch+json"
OPERATIONS_MAX = 1_000
# Each copy may double the size of the value.
COPIED_NODES_MAX = 100_000
MISSING: Final = object()
Json = Any
Pointer = Annotated[str, msgspec.Meta(max_length=4_096, description="A JSON Pointer (RFC 6901).")]


class _Operation(msgspec.Struct, tag_field="op", kw_only=True):
    """The common part of all operations; unknown members are ignored, as the RFC requires."""

    path: Pointer


class PatchAdd(_Operation, tag="add"):
    """Add a member, insert an item, or set the whole value."""

    value: Json


class PatchRemove(_Operation, tag="remove"):
    """Remove a member or an item."""


class PatchReplace(_Operation, tag="replace"):
    """Replace the value at the path."""

    value: Json


class PatchMove(_Operation, tag="move", rename={"source": "from"}):
    """Move the value at `from` to the path."""

    source: Pointer


class PatchCopy(_Operation, tag="copy", rename={"source": "from"}):
    """Copy the value at `from` to the path."""

    source: Pointer


class PatchTest(_Operation, tag="test"):
    """Continue only if the path holds this value."""

    value: Json


Operation: TypeAlias = PatchAdd | PatchRemove | PatchReplace | PatchMove | PatchCopy | PatchTest
Patch: TypeAlias = list[Operation]


class _Misfit(Exception):
    """An operation does not apply to the value."""


def patched(value: Json, operations: Sequence[Operation]) -> Json:
    """Apply all operations to a value, which may be modified; MISSING stands for no value."""
    if len(operations) > OPERATIONS_MAX:
        raise Refusal(
            "too_large",
            f"a patch can have at most {OPERATIONS_MAX:,} operations",
            limit=OPERATIONS_MAX,
            actual=len(operations),
        )
    patching = _Patching(value)
    for number, operation in enumerate(operations):
        try:
            patching.apply(operation, number)
        except _Misfit as error:
            raise Refusal(
                "patch_conflict",
                f"operation {number} of the patch does not apply: {error}; nothing was changed",
                operation=number,
            ) from None
    return patching.value


class _Patching:
    """A value while it is being patched."""

    def __init__(self, value: Json) -> None:
        self.value = value
        self._nodes_left = COPIED_NODES_MAX

    def apply(self, operation: Operation, number: int) -> None:
        path = _parts(operation.path, f"/{number}/path")
        match operation:
            case PatchAdd():
                self._add(path, _copied(operation.value))
            case PatchRemove():
                self._remove(path)
            case PatchReplace():
                self._found(path)
                self._put(path, _copied(operation.value))
            case PatchMove():
                source = _parts(operation.source, f"/{number}/from")
                if path[: len(source)] == source and path != source:
                    raise _invalid(f"/{number}/path", "a value cannot be moved into itself")
                moved = self._found(source)
                if path != source:
                    self._remove(source)
                    self._add(path, moved)
            case PatchCopy():
                copied = self._found(_parts(operation.source, f"/{number}/from"))
                self._nodes_left -= _nodes(copied)
                if self._nodes_left < 0:
                    raise Refusal(
                        "too_large",
                        f"a patch can copy at most {COPIED_NODES_MAX:,} values",
                        limit=COPIED_NODES_MAX,
                    )
                self._add(path, _copied(copied))
            case PatchTest():
                if not _equal(self._found(path), operation.value):
                    raise _Misfit(f"{operation.path!r} holds another value")

    def _found(self, path: list[str]) -> Json:
        here = self.value
        if here is MISSING:
            raise _Misfit("there is no value yet")
        for part in path:
            here = _member(here, part)
        return here

    def _add(self, path: list[str], value: Json) -> None:
        if not path:
            self.value = value
            return
        inside = self._found(path[:-1])
        if isinstance(inside, dict):
            inside[path[-1]] = value
        elif isinstance(inside, list):
            place = len(inside) if path[-1] == "-" else _index(path[-1], len(inside))
            inside.insert(place, value)
        else:
            raise _Misfit(f"{_shown(path[:-1])} holds neither an object nor an array")

    def _put(self, path: list[str], value: Json) -> None:
        if not path:
            self.value = value
            return
        inside = self._found(path[:-1])
        inside[path[-1] if isinstance(inside, dict) else int(path[-1])] = value

    def _remove(self, path: list[str]) -> None:
        self._found(path)
        if not path:
            self.value = MISSING
            return
        inside = self._found(path[:-1])
        del inside[path[-1] if isinstance(inside, dict) else int(path[-1])]


def _copied(value: Json) -> Json:
    """Return a deep copy, so that later operations do not change the original."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return list(map(_copied, value)) if isinstance(value, list) else value


def _nodes(value: Json) -> int:
    inside = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(_nodes, inside)) if isinstance(value, dict | list) else 1


def _parts(pointer: str, where: str) -> list[str]:
    if not pointer:
        return []
    if not pointer.startswith("/") or "~" in pointer.replace("~0", "").replace("~1", ""):
        raise _invalid(where, f"{pointer!r} is not a JSON Pointer")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/")]


def _member(inside: Json, part: str) -> Json:
    if isinstance(inside, dict):
        if part not in inside:
            raise _Misfit(f"there is no member {part!r}")
        return inside[part]
    if isinstance(inside, list):
        return inside[_index(part, len(inside) - 1)]
    raise _Misfit(f"the value that should contain {part!r} is neither an object nor an array")


def _index(part: str, last: int) -> int:
    is_number = part.isascii() and part.isdecimal() and (part == "0" or part[0] != "0")
    if not is_number or len(part) > 9 or int(part) > last:
        raise _Misfit(f"there is no item {part!r}")
    return int(part)


def _equal(one: Json, other: Json) -> bool:
    """Whether two values are equal by the RFC: numbers by value, and true is not a number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _shown(path: list[str]) -> str:
    return repr("".join(f"/{part}" for part in path))


def _invalid(where: str, detail: str) -> Refusal:
    return Refusal("invalid_request", detail, pointer=where)
