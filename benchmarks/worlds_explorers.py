"""One model, a square grid with four moves, explored by Holdfast, VenomQA and Hypothesis."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import holdfast
from holdfast.worlds import Action, MemorySystem, World, action, explore

from .measure import RATE, Figures

MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, 1), "down": (0, -1)}
HYPOTHESIS_STEPS = 50


def side_of(states: int) -> int:
    """Return the side of a grid with about so many states."""
    return round(math.sqrt(states))


def holdfast_rate(states: int, **options: Any) -> Figures:
    """Explore the whole grid with Holdfast."""
    side = side_of(states)
    started = perf_counter()
    result = explore(_make_world, _actions(side), max_steps=10 * side * side, **options)
    seconds = perf_counter() - started
    assert result.is_complete
    assert len(result.graph.states) == side * side
    return {RATE: side * side / seconds}


def holdfast_durable_rate(states: int, folder: Path, commit_every: int) -> Figures:
    """Do the same with every step in a store."""
    path = folder / f"grid-{next(_numbers)}.db"
    with holdfast.open(f"sqlite:///{path}") as store:
        return holdfast_rate(states, store=store, id="grid", commit_every=commit_every)


_numbers = itertools.count()


def _make_world() -> World:
    return World({"grid": MemorySystem({"x": 0, "y": 0})})


def _actions(side: int) -> list[Action]:
    def make(name: str, dx: int, dy: int) -> Action:
        def run(world: World) -> None:
            grid: Any = world.systems["grid"]
            grid.data["x"], grid.data["y"] = moved(grid.data["x"], grid.data["y"], dx, dy, side)

        return action(name=name)(run)

    return [make(name, *move) for name, move in MOVES.items()]


def moved(x: int, y: int, dx: int, dy: int, side: int) -> tuple[int, int]:
    """Return the next place, within the grid."""
    return min(max(x + dx, 0), side - 1), min(max(y + dy, 0), side - 1)


def venomqa_rate(states: int) -> Figures:
    """Explore the whole grid with VenomQA, breadth first."""
    from venomqa.v1 import BFS, ActionResult, Agent
    from venomqa.v1 import Action as VenomAction
    from venomqa.v1 import World as VenomWorld
    from venomqa.v1.core.action import HTTPRequest, HTTPResponse

    side = side_of(states)
    grid = _venom_grid()
    done = ActionResult(True, HTTPRequest("GET", "/"), HTTPResponse(200, {}, {}))

    def mover(dx: int, dy: int) -> Callable[[Any], Any]:
        def run(api: Any) -> Any:
            x, y = grid.at
            grid.at = moved(x, y, dx, dy, side)
            return done

        return run

    actions = [VenomAction(name=name, execute=mover(*move)) for name, move in MOVES.items()]
    world = VenomWorld(api=None, systems={"grid": grid})
    agent = Agent(world=world, actions=actions, strategy=BFS(), max_steps=10 * side * side)
    started = perf_counter()
    result = agent.explore()
    seconds = perf_counter() - started
    assert result.states_visited == side * side
    return {RATE: side * side / seconds}


def _venom_grid() -> Any:
    from venomqa.v1.core.state import Observation

    class Grid:
        at = (0, 0)

        def checkpoint(self, name: str) -> tuple[int, int]:
            return self.at

        def rollback(self, token: tuple[int, int]) -> None:
            self.at = token

        def observe(self) -> Any:
            data = {"x": self.at[0], "y": self.at[1]}
            return Observation(system="grid", data=data, observed_at=datetime.now())  # noqa: DTZ005

    return Grid()


def hypothesis_rate(states: int) -> Figures:
    """Walk at random with Hypothesis, as many steps as an exploration has; count the states."""
    from hypothesis import HealthCheck, Phase, Verbosity, settings
    from hypothesis.errors import HypothesisWarning
    from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

    side = side_of(states)
    seen: set[tuple[int, int]] = set()

    class Grid(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.at = (0, 0)
            seen.add(self.at)

        def go(self, dx: int, dy: int) -> None:
            self.at = moved(*self.at, dx, dy, side)
            seen.add(self.at)

        left = rule()(lambda self: self.go(-1, 0))
        right = rule()(lambda self: self.go(1, 0))
        up = rule()(lambda self: self.go(0, 1))
        down = rule()(lambda self: self.go(0, -1))

    chosen = settings(
        max_examples=max(1, 4 * side * side // HYPOTHESIS_STEPS),
        stateful_step_count=HYPOTHESIS_STEPS,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    started = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)
        run_state_machine_as_test(Grid, settings=chosen)
    seconds = perf_counter() - started
    return {RATE: len(seen) / seconds, "states seen": float(len(seen))}
