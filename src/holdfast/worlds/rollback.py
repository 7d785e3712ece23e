"""Checkpoints and rollbacks of several systems: all of them or none, or the error says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, InvalidValue, RollbackError
from .system import System

Systems = Mapping[str, System]
Tokens = Mapping[str, Any]


def take_tokens(systems: Systems, name: str) -> dict[str, Any]:
    """Have every system keep its state; if one cannot, the others forget theirs."""
    tokens: dict[str, Any] = {}
    for system_name, system in systems.items():
        try:
            token = system.checkpoint(name)
            if token is None:
                raise InvalidValue("its token is None.", path="token")
            tokens[system_name] = token
        except BaseException as error:
            _release(systems, tokens, error)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"System {system_name} could not make checkpoint {name}: {error}",
                system=system_name,
            ) from error
    return tokens


def _release(systems: Systems, tokens: Tokens, error: BaseException) -> None:
    for name in reversed(list(tokens)):
        try:
            systems[name].release(tokens[name])
        except Exception as problem:
            error.add_note(f"System {name} could not release its snapshot: {problem}")


def require_prepared(systems: Systems, tokens: Tokens) -> None:
    """Ask each system whether it can restore its token; raise RollbackError if one refuses."""
    outcomes = dict.fromkeys(systems, "untouched")
    refusal: Exception | None = None
    for name, system in systems.items():
        try:
            system.prepare(tokens[name])
        except Exception as error:
            refusal = refusal or error
            outcomes[name] = f"refused: {_said(error)}"
    if refusal is not None:
        raise _failed(outcomes, is_consistent=True) from refusal


def move(systems: Systems, target: Tokens, origin: Tokens | None) -> None:
    """Restore the target in every system; if one fails, the origin in all that were touched.

    RollbackError says of each system where it is, and whether the origin was restored. Without
    an origin there is no way back.
    """
    outcomes = dict.fromkeys(systems, "untouched")
    touched: list[str] = []
    for name in _in_order(systems):
        touched.append(name)
        try:
            systems[name].rollback(target[name])
            outcomes[name] = "moved"
        except Exception as error:
            outcomes[name] = f"failed: {_said(error)}"
            is_consistent = origin is not None and _move_back(systems, origin, touched, outcomes)
            raise _failed(outcomes, is_consistent=is_consistent) from error


def _move_back(
    systems: Systems, origin: Tokens, touched: list[str], outcomes: dict[str, str]
) -> bool:
    is_back = True
    for name in reversed(touched):
        failure = outcomes[name] if outcomes[name] != "moved" else ""
        try:
            systems[name].rollback(origin[name])
            outcomes[name] = f"{failure}; moved back" if failure else "moved back"
        except Exception as error:
            is_back = False
            outcomes[name] = f"{failure or 'moved'}; not moved back: {_said(error)}"
    return is_back


def _in_order(systems: Systems) -> list[str]:
    """Return the likeliest to fail first, and last those that cannot go back again."""

    def rank(name: str) -> tuple[bool, bool]:
        return systems[name].rollback_order == "stack", systems[name].is_in_process

    return sorted(systems, key=rank)


def _failed(outcomes: dict[str, str], *, is_consistent: bool) -> RollbackError:
    listed = "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
    verdict = (
        "The world is where it was."
        if is_consistent
        else "The world is inconsistent; only a rollback that succeeds makes it usable again."
    )
    return RollbackError(
        f"The rollback failed. {listed}. {verdict}", outcomes=outcomes, is_consistent=is_consistent
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
