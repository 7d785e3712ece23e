"""Checkpoints and rollbacks of several systems: all of them or none, or the error says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, CheckpointInvalid, InvalidValue, RollbackError
from .system import System

Systems = Mapping[str, System]
Tokens = Mapping[str, Any]

MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Kept:
    """Stands for the token of a process that died: what that kept, or None if it could not."""

    data: Any


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
            release_all(systems, tokens, error)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"System {system_name} could not make checkpoint {name}: {error}",
                system=system_name,
            ) from error
    return tokens


def keep_tokens(systems: Systems, tokens: Tokens, name: str) -> dict[str, Any]:
    """Return what another process needs to restore new tokens; if one fails, all are released."""
    kept: dict[str, Any] = {}
    for system_name, system in systems.items():
        try:
            kept[system_name] = system.keep(tokens[system_name])
        except BaseException as error:
            release_all(systems, tokens, error)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"System {system_name} could not keep checkpoint {name} for another process: "
                f"{error}",
                system=system_name,
            ) from error
    return kept


def release_all(systems: Systems, tokens: Tokens, error: BaseException) -> None:
    """Have every system forget its token; what fails is noted at the error."""
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
            if isinstance(tokens[name], Kept):
                _require_kept(tokens[name])
            else:
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
            _restore(systems[name], target[name])
            outcomes[name] = MOVED
        except Exception as error:
            outcomes[name] = f"failed: {_said(error)}"
            is_consistent = origin is not None and _move_back(systems, origin, touched, outcomes)
            raise _failed(outcomes, is_consistent=is_consistent) from error


def finish(systems: Systems, target: Tokens) -> dict[str, str]:
    """Restore the target in as many systems as possible; return where each is."""
    outcomes = dict.fromkeys(target.keys() - systems.keys(), "failed: the world has no such system")
    for name in _in_order(systems):
        try:
            if name not in target:
                raise CheckpointInvalid("the checkpoint lacks it")
            _restore(systems[name], target[name])
            outcomes[name] = MOVED
        except Exception as error:
            outcomes[name] = f"failed: {_said(error)}"
    return outcomes


def _restore(system: System, token: Any) -> None:
    if isinstance(token, Kept):
        system.restore(_require_kept(token))
    else:
        system.rollback(token)


def _require_kept(token: Kept) -> Any:
    if token.data is None:
        raise CheckpointInvalid("only the process that made the checkpoint could restore it")
    return token.data


def _move_back(
    systems: Systems, origin: Tokens, touched: list[str], outcomes: dict[str, str]
) -> bool:
    is_back = True
    for name in reversed(touched):
        failure = outcomes[name] if outcomes[name] != MOVED else ""
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
