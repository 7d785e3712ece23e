"""Ctrl-C at any moment of a rollback: the world is where it was, or there, or it says so."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import WorldInconsistent
from holdfast.worlds import MemorySystem, System, World
from tests.faults.tracing import Interrupt, interrupted_everywhere
from tests.worlds.test_every_system import OPENERS, client, dsn, redis, sqlite_file, template

__all__ = ["client", "dsn", "template"]

# Python drops an interrupt that hits while it clears an object away.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WORLD = tuple(
    f"holdfast/worlds/{name}.py"
    for name in ("world", "rollback", "journal", "interrupts", "checkpoints", "context", "tree")
)
AWAY = 5


class Place:
    """A world with a system and plain data, which are moved together, and where they are."""

    def __init__(self, system: System, write: Callable[[int], object], **options: Any) -> None:
        self.data = MemorySystem({"n": 0})
        self.write = write
        systems = {"memory": self.data, "system": system}
        self.world = World(systems, context={"n": 0}, **options)
        self.ids: list[str] = []
        self.seen: list[str] = []
        for n in range(4):
            self.put(n)
            self.ids.append(self.world.checkpoint(f"{n}"))
            self.seen.append(self.world.present_id())
        self.put(AWAY)
        self.seen.append(self.world.present_id())

    def put(self, n: int) -> None:
        """Change all parts."""
        self.write(n)
        self.data.data["n"] = self.world.context["n"] = n

    def at(self) -> tuple[int, int, int]:
        """Return where the parts are; what none of them was is 99."""
        now = self.world.present_id()
        places = [*range(4), AWAY]
        found = places[self.seen.index(now)] if now in self.seen else 99
        return found, self.data.data["n"], self.world.context["n"]

    def judge(self, target: int) -> bool:
        """Make sure that the world is somewhere, or says that it is not; return whether it is."""
        world = self.world
        is_consistent = world.is_consistent
        if is_consistent:
            assert self.at() in {(n, n, n) for n in (target, AWAY)}
        else:
            with pytest.raises(WorldInconsistent):
                world.act(lambda world: None)
        for n in ((target + 1) % 4, target):
            world.rollback(self.ids[n])
            assert world.is_consistent
            assert self.at() == (n, n, n)
        self.put(AWAY)
        return is_consistent


def struck(place: Place, files: tuple[str, ...], step: int) -> Iterator[int]:
    """Roll back again and again, interrupted some places later each time."""
    for number in itertools.count():
        target = number % 4
        interrupt = Interrupt(1 + number * step, files)
        interrupt.strike(partial(place.world.rollback, place.ids[target]))
        yield target
        if interrupt.remaining > 0:
            return


def file_of(system: System) -> tuple[str, ...]:
    module = type(system).__module__.rpartition(".")[2]
    others = {"postgres": "postgres_rows", "postgres_connection": "postgres_rows", "sqlite": "wal"}
    return tuple(
        f"holdfast/worlds/systems/{name}.py" for name in (module, others.get(module, module))
    )


@pytest.mark.parametrize("opened", [*OPENERS.values(), redis], ids=lambda opened: opened.__name__)
def test_an_interrupt_of_a_rollback_costs_no_system_its_checkpoints(
    opened: Callable[[pytest.FixtureRequest], Any], request: pytest.FixtureRequest
) -> None:
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Each checkpoint reads the whole of")
        system, write = stack.enter_context(opened(request))
        place = Place(system, write)
        stack.callback(place.world.close)
        judged = [place.judge(target) for target in struck(place, WORLD + file_of(system), 3)]
        assert len(judged) > 15


def test_an_interrupt_anywhere_leaves_no_intent_behind_a_world_that_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    with (
        holdfast.open(f"sqlite:///{tmp_path}/store/store.db") as store,
        sqlite_file(request) as (system, write),
    ):
        place = Place(system, write, store=store, id="w")
        journal: Any = place.world._journal
        flagged = 0
        for nth in interrupted_everywhere(
            lambda nth: place.world.rollback(place.ids[nth % 4]), WORLD
        ):
            if place.world.is_consistent:
                assert journal._journal.world().intent is None, f"place {nth}"
            flagged += not place.judge(nth % 4)
        place.world.close()
        assert nth > 100
        assert flagged > 5
