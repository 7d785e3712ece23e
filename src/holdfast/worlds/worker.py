"""A worker of an exploration: a process with its own world that tries the actions it is given.

It ends when the process that started it ends, and leaves nothing behind.
"""

from __future__ import annotations

import pkgutil
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from random import Random
from typing import Any

from ..explorations import KeptState, KeptStep
from .explore import Explorer, made_world
from .findings import Limits
from .graph import State
from .journal import require_foreign
from .recording import Notes, read_outcome, settings_of
from .strategies import Candidate, Strategy
from .values import decode, encode
from .words import said
from .world import World

_NOTHING = {"value": None, "error": None, "seconds": 0.0, "is_expected": True}


class _Nothing(Strategy):
    """Chooses nothing: the process with the frontier does."""

    def add(self, candidate: Candidate) -> None:
        """Ignore it."""

    def next(self) -> Candidate:
        """Choose nothing."""
        raise LookupError("there is nothing to choose from")

    def __len__(self) -> int:
        return 0


class _Reports(Notes):
    """Sends what was found to the process with the frontier."""

    def __init__(self, connection: Connection, world: World, *given: Any) -> None:
        super().__init__(*given)
        self._connection = connection
        self._world = world
        self._leaks = 0

    def _write(self, states: Sequence[KeptState], steps: Sequence[KeptStep]) -> None:
        seen = [(state.id, state.body) for state in states]
        tried = [(step.from_id, step.candidate, step.to_id, step.body) for step in steps]
        leaks = [asdict(leak) for leak in self._world.leaks[self._leaks :]]
        self._leaks += len(leaks)
        report = {"states": seen, "steps": tried, "leaks": leaks}
        self._connection.send_bytes(encode(report, "report"))


class Performer(Explorer):
    """Tries single actions in states that others may have found."""

    def begin(self, connection: Connection) -> None:
        """Report the settings and the observations of the initial state."""
        settings = settings_of(self._world, self._choices, self._invariants)
        connection.send_bytes(encode({"settings": settings}, "settings"))
        self._notes = _Reports(connection, self._world, self._choices, self._invariants)
        self._start()

    def perform(self, task: dict[str, Any]) -> None:
        """Try some actions in one state, and report each."""
        for id in task["done"]:
            if id in self.result.graph.states:
                self._release(self.result.graph.states[id])
        state = self._learn(task["state"], task["path"])
        for number in task["numbers"]:
            action, arguments = self._choices[number]
            self._try(Candidate(state, action, arguments, number))

    def _learn(self, id: str, path: Sequence[tuple[int, str, str]]) -> State:
        """Return a state, after learning which actions lead there."""
        graph = self.result.graph
        for number, from_id, to_id in path:
            target, _ = graph.add_state(to_id, ())
            action, arguments = self._choices[number]
            origin = graph.states[from_id]
            graph.add_transition(origin, target, action, arguments, read_outcome(_NOTHING))
            # Others try the rest, so its checkpoint is kept until they report that nothing is left.
            self._left.setdefault(to_id, len(self._choices) + 1)
        return graph.states[id]

    def leave(self) -> None:
        """Bring the world back to its initial state."""
        self._notes = None
        self._leave()


def main(descriptor: int) -> None:
    """Create the world and perform tasks until the other side closes the connection."""
    # Ctrl-C is handled by the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as connection, ExitStack() as closing:
        try:
            task = decode(connection.recv_bytes())
            actions = [pkgutil.resolve_name(name) for name in task["actions"]]
            invariants = [pkgutil.resolve_name(name) for name in task["invariants"]]
            world = made_world(pkgutil.resolve_name(task["world"]), closing)
            require_foreign(task["store_id"], world.systems)
            limits = Limits(2**62, None, None, None)
            performer = Performer(world, actions, invariants, _Nothing(Random(0)), limits, None)
            performer.begin(connection)
            closing.callback(performer.leave)
            while True:
                performer.perform(decode(connection.recv_bytes()))
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            connection.send_bytes(encode({"failed": said(error)}, "failure"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
