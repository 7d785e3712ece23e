"""Effects in doubt: verifying them, and the outcome of those that stay unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import Unresolved
from ..kernel.flow import Flow, invoke
from ..records import Effect
from .statements import EffectOutcome, Statements
from .tools import Landed, NotLanded, Tool, Unknown, Verdict


def verify(
    hook: Callable[..., Any],
    arguments: dict[str, Any],
    idempotency_key: str,
    *,
    is_unredacted: bool = True,
) -> Flow[Verdict]:
    """Call a tool's verify hook; Unknown if it raises or returns anything but a verdict.

    NotLanded is not trusted if the arguments are redacted: the hook looked for the wrong thing.
    """
    try:
        verdict = yield from invoke(hook, arguments, idempotency_key)
    except Exception as error:
        return Unknown(f"verify raised {describe(error)}")
    if isinstance(verdict, type) and issubclass(verdict, NotLanded | Unknown):
        verdict = verdict()
    if isinstance(verdict, NotLanded) and not is_unredacted:
        return Unknown(
            "its stored arguments are redacted, or the store was opened without its key, so "
            "NotLanded proves nothing"
        )
    if isinstance(verdict, Landed | NotLanded | Unknown):
        return verdict
    return Unknown(f"verify must return Landed(…), NotLanded() or Unknown(), not {verdict!r}")


def settle(
    statements: Statements,
    tool: Tool[..., Any],
    verdict: Verdict,
    *,
    of: Effect | None = None,
    reason: str | None = None,
    error: str | None = None,
) -> EffectOutcome:
    """Return the outcome of an effect in doubt. The one place where it is decided.

    `of` is the attempt of a dead owner, to which `max_attempts` applies: park, do not retry.
    """
    reason = reason or (None if of is None else of.reason) or "owner_died"
    if isinstance(verdict, Landed):
        outcome = statements.storable(verdict.result)
        outcome.reason = outcome.reason or "verified"
        return outcome
    outcome = EffectOutcome("failed", "not_landed", error=error)
    if isinstance(verdict, Unknown):
        outcome = EffectOutcome("unknown", reason, error=_joined(error, verdict.why))
        if tool.if_unknown == "retry":
            outcome.status, outcome.reason = "failed", "abandoned"
        elif tool.if_unknown == "fail":
            outcome.status, outcome.reason = "failed", "given_up"
            outcome.error = outcome.error or "its outcome is unknown"
    most = tool.max_attempts
    is_retried = outcome.reason in {"not_landed", "abandoned"}
    if is_retried and of is not None and most is not None and of.attempt >= most:
        limit = f"it was not run again after attempt {of.attempt}, as max_attempts is {most}"
        return EffectOutcome("unknown", reason, error=_joined(outcome.error, limit))
    return outcome


def _joined(*texts: str | None) -> str | None:
    return "; ".join(filter(None, texts)) or None


def unresolved(tool: str, id: str, error: str | None) -> Unresolved:
    """Return the error of a call whose effect is in doubt."""
    why = f" ({error})" if error else ""
    return Unresolved(
        f"the outcome of {tool} is unknown{why}; effect {id} is parked and blocks identical calls. "
        "Resolve it with store.resolve(effect_id, Landed(…) or NotLanded(), by=…) or "
        f"`holdfast effects resolve {id}`",
        effect_id=id,
    )


def describe(error: BaseException) -> str:
    """Return an error as one line of text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
