"""Calls of shared state at random, for many clients at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from holdfast.testing.recorded_state import RecordedState

COUNTERS = ["counter-1", "counter-2"]
REGISTERS = ["register-1", "register-2", "register-3"]
LISTS = ["list-1", "list-2"]
SETS = ["set-1", "set-2"]
MEMBERS = ["a", "b", "c", "d"]
ITEMS_MAX = 12


def make_calls(
    state: RecordedState, seed: int, count: int, tell: Callable[[], object] | None = None
) -> None:
    """Make calls one after the other; some of them swap what the client has seen last."""
    choose = random.Random(seed)
    seen: dict[str, int] = {}
    for number in range(count):
        one_call(state, choose, seen, f"{seed}-{number}")
        if tell is not None:
            tell()


def one_call(state: RecordedState, choose: random.Random, seen: dict[str, int], value: str) -> None:
    """Make one call; versions that it tells are remembered."""
    register, counter = choose.choice(REGISTERS), choose.choice(COUNTERS)
    listed, members, member = choose.choice(LISTS), choose.choice(SETS), choose.choice(MEMBERS)
    kind = choose.choice(
        ["get", "get", "set", "swap", "delete", "increment", "append", "add", "remove", "batch"]
    )
    told: Any = None
    if kind == "get":
        told = state.get(choose.choice([register, counter, listed, members]))
        if told is not None and isinstance(told["value"], list) and len(told["value"]) > ITEMS_MAX:
            state.delete(listed)
    elif kind == "set":
        told = state.set(register, value)
    elif kind == "swap":
        told = state.set(register, value, if_version=seen.get(register, 0))
    elif kind == "delete":
        told = state.delete(choose.choice([register, register, listed]))
    elif kind == "increment":
        told = state.increment(counter, choose.randint(1, 3))
    elif kind == "append":
        told = state.append(listed, [f"{value}-1", f"{value}-2"])
    elif kind == "add":
        told = state.add(members, member)
    elif kind == "remove":
        told = state.remove(members, member)
    else:
        told = state.batch(some_operations(choose, register, counter, listed, value, seen))
    for entry in told if isinstance(told, list) else []:
        seen[entry["key"]] = entry["version"]


def some_operations(
    choose: random.Random,
    register: str,
    counter: str,
    listed: str,
    value: str,
    seen: dict[str, int],
) -> list[dict[str, Any]]:
    """Return operations on several keys; the last may be refused, and all with it."""
    found: list[dict[str, Any]] = [
        {"op": "increment", "key": counter, "delta": 1},
        {"op": "append", "key": listed, "items": [value]},
    ]
    choose.shuffle(found)
    swap = {"op": "set", "key": register, "value": value, "if_version": seen.get(register, 0)}
    return [*found[: choose.randint(1, 2)], swap] if choose.random() < 0.6 else found
