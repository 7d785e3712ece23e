"""The differences between two states of a world, as text, and along a path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..arguments import shown
from .actions import Step
from .graph import State, StateGraph
from .values import canonical

_CHANGES_MAX: Final = 30
# Python refuses to format larger integers in decimal.
_BITS_MAX: Final = 10_000


def readable(value: Any) -> Any:
    """Return a value as plain JSON data; values that JSON lacks become text."""
    if isinstance(value, int) and value.bit_length() > _BITS_MAX:
        return hex(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else repr(value)
    if isinstance(value, Mapping):
        return {str(_key(key)): readable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((readable(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    return _key(value) if isinstance(value, bytes) else str(value)


def _key(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def states_along(graph: StateGraph, path: Sequence[Step]) -> list[State]:
    """Return the states on a path as far as they are in the graph; a shrunk path may leave it."""
    if graph.initial is None:
        return []
    states = [graph.initial]
    for step in path:
        runs = [run for run in graph.transitions_from(states[-1].id) if run.step == step]
        if not runs:
            break
        states.append(graph.states[runs[0].to_id])
    return states


def changes(before: State, after: State) -> list[str]:
    """Return the differences between the observations of two states, one per line, at most 30."""
    lines: list[str] = []
    for seen in after.observations:
        old = readable(before.observation(seen.system))
        for line in _differences(seen.system, old, readable(seen.data)):
            lines.append(line)
            if len(lines) == _CHANGES_MAX:
                return [*lines, "…"]
    return lines or ["nothing changed"]


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in new:
                yield f"{path}.{key}: {shown(old[key])} is gone"
            elif key not in old:
                yield f"{path}.{key}: {shown(new[key])} is new"
            else:
                yield from _differences(f"{path}.{key}", old[key], new[key])
    elif canonical(old, path) != canonical(new, path):
        yield f"{path}: {shown(old)} → {shown(new)}"
