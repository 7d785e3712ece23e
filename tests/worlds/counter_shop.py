"""A tiny shop with bugs, at the top level of a module, so that generated tests can import it."""

from __future__ import annotations

from typing import Any

from holdfast.worlds import MemorySystem, World, action, invariant

FIXED: set[str] = set()


def make_world() -> World:
    return World({"shop": MemorySystem({"stock": 2, "sold": 0, "refunds": 0})})


def data(world: World) -> dict[str, Any]:
    system = world.systems["shop"]
    assert isinstance(system, MemorySystem)
    return system.data


@action(parameters={"count": [1, 2]}, requires=lambda world, count: data(world)["sold"] < 3)
def buy(world: World, count: int) -> None:
    if count > data(world)["stock"] and "oversell" in FIXED:
        return
    data(world)["stock"] -= count
    data(world)["sold"] += count


@action(limit=2)
def refund(world: World) -> None:
    if data(world)["sold"] < 1:
        if "refund" in FIXED:
            return
        raise LookupError("nothing was sold")
    data(world)["sold"] -= 1
    data(world)["stock"] += 1
    data(world)["refunds"] += 1


@action
def restart(world: World) -> None:
    data(world).update(stock=2, sold=0, refunds=0)


@invariant(severity="critical", message="more was sold than there was")
def stock_is_never_negative(world: World) -> bool:
    return bool(data(world)["stock"] >= 0)


ACTIONS = [buy, refund, restart]
