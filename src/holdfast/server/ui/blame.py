"""Which change of a key wrote each part of its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...checkpoints.diff import same
from ...state.records import Entry

PARTS_MAX = 200
DEPTH_MAX = 8
_GONE: Any = object()
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a value, and the change that wrote it; None if that is older than the history."""

    path: Path
    value: Any
    by: Entry | None


def blame(history: Sequence[Entry], *, is_whole: bool) -> tuple[list[Part], bool]:
    """Return the parts of the newest value, and whether these are all of them.

    `history` is the newest change first; `is_whole` says that it goes back to the first one.
    """
    newest = history[0]
    if newest.is_deleted:
        return [], True
    parts = _parts(newest.value, ())
    found = [part for _, part in zip(range(PARTS_MAX), parts, strict=False)]
    is_all = next(parts, None) is None
    return [Part(path, value, _changed(history, path, is_whole)) for path, value in found], is_all


def _parts(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the parts that have no parts themselves, in order; a part nested too deep is one."""
    members: Any = ()
    if len(path) < DEPTH_MAX:
        if isinstance(value, dict):
            members = value.items()
        elif isinstance(value, list):
            members = enumerate(value)
    if not members or not value:
        yield path, value
        return
    for name, member in members:
        yield from _parts(member, (*path, name))


def _changed(history: Sequence[Entry], path: Path, is_whole: bool) -> Entry | None:
    """Return the newest change after which a part differs from what was there before."""
    for place, entry in enumerate(history):
        older = history[place + 1] if place + 1 < len(history) else None
        if older is None:
            return entry if is_whole else None
        if not same(_at(older, path), _at(entry, path)):
            return entry
    return None


def _at(entry: Entry, path: Path) -> Any:
    value: Any = _GONE if entry.is_deleted else entry.value
    for name in path:
        if isinstance(value, dict):
            value = value.get(name, _GONE)
        elif isinstance(value, list) and isinstance(name, int) and name < len(value):
            value = value[name]
        else:
            return _GONE
    return value
