"""Writing shared state: one transaction reads the keys it needs, changes them and adds events.

The tree is locked first, so values cannot change between read and write, and sequences are dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..checkpoints.diff import same
from ..codec import Codec
from ..errors import KeyNotFound, LimitExceeded, RequestMismatch, VersionConflict
from ..feed.events import ADVANCE_SEQUENCE, TREE_SEQUENCE, sequence_event
from ..kernel.operation import Batch, Deferred, Lock, Op, Query, Row, Runtime
from ..kernel.sql import given
from ..leases import Keeper
from ..sessions.access import LOCK_SESSION, Place, require_fence, require_open
from .records import Entry
from .requests import KeyedRequest
from .rules import GIVEN_KEYS, HAS_RULES, NO_RULE, Rule, read_rules, resolved
from .values import MISSING, DocumentOperation, Mutation, applied

# A value up to this size is stored with every event, a larger one every STEPS_MAX events.
WHOLE_BYTES_MAX = 256
STEPS_MAX = 32

# All that a write of one key needs; a write of several keys, or of all, reads them separately.
LOOK = f"""
SELECT s.status, s.holder, s.fence, :now AS now,
    {TREE_SEQUENCE.format(root_id=":root_id")} AS sequence,
    h.keys, h.forgotten_version, h.least_version,
    {HAS_RULES.format(root_id=":root_id")} AS has_rules,
    e.key, e.version, e.value, e.base, e.steps, e.updated_by, e.updated_at
FROM ({LOCK_SESSION}) AS s
LEFT JOIN hf_state AS h ON h.root_id = :root_id
LEFT JOIN hf_state_entries AS e ON e.root_id = :root_id AND e.key = :key
"""  # noqa: S608
ENTRY_COLUMNS = "key, version, value, sequence, base, steps, updated_by, updated_at"
READ_ENTRIES = f"""
SELECT {ENTRY_COLUMNS} FROM hf_state_entries WHERE {GIVEN_KEYS}
"""  # noqa: S608
READ_ALL_ENTRIES = f"""
SELECT {ENTRY_COLUMNS} FROM hf_state_entries WHERE root_id = :root_id ORDER BY key
"""  # noqa: S608
ADD_ENTRY = """
INSERT INTO hf_state_entries (
    root_id, key, version, value, sequence, base, steps, updated_by, created_at, updated_at
) VALUES (
    :root_id, :key, :version, :value, :sequence, :base, :steps, :updated_by, :at, :at
)
"""
CHANGE_ENTRY = """
UPDATE hf_state_entries SET
    version = :version, value = :value, sequence = :sequence, base = :base, steps = :steps,
    updated_by = :updated_by, updated_at = :at,
    created_at = CASE WHEN value IS NULL THEN :at ELSE created_at END
WHERE root_id = :root_id AND key = :key
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
    """Return the context that the encrypted value of an entry is bound to."""
    return "hf_state_entries", root_id, key


def event_context(root_id: str, sequence: int, key: str, column: str) -> tuple[str, ...]:
    """Return the context that an encrypted value of an event is bound to."""
    return "hf_state_events", root_id, str(sequence), key, column


class KeySlot(msgspec.Struct):
    """A key as read, and then as changed by the transaction."""

    version: int = 0
    body: bytes | None = None
    """The value, encoded, or as it is stored while it is `sealed`; None if there is none."""
    value: Any = MISSING
    base: int = 0
    steps: int = 0
    sequence: int = 0
    """The sequence of the last mutation of this transaction that changed it, or 0."""
    updated_by: str | None = None
    updated_at: int | None = None
    is_stored: bool = False
    """Whether the table has a row of it, if only a tombstone."""
    is_sealed: bool = False

    @property
    def current_version(self) -> int:
        """The version that a compare-and-swap sees: 0 while the key does not exist."""
        return 0 if self.body is None else self.version


class StateWrite(msgspec.Struct):
    """The state of a tree while one transaction changes it."""

    runtime: Runtime
    place: Place
    item_id: str | None = None
    request: KeyedRequest | None = None
    reason: str | None = None
    """Why a person writes it, for the feed."""
    at: int = 0
    """The time of all its writes, taken once the tree was locked."""
    sequence: int = 0
    keys: int = 0
    forgotten_version: int = 0
    least_version: int = 0
    _sequence_before: int = 0
    _keys_before: int | None = None
    _slots: dict[str, KeySlot] = {}
    _events: list[dict[str, Any]] = []
    _told: list[dict[str, Any]] = []
    """The data of the feed's events."""
    _rules: dict[str, Rule] = {}

    def begin(self, keys: Iterable[str] | None) -> Op[int | None]:
        """Lock the tree and read these keys, or all; return an earlier equal request's sequence.

        Raises SessionEnded, LeaseLost, or RequestMismatch if the earlier request differs.
        """
        place, root_id = self.place, self.place.root_id
        wanted = None if keys is None else list(dict.fromkeys(keys))
        only = wanted[0] if wanted is not None and len(wanted) == 1 else ""
        # Whether the tree is there is seen by its session.
        commands: list[Query | Lock] = [Lock(root_id, is_asked=False)]
        if place.guard is not None:
            commands += Keeper.of(self.runtime).looks(place.guard)
        look = {"root_id": root_id, "number": place.number, "key": only}
        commands.append(Query(LOOK, look))
        if not only:
            commands.append(_reading(root_id, wanted))
        if self.request is not None:
            asked = {"root_id": root_id, "idempotency_key": self.request.key}
            commands.append(Query(FIND_REQUEST, asked))
        _, *answers = yield Batch(commands)
        if place.guard is not None:
            answers = Keeper.of(self.runtime).require(place.guard, answers)
        if self.request is not None and answers[-1]:
            return self._repeated(answers[-1][0])
        head = require_open(place, answers[0])
        require_fence(place, head)
        self.sequence = self._sequence_before = head["sequence"]
        self.at, self._keys_before = head["now"], head["keys"]
        self.keys = head["keys"] or 0
        self.forgotten_version = head["forgotten_version"] or 0
        self.least_version = head["least_version"] or 0
        for row in answers[0] if only else answers[1]:
            if row["key"] is not None:
                self._slots[row["key"]] = self._slot(row)
        if head["has_rules"]:
            self._rules = yield from read_rules(self.runtime.codec, root_id, wanted)
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
        # A value that is only replaced is not opened.
        slot = KeySlot(row["version"], row["value"], MISSING, row["base"], row["steps"])
        slot.updated_by, slot.updated_at = row["updated_by"], row["updated_at"]
        slot.is_stored = slot.is_sealed = True
        return slot

    def slot(self, key: str) -> KeySlot:
        """Return a key that was read, or an empty one."""
        found = self._slots.get(key)
        return found if found is not None else self._slots.setdefault(key, KeySlot())

    def rule(self, key: str) -> Rule:
        """Return the rule of a key that was read."""
        return self._rules.get(key, NO_RULE)

    def value(self, key: str) -> Any:
        """Return the value of a key, or MISSING."""
        slot = self.slot(key)
        if slot.value is MISSING and slot.body is not None:
            slot.value = self._opened(key, slot)
        return slot.value

    def _opened(self, key: str, slot: KeySlot) -> Any:
        assert slot.body is not None
        if not slot.is_sealed:
            return self.runtime.codec.decode(slot.body)
        context = entry_context(self.place.root_id, key)
        return self.runtime.codec.unpack(slot.body, context=context)

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
            deleted_version=slot.version if value is MISSING and slot.version else None,
            updated_by=slot.updated_by,
            updated_at=slot.updated_at,
            **more,
        )

    def apply_all(
        self, mutations: Sequence[Mutation], if_unchanged: Mapping[str, int]
    ) -> list[Entry]:
        """Apply mutations in order, all or none; return what each left."""
        codec, entries = self.runtime.codec, []
        self.require(if_unchanged)
        for position, mutation in enumerate(mutations):
            slot, expected = self.slot(mutation.key), mutation.if_version
            if expected is not None and expected != slot.current_version:
                raise _conflict(self, mutations, position)
            is_new = slot.body is None
            # A number costs nothing to tell twice; a long list would.
            previous = self.value(mutation.key) if mutation.operation == "increment" else MISSING
            self.mutate(mutation)
            entry = Entry(
                key=mutation.key,
                value=_own(codec, slot.value, slot.body),
                version=slot.version,
                sequence=self.sequence,
                updated_by=self.place.session_id,
                updated_at=self.at,
                is_deleted=slot.body is None,
                is_created=is_new,
                previous=None if previous is MISSING else previous,
            )
            entries.append(entry)
        return entries

    def mutate(self, mutation: Mutation) -> None:
        """Change one key: one event."""
        if mutation.operation == "reduce":
            mutation = resolved(mutation, self.rule(mutation.key))
        key, operation, argument = mutation.key, mutation.operation, None
        slot = self.slot(key)
        if operation == "delete" and slot.body is None:
            raise KeyNotFound(
                f"there is no key {key!r} in the state of {self.place.root_id}", key=key
            )
        self.sequence += 1
        if operation in {"set", "delete"}:
            after = applied(mutation, MISSING)
        else:
            argument = self._sealed(mutation.argument, key, "argument")
            after = applied(mutation, self.value(key))
        self._put(key, slot, after, operation, argument)
        self._told.append(
            {
                "sequence": self.sequence,
                "operation": operation,
                "key": key,
                "version": slot.version,
            }
        )

    def write_document(
        self, operation: DocumentOperation, wanted: Mapping[str, Any], argument: Any = None
    ) -> None:
        """Replace the state by a document: one event, and a new version of each changed key."""
        self.sequence += 1
        sealed = None if argument is None else self._sealed(argument, "", "argument")
        self._add_event("", operation, 0, sealed, None, 0, is_deleted=0)
        self._told.append({"sequence": self.sequence, "operation": operation})
        for key in sorted(self._slots.keys() | wanted.keys()):
            slot, after = self.slot(key), wanted.get(key, MISSING)
            if not self._is_same(key, slot, after):
                self._put(key, slot, after, operation, None)

    def _is_same(self, key: str, slot: KeySlot, after: Any) -> bool:
        if after is MISSING or slot.body is None:
            return after is MISSING and slot.body is None
        return same(after, self._opened(key, slot))

    def _put(
        self, key: str, slot: KeySlot, after: Any, operation: str, argument: bytes | None
    ) -> None:
        """Set the new value of a key, and add its row to the event at the current sequence."""
        codec, existed = self.runtime.codec, slot.body is not None
        if self._rules and after is not MISSING:
            self.rule(key).require_fit(self.runtime, key, after)
        least = 0 if existed else self.forgotten_version
        slot.version = max(slot.version, least, self.least_version) + 1
        slot.value, slot.sequence = after, self.sequence
        slot.body = body = None if after is MISSING else codec.encode(after, name=key)
        slot.is_sealed = False
        self.keys += (body is not None) - existed
        is_whole = (
            argument is None
            or not existed
            or self.request is not None
            or slot.steps + 1 >= STEPS_MAX
            or len(body or b"") <= WHOLE_BYTES_MAX
        )
        slot.base, slot.steps = (self.sequence, 0) if is_whole else (slot.base, slot.steps + 1)
        value = None
        if is_whole and body is not None:
            context = event_context(self.place.root_id, self.sequence, key, "value")
            value = codec.seal(body, context=context)
        version, is_deleted = slot.version, int(body is None)
        self._add_event(key, operation, version, argument, value, slot.base, is_deleted=is_deleted)

    def _sealed(self, value: Any, key: str, column: str) -> bytes:
        context = event_context(self.place.root_id, self.sequence, key, column)
        return self.runtime.codec.pack(value, context=context, name=key or "document")

    def _add_event(
        self,
        key: str,
        operation: str,
        version: int,
        argument: bytes | None,
        value: bytes | None,
        base: int,
        *,
        is_deleted: int,
    ) -> None:
        request = self.request
        self._events.append(
            {
                "root_id": self.place.root_id,
                "sequence": self.sequence,
                "key": key,
                "operation": operation,
                "version": version,
                "argument": argument,
                "value": value,
                "base": base,
                "is_deleted": is_deleted,
                "session_id": self.place.session_id,
                "item_id": self.item_id,
                "idempotency_key": None if request is None or self._events else request.key,
                "request_digest": None if request is None else request.digest,
                "at": self.at,
            }
        )

    def flush(self) -> Deferred:
        """Return the command that writes everything."""
        codec, place, root_id = self.runtime.codec, self.place, self.place.root_id
        most = codec.limits.keys_per_root
        if self.keys > most and self.keys > (self._keys_before or 0):
            raise LimitExceeded(
                f"the state of {root_id} would have {self.keys:,} keys; the limit is "
                f"{most:,} (Limits.keys_per_root); nothing was changed",
                limit=most,
                actual=self.keys,
            )
        advance = {"root_id": root_id, "count": self.sequence - self._sequence_before}
        statements = [Query(ADVANCE_SEQUENCE, advance)]
        if self.keys != self._keys_before:
            statements.append(Query(COUNT_KEYS, {"root_id": root_id, "keys": self.keys}))
        for row in self.entry_rows():
            is_stored = self._slots[row["key"]].is_stored
            statements.append(Query(CHANGE_ENTRY if is_stored else ADD_ENTRY, row))
        statements += [Query(ADD_STATE_EVENT, row) for row in self._events]
        if self.reason is not None:
            for told in self._told:
                told["reason"] = self.reason
        writer = place.session_id
        emits = [
            sequence_event(codec, root_id, writer, "state_changed", told) for told in self._told
        ]
        return Deferred(statements, emits)

    def event_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the events so far."""
        yield from ({**each} for each in self._events)

    def entry_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of changed keys."""
        root_id = self.place.root_id
        for key, slot in self._slots.items():
            if not slot.sequence:
                continue
            value = slot.body
            if value is not None:
                value = self.runtime.codec.seal(value, context=entry_context(root_id, key))
            yield {
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


def _reading(root_id: str, keys: Sequence[str] | None) -> Query:
    if keys is None:
        return Query(READ_ALL_ENTRIES, {"root_id": root_id})
    return Query(READ_ENTRIES, {"root_id": root_id, "keys": given(keys)})


def _own(codec: Codec, value: Any, body: bytes | None) -> Any:
    """Return a value that is independent of the caller's object."""
    if body is None:
        return None
    return codec.decode(body) if type(value) in (list, dict) else value


def _conflict(state: StateWrite, mutations: Sequence[Mutation], position: int) -> VersionConflict:
    """Return the error for the first conflict of a batch, which lists later ones on other keys."""
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
        results.append({"key": each.key, "status": "not_applied"})
        if is_conflict:
            found = state.conflict(each.key, each.if_version or 0).fields
            told = ("current_version", "expected_version", "current_value")
            results[-1] |= {"status": "conflict", **{name: found[name] for name in told}}
        touched.add(each.key)
    return state.conflict(first.key, expected, results=results)
