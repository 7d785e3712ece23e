"""Checkpoints and rollbacks of several systems: all of them or none, or the error says so."""

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
    """Stands for the token of a process that died: what that kept, or None if it could not."""

    data: Any


def take_tokens(systems: Systems, name: str) -> dict[str, Any]:
    """Have every system keep its state; if one cannot, the others forget theirs."""
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
                f"{message_of(error)}",
                system=system_name,
            ) from error
    return kept


def release_all(systems: Systems, tokens: Tokens, error: BaseException) -> None:
    """Have every system forget its token; what fails is noted at the error."""
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
    """Restore the target in every system; if one fails, the origin in all that were touched.

    They move in the order in which they are given. RollbackError says of each where it is, and
    whether the origin was restored. Without an origin there is no way back.
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
    """Return all systems in the order in which they move, and tokens of where `most` of them are.

    What leaves a state without a checkpoint cannot return there, so it moves after all others.
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
            # Even one that changes nothing if it fails is not the last any more.
            most = systems
        else:
            if not left:
                return systems, tokens
            return {name: systems[name] for name in sorted(systems, key=left.__contains__)}, tokens


def returning(systems: Systems) -> Systems:
    """Return those that may have to go back if one fails; they are given in the order of moves."""
    last = next(reversed(list(systems)), None)
    if last is None or not systems[last].is_atomic:
        return systems
    return {name: system for name, system in systems.items() if name != last}


def finish(systems: Systems, target: Tokens) -> dict[str, str]:
    """Restore the target in as many systems as possible; return where each is."""
    outcomes = dict.fromkeys(target.keys() - systems.keys(), "failed: the world has no such system")
    for name, system in in_order(systems).items():
        try:
            if name not in target:
                raise CheckpointInvalid("the checkpoint lacks it")
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
                raise CheckpointInvalid("the state that it left has no checkpoint")
            _restore(systems[name], origin[name])
            outcomes[name] = f"{failure}; moved back" if failure else "moved back"
        except Exception as error:
            is_back = False
            outcomes[name] = f"{failure or 'moved'}; not moved back: {said(error)}"
    return is_back


def in_order(systems: Systems) -> dict[str, System]:
    """Return the likeliest to fail first, and last those that cannot go back again."""

    def rank(named: tuple[str, System]) -> tuple[bool, bool, bool]:
        system = named[1]
        return system.rollback_order == "stack", system.is_in_process, system.is_atomic

    return dict(sorted(systems.items(), key=rank))


def _failed(outcomes: dict[str, str], *, is_consistent: bool) -> RollbackError:
    listed = "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items())
    verdict = (
        "The world is as it was before."
        if is_consistent
        else "The world is inconsistent; only a rollback that succeeds makes it usable again."
    )
    return RollbackError(
        f"The rollback failed. {listed}. {verdict}", outcomes=outcomes, is_consistent=is_consistent
    )
