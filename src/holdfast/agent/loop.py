"""The agent: a model, its tools, and a durable session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from ..arguments import require_text_or_none
from ..effects import Ledger
from ..effects.tools import Tool
from ..errors import InvalidArgument
from ..kernel.flow import Flow, perform, run_flow
from ..kernel.operation import Async, Sync
from ..maintenance.recovery import RecoveryOps
from ..session import Session
from ..store_sessions import StoreSessions
from .budget import Budget
from .models import Model
from .peers import Peer, by_tool_name
from .plan import Plan
from .rules import (
    BACKOFF_SECONDS,
    REPEATS_MAX,
    RETRIES,
    TURNS_MAX,
    Approve,
    Cadence,
    OnProgress,
    OnUnresolved,
    Permit,
    Rules,
    cadence_of,
    described,
)
from .run import AgentRun, Outcome

LEASE_SECONDS = 60.0


class Agent:
    """A durable agent loop: killed at any point, it continues in another process.

    The model's message and its cost are stored before its tools run; tools run through the ledger
    of effects. `run` drives a session of a sync store, `arun` one of an async store. When the model
    has answered, the session is completed; a new message reopens it. A session that the caller
    drives already is left open.
    """

    def __init__(
        self,
        session: Session[Sync] | Session[Async],
        model: Model,
        *,
        tools: Sequence[Tool[..., Any]] = (),
        peers: Sequence[Peer] = (),
        system: str | None = None,
        budget: Budget | None = None,
        cadence: Cadence | Literal["turn", "call"] = "turn",
        plan: Plan | msgspec.UnsetType | None = msgspec.UNSET,
        planning: bool = False,
        permit: Permit | None = None,
        approve: Approve | None = None,
        on_unresolved: OnUnresolved = "stop",
        on_progress: OnProgress | None = None,
        repeats_max: int | None = REPEATS_MAX,
        turns_max: int = TURNS_MAX,
        retries: int = RETRIES,
        backoff_seconds: float = BACKOFF_SECONDS,
        retry_on: tuple[type[BaseException], ...] = (TimeoutError, ConnectionError),
        settings: Mapping[str, Any] | None = None,
        scratchpad: str | Path | None = None,
        source: str = "agent",
        holder: str | None = None,
        instance: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        if not isinstance(session, Session):
            raise InvalidArgument(
                f"an agent needs a session (store.session(…)), not {type(session).__name__}"
            )
        known = described(tools)
        self._rules = Rules(
            model=model,
            tools=known,
            peers=by_tool_name(peers, known),
            system=system,
            budget=Budget() if budget is None else budget,
            cadence=cadence_of(cadence),
            settings=dict(settings or {}),
            planning=planning,
            permit=permit,
            approve=approve,
            on_unresolved=on_unresolved,
            on_progress=on_progress,
            repeats_max=repeats_max,
            turns_max=turns_max,
            retries=retries,
            backoff_seconds=backoff_seconds,
            retry_on=retry_on,
            scratchpad=None if scratchpad is None else Path(scratchpad).absolute(),
            source=source,
            instance=instance,
        )
        self.session = session
        # The same for all agents of a store: with `instance`, recovery fences all others.
        self._holder: str = holder or Ledger.of(session.runtime).holder
        self._has_recovered = False
        self._lease: dict[str, Any] = {
            "holder": self._holder,
            "instance": instance,
            "lease_seconds": lease_seconds,
        }
        self._given_plan = plan
        self.plan: Plan | None = None if plan is msgspec.UNSET else plan
        self.scratchpad: Path | None = self._rules.scratchpad

    def run(self, message: str | None = None, *, message_id: str | None = None) -> Outcome:
        """Finish the interrupted turn, then add the message and continue until the model answers.

        Without a message it only continues. A message with an id is added once, however often the
        process is restarted. Raises SessionEnded if the session failed or was cancelled,
        Unresolved when an effect is in doubt, SessionWaiting when it waits for peers,
        BudgetExceeded, LoopDetected, ApprovalNeeded or ModelFailed; the work so far is kept, and
        `run` continues from it.
        """
        session, said = self._checked(message, message_id, is_async=False)
        driver = session.runtime.driver.twin()
        if session.fence is not None:
            return run_flow(driver, self._flow(session, *said))
        old = run_flow(driver, self._prepare(*said))
        if old is not None:
            return old
        if session.item is not None:
            return run_flow(driver, self._flow(session.item.drive(), *said, ends=True))
        with session.drive(**self._lease) as driven:
            return run_flow(driver, self._flow(driven, *said, ends=True))

    async def arun(self, message: str | None = None, *, message_id: str | None = None) -> Outcome:
        """Do what `run` does, with a session of an async store."""
        session, said = self._checked(message, message_id, is_async=True)
        run = session.runtime.run_flow
        if session.fence is not None:
            return cast("Outcome", await run(self._flow(session, *said)))
        old: Outcome | None = await run(self._prepare(*said))
        if old is not None:
            return old
        if session.item is not None:
            driven = await session.item.drive()
            return cast("Outcome", await run(self._flow(driven, *said, ends=True)))
        async with session.drive(**self._lease) as driven:
            return cast("Outcome", await run(self._flow(driven, *said, ends=True)))

    def _checked(
        self, message: str | None, message_id: str | None, *, is_async: bool
    ) -> tuple[Session[Any], tuple[str | None, str | None]]:
        if self.session.runtime.is_async and not is_async:
            raise InvalidArgument("the session is of an async store; use `await agent.arun(…)`")
        if is_async and not self.session.runtime.is_async:
            raise InvalidArgument("the session is of a sync store; use `agent.run(…)`")
        if message is not None and not isinstance(message, str):
            raise InvalidArgument(f"message must be text, not {type(message).__name__}")
        require_text_or_none("message_id", message_id)
        return self.session, (message, message_id)

    def _prepare(self, message: str | None, message_id: str | None) -> Flow[Outcome | None]:
        """Return the stored answer of a completed session; reopen it for a new message."""
        if self.session.item is None:
            yield from self._recover()
        info = yield from perform(Session.info, self.session)
        if info.status != "completed":
            return None
        running = AgentRun(self._rules, self.session, self._given_plan)
        old = yield from running.stored_answer(message, message_id)
        if old is not None:
            self.plan = running.plan
        elif message is not None:
            yield from perform(
                StoreSessions.session, StoreSessions(self.session.runtime), info.id, reopen=True
            )
        return old

    def _recover(self) -> Flow[None]:
        """Recover the store once; a caller that drives the session has done so already."""
        if not self._has_recovered:
            yield from RecoveryOps.recover(
                RecoveryOps(self.session.runtime),
                self._holder,
                instance=self._rules.instance,
                tools=list(self._rules.tools.values()),
            )
            self._has_recovered = True

    def _flow(
        self, session: Any, message: str | None, message_id: str | None, *, ends: bool = False
    ) -> Flow[Outcome]:
        running = AgentRun(self._rules, session, self._given_plan, ends=ends)
        try:
            return (yield from running.run(message, message_id))
        finally:
            self.plan, self.scratchpad = running.plan, running.scratchpad
