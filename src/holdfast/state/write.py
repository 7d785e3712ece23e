"""Writing shared state: one transaction reads the keys it needs, changes them and adds events.

The tree is locked first, so what was read is still so when it is written, and sequences are dense.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checkpoints.diff import same
from ..codec import Codec
from ..errors import LimitExceeded, NotFound, RequestMismatch, VersionConflict
from ..feed.events import ADVANCE_SEQUENCE, TREE_SEQUENCE, event
from ..kernel.operation import Lock, Op, Query, Row, Runtime, batch
from ..leases import Keeper
from ..sessions.access import LOCK_SESSION, Place, require_fence, require_open
from .records import Entry
from .requests import KeyedRequest
from .rules import HAS_RULES, NO_RULE, Rule, read_rules, resolved
from .values import MISSING, DocumentOperation, Mutation, applied

# A value this small is kept with every event; of a larger one every so many steps.
WHOLE_BYTES_MAX = 256
STEPS_MAX = 32

HEAD = f"""
SELECT {TREE_SEQUENCE.format(root_id=":root_id")} AS sequence,
    s.keys, s.floor, s.forgotten_version, s.least_version, :now AS now,
    {HAS_RULES.format(root_id=":root_id")} AS has_rules
FROM (SELECT 1) AS one LEFT JOIN hf_state s ON s.root_id = :root_id
"""  # noqa: S608
ENTRY_COLUMNS = "key, version, value, sequence, base, steps, updated_by, updated_at"
READ_ENTRY = f"""
SELECT {ENTRY_COLUMNS} FROM hf_state_entries WHERE root_id = :root_id AND key = :key
"""  # noqa: S608
READ_ENTRIES = f"""
SELECT {ENTRY_COLUMNS} FROM hf_state_entries WHERE root_id = :root_id AND key IN (
    SELECT key FROM json_each(CAST(:keys AS TEXT) /*pg ::json */)
)
"""  # noqa: S608
READ_ALL_ENTRIES = f"""
SELECT {ENTRY_COLUMNS} FROM hf_state_entries WHERE root_id = :root_id ORDER BY key
"""  # noqa: S608
WRITE_ENTRY = """
INSERT INTO hf_state_entries (
    root_id, key, version, value, sequence, base, steps, updated_by, created_at, updated_at
) VALUES (
    :root_id, :key, :version, :value, :sequence, :base, :steps, :updated_by, :at, :at
)
ON CONFLICT (root_id, key) DO UPDATE SET
    version = excluded.version, value = excluded.value, sequence = excluded.sequence,
    base = excluded.base, steps = excluded.steps, updated_by = excluded.updated_by,
    updated_at = excluded.updated_at,
    created_at = CASE WHEN hf_state_entries.value IS NULL
        THEN excluded.created_at ELSE hf_state_entries.created_at END
"""
COUNT_KEYS = """
INSERT INTO hf_state (root_id, keys) VALUES (:root_id, :keys)
ON CONFLICT (root_id) DO UPDATE SET keys = excluded.keys
"""
ADD_STATE_EVENT = """
INSERT INTO hf_state_events (
    root_id, sequence, key, operation, version, argument, value, base, is_deleted, session_id,
    item_id, idempotency_key, request_digest, created_at
) VALUES (
    :root_id, :sequence, :key, :operation, :version, :argument, :value, :base, :is_deleted,
    :session_id, :item_id, :idempotency_key, :request_digest, :at
)
"""
FIND_REQUEST = """
SELECT sequence, request_digest FROM hf_state_events
WHERE root_id = :root_id AND idempotency_key = :idempotency_key
"""


def entry_context(root_id: str, key: str) -> tuple[str, ...]:
    """Return what the value of an entry is bound to."""
    return "hf_state_entries", root_id, key


def event_context(root_id: str, sequence: int, key: str, column: str) -> tuple[str, ...]:
    """Return what a value of an event is bound to."""
    return "hf_state_events", root_id, str(sequence), key, column


@dataclass(slots=True)
class KeySlot:
    """A key as it is stored, and what the transaction makes of it."""

    version: int = 0
    body: bytes | None = None
    """The value, encoded; None if there is none."""
    value: Any = MISSING
    base: int = 0
    steps: int = 0
    sequence: int = 0
    """Of the mutation in this transaction that changed it last."""

    @property
    def current_version(self) -> int:
        """The version that a compare-and-swap sees: 0 while the key does not exist."""
        return 0 if self.body is None else self.version


@dataclass(slots=True)
class StateWrite:
    """The state of a tree while one transaction changes it."""

    runtime: Runtime
    place: Place
    item_id: str | None = None
    request: KeyedRequest | None = None
    at: int = 0
    """The time of all that it writes, taken once the tree was locked."""
    sequence: int = 0
    keys: int = 0
    forgotten_version: int = 0
    least_version: int = 0
    _keys_before: int | None = None
    _slots: dict[str, KeySlot] = field(default_factory=dict)
    _events: list[dict[str, Any]] = field(default_factory=list)
    _rules: dict[str, Rule] = field(default_factory=dict)

    def begin(self, keys: Sequence[str] | None) -> Op[int | None]:
        """Lock the tree and read these keys, or all; return the sequence of an equal request.

        Raises SessionEnded, LeaseLost, or RequestMismatch if the request is another.
        """
        place, keeper = self.place, Keeper.of(self.runtime)
        root = {"root_id": place.root_id}
        known = []
        if self.request is not None:
            known = [Query(FIND_REQUEST, {**root, "idempotency_key": self.request.key})]
        _, *answers = yield from batch(
            Lock(place.root_id),
            *keeper.looks(place.guard),
            Query(LOCK_SESSION, {"number": place.number}),
            Query(HEAD, root),
            _reading(place.root_id, keys),
            *known,
        )
        session, [head], entries, *found = keeper.require(place.guard, answers)
        if found and found[0]:
            return self._repeated(found[0][0])
        require_fence(place, require_open(place, session))
        self.sequence, self.at, self._keys_before = head["sequence"], head["now"], head["keys"]
        self.keys = head["keys"] or 0
        self.forgotten_version = head["forgotten_version"] or 0
        self.least_version = head["least_version"] or 0
        for row in entries:
            self._slots[row["key"]] = self._slot(row)
        if head["has_rules"]:
            self._rules = yield from read_rules(self.runtime.codec, place.root_id, keys)
        return None

    def _repeated(self, row: Row) -> int:
        assert self.request is not None
        if row["request_digest"] != self.request.digest:
            raise RequestMismatch(
                f"idempotency key {self.request.key!r} belongs to another change of the state of "
                f"{self.place.root_id}; nothing was changed",
                key=self.request.key,
            )
        return int(row["sequence"])

    def _slot(self, row: Row) -> KeySlot:
        slot = KeySlot(version=row["version"], base=row["base"], steps=row["steps"])
        if row["value"] is not None:
            context = entry_context(self.place.root_id, row["key"])
            slot.body = self.runtime.codec.unseal(row["value"], context=context)
        return slot

    def slot(self, key: str) -> KeySlot:
        """Return a key that was read, or an empty one."""
        found = self._slots.get(key)
        return found if found is not None else self._slots.setdefault(key, KeySlot())

    def rule(self, key: str) -> Rule:
        """Return what writes of a key that was read keep to."""
        return self._rules.get(key, NO_RULE)

    def value(self, key: str) -> Any:
        """Return the value of a key, or MISSING."""
        slot = self.slot(key)
        if slot.value is MISSING and slot.body is not None:
            slot.value = self.runtime.codec.decode(slot.body)
        return slot.value

    def document(self) -> dict[str, Any]:
        """Return every key that was read and exists."""
        return {key: self.value(key) for key, slot in self._slots.items() if slot.body is not None}

    def require(self, versions: Mapping[str, int]) -> None:
        """Raise VersionConflict unless these keys have these versions."""
        for key, version in versions.items():
            if self.slot(key).current_version != version:
                raise self.conflict(key, version)

    def conflict(self, key: str, expected: int, **more: object) -> VersionConflict:
        """Return the error for a key that has another version."""
        slot, value = self.slot(key), self.value(key)
        current = slot.current_version
        stands = f"is at version {current}" if current else "does not exist"
        wanted = f"version {expected}" if expected else "not to exist"
        return VersionConflict(
            f"{key!r} {stands}, and was expected {'at ' if expected else ''}{wanted}; nothing was "
            "changed",
            key=key,
            current_version=current,
            expected_version=expected,
            current_value=None if value is MISSING else value,
            **more,
        )

    def mutate(self, mutation: Mutation) -> None:
        """Change one key: one event."""
        mutation = resolved(mutation, self.rule(mutation.key))
        key, slot = mutation.key, self.slot(mutation.key)
        before = self.value(key)
        if mutation.operation == "delete" and before is MISSING:
            raise NotFound(f"there is no key {key!r} in the state of {self.place.root_id}", key=key)
        self.sequence += 1
        argument = None
        if mutation.operation not in {"set", "delete"}:
            argument = self._sealed(mutation.argument, key, "argument")
        after = applied(mutation, before)
        self._put(key, slot, after, mutation.operation, argument)

    def write_document(
        self, operation: DocumentOperation, wanted: Mapping[str, Any], argument: Any = None
    ) -> None:
        """Make the state this document: one event, and a new version for each key that changes."""
        self.sequence += 1
        sealed = None if argument is None else self._sealed(argument, "", "argument")
        self._add_event("", operation, 0, argument=sealed, value=None, base=0, is_deleted=0)
        for key in sorted(self._slots.keys() | wanted.keys()):
            slot, after = self.slot(key), wanted.get(key, MISSING)
            if not self._is_same(slot, after):
                self._put(key, slot, after, operation, None)

    def _is_same(self, slot: KeySlot, after: Any) -> bool:
        if after is MISSING or slot.body is None:
            return after is MISSING and slot.body is None
        return same(after, self.runtime.codec.decode(slot.body))

    def _put(
        self, key: str, slot: KeySlot, after: Any, operation: str, argument: bytes | None
    ) -> None:
        """Note the new value of a key, and its row of the event at the current sequence."""
        existed = slot.body is not None
        if after is not MISSING:
            self.rule(key).require_fit(self.runtime, key, after)
        least = 0 if existed else self.forgotten_version
        slot.version = max(slot.version, least, self.least_version) + 1
        slot.value, slot.sequence = after, self.sequence
        slot.body = None if after is MISSING else self.runtime.codec.encode(after, name=key)
        self.keys += (slot.body is not None) - existed
        is_whole = (
            argument is None
            or not existed
            or self.request is not None
            or slot.steps + 1 >= STEPS_MAX
            or len(slot.body or b"") <= WHOLE_BYTES_MAX
        )
        slot.base, slot.steps = (self.sequence, 0) if is_whole else (slot.base, slot.steps + 1)
        value = None
        if is_whole and slot.body is not None:
            context = event_context(self.place.root_id, self.sequence, key, "value")
            value = self.runtime.codec.seal(slot.body, context=context)
        is_deleted = int(slot.body is None)
        self._add_event(
            key,
            operation,
            slot.version,
            argument=argument,
            value=value,
            base=slot.base,
            is_deleted=is_deleted,
        )

    def _sealed(self, value: Any, key: str, column: str) -> bytes:
        context = event_context(self.place.root_id, self.sequence, key, column)
        return self.runtime.codec.pack(value, context=context, name=key or "document")

    def _add_event(self, key: str, operation: str, version: int, **fields: Any) -> None:
        request = self.request
        self._events.append(
            {
                "root_id": self.place.root_id,
                "sequence": self.sequence,
                "key": key,
                "operation": operation,
                "version": version,
                "session_id": self.place.session_id,
                "item_id": self.item_id,
                "idempotency_key": None if request is None or self._events else request.key,
                "request_digest": None if request is None else request.digest,
                "at": self.at,
                **fields,
            }
        )

    def flush(self) -> Op[None]:
        """Write everything."""
        most = self.runtime.codec.limits.keys_per_root
        if self.keys > most and self.keys > (self._keys_before or 0):
            raise LimitExceeded(
                f"the state of {self.place.root_id} would have {self.keys:,} keys; the limit is "
                f"{most:,} (Limits.keys_per_root); nothing was changed",
                limit=most,
                actual=self.keys,
            )
        root_id = self.place.root_id
        count = len({each["sequence"] for each in self._events})
        statements = [Query(ADVANCE_SEQUENCE, {"root_id": root_id, "count": count})]
        if self.keys != self._keys_before:
            statements.append(Query(COUNT_KEYS, {"root_id": root_id, "keys": self.keys}))
        statements += [Query(WRITE_ENTRY, each) for each in self.entry_rows()]
        statements += [Query(ADD_STATE_EVENT, each) for each in self._events]
        yield from batch(*statements)
        parts = {each["sequence"] for each in self._events if not each["key"]}
        for each in self._events:
            if not each["key"] or each["sequence"] not in parts:
                yield self._feed_event(each)

    def event_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the events so far."""
        yield from ({**each} for each in self._events)

    def entry_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the keys that were changed."""
        yield from (self._entry_row(key) for key, slot in self._slots.items() if slot.sequence)

    def _entry_row(self, key: str) -> dict[str, Any]:
        slot, root_id = self._slots[key], self.place.root_id
        value = None
        if slot.body is not None:
            value = self.runtime.codec.seal(slot.body, context=entry_context(root_id, key))
        return {
            "root_id": root_id,
            "key": key,
            "version": slot.version,
            "value": value,
            "sequence": slot.sequence,
            "base": slot.base,
            "steps": slot.steps,
            "updated_by": self.place.session_id,
            "at": self.at,
        }

    def _feed_event(self, each: Mapping[str, Any]) -> Any:
        told = {name: each[name] for name in ("sequence", "operation")}
        if each["key"]:
            told |= {"key": each["key"], "version": each["version"]}
        place = self.place
        return event(self.runtime.codec, place.root_id, place.session_id, "state_changed", told)


def _reading(root_id: str, keys: Iterable[str] | None) -> Query:
    if keys is None:
        return Query(READ_ALL_ENTRIES, {"root_id": root_id})
    wanted = list(dict.fromkeys(keys))
    if len(wanted) == 1:
        return Query(READ_ENTRY, {"root_id": root_id, "key": wanted[0]})
    return Query(READ_ENTRIES, {"root_id": root_id, "keys": json.dumps(dict.fromkeys(wanted))})


def mutate_all(
    state: StateWrite, mutations: Sequence[Mutation], if_unchanged: Mapping[str, int]
) -> Op[list[Entry] | int]:
    """Apply mutations in order, all or none; the sequence of an equal request that came before."""
    known = yield from state.begin([*(each.key for each in mutations), *if_unchanged])
    if known is not None:
        return known
    state.require(if_unchanged)
    done: list[tuple[str, Any, int, int, bytes | None]] = []
    for position, mutation in enumerate(mutations):
        slot = state.slot(mutation.key)
        if mutation.if_version not in {None, slot.current_version}:
            raise _conflict(state, mutations, position)
        state.mutate(mutation)
        done.append((mutation.key, slot.value, slot.version, state.sequence, slot.body))
    yield from state.flush()
    by, at = state.place.session_id, state.at
    return [
        Entry(
            key=key,
            value=_own(state.runtime.codec, value, body),
            version=version,
            sequence=sequence,
            updated_by=by,
            updated_at=at,
            is_deleted=body is None,
        )
        for key, value, version, sequence, body in done
    ]


def _own(codec: Codec, value: Any, body: bytes | None) -> Any:
    """Return a value that shares nothing with what the caller gave."""
    if body is None:
        return None
    return codec.decode(body) if type(value) in (list, dict) else value


def _conflict(state: StateWrite, mutations: Sequence[Mutation], position: int) -> VersionConflict:
    """Return the error for the first conflict of a batch; later ones on other keys are told too."""
    first = mutations[position]
    expected = first.if_version or 0
    if len(mutations) == 1:
        return state.conflict(first.key, expected)
    results: list[dict[str, Any]] = []
    touched: set[str] = set()
    for number, each in enumerate(mutations):
        current = state.slot(each.key).current_version
        is_conflict = number == position or (
            number > position and each.key not in touched and each.if_version not in {None, current}
        )
        told = {"status": "conflict", "current_version": current} if is_conflict else {}
        results.append({"key": each.key, "status": "not_applied", **told})
        touched.add(each.key)
    return state.conflict(first.key, expected, results=results)
