"""The checkpoints of a world: found by id or by name, and which of them can still be restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..errors import CheckpointNotFound
from .system import System


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a world: a token of each system, the context, and what ran before."""

    id: str
    name: str
    tokens: Mapping[str, Any]
    context: Mapping[str, Any]
    runs: Mapping[str, int]
    state_id: str | None
    created_at: int


class Checkpoints(Mapping[str, Checkpoint]):
    """Checkpoints by id, in the order in which they were made; a name finds its newest."""

    def __init__(self) -> None:
        self._by_id: dict[str, Checkpoint] = {}
        self._by_name: dict[str, dict[str, None]] = {}
        # The checkpoints that a stack system holds: restoring one destroys those above it.
        self._stack: dict[str, None] = {}

    def __getitem__(self, id: str) -> Checkpoint:
        return self._by_id[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, id_or_name: str) -> Checkpoint:
        """Return a checkpoint by its id, or the newest with this name."""
        found = self._by_id.get(id_or_name)
        if found is None and id_or_name in self._by_name:
            found = self._by_id[next(reversed(self._by_name[id_or_name]))]
        if found is None:
            raise CheckpointNotFound(f"Checkpoint not found: {id_or_name}", checkpoint=id_or_name)
        return found

    def add(self, checkpoint: Checkpoint) -> None:
        """Register a checkpoint."""
        self._by_id[checkpoint.id] = checkpoint
        self._by_name.setdefault(checkpoint.name, {})[checkpoint.id] = None
        self._stack[checkpoint.id] = None

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint."""
        del self._by_id[checkpoint.id]
        named = self._by_name[checkpoint.name]
        del named[checkpoint.id]
        if not named:
            del self._by_name[checkpoint.name]
        self._stack.pop(checkpoint.id, None)

    def clear(self) -> None:
        """Remove all checkpoints."""
        self._by_id.clear()
        self._by_name.clear()
        self._stack.clear()

    def restored(self, checkpoint: Checkpoint) -> None:
        """Record that the stack was unwound to this checkpoint."""
        while next(reversed(self._stack)) != checkpoint.id:
            self._stack.popitem()

    def why_invalid(self, checkpoint: Checkpoint, systems: Mapping[str, System]) -> str | None:
        """Return why a checkpoint cannot be restored, or None."""
        if checkpoint.tokens.keys() != systems.keys():
            others = sorted(checkpoint.tokens.keys() ^ systems.keys())
            return f"the world had different systems then ({', '.join(others)})"
        if checkpoint.id not in self._stack and has_stack(systems):
            return "a rollback to an earlier checkpoint destroyed it"
        return None


def has_stack(systems: Mapping[str, System]) -> bool:
    """Return whether restoring a checkpoint destroys the later ones."""
    return any(system.rollback_order == "stack" for system in systems.values())
