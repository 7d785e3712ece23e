"""Shared state in export files: the entries of a tree, and their history."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args

from msgspec import Meta

from ..codec import Codec
from ..dataclass import dataclass
from ..errors import InvalidArgument
from ..feed.events import TREE_SEQUENCE
from ..feed.portable import sequence_of
from ..kernel.inserts import Insert
from ..kernel.kept import Kept, KeptSet, kept, kept_set
from ..kernel.operation import Op, rows
from ..kernel.owned_rows import OwnedRows, read_each
from ..kernel.portable import (
    ANY,
    Count,
    Export,
    Flag,
    Import,
    Name,
    Portable,
    Positive,
    Record,
    Sealed,
    Seen,
    Time,
    Value,
)
from .rules import Reducer, rule_context
from .schemas import Validators, require_schema
from .values import REDUCED, VERSION_MAX, DocumentOperation, Operation, require_key
from .write import entry_context, event_context

DOCUMENT_OPERATIONS: tuple[DocumentOperation, ...] = get_args(DocumentOperation)
SEQUENCE_MAX = 2**52
SCHEMAS_IN_MEMORY = 16
EventKey = Annotated[str, Meta(max_length=256)]


class StateRecord(Record, frozen=True, tag="state"):
    """The shared state of a tree; its entries and events follow."""

    root_id: Name
    keys: Count
    floor: Count
    forgotten_version: Count
    least_version: Count

    def problem(self, seen: Seen) -> str | None:
        """Check that its tree precedes it, and that it comes once."""
        states = seen.of(_States)
        if self.root_id not in seen.trees or self.root_id in states.keys:
            return f"the state of tree {self.root_id!r} comes twice, or without its tree"
        if not self.floor <= sequence_of(seen, self.root_id) <= SEQUENCE_MAX:
            return f"the state of tree {self.root_id!r} has an impossible floor or sequence"
        states.keys[self.root_id] = self.keys
        states.floors[self.root_id] = self.floor
        states.least_versions[self.root_id] = self.least_version
        return None

    def add(self, into: Import) -> Op[None]:
        """Add it, above the versions of a deleted root of this id."""
        into.of(_States).keys[self.root_id] = self.keys
        into.insert(ADD_STATE, self.row(into.codec))
        yield from ()


class StateRuleRecord(Record, frozen=True, tag="state_rule"):
    """The rule of a key."""

    sealed = Sealed(
        lambda row, name: rule_context(row["root_id"], row["key"]),
        json_schema=Value(dict, "a schema that is no object"),
    )

    root_id: Name
    key: Name
    reducer: Reducer | None
    updated_by: Name
    updated_at: Time
    json_schema: bytes | None = None

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"rule of state key {self.key!r}"

    def problem(self, seen: Seen) -> str | None:
        """Check that it is not empty, comes once after its tree, and has a usable schema."""
        require_key(self.key)
        states = seen.of(_States)
        if self.root_id not in seen.trees or (self.root_id, self.key) in states.schemas:
            return f"the {self.label} comes twice, or without its tree"
        if self.root_id in states.live:
            return f"the {self.label} comes after the entries of its tree"
        states.schemas[self.root_id, self.key] = self.row(seen.codec)["json_schema"]
        if self.json_schema is not None:
            return _refusal(require_schema, self.key, seen.codec.decode(self.json_schema))
        return f"the {self.label} is empty" if self.reducer is None else None

    def add(self, into: Import) -> Op[None]:
        """Add the rule."""
        into.insert(ADD_RULE, self.row(into.codec))
        yield from ()


class StateEventRecord(Record, frozen=True, tag="state_event"):
    """One change of a key, or the row of a document write."""

    sealed = Sealed(
        lambda row, name: event_context(row["root_id"], row["sequence"], row["key"], name),
        argument=ANY,
        value=ANY,
    )

    root_id: Name
    sequence: Positive
    key: EventKey
    operation: Operation | DocumentOperation
    version: Count
    base: Count
    is_deleted: Flag
    session_id: Name
    item_id: Name | None
    idempotency_key: Name | None
    request_digest: Name | None
    created_at: Time
    argument: bytes | None = None
    value: bytes | None = None

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"state event {self.sequence} of tree {self.root_id!r}"

    def problem(self, seen: Seen) -> str | None:
        """Check that it follows the last event of its key, and that its value can be computed."""
        states = seen.of(_States)
        last = states.last.get((self.root_id, self.key), _Last())
        if self.root_id not in states.keys or not states.is_next(self.root_id, self.sequence):
            return f"{self.label} is out of order"
        previous = states.sequences.get(self.root_id, 0)
        states.sequences[self.root_id] = self.sequence
        if self.idempotency_key is not None:
            if (self.root_id, self.idempotency_key) in states.requests:
                return f"{self.label} has an idempotency key twice"
            states.requests.add((self.root_id, self.idempotency_key))
        is_document = self.operation in DOCUMENT_OPERATIONS
        if not self.key:
            states.documents[self.root_id] = self.sequence
            is_alone = self.sequence > previous and is_document
            return None if is_alone else f"{self.label} comes twice, or is not a document write"
        require_key(self.key)
        if (states.documents.get(self.root_id) == self.sequence) != is_document and (
            self.sequence > states.floors[self.root_id]
        ):
            return f"{self.label} has changes of another event"
        if not is_document and self.sequence == previous:
            return f"{self.label} comes twice"
        is_whole = self.value is not None or bool(self.is_deleted)
        if self.sequence <= last.sequence or not self._is_next_version(last, states):
            return f"{self.label} does not follow the one before it"
        if is_whole != (self.base == self.sequence) or (self.value and self.is_deleted):
            return f"{self.label} has a wrong base"
        if not is_whole and not self._is_step(last):
            return f"{self.label} has no value to start from"
        states.last[self.root_id, self.key] = _Last(
            self.sequence,
            self.version,
            self.base,
            bool(self.is_deleted),
            states.digest(self.value),
        )
        return None

    def _is_next_version(self, last: _Last, states: _States) -> bool:
        """Whether its version may follow; below the floor, some versions are missing."""
        if not last.version < self.version <= VERSION_MAX:
            return False
        is_kept = self.sequence <= states.floors[self.root_id]
        if is_kept or last.sequence == 0 or last.is_deleted:
            return True
        return self.version in {last.version + 1, states.least_versions[self.root_id] + 1}

    def _is_step(self, last: _Last) -> bool:
        known = self.operation in REDUCED and self.argument is not None
        return known and last.base > 0 and self.base == last.base

    def add(self, into: Import) -> Op[None]:
        """Add the event."""
        into.insert(ADD_EVENT, self.row(into.codec))
        yield from ()


class StateEntryRecord(Record, frozen=True, tag="state_entry"):
    """The current entry of a key; without a value it was deleted."""

    sealed = Sealed(lambda row, name: entry_context(row["root_id"], row["key"]), value=ANY)
    counted = "entries"

    root_id: Name
    key: Name
    version: Positive
    sequence: Positive
    base: Count
    steps: Count
    updated_by: Name
    created_at: Time
    updated_at: Time
    value: bytes | None = None

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"state key {self.key!r}"

    def problem(self, seen: Seen) -> str | None:
        """Check that it matches the last event of its key, and the key's schema."""
        states = seen.of(_States)
        last = states.last.pop((self.root_id, self.key), None)
        names = ("sequence", "version", "base")
        if last is None or any(getattr(last, name) != getattr(self, name) for name in names):
            return f"state key {self.key!r} does not match its history"
        is_other = last.digest is not None and last.digest != states.digest(self.value)
        if is_other or last.is_deleted != (self.value is None):
            return f"state key {self.key!r} has a different value in its history"
        states.live[self.root_id] = states.live.get(self.root_id, 0) + (self.value is not None)
        sealed = states.schemas.get((self.root_id, self.key))
        if sealed is None or self.value is None:
            return None
        schema = seen.codec.unseal(sealed, context=rule_context(self.root_id, self.key))
        fits = states.validators(seen.codec).require_fit
        return _refusal(fits, schema, self.key, seen.codec.decode(self.value))

    def add(self, into: Import) -> Op[None]:
        """Add the entry."""
        into.insert(ADD_ENTRY, self.row(into.codec))
        yield from ()


def _refusal(check: Callable[..., object], *arguments: Any) -> str | None:
    """Return why a check refuses what it is given, or None."""
    try:
        check(*arguments)
    except InvalidArgument as error:
        return str(error)
    return None


class _Last(NamedTuple):
    sequence: int = 0
    version: int = 0
    base: int = 0
    is_deleted: bool = False
    digest: bytes | None = None


@dataclass(slots=True)
class _States:
    keys: Kept[str, int] = kept(int)
    live: Kept[str, int] = kept(int)
    floors: Kept[str, int] = kept(int)
    least_versions: Kept[str, int] = kept(int)
    sequences: Kept[str, int] = kept(int)
    last: Kept[tuple[str, str], _Last] = kept(_Last)
    documents: Kept[str, int] = kept(int)
    requests: KeptSet[tuple[str, str]] = kept_set()
    schemas: Kept[tuple[str, str], bytes | None] = kept(bytes | None, SCHEMAS_IN_MEMORY)
    """The schema of each key that has a rule, sealed."""
    _validators: Validators | None = None
    _secret: bytes = field(default_factory=partial(os.urandom, 32))

    def digest(self, value: bytes | None) -> bytes | None:
        """Return what stands for a value, and says nothing about it."""
        return None if value is None else hashlib.blake2b(value, key=self._secret).digest()

    def validators(self, codec: Codec) -> Validators:
        """Return the validators of the schemas of this group."""
        if self._validators is None:
            self._validators = Validators(codec)
        return self._validators

    def is_next(self, root_id: str, sequence: int) -> bool:
        """Whether an event is in order; above the floor none may be missing."""
        last = self.sequences.get(root_id, 0)
        return last <= sequence <= max(last, self.floors[root_id]) + 1


def _of_tree(kind: type[Record], table: str, **after: int | str) -> tuple[type[Record], OwnedRows]:
    owned = OwnedRows(kind.selected(), table, "root_id = {owner}", after, owner="TEXT")
    return kind, owned


# Which rows of a tree are exported, in which order.
EXPORTED = (
    _of_tree(StateRecord, "hf_state", root_id=""),
    _of_tree(StateRuleRecord, "hf_state_rules", key=""),
    _of_tree(StateEventRecord, "hf_state_events", sequence=0, key=""),
    _of_tree(StateEntryRecord, "hf_state_entries", key=""),
)
ADD_STATE = Insert(
    "hf_state",
    StateRecord.columns(),
    """
    ON CONFLICT (root_id) DO UPDATE SET keys = excluded.keys, floor = excluded.floor,
        forgotten_version = CASE WHEN hf_state.forgotten_version > excluded.forgotten_version
            THEN hf_state.forgotten_version ELSE excluded.forgotten_version END,
        least_version = CASE WHEN hf_state.forgotten_version > excluded.least_version
            THEN hf_state.forgotten_version ELSE excluded.least_version END
    """,
)
ADD_EVENT = Insert("hf_state_events", StateEventRecord.columns())
ADD_ENTRY = Insert("hf_state_entries", StateEntryRecord.columns())
ADD_RULE = Insert("hf_state_rules", StateRuleRecord.columns())
# A deleted tree of this id may have a higher sequence than the file; the gap cannot be read.
RAISE_IMPORTED_FLOOR = f"""
UPDATE hf_state SET floor = {TREE_SEQUENCE.format(root_id=":root_id")}
WHERE root_id = :root_id AND floor < {TREE_SEQUENCE.format(root_id=":root_id")}
    AND coalesce((
        SELECT max(e.sequence) FROM hf_state_events e WHERE e.root_id = :root_id
    ), 0) < {TREE_SEQUENCE.format(root_id=":root_id")}
"""  # noqa: S608


class StatePortable(Portable):
    """State is exported with its tree and its history, without recorded conflicts."""

    records = (StateRecord, StateRuleRecord, StateEventRecord, StateEntryRecord)

    def export(self, out: Export) -> Op[None]:
        """Write the state of each tree: its rules, its events, and then its entries."""
        for kind, owned in EXPORTED:
            yield from read_each(owned, sorted(out.root_ids), kind.to(out))

    def finish(self, into: Import) -> Op[None]:
        """Raise the floor of trees whose earlier sequence here was higher."""
        for root_id in into.of(_States).keys:
            yield from rows(RAISE_IMPORTED_FLOOR, root_id=root_id)

    def problem_at_end(self, seen: Seen) -> str | None:
        """Check that every key with a history has an entry, and the number of keys."""
        states = seen.of(_States)
        for root_id, sequence in states.sequences.items():
            if sequence > sequence_of(seen, root_id):
                return f"the state of tree {root_id!r} has events beyond its sequence"
        for root_id, key in states.last:
            if key:
                return f"state key {key!r} of tree {root_id!r} has no entry"
        for root_id, count in states.keys.items():
            if states.live.get(root_id, 0) != count:
                return f"the state of tree {root_id!r} does not have {count} keys"
        return None
