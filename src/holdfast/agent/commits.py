"""The commits of the loop: each stores everything that belongs together, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..kernel.operation import Lock, Op, Runtime, fresh_id, one, operation
from ..records import Checkpoint, Kind
from ..session import Session
from ..spend import Spend, SpendOps, SpendState
from ..wire import travels
from .budget import Budget, Usage
from .transcript import TRANSCRIPT_CHANNEL, Message, ToolCall, ToolResult, stamped

NOW = "SELECT :now AS now_ms"
# In an attempt's details: the id of the previous answer. Attempts with equal ids are retries.
AFTER = "after"
LOST_MAX = 1_000


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A tool call with its result, before it is stored."""

    call: ToolCall
    result: ToolResult
    evidence: dict[str, Any]

    @property
    def message(self) -> Message:
        """The result as a message."""
        return Message(role="tool", blocks=(self.result,))


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAttempt:
    """One model call, as recorded in the ledger of spend."""

    model: str
    source: str
    usage: Usage
    state: SpendState
    id: str | None = None
    details: Mapping[str, Any] | None = None


@travels
class CommitOps:
    """The transactions of the loop, through the handle that drives the session."""

    def __init__(self, session: SpendOps) -> None:
        self._session = session

    @property
    def runtime(self) -> Runtime:
        """The store of the session."""
        return self._session.runtime

    def _to_wire(self) -> tuple[SpendOps]:
        """Return the session."""
        return (self._session,)

    @classmethod
    def _from_wire(cls, runtime: Runtime, session: SpendOps) -> CommitOps:
        """Return them for a session."""
        return cls(session)

    @operation
    def flush(
        self,
        executed: Sequence[Executed],
        channels: Mapping[str, Any],
        iteration: int,
        messages: Sequence[Message] = (),
        attempt: ModelAttempt | None = None,
        budget: Budget | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> Op[tuple[list[Message], Spend | None]]:
        """Store tool results and changed channels that are not stored yet.

        With an attempt, also record that the model is about to be called; with an error, why the
        run stops. Both come with the user's new messages.
        """
        spend = None
        if attempt is not None and budget is not None:
            spend = yield from CommitOps.reserve(self, attempt, budget)
        stored = yield from self._store_executed(executed)
        data: Mapping[str, Any] = {"iteration": iteration}
        if channels:
            yield from Session.save(self._session, channels, kind="turn", data=data)
        if attempt is not None or error is not None:
            kind: Kind = "iteration_start" if error is None else "error_boundary"
            stamped_messages = yield from self._stamp(messages)
            yield from self._append(stamped_messages, kind, data if error is None else error)
            stored += stamped_messages
        return stored, spend

    @operation
    def answered(
        self, message: Message, data: Mapping[str, Any], attempt: ModelAttempt
    ) -> Op[Message]:
        """Store the model's message and its cost, before its tools run."""
        (stored,) = yield from self._stamp([message])
        yield from self._append([stored], "llm_response", data)
        yield from CommitOps.spend(self, attempt)
        yield from self._reconcile(attempt)
        return stored

    @operation
    def failed(self, attempt: ModelAttempt, data: Mapping[str, Any]) -> Op[None]:
        """Store that a model call failed, and its cost."""
        yield from CommitOps.spend(self, attempt)
        yield from Session.record(self._session, "error_boundary", dict(data))

    @operation
    def end_turn(
        self,
        executed: Sequence[Executed],
        channels: Mapping[str, Any],
        iteration: int,
        budget: Budget,
    ) -> Op[tuple[list[Message], Checkpoint]]:
        """Store the results of a turn, and its checkpoint with transcript, plan and budget."""
        stored = yield from self._store_executed(executed)
        data = {"iteration": iteration}
        yield from Session.record(self._session, "iteration_end", data)
        spent = yield from Session.spent(self._session, tree=budget.tree)
        everything = {**channels, "budget": budget.describe(spent)}
        checkpoint = yield from Session.save(self._session, everything, kind="turn", data=data)
        return stored, checkpoint

    def _store_executed(self, executed: Sequence[Executed]) -> Op[list[Message]]:
        stored = yield from self._stamp([each.message for each in executed])
        for each, message in zip(executed, stored, strict=True):
            yield from self._append([message], "tool_executed", each.evidence)
        return stored

    def _append(self, messages: Sequence[Message], kind: Kind, data: Mapping[str, Any]) -> Op[None]:
        plain = [message.to_plain() for message in messages]
        yield from Session.append(
            self._session, TRANSCRIPT_CHANNEL, plain, kind=kind, data=dict(data)
        )

    def _stamp(self, messages: Sequence[Message]) -> Op[list[Message]]:
        if not messages:
            return []
        row = yield from one(NOW)
        assert row is not None
        done = []
        for message in messages:
            message_id = yield from fresh_id()
            block_ids = []
            for _ in message.blocks:
                block_ids.append((yield from fresh_id()))
            done.append(stamped(message, message_id, int(row["now_ms"]), block_ids))
        return done

    @operation
    def reserve(self, attempt: ModelAttempt, budget: Budget) -> Op[Spend]:
        """Record an attempt with its estimate, or raise BudgetExceeded.

        The tree is locked first, so that no other session of it can spend the same money.
        """
        yield Lock(self._session.root_id)
        spent = yield from Session.spent(self._session, tree=budget.tree)
        budget.check(spent, attempt.usage)
        return (yield from CommitOps.spend(self, attempt))

    def _reconcile(self, attempt: ModelAttempt) -> Op[None]:
        """Replace the estimates of lost attempts at the same answer by what this one cost.

        They stay uncertain, and can still be corrected.
        """
        if attempt.usage == Usage():
            return
        lost = yield from Session.spends(self._session, state="uncertain", limit=LOST_MAX)
        for each in lost:
            details = each.details if isinstance(each.details, dict) else {}
            if AFTER in details and details[AFTER] == (attempt.details or {}).get(AFTER):
                counted = {**details, "counted_as": attempt.id}
                repeated = replace(
                    attempt, source=each.source, state="uncertain", id=each.id, details=counted
                )
                yield from CommitOps.spend(self, repeated)

    @operation
    def spend(self, attempt: ModelAttempt) -> Op[Spend]:
        """Record an attempt, or its outcome, in the ledger of spend."""
        return (
            yield from Session.spend(
                self._session,
                attempt.model,
                source=attempt.source,
                input_tokens=attempt.usage.input_tokens,
                output_tokens=attempt.usage.output_tokens,
                usd=attempt.usage.usd,
                state=attempt.state,
                id=attempt.id,
                details=attempt.details,
            )
        )
