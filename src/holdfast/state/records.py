"""What callers get of shared state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of shared state, as one mutation left it; a deleted one has no value."""

    key: str
    value: Any
    version: int
    sequence: int
    updated_by: str
    """The session that wrote it."""
    updated_at: int
    is_deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """All keys at one moment; `version` is the state's own, which every mutation raises by one."""

    root_id: str
    version: int
    document: dict[str, Any]
    versions: dict[str, int]

    def __getitem__(self, key: str) -> Any:
        return self.document[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEvent:
    """One mutation. A write of the whole document has no key; its value are the keys it set."""

    sequence: int
    operation: str
    key: str | None
    version: int | None
    """The key's, afterwards."""
    value: Any
    """What the operation was given: a value, a delta, items, a patch, an item, or a document."""
    deleted: tuple[str, ...] = ()
    """The keys that a write of the whole document deleted."""
    updated_by: str
    item_id: str | None
    idempotency_key: str | None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """What every write of a key keeps to."""

    key: str
    schema: dict[str, Any] | None
    """The JSON Schema that each of its values fits."""
    reducer: str | None
    """What `state.reduce` does with a value that it is given."""
    updated_by: str
    updated_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConflict:
    """A write that was refused because its key had another version than it expected."""

    number: int
    key: str
    expected: int
    current: int
    attempt: int
    is_retried: bool
    updated_by: str
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff:
    """One key that differs between two moments; what did not exist has the version 0."""

    key: str
    before: Any
    after: Any
    version_before: int
    version_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDiff:
    """What changed in shared state between two sequences."""

    before: int
    after: int
    changes: tuple[KeyDiff, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """A bounded view of the state for a prompt; what was left out is counted beside the data."""

    document: dict[str, Any]
    key_count: int
    left_out: tuple[str, ...] = field(default=())
    """Keys that did not fit, the most recently written first; no more than are shown by name."""

    @property
    def is_truncated(self) -> bool:
        """Whether a key was left out."""
        return len(self.document) < self.key_count
