"""Every documented filter is answered along an index: ten times the rows are no more work.

The work is counted, not timed: steps of SQLite's machine, and rows that PostgreSQL has read.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apsw
import psycopg
import pytest

import holdfast
from benchmarks import bulk
from benchmarks.bulk import BIG, RARE, session_id
from holdfast.access import AccessNoun
from holdfast.checkpoints.keys import ITEMS, VERSIONS
from holdfast.checkpoints.removal import prunable
from holdfast.effects.noun import UNREACHABLE, Pruning
from holdfast.explorations.rows import (
    LIST_EDGES,
    LIST_FINDINGS,
    LIST_STATES,
    LIST_STEPS,
    Explorations,
)
from holdfast.feed import positions_of
from holdfast.feed.follow_all import AllTreesReader
from holdfast.feed.places import HorizonPlace
from holdfast.kernel.commit_settlement import (
    FORGET_OLDEST_WRITERS,
    FORGET_WRITERS,
    WRITER_KEPT_MS,
    WRITERS_LOOKED_AT,
)
from holdfast.kernel.nouns import Noun, Retention
from holdfast.kernel.operation import Op, one, rows
from holdfast.kernel.owned_rows import OwnedRows
from holdfast.kernel.sql import Dialect
from holdfast.peers import PeersNoun
from holdfast.peers.answers import find_due
from holdfast.peers.noun import find_old
from holdfast.records import SessionRef
from holdfast.replies import RepliesNoun, remembered
from holdfast.replies.noun import FORGET_REPLIES, KEPT_MS
from holdfast.spend.ledger import SpendState
from holdfast.store import NOUNS
from holdfast.work.claims import heartbeat
from holdfast.work.noun import EFFECTS_OF_NO_ITEM, WorkNoun, find_expired

SIZES = (1_000, 10_000)
WIDE = session_id(bulk.WIDE_NUMBER)
TIMES_MAX = 4
# From the sixth time on, PostgreSQL may plan a prepared statement for any values.
ASKED_BEFORE = 6
# Where a few in a hundred fit, PostgreSQL may look through the newest rows for them.
ROWS_MAX = 300
SCHEMA = f"t_listings_{uuid.uuid4().hex[:12]}"
ROWS_READ = """
SELECT sum(seq_tup_read) + sum(coalesce(idx_tup_fetch, 0)) AS rows
FROM pg_stat_xact_user_tables WHERE schemaname = :schema
"""

PLANS = ("force_generic_plan", "force_custom_plan")
PLAN_SO = "SELECT set_config('plan_cache_mode', :mode, true)"

Listing = Callable[[Any, int], Op[Any]]
"""What is asked in a transaction of a store of a size."""


def listed(given: dict[str, Any], tx: Any, _: int) -> Op[Any]:
    return (yield from tx.work.list(**given, limit=10))


def spent(whose: str, state: SpendState | None, tx: Any, _: int) -> Op[Any]:
    big = yield from tx.find_session(BIG)
    if whose == "store":
        return (yield from tx.spends(session=BIG, state=state, limit=10))
    return (yield from big.spends(state=state, limit=10))


def of_wide(what: str, state: str | None, tx: Any, _: int) -> Op[Any]:
    return (yield from getattr(tx, what)(root=WIDE, state=state, limit=10))


def paused(given: dict[str, Any], tx: Any, _: int) -> Op[Any]:
    return (yield from tx.pauses(**given, limit=10))


def of_work(tx: Any, look: Any) -> Op[Any]:
    big = yield from tx.find_session(BIG)
    limit = (100,) if look.__name__ == "cancel" else ()
    return (yield from look(tx.runtime, [SessionRef(BIG, big.number, BIG)], *limit))


LAST_TRANSACTION = """
SELECT transaction_id::text::bigint AS horizon FROM hf_events ORDER BY transaction_id DESC LIMIT 1
"""


def followed(tx: Any, _: int) -> Op[Any]:
    """Read the last events of all trees, of which one has nearly all."""
    reader = AllTreesReader(tx.runtime)
    origin, place = yield from AllTreesReader.begin(reader, None)
    place = yield from place.end()
    if isinstance(place, HorizonPlace):
        last = yield from one(LAST_TRANSACTION)
        assert last is not None
        place = HorizonPlace(last["horizon"])
    return (yield from AllTreesReader.read(reader, origin, place))


LISTINGS: dict[str, Listing] = {
    "find_session(8 characters)": lambda tx, _: tx.find_session(session_id(77)[:8]),
    "find_effect(8 characters)": lambda tx, _: tx.find_effect(bulk.effect_id(77)[:8]),
    "work.find(8 characters)": lambda tx, _: tx.work.find(bulk.item_id(77)[:8]),
    "sessions()": lambda tx, size: tx.sessions(after=size - 100),
    "sessions(newest_first=)": lambda tx, size: tx.sessions(newest_first=True, before=size),
    "sessions(agent=, newest_first=)": lambda tx, _: tx.sessions(agent=RARE, newest_first=True),
    "sessions(status=)": lambda tx, _: tx.sessions(status="failed"),
    "sessions(agent=)": lambda tx, _: tx.sessions(agent=RARE),
    "sessions(agent=, status=)": lambda tx, _: tx.sessions(agent="writer", status="failed"),
    "sessions(root=, status=)": lambda tx, _: tx.sessions(root=BIG, status="active"),
    "sessions(root=), of a wide tree": lambda tx, _: tx.sessions(root=WIDE, limit=10),
    **{
        f"sessions(root=, status={status}), of a wide tree": functools.partial(
            lambda status, tx, _: tx.sessions(root=WIDE, status=status, limit=10), status
        )
        for status in ("active", "failed", "cancelled")
    },
    "sessions(root=, agent=), of a wide tree": lambda tx, _: tx.sessions(root=WIDE, agent=RARE),
    "sessions(root=, agent=, status=), of a wide tree": lambda tx, _: tx.sessions(
        root=WIDE, agent="writer", status="failed"
    ),
    "sessions(root=, agent=), the newest of a wide tree": lambda tx, size: tx.sessions(
        root=WIDE, agent="writer", newest_first=True, before=size, limit=10
    ),
    "effects(status=failed)": lambda tx, _: tx.effects(status="failed"),
    "effects(status=unknown)": lambda tx, _: tx.effects(status="unknown"),
    "effects(status=issued)": lambda tx, _: tx.effects(status="issued"),
    "effects(status=completed)": lambda tx, _: tx.effects(status="completed"),
    "effects(tool=)": lambda tx, _: tx.effects(tool=RARE),
    "effects(tool=, status=)": lambda tx, _: tx.effects(tool=RARE, status="failed"),
    "effects(tool=, status=), rare of a frequent tool": lambda tx, _: tx.effects(
        tool="search", status="failed"
    ),
    "effects(tool=, status=issued)": lambda tx, _: tx.effects(tool="search", status="issued"),
    "effects(session=, status=)": lambda tx, _: tx.effects(session=BIG, status="failed"),
    "effects(session=)": lambda tx, _: tx.effects(session=BIG),
    "effects(key=, tool=)": lambda tx, _: tx.effects(key="key 77", tool="search"),
    "effects(key=, session=)": lambda tx, _: tx.effects(key="key 77", session=BIG),
    "effects(key=, root=)": lambda tx, _: tx.effects(key="key 77", root=WIDE),
    "effects(item=, tool=)": lambda tx, _: tx.effects(item="nobody", tool="search"),
    "effects(item=, session=)": lambda tx, _: tx.effects(item="nobody", session=BIG),
    "effects(root=)": lambda tx, _: tx.effects(root=session_id(77)),
    "effects(root=, status=)": lambda tx, _: tx.effects(root=session_id(77), status="failed"),
    "effects(root=, tool=)": lambda tx, _: tx.effects(root=session_id(77), tool="search"),
    **{
        f"effects(root=, status={status}), of a wide tree": functools.partial(
            lambda status, tx, _: tx.effects(root=WIDE, status=status, limit=10), status
        )
        for status in (None, "issued", "completed", "failed", "unknown")
    },
    "effects(root=), the last of a wide tree": lambda tx, size: tx.effects(
        root=WIDE, after=size * 9 // 10, limit=10
    ),
    "effects(root=, session=)": lambda tx, _: tx.effects(root=BIG, session=BIG, limit=10),
    "effects(key=)": lambda tx, _: tx.effects(key="key 77"),
    "effects(key=), an idempotency key": lambda tx, _: tx.effects(key="idempotency 77"),
    "unresolved()": lambda tx, _: in_big(tx, "unresolved"),
    "pending()": lambda tx, _: in_big(tx, "pending"),
    "recent_calls()": lambda tx, _: in_big(tx, "recent_calls"),
    "spent(tree=True)": lambda tx, _: in_big(tx, "spent", tree=True),
    "spends(state=)": lambda tx, _: tx.spends(state="uncertain"),
    "spends(state=), of which there is none": lambda tx, _: tx.spends(state="failed"),
    **{
        f"{whose}.spends({given}state={state})": functools.partial(spent, whose, state)
        for whose, given in (("session", ""), ("store", "session=, "))
        for state in (None, "open", "uncertain", "failed", "settled")
    },
    "spending(by=session)": lambda tx, _: tx.spending("session", limit=10),
    "costs()": lambda tx, _: of_first(tx, "costs"),
    "child_counts(at_most=)": lambda tx, _: of_first(tx, "child_counts", at_most=10),
    "session.counts(at_most=)": lambda tx, _: in_big(tx, "counts", at_most=10),
    "history()": lambda tx, _: in_big(tx, "history"),
    "checkpoints(kind=)": lambda tx, _: tx.checkpoints(kind="manual_checkpoint", limit=5),
    "follow_all()": followed,
    "events()": lambda tx, size: tx.events(BIG, after=size - 100),
    "work.list()": lambda tx, _: tx.work.list(),
    "work.list(queue=)": lambda tx, _: tx.work.list(queue="queue 7"),
    "work.list(queue=), rare": lambda tx, _: tx.work.list(queue=RARE),
    "work.list(type=)": lambda tx, _: tx.work.list(type=RARE),
    "work.list(queue=, type=)": lambda tx, _: tx.work.list(queue="queue 7", type="send"),
    "work.list(holder=)": lambda tx, _: tx.work.list(holder="nobody"),
    "work.list(session=)": lambda tx, _: tx.work.list(session=BIG),
    "work.list(root=)": lambda tx, _: tx.work.list(root=BIG),
    **{
        f"work.list({', '.join(f'{name}={value}' for name, value in given.items())})": (
            functools.partial(listed, given)
        )
        for status in ("pending", "in_progress", "completed", "failed", "cancelled")
        for given in (
            {"status": status},
            {"status": status, "queue": RARE},
            {"status": status, "type": RARE},
        )
    },
    **{
        f"work.list({owner}=, status={status})": functools.partial(
            listed, {owner: BIG, "status": status}
        )
        for owner in ("session", "root")
        for status in ("pending", "in_progress", "completed", "failed", "cancelled")
    },
    "what the end of a session finds of work": lambda tx, _: of_work(tx, WorkNoun().cancel),
    "what a session is held by of work": lambda tx, _: of_work(tx, WorkNoun().holds),
    "work.counts(at_most=)": lambda tx, _: tx.work.counts(at_most=10),
    "work.health()": lambda tx, _: tx.work.health(at_most=10),
    "what a sweep finds": lambda tx, _: find_expired(tx.runtime, 1_000),
    "what a prune of effects looks at": lambda tx, _: forgettable(tx, UNREACHABLE),
    "what a prune of items' effects looks at": lambda tx, _: forgettable(tx, EFFECTS_OF_NO_ITEM),
    "work.dead()": lambda tx, _: tx.work.dead(),
    "work.why(id), of one that waits": lambda tx, _: tx.work.why(bulk.item_id(100)),
    "what the first write of a connection forgets": lambda *_: rows(
        FORGET_OLDEST_WRITERS, age_ms=WRITER_KEPT_MS, limit=WRITERS_LOOKED_AT
    ),
    "what a prune forgets of writers": lambda *_: rows(
        FORGET_WRITERS, ids='{"nobody": null}', age_ms=1
    ),
    "versions that a prune may remove, late ones": lambda tx, size: prunable(
        Retention(work_ms=0, key_ms=0, effect_ms=0, keep=10),
        size + 1,
        size - 100,
        50,
    ),
    "a heartbeat": lambda *_: heartbeat({20: 1}, 60),
    "tokens.find()": lambda tx, _: tx.tokens.find("hf_unknown"),
    "tokens.list()": lambda tx, size: tx.tokens.list(after=size - 100),
    "tokens.revoke()": lambda tx, _: tx.tokens.revoke(session_id(77)),
    "what a deletion finds of tokens": lambda tx, _: removed(tx, AccessNoun()),
    "audit.list()": lambda tx, size: tx.audit.list(after=size - 100),
    "audit.head()": lambda tx, _: tx.audit.head(),
    "a record of the audit": lambda tx, _: tx.audit.refused("wrong token"),
    "a request that is repeated": lambda tx, _: remembered(
        tx.runtime.codec, "many", "repeated", "digest", tx.audit.head()
    ),
    "what a sweep forgets of replies": lambda *_: rows(FORGET_REPLIES, age_ms=KEPT_MS, limit=100),
    "what a deletion finds of replies": lambda tx, _: removed(tx, RepliesNoun()),
    "asks(state=)": lambda tx, _: tx.asks(state="error"),
    "asks(agent=)": lambda tx, _: tx.asks(agent=RARE),
    "asks(agent=, state=)": lambda tx, _: tx.asks(agent="writer", state="error"),
    "asks(root=)": lambda tx, _: tx.asks(root=session_id(77)),
    **{
        f"{what}(root=, state={state}), of a wide tree": functools.partial(of_wide, what, state)
        for what, states in (
            ("asks", (None, "open", "ok", "error", "timeout")),
            ("pauses", (None, "waiting", "ready", "closed", "cancelled")),
        )
        for state in states
    },
    "asks(root=, agent=)": lambda tx, _: tx.asks(root=session_id(77), agent="writer"),
    "asks(root=, agent=), of a wide tree": lambda tx, _: tx.asks(root=WIDE, agent=RARE),
    **{
        f"pauses({', '.join(f'{name}={value}' for name, value in given.items())})": (
            functools.partial(paused, given)
        )
        for given in (
            {"root": WIDE, "agent": RARE},
            {"root": WIDE, "agent": RARE, "reason": "peers"},
            {"root": WIDE, "agent": "writer", "reason": "time"},
            {"root": WIDE, "reason": "time"},
            {"agent": "writer", "reason": "time"},
        )
    },
    "session.asks()": lambda tx, _: in_big(tx, "asks"),
    "session.asks(last=)": lambda tx, _: in_big(tx, "asks", last=10),
    "session.pauses(last=)": lambda tx, _: in_big(tx, "pauses", last=10),
    "explorations, the newest": lambda tx, _: explorations(tx, "newest"),
    "explorations, the oldest": lambda tx, _: explorations(tx, "list"),
    "steps that found something": lambda *_: rows(LIST_FINDINGS, session=1, limit=10),
    **{
        f"{what} of an exploration": functools.partial(
            lambda text, *_: rows(text, session=1, after=0, limit=10), text
        )
        for what, text in (("states", LIST_STATES), ("steps", LIST_STEPS), ("edges", LIST_EDGES))
    },
    "pauses(state=)": lambda tx, _: tx.pauses(state="ready"),
    "pauses(agent=)": lambda tx, _: tx.pauses(agent=RARE),
    "pauses(root=)": lambda tx, _: tx.pauses(root=session_id(77)),
    "pauses(root=, state=)": lambda tx, _: tx.pauses(root=session_id(77), state="ready"),
    "pauses(reason=)": lambda tx, _: tx.pauses(reason="approval"),
    "pauses(reason=, state=)": lambda tx, _: tx.pauses(reason="peers", state="ready"),
    "find_pause(8 characters)": lambda tx, _: tx.find_pause(session_id(77)[:8]),
    "what a sweep finds of peers": lambda tx, _: find_due(tx.runtime, 100),
    "the events that a deletion empties": lambda *_: positions_of(BIG, [session_id(77)]),
    "what a deletion finds of peers": lambda tx, _: removed(tx, PeersNoun()),
    "what a prune finds of peers": lambda tx, _: find_old(tx.runtime, "asks", 1_000),
    "what the end of a session finds of peers": lambda tx, _: PeersNoun().ended(
        tx.runtime, SessionRef("nobody", 0, "nobody"), "completed"
    ),
    "an answer": lambda tx, _: tx.answer(session_id(77), 1),
    "work.claim()": lambda tx, _: tx.work.claim("w"),
    "work.claim(queues=)": lambda tx, _: tx.work.claim("w", queues=["queue 0", "queue 2"]),
    "work.claim(queues=), 50": lambda tx, _: tx.work.claim(
        "w", queues=[f"queue {number}" for number in range(50)]
    ),
}


# What is not planned anew each time, and what agents and workers ask for all the time.
ASKED_OFTEN = (
    "recent_calls()",
    "unresolved()",
    "pending()",
    "spent(tree=True)",
    "session.counts(at_most=)",
    "history()",
    "events()",
    "follow_all()",
    "an answer",
    "a heartbeat",
    "work.claim()",
    "work.claim(queues=)",
    "work.dead()",
    "work.health()",
    "what a sweep finds",
    "what a sweep finds of peers",
    "what a session is held by of work",
    "what the end of a session finds of work",
    "what the end of a session finds of peers",
)


def explorations(tx: holdfast.Transaction, method: str) -> Op[Any]:
    found: Explorations[Any] = Explorations(tx.runtime)
    return (yield from getattr(found, method)(limit=10))


def in_big(tx: holdfast.Transaction, method: str, **given: Any) -> Op[Any]:
    session = yield from tx.find_session(BIG)
    return (yield from getattr(session, method)(**given))


def of_first(tx: holdfast.Transaction, method: str, **given: Any) -> Op[Any]:
    first = yield from tx.find_session(session_id(1))
    return (yield from getattr(tx, method)([(yield from first.info())], **given))


def removed(tx: holdfast.Transaction, noun: Noun) -> Op[int]:
    return (yield from noun.remove(tx.runtime, [SessionRef("nobody", 0, "nobody")], 100))


LATE = {name: f"'late ' || {name}" for name in ("id", "key", "call_id", "idempotency_key")}
# For each session a row of the tables that have none of it yet; many keys of one tree.
MADE = (
    """
    INSERT INTO hf_tokens (id, name, digest, permission, root_id, created_at)
    SELECT id, id, id, 'read', root_id, created_at FROM hf_sessions
    """,
    """
    INSERT INTO hf_audit (number, actor, action, subject, count, created_at, digest)
    SELECT number, 'local', 'refused', id, 1, created_at, id FROM hf_sessions
    """,
    "INSERT INTO hf_audit_head (id, number, digest) SELECT 1, max(number), '' FROM hf_audit",
    """
    INSERT INTO hf_replies (scope, key, number, digest, outcome, session_id, created_at)
    SELECT 'many', id, 1, id, metadata, id, :now FROM hf_sessions
    """,
    "INSERT INTO hf_lines (base) SELECT 0 FROM hf_sessions",
    "INSERT INTO hf_uses (line_id, session_number) SELECT number, number FROM hf_sessions",
    f"""
    INSERT INTO hf_items (key, count, data)
    SELECT (number + 1) * {ITEMS}, 1, metadata FROM hf_sessions
    """,
    f"""
    INSERT INTO hf_pins (key, reason, created_at)
    SELECT number * {VERSIONS} + 1, metadata, created_at FROM hf_sessions
    """,
    f"""
    INSERT INTO hf_attestations (key, evidence, created_at)
    SELECT number * {VERSIONS} + 1, metadata, created_at FROM hf_sessions
    """,
    """
    INSERT INTO hf_epochs (session_number, epoch, first_version, target_version)
    SELECT number, 1, 1, 1 FROM hf_sessions
    """,
    """
    INSERT INTO hf_effect_sessions (session_number, salt_number) SELECT number, 1 FROM hf_sessions
    """,
    """
    INSERT INTO hf_effect_origins (
        session_number, position, origin_id, origin_number, first_version, last_version
    ) SELECT number, 1, id, number, 1, 1 FROM hf_sessions
    """,
    """
    INSERT INTO hf_artifacts (
        session_number, session_id, name, version, media_type, data, is_returned, created_at
    ) SELECT number, id, 'plan', 1, 'text/plain', metadata, 0, created_at FROM hf_sessions
    """,
    """
    INSERT INTO hf_state_entries (
        root_id, key, version, value, sequence, base, steps, updated_by, created_at, updated_at
    ) SELECT t.root_id, s.id, 1, s.metadata, 1, 1, 0, s.id, s.created_at, s.created_at
    FROM hf_sessions s JOIN hf_trees t ON t.root_id IN (s.id, 'big')
    """,
    """
    INSERT INTO hf_state_rules (root_id, key, reducer, updated_by, updated_at)
    SELECT t.root_id, s.id, 'last', s.id, s.created_at
    FROM hf_sessions s JOIN hf_trees t ON t.root_id IN (s.id, 'big')
    """,
    """
    INSERT INTO hf_work (
        id, type, queue, state, on_crash, max_retries, input, available_at, created_at,
        completed_at, updated_at, priority, fence, session_number, session_id, root_id
    )
    SELECT 'of ' || s.id, w.type, w.queue, w.state, w.on_crash, w.max_retries, w.input,
        w.available_at, w.created_at, w.completed_at, w.updated_at, w.priority, w.fence,
        s.number, s.id, s.root_id
    FROM hf_work w JOIN hf_sessions s ON s.number = w.number WHERE w.state = 'completed'
    """,
    # The newest effects are not those of the session with most.
    f"""
    INSERT INTO hf_effects ({", ".join(bulk.EFFECT_COLUMNS)})
    SELECT {", ".join(LATE.get(name, name) for name in bulk.EFFECT_COLUMNS)}
    FROM hf_effects WHERE session_id <> '{BIG}' AND status = 'completed'
    """,
    """
    INSERT INTO hf_spend (
        id, session_number, session_id, root_id, model, source, state, input_tokens,
        output_tokens, created_at, updated_at
    )
    SELECT 'of ' || id, number, id, root_id, 'small', 'agent', 'settled', 0, 0, created_at,
        created_at
    FROM hf_sessions
    """,
    "INSERT INTO hf_worlds (session_number) SELECT number FROM hf_sessions",
    """
    INSERT INTO hf_world_checkpoints (session_number, id, name, body, created_at)
    SELECT number, id, id, metadata, created_at FROM hf_sessions
    """,
    """
    INSERT INTO hf_world_states (session_number, id, body)
    SELECT number, id, metadata FROM hf_sessions
    """,
    """
    INSERT INTO hf_world_steps (session_number, from_id, candidate, body)
    SELECT number, id, 0, metadata FROM hf_sessions
    """,
    """
    INSERT INTO hf_world_steps (session_number, from_id, candidate, body)
    SELECT 1, id, 1, metadata FROM hf_sessions
    """,
    f"""
    INSERT INTO hf_sessions (
        id, parent_id, root_id, status, head, metadata, created_at, updated_at, last_resumed_at
    )
    SELECT 'below ' || id, '{session_id(1)}', '{session_id(1)}', 'completed', number, metadata,
        created_at, updated_at, last_resumed_at
    FROM hf_sessions
    """,
)
# As autovacuum does.
ANALYZED = tuple(
    f"ANALYZE {table}" for table in dict.fromkeys(re.findall(r"INSERT INTO (\w+)", " ".join(MADE)))
)


def statements_given_keys() -> dict[str, str]:
    """Every statement of a noun that is given keys as JSON, with where it stands."""
    found: dict[str, str] = {}
    for package in dict.fromkeys(type(noun).__module__.rpartition(".")[0] for noun in NOUNS):
        for module in pkgutil.iter_modules(
            importlib.import_module(package).__path__, f"{package}."
        ):
            for name, value in vars(importlib.import_module(module.name)).items():
                for text in texts_of(value):
                    if "json_each(" in text and re.match(r"\s*(SELECT|UPDATE|DELETE)\b", text):
                        found.setdefault(text, f"{module.name} {name} {len(found)}")
    return {name: text for text, name in found.items()}


def texts_of(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case OwnedRows():
            yield value.of_many
        case dict():
            yield from (text for each in value.values() for text in texts_of(each))
        case list() | tuple():
            yield from (text for each in value for text in texts_of(each))


GIVEN = statements_given_keys()
# Beside the keys. Nothing has the number or the id "0".
BESIDE = {
    "root_id": BIG,
    "session": 0,
    "after": 0,
    "upto": 10,
    "last": 10,
    "data": b"",
    "status": "active",
    "raised": 0,
    "lease_ms": 1,
    "limit": 100,
    "number": 0,
    "low": 0,
    "high": VERSIONS,
    "keep": 10,
    "key_ms": 0,
}


def finding_nothing(statement: str) -> Op[Any]:
    given = dict.fromkeys(re.findall(r"json_each\(CAST\(:(\w+)", statement), '{"0": 0}')
    names = Dialect("any").statement(statement).parameters
    return (yield from rows(statement, **{name: {**BESIDE, **given}[name] for name in names}))


def run_all(_: holdfast.Transaction, texts: Sequence[str]) -> Op[None]:
    for text in texts:
        yield from rows(text)


def forgettable(tx: holdfast.Transaction, which: str) -> Op[Any]:
    """Look at the first page of effects, of which those that are old may go."""
    old = Retention(work_ms=0, key_ms=0, effect_ms=0)
    return (yield from Pruning.page(Pruning(tx.runtime.codec, old, which), 0))


class Counted:
    """Stores of two sizes, and what is done in them."""

    def __init__(self, stores: dict[int, holdfast.Store], schemas: dict[int, str]) -> None:
        self.stores = stores
        self._schemas = schemas
        self.steps = 0

    def count(self) -> bool:
        """Count ten steps of SQLite's machine."""
        self.steps += 1
        return False

    def work(self, size: int, listing: Listing) -> int:
        """Return how much a listing does, where it has been asked for often."""
        for _ in range(ASKED_BEFORE):
            self.stores[size].run(self._run, size, listing)
        self.steps = 0
        rows: int = self.stores[size].run(self._run, size, listing)
        return rows or self.steps

    def planned(self, mode: str, size: int, listing: Listing) -> int:
        """Return how many rows PostgreSQL reads for a listing that it plans in this mode."""
        return self.stores[size].run(self._run, size, listing, mode=mode)

    def _run(
        self, tx: holdfast.Transaction, size: int, listing: Listing, *, mode: str | None = None
    ) -> Op[int]:
        if mode is not None:
            yield from rows(PLAN_SO, mode=mode)
        before = yield from self._rows_read(size)
        yield from listing(tx, size)
        return (yield from self._rows_read(size)) - before

    def _rows_read(self, size: int) -> Op[int]:
        """Return how many rows this connection has read and not reported yet."""
        if not self._schemas:
            return 0
        row = yield from one(ROWS_READ, schema=self._schemas[size])
        assert row is not None
        return int(row["rows"])


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def counted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_dsn: str
) -> Iterator[Counted]:
    directory = tmp_path_factory.mktemp("listings")
    stores: dict[int, holdfast.Store] = {}
    schemas: dict[int, str] = {}
    counted = Counted(stores, schemas)

    def watch(connection: apsw.Connection) -> None:
        connection.set_progress_handler(counted.count, 10)

    for size in SIZES:
        place: dict[str, Any] = {"url": f"sqlite:///{directory}/{size}.db"}
        if request.param == "postgres":
            schemas[size] = f"{SCHEMA}_{size}"
            place = {"url": postgres_dsn, "namespace": schemas[size]}
        with holdfast.open(**place, durability="normal") as store:
            if schemas:
                leave_unvacuumed(schemas[size])
            bulk.fill(store, size)
            store.run(run_all, MADE + ANALYZED if schemas else MADE)
        apsw.connection_hooks.append(watch)
        stores[size] = holdfast.open(**place, durability="normal")
        stores[size].session("first")
    yield counted
    for store in stores.values():
        store.close()
    while watch in apsw.connection_hooks:
        apsw.connection_hooks.remove(watch)
    drop(schemas.values())


def leave_unvacuumed(schema: str) -> None:
    """Keep autovacuum away: what an index alone answers afterwards is not counted as read."""
    with psycopg.connect(os.environ["HOLDFAST_TEST_POSTGRES"], autocommit=True) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s", [schema]
        )
        for (table,) in tables.fetchall():
            change = f'ALTER TABLE "{schema}"."{table}" SET (autovacuum_enabled = false)'
            connection.execute(change.encode())


def drop(schemas: Any) -> None:
    with psycopg.connect(os.environ["HOLDFAST_TEST_POSTGRES"], autocommit=True) as connection:
        for schema in schemas:
            connection.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())


@pytest.mark.parametrize("name", LISTINGS)
def test_a_filter_does_not_read_more_where_there_is_more(counted: Counted, name: str) -> None:
    few, many = (counted.work(size, LISTINGS[name]) for size in SIZES)
    assert many <= few * TIMES_MAX + ROWS_MAX, f"{few} of {SIZES[0]:,}, {many} of {SIZES[1]:,}"


@pytest.mark.parametrize("counted", ["postgres"], indirect=True)
@pytest.mark.parametrize("mode", PLANS)
@pytest.mark.parametrize("name", ASKED_OFTEN)
def test_a_plan_for_any_values_or_for_these_reads_no_more(
    counted: Counted, name: str, mode: str
) -> None:
    few, many = (counted.planned(mode, size, LISTINGS[name]) for size in SIZES)
    assert many <= few * TIMES_MAX + ROWS_MAX, f"{few} of {SIZES[0]:,}, {many} of {SIZES[1]:,}"


@pytest.mark.parametrize("name", GIVEN)
def test_given_keys_are_looked_for_in_an_index(counted: Counted, name: str) -> None:
    few, many = (counted.work(size, lambda *_: finding_nothing(GIVEN[name])) for size in SIZES)
    assert many <= few + ROWS_MAX, f"{few} of {SIZES[0]:,}, {many} of {SIZES[1]:,}"
