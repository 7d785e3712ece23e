"""`holdfast explorations`: look at explorations in a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from ..checkpoints.diff import printable
from ..store import Store
from . import output
from .command import OFFERED_MAX, After, Answer, Commands, Limit, numbered, page

if TYPE_CHECKING:
    from ..worlds.stored import StoredExploration

app = Commands("Show explorations in a store; `holdfast explore` continues them.")


def _offered(store: Store) -> Iterable[Any]:
    from ..worlds.stored import list_explorations

    return list_explorations(store, limit=OFFERED_MAX)


ExplorationId = Annotated[
    str,
    numbered(
        "ID",
        "The exploration's id, its number in the list, or at least its first 8 characters.",
        _offered,
        "status",
    ),
]


@app.command("list", mode="read")
def list_all(
    store: Store,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List explorations in the order of their creation, without reading their graphs."""
    from ..worlds.stored import list_explorations

    found = list_explorations(store, after=after, limit=limit)
    columns = {
        "number": "number",
        "id": "id",
        "status": "status",
        "states": "states",
        "steps": "steps",
        "violations": "violations",
        "updated": "updated_at",
    }
    empty = "No explorations. `holdfast explore MODULE:WORLD` writes one."
    return page("explorations", found, output.data, columns, limit=limit, shorten="id", empty=empty)


@app.command(mode="read")
def show(store: Store, exploration: ExplorationId) -> Answer:
    """Show an exploration, its violations with shortest paths, and how to continue it."""
    from ..worlds.reports import violation_data
    from ..worlds.stored import read_exploration

    found = read_exploration(store, exploration)
    result = found.result
    data = output.data(found.info) | {
        "left_to_try": found.left,
        "actions": found.actions,
        "invariants": found.invariants,
        "never_possible": result.unused_actions if found.has_graph else [],
        "is_cut": result.is_cut,
        "has_graph": found.has_graph,
        "warnings": result.warnings,
        "found": list(map(violation_data, result.violations)),
    }
    return Answer(data, lambda: _shown(found))


def _shown(found: StoredExploration) -> Iterator[Any]:
    from ..worlds.stored import explore_command

    info, result = found.info, found.result
    told: dict[str, Any] = {
        "exploration": f"{info.id} (number {info.number})",
        "status": info.status,
        "states": f"{info.states}, not beyond max_depth" if result.is_cut else info.states,
        "steps": info.steps,
        "left_to_try": found.left,
        "violations": info.violations,
        "started": output.when(info.created_at),
        "updated": output.when(info.updated_at),
        "actions": ", ".join(found.actions),
        "invariants": ", ".join(found.invariants) or None,
    }
    if found.has_graph and result.unused_actions:
        told["never_possible"] = ", ".join(result.unused_actions)
    yield output.fields(told)
    if not found.has_graph and info.states:
        yield "\nIts graph was removed by retention; explore again to see the violations."
    for title, lines in (("Warnings", result.warnings), ("Violations", result.listed())):
        if lines:
            yield output.heading(title)
            yield from (printable(line) for text in lines for line in text.split("\n"))
    command = explore_command(info.id)
    if info.status == "running":
        yield "\nA process is exploring now."
    elif info.status == "completed":
        yield "\nEverything was tried."
    else:
        yield f"\n`{command} --resume` continues it."
    yield f"`{command} --clean` removes it, with what killed processes left behind."
