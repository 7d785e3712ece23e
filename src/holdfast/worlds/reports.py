"""Reports of an exploration: JSON, JUnit, Mermaid, DOT, and a self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from ..arguments import require_path, shown
from ..errors import InvalidArgument
from ..formatting import plural
from .actions import Step
from .changes import changes, readable, states_along
from .drawing import DRAWN_MAX, draw
from .graph import State, StateGraph
from .invariants import Violation
from .result import Exploration
from .system import shown_id
from .words import text_of


def write_report(result: Exploration, path: str | Path) -> Path:
    """Write a report in the format of the file's suffix: .json, .xml, .html, .mmd or .dot."""
    file = report_file(path)
    # File names that are not UTF-8 contain lone surrogates, which cannot be encoded.
    text = _WRITERS[file.suffix](result)
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
    return file


def report_file(path: str | Path) -> Path:
    """Return the path of a report, or raise InvalidArgument if none can be written there."""
    file = require_path(path)
    if file.suffix not in _WRITERS:
        known = ", ".join(_WRITERS)
        raise InvalidArgument(
            f"the name of a report must end in one of {known}; {shown(file.name)} does not"
        )
    if file.is_dir():
        raise InvalidArgument(f"a report must be a file, and {shown(file.name)} is a directory")
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
                "error": None if run.outcome.error is None else text_of(run.outcome.error),
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
    """Return a JUnit test suite in which every violation and every leak is a failed case."""
    failed = [(violation.invariant, str(violation)) for violation in result.violations]
    failed += [
        (f"rollback of {leak.system}", f"{leak.system} was not fully restored")
        for leak in result.leaks
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
    """Return the graph as a Mermaid diagram; states with violations are marked."""
    lines = ["stateDiagram-v2"]
    names = {state.id: f"s{number}" for number, state in enumerate(_drawn(result.graph))}
    lines += [f'    state "{shown_id(id)}" as {name}' for id, name in names.items()]
    if result.graph.initial is not None:
        lines.append(f"    [*] --> {names[result.graph.initial.id]}")
    for run in result.graph.transitions:
        if run.from_id in names and run.to_id in names:
            label = str(run.step).translate(_MERMAID)
            lines.append(f"    {names[run.from_id]} --> {names[run.to_id]} : {label}")
    lines.append("    classDef wrong fill:#f8d0d0,stroke:#b00000")
    lines += [f"    class {names[id]} wrong" for id in sorted(_wrong(result)) if id in names]
    return "\n".join(lines) + "\n"


def to_dot(result: Exploration) -> str:
    """Return the graph for Graphviz; states with violations are marked."""
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
    """Return one page: the summary, each violation with the changes on its path, and the graph."""
    parts = [f"<pre>{escape(result.summary())}</pre>"]
    for violation in result.violations:
        parts.append(
            f"<h2>{escape(violation.invariant)} <small>{violation.severity}</small></h2>"
            f"<p>{escape(violation.message)}</p>{_path(result.graph, violation)}"
        )
    picture = draw(result)
    left = f"{plural(picture.left_out, 'more state')} not drawn individually."
    note = f"<p>{left}</p>" if picture.left_out else ""
    parts.append(f"<h2>States</h2>{note}{picture.svg}")
    return _PAGE.format(content="\n".join(parts))


def _step(step: Step) -> dict[str, Any]:
    return {"action": step.action, "arguments": readable(step.arguments)}


def _drawn(graph: StateGraph) -> list[State]:
    return list(graph.states.values())[:DRAWN_MAX]


def _wrong(result: Exploration) -> set[str]:
    return {violation.state_id for violation in result.violations}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _printable(text: str) -> str:
    # XML cannot represent most control characters.
    return "".join(
        each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for each in text
    )


def _path(graph: StateGraph, violation: Violation) -> str:
    states = states_along(graph, violation.path)
    items = []
    for index, step in enumerate(violation.path):
        told = ""
        if index + 1 < len(states):
            listed = changes(states[index], states[index + 1])
            told = "".join(f"<li><code>{escape(line)}</code></li>" for line in listed)
        items.append(f"<li>{escape(str(step))}<ul>{told}</ul></li>")
    return f"<ol>{''.join(items)}</ol>" if items else "<p>In the initial state.</p>"


# Characters that end a label in Mermaid or have a meaning in it.
_MERMAID: Final = str.maketrans({each: f"#{ord(each)};" for each in ":;#<>"} | {"\n": " "})
_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Exploration</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em; max-width: 70em; }}
pre {{ background: #f4f4f4; padding: 1em; white-space: pre-wrap; }}
small {{ color: #b00000; }}
.edge {{ fill: none; stroke: #999; stroke-width: 1.5; }}
.edge.again {{ stroke: #ddd; }}
.edge.way {{ stroke: #b00000; stroke-width: 2.5; }}
.edge:hover {{ stroke: #000; stroke-width: 3; }}
.state circle {{ fill: #cfe3f5; stroke: #336; }}
.state.initial circle {{ stroke-width: 3; }}
.state.bundle circle {{ fill: #eee; stroke-dasharray: 2 2; }}
.state.wrong circle {{ fill: #b00000; stroke: #b00000; }}
.state .sign {{ stroke: #fff; stroke-width: 2; stroke-linecap: round; }}
.state text {{ font: 12px system-ui, sans-serif; }}
.state text {{ paint-order: stroke; stroke: #fff; stroke-width: 4; }}
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
