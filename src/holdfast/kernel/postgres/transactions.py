"""The protocol of calls on PostgreSQL, written once for sync and async.

A run is a generator of four kinds of steps (connect, queue for a connection, send a batch, sleep),
which the two drivers perform. A batch is one round trip: BEGIN is sent with the first statement,
the events with COMMIT.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import errors as pg

from ...errors import (
    CommitUnknown,
    StoreBusy,
    StoreError,
    StoreReadOnly,
)
from ..commit_settlement import (
    FORGET_WRITER,
    MARK_BATCH,
    MarkOps,
    commit_id,
    forget_oldest,
)
from ..driver import Execution, Point, Settings
from ..operation import Call, Query, read
from ..sql import Dialect
from . import one_trip
from .connections import CONNECTIONS_MAX, STILL_THERE, Connections
from .errors import is_connection_lost, is_read_only, translate
from .notify import Notifier
from .pipeline import Connect, DriverStep, Link, Message, Queue, Reply, Send, Sleep, Slot
from .shared_commits import Gathering, Member, gathering_of
from .tree_queues import ENTER_QUEUE, queue_of

R = TypeVar("R")
Steps: TypeAlias = Generator[DriverStep, Any, R]

BACKOFF_SECONDS = 0.005
BACKOFF_SECONDS_MAX = 0.5
SERIALIZATION_RETRIES_MAX = 50
# The server itself reports a lock timeout, for which we wait a little longer.
ANSWER_GRACE_SECONDS = 2.0
SETTLE_SECONDS_MIN = 2.0
QUEUE_LOOK_SECONDS = 0.2


def answer_seconds(settings: Settings) -> float:
    """Return how long the server may not answer before it is taken for lost."""
    return settings.busy_timeout_seconds + ANSWER_GRACE_SECONDS


class CommitLost(Exception):
    """The connection was lost during COMMIT."""

    def __init__(self, writer_id: str, batch: int, error: psycopg.Error) -> None:
        super().__init__(writer_id, batch)
        self.writer_id = writer_id
        self.batch = batch
        self.error = error


class Transactions:
    """Runs calls as generators of steps."""

    def __init__(
        self,
        schema: str,
        settings: Settings,
        connections: Connections | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        """Without connections and a notifier, calls can only join other transactions."""
        self.dialect = Dialect(schema)
        self._schema = schema
        self.settings = settings
        self._lending = connections
        self._notifier = notifier
        self.answer_seconds = answer_seconds(settings)
        self._lock_timeout = f"{round(settings.busy_timeout_seconds * 1000)}ms"
        self._write_settings = {
            "lock_timeout": self._lock_timeout,
            "idle_in_transaction_session_timeout": self._lock_timeout,
            "synchronous_commit": "on" if settings.durability == "full" else "off",
            # The plan of a prepared statement is made while a new table is nearly empty, and kept
            # until the table is analyzed. Every row that a write looks for has an index.
            "enable_seqscan": "off",
        }
        # The mark also makes the settings, which saves a statement in every transaction.
        made = ", ".join(
            f"set_config('{name}', '{value}', true)" for name, value in self._write_settings.items()
        )
        self._opening = f"{MARK_BATCH} RETURNING {made}"
        self._settling = f"SELECT {made}"
        self._takes_several: set[str] = set()

    def run(
        self,
        call: Call[R],
        *,
        repeats: bool = False,
        until: float = 0.0,
        loop: Hashable = None,
    ) -> Steps[R]:
        """Run a call in one transaction; re-run it after transient errors.

        One that `repeats` is idempotent: a lost COMMIT of it is not settled but repeated. `loop` is
        the event loop that drives the call, if one does.
        """
        self.require_allowed(call)
        deadline = until or time.monotonic() + self.settings.busy_timeout_seconds
        writes = partial(self._write, loop=loop)
        runs = writes if call.operation.mode == "write" else self._read
        tries = 1
        lock_first: set[str] = set()
        is_refused = False
        while True:
            execution = Execution(call, self.settings.services, lock_first, is_refused=is_refused)
            execution.advance()
            is_refused = False
            try:
                if (yield from self._once(execution, runs, deadline)):
                    break
                # Nothing was written; the call continues without its Decide.
                is_refused = True
                continue
            except (pg.DeadlockDetected, pg.SerializationFailure) as error:
                yield from self._back_off(error, tries, call)
            except CommitLost as lost:
                if not repeats and (yield from self._settle(lost, deadline)):
                    if execution.decide is not None:
                        yield from self._conclude_again(execution, lost)
                    break
                yield from self._reconnect(lost.error, deadline, execution, tries)
            except psycopg.Error as error:
                if isinstance(error, pg.LockNotAvailable) and execution.is_lock_immediate:
                    lock_first.update(execution.locked)
                else:
                    yield from self._reconnect(error, deadline, execution, tries)
            except BaseException as error:
                self.settings.hooks.report(execution, tries, error)
                raise
            tries += 1
        self.settings.hooks.report(execution, tries, None)
        if self._notifier is not None:
            execution.finish(self._notifier.signals)
        return execution.result

    def require_allowed(self, call: Call[Any]) -> None:
        """Refuse a call that writes, if the store was opened for reading."""
        if call.operation.mode == "write" and self.settings.mode == "read":
            raise StoreReadOnly(operation=call.name)

    def _once(
        self,
        execution: Execution[R],
        runs: Callable[[Link, Execution[R]], Steps[bool]],
        deadline: float,
    ) -> Steps[bool]:
        """Run a call on one connection, which is given back in any case."""
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
            is_done = yield from runs(connection, execution)
        except Exception as error:
            yield from self._abandon(connection, error)
            raise
        except BaseException:
            # Interrupted or cancelled at an unknown point of the exchange.
            self._lending.discard(connection)
            raise
        self._lending.give(connection)
        return is_done

    def _queue(self, lending: Connections, deadline: float) -> Steps[Link | Slot]:
        """Queue for a connection, or for a free slot."""
        turn = lending.join_line()
        try:
            while (seconds := deadline - time.monotonic()) > 0:
                # A slot freed by an interrupt wakes nobody, so check for one now and then.
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

    def _abandon(self, connection: Link, error: Exception) -> Steps[None]:
        """Roll back after an error; close the connection if that fails."""
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

    def _write(
        self, connection: Link, execution: Execution[R], loop: Hashable = None
    ) -> Steps[bool]:
        """BEGIN … COMMIT; a transaction that changed nothing is rolled back, without an fsync."""
        if not (execution.queries or execution.emits or execution.deferred):
            return True
        if execution.call.operation.is_marked and not connection.writer_id:
            yield from self._name(connection)
        if one_trip.is_possible(execution):
            return (yield from self._write_shared(connection, execution, loop))
        has_changed = False
        opening = [Message("BEGIN", boundary="begin"), *self._open(connection, execution)]
        while queries := execution.queries:
            replies = yield from self._ask(connection, opening, execution)
            opening = []
            has_changed |= any(map(self._changes, queries, replies))
            execution.advance([reply.rows for reply in replies])
        closing = [self.message(query) for query in execution.closing(at_once=True)]
        if has_changed or closing:
            commit = [*opening, *closing, Message("COMMIT", boundary="commit")]
            yield from self._commit(connection, commit, execution)
        elif not opening:
            yield from self._send(connection, [Message("ROLLBACK")], execution)
        return True

    def _write_shared(
        self, connection: Link, execution: Execution[R], loop: Hashable
    ) -> Steps[bool]:
        """Run a call that begins with a `Decide`, together with others of its tree if possible."""
        assert self._lending is not None
        gathering = gathering_of((self._lending.dsn, self._schema, loop), self.settings, execution)
        if gathering is None or gathering.is_apart:
            return (yield from self._write_at_once(connection, execution))
        member = Member(execution)
        until = time.monotonic() + self.answer_seconds
        try:
            gathering.join(member)
            while not member.has_come:
                yield Queue(member, QUEUE_LOOK_SECONDS)
                if not member.has_come and gathering.leave(member):
                    # The leader takes long: lead those that wait meanwhile.
                    break
                is_forsaken = member.led_by() is None or time.monotonic() > until
                if is_forsaken and not member.has_come:
                    raise _lost(*member.mark)
            if member.error is not None:
                raise member.error
            if member.answers is not None:
                one_trip.conclude(execution, member.answers)
                return True
            if not member.is_alone:
                mark = (connection.writer_id, connection.batch + 1)
                if others := gathering.gather(member, mark):
                    return (yield from self._write_group(connection, member, others, gathering))
            return (yield from self._write_at_once(connection, execution))
        finally:
            gathering.leave(member)
            gathering.pass_on(member)

    def _write_group(
        self, connection: Link, leader: Member, others: Sequence[Member], gathering: Gathering
    ) -> Steps[bool]:
        """Send several calls in one transaction; all are written, or none."""
        connection.batch += 1
        mark = (connection.writer_id, connection.batch)
        execution, services = leader.execution, self.settings.services
        try:
            settings = self._first(Query(self._settling, {}), execution)
            opening = [Message("BEGIN", boundary="begin"), settings]
            group = [
                [*map(self.message, one_trip.statements_in_group(each.execution, services))]
                for each in (leader, *others)
            ]
            marked = self.message(Query(MARK_BATCH, {"writer_id": mark[0], "batch": mark[1]}))
            commit = Message("COMMIT", boundary="commit")
            messages = [*opening, *itertools.chain(*group), marked, commit]
            replies = yield from self._commit(connection, messages, execution)
        except psycopg.Error as error:
            gathering.keep_apart()
            is_busy = isinstance(error, pg.LockNotAvailable)
            for each in others:
                each.come(error=error if is_busy else None, is_alone=not is_busy)
            if is_busy:
                raise
            yield from self._send(connection, [Message("ROLLBACK")], execution)
            return (yield from self._write_at_once(connection, execution))
        except BaseException:
            for each in others:
                each.come(error=_lost(*mark))
            raise
        gathering.pass_on(leader)
        found = iter([reply.rows for reply in replies[len(opening) :]])
        answers = [list(itertools.islice(found, len(each))) for each in group]
        for each, theirs in zip(others, answers[1:], strict=True):
            each.come(theirs)
        self._note_followers(replies[len(opening) - 1])
        one_trip.conclude(execution, answers[0])
        return True

    def _write_at_once(self, connection: Link, execution: Execution[R]) -> Steps[bool]:
        """Run a call that begins with a `Decide` in one round trip; False if it wrote nothing."""
        connection.batch += 1
        mark = (connection.writer_id, connection.batch)
        queries = one_trip.statements(execution, self.settings.services, *mark)
        begin = Message("BEGIN", boundary="begin")
        opening = [begin, *self.local({}), self._first(Query(self._settling, {}), execution)]
        commit = Message("COMMIT", boundary="commit")
        messages = [*opening, *map(self.message, queries), commit]
        try:
            replies = yield from self._commit(connection, messages, execution)
        except one_trip.NothingFound:
            yield from self._send(connection, [Message("ROLLBACK")], execution)
            return False
        self._note_followers(replies[len(opening) - 1])
        answers = [reply.rows for reply in replies[len(opening) : -1]]
        if not answers[-1]:
            return False
        one_trip.conclude(execution, answers)
        return True

    def _conclude_again(self, execution: Execution[R], lost: CommitLost) -> Steps[None]:
        """Answer a call whose COMMIT was settled, re-reading what was lost."""
        assert execution.decide is not None
        again, found = execution.decide.again, None
        if again is not None:
            try:
                found = yield from self.run(Call(read, None, (again,)))
            except StoreError as error:
                id = commit_id(lost.writer_id, lost.batch)
                raise one_trip.answer_lost(execution, id) from error
        one_trip.conclude_again(execution, found)

    def _name(self, connection: Link) -> Steps[None]:
        """Create a connection's writer row, before its first write transaction."""
        writer_id = self.settings.services.new_id()
        mark = Query(MARK_BATCH, {"writer_id": writer_id, "batch": 0})
        yield Send(connection, [self.message(mark)])
        yield Send(connection, [self.message(forget_oldest()), *self.forgetting()])
        connection.writer_id = writer_id

    def forgetting(self) -> list[Message]:
        """Return the statements that remove the writer rows of cleanly closed connections."""
        assert self._lending is not None
        gone, self._lending.retired = self._lending.retired, []
        queries = (Query(FORGET_WRITER, {"writer_id": writer_id}) for writer_id in gone)
        return [*map(self.message, queries)]

    def _commit(
        self, connection: Link, messages: Sequence[Message], execution: Execution[R]
    ) -> Steps[list[Reply]]:
        try:
            return (yield from self._send(connection, messages, execution, is_commit=True))
        except psycopg.Error as error:
            # Without a mark it cannot be settled, but it is idempotent (a migration).
            if not is_connection_lost(error) or not execution.call.operation.is_marked:
                raise
            raise CommitLost(connection.writer_id, connection.batch, error) from error

    def _read(self, connection: Link, execution: Execution[R]) -> Steps[bool]:
        """Read in one snapshot. A single SELECT has one by itself, without a transaction."""
        if not execution.queries:
            return True
        call = execution.call
        is_patient = call.operation.is_patient
        may_be_single = not (
            self.settings.is_clock_virtual or self.settings.mode == "read" or is_patient
        )
        if may_be_single and len(execution.queries) == 1 and call.name not in self._takes_several:
            replies = yield from self._ask(connection, [], execution)
            execution.advance([reply.rows for reply in replies])
            if execution.queries:
                # It takes more than one statement: run it again inside a transaction.
                self._takes_several.add(call.name)
            return not execution.queries
        opening = [
            Message("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", boundary="begin"),
            # A slow statement is waited for, but not one that a lock keeps from beginning.
            *self.local({"lock_timeout": self._lock_timeout} if is_patient else {}),
        ]
        while execution.queries:
            replies = yield from self._ask(connection, opening, execution)
            opening = []
            execution.advance([reply.rows for reply in replies])
        yield from self._send(connection, [Message("COMMIT", boundary="commit")], execution)
        return True

    def _ask(
        self, connection: Link, opening: Sequence[Message], execution: Execution[Any]
    ) -> Steps[list[Reply]]:
        """Send the current queries, after `opening`; return their replies."""
        messages = [self.message(query) for query in execution.queries]
        replies = yield from self._send(connection, [*opening, *messages], execution)
        if opening:
            self._note_followers(replies[len(opening) - 1])
        return replies[len(opening) :]

    def _send(
        self,
        connection: Link,
        messages: Sequence[Message],
        execution: Execution[Any],
        *,
        is_commit: bool = False,
    ) -> Steps[list[Reply]]:
        probe, is_patient = self.settings.hooks.probe, execution.call.operation.is_patient
        if probe is not None:
            # Each statement travels alone, so that every boundary can be probed.
            replies: list[Reply] = []
            for message in messages:
                last = message.boundary == "commit"
                probe(Point(message.boundary, "before", execution.call.name, message.text))
                replies += yield Send(connection, [message], is_commit and last, is_patient)
                probe(Point(message.boundary, "after", execution.call.name, message.text))
            return replies
        answered: list[Reply] = yield Send(connection, messages, is_commit, is_patient)
        return answered

    def is_alive(self) -> bool:
        """Whether the server answers on a new connection; blocks."""
        assert self._lending is not None
        return self._lending.answer(STILL_THERE, self.answer_seconds) is not None

    def _settle(self, lost: CommitLost, deadline: float) -> Steps[bool]:
        """Determine on another connection whether a lost COMMIT took effect."""
        least = min(SETTLE_SECONDS_MIN, self.settings.busy_timeout_seconds)
        until = max(deadline, time.monotonic() + least)
        call = Call(MarkOps.is_committed, MarkOps(), (lost.writer_id, lost.batch))
        try:
            return (yield from self.run(call, repeats=True, until=until))
        except StoreError as error:
            raise CommitUnknown(
                "the connection was lost during COMMIT, and the server cannot be reached to "
                "determine whether the change was committed; call store.settle(id) later",
                id=commit_id(lost.writer_id, lost.batch),
            ) from error

    def message(self, query: Query) -> Message:
        """Return a query compiled for the server."""
        statement = self.dialect.statement(query.sql)
        values = statement.values(query.parameters)
        return Message(statement.text, values, may_prepare=not query.is_listing)

    def _changes(self, query: Query, reply: Reply) -> bool:
        statement = self.dialect.statement(query.sql)
        return statement.may_change and not (statement.counts_changes and reply.row_count == 0)

    def _open(self, connection: Link, execution: Execution[Any]) -> list[Message]:
        """Return the first statements of a write transaction: its mark and its settings."""
        if not execution.call.operation.is_marked:
            return self.local(self._write_settings)
        connection.batch += 1
        parameters = {"writer_id": connection.writer_id, "batch": connection.batch}
        return [*self.local({}), self._first(Query(self._opening, parameters), execution)]

    def _first(self, settings: Query, execution: Execution[Any]) -> Message:
        """Return the statement that makes the settings and waits in the queue of the tree.

        Now and then it also returns whether there are followers.
        """
        queue = queue_of(self._schema, execution.locked - execution.created)
        if queue is not None:
            queued = f"{settings.sql}, {ENTER_QUEUE}"
            settings = Query(queued, {**settings.parameters, "queue": queue})
        message = self.message(settings)
        followers = None if self._notifier is None else self._notifier.followers
        message.is_unread = followers is None or not followers.is_look_due()
        if followers is not None and not message.is_unread:
            message.text = f"{message.text}, {followers.look}"
        return message

    def _note_followers(self, reply: Reply) -> None:
        if reply.rows and self._notifier is not None:
            self._notifier.followers.note(reply.rows)

    def local(self, settings: Mapping[str, str]) -> list[Message]:
        """Return the statement that makes transaction-local settings, which poolers allow."""
        if self.settings.is_clock_virtual:
            settings = {**settings, "holdfast.now_ms": str(self.settings.clock.now_ms())}
        if not settings:
            return []
        calls = ", ".join(f"set_config('{name}', ${i}, true)" for i, name in enumerate(settings, 1))
        return [Message(f"SELECT {calls}", list(settings.values()))]

    def _reconnect(
        self, error: psycopg.Error, deadline: float, execution: Execution[Any], tries: int
    ) -> Steps[None]:
        """Back off before a retry; raise an error that another connection would not help."""
        left_seconds = deadline - time.monotonic()
        if not is_connection_lost(error) or left_seconds < 0:
            self.settings.hooks.report(execution, tries, error)
            raise translate(error) from error
        yield Sleep(min(_pause(tries), left_seconds))

    def _back_off(self, error: psycopg.Error, tries: int, call: Call[Any]) -> Steps[None]:
        if tries > SERIALIZATION_RETRIES_MAX:
            raise StoreBusy(
                f"{call.name} conflicted with other writers {tries} times: {error}"
            ) from error
        yield Sleep(_pause(tries))


def _lost(writer_id: str, batch: int) -> CommitLost:
    return CommitLost(writer_id, batch, psycopg.OperationalError("the connection was lost"))


def _pause(tries: int) -> float:
    longest = min(BACKOFF_SECONDS * 2 ** min(tries, 20), BACKOFF_SECONDS_MAX)
    return random.uniform(longest / 2, longest)
