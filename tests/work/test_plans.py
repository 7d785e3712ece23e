"""How the databases read hf_work: along the partial indexes, never along the whole table."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast import Submission
from holdfast.kernel.operation import Batch, Query
from holdfast.kernel.sql import Dialect
from holdfast.work import claims, items, noun, reports, submission, transitions
from tests.checkpoints.looking import Look, plan_for_any

SCHEMA = f"t_plans_{uuid.uuid4().hex[:12]}"
FINISHED = 4_000
FUTURE = 2_000
BACKLOG = 4_000

HELD = {"number": 1, "fence": 1}
ENDED = {
    **HELD,
    "state": "completed",
    "is_final": 1,
    "output": None,
    "error": None,
    "waits_for_effect": None,
    **dict.fromkeys(("delay_ms", "retries", "failures", "rescues", "releases", "fences"), 0),
}
CLAIMED = {
    "holder": "w",
    "limit": 5,
    "lease_ms": 1,
    "claim_id": "c",
    "queue0": "a",
    "queue1": "b",
}
PAGE = {"before": 2**62, "limit": 5}
HOT = {
    "claim",
    "claim of two queues",
    "claim of all queues",
    "heartbeat",
    "finish",
    "guard",
    "promote",
    "of a queue",
}
# Statement, its parameters, and the indexes that it may use.
STATEMENTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "claim": (claims._claim_of(1), CLAIMED, {"ix_work_ready"}),
    "claim of two queues": (claims._claim_of(2), CLAIMED, {"ix_work_ready"}),
    "claim of all queues": (claims._claim_of(0), CLAIMED, {"ix_work_ready_all"}),
    "heartbeat": (claims.HEARTBEAT, {"held": json.dumps({1: 1}), "lease_ms": 1}, set()),
    "finish": (transitions.FINISH_HELD, ENDED, set()),
    "finish expired": (transitions.FINISH_EXPIRED, ENDED, set()),
    "guard": (items.LOCK_HELD, HELD, set()),
    # Where few run, PostgreSQL may as well sort them all.
    "expired": (noun.FIND_EXPIRED, {"limit": 5}, set()),
    "health": (reports.LEASE_HEALTH, {"stale_ms": 1, "limit": 5}, set()),
    "promote": (noun.PROMOTE, {"limit": 5}, {"ix_work_scheduled"}),
    "next due": (claims.NEXT_DUE, {}, {"ix_work_scheduled"}),
    "old": (noun.FIND_OLD, {"age_ms": 1, "limit": 5}, {"ix_work_finished"}),
    "of a session": (
        noun.LIVE_OF_SESSIONS,
        {"numbers": '{"1": null}', "limit": 5},
        {"ix_work_session"},
    ),
    "waiting for an effect": (noun.WAITING_FOR_EFFECT, {"effect_id": "e"}, {"ix_work_waits"}),
    "key": (submission.LIVE_WITH_KEY, {"queue": "a", "key": "k"}, {"ux_work_key"}),
    "dead": (reports.LIST_DEAD, PAGE, {"ix_work_state", "ux_work_redriven"}),
    "failed": (reports.page_of({}, ["failed"]), PAGE, {"ix_work_state"}),
    "waiting for review": (reports.page_of({}, ["pending"]), PAGE, {"ix_work_state"}),
    "held by": (reports.page_of({"holder": "w"}, ()), {**PAGE, "holder": "w"}, {"ix_work_held"}),
    "of a queue": (noun.REMOVE_OF_QUEUE, {"queue": "rare", "limit": 5}, {"ix_work_queue"}),
    "count of a type": (
        reports.COUNT_SOME,
        {"type": "rare", "state": "review", "limit": 5},
        {"ix_work_type"},
    ),
    "of a type": (reports.page_of({"type": "a"}, ()), {**PAGE, "type": "rare"}, {"ix_work_type"}),
}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def full(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_dsn: str
) -> Iterator[holdfast.Store]:
    """A store with many finished items, many of the future, and few that are ready."""
    if request.param == "sqlite":
        place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('plans')}/store.db"}
    else:
        place = {"url": postgres_dsn, "namespace": SCHEMA}
    with holdfast.open(**place, durability="normal") as store:
        work = store.work
        for start in range(0, FINISHED, 1000):
            work.submit_many([Submission("a", start)] * 1000)
            assert all(work.complete_many([(each, 1) for each in work.claim("w", limit=1000)]))
        work.submit_many([Submission("a", delay_seconds=3600)] * FUTURE)
        work.submit_many([Submission("backlog")] * BACKLOG)
        session = store.session("s")
        work.submit_many([Submission(name, session=session) for name in "abc" * 10])
        work.submit("a", key="k")
        work.claim("w", limit=5, queues="a")
        if request.param == "postgres":
            _run(postgres_dsn, f'VACUUM ANALYZE "{SCHEMA}".hf_work')
        yield store
    if request.param == "postgres":
        _run(postgres_dsn, f'DROP SCHEMA "{SCHEMA}" CASCADE')


def _run(dsn: str, statement: str) -> None:
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.mark.parametrize("name", STATEMENTS)
def test_the_index_is_used_and_the_table_is_not_scanned(full: holdfast.Store, name: str) -> None:
    statement, parameters, indexes = STATEMENTS[name]
    if full.runtime.driver.dialect == "sqlite":
        found = Look(full).rows(f"EXPLAIN QUERY PLAN {statement}", **parameters)
        plan = "\n".join(row["detail"] for row in found)
        # What scans without an index may only be what a subquery found.
        scanned = set(re.findall(r"SCAN (\w+)$", plan, re.MULTILINE))
        assert not scanned & {"hf_work", "w", "d", "n"}, plan
    else:
        plan = "\n".join(_postgres_plan(statement, parameters))
        assert "Seq Scan on hf_work" not in plan, plan
        # As it is after the fifth time, when the server plans for any parameters.
        if name in HOT:
            plan = "\n".join(_postgres_plan(statement, None))
            assert not re.search("Seq Scan on hf_work|Bitmap", plan), plan
    for index in indexes:
        assert index in plan, plan


def _postgres_plan(statement: str, parameters: dict[str, Any] | None) -> list[str]:
    import psycopg

    dsn = os.environ["HOLDFAST_TEST_POSTGRES"]
    if parameters is None:
        return plan_for_any(dsn, SCHEMA, statement)
    compiled = Dialect(SCHEMA).statement(statement)
    with psycopg.connect(dsn) as connection, psycopg.RawCursor(connection) as cursor:
        cursor.execute(f"EXPLAIN {compiled.text}".encode(), compiled.values(parameters))
        return [row[0] for row in cursor.fetchall()]


@pytest.mark.parametrize("name", sorted(HOT))
def test_a_new_store_is_read_along_the_same_indexes(
    postgres_dsn: str, namespace: str, name: str
) -> None:
    """The server keeps the plans that it makes for nearly empty tables until it analyzes them."""
    statement, _, indexes = STATEMENTS[name]
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        store.work.submit("t")
        plan = "\n".join(plan_for_any(postgres_dsn, namespace, statement))
    assert "Seq Scan" not in plan, plan
    assert set(re.findall(r"ix_work_ready\w*", plan)) <= indexes, plan
    for index in indexes:
        assert f"{index} " in plan, plan


def test_a_claim_reads_no_more_than_it_takes_where_statistics_are_old(
    postgres_dsn: str, namespace: str
) -> None:
    """They say that hardly anything is ready, as after a queue was empty for long."""
    import psycopg

    given = {**CLAIMED, "queue0": "t"}
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        items = store.work.submit_many([Submission("t", n) for n in range(1_000)])
        store.work.complete_many([(each, 1) for each in store.work.claim("w", limit=len(items))])
        _run(postgres_dsn, f'VACUUM ANALYZE "{namespace}".hf_work')
        _run(postgres_dsn, f'ALTER TABLE "{namespace}".hf_work SET (autovacuum_enabled = off)')
        store.work.submit_many([Submission("t", n) for n in range(2_000)])
        compiled = Dialect(namespace).statement(claims._claim_of(1))
        with psycopg.connect(postgres_dsn) as connection, psycopg.RawCursor(connection) as cursor:
            text = f"EXPLAIN (ANALYZE, TIMING off) {compiled.text}"
            cursor.execute(text.encode(), compiled.values(given))
            plan = "\n".join(row[0] for row in cursor.fetchall())
    read = [float(rows) for rows in re.findall(r"actual rows=([\d.]+)", plan)]
    assert max(read) == CLAIMED["limit"], plan


def test_counts_of_rare_types_are_planned_for_them() -> None:
    """A plan for any parameters reads all items where hardly any has the type and state."""
    steps = reports.counts(finished=False, at_most=10)
    next(steps)
    counting = steps.send([{"type": "rare"}])
    assert isinstance(counting, Batch)
    assert all(isinstance(each, Query) and each.is_listing for each in counting.commands)
