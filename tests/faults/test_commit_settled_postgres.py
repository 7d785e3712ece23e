"""A COMMIT whose connection breaks is settled: never lost, never doubled, never guessed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.effects.ledger import finish
from holdfast.kernel.operation import rows
from holdfast.kernel.postgres.connections import CONNECTIONS_MAX
from holdfast.testing.nouns import Counter
from holdfast.testing.proxy import COMMIT, Cut, Moment, PostgresProxy
from tests.faults.workload import Clients, found_in, in_threads, prepare
from tests.internals import engine_of

Report = Callable[[str], None]
Place = dict[str, Any]

MOMENTS: tuple[Moment, ...] = ("before", "after", "before-late")
CLIENTS = 4
BUSY_SECONDS = 0.5
# To wait for the lock itself would end at its timeout.
HOLD_WHILE_LOCKED = """
WITH RECURSIVE held (times) AS (
    SELECT 1 UNION ALL
    SELECT times + 1 FROM held, pg_sleep(0.05) WHERE NOT pg_try_advisory_xact_lock_shared(:lock)
) SELECT max(times) AS times FROM held
"""


def order_cuts(proxy: PostgresProxy, chance: random.Random, number: int) -> list[Cut]:
    """Cut the next COMMIT, and every fifth time also the one that settles it.

    Every fourth time the whole transaction is cut, from its BEGIN on.
    """
    delay = chance.choice((0.0, 0.02, 0.1))
    statement, moment = COMMIT, MOMENTS[number % 3]
    if number % 4 == 0:
        statement, moment = "BEGIN", "all-late"
    cuts = [proxy.cut_next_commit(moment, delay_seconds=delay, statement=statement)]
    if number % 5 == 0:
        cuts.append(proxy.cut_next_commit(chance.choice(MOMENTS), delay_seconds=delay))
    return cuts


def judge(clients: Clients, through: Place, direct: Place) -> None:
    """Judge from another store, and by another connection."""
    for place in (direct, through):
        with holdfast.open(**place) as store:
            clients.judge(store)


def count_answers(cuts: list[Cut]) -> dict[str, int]:
    """Wait for the cuts and count how many commits the server made and did not make."""
    answers = [cut.wait() for cut in cuts]
    return {
        "cut": len(answers),
        "made": answers.count("COMMIT"),
        "not made": answers.count(None),
    }


@pytest.mark.parametrize("threads", [1, CLIENTS])
def test_a_cut_commit_is_settled_rightly_a_hundred_times(
    threads: int, proxy: PostgresProxy, through: Place, direct: Place, tmp_path: Path,
    report: Report,
) -> None:  # fmt: skip
    clients, chance, cuts = Clients(tmp_path / "history"), random.Random(threads), []
    with holdfast.open(**through) as store:
        for number in range(100):
            cuts += order_cuts(proxy, chance, number)
            calls = [partial(chance.choice(clients.writes), store)]
            in_threads(calls * threads)
            proxy.cancel_cuts()
        clients.judge(store)
    judge(clients, through, direct)
    struck = [cut for cut in cuts if cut.finished.is_set()]
    report(f"{threads} threads: {count_answers(struck)}, callers saw {dict(clients.outcomes)}")
    assert len(struck) >= 100
    assert set(clients.outcomes) == {"returned"}


def test_a_cut_commit_is_settled_rightly_a_hundred_times_in_an_event_loop(
    proxy: PostgresProxy, through: Place, direct: Place, tmp_path: Path, report: Report
) -> None:
    clients, chance, cuts = Clients(tmp_path / "history"), random.Random(7), []

    async def run() -> None:
        async with await holdfast.aopen(**through) as store:
            for number in range(100):
                cuts.extend(order_cuts(proxy, chance, number))
                call = chance.choice(clients.writes_async)
                await asyncio.gather(*(call(store) for _ in range(CLIENTS)))
                proxy.cancel_cuts()

    asyncio.run(run())
    judge(clients, through, direct)
    struck = [cut for cut in cuts if cut.finished.is_set()]
    report(f"event loop: {count_answers(struck)}, callers saw {dict(clients.outcomes)}")
    assert len(struck) >= 100
    assert set(clients.outcomes) == {"returned"}


def strand(store: Any, proxy: PostgresProxy, moment: Moment) -> Cut:
    """Leave the store one connection, to be cut at its COMMIT, and no way to make another."""
    proxy.refuse()
    assert len(engine_of(store).connections.idle) == 1
    return proxy.cut_next_commit(moment)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_while_the_server_is_unreachable_a_commit_is_unknown_and_settled_later(
    moment: Moment, proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    with (
        holdfast.open(**through, busy_timeout_seconds=BUSY_SECONDS) as store,
        holdfast.open(**direct) as other,
    ):
        Counter(store).add(1, note="first")
        cut = strand(store, proxy, moment)
        with pytest.raises(holdfast.CommitUnknown, match=r"call store\.settle") as caught:
            Counter(store).add(1, note="unknown")
        with pytest.raises(holdfast.StoreUnavailable):
            Counter(store).add(1, note="refused")
        with pytest.raises(holdfast.StoreUnavailable):
            store.settle(caught.value.id)
        is_made = cut.wait() == "COMMIT"
        assert is_made is (moment == "after")
        proxy.accept()
        Counter(store).add(1, note="after")
        assert [store.settle(caught.value.id), other.settle(caught.value.id)] == 2 * [is_made]
        expected = ["first", *(["unknown"] if is_made else []), "after"]
        assert found_in(other) == expected
        assert found_in(store) == expected


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_turn_whose_last_commit_was_unknown_has_the_results_of_its_calls(
    moment: Moment, proxy: PostgresProxy, through: Place, direct: Place, monkeypatch: Any
) -> None:
    def finish_reachable(*given: Any) -> Any:
        unknown.append(type(given[-1]))
        proxy.accept()
        return finish(*given)

    @holdfast.tool(effect="mutate")
    def act(number: int) -> int:
        if number == 2:
            strand(store, proxy, moment)
        return number

    unknown: list[type] = []
    # Else the first outcome may be recorded, on another connection, while the second tool runs.
    monkeypatch.setattr("holdfast.effects.recorder.HOLD_SECONDS", 3600)
    monkeypatch.setattr("holdfast.effects.turns.finish", finish_reachable)
    with holdfast.open(**through, busy_timeout_seconds=BUSY_SECONDS) as store:
        uses = [holdfast.ToolUse(act, {"number": number}, f"c{number}") for number in (1, 2)]
        answers = store.session("s").call_all(uses)
        assert [getattr(each, "value", each) for each in answers] == [1, 2]
    assert set(unknown) == {holdfast.CommitUnknown}
    with holdfast.open(**direct) as other:
        assert {each.status for each in other.effects(session="s")} == {"completed"}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_async_commit_is_unknown_while_the_server_is_unreachable(
    moment: Moment, proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    async def run() -> tuple[str, bool]:
        async with await holdfast.aopen(**through, busy_timeout_seconds=BUSY_SECONDS) as store:
            counter = Counter(store)
            await counter.add(1, note="first")
            strand(store, proxy, moment)
            with pytest.raises(holdfast.CommitUnknown) as caught:
                await counter.add(1, note="unknown")
            with pytest.raises(holdfast.StoreUnavailable):
                await store.settle(caught.value.id)
            proxy.accept()
            return caught.value.id, await store.settle(caught.value.id)

    id, answer = asyncio.run(run())
    with holdfast.open(**direct) as other:
        assert found_in(other) == ["first", *(["unknown"] if moment == "after" else [])]
        assert other.settle(id) is answer is (moment == "after")


def test_the_question_waits_for_a_commit_that_is_still_on_its_way(
    proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    """The old transaction holds the row that the answer needs, until it is over."""
    with (
        holdfast.open(**through, busy_timeout_seconds=BUSY_SECONDS) as store,
        holdfast.open(**direct) as other,
    ):
        Counter(store).add(1, note="first")
        cut = proxy.cut_next_commit("before-late", delay_seconds=4 * BUSY_SECONDS)
        with pytest.raises(holdfast.CommitUnknown) as caught:
            Counter(store).add(1, note="late")
        with pytest.raises(holdfast.StoreBusy):
            store.settle(caught.value.id)
        assert not cut.finished.is_set()
        assert other.settle(caught.value.id) is True
        assert cut.finished.wait(60)
        assert store.settle(caught.value.id) is True
        assert found_in(store) == ["first", "late"]


@pytest.mark.parametrize("delay_seconds", [0.0, 0.3])
def test_a_transaction_that_arrives_after_it_was_given_up_writes_nothing(
    delay_seconds: float, proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    """All of it was sent at once, and lay in a buffer when its connection broke."""
    with holdfast.open(**through) as store, holdfast.open(**direct) as other:
        assert Counter(store).add_at_once(1, note="first") == 1
        cut = proxy.cut_next_commit("all-late", statement="BEGIN", delay_seconds=delay_seconds)
        assert Counter(store).add_at_once(1, note="second") == 2
        answer = cut.wait()
        # It came before the question, or it found its writer's row closed.
        assert answer in {"COMMIT", "ROLLBACK", "ERROR 23502", None}
        assert answer != "COMMIT" or delay_seconds == 0.0
        assert found_in(other) == ["first", "second"]
        assert Counter(store).add_at_once(1, note="third") == 3


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_answer_that_was_lost_with_its_commit_is_read_again(
    moment: Moment, proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    @holdfast.tool(effect="mutate")
    def pay(amount: int) -> dict[str, int]:
        return {"paid": amount}

    with holdfast.open(**through) as store, holdfast.open(**direct) as other:
        session = store.session("trip")
        session.append("messages", [{"number": 0}])
        for number in range(1, 4):
            cut = proxy.cut_next_commit(moment, delay_seconds=0.05)
            assert session.append("messages", [{"number": number}]).version == number + 1
            cut.wait()
            for _ in range(2):  # the intent's, then the outcome's
                cut = proxy.cut_next_commit(moment, delay_seconds=0.05)
            assert session.call(pay, amount=number).value == {"paid": number}
            cut.wait()
        kept = other.session("trip").latest()
        assert kept is not None
        assert kept.channels["messages"] == [{"number": number} for number in range(4)]
        effects = other.effects(session="trip")
        assert [effect.status for effect in effects] == ["completed"] * 3


def test_a_writer_whose_row_was_closed_goes_on_with_another_connection(through: Place) -> None:
    """Somebody asked for a commit that its connection has not made yet."""
    with holdfast.open(**through) as store:
        assert Counter(store).add_at_once(1, note="first") == 1
        (connection,) = engine_of(store).connections.idle
        assert store.settle(f"{connection.writer_id}:{connection.batch + 5}") is False
        assert store.settle(f"{connection.writer_id}:{connection.batch}") is True
        assert Counter(store).add_at_once(1, note="second") == 2
        assert Counter(store).add(1, note="third") == 3
        assert found_in(store) == ["first", "second", "third"]


@pytest.mark.parametrize("statement", [COMMIT, ".*CREATE TABLE .*hf_events.*"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_opening_goes_on_when_its_connection_is_cut(
    moment: Moment, statement: str, proxy: PostgresProxy, postgres_dsn: str, namespace: str
) -> None:
    place: Place = {"url": f"{proxy.dsn(postgres_dsn)}&listen=off", "namespace": namespace}
    cut = proxy.cut_next_commit(moment, statement=statement, delay_seconds=0.1)
    with holdfast.open(**place) as store:
        prepare(store)
        assert Counter(store).add() == 1
    assert cut.finished.is_set()


def test_when_all_connections_are_in_use_a_call_says_so(through: Place, direct: Place) -> None:
    """That is another thing than a server which cannot be reached."""
    with holdfast.open(**through, busy_timeout_seconds=4 * BUSY_SECONDS) as store:
        count = CONNECTIONS_MAX
        roots = [f"root-{number}" for number in range(count + 1)]
        prepare(store, *roots)
        held = threading.Semaphore(0)

        def hold(tx: holdfast.Transaction, root_id: str) -> holdfast.Op[None]:
            yield from Counter(tx, root_id).add()
            held.release()
            yield from rows(HOLD_WHILE_LOCKED, lock=lock)

        def ask() -> None:
            for _ in range(count):
                assert held.acquire(timeout=60)
            with pytest.raises(holdfast.StoreBusy, match="connections were in use"):
                Counter(store, roots[-1]).add()
            admin.execute("SELECT pg_advisory_unlock(%s)", [lock])

        lock = random.getrandbits(60)
        with psycopg.connect(direct["url"], autocommit=True) as admin:
            admin.execute("SELECT pg_advisory_lock(%s)", [lock])
            in_threads([ask, *(partial(store.run, hold, root_id) for root_id in roots[:-1])])
        assert Counter(store, roots[-1]).add() == 1


def test_while_every_commit_is_cut_a_call_ends_in_time(
    proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    """Those that would settle it are cut as well."""
    with holdfast.open(**through, busy_timeout_seconds=BUSY_SECONDS) as store:
        Counter(store).add(1, note="first")
        for _ in range(2_000):
            proxy.cut_next_commit("before")
        started = time.monotonic()
        with pytest.raises(holdfast.CommitUnknown) as caught:
            Counter(store).add(1, note="dead")
        assert time.monotonic() - started < 60
        proxy.cancel_cuts()
        assert store.settle(caught.value.id) is False
        assert found_in(store) == ["first"]


def test_a_transaction_that_the_server_ends_again_and_again_is_given_up(through: Place) -> None:
    """It thinks for longer than the server allows a transaction to be idle."""
    runs: list[str] = []

    def think(tx: holdfast.Transaction) -> holdfast.Op[None]:
        runs.append("run")
        yield from Counter(tx).add(1, note="never")
        time.sleep(1.6 * BUSY_SECONDS)

    with holdfast.open(**through, busy_timeout_seconds=BUSY_SECONDS) as store:
        with pytest.raises(holdfast.StoreUnavailable, match="nothing was written"):
            store.run(think)
        assert len(runs) < 4
        assert found_in(store) == []


def test_a_commit_settled_as_not_made_is_never_made_later(
    proxy: PostgresProxy, through: Place, direct: Place
) -> None:
    """A transaction that dies with its connection stays dead; the answer says so for good."""
    ids: list[str] = []
    with holdfast.open(**through, busy_timeout_seconds=BUSY_SECONDS) as store:
        Counter(store).add(1, note="first")
        strand(store, proxy, "before")
        with pytest.raises(holdfast.CommitUnknown) as caught:
            Counter(store).add(1, note="dead")
        ids.append(caught.value.id)
        proxy.accept()
        Counter(store).add(1, note="after")
    for _ in range(3):
        with holdfast.open(**direct) as other:
            assert [other.settle(id) for id in ids] == [False]
            Counter(other).add(1, note="later")
    with holdfast.open(**direct) as other:
        assert "dead" not in found_in(other)
