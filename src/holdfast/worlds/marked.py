"""The actions and invariants of a module, as the command line and the pytest plugin find them."""

from __future__ import annotations

from types import ModuleType

from .actions import Action
from .invariants import Invariant


def marked_in(module: ModuleType) -> tuple[list[Action], list[Invariant]]:
    """Return those in a module's namespace, imported or defined there, each once and in order."""
    actions: dict[Action, None] = {}
    invariants: dict[Invariant, None] = {}
    for thing in vars(module).values():
        if isinstance(thing, Action):
            actions[thing] = None
        elif isinstance(thing, Invariant):
            invariants[thing] = None
    return list(actions), list(invariants)
