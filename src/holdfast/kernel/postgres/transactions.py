"""What the PostgreSQL driver says to the server, in which order; written once for both colours.

A run is a generator of steps (connect, wait for a connection, send a batch, sleep). The two drivers
only know how to perform these four. A batch is one round trip: BEGIN travels with the first
statement, the events with COMMIT.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import errors as pg

from ...errors import (
    CommitUnknown,
    HoldfastError,
    InvalidArgument,
    NotFound,
    StoreBusy,
    StoreError,
    StoreReadOnly,
)
from ..commit_settlement import FORGET, MARK, MARK_IF_DONE, WRITER_KEPT_MS, MarkOps, commit_id
from ..driver import Settings
from ..execution import Execution, Point
from ..operation import Call, Decide, Op, Query, Row, query
from ..sql import Dialect
from .connections import CONNECTIONS_MAX, Connections
from .errors import is_connection_lost, is_read_only, translate
from .pipeline import Connect, Link, Message, Place, Queue, Reply, Send, Sleep, Step

R = TypeVar("R")
Run: TypeAlias = Generator[Step, Any, R]

BACKOFF_SECONDS = 0.005
BACKOFF_SECONDS_MAX = 0.5
SERIALIZATION_RETRIES_MAX = 50
# A server that waits for a lock says so itself when the time is over; then we are still there.
ANSWER_GRACE_SECONDS = 2.0
SETTLE_SECONDS_MIN = 2.0
QUEUE_LOOK_SECONDS = 0.2


class CommitLost(Exception):
    """The connection broke while COMMIT was under way."""

    def __init__(self, writer_id: str, batch: int, error: psycopg.Error) -> None:
        super().__init__(writer_id, batch)
        self.writer_id = writer_id
        self.batch = batch
        self.error = error


class Again:
    """Reads once more what a lost connection was to bring."""

    @query
    def read(self, asked: Query) -> Op[list[Row]]:
        """Return the rows of a query."""
        found: list[Row] = yield asked
        return found


class Protocol:
    """Runs calls as generators of steps."""

    def __init__(
        self, schema: str, settings: Settings, connections: Connections | None = None
    ) -> None:
        self.dialect = Dialect(schema)
        self.settings = settings
        self._lending = connections
        self.answer_seconds = settings.busy_timeout_seconds + ANSWER_GRACE_SECONDS
        """How long the server may be silent before it is taken for lost."""
        timeout = f"{round(settings.busy_timeout_seconds * 1000)}ms"
        self._write_settings = {
            "lock_timeout": timeout,
            "idle_in_transaction_session_timeout": timeout,
            "synchronous_commit": "on" if settings.durability == "full" else "off",
        }
        # One statement less in every transaction: the mark also makes the settings.
        made = ", ".join(
            f"set_config('{name}', '{value}', true)" for name, value in self._write_settings.items()
        )
        self._opening = f"{MARK} RETURNING {made}"
        self._settling = f"SELECT {made}"
        self._takes_several: set[str] = set()

    def run(self, call: Call[R], *, repeats: bool = False, until: float = 0.0) -> Run[R]:
        """Run a call in one transaction; re-run it while the server asks for that.

        One that `repeats` may be committed twice: a lost COMMIT of it is not asked for.
        """
        self._require_allowed(call)
        deadline = until or time.monotonic() + self.settings.busy_timeout_seconds
        runs = self._write if call.mode == "write" else self._read
        tries = 0
        lock_first: set[str] = set()
        while True:
            tries += 1
            attempt = Execution(call, self.settings.services, lock_first)
            try:
                yield from self._once(attempt, runs, deadline)
            except (pg.DeadlockDetected, pg.SerializationFailure) as error:
                yield from self._back_off(error, tries, call)
            except CommitLost as lost:
                if not repeats and (yield from self._settle(lost, deadline)):
                    if attempt.decide is not None:
                        yield from self._answer_again(attempt, attempt.decide, lost)
                    break
                yield from self._reconnect(lost.error, deadline, attempt, tries)
            except psycopg.Error as error:
                if isinstance(error, pg.LockNotAvailable) and attempt.is_lock_immediate:
                    lock_first.update(attempt.locked)
                    continue
                yield from self._reconnect(error, deadline, attempt, tries)
            except BaseException as error:
                self.settings.hooks.tell(attempt, tries, error)
                raise
            else:
                break
        self.settings.hooks.tell(attempt, tries, None)
        attempt.run_hooks()
        return attempt.result

    def join(self, connection: Any, call: Call[R]) -> Run[R]:
        """Run a call inside somebody else's transaction, in a savepoint; hooks are not run."""
        self._require_allowed(call)
        attempt = Execution(call, self.settings.services)
        release = Message("RELEASE SAVEPOINT holdfast")
        shown = yield Send(connection, [Message("SHOW transaction_isolation")])
        isolation = shown[0].rows[0]["transaction_isolation"]
        if isolation != "read committed":
            raise InvalidArgument(f"within() needs READ COMMITTED, this is {isolation.upper()}")
        yield Send(connection, [*self._local({}), Message("SAVEPOINT holdfast")])
        try:
            while attempt.queries:
                replies = yield Send(connection, [self.message(query) for query in attempt.queries])
                attempt.reply([reply.rows for reply in replies])
            yield Send(connection, [*map(self.message, attempt.closing()), release])
        except Exception as error:
            if not is_connection_lost(error):
                yield Send(connection, [Message("ROLLBACK TO SAVEPOINT holdfast"), release])
            if isinstance(error, psycopg.Error):
                raise translate(error) from error
            raise
        return attempt.result

    def _require_allowed(self, call: Call[Any]) -> None:
        if call.mode == "write" and self.settings.mode == "read":
            raise StoreReadOnly(operation=call.name)

    def _once(
        self,
        attempt: Execution[R],
        runs: Callable[[Link, Execution[R]], Run[None]],
        deadline: float,
    ) -> Run[None]:
        """Run the attempt on one connection, which is given back whatever happens."""
        assert self._lending is not None
        taken = self._lending.take() or (yield from self._queue(self._lending, deadline))
        if isinstance(taken, Link):
            connection = taken
        else:
            try:
                connection = yield Connect(taken, deadline - time.monotonic())
            except BaseException:
                taken.is_free = True
                raise
        try:
            yield from runs(connection, attempt)
        except Exception as error:
            yield from self._abandon(connection, error)
            raise
        except BaseException:
            # The caller was interrupted or cancelled at an unknown place of the exchange.
            self._lending.discard(connection)
            raise
        self._lending.give(connection)

    def _queue(self, lending: Connections, deadline: float) -> Run[Link | Place]:
        """Wait in line for a connection, or for a place to make one."""
        turn = lending.join_line()
        try:
            while (seconds := deadline - time.monotonic()) > 0:
                # A place that an interrupt has freed tells nobody: look for it now and then.
                yield Queue(turn, min(seconds, QUEUE_LOOK_SECONDS))
                if turn.link is not None:
                    link, turn.link = turn.link, None
                    return link
                if (taken := lending.take()) is not None:
                    return taken
                if turn.has_come:
                    turn = lending.join_line()
        finally:
            lending.leave_line(turn)
        raise StoreBusy(
            f"all {CONNECTIONS_MAX} connections were in use for "
            f"{self.settings.busy_timeout_seconds:g} seconds; nothing was written"
        )

    def _abandon(self, connection: Link, error: Exception) -> Run[None]:
        """Roll back what an error left open; a connection that cannot do that is closed."""
        assert self._lending is not None
        is_lost = isinstance(error, CommitLost) or is_connection_lost(error)
        if not is_lost and not is_read_only(error):
            try:
                yield Send(connection, [Message("ROLLBACK")])
            except psycopg.Error:
                is_lost = True
            except BaseException:
                self._lending.discard(connection)
                raise
            else:
                self._lending.give(connection)
                return
        self._lending.discard(connection, is_server_away=is_lost)

    def _write(self, connection: Link, attempt: Execution[R]) -> Run[None]:
        """BEGIN … COMMIT; what changed nothing is rolled back and costs no sync."""
        if not attempt.queries and not attempt.emits:
            return
        if attempt.call.is_marked and not connection.writer_id:
            yield from self._name(connection)
        has_changed = False
        if self._may_conclude(attempt):
            if (yield from self._conclude(connection, attempt)):
                return
            # Nothing was written. What the call does instead is for itself to say.
            attempt.restart(is_refused=True)
        opening = [Message("BEGIN", boundary="begin"), *self._open(connection, attempt.call)]
        while queries := attempt.queries:
            replies = yield from self._ask(connection, opening, attempt)
            opening = []
            has_changed |= any(map(self._changes, queries, replies))
            attempt.reply([reply.rows for reply in replies])
        closing = [self.message(query) for query in attempt.closing()]
        if not has_changed and not closing:
            if not opening:
                yield from self._send(connection, [Message("ROLLBACK")], attempt)
            return
        commit = [*opening, *closing, Message("COMMIT", boundary="commit")]
        yield from self._commit(connection, commit, attempt)

    def _name(self, connection: Link) -> Run[None]:
        """Give a connection its writer's row, before its first transaction that writes."""
        writer_id = self.settings.services.new_id()
        mark = Query(MARK, {"writer_id": writer_id, "batch": 0})
        forget = Query(FORGET, {"age_ms": WRITER_KEPT_MS})
        for each in (mark, forget):
            yield Send(connection, [self.message(each)])
        connection.writer_id = writer_id

    def _commit(
        self, connection: Link, messages: Sequence[Message], attempt: Execution[R]
    ) -> Run[list[Reply]]:
        try:
            return (yield from self._send(connection, messages, attempt, is_commit=True))
        except psycopg.Error as error:
            # Without a mark it cannot be settled: a migration, which may be run again.
            if not is_connection_lost(error) or not attempt.call.is_marked:
                raise
            raise CommitLost(connection.writer_id, connection.batch, error) from error

    def _may_conclude(self, attempt: Execution[R]) -> bool:
        """Whether all of a call can go out at once, with its COMMIT."""
        decide = attempt.decide
        if decide is None or not attempt.call.decides or attempt.emits:
            return False
        return len({event.root_id for event in decide.emits}) < 2

    def _conclude(self, connection: Link, attempt: Execution[R]) -> Run[bool]:
        """Run a call that begins with a `Decide` in one round trip; False: nothing was written.

        The mark is part of the statement that decides, so that it says of a COMMIT without an
        answer that there was a row.
        """
        assert attempt.decide is not None
        *before, last = attempt.whole()
        connection.batch += 1
        messages = [
            Message("BEGIN", boundary="begin"),
            *self._local({}),
            Message(self._settling, is_unread=True),
            *(self.message(_found_or_failed(each) if each.must_find else each) for each in before),
            self.message(self._decisive(connection, last, attempt.decide)),
            Message("COMMIT", boundary="commit"),
        ]
        try:
            replies = yield from self._commit(connection, messages, attempt)
        except pg.DivisionByZero:
            yield from self._send(connection, [Message("ROLLBACK")], attempt)
            return False
        answers = [reply.rows for reply in replies[-2 - len(before) : -1]]
        if answers[-1]:
            self._conclude_with(attempt, answers)
        return bool(answers[-1])

    def _decisive(self, connection: Link, last: Query, decide: Decide) -> Query:
        """Return a statement with the events and the mark that it decides about."""
        events = self.settings.services.events_if_done(decide.emits) if decide.emits else None
        parameters = {
            **last.parameters,
            **(events.parameters if events is not None else {}),
            "writer_id": connection.writer_id,
            "batch": connection.batch,
        }
        return Query(_with_done(last.sql, None if events is None else events.sql), parameters)

    def _answer_again(self, attempt: Execution[R], decide: Decide, lost: CommitLost) -> Run[None]:
        """Give a call whose COMMIT was settled the answers that were lost with it."""
        answers: list[list[Row]] = [[{}] for _ in attempt.queries]
        if decide.again is not None:
            call = Call(Again.read, Again(), (decide.again,))
            try:
                answers[-1] = yield from self.run(call)
            except StoreError as error:
                raise CommitUnknown(
                    f"{attempt.call.name} was committed, but its answer was lost with the "
                    "connection and the server cannot be asked for it",
                    id=commit_id(lost.writer_id, lost.batch),
                ) from error
        if not answers[-1]:
            raise NotFound(
                f"{attempt.call.name} was committed, but its answer was lost with the connection, "
                "and what it wrote has been removed since"
            )
        self._conclude_with(attempt, answers)

    def _conclude_with(self, attempt: Execution[R], answers: list[list[Row]]) -> None:
        attempt.reply(answers)
        if attempt.queries:
            raise HoldfastError(f"{attempt.call.name} asks for more than it has decided about")

    def _read(self, connection: Link, attempt: Execution[R]) -> Run[None]:
        """One snapshot. A single SELECT is one by itself and needs no transaction around it."""
        if not attempt.queries:
            return
        call = attempt.call
        is_read_only = self.settings.mode == "read"
        may_be_single = not (self.settings.is_clock_virtual or is_read_only)
        if may_be_single and len(attempt.queries) == 1 and call.name not in self._takes_several:
            replies = yield from self._ask(connection, [], attempt)
            attempt.reply([reply.rows for reply in replies])
            if not attempt.queries:
                return
            # It takes more than one statement: start again, this time inside a transaction.
            self._takes_several.add(call.name)
            attempt.restart()
        opening = [
            Message("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", boundary="begin"),
            *self._local({}),
        ]
        while attempt.queries:
            replies = yield from self._ask(connection, opening, attempt)
            opening = []
            attempt.reply([reply.rows for reply in replies])
        yield from self._send(connection, [Message("COMMIT", boundary="commit")], attempt)

    def _ask(
        self, connection: Link, opening: Sequence[Message], attempt: Execution[Any]
    ) -> Run[list[Reply]]:
        """Send what the attempt asks, behind what opens the transaction; return its answers."""
        messages = [self.message(query) for query in attempt.queries]
        replies = yield from self._send(connection, [*opening, *messages], attempt)
        return replies[len(opening) :]

    def _send(
        self,
        connection: Link,
        messages: Sequence[Message],
        attempt: Execution[Any],
        *,
        is_commit: bool = False,
    ) -> Run[list[Reply]]:
        probe = self.settings.hooks.probe
        if probe is not None:
            # Each statement travels alone, so that every boundary can be probed.
            replies: list[Reply] = []
            for message in messages:
                last = message.boundary == "commit"
                probe(Point(message.boundary, "before", attempt.call.name, message.text))
                replies += yield Send(connection, [message], is_commit and last)
                probe(Point(message.boundary, "after", attempt.call.name, message.text))
            return replies
        answered: list[Reply] = yield Send(connection, messages, is_commit)
        return answered

    def _settle(self, lost: CommitLost, deadline: float) -> Run[bool]:
        """Ask on a new connection whether the lost COMMIT happened."""
        least = min(SETTLE_SECONDS_MIN, self.settings.busy_timeout_seconds)
        until = max(deadline, time.monotonic() + least)
        call = Call(MarkOps.is_committed, MarkOps(), (lost.writer_id, lost.batch))
        try:
            return (yield from self.run(call, repeats=True, until=until))
        except StoreError as error:
            raise CommitUnknown(
                "the connection broke during COMMIT and the server cannot be asked whether the "
                "change was committed; ask store.settle(id)",
                id=commit_id(lost.writer_id, lost.batch),
            ) from error

    def message(self, query: Query) -> Message:
        """Return a query as the server takes it."""
        statement = self.dialect.statement(query.sql)
        return Message(statement.text, statement.values(query.parameters))

    def _changes(self, query: Query, reply: Reply) -> bool:
        statement = self.dialect.statement(query.sql)
        return statement.may_change and not (statement.counts_changes and reply.row_count == 0)

    def _open(self, connection: Link, call: Call[Any]) -> list[Message]:
        """Return what stands first in a transaction that writes: its mark and its settings."""
        if not call.is_marked:
            return self._local(self._write_settings)
        connection.batch += 1
        parameters = {"writer_id": connection.writer_id, "batch": connection.batch}
        mark = self.message(Query(self._opening, parameters))
        mark.is_unread = True
        return [*self._local({}), mark]

    def _local(self, settings: Mapping[str, str]) -> list[Message]:
        """Return the statement that makes settings for this transaction; a pooler allows it."""
        if self.settings.is_clock_virtual:
            settings = {**settings, "holdfast.now_ms": str(self.settings.clock.now_ms())}
        if not settings:
            return []
        calls = ", ".join(f"set_config('{name}', ${i}, true)" for i, name in enumerate(settings, 1))
        return [Message(f"SELECT {calls}", list(settings.values()))]

    def _reconnect(
        self, error: psycopg.Error, deadline: float, attempt: Execution[Any], tries: int
    ) -> Run[None]:
        """Wait before the next try; raise what another connection would not help against."""
        left_seconds = deadline - time.monotonic()
        if not is_connection_lost(error) or left_seconds < 0:
            self.settings.hooks.tell(attempt, tries, error)
            raise translate(error) from error
        yield Sleep(min(_pause(tries), left_seconds))

    def _back_off(self, error: psycopg.Error, tries: int, call: Call[Any]) -> Run[None]:
        if tries > SERIALIZATION_RETRIES_MAX:
            raise StoreBusy(f"{call.name} met other writers {tries} times: {error}") from error
        yield Sleep(_pause(tries))


@functools.lru_cache(maxsize=1_000)
def _with_done(sql: str, events: str | None) -> str:
    parts = [f"done AS ({sql})", *([events] if events else []), f"marked AS ({MARK_IF_DONE})"]
    return f"WITH {', '.join(parts)} SELECT * FROM done"  # noqa: S608 - our own statements


def _pause(tries: int) -> float:
    longest = min(BACKOFF_SECONDS * 2 ** min(tries, 20), BACKOFF_SECONDS_MAX)
    return random.uniform(longest / 2, longest)


def _found_or_failed(query: Query) -> Query:
    """Return a look as a statement that ends the transaction if it finds nothing."""
    sql = f"SELECT 1 / count(*) FROM ({query.sql}) AS found"  # noqa: S608 - our own statement
    return Query(sql, query.parameters)
