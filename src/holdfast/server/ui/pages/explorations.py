"""Explorations of worlds: how far they have come, and one with its states and violations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ....explorations import Explorations, Journal
from ....kernel.operation import Async
from ....worlds.actions import Step
from ....worlds.changes import changes, readable, states_along
from ....worlds.drawing import draw
from ....worlds.graph import State, StateGraph, Transition
from ....worlds.invariants import Violation
from ....worlds.journal import journal_of
from ....worlds.reports import violation_data
from ....worlds.stored import OutlinedExploration, explore_command, outlined
from ...messages import Call
from ...pages import next_cursor, place_of
from ..templates import Commands
from ..views import ListQuery, Pages, View, page_size

routes = Pages()
# How much of an exploration is read to draw it: steps, and steps that found something.
EDGES, FINDINGS = 2_500, 200
VIOLATIONS = 10
# How many steps are shown of a path, and of those that leave a state.
PATH_STEPS, LEADS = 30, 12
# Steps of an exploration are not events.
POLL_MS, CALM_POLL_MS = 1_000, 5_000


@dataclass(frozen=True, slots=True)
class StateRow:
    """A state, the step that led to it, and what that step changed."""

    number: int
    state: State
    parent: int | None
    changes: list[str]
    leads: list[tuple[str, int]]
    leads_left_out: int


@dataclass(frozen=True, slots=True)
class Told:
    """A violation, and what changed at each step of the path to it."""

    violation: Violation
    path: list[tuple[Step, list[str]]]
    left_out: int
    others: int
    """The number of other states with the same violation."""


@routes.page("/explorations", ListQuery, is_store_wide=True)
async def explorations_page(call: Call) -> View:
    """Show explorations, newest first."""
    limit = page_size(call)
    found = await _explorations(call).newest(before=place_of(call), limit=limit)
    cursor = next_cursor(found, limit, "number")
    return View(
        template="explorations.html",
        title="Explorations",
        data={"explorations": [asdict(each) for each in found], "next_cursor": cursor},
        commands=Commands("/ui/explorations?format=json", "explorations list"),
        given={"explorations": found},
        next_cursor=cursor,
        poll_ms=POLL_MS,
    )


@routes.page("/explorations/{id}", ListQuery)
async def exploration_page(call: Call) -> View:
    """Show an exploration: its violations, a picture of its states, and their observations."""
    session = await call.context.sessions.find(call.path["id"], call.token)
    info = await _explorations(call).get(session)
    journal: Journal[Async] = journal_of(session)
    outline = await journal.outline(edges=EDGES, findings=FINDINGS)
    found = await asyncio.to_thread(outlined, info, outline)
    graph = found.result.graph
    violations = found.result.nearest()
    counts = Counter(each.invariant for each in found.result.violations)
    numbers = {id: number for number, id in enumerate(graph.states, 1)}
    limit, after = page_size(call), place_of(call) or 0
    shown = list(graph.states.values())[after : after + limit]
    await _look(found, journal, _seen(graph, shown, violations[:VIOLATIONS]))
    rows = [_row(graph, each, numbers) for each in shown]
    cursor = next_cursor(rows, limit, "number") if after + limit < len(numbers) else None
    picture = await asyncio.to_thread(draw, found.result)
    command = explore_command(info.id)
    return View(
        template="exploration.html",
        title=f"{info.id} - exploration",
        data={**_data(found), "states": _states(rows), "next_cursor": cursor},
        commands=Commands.of(
            f"/ui/explorations/{quote(info.id, safe='')}?format=json",
            "explorations",
            "show",
            info.id,
        ),
        given={
            "found": found,
            "info": info,
            "violations": [_told(graph, each, counts) for each in violations[:VIOLATIONS]],
            "violations_left_out": max(len(violations) - VIOLATIONS, 0),
            "picture": Markup(picture.svg),
            "not_drawn": picture.left_out,
            "known": len(numbers),
            "rows": rows,
            "numbers": numbers,
            "command": command,
            "readable": readable,
        },
        next_cursor=cursor,
        poll_ms=POLL_MS if info.status == "running" else CALM_POLL_MS,
    )


def _explorations(call: Call) -> Explorations[Async]:
    return Explorations(call.store.runtime)


async def _look(found: OutlinedExploration, journal: Journal[Async], wanted: set[str]) -> None:
    """Read the observations of some states."""
    if wanted:
        found.look(await journal.given_states(sorted(wanted)))


def _seen(graph: StateGraph, shown: Sequence[State], told: Sequence[Violation]) -> set[str]:
    """Return the states whose observations the page needs."""
    along = [each for one in told for each in states_along(graph, one.path)[-PATH_STEPS - 1 :]]
    parents = [each.found_by.from_id for each in shown if each.found_by is not None]
    return {*parents, *(each.id for each in (*shown, *along))}


def _told(graph: StateGraph, violation: Violation, counts: Counter[str]) -> Told:
    """Return a violation with the end of its path, and the changes as far as they are known."""
    states, path = states_along(graph, violation.path), list(violation.path)
    ends = [_changes(before, after) for before, after in pairwise(states)]
    ends += [[]] * (len(path) - len(ends))
    left_out = max(len(path) - PATH_STEPS, 0)
    told = list(zip(path, ends, strict=True))[left_out:]
    return Told(violation, told, left_out, counts[violation.invariant] - 1)


def _changes(before: State, after: State) -> list[str]:
    return changes(before, after) if before.observations and after.observations else []


def _row(graph: StateGraph, state: State, numbers: dict[str, int]) -> StateRow:
    run, leads = state.found_by, graph.transitions_from(state.id)
    parent = None if run is None else graph.states[run.from_id]
    return StateRow(
        numbers[state.id],
        state,
        None if parent is None else numbers[parent.id],
        [] if parent is None else _changes(parent, state),
        [_lead(each, numbers) for each in leads[:LEADS]],
        max(len(leads) - LEADS, 0),
    )


def _lead(run: Transition, numbers: dict[str, int]) -> tuple[str, int]:
    return str(run.step), numbers[run.to_id]


def _data(found: OutlinedExploration) -> dict[str, Any]:
    nearest = sorted(found.result.violations, key=lambda each: len(each.path))
    return {
        "exploration": asdict(found.info),
        "actions": found.actions,
        "invariants": found.invariants,
        "never_possible": found.result.unused_actions if found.is_whole else [],
        "has_graph": found.has_graph,
        "is_whole": found.is_whole,
        "warnings": found.result.warnings,
        "found": list(map(violation_data, nearest)),
        "found_farther": found.farther,
    }


def _states(rows: Sequence[StateRow]) -> list[dict[str, Any]]:
    return [
        {
            "number": row.number,
            "id": row.state.id,
            "depth": row.state.depth,
            "parent": row.parent,
            "by": None if row.state.found_by is None else str(row.state.found_by.step),
            "changes": row.changes,
            "leads": [{"step": step, "to": number} for step, number in row.leads],
            "observations": {seen.system: readable(seen.data) for seen in row.state.observations},
        }
        for row in rows
    ]
