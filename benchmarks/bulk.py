"""Fills a new store with very many rows in a short time, straight into its tables.

What is written is what the operations would have written, sealed by the store's own codec, so that
`doctor` finds nothing and every operation works on it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg

import holdfast
from holdfast.checkpoints.keys import VERSIONS
from holdfast.checkpoints.lines import Ref, checkpoint_context, write_items, write_manifest
from holdfast.codec import Codec
from holdfast.effects.requests import scope_of

BIG = "big"
"""The session with many versions, many events in its tree, many effects and much spend."""
WIDE_NUMBER = 1
"""The number of the session with many sessions below it, each with its call and its pause."""
CHILD_EVERY = 5
AGENTS = ("writer", "editor", "reader", "checker")
RARE = "rare"
RARE_ROWS = 5
QUEUES_MAX = 1_000
MODELS = ("small", "large")
NANO_USD = 1_000
ROWS_PER_COMMIT = 1_000

Rows: TypeAlias = Iterator[Sequence[Any]]
Part: TypeAlias = tuple[str, Sequence[str], Rows]
"""A table, its columns, and rows for it."""


def session_id(number: int) -> str:
    """Return the id of the n-th session; the first eight characters differ in all of them."""
    return f"{number * 2_654_435_761 % 2**32:08x}-{number}"


def effect_id(number: int) -> str:
    """Return the id of the n-th effect."""
    return f"{session_id(number)}-effect"


def item_id(number: int) -> str:
    """Return the id of the n-th work item."""
    return f"{session_id(number)}-item"


def is_below(number: int) -> bool:
    """Whether the n-th session is a child of the wide one; the others are roots."""
    return number % CHILD_EVERY == 3


def root_id(number: int) -> str:
    """Return the id of the root of the n-th session."""
    return session_id(WIDE_NUMBER if is_below(number) else number)


def is_rare(number: int, size: int) -> bool:
    """Whether a row is one of the few of its kind, spread over the table."""
    return number % (size // RARE_ROWS) == 0


def queues(size: int) -> int:
    """Return how many queues have items that are ready."""
    return min(QUEUES_MAX, size // 10)


@dataclass(frozen=True, slots=True)
class Filling:
    """What a store of one size holds: so many sessions, events, effects, items, and versions."""

    codec: Codec
    size: int
    now_ms: int
    more_events: int = 0
    """How many events the big tree has beside those of its versions."""

    @property
    def big_number(self) -> int:
        """The number of the big session, which is the last one."""
        return self.size + 1

    def parts(self) -> Iterator[Part]:
        """Return the rows of every table, in an order that its references allow."""
        yield "hf_trees", ("root_id", "position"), self._trees()
        yield "hf_sessions", SESSION_COLUMNS, self._sessions()
        yield "hf_events", EVENT_COLUMNS, self._events()
        yield "hf_lines", ("base",), iter([(0,)])
        yield "hf_uses", ("line_id", "session_number"), iter([(1, self.big_number)])
        yield "hf_items", ("key", "count", "data"), self._items()
        yield "hf_checkpoints", CHECKPOINT_COLUMNS, self._checkpoints()
        yield "hf_effects", EFFECT_COLUMNS, self._effects()
        yield "hf_spend", SPEND_COLUMNS, self._spend()
        yield "hf_spend_totals", TOTAL_COLUMNS, self._totals()
        yield "hf_work", WORK_COLUMNS, self._work()
        yield "hf_asks", ASK_COLUMNS, self._asks()
        yield "hf_pauses", PAUSE_COLUMNS, self._pauses()
        yield "hf_state_conflicts", CONFLICT_COLUMNS, self._conflicts()
        yield "hf_writers", ("id", "batch", "updated_at"), self._writers()

    @property
    def _children(self) -> int:
        """How many sessions are below the wide one."""
        return sum(map(is_below, range(1, self.size + 1)))

    def _pack(self, value: Any, *context: str) -> bytes:
        return self.codec.pack(value, context=context)

    def _trees(self) -> Rows:
        for number in range(1, self.size + 1):
            if not is_below(number):
                yield session_id(number), self._children + 1 if number == WIDE_NUMBER else 1
        yield BIG, self.size + 1 + self.more_events

    def _sessions(self) -> Rows:
        times = (self.now_ms,) * 3
        for number in range(1, self.size + 1):
            id = session_id(number)
            agent, status = AGENTS[number % len(AGENTS)], "completed" if number % 3 else "active"
            if is_rare(number, self.size):
                agent, status = RARE, "failed"
            empty = self._pack({}, "hf_sessions", id)
            parent_id = root_id(number) if is_below(number) else None
            yield id, parent_id, root_id(number), agent, status, 0, number, empty, *times
        empty = self._pack({}, "hf_sessions", BIG)
        yield BIG, None, BIG, "writer", "active", self.size, self.big_number, empty, *times

    def _events(self) -> Rows:
        places = itertools.count(2)
        owners = [(session_id(number), root_id(number)) for number in range(1, self.size + 1)]
        for id, root in (*owners, (BIG, BIG)):
            created = {"name": None, "parent_id": None if root == id else root, "agent": None}
            data = self._pack(created, "hf_events", root)
            yield root, 1 if root == id else next(places), id, "session_created", data, self.now_ms
        for version in range(1, self.size + 1):
            data = self._pack({"version": version, "kind": "turn"}, "hf_events", BIG)
            yield BIG, version + 1, BIG, "checkpoint_saved", data, self.now_ms
        data = self._pack({"id": "bench", "model": MODELS[0]}, "hf_events", BIG)
        for position in range(self.size + 2, self.size + 2 + self.more_events):
            yield BIG, position, BIG, "spend_recorded", data, self.now_ms

    def _items(self) -> Rows:
        bodies = [self.codec.encode(f"message {number}") for number in range(self.size)]
        yield from write_items(self.codec, 1, 0, [], bodies).rows

    def _checkpoints(self) -> Rows:
        for version in range(1, self.size + 1):
            key = self.big_number * VERSIONS + version
            kind = "manual_checkpoint" if is_rare(version, self.size) else "turn"
            body = write_manifest(self.codec, {"messages": Ref(1, version)})
            sealed = self.codec.seal(body, context=checkpoint_context(key, "manifest"))
            yield key, 1, kind, 0, sealed, self.now_ms - self.size + version

    def _effects(self) -> Rows:
        for number in range(1, self.size + 1):
            id = effect_id(number)
            # Half of them belong to the big session, at the version of that number.
            root_above = root_id(number) if is_below(number) else None
            owner = (number, session_id(number), root_above)
            owner = (self.big_number, BIG, None) if number % 2 else owner
            is_few = is_rare(number, self.size)
            rare = number * RARE_ROWS // self.size
            status = ("failed", "unknown", "issued")[rare % 3] if is_few else "completed"
            result = self._pack(number, "hf_effects", id, "result")
            is_open = status == "issued"
            yield (
                id,
                scope_of(owner[1]),
                f"key {number}",
                f"call {number}",
                *owner,
                number if number % 2 else 0,
                RARE if is_few else "search",
                f"digest {number}",
                f"idempotency {number}",
                self._pack({}, "hf_effects", id, "arguments"),
                status,
                {"failed": "raised", "unknown": "owner_died"}.get(status),
                result if status == "completed" else None,
                self.now_ms + 3_600_000 if is_open else None,
                self.now_ms,
                None if is_open else self.now_ms,
                *EFFECT_DEFAULTS,
            )

    def _spend(self) -> Rows:
        for number in range(1, self.size + 1):
            state = "uncertain" if is_rare(number, self.size) else "settled"
            model = MODELS[number // 2 % len(MODELS)]
            # Half of it is the big session's.
            owner = (number, session_id(number), root_id(number))
            owner = (self.big_number, BIG, BIG) if number % 2 else owner
            figures = (model, "agent", state, 10, 5, NANO_USD)
            yield f"spend {number}", *owner, *figures, *self._times

    @property
    def _times(self) -> tuple[int, int]:
        return self.now_ms, self.now_ms

    def _totals(self) -> Rows:
        counts: Counter[tuple[str, str, str]] = Counter()
        for _, number, _, root_id, model, _, state, *_ in self._spend():
            counts[f"session {number}", model, state] += 1
            counts[f"tree {root_id}", model, state] += 1
        for (scope, model, state), count in counts.items():
            figures = (count, count * 10, count * 5, count * NANO_USD, 0)
            yield scope, model, "agent", state, *figures

    def _work(self) -> Rows:
        """Nine of ten items are finished; the others wait, run, or have to be looked at."""
        states = ("pending", "scheduled", "in_progress", "in_progress", "review")
        for number in range(1, self.size + 1):
            id = item_id(number)
            state = "cancelled" if number % 30 == 1 else "completed"
            if number % 10 == 0:
                state = states[number // 10 % len(states)]
            is_few = is_rare(number, self.size)
            if is_few:
                state = "failed"
            queue = f"queue {number // 50 % queues(self.size)}"
            is_held = state == "in_progress"
            is_final = state in {"completed", "failed", "cancelled"}
            # Half of the finished ones are the big session's.
            owner = (self.big_number, BIG, BIG) if number % 2 else (None, None, None)
            yield (
                id,
                *owner,
                RARE if is_few else "send",
                RARE if is_few else queue,
                state,
                "retry",
                f"worker {number % 50}" if is_held else None,
                self.now_ms + 3_600_000 if is_held else None,
                self.now_ms if is_held else None,
                self.now_ms if is_held else None,
                self.now_ms + 3_600_000 if is_held else None,
                3,
                self._pack(None, "hf_work", id, "input"),
                self.now_ms + 86_400_000 if state == "scheduled" else self.now_ms,
                self.now_ms,
                self.now_ms if is_final else None,
                self.now_ms,
                0,
                int(is_held or is_final),
            )

    def _asks(self) -> Rows:
        """One call of each session; one in ten is open, and a few were answered by an error."""
        for number in range(1, self.size + 1):
            id, is_few = session_id(number), is_rare(number, self.size)
            state = "error" if is_few else "open" if number % 10 == 1 else "ok"
            stored: dict[str, Any] = {"status": state, "result": None, "artifacts": []}
            at = None if state == "open" else self.now_ms
            yield (
                id,
                number,
                id,
                root_id(number),
                RARE if is_few else AGENTS[0],
                state,
                300_000,
                self.now_ms + 300_000,
                self._pack(None, "hf_asks", id, "input"),
                self._pack(None, "hf_asks", id, "correlation"),
                None if at is None else self._pack(stored, "hf_asks", id, "answer"),
                self.now_ms,
                at,
                at,
            )

    def _pauses(self) -> Rows:
        """One pause of each session; one in ten waits, and a few are ready."""
        for number in range(1, self.size + 1):
            id, is_few = session_id(number), is_rare(number, self.size)
            state = "ready" if is_few else "waiting" if number % 10 == 1 else "closed"
            context = self._pack(None, "hf_pauses", id, "context")
            agent, reason = (RARE, "approval") if is_few else (AGENTS[0], "peers")
            closed_at = self.now_ms if state == "closed" else None
            owner = (number, id, root_id(number))
            told = (agent, reason, state, 0, 1, 0, context)
            yield id, *owner, 1, *told, self.now_ms, closed_at

    def _conflicts(self) -> Rows:
        """One refused write in each tree, the last of them just now."""
        for number in range(1, self.size + 1):
            id, at = root_id(number), self.now_ms - 500 * (self.size - number)
            if id != session_id(number):
                continue
            yield id, 1, "plan", 1, 2, 1, int(number % 3 > 0), id, at

    def _writers(self) -> Rows:
        for number in range(1, self.size + 1):
            yield f"writer {number}", number, self.now_ms - number


SESSION_COLUMNS = (
    "id", "parent_id", "root_id", "agent", "status", "version", "head", "metadata", "created_at",
    "updated_at", "last_resumed_at",
)  # fmt: skip
EVENT_COLUMNS = ("root_id", "position", "session_id", "kind", "data", "created_at")
CHECKPOINT_COLUMNS = ("key", "epoch", "kind", "state_sequence", "manifest", "created_at")
EFFECT_COLUMNS = (
    "id", "scope", "key", "call_id", "session_number", "session_id", "root_above",
    "issued_version", "tool", "request_digest", "idempotency_key", "arguments", "status",
    "reason", "result", "lease_expires_at", "issued_at", "ended_at",
    "generation", "effect", "is_irreversible", "attempt", "timeout_ms", "settle_ms",
)  # fmt: skip
EFFECT_DEFAULTS = (1, "mutate", 0, 1, 10_000, 0)
SPEND_COLUMNS = (
    "id", "session_number", "session_id", "root_id", "model", "source", "state", "input_tokens",
    "output_tokens", "nano_usd", "created_at", "updated_at",
)  # fmt: skip
TOTAL_COLUMNS = (
    "scope", "model", "source", "state", "attempts", "input_tokens", "output_tokens", "nano_usd",
    "unpriced",
)  # fmt: skip
CONFLICT_COLUMNS = (
    "root_id", "number", "key", "expected", "current", "attempt", "is_retried", "session_id",
    "created_at",
)  # fmt: skip
ASK_COLUMNS = (
    "id", "session_number", "session_id", "root_id", "agent", "state", "timeout_ms", "deadline_at",
    "input", "correlation", "answer", "created_at", "answered_at", "closed_at",
)  # fmt: skip
PAUSE_COLUMNS = (
    "id", "session_number", "session_id", "root_id", "generation", "agent", "reason", "state",
    "keeps_rest", "open_asks", "ok_asks", "context", "created_at", "closed_at",
)  # fmt: skip
WORK_COLUMNS = (
    "id", "session_number", "session_id", "root_id", "type", "queue", "state", "on_crash", "holder",
    "lease_expires_at", "lease_acquired_at", "heartbeat_at", "sweep_at", "max_retries", "input",
    "available_at", "created_at", "completed_at", "updated_at", "priority", "fence",
)  # fmt: skip


def fill(store: holdfast.Store, size: int, events: int = 0) -> None:
    """Fill a store that has no rows yet; with `events`, it has so many of them, or more."""
    more = max(events - 2 * size - 1, 0)
    filling = Filling(store.runtime.codec, size, store.now_ms(), more)
    target: Any = store.runtime.target
    if store.runtime.driver.dialect == "sqlite":
        _insert(store, filling)
    else:
        _copy(target.dsn, target.schema, filling)


def _insert(store: holdfast.Store, filling: Filling) -> None:
    driver: Any = store.runtime.driver
    for table, columns, rows in filling.parts():
        marks = ", ".join("?" * len(columns))
        text = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
        with driver.twin().bulk() as connection:
            connection.executemany(text, rows)


def _copy(dsn: str, schema: str, filling: Filling) -> None:
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        for table, columns, rows in filling.parts():
            text = f'COPY "{schema}".{table} ({", ".join(columns)}) FROM STDIN'
            # Events of one transaction only would be a store that nobody has.
            while some := list(itertools.islice(rows, ROWS_PER_COMMIT)):
                with cursor.copy(text.encode()) as copy:
                    for row in some:
                        copy.write_row(row)
                connection.commit()
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as connection:
        for table in {table for table, _, _ in filling.parts()}:
            connection.execute(f'VACUUM ANALYZE "{schema}".{table}'.encode())
