"""A pytest file that repeats the path to a violation, for the code under test to keep."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import require_path, shown
from ..errors import InvalidArgument
from .actions import Action

if TYPE_CHECKING:
    from .graph import StateGraph
    from .invariants import Violation
    from .world import World


def reproducer(violation: Violation, graph: StateGraph, make_world: Callable[[], World]) -> str:
    """Return a test that fails until the violation is fixed.

    The function that makes the world, the actions and the invariant are imported from their
    modules, so they must stand at the top level there; arguments must be literals.
    """
    actions = {step.action: graph.action(step.action) for step in violation.path}
    names = {name: place_of(found, found.run) for name, found in actions.items()}
    maker = place_of(make_world, make_world)
    places = {maker, *names.values()}
    lines = []
    for index, step in enumerate(violation.path, 1):
        given = "".join(f", {name}={_literal(value)}" for name, value in step.arguments.items())
        call = f"world.act({names[step.action][1]}{given})"
        is_judged = violation.check is None and index == len(violation.path)
        lines.append(f"outcome = {call}" if is_judged else call)
    if violation.check is None:
        lines.append("assert not outcome.is_failure, repr(outcome.error)")
    else:
        check = place_of(violation.check, violation.check.check)
        places.add(check)
        lines.append(f"assert_holds(world, {check[1]})")
    return _file(violation, maker[1], sorted(places), lines)


def write_reproducer(
    violation: Violation, graph: StateGraph, make_world: Callable[[], World], path: str | Path
) -> Path:
    """Write such a test to a file, and return its path."""
    file = require_path(path)
    text = reproducer(violation, graph, make_world)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _file(violation: Violation, maker: str, places: list[tuple[str, str]], lines: list[str]) -> str:
    modules: dict[str, list[str]] = {}
    for module, name in places:
        modules.setdefault(module, []).append(name)
    if violation.check is not None:
        modules.setdefault("holdfast.worlds", []).append("assert_holds")
    imports = [f"from {module} import {', '.join(names)}" for module, names in modules.items()]
    said = ascii(f"{violation.invariant}: {violation.message}")[1:-1].replace('"', "'")
    words = re.sub(r"\W+", "_", violation.invariant, flags=re.ASCII).strip("_").lower()
    return "\n".join(
        [
            f'"""{said}"""',
            "",
            *sorted(imports),
            "",
            "",
            f"def test_{words}() -> None:",
            f"    with {maker}() as world:",
            *(f"        {line}" for line in lines),
            "",
        ]
    )


def place_of(thing: object, function: Callable[..., Any]) -> tuple[str, str]:
    """Return where something can be imported from."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None)
    kind = (thing.name if isinstance(thing, Action) else name) or shown(thing)
    if found is not thing and found is not function:
        raise InvalidArgument(
            f"{kind} cannot be imported: it must be defined at the top level of a module"
        )
    if module == "__main__":
        raise InvalidArgument(
            f"{kind} cannot be imported: it stands in the program that runs; "
            "move it to a module that the program imports"
        )
    return module, name


def _literal(value: object) -> str:
    text = repr(value)
    try:
        is_same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        is_same = False
    if not is_same:
        raise InvalidArgument(f"{shown(value)} cannot be written into a test: it is not a literal")
    return text
