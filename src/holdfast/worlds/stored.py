"""Explorations in a store, read without the world that was explored."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..checkpoints.diff import printable
from ..errors import CorruptRecord
from ..explorations import Edge, ExplorationInfo, Explorations, KeptState, Outline
from .actions import Action, Outcome
from .findings import Findings, Limits
from .graph import StateGraph
from .invariants import Invariant
from .journal import journal_of, require_store
from .recording import Found, Recorded, Recording, read_found, read_observations
from .result import Exploration
from .strategies import as_strategy
from .values import decode

if TYPE_CHECKING:
    from ..kernel.operation import Sync
    from ..store import Store


# The default id in `holdfast explore`.
_MODULE_AND_WORLD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExploration:
    """An exploration as it was recorded: what was found so far, and what is left to try.

    `has_graph` is false once retention has removed the states and the log of actions.
    """

    info: ExplorationInfo
    actions: list[str]
    invariants: list[str]
    result: Exploration
    left: int

    @property
    def has_graph(self) -> bool:
        """Whether the states are still there."""
        return self.result.graph.initial is not None


class _Reader(Findings):
    """Computes the result that an exploration would have if it ended now."""

    def __init__(
        self,
        recorded: Recorded,
        choices: Sequence[tuple[Action, dict[str, Any]]],
        invariants: Sequence[Invariant],
    ) -> None:
        order, limits = as_strategy("bfs", 0), Limits(1, None, None, None)
        super().__init__(recorded.graph, (), invariants, order, limits, None)
        self._choices = list(choices)
        self._load(recorded)
        self._conclude()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlinedExploration:
    """The beginning of an exploration: how its states are connected, and what was found there.

    Observations are not read with it: `look` adds them for some states. Paths are the shortest
    among `result.steps` steps; `is_whole` says that these are all. `farther` counts what was found
    in states beyond them.
    """

    info: ExplorationInfo
    actions: list[str]
    invariants: list[str]
    result: Exploration
    is_whole: bool
    farther: int

    @property
    def has_graph(self) -> bool:
        """Whether the states are still there."""
        return self.result.graph.initial is not None

    def look(self, states: Mapping[str, KeptState]) -> None:
        """Add the observations of some states."""
        with _readable(self.info.id):
            for id, kept in states.items():
                self.result.graph.states[id].observations = read_observations(decode(kept.body))


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of an exploration, without the functions of the module."""

    choices: list[tuple[Action, dict[str, Any]]]
    invariants: list[Invariant]

    @classmethod
    def read(cls, settings: bytes | None) -> _Settings:
        known = decode(settings or b"")
        choices = [
            (Action(name=name, run=_unknown), decode(arguments))
            for name, arguments in known["actions"]
        ]
        named = known["invariants"]
        return cls(
            choices, [Invariant(name=name, check=_unknown, when=when) for name, when in named]
        )

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of the actions and of the invariants."""
        return {
            "actions": list(dict.fromkeys(action.name for action, _ in self.choices)),
            "invariants": [check.name for check in self.invariants],
        }


def list_explorations(store: Store, *, after: int = 0, limit: int = 100) -> list[ExplorationInfo]:
    """Return the explorations of a store in order of creation, without their graphs."""
    return _of(store).list(after=after, limit=limit)


def read_exploration(store: Store, id: str) -> StoredExploration:
    """Return an exploration with its graph, running or not; raise NotFound if there is none."""
    explorations = _of(store)
    session = store.find_session(id)
    info, journal = explorations.get(session), journal_of(session)
    with _readable(session.id):
        settings = _Settings.read(journal.world().settings)
        choices, invariants = settings.choices, settings.invariants
        recorded = Recording(journal, choices, invariants).read()
        result = _Reader(recorded, choices, invariants).result
    left = sum(map(len, recorded.left.values()))
    return StoredExploration(info=info, result=result, left=left, **settings.names)


def explore_command(id: str) -> str:
    """Return the shell command that explores again under this id."""
    quoted = shlex.quote(printable(id))
    if _MODULE_AND_WORLD.fullmatch(id):
        return f"holdfast explore {quoted}"
    return f"holdfast explore MODULE:WORLD --id {quoted}"


def outlined(info: ExplorationInfo, outline: Outline) -> OutlinedExploration:
    """Build the outline of an exploration from what was read of its beginning."""
    recorded, farther = Recorded(), 0
    graph = recorded.graph
    with _readable(info.id):
        settings = _Settings.read(outline.settings)
        invariants = {check.name: check for check in settings.invariants}
        if outline.initial is not None:
            body = decode(outline.initial.body)
            graph.add_state(outline.initial.id, read_observations(body))
            recorded.found.append(read_found(body["found"], invariants))
        for edge in outline.edges:
            _add_edge(recorded, settings, edge)
        reached = _reached(graph)
        for step in outline.findings:
            found = read_found(decode(step.body)["found"], invariants)
            near = [each for each in found.violations if each.state_id in reached]
            farther += len(found.violations) - len(near)
            recorded.found.append(Found(near, found.warnings))
        result = _Reader(recorded, settings.choices, settings.invariants).result
    return OutlinedExploration(
        info=info,
        result=result,
        is_whole=recorded.steps >= info.steps,
        farther=farther,
        **settings.names,
    )


def _add_edge(recorded: Recorded, settings: _Settings, edge: Edge) -> None:
    if edge.to_id is None:
        return
    action, arguments = settings.choices[edge.candidate]
    origin, _ = recorded.graph.add_state(edge.from_id, ())
    target, _ = recorded.graph.add_state(edge.to_id, ())
    recorded.graph.add_transition(origin, target, action, arguments, Outcome())
    recorded.steps += 1
    recorded.tried.add(action.name)


def _reached(graph: StateGraph) -> set[str]:
    """Return the states that known steps reach from the initial one."""
    waiting = [] if graph.initial is None else [graph.initial.id]
    reached = set(waiting)
    while waiting:
        leads = {run.to_id for run in graph.transitions_from(waiting.pop())} - reached
        reached |= leads
        waiting += leads
    return reached


def _of(store: Store) -> Explorations[Sync]:
    return Explorations(require_store(store).runtime)


@contextmanager
def _readable(id: str) -> Iterator[None]:
    """Raise CorruptRecord for invalid data, which may have been imported from a file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
        message = f"The stored exploration {id} cannot be read: {error!r}"
        raise CorruptRecord(message) from error


def _unknown(*_: object) -> None:
    """Stand in for a function of the explored module, which is not loaded."""
