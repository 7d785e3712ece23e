"""Asking a model: within the budget, with retries, every attempt written down before it is made."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

from ..errors import HoldfastError, ModelFailed, RequestMismatch
from ..kernel.flow import CancelledAfterwards, Flow, invoke, perform, wait
from ..spend import Spend, SpendState
from .budget import Usage
from .commits import AFTER, Attempt, CommitOps
from .models import ModelError, Request, Response, estimate_of, name_of, response_of
from .progress import Asking, AttemptFailed
from .rules import BACKOFF_SECONDS_MAX, Rules
from .transcript import Message, with_unique_calls

Begin = Callable[[Attempt], Flow[Spend]]
Tell = Callable[[Any], Flow[None]]
ERROR_CHARACTERS_MAX = 2_000


class Asker:
    """One question to the model, with all its attempts."""

    def __init__(
        self,
        rules: Rules,
        session: Any,
        commits: CommitOps,
        iteration: int,
        after: str | None,
        tell: Tell,
    ) -> None:
        self._rules = rules
        self._session = session
        self._commits = commits
        self._iteration = iteration
        self._after = after
        self._tell = tell
        self._name = name_of(rules.model)

    def ask(
        self, make_request: Callable[[], Request], begin: Begin, taken: set[str]
    ) -> Flow[tuple[Message, Usage]]:
        """Return the model's message, stored with what it cost.

        `begin` stores the first attempt together with what the conversation still lacks.
        """
        for number in range(1, self._rules.retries + 2):
            estimate = yield from self._estimate(make_request())
            attempt = self._attempt("open", estimate, number)
            if number == 1:
                spend = yield from begin(attempt)
            else:
                spend = yield from perform(
                    CommitOps.ask_again, self._commits, attempt, self._rules.budget
                )
            yield from self._tell(
                Asking(iteration=self._iteration, attempt=number, estimate=estimate)
            )
            try:
                response = yield from self._invoke(make_request())
            except CancelledAfterwards as cancelled:
                yield from self._keep_last_answer(spend, estimate, number, taken, cancelled)
                raise asyncio.CancelledError from cancelled
            except BaseException as error:
                yield from self._failed(spend, estimate, number, error)
                continue
            return (yield from self._store(spend, response, number, taken))
        raise AssertionError("the last attempt answers or raises")

    def _estimate(self, request: Request) -> Flow[Usage]:
        """Return what the model says that the call may cost."""
        estimate = Usage()
        if hasattr(self._rules.model, "estimate"):
            estimate = yield from invoke(estimate_of, self._rules.model, request)
        return estimate

    def _invoke(self, request: Request) -> Flow[Response]:
        model: Any = self._rules.model
        if self._session.runtime.is_async:
            model = getattr(model, "acall", model)
        return response_of(self._rules.model, (yield from invoke(model, request)))

    def _attempt(
        self,
        state: SpendState,
        usage: Usage,
        number: int,
        spend: Spend | None = None,
        *,
        model: str | None = None,
        error: str | None = None,
    ) -> Attempt:
        details = {"iteration": self._iteration, "attempt": number, AFTER: self._after}
        return Attempt(
            model=model or self._name,
            source=self._rules.source if number == 1 else "retry",
            usage=usage,
            state=state,
            id=None if spend is None else spend.id,
            details=details if error is None else {**details, "error": error},
        )

    def _store(
        self, spend: Spend, response: Response, number: int, taken: set[str]
    ) -> Flow[tuple[Message, Usage]]:
        model = response.model or self._name
        settled = self._attempt("settled", response.usage, number, spend, model=model)
        metadata = {"model": model, **response.metadata}
        message = Message(role="assistant", blocks=tuple(response.blocks), metadata=metadata)
        data = {
            "iteration": self._iteration,
            "attempt": number,
            "model": model,
            "spend_id": spend.id,
            "input_tokens": response.usage.input_tokens,
            "output_tokens": response.usage.output_tokens,
            "usd": None if response.usage.usd is None else str(response.usage.usd),
        }
        unique = with_unique_calls(message, taken)
        try:
            stored = yield from perform(CommitOps.answered, self._commits, unique, data, settled)
        except HoldfastError:
            # The answer is lost with the session or does not fit into it, but it was paid for.
            # What a person has corrected meanwhile stands.
            with contextlib.suppress(RequestMismatch):
                yield from perform(CommitOps.spent, self._commits, settled)
            raise
        return stored, response.usage

    def _keep_last_answer(
        self,
        spend: Spend,
        estimate: Usage,
        number: int,
        taken: set[str],
        cancelled: CancelledAfterwards,
    ) -> Flow[None]:
        """Store what a model in a thread still answered after its caller was cancelled."""
        error = cancelled.ended.exception()
        if error is not None:
            yield from self._failed(spend, estimate, number, cancelled)
        response = response_of(self._rules.model, cancelled.ended.result())
        yield from self._store(spend, response, number, taken)

    def _failed(
        self, spend: Spend, estimate: Usage, number: int, error: BaseException
    ) -> Flow[None]:
        """Write down a failed attempt; return when it is time to try again, or raise."""
        rules = self._rules
        is_retryable = isinstance(error, rules.retry_on)
        state: SpendState = "uncertain"
        usage = estimate
        if isinstance(error, ModelError):
            is_retryable = is_retryable or error.is_retryable
            if error.usage is not None:
                state, usage = "failed", error.usage
        # A provider may repeat the key that it refuses.
        said = self._session.runtime.redactor.redact(f"{type(error).__name__}: {error}")
        said = said[:ERROR_CHARACTERS_MAX]
        attempt = self._attempt(state, usage, number, spend, error=said)
        data = {"iteration": self._iteration, "attempt": number, "error": said}
        yield from perform(CommitOps.failed, self._commits, attempt, data)
        retry_seconds = None
        if is_retryable and number <= rules.retries:
            longest = min(BACKOFF_SECONDS_MAX, rules.backoff_seconds * 2 ** (number - 1))
            asked_seconds = getattr(error, "retry_seconds", 0.0)
            retry_seconds = max(longest * random.uniform(0.5, 1), asked_seconds)
        yield from self._tell(
            AttemptFailed(
                iteration=self._iteration, attempt=number, error=said, retry_seconds=retry_seconds
            )
        )
        if retry_seconds is None:
            if not isinstance(error, Exception) or isinstance(error, HoldfastError):
                raise error
            raise ModelFailed(
                f"model {self._name} failed after {number} attempts, {said}; run again to go on",
                attempts=number,
                model=self._name,
            ) from error
        yield from wait(retry_seconds)
