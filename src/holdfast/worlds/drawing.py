"""The states of an exploration as a picture: columns by depth, and the steps between them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from .changes import readable
from .graph import State, StateGraph, Transition
from .result import Exploration

# A larger picture would be unreadable.
DRAWN_MAX: Final = 300
_COLUMN_MAX: Final = 24
_COLUMNS_MAX: Final = 60
_EDGES_MAX: Final = 1_500
_COLUMN: Final = 150
_ROW: Final = 44
_MARGIN: Final = 32
_RADIUS: Final = 8
_LABEL_CHARACTERS: Final = 18
_TITLE_CHARACTERS: Final = 2_000
_TITLE_STEPS: Final = 10


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing as SVG without colours; the style sheet of the page adds them."""

    svg: str
    left_out: int
    """How many states are not drawn individually."""


@dataclass(slots=True)
class _Node:
    """A state, or several that share a node because a column is full."""

    depth: int
    states: list[State]
    is_bundle: bool = False
    x: int = 0
    y: int = 0


@dataclass(slots=True)
class _Plan:
    nodes: dict[str, _Node] = field(default_factory=dict)
    """The node of each drawn state; states of a bundle share one."""
    columns: list[list[_Node]] = field(default_factory=list)


def draw(result: Exploration) -> Picture:
    """Draw the states in columns by their depth; states with violations are marked."""
    graph, wrong = result.graph, {violation.state_id for violation in result.violations}
    nearest = [each.state_id for each in result.nearest() if each.state_id in graph.states]
    way = {run.number for end in nearest for run in _path(graph, end)}
    plan = _planned(graph, wrong | _ends(graph, way))
    edges = _edges(graph, plan, way)
    parts = [
        f'<path class="{look}" d="{line}"><title>{escape(title)}</title></path>'
        for look, line, title in edges
    ]
    seen = list({id(node): node for node in plan.nodes.values()}.values())
    parts += [_drawn(node, graph, wrong) for node in seen]
    wide = len(plan.columns) * _COLUMN + _MARGIN
    high = max(map(len, plan.columns), default=0) * _ROW + _MARGIN
    alone = sum(not node.is_bundle for node in seen)
    words = f"{len(graph.states)} states in columns by their distance from the initial one"
    return Picture(
        f'<svg class="states" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        f'role="img" aria-label="{words}">{"".join(parts)}</svg>',
        len(graph.states) - alone,
    )


def _path(graph: StateGraph, id: str) -> Iterator[Transition]:
    state = graph.states[id]
    while state.found_by is not None:
        yield state.found_by
        state = graph.states[state.found_by.from_id]


def _ends(graph: StateGraph, numbers: set[int]) -> set[str]:
    runs = [run for run in graph.transitions if run.number in numbers]
    return {id for run in runs for id in (run.from_id, run.to_id)}


def _planned(graph: StateGraph, first: set[str]) -> _Plan:
    """Assign each state a node; those in `first` take precedence if there is not enough room."""
    plan, drawn = _Plan(), 0
    columns: dict[int, list[State]] = {}
    for state in graph.states.values():
        # A state that no known step leads to has no depth.
        if (state.found_by is not None or state is graph.initial) and state.depth < _COLUMNS_MAX:
            columns.setdefault(state.depth, []).append(state)
    for depth in sorted(columns):
        states = sorted(columns[depth], key=lambda state: state.id not in first)
        room = min(_COLUMN_MAX, max(DRAWN_MAX - drawn, 0))
        kept = states[: room if len(states) <= room else max(room - 1, 0)]
        nodes = [_Node(depth, [state]) for state in kept]
        # Next to the states they came from, so that fewer lines cross.
        nodes.sort(key=lambda node: _above(plan, node.states[0]))
        if len(kept) < len(states):
            nodes.append(_Node(depth, states[len(kept) :], is_bundle=True))
        drawn += len(kept)
        plan.columns.append(nodes)
        plan.nodes |= {state.id: node for node in nodes for state in node.states}
        for row, node in enumerate(nodes):
            node.x, node.y = _MARGIN + depth * _COLUMN, _MARGIN + row * _ROW
    return plan


def _above(plan: _Plan, state: State) -> int:
    parent = None if state.found_by is None else plan.nodes.get(state.found_by.from_id)
    return 0 if parent is None else parent.y


def _edges(graph: StateGraph, plan: _Plan, way: set[int]) -> list[tuple[str, str, str]]:
    """Return the class, path and title of each line; the important ones are drawn last."""
    runs: dict[tuple[int, int], list[Transition]] = {}
    ends: dict[tuple[int, int], tuple[_Node, _Node]] = {}
    for run in graph.transitions:
        origin, target = plan.nodes.get(run.from_id), plan.nodes.get(run.to_id)
        if origin is not None and target is not None:
            pair = id(origin), id(target)
            runs.setdefault(pair, []).append(run)
            ends[pair] = origin, target
    found = []
    for pair, between in runs.items():
        is_way = any(run.number in way for run in between)
        is_first = any(graph.states[run.to_id].found_by is run for run in between)
        look = "edge way" if is_way else "edge" if is_first else "edge again"
        told = [str(run.step) for run in between[:_TITLE_STEPS]]
        told += [f"and {len(between) - _TITLE_STEPS} more"] * (len(between) > _TITLE_STEPS)
        found.append((look, _line(*ends[pair]), "\n".join(told)[:_TITLE_CHARACTERS]))
    order = ("edge again", "edge", "edge way")
    return sorted(found, key=lambda edge: order.index(edge[0]))[-_EDGES_MAX:]


def _line(origin: _Node, target: _Node) -> str:
    x1, y1, x2, y2 = origin.x, origin.y, target.x, target.y
    if origin is target:
        return f"M{x1 - 5} {y1 - 7}C{x1 - 16} {y1 - 26} {x1 + 16} {y1 - 26} {x1 + 5} {y1 - 7}"
    if x2 > x1:
        middle = x2 - _COLUMN // 3
        return f"M{x1 + _RADIUS} {y1}C{middle} {y1} {middle} {y2} {x2 - _RADIUS} {y2}"
    return f"M{x1} {y1 + _RADIUS}C{x1 - 30} {y1 + 34} {x2 - 30} {y2 + 34} {x2} {y2 + _RADIUS}"


def _drawn(node: _Node, graph: StateGraph, wrong: set[str]) -> str:
    looks, sign = ["state"], ""
    x, y = node.x, node.y
    if node.is_bundle:
        looks.append("bundle")
        label = f"{len(node.states)} more"
        title = f"{len(node.states)} states that are not drawn individually"
    else:
        state = node.states[0]
        label, title = _label(state), _about(state)
    if any(state is graph.initial for state in node.states):
        looks.append("initial")
    if any(state.id in wrong for state in node.states):
        looks.append("wrong")
        sign = f'<path class="sign" d="M{x} {y - 4}V{y + 1}M{x} {y + 4}v.01"/>'
    return (
        f'<g class="{" ".join(looks)}"><title>{escape(title)}</title>'
        f'<circle cx="{x}" cy="{y}" r="{_RADIUS}"/>{sign}'
        f'<text x="{x + _RADIUS + 4}" y="{y - 8}">{escape(label)}</text></g>'
    )


def _label(state: State) -> str:
    """Return the step that led to a state, shortened, or "initial state"."""
    text = "initial state" if state.found_by is None else str(state.found_by.step)
    return text if len(text) <= _LABEL_CHARACTERS else f"{text[: _LABEL_CHARACTERS - 1]}…"


def _about(state: State) -> str:
    """Return a description of a state: its id, and its observations as far as they are known."""
    told: Mapping[str, Any] = {seen.system: readable(seen.data) for seen in state.observations}
    observed = f" {json.dumps(told, ensure_ascii=False)}" if told else ""
    return f"{state.shown_id}{observed}"[:_TITLE_CHARACTERS]
