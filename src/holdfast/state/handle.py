"""`session.state`: the state shared by a whole tree of sessions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..access.audit import record
from ..arguments import (
    require_limit,
    require_seconds,
    require_text,
    require_whole,
)
from ..errors import InvalidArgument, LimitExceeded, VersionConflict
from ..feed.follow import EVENTS_PER_READ, POLL_SECONDS, POLL_SECONDS_MAX, Page, follow, page_of
from ..kernel.flow import (
    Flow,
    Stream,
    Wait,
    flow,
    invoke,
    perform,
    require_function,
    served,
    stream,
)
from ..kernel.operation import C, Op, large_query, operation, query, rows
from ..kernel.signals import TREE_TOPIC
from ..records import SessionRef
from ..sessions import SessionPart
from ..sessions.rows import require_root
from ..wire import travels
from . import read
from .conflicts import list_conflicts, record_conflict, recorded
from .records import (
    Entry,
    KeyRule,
    StateChange,
    StateConflict,
    StateDiff,
    StateEvent,
    StateSnapshot,
    StateSummary,
)
from .requests import KeyedRequest, request_digest
from .retention import compact
from .rules import Reducer, delete_rule, list_rules, require_rule, set_rule
from .values import (
    VERSION_MAX,
    Asked,
    DocumentOperation,
    Mutation,
    checked,
    parsed,
    patched,
    require_if_version,
    require_key,
    require_operators,
)
from .write import StateWrite

UPDATE_RETRIES = 3
REASON_CHARACTERS_MAX = 1_000
UPDATE_RETRIES_MAX = 100
UPDATE_RETRY_SECONDS = 0.1
PAGE_MAX = 1_000
SUMMARY_KEYS, SUMMARY_BYTES, SUMMARY_BYTES_MAX = 10, 2_000, 1_000_000


@travels
class State(SessionPart[C]):
    """The shared state of a session's tree; the same for every session in it.

    Every mutation is durable when its call returns: one event with the next sequence, and a new
    version of each key that it changed. Versions of a key never repeat.
    """

    def __repr__(self) -> str:
        return f"<State of {self.root_id}>"

    @query
    def get(self, key: str, default: Any = None) -> Op[Any]:
        """Return the value of a key, or the default if it does not exist."""
        entry = yield from read.read_entry(self.runtime.codec, self.root_id, require_key(key))
        return default if entry is None else entry.value

    @query
    def entry(self, key: str, *, at_sequence: int | None = None) -> Op[Entry | None]:
        """Return a key with its version and writer, now or as of a sequence, or None."""
        place = (self.runtime.codec, self.root_id, require_key(key))
        if at_sequence is None:
            return (yield from read.read_entry(*place))
        require_whole("at_sequence", at_sequence, 0, VERSION_MAX)
        return (yield from read.past_entry(*place, at_sequence))

    @query
    def _entry_of_session(self, key: str) -> Op[Entry | None]:
        """Return a key; raise SessionNotFound if the session was deleted, although its tree lives.

        For servers, which are given ids: a read and the look for its session are one statement.
        """
        session = self._session
        place = SessionRef(session.id, session.number, session.root_id)
        return (yield from read.read_entry_of_session(self.runtime.codec, place, require_key(key)))

    @query
    def entries(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        updated_by: object = None,
        since: int = 0,
        at_sequence: int | None = None,
        limit: int = 100,
        values: bool = False,
    ) -> Op[list[Entry]]:
        """Return a page of existing keys, sorted; values are read only if they are wanted.

        With `updated_by`, those that it wrote last; with `since`, those changed after a sequence;
        with `at_sequence`, all of this as of that sequence, so that pages fit together.
        """
        require_limit(limit, PAGE_MAX)
        for each in (prefix, after):
            if each:
                require_key(each)
        given: dict[str, Any] = {
            "prefix": prefix,
            "after": after or "",
            "updated_by": _writer(updated_by),
            "since": require_whole("since", since, 0, VERSION_MAX),
            "limit": limit,
            "values": values,
        }
        place = self.runtime.codec, self.root_id
        if at_sequence is None:
            return (yield from read.list_entries(*place, **given))
        at = require_whole("at_sequence", at_sequence, 0, VERSION_MAX)
        return (yield from read.list_past_entries(*place, at, **given))

    @query
    def keys(self, *, updated_by: object = None) -> Op[list[str]]:
        """Return the existing keys, sorted; with `updated_by`, those it wrote last."""
        writer = _writer(updated_by)
        found = yield from rows(read.LIST_KEYS, root_id=self.root_id, updated_by=writer)
        if not found:
            yield from require_root(self.root_id)
        return [row["key"] for row in found]

    @query
    def version(self) -> Op[int]:
        """Return the version of the whole state: the sequence of its last mutation, or 0."""
        return (yield from read.read_head(self.root_id))[0]

    @large_query
    def snapshot(self, at_sequence: int | None = None) -> Op[StateSnapshot]:
        """Return all keys, now or as of a sequence. Raises Compacted below the floor."""
        if at_sequence is not None:
            require_whole("at_sequence", at_sequence, 0, VERSION_MAX)
        return (yield from read.snapshot(self.runtime.codec, self.root_id, at_sequence))

    @query
    def history(
        self, key: str, *, after: int = 0, before: int | None = None, limit: int = 100
    ) -> Op[list[Entry]]:
        """Return the entry after each change of a key, newest first.

        `after` and `before` are sequences that the changes lie between.
        """
        require_limit(limit, PAGE_MAX)
        require_whole("after", after, 0, VERSION_MAX)
        bound = VERSION_MAX if before is None else require_whole("before", before, 1, VERSION_MAX)
        place = (self.runtime.codec, self.root_id, require_key(key))
        return (yield from read.history(*place, after, bound, limit))

    @query
    def events(self, *, after: int = 0, limit: int = 100) -> Op[list[StateEvent]]:
        """Return mutations after a sequence, oldest first. Raises Compacted below the floor."""
        require_whole("after", after, 0, VERSION_MAX)
        require_limit(limit, PAGE_MAX)
        return (yield from read.events(self.runtime.codec, self.root_id, after, limit))

    @query
    def changes(self, *, after: int = 0, limit: int = 100) -> Op[list[StateChange]]:
        """Return what `events` returns, each with the keys that it changed as it left them."""
        require_whole("after", after, 0, VERSION_MAX)
        require_limit(limit, PAGE_MAX)
        return (yield from read.changes(self.runtime.codec, self.root_id, after, limit))

    @large_query
    def diff(self, before: int, after: int) -> Op[StateDiff]:
        """Compare the state at two sequences."""
        for label, sequence in (("before", before), ("after", after)):
            require_whole(label, sequence, 0, VERSION_MAX)
        return (yield from read.diff(self.runtime.codec, self.root_id, before, after))

    @query
    def summary(
        self, max_keys: int = SUMMARY_KEYS, max_bytes: int = SUMMARY_BYTES
    ) -> Op[StateSummary]:
        """Return the most recently written keys that fit into `max_bytes` of JSON."""
        require_whole("max_keys", max_keys, 1, PAGE_MAX)
        require_whole("max_bytes", max_bytes, 2, SUMMARY_BYTES_MAX)
        return (yield from read.summary(self.runtime.codec, self.root_id, max_keys, max_bytes))

    @query
    def conflicts(self, *, before: int | None = None, limit: int = 100) -> Op[list[StateConflict]]:
        """Return version conflicts, newest first."""
        require_limit(limit, PAGE_MAX)
        bound = VERSION_MAX if before is None else require_whole("before", before, 1, VERSION_MAX)
        return (yield from list_conflicts(self.root_id, bound, limit))

    @recorded
    def set(
        self,
        key: str,
        value: Any,
        *,
        if_version: int | None = None,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
        reason: str | None = None,
    ) -> Op[Entry]:
        """Set a key.

        With `if_version=0` only if it does not exist, with n only if it is at version n; otherwise
        VersionConflict is raised, with the current version and value. With a `reason`, for a person
        who corrects a value, the event tells it, and the audit trail who it was.
        """
        given = (if_unchanged, idempotency_key, if_version, reason)
        return self._mutate("set", key, value, *given)

    @recorded
    def delete(
        self,
        key: str,
        *,
        if_version: int | None = None,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[Entry]:
        """Delete a key, or raise NotFound. A later version is higher than the one returned."""
        return self._mutate("delete", key, None, if_unchanged, idempotency_key, if_version)

    @recorded
    def increment(
        self,
        key: str,
        delta: float = 1,
        *,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[Entry]:
        """Add to a number; a missing key starts at 0."""
        return self._mutate("increment", key, delta, if_unchanged, idempotency_key)

    @recorded
    def append(
        self,
        key: str,
        items: list[Any],
        *,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[Entry]:
        """Append items to a list; a missing key starts empty."""
        return self._mutate("append", key, items, if_unchanged, idempotency_key)

    @recorded
    def merge(
        self,
        key: str,
        patch: dict[str, Any],
        *,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[Entry]:
        """Merge a patch into an object (RFC 7396): null removes a member."""
        return self._mutate("merge", key, patch, if_unchanged, idempotency_key)

    @recorded
    def add(
        self,
        key: str,
        item: Any,
        *,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[Entry]:
        """Add a member to a set, which is a list without equal members."""
        return self._mutate("add", key, item, if_unchanged, idempotency_key)

    @recorded
    def remove(
        self,
        key: str,
        item: Any,
        *,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[Entry]:
        """Remove a member from a set, if it is present."""
        return self._mutate("remove", key, item, if_unchanged, idempotency_key)

    @recorded
    def reduce(
        self,
        key: str,
        value: Any,
        *,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[Entry]:
        """Change a key by the reducer of its rule, or raise NotFound if it has none."""
        return self._mutate("reduce", key, value, if_unchanged, idempotency_key)

    @recorded
    def batch(
        self,
        operations: Sequence[Any],
        *,
        if_unchanged: Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Op[list[Entry]]:
        """Apply operations in order, all or none: `{"op": "set", "key": "k", "value": 1}`.

        VersionConflict.results has the status of each, `conflict` or `not_applied`.
        """
        most = self.runtime.codec.limits.batch_operations
        if isinstance(operations, str | bytes) or not isinstance(operations, Sequence):
            raise InvalidArgument("batch takes a list of operations")
        if not 0 < len(operations) <= most:
            raise LimitExceeded(
                f"a batch has 1 to {most:,} operations (Limits.batch_operations), not "
                f"{len(operations):,}",
                limit=most,
                actual=len(operations),
            )
        mutations = [parsed(each, position) for position, each in enumerate(operations, 1)]
        return (yield from self._apply(mutations, if_unchanged, idempotency_key))

    @recorded
    def initialize(
        self, document: dict[str, Any], *, idempotency_key: str | None = None
    ) -> Op[StateSnapshot]:
        """Give a state without keys its first document, or raise VersionConflict."""
        return (yield from self._write("init", _document(document), None, idempotency_key))

    @recorded
    def replace(
        self,
        document: dict[str, Any],
        *,
        if_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Op[StateSnapshot]:
        """Replace the whole state by a document; `if_version` is that of the whole state."""
        return (
            yield from self._write("full_replace", _document(document), if_version, idempotency_key)
        )

    @recorded
    def patch(
        self,
        document: dict[str, Any],
        *,
        if_version: int | None = None,
        deep: bool = True,
        operators: bool = False,
        idempotency_key: str | None = None,
    ) -> Op[StateSnapshot]:
        """Merge a document into the whole state (RFC 7396): null deletes a key.

        With `deep=False` the values of keys are replaced, not merged. With `operators`, a value may
        be `{"$append": […]}`, `{"$increment": n}`, `{"$set": value}` or `{"$delete": true}`.
        """
        require_operators(_document(document) if operators else {})
        given = (_document(document), if_version, idempotency_key)
        return (yield from self._write("patch", *given, deep=deep, operators=operators))

    @recorded
    def restore(self, at_sequence: int, *, idempotency_key: str | None = None) -> Op[StateSnapshot]:
        """Restore the value of every key as of a sequence, under new versions."""
        require_whole("at_sequence", at_sequence, 0, VERSION_MAX)
        return (yield from self._write("restore", at_sequence, None, idempotency_key))

    @stream
    def watch(self, *, after: int = 0, poll_seconds: float = POLL_SECONDS) -> Stream[StateEvent]:
        """Yield mutations after a sequence as they are committed, once and in order, endlessly.

        Raises Compacted below the floor.
        """
        sequence = attrgetter("sequence")
        yield from self._follow("state", State.events, sequence, after, poll_seconds)

    @stream
    def watch_changes(
        self, *, after: int = 0, poll_seconds: float = POLL_SECONDS
    ) -> Stream[StateChange]:
        """Do what `watch` does, and give with each mutation what it left."""
        sequence = attrgetter("event.sequence")
        yield from self._follow("changes", State.changes, sequence, after, poll_seconds)

    def _follow(
        self, name: str, read: Any, sequence: Callable[[Any], int], after: int, seconds: float
    ) -> Stream[Any]:
        require_whole("after", after, 0, VERSION_MAX)
        require_seconds("poll_seconds", seconds, POLL_SECONDS_MAX, may_be_least=False)

        def next_page(after: int) -> Flow[Page[int, Any]]:
            found = yield from perform(read, self, after=after, limit=EVENTS_PER_READ)
            return page_of(found, sequence, after)

        feed, topic = f"{name} {self.root_id}", TREE_TOPIC + self.root_id
        yield from follow(self.runtime, feed, topic, next_page, after, seconds)

    @flow
    def update(
        self, key: str, function: Callable[[Any], Any], *, retries: int = UPDATE_RETRIES
    ) -> Flow[Entry]:
        """Set a key to `function(value)`; the value is None if the key does not exist.

        If another writer was faster, the function is called again with the new value, with backoff
        from 100 ms and jitter. Raises VersionConflict when no retries are left.
        """
        require_key(key)
        require_function("what update calls", function)
        require_whole("retries", retries, 0, UPDATE_RETRIES_MAX)
        for attempt in range(1, retries + 2):
            entry = yield from perform(State.entry, self, key)
            value = yield from invoke(function, None if entry is None else entry.value)
            version = 0 if entry is None else entry.version
            try:
                return (yield from perform(State.set, self, key, value, if_version=version))
            except VersionConflict as conflict:
                is_last = attempt > retries
                yield from record_conflict(self._session, conflict, attempt, not is_last)
                if is_last:
                    raise
            pause = UPDATE_RETRY_SECONDS * 2 ** (attempt - 1)
            yield Wait(pause * (0.5 + random.random()))
        raise AssertionError("a last attempt returns or raises")

    @served
    def compact(self, before: int) -> Flow[int]:
        """Remove history before a sequence, in short transactions; return the number of rows.

        Afterwards, the state at that sequence is the oldest that can be read.
        """
        require_whole("before", before, 0, VERSION_MAX)
        return (yield from compact(self.runtime, self.root_id, before))

    @operation
    def set_rule(
        self, key: str, *, schema: dict[str, Any] | None = None, reducer: Reducer | None = None
    ) -> Op[None]:
        """Set the rule of a key: a JSON Schema that every value must match, a reducer, or both.

        It replaces the key's rule. Raises InvalidValue if the current value does not match.
        """
        rule = require_rule(self.runtime.codec, require_key(key), schema, reducer)
        yield from set_rule(self._draft(None, None), key, rule)

    @operation
    def delete_rule(self, key: str) -> Op[None]:
        """Remove the rule of a key, or raise NotFound. The value is unchanged."""
        yield from delete_rule(self._draft(None, None), require_key(key))

    @query
    def rules(self) -> Op[list[KeyRule]]:
        """Return all rules, sorted by key."""
        return (yield from list_rules(self.runtime.codec, self.root_id))

    def _mutate(
        self,
        operation: Asked,
        key: str,
        argument: Any,
        if_unchanged: Mapping[str, int] | None,
        idempotency_key: str | None,
        if_version: int | None = None,
        reason: str | None = None,
    ) -> Op[Entry]:
        if reason is not None:
            require_text("reason", reason, REASON_CHARACTERS_MAX)
        asked = Mutation(operation=operation, key=key, argument=argument, if_version=if_version)
        [entry] = yield from self._apply([checked(asked)], if_unchanged, idempotency_key, reason)
        if reason is not None:
            told = (f"{self.root_id} {key}", f"version {entry.version}")
            yield from record(self.runtime.actor, "state_set", *told)
        return entry

    def _apply(
        self,
        mutations: Sequence[Mutation],
        if_unchanged: Mapping[str, int] | None,
        idempotency_key: str | None,
        reason: str | None = None,
    ) -> Op[list[Entry]]:
        unchanged, asked = _versions(if_unchanged), None
        if idempotency_key is not None:
            parts = (
                [each.operation, each.key, each.argument, each.if_version] for each in mutations
            )
            asked = [unchanged, *parts]
        draft = self._draft(idempotency_key, asked)
        draft.reason = None if reason is None else self.runtime.redactor.redact(reason)
        known = yield from draft.begin([*(each.key for each in mutations), *unchanged])
        if known is None:
            entries = draft.apply_all(mutations, unchanged)
            yield draft.flush()
            return entries
        return (yield from read.entries_from(self.runtime.codec, self.root_id, mutations, known))

    def _write(
        self,
        operation: DocumentOperation,
        given: Any,
        if_version: int | None,
        idempotency_key: str | None,
        **how: bool,
    ) -> Op[StateSnapshot]:
        require_if_version(if_version)
        write = self._draft(idempotency_key, [operation, given, if_version, how])
        known = yield from write.begin(None)
        if known is None:
            if if_version not in {None, write.sequence}:
                raise self._document_conflict(write, if_version, f"version {if_version}")
            if operation == "init" and write.keys:
                raise self._document_conflict(write, 0, "a version without keys")
            wanted, argument = given, None
            if operation == "patch":
                wanted, argument = patched(write.document(), given, **how), given
            elif operation == "restore":
                old = yield from read.snapshot(self.runtime.codec, self.root_id, given)
                wanted, argument = old.document, given
            write.write_document(operation, wanted, argument)
            yield write.flush()
        return (yield from read.snapshot(self.runtime.codec, self.root_id, known))

    def _document_conflict(
        self, write: StateWrite, expected: int | None, wanted: str
    ) -> VersionConflict:
        return VersionConflict(
            f"the state of {self.root_id} is at version {write.sequence}, and was expected at "
            f"{wanted}; nothing was changed",
            key=None,
            current_version=write.sequence,
            expected_version=expected,
            current_value=write.document(),
        )

    def _draft(self, idempotency_key: str | None, asked: Any) -> StateWrite:
        session, request = self._session, None
        item_id = None if session.item is None else session.item.id
        if idempotency_key is not None:
            require_text("idempotency_key", idempotency_key)
            request = KeyedRequest(idempotency_key, request_digest(self.runtime.codec, asked))
        return StateWrite(self.runtime, session._place, item_id, request)


def _writer(given: object) -> str | None:
    """Return the id of a session that was given as itself or by its id."""
    id = getattr(given, "id", given)
    return None if id is None else require_text("updated_by", id)


def _versions(given: object) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument("if_unchanged must be a dict of key to version")
    for key, version in given.items():
        require_key(key)
        require_whole(f"if_unchanged[{key!r}]", version, 0, VERSION_MAX)
    return dict(given)


def _document(given: object) -> dict[str, Any]:
    if type(given) is not dict:
        raise InvalidArgument(f"the document must be a dict of keys, not {type(given).__name__}")
    for key in given:
        require_key(key)
    return given
