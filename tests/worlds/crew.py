"""Worlds and actions that worker processes import, and that go wrong there."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from holdfast.leases import Keeper
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


@action(requires=lambda world: data(world)["n"] == 4)
def stop_once(world: World) -> None:
    """Stop the process that tries it first, when no thread of it is in a transaction."""
    mark = Path(os.environ[PLACE])
    try:
        mark.with_suffix(".first").touch(exist_ok=False)
    except FileExistsError:
        mark.with_suffix(".again").touch()
        return
    stopped, renew = threading.Event(), Keeper._renew_due

    def stop(keeper: Keeper, due: Any) -> None:
        written = mark.with_suffix(".new")
        written.write_text(str(os.getpid()))
        written.rename(mark)
        # Sent to the process, it might arrive when this thread has gone on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        setattr(Keeper, "_renew_due", renew)  # noqa: B010
        stopped.set()

    # This thread waits, and the one that renews leases stops the process instead of renewing.
    setattr(Keeper, "_renew_due", stop)  # noqa: B010
    stopped.wait()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@action(requires=lambda world, of: data(world)["n"] == 1, parameters={"of": range(20)})
def meet(world: World, of: int) -> None:
    """Wait until the process that explores tries it too."""
    mark = Path(os.environ[PLACE])
    if "pytest" in sys.modules:
        mark.touch()
    while not mark.exists():
        time.sleep(0.01)


@action(requires=lambda world, of: data(world)["n"] == 1, parameters={"of": range(20)})
def die_of(world: World, of: int) -> None:
    if of == 7:
        os.kill(os.getpid(), signal.SIGKILL)


@action(limit=2, after=("grow",))
def limited(world: World) -> None:
    data(world)["n"] = 0


@invariant
def below_five(world: World) -> bool:
    return bool(data(world)["n"] < 5)
