"""Reports of an exploration: JSON, JUnit, Mermaid, DOT, and a page of HTML by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from ..arguments import require_path, shown
from ..errors import InvalidArgument
from .actions import Step
from .graph import State, StateGraph
from .invariants import Violation
from .result import Exploration
from .system import shown_id

# A picture of more is of no use to anybody.
_DRAWN_MAX: Final = 300
_CHANGES_MAX: Final = 30
_COLUMN: Final = 170
_ROW: Final = 46
_RADIUS: Final = 9


def write_report(result: Exploration, path: str | Path) -> Path:
    """Write the report that the end of the file's name asks for: .json, .xml, .html, .mmd, .dot."""
    file = report_file(path)
    file.write_text(_WRITERS[file.suffix](result), encoding="utf-8")
    return file


def report_file(path: str | Path) -> Path:
    """Return the path of a report, or raise InvalidArgument if its name says no known form."""
    file = require_path(path)
    if file.suffix not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise InvalidArgument(f"a report ends in one of {known}, and {shown(file.name)} does not")
    return file


def to_data(result: Exploration) -> dict[str, Any]:
    """Return everything as plain JSON data."""
    graph = result.graph
    return {
        "strategy": result.strategy,
        "ended": result.ended,
        "is_complete": result.is_complete,
        "has_passed": result.has_passed,
        "steps": result.steps,
        "seconds": result.seconds,
        "replayed": result.replayed,
        "unused_actions": result.unused_actions,
        "warnings": result.warnings,
        "leaks": [
            {"system": leak.system, "before": readable(leak.before), "after": readable(leak.after)}
            for leak in result.leaks
        ],
        "violations": list(map(violation_data, result.violations)),
        "states": [
            {
                "id": state.id,
                "depth": state.depth,
                "observations": {seen.system: readable(seen.data) for seen in state.observations},
            }
            for state in graph.states.values()
        ],
        "transitions": [
            {
                "from": run.from_id,
                "to": run.to_id,
                **_step(run.step),
                "error": None if run.outcome.error is None else repr(run.outcome.error),
                "seconds": run.outcome.seconds,
            }
            for run in graph.transitions
        ],
    }


def violation_data(violation: Violation) -> dict[str, Any]:
    """Return a violation with its path as plain JSON data."""
    return {
        "invariant": violation.invariant,
        "severity": violation.severity,
        "message": violation.message,
        "state": violation.state_id,
        "path": [_step(step) for step in violation.path],
    }


def to_json(result: Exploration) -> str:
    """Return everything as JSON."""
    return json.dumps(to_data(result), indent=1, ensure_ascii=False) + "\n"


def to_junit(result: Exploration) -> str:
    """Return a test suite in which every violation and every leak is a failed case."""
    failed = [(violation.invariant, str(violation)) for violation in result.violations]
    failed += [
        (f"rollback of {leak.system}", f"{leak.system} did not go back") for leak in result.leaks
    ]
    suite = ElementTree.Element(
        "testsuite",
        name=f"exploration ({result.strategy})",
        tests=str(len(failed) or 1),
        failures=str(len(failed)),
        time=f"{result.seconds:.3f}",
    )
    for name, message in failed or [("exploration", "")]:
        case = ElementTree.SubElement(suite, "testcase", classname="exploration", name=name)
        if message:
            ElementTree.SubElement(case, "failure", message=_printable(message))
    ElementTree.SubElement(suite, "system-out").text = _printable(result.summary())
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def to_mermaid(result: Exploration) -> str:
    """Return the graph as a Mermaid diagram, with the states that violate something marked."""
    lines = ["stateDiagram-v2"]
    names = {state.id: f"s{number}" for number, state in enumerate(_drawn(result.graph))}
    lines += [f'    state "{shown_id(id)}" as {name}' for id, name in names.items()]
    if result.graph.initial is not None:
        lines.append(f"    [*] --> {names[result.graph.initial.id]}")
    for run in result.graph.transitions:
        if run.from_id in names and run.to_id in names:
            label = str(run.step).replace(":", "#58;").replace(";", "#59;").replace("\n", " ")
            lines.append(f"    {names[run.from_id]} --> {names[run.to_id]} : {label}")
    lines.append("    classDef wrong fill:#f8d0d0,stroke:#b00000")
    lines += [f"    class {names[id]} wrong" for id in sorted(_wrong(result)) if id in names]
    return "\n".join(lines) + "\n"


def to_dot(result: Exploration) -> str:
    """Return the graph for Graphviz, with the states that violate something marked."""
    wrong = _wrong(result)
    names = {state.id for state in _drawn(result.graph)}
    lines = ["digraph exploration {", "  rankdir=LR;", "  node [shape=box];"]
    for state in _drawn(result.graph):
        marked = ", color=red, fontcolor=red" if state.id in wrong else ""
        lines.append(f"  {_quoted(state.id)} [label={_quoted(state.shown_id)}{marked}];")
    for run in result.graph.transitions:
        if run.from_id in names and run.to_id in names:
            ends = f"{_quoted(run.from_id)} -> {_quoted(run.to_id)}"
            lines.append(f"  {ends} [label={_quoted(str(run.step))}];")
    return "\n".join([*lines, "}"]) + "\n"


def to_html(result: Exploration) -> str:
    """Return one page: the summary, each violation with what changed on its path, the graph."""
    parts = [f"<pre>{escape(result.summary())}</pre>"]
    for violation in result.violations:
        parts.append(
            f"<h2>{escape(violation.invariant)} <small>{violation.severity}</small></h2>"
            f"<p>{escape(violation.message)}</p>{_path(result.graph, violation)}"
        )
    left_out = len(result.graph.states) - _DRAWN_MAX
    note = f"<p>{left_out:,} more states are not drawn.</p>" if left_out > 0 else ""
    parts.append(f"<h2>States</h2>{note}{_picture(result)}")
    return _PAGE.format(content="\n".join(parts))


def readable(value: Any) -> Any:
    """Return a value as plain JSON data; what JSON lacks is written as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else repr(value)
    if isinstance(value, Mapping):
        return {str(_key(key)): readable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((readable(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    return _key(value) if isinstance(value, bytes) else str(value)


def _key(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _step(step: Step) -> dict[str, Any]:
    return {"action": step.action, "arguments": readable(step.arguments)}


def _drawn(graph: StateGraph) -> list[State]:
    return list(graph.states.values())[:_DRAWN_MAX]


def _wrong(result: Exploration) -> set[str]:
    return {violation.state_id for violation in result.violations}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _printable(text: str) -> str:
    # XML has no way to write most control characters.
    return "".join(
        each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for each in text
    )


def _path(graph: StateGraph, violation: Violation) -> str:
    states = _states_along(graph, violation.path)
    items = []
    for index, step in enumerate(violation.path):
        changes = ""
        if index + 1 < len(states):
            listed = _changes(states[index], states[index + 1])
            changes = "".join(f"<li><code>{escape(line)}</code></li>" for line in listed)
        items.append(f"<li>{escape(str(step))}<ul>{changes}</ul></li>")
    return f"<ol>{''.join(items)}</ol>" if items else "<p>In the initial state.</p>"


def _states_along(graph: StateGraph, path: Sequence[Step]) -> list[State]:
    """Return the states on a path as far as the graph knows them; a shrunk path may leave it."""
    if graph.initial is None:
        return []
    states = [graph.initial]
    for step in path:
        runs = [run for run in graph.transitions_from(states[-1].id) if run.step == step]
        if not runs:
            break
        states.append(graph.states[runs[0].to_id])
    return states


def _changes(before: State, after: State) -> list[str]:
    lines: list[str] = []
    for seen in after.observations:
        old = readable(before.observation(seen.system))
        for line in _differences(seen.system, old, readable(seen.data)):
            lines.append(line)
            if len(lines) == _CHANGES_MAX:
                return [*lines, "…"]
    return lines or ["nothing changed"]


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in new:
                yield f"{path}.{key}: {shown(old[key])} is gone"
            elif key not in old:
                yield f"{path}.{key}: {shown(new[key])} is new"
            else:
                yield from _differences(f"{path}.{key}", old[key], new[key])
    elif old != new:
        yield f"{path}: {shown(old)} → {shown(new)}"


def _picture(result: Exploration) -> str:
    """Draw the states in columns by their depth."""
    places: dict[str, tuple[int, int]] = {}
    columns: dict[int, int] = {}
    for state in _drawn(result.graph):
        row = columns[state.depth] = columns.get(state.depth, 0) + 1
        places[state.id] = 30 + state.depth * _COLUMN, row * _ROW
    wide = max((x for x, _ in places.values()), default=0) + _COLUMN
    high = max((y for _, y in places.values()), default=0) + _ROW
    wrong = _wrong(result)
    parts = []
    for run in result.graph.transitions:
        if run.from_id in places and run.to_id in places:
            (x1, y1), (x2, y2) = places[run.from_id], places[run.to_id]
            bend = (x1 + x2) // 2, min(y1, y2) - 14
            parts.append(
                f'<path d="M{x1} {y1} Q{bend[0]} {bend[1]} {x2} {y2}">'
                f"<title>{escape(str(run.step))}</title></path>"
            )
    for id, (x, y) in places.items():
        kind = ' class="wrong"' if id in wrong else ""
        about = json.dumps(
            {seen.system: readable(seen.data) for seen in result.graph.states[id].observations},
            ensure_ascii=False,
        )
        parts.append(
            f'<g{kind}><circle cx="{x}" cy="{y}" r="{_RADIUS}"><title>{escape(about[:2_000])}'
            f'</title></circle><text x="{x + 12}" y="{y + 4}">{shown_id(id)[:8]}</text></g>'
        )
    return f'<svg width="{wide}" height="{high}">{"".join(parts)}</svg>'


_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Exploration</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em; max-width: 70em; }}
pre {{ background: #f4f4f4; padding: 1em; white-space: pre-wrap; }}
small {{ color: #b00000; }}
svg path {{ fill: none; stroke: #999; }}
svg path:hover {{ stroke: #000; stroke-width: 3; }}
svg circle {{ fill: #cfe3f5; stroke: #336; }}
svg .wrong circle {{ fill: #f8d0d0; stroke: #b00000; }}
svg text {{ font: 11px monospace; }}
</style>
<h1>Exploration</h1>
{content}
</html>
"""
_WRITERS: Final[dict[str, Callable[[Exploration], str]]] = {
    ".json": to_json,
    ".xml": to_junit,
    ".html": to_html,
    ".mmd": to_mermaid,
    ".dot": to_dot,
}
