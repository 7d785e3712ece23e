"""Effects in doubt: asking their tools, and what becomes of those that nobody can tell of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import Unresolved
from ..kernel.flow import Flow, invoke
from ..records import Effect
from .ledger import Ledger
from .rows import Doubt, Outcome
from .tools import Landed, NotLanded, Tool, Unknown, Verdict


def doubt_of(tool: Tool[..., Any]) -> Doubt:
    """Return what becomes of a call whose owner died."""
    if tool.verify is not None:
        return "verify"
    return tool.on_unknown if tool.effect == "mutate" else "retry"


def ask_about(tool: Tool[..., Any], effect: Effect, *, is_whole: bool) -> Flow[Verdict]:
    """Ask a tool's verify hook about a stored effect, whose arguments may lack their secrets.

    A hook that finds nothing may then have looked for the wrong thing.
    """
    assert tool.verify is not None
    verdict = yield from ask_verdict(tool.verify, effect.arguments, effect.idempotency_key)
    if isinstance(verdict, NotLanded) and not is_whole:
        return Unknown(
            "its stored arguments lack their secrets, or the store was opened without its key, so "
            "that NotLanded proves nothing"
        )
    return verdict


def ask_verdict(
    verify: Callable[..., Any], arguments: dict[str, Any], idempotency_key: str
) -> Flow[Verdict]:
    """Ask a tool's verify hook; one that fails or says nothing clear has not told."""
    try:
        verdict = yield from invoke(verify, arguments, idempotency_key)
    except Exception as error:
        return Unknown(f"verify raised {describe(error)}")
    if isinstance(verdict, Landed | NotLanded | Unknown):
        return verdict
    if isinstance(verdict, type) and issubclass(verdict, NotLanded | Unknown):
        return verdict()
    return Unknown(f"verify must return Landed(…), NotLanded() or Unknown(), not {verdict!r}")


def unknown_outcome(on_unknown: str, reason: str | None, why: str) -> Outcome:
    """Return what a tool's own rule makes of an effect that cannot be verified."""
    said = why or None
    if on_unknown == "retry":
        return Outcome("failed", "abandoned", error=said)
    if on_unknown == "fail":
        return Outcome("failed", "given_up", error=said or "nobody can tell whether it happened")
    return Outcome("unknown", reason or "owner_died", error=said)


def landed(ledger: Ledger, result: Any) -> Outcome:
    """Return the outcome of a call that a verify hook found to have happened."""
    found = ledger.storable(result)
    reason = "verified" if found.reason is None else found.reason
    return Outcome("completed", reason, found.result, found.error)


def unresolved(tool: str, id: str, error: str | None) -> Unresolved:
    """Return the error of a call whose effect is in doubt."""
    why = f" ({error})" if error else ""
    return Unresolved(
        f"nobody can tell whether {tool} happened{why}; effect {id} is parked and blocks equal "
        "calls until store.resolve(effect_id, Landed(…) or NotLanded(), by=…) or "
        f"`holdfast effects resolve {id}`",
        effect_id=id,
    )


def describe(error: BaseException) -> str:
    """Return an error as a line for people."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
