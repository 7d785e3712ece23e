"""Model calls within the budget, with retries. Every attempt is recorded before it is made."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import HoldfastError, LimitExceeded, ModelFailed, RequestMismatch, described, quoted
from ..formatting import plural
from ..kernel.flow import (
    CancelledAfterwards,
    Flow,
    invoke,
    perform,
    perform_to_the_end,
    wait,
)
from ..spend import Spend, SpendState
from .budget import Usage
from .commits import AFTER, CommitOps, ModelAttempt
from .models import ModelError, Request, Response, estimate_of, name_of, response_of
from .progress import Asking, AttemptFailed
from .rules import BACKOFF_SECONDS_MAX, Rules
from .transcript import Message, with_unique_calls

Begin = Callable[[ModelAttempt], Flow[Spend]]
Report = Callable[[Any], Flow[None]]
ERROR_CHARACTERS_MAX = 2_000
WHAT_HELPS = (
    "open the store with a higher limit, or limit the model's output (its settings or system "
    "message). Unless that or the model is changed, or a message is added, it is not asked again"
)


@dataclass(slots=True, kw_only=True)
class ModelCall:
    """One call of the model, with its retries."""

    rules: Rules
    session: Any
    commits: CommitOps
    iteration: int
    after: str | None
    """The id of the previous answer."""
    taken: set[str]
    """The call ids that are in use."""
    report: Report
    is_unstorable: bool = field(default=False, init=False)
    """Whether the model's answer exceeded a limit of the store."""
    _number: int = field(default=0, init=False)
    _estimate: Usage = field(default_factory=Usage, init=False)
    _spend: Spend | None = field(default=None, init=False)

    def ask(self, make_request: Callable[[], Request], begin: Begin) -> Flow[tuple[Message, Usage]]:
        """Return the model's message, stored with its cost.

        `begin` records the first attempt together with everything not stored yet.
        """
        model: Any = self.rules.model
        for number in range(1, self.rules.retries + 2):
            self._number, self._estimate, self._spend = number, Usage(), None
            if hasattr(model, "estimate"):
                self._estimate = yield from invoke(estimate_of, model, make_request())
            attempt = self._attempt("open", self._estimate)
            if number == 1:
                self._spend = yield from begin(attempt)
            else:
                given = (self.commits, attempt, self.rules.budget)
                self._spend = yield from perform(CommitOps.reserve, *given)
            progress = {"iteration": self.iteration, "attempt": number}
            yield from self.report(Asking(**progress, estimate=self._estimate))
            called = getattr(model, "acall", model) if self.session.runtime.is_async else model
            try:
                answer = yield from invoke(called, make_request())
                response = response_of(model, answer)
            except CancelledAfterwards as cancelled:
                yield from self._keep_last_answer(cancelled)
                raise asyncio.CancelledError from cancelled
            except BaseException as error:
                yield from self._failed(error)
                continue
            return (yield from self._store(response))
        raise AssertionError("the last attempt answers or raises")

    def _attempt(
        self, state: SpendState, usage: Usage, model: str | None = None, **details: Any
    ) -> ModelAttempt:
        details |= {"iteration": self.iteration, "attempt": self._number, AFTER: self.after}
        return ModelAttempt(
            model=model or name_of(self.rules.model),
            source=self.rules.source if self._number == 1 else "retry",
            usage=usage,
            state=state,
            id=None if self._spend is None else self._spend.id,
            details=details,
        )

    def _store(
        self, response: Response, *, is_cancelled: bool = False
    ) -> Flow[tuple[Message, Usage]]:
        # An async store runs it once, whatever is cancelled.
        write = perform_to_the_end if is_cancelled else perform
        model = response.model or name_of(self.rules.model)
        settled = self._attempt("settled", response.usage, model)
        metadata = {"model": model, **response.metadata}
        message = Message(role="assistant", blocks=tuple(response.blocks), metadata=metadata)
        data = {
            "iteration": self.iteration,
            "attempt": self._number,
            "model": model,
            "spend_id": settled.id,
            "input_tokens": response.usage.input_tokens,
            "output_tokens": response.usage.output_tokens,
            "usd": None if response.usage.usd is None else str(response.usage.usd),
        }
        unique = with_unique_calls(message, self.taken)
        try:
            stored = yield from write(CommitOps.answered, self.commits, unique, data, settled)
        except HoldfastError as error:
            # The answer could not be stored, but it was paid for. A correction that a person has
            # made in the meantime is kept.
            with contextlib.suppress(RequestMismatch):
                yield from perform(CommitOps.spend, self.commits, settled)
            self.is_unstorable = isinstance(error, LimitExceeded)
            if self.is_unstorable:
                problem = f"{name_of(self.rules.model)} was paid for an answer that is not stored"
                raise LimitExceeded(
                    f"{problem}: {error} To go on, {WHAT_HELPS}", **error.fields
                ) from error
            raise
        return stored, response.usage

    def _keep_last_answer(self, cancelled: CancelledAfterwards) -> Flow[None]:
        """Store the answer of a model in a thread whose caller was cancelled."""
        if cancelled.ended.exception() is not None:
            yield from self._failed(cancelled)
        response = response_of(self.rules.model, cancelled.ended.result())
        yield from self._store(response, is_cancelled=True)

    def _failed(self, error: BaseException) -> Flow[None]:
        """Record a failed attempt; return when it is time to retry, or raise."""
        rules, number = self.rules, self._number
        is_retryable = isinstance(error, rules.retry_on)
        state: SpendState = "uncertain"
        usage = self._estimate
        if isinstance(error, ModelError):
            is_retryable = is_retryable or error.is_retryable
            if error.usage is not None:
                state, usage = "failed", error.usage
        # A provider's message may quote the API key that it rejects.
        text = self.session.runtime.redactor.redact(described(error))
        text = text[:ERROR_CHARACTERS_MAX]
        data = {"iteration": self.iteration, "attempt": number, "error": text}
        attempt = self._attempt(state, usage, error=text)
        yield from perform(CommitOps.failed, self.commits, attempt, data)
        retry_seconds = None
        if is_retryable and number <= rules.retries:
            # Exponential backoff with jitter.
            longest = min(BACKOFF_SECONDS_MAX, rules.backoff_seconds * 2 ** (number - 1))
            asked_seconds = getattr(error, "retry_seconds", 0.0)
            retry_seconds = max(longest * random.uniform(0.5, 1), asked_seconds)
        yield from self.report(AttemptFailed(**data, retry_seconds=retry_seconds))
        if retry_seconds is not None:
            yield from wait(retry_seconds)
        elif not isinstance(error, Exception) or isinstance(error, HoldfastError):
            raise error
        else:
            name = name_of(rules.model)
            raise ModelFailed(
                f"model {name} failed after {plural(number, 'attempt')}, {quoted(text)}; "
                "run again to continue",
                attempts=number,
                model=name,
            ) from error
