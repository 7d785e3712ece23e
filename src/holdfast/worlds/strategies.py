"""Strategies: which action to try next, from which state. Each choice takes constant time.

Only `weighted` and `novelty` take time logarithmic in the number of candidates.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

import msgspec

from ..arguments import shown
from ..errors import InvalidArgument
from .actions import Action
from .graph import State
from .values import canonical


class Candidate(msgspec.Struct, frozen=True, eq=False):
    """Something to try: an action with its arguments, in a state.

    `number` is the index of the action with these arguments among all that an exploration tries.
    """

    state: State
    action: Action
    arguments: Mapping[str, Any]
    number: int = 0


class Strategy(ABC):
    """An order of candidates; every candidate that is added is returned once."""

    def __init__(self, random: Random) -> None:
        self.random = random

    @abstractmethod
    def add(self, candidate: Candidate) -> None:
        """Add something to try."""

    @abstractmethod
    def next(self) -> Candidate:
        """Remove and return the next candidate; only called while there is one."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many candidates are left."""


class BreadthFirst(Strategy):
    """Oldest first: finds shortest paths."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._waiting: deque[Candidate] = deque()

    def add(self, candidate: Candidate) -> None:
        """Add at the end."""
        self._waiting.append(candidate)

    def next(self) -> Candidate:
        """Take from the front."""
        return self._waiting.popleft()

    def __len__(self) -> int:
        return len(self._waiting)


class DepthFirst(BreadthFirst):
    """Newest first: rolls back rarely."""

    def next(self) -> Candidate:
        """Take from the end."""
        return self._waiting.pop()


class RandomOrder(Strategy):
    """Any candidate, with equal probability."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._waiting: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        """Add at the end."""
        self._waiting.append(candidate)

    def next(self) -> Candidate:
        """Take one at random; the last one takes its place."""
        index = self.random.randrange(len(self._waiting))
        last = self._waiting.pop()
        if index == len(self._waiting):
            return last
        chosen, self._waiting[index] = self._waiting[index], last
        return chosen

    def __len__(self) -> int:
        return len(self._waiting)


class Weighted(Strategy):
    """At random; an action of weight 2 is twice as likely as one of weight 1."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._waiting: list[tuple[float, int, Candidate]] = []
        self._count = 0

    def add(self, candidate: Candidate) -> None:
        """Draw an exponential time: the smallest time belongs to each with a chance by weight."""
        self._count += 1
        # Times start at that of the last choice, so that late candidates have the same chances.
        at = self._now + self.random.expovariate(candidate.action.weight)
        heapq.heappush(self._waiting, (at, self._count, candidate))

    _now = 0.0

    def next(self) -> Candidate:
        """Take the one with the smallest time."""
        self._now, _, candidate = heapq.heappop(self._waiting)
        return candidate

    def __len__(self) -> int:
        return len(self._waiting)


class CoverageGuided(Strategy):
    """The action that has run least often, in the oldest state where it is left to try."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._waiting: dict[str, deque[Candidate]] = {}
        self._runs: dict[str, int] = {}
        self._length = 0

    def add(self, candidate: Candidate) -> None:
        """Add to the candidates of this action."""
        self._waiting.setdefault(candidate.action.name, deque()).append(candidate)
        self._length += 1

    def next(self) -> Candidate:
        """Compare the actions, of which there are few."""
        least = min(
            (name for name, waiting in self._waiting.items() if waiting),
            key=lambda name: self._runs.get(name, 0),
        )
        self._runs[least] = self._runs.get(least, 0) + 1
        self._length -= 1
        return self._waiting[least].popleft()

    def __len__(self) -> int:
        return self._length


class Novelty(Strategy):
    """States first that show the most values that no earlier state showed."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._waiting: list[tuple[int, int, Candidate]] = []
        self._seen: set[bytes] = set()
        self._last: tuple[str, int] = ("", 0)
        self._count = 0

    def add(self, candidate: Candidate) -> None:
        """Rank by the number of new values in the state."""
        if candidate.state.id != self._last[0]:
            self._last = candidate.state.id, self._new_values(candidate.state)
        self._count += 1
        heapq.heappush(self._waiting, (-self._last[1], self._count, candidate))

    def next(self) -> Candidate:
        """Take the one whose state is the most novel."""
        return heapq.heappop(self._waiting)[2]

    def __len__(self) -> int:
        return len(self._waiting)

    def _new_values(self, state: State) -> int:
        values = {
            canonical([seen.system, str(name), value], "observation")
            for seen in state.observations
            for name, value in _parts(seen.data)
        }
        new = len(values - self._seen)
        self._seen |= values
        return new


def _parts(data: Any) -> list[tuple[object, Any]]:
    return list(data.items()) if isinstance(data, dict) else [("", data)]


STRATEGIES: Final[Mapping[str, Callable[[Random], Strategy]]] = {
    "bfs": BreadthFirst,
    "dfs": DepthFirst,
    "random": RandomOrder,
    "coverage": CoverageGuided,
    "weighted": Weighted,
    "novelty": Novelty,
}


def as_strategy(what: str | Callable[[Random], Strategy], seed: int) -> Strategy:
    """Return a strategy by its name, or made by a function of a random generator."""
    make = STRATEGIES.get(what) if isinstance(what, str) else what
    if make is None:
        raise InvalidArgument(f"strategy must be one of {', '.join(STRATEGIES)}, not {shown(what)}")
    return make(Random(seed))
