"""What the PostgreSQL driver says to the server, in which order; written once for both colours.

A run is a generator of steps (take a connection, send a batch, give it back, sleep). The two
drivers only know how to perform these four. A batch is one round trip: BEGIN travels with the
first statement, the events with COMMIT.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import errors as pg

from ...errors import (
    CommitUnknown,
    HoldfastError,
    InvalidArgument,
    Refused,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ..attempt import Attempt, Boundary, Point, Trace
from ..marks import MARK, MarkOps, commit_id
from ..operation import Call, Query, Row
from ..settings import Settings
from ..sql import Dialect

R = TypeVar("R")
Run: TypeAlias = Generator["Step", Any, R]

POOL_CONNECTIONS_MAX = 16
BACKOFF_SECONDS = 0.005
BACKOFF_SECONDS_MAX = 0.5
SERIALIZATION_RETRIES_MAX = 50


@dataclass(slots=True)
class Message:
    """One statement on its way: its text in the server's dialect and its values in order."""

    text: str
    values: Sequence[object] = ()
    boundary: Boundary = "statement"
    is_unread: bool = False
    """Set where nobody looks at the rows that come back."""


@dataclass(slots=True)
class Acquire:
    """Take a connection from the pool."""

    timeout_seconds: float


@dataclass(slots=True)
class Send:
    """Send a batch in one round trip; the answer is one `Reply` per message."""

    connection: Any
    messages: Sequence[Message]
    is_commit: bool = False


@dataclass(slots=True)
class Release:
    """Give a connection back, or close it when it cannot be trusted any more."""

    connection: Any
    is_sound: bool


@dataclass(slots=True)
class Sleep:
    """Wait before the next try."""

    seconds: float


Step: TypeAlias = Acquire | Send | Release | Sleep


@dataclass(slots=True)
class Reply:
    """What the server answered to one message."""

    rows: list[Row]
    row_count: int


class CommitLost(Exception):
    """The connection broke while COMMIT was under way."""

    def __init__(self, writer_id: str, batch: int, error: psycopg.Error) -> None:
        super().__init__(writer_id, batch)
        self.writer_id = writer_id
        self.batch = batch
        self.error = error


class Protocol:
    """Runs calls as generators of steps."""

    def __init__(self, schema: str, settings: Settings) -> None:
        self.dialect = Dialect(schema)
        self.settings = settings
        self.is_marking = False
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
        self._takes_several: set[str] = set()

    def run(self, call: Call[R], *, repeats: bool = False) -> Run[R]:
        """Run a call in one transaction; re-run it while the server asks for that.

        One that `repeats` may be committed twice: a lost COMMIT of it is not asked for.
        """
        deadline = time.monotonic() + self.settings.busy_timeout_seconds
        runs = self._write if call.mode == "write" else self._read
        tries = 0
        lock_first: set[str] = set()
        while True:
            tries += 1
            attempt = Attempt(call, self.settings.services, lock_first)
            try:
                yield from self._once(attempt, runs, deadline)
            except (pg.DeadlockDetected, pg.SerializationFailure) as error:
                yield from self._back_off(error, tries, call)
            except CommitLost as lost:
                if not repeats and (yield from self._settle(lost)):
                    break
                self._check_time(lost.error, deadline, attempt, tries)
            except psycopg.Error as error:
                if isinstance(error, pg.LockNotAvailable) and attempt.is_lock_immediate:
                    lock_first.update(attempt.locked)
                    continue
                self._check_time(error, deadline, attempt, tries)
                # A server that was restarted leaves a pool of dead connections: each try takes
                # one out, and waits inside the pool when there is none left.
                if tries > POOL_CONNECTIONS_MAX:
                    yield Sleep(BACKOFF_SECONDS_MAX)
            except BaseException as error:
                self._trace(attempt, tries, error)
                raise
            else:
                break
        self._trace(attempt, tries, None)
        attempt.run_hooks()
        return attempt.result

    def join(self, connection: Any, call: Call[R]) -> Run[R]:
        """Run a call inside somebody else's transaction, in a savepoint; hooks are not run."""
        attempt = Attempt(call, self.settings.services)
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

    def _once(self, attempt: Attempt[R], runs: Any, deadline: float) -> Run[None]:
        """Run the attempt on one connection, which is given back whatever happens."""
        connection = yield Acquire(max(0.1, deadline - time.monotonic()))
        try:
            yield from runs(connection, attempt)
        except Exception as error:
            yield from self._abandon(connection, error)
            raise
        except BaseException:
            # The caller was interrupted or cancelled at an unknown place of the exchange.
            yield Release(connection, is_sound=False)
            raise
        yield Release(connection, is_sound=True)

    def _abandon(self, connection: Any, error: Exception) -> Run[None]:
        """Roll back what an error left open; a connection that cannot do that is closed."""
        is_sound = not isinstance(error, CommitLost) and not is_connection_lost(error)
        if is_sound:
            try:
                yield Send(connection, [Message("ROLLBACK")])
            except psycopg.Error:
                is_sound = False
        yield Release(connection, is_sound=is_sound)

    def _write(self, connection: Any, attempt: Attempt[R]) -> Run[None]:
        """BEGIN … COMMIT; what changed nothing is rolled back and costs no sync."""
        if not attempt.queries and not attempt.emits:
            return
        opening = [Message("BEGIN", boundary="begin"), *self._open(connection)]
        has_changed = False
        while queries := attempt.queries:
            replies = yield from self._ask(connection, opening, attempt)
            opening = []
            has_changed |= any(map(self._changes, queries, replies))
            attempt.reply([reply.rows for reply in replies])
        closing = [self.message(query) for query in attempt.closing()]
        if not has_changed and not closing:
            yield from self._send(connection, [Message("ROLLBACK")], attempt)
            return
        commit = [*opening, *closing, Message("COMMIT", boundary="commit")]
        try:
            yield from self._send(connection, commit, attempt, is_commit=True)
        except psycopg.Error as error:
            # Without a mark it cannot be settled: a migration, which may be run again.
            if not is_connection_lost(error) or not self.is_marking:
                raise
            raise CommitLost(connection.writer_id, connection.batch, error) from error

    def _read(self, connection: Any, attempt: Attempt[R]) -> Run[None]:
        """One snapshot. A single SELECT is one by itself and needs no transaction around it."""
        if not attempt.queries:
            return
        call = attempt.call
        may_be_single = not self.settings.is_clock_virtual and len(attempt.queries) == 1
        if may_be_single and call.name not in self._takes_several:
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
        self, connection: Any, opening: Sequence[Message], attempt: Attempt[Any]
    ) -> Run[list[Reply]]:
        """Send what the attempt asks, behind what opens the transaction; return its answers."""
        messages = [self.message(query) for query in attempt.queries]
        replies = yield from self._send(connection, [*opening, *messages], attempt)
        return replies[len(opening) :]

    def _send(
        self,
        connection: Any,
        messages: Sequence[Message],
        attempt: Attempt[Any],
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
                replies += yield Send(connection, [message], is_commit=is_commit and last)
                probe(Point(message.boundary, "after", attempt.call.name, message.text))
            return replies
        answered: list[Reply] = yield Send(connection, messages, is_commit)
        return answered

    def _settle(self, lost: CommitLost) -> Run[bool]:
        """Ask on a new connection whether the lost COMMIT happened."""
        try:
            return (yield from self.is_committed(lost.writer_id, lost.batch))
        except StoreError as error:
            raise CommitUnknown(
                "the connection broke during COMMIT and the server cannot be asked whether the "
                "change was committed; ask store.settle(id)",
                id=commit_id(lost.writer_id, lost.batch),
            ) from error

    def is_committed(self, writer_id: str, batch: int) -> Run[bool]:
        """Tell whether a batch was committed; the row's lock waits for one still in flight."""
        call = Call(MarkOps.is_committed, MarkOps(), (writer_id, batch))
        return (yield from self.run(call, repeats=True))

    def message(self, query: Query) -> Message:
        """Return a query as the server takes it."""
        statement = self.dialect.statement(query.sql)
        return Message(statement.text, statement.values(query.parameters))

    def _changes(self, query: Query, reply: Reply) -> bool:
        statement = self.dialect.statement(query.sql)
        return statement.may_change and not (statement.counts_changes and reply.row_count == 0)

    def _open(self, connection: Any) -> list[Message]:
        """Return what stands first in a transaction that writes: its mark and its settings."""
        if not self.is_marking:
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

    def _check_time(
        self, error: psycopg.Error, deadline: float, attempt: Attempt[Any], tries: int
    ) -> None:
        """Raise an error that another connection would not help against, or that came too late."""
        if not is_connection_lost(error) or time.monotonic() > deadline:
            self._trace(attempt, tries, error)
            raise translate(error) from error

    def _back_off(self, error: psycopg.Error, tries: int, call: Call[Any]) -> Run[None]:
        if tries > SERIALIZATION_RETRIES_MAX:
            raise StoreBusy(f"{call.name} met other writers {tries} times: {error}") from error
        longest = min(BACKOFF_SECONDS * 2**tries, BACKOFF_SECONDS_MAX)
        yield Sleep(random.uniform(longest / 2, longest))

    def _trace(self, attempt: Attempt[Any], tries: int, error: BaseException | None) -> None:
        trace = self.settings.hooks.trace
        if trace is not None:
            name = None if error is None else type(error).__name__
            trace(Trace(attempt.call.name, attempt.statements, tries, name))


def is_connection_lost(error: Exception) -> bool:
    """Tell whether the connection is gone, so that what was sent may not have been seen."""
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate.startswith(("08", "57P", "25P03"))


_FULL = ("53100",)
_BUSY = ("55P03", "57014", "53300")


def translate(error: psycopg.Error) -> HoldfastError:
    """Return our error for one of PostgreSQL's."""
    state = error.sqlstate or ""
    reason = " ".join(str(error).split())
    if state in _FULL:
        return StoreFull(f"PostgreSQL has no room left: {reason}; nothing was written")
    if state in _BUSY:
        return StoreBusy(f"PostgreSQL kept the call waiting: {reason}; nothing was written")
    if state.startswith("23"):
        return Refused(f"the database refused the change: {reason}")
    if is_connection_lost(error):
        return StoreUnavailable(f"PostgreSQL cannot be reached: {reason}; nothing was written")
    return StoreError(f"PostgreSQL reports {state or 'an error'}: {reason}")
