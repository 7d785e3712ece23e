"""A pytest file that repeats the path to a violation, to be kept with the code under test."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..arguments import require_path, shown
from ..errors import InvalidArgument
from .actions import Action

if TYPE_CHECKING:
    from .graph import StateGraph
    from .invariants import Violation
    from .world import World

Place = tuple[str, str]

# Names that the generated test uses itself.
_NAMES: Final = {"world", "outcome", "assert_holds", "repr"}


def reproducer(violation: Violation, graph: StateGraph, make_world: Callable[[], World]) -> str:
    """Return a test that fails until the violation is fixed.

    The function that returns the world, the actions and the invariant are imported from their
    modules, so they must be defined at the top level there; arguments must be literals.
    """
    actions = {step.action: graph.action(step.action) for step in violation.path}
    names = {name: place_of(found, found.run) for name, found in actions.items()}
    maker = place_of(make_world, make_world)
    checked = violation.check
    check = None if checked is None else place_of(checked, checked.check)
    called = _called([maker, *names.values(), *([check] if check else [])])
    lines = []
    for index, step in enumerate(violation.path, 1):
        given = "".join(_given(name, value) for name, value in step.arguments.items())
        call = f"world.act({called[names[step.action]]}{given})"
        is_judged = check is None and index == len(violation.path)
        lines.append(f"outcome = {call}" if is_judged else call)
    if check is None:
        lines.append("assert not outcome.is_failure, repr(outcome.error)")
    else:
        lines.append(f"assert_holds(world, {called[check]})")
    return _file(violation, called[maker], called, lines)


def write_reproducer(
    violation: Violation, graph: StateGraph, make_world: Callable[[], World], path: str | Path
) -> Path:
    """Write a reproducer to a file, and return its path."""
    file = require_path(path)
    text = reproducer(violation, graph, make_world)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _called(places: list[Place]) -> dict[Place, str]:
    """Return the name of each in the file: its own, or another if that is already taken."""
    called: dict[Place, str] = {}
    for place in sorted(set(places)):
        name = place[1]
        is_taken = name in _NAMES or name in called.values() or name.lower().startswith("test")
        called[place] = f"imported_{len(called)}_{name}" if is_taken else name
    return called


def _given(name: str, value: object) -> str:
    if name.isidentifier() and not iskeyword(name):
        return f", {name}={_literal(value)}"
    return f", **{{{name!r}: {_literal(value)}}}"


def _file(violation: Violation, maker: str, called: dict[Place, str], lines: list[str]) -> str:
    modules: dict[str, list[str]] = {}
    for (module, name), alias in called.items():
        modules.setdefault(module, []).append(name if name == alias else f"{name} as {alias}")
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


def place_of(thing: object, function: Callable[..., Any]) -> Place:
    """Return the module and name by which something can be imported."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module), name, None)
    kind = (thing.name if isinstance(thing, Action) else name) or shown(thing)
    if found is not thing and found is not function:
        raise InvalidArgument(
            f"{kind} cannot be imported: it must be defined at the top level of a module"
        )
    if module == "__main__":
        raise InvalidArgument(
            f"{kind} cannot be imported: it is defined in the main program; "
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
