"""Worlds and actions that worker processes import, and that go wrong there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from holdfast.worlds import MemorySystem, World, action, invariant

PLACE = "HOLDFAST_TEST_CREW"


def make_world() -> World:
    return World({"m": MemorySystem({"n": 0})}, verify=True)


def make_another_each_time() -> World:
    return World({"m": MemorySystem({"n": os.getpid()})})


def make_none() -> World:
    raise LookupError("the database is down")


def make_dead() -> World:
    os._exit(3)


class Leaking(MemorySystem):
    """A system that does not go back."""

    def rollback(self, token: bytes) -> None:
        super().rollback(token)
        self.data["leaked"] = True


def make_leaking() -> World:
    return World({"m": Leaking({"n": 0})}, verify=True)


def data(world: World) -> dict[str, Any]:
    system = world.systems["m"]
    assert isinstance(system, MemorySystem)
    return system.data


@action(requires=lambda world: data(world)["n"] < 6)
def grow(world: World) -> None:
    print("growing")
    data(world)["n"] += 1


@action
def shrink(world: World) -> None:
    data(world)["n"] = max(data(world)["n"] - 1, 0)


@action(requires=lambda world: data(world)["n"] == 3)
def die_once(world: World) -> None:
    """Kill the process that tries it first."""
    mark = Path(os.environ[PLACE])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@action(requires=lambda world: data(world)["n"] == 2)
def die(world: World) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@action(limit=2, after=("grow",))
def limited(world: World) -> None:
    data(world)["n"] = 0


@invariant
def below_five(world: World) -> bool:
    return bool(data(world)["n"] < 5)
