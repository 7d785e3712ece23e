"""Checkpoints and rollbacks of several systems: all or none, or the error says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, CheckpointInvalid, InvalidValue, RollbackError, SystemBusy
from .interrupts import Uninterrupted
from .system import System
from .words import message_of, said

Systems = Mapping[str, System]
Tokens = Mapping[str, Any]

MOVED = "moved"
_ORIGIN = "before rollback"


@dataclass(frozen=True, slots=True)
class Kept:
    """Stands for the token of a dead process: what that process kept, or None if it could not."""

    data: Any


def take_tokens(systems: Systems, name: str) -> dict[str, Any]:
    """Make a checkpoint in every system; if one cannot, the others release theirs."""
    tokens: dict[str, Any] = {}
    for system_name, system in systems.items():
        try:
            token = _checkpoint(system, name)
            if token is None:
                raise InvalidValue("its token is None.", path="token")
            tokens[system_name] = token
        except BaseException as error:
            release_all(systems, tokens, error)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"System {system_name} could not make checkpoint {name}: {message_of(error)}",
                system=system_name,
            ) from error
    return tokens


def keep_tokens(systems: Systems, tokens: Tokens, name: str) -> dict[str, Any]:
    """Return what another process needs to restore tokens; if one fails, all are released."""
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
                f"{message_of(error)}",
                system=system_name,
            ) from error
    return kept


def release_all(systems: Systems, tokens: Tokens, error: BaseException) -> None:
    """Have every system release its token; failures are added to the error as notes."""
    for name in reversed(list(tokens)):
        try:
            release(systems[name], tokens[name])
        except Exception as problem:
            error.add_note(f"System {name} could not release its snapshot: {problem}")


def require_prepared(systems: Systems, tokens: Tokens) -> None:
    """Ask each system whether it can restore its token; raise RollbackError if one refuses."""
    refused: dict[str, Exception] = {}
    for name, system in systems.items():
        token = tokens[name]
        try:
            if isinstance(token, Kept):
                _require_kept(token)
            elif system.is_interruptible:
                system.prepare(token)
            else:
                with Uninterrupted():
                    system.prepare(token)
        except Exception as error:
            refused[name] = error
    if refused:
        outcomes = dict.fromkeys(systems, "untouched")
        outcomes |= {name: f"refused: {said(error)}" for name, error in refused.items()}
        raise _failed(outcomes, is_consistent=True) from next(iter(refused.values()))


def move(systems: Systems, target: Tokens, origin: Tokens | None) -> None:
    """Restore the target in every system; if one fails, restore the origin in those that moved.

    Systems move in the given order. RollbackError says where each one is, and whether the origin
    was restored. Without an origin, nothing can be moved back.
    """
    moved: list[str] = []
    for name, system in systems.items():
        try:
            _restore(system, target[name])
        except Exception as error:
            outcomes = dict.fromkeys(systems, "untouched")
            outcomes |= dict.fromkeys(moved, MOVED)
            outcomes[name] = f"failed: {said(error)}"
            touched = moved if system.is_atomic else [*moved, name]
            is_consistent = origin is not None and _move_back(systems, origin, touched, outcomes)
            raise _failed(outcomes, is_consistent=is_consistent) from error
        moved.append(name)


def take_origin(systems: Systems, most: Systems) -> tuple[Systems, dict[str, Any]]:
    """Return all systems in the order in which they move, and tokens of the state of `most`.

    A system that cannot make a checkpoint now could not be moved back, so it moves last.
    """
    left: list[str] = []
    while True:
        try:
            rest = {name: most[name] for name in most if name not in left} if left else most
            tokens = take_tokens(rest, _ORIGIN)
        except CheckpointError as error:
            is_busy = isinstance(error.__cause__, SystemBusy)
            if not is_busy or not systems[error.system].leaves_without_checkpoint:
                raise
            left.append(error.system)
            # Then even a system that changes nothing when it fails is no longer the last to move.
            most = systems
        else:
            if not left:
                return systems, tokens
            return {name: systems[name] for name in sorted(systems, key=left.__contains__)}, tokens


def returning(systems: Systems) -> Systems:
    """Return the systems that may have to move back if one fails, given in the order of moves."""
    last = next(reversed(list(systems)), None)
    if last is None or not systems[last].is_atomic:
        return systems
    return {name: system for name, system in systems.items() if name != last}


def finish(systems: Systems, target: Tokens) -> dict[str, str]:
    """Restore the target in as many systems as possible; return the outcome of each."""
    outcomes = dict.fromkeys(target.keys() - systems.keys(), "failed: the world has no such system")
    for name, system in in_order(systems).items():
        try:
            if name not in target:
                raise CheckpointInvalid("the checkpoint does not include it")
            _restore(system, target[name])
            outcomes[name] = MOVED
        except Exception as error:
            outcomes[name] = f"failed: {said(error)}"
    return outcomes


def release(system: System, token: Any) -> None:
    """Have a system forget a token."""
    if system.is_interruptible:
        system.release(token)
        return
    with Uninterrupted():
        system.release(token)


def _checkpoint(system: System, name: str) -> object:
    if system.is_interruptible:
        return system.checkpoint(name)
    with Uninterrupted():
        return system.checkpoint(name)


def _restore(system: System, token: Any) -> None:
    if system.is_interruptible and not isinstance(token, Kept):
        system.rollback(token)
        return
    with Uninterrupted():
        if isinstance(token, Kept):
            system.restore(_require_kept(token))
        else:
            system.rollback(token)


def _require_kept(token: Kept) -> Any:
    if token.data is None:
        raise CheckpointInvalid("only the process that made the checkpoint can restore it")
    return token.data


def _move_back(
    systems: Systems, origin: Tokens, touched: list[str], outcomes: dict[str, str]
) -> bool:
    is_back = True
    for name in reversed(touched):
        failure = outcomes[name] if outcomes[name] != MOVED else ""
        try:
            if name not in origin:
                raise CheckpointInvalid("there is no checkpoint of the state that it left")
            _restore(systems[name], origin[name])
            outcomes[name] = f"{failure}; moved back" if failure else "moved back"
        except Exception as error:
            is_back = False
            outcomes[name] = f"{failure or 'moved'}; not moved back: {said(error)}"
    return is_back


def in_order(systems: Systems) -> dict[str, System]:
    """Return systems in the order of moves: likely failures first, those without return last."""

    def rank(named: tuple[str, System]) -> tuple[bool, bool, bool]:
        system = named[1]
        return system.rollback_order == "stack", system.is_in_process, system.is_atomic

    return dict(sorted(systems.items(), key=rank))


def _failed(outcomes: dict[str, str], *, is_consistent: bool) -> RollbackError:
    listed = "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
    verdict = (
        "The world is as it was before."
        if is_consistent
        else "The world is inconsistent until a rollback succeeds."
    )
    return RollbackError(
        f"The rollback failed. {listed}. {verdict}", outcomes=outcomes, is_consistent=is_consistent
    )
