"""A conformance test for systems: random changes, checkpoints and rollbacks in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .system import System, observation_of
from .values import canonical


@dataclass
class _Run:
    system: System
    change: Callable[[Random], object]
    content: Callable[[], object]
    random: Random
    # Tokens with the content that was read independently when they were made.
    kept: list[tuple[object, bytes]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def step(self, number: int) -> None:
        choice = self.random.random()
        if not self.kept or choice < 0.25:
            self.keep(number)
        elif choice < 0.55:
            self.log.append(f"change: {self.change(self.random)}")
        elif choice < 0.93 or len(self.kept) < 3:
            self.restore()
        else:
            self.release()

    def keep(self, number: int) -> None:
        token = self.system.checkpoint(f"checkpoint {number}; DROP \"everything' --")
        self.kept.append((token, self.seen()))
        self.log.append(f"checkpoint {len(self.kept) - 1}")
        assert token is not None, "a token must not be None"

    def restore(self) -> None:
        is_stack = self.system.rollback_order == "stack"
        index = self.random.randrange(len(self.kept))
        token, content = self.kept[index]
        self.log.append(f"rollback to {index}")
        self.system.prepare(token)
        self.system.rollback(token)
        found = self.seen()
        assert found == content, self.difference(content, found)
        if is_stack:
            del self.kept[index + 1 :]

    def release(self) -> None:
        index = self.random.randrange(1, len(self.kept))
        if self.system.rollback_order == "stack":
            index = len(self.kept) - 1
        token, _ = self.kept.pop(index)
        self.log.append(f"release {index}")
        self.system.release(token)

    def seen(self) -> bytes:
        first, second = (observation_of("system", self.system).data for _ in range(2))
        assert canonical(first, "state") == canonical(second, "state"), "two observations differ"
        return canonical(self.content(), "content")

    def difference(self, wanted: bytes, found: bytes) -> str:
        steps = "\n  ".join(self.log[-30:])
        return f"the content differs after\n  {steps}\nwanted {wanted!r}\nfound  {found!r}"


def check_system(
    system: System,
    change: Callable[[Random], Any],
    content: Callable[[], object],
    *,
    steps: int = 300,
    seed: int = 0,
) -> None:
    """Make random checkpoints, changes, rollbacks and releases; raise AssertionError on a fault.

    `change(random)` changes something and returns a description for the log. `content()` reads
    everything that a rollback must restore, independently of the system.
    """
    run = _Run(system, change, content, Random(seed))
    for number in range(steps):
        run.step(number)
    # Even the oldest checkpoint can still be restored.
    for index in range(len(run.kept) - 1, -1, -1):
        token, wanted = run.kept[index]
        system.rollback(token)
        found = run.seen()
        assert found == wanted, run.difference(wanted, found)
