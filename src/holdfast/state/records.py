"""The public records of shared state."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ..dataclass import dataclass
from ..wire import travels


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of shared state after a mutation; a deleted one has no value."""

    key: str
    value: Any
    version: int
    sequence: int
    updated_by: str
    """The session that wrote it."""
    updated_at: int
    is_deleted: bool = False
    is_created: bool = field(default=False, compare=False)
    """Whether the call that returned it found no such key."""
    previous: Any = field(default=None, compare=False, repr=False)
    """The number before an increment; None if there was none, and after other calls."""
    operation: str | None = field(default=None, compare=False, repr=False)
    """What changed the key, in what `history` returns."""
    idempotency_key: str | None = field(default=None, compare=False, repr=False)
    """The key of that change, if it had one, in what `history` returns."""


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """All keys at one sequence; `version` is that sequence, which every mutation increments."""

    root_id: str
    version: int
    document: dict[str, Any]
    versions: dict[str, int]
    writers: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The session that wrote each key last."""
    times: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """When it did, in milliseconds."""

    def __getitem__(self, key: str) -> Any:
        return self.document[key]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StateEvent:
    """One mutation. A write of the whole document has no key; its value is the keys it set."""

    sequence: int
    operation: str
    key: str | None
    version: int | None
    """The key's version afterwards."""
    value: Any
    """The operation's argument: a value, a delta, items, a patch, an item, or a document."""
    deleted: tuple[str, ...] = ()
    """The keys that a write of the whole document deleted."""
    updated_by: str
    item_id: str | None
    idempotency_key: str | None
    created_at: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """One mutation, and each key that it changed as it left it."""

    event: StateEvent
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """The rule that every write of a key must follow."""

    key: str
    schema: dict[str, Any] | None
    """The JSON Schema that every value matches."""
    reducer: str | None
    """How `state.reduce` combines a value with the stored one."""
    updated_by: str
    updated_at: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StateConflict:
    """A write that was refused because its key did not have the expected version."""

    root_id: str
    number: int
    key: str
    expected: int
    current: int
    attempt: int
    is_retried: bool
    updated_by: str
    created_at: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff:
    """One key that differs between two sequences; version 0 means that it did not exist."""

    key: str
    before: Any
    after: Any
    version_before: int
    version_after: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StateDiff:
    """The changes in shared state between two sequences."""

    before: int
    after: int
    changes: tuple[KeyDiff, ...]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """A bounded view of the state for a prompt."""

    document: dict[str, Any]
    key_count: int
    left_out: tuple[str, ...] = field(default=())
    """Keys that did not fit, most recently written first, at most `max_keys` of them."""

    @property
    def is_truncated(self) -> bool:
        """Whether a key was left out."""
        return len(self.document) < self.key_count
