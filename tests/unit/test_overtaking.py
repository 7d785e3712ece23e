"""What the threads of a process share, used by another thread at each line of whoever is at it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import holdfast
from holdfast.codec import DEFAULT_LIMITS
from holdfast.effects.requests import EffectRequest, Salts, StoreSalts
from holdfast.sessions.access import Place
from holdfast.state.requests import Ordinals


def overtaken(call: Callable[[], object], function: Any, other: Callable[[], object]) -> int:
    """Make a call, and the other one at each line of a function; return at how many."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            count += 1
            sys.settrace(None)
            other()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Item:
    """As much of a work item as a key is derived from."""

    id, first_id = "i1", None


def test_equal_mutations_of_two_threads_in_one_attempt_have_keys_of_their_own(
    tmp_path: Path,
) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        ordinals, item, keys = Ordinals(store.runtime), Item(), list[str]()

        def derive() -> None:
            keys.append(ordinals.key(item, "increment", ("n",), {}))

        for _ in range(3):
            assert overtaken(derive, Ordinals.key, derive) >= 3
    numbers = sorted(int(key.rpartition(" ")[2]) for key in keys)
    assert numbers == list(range(1, len(keys) + 1))


def returned(operation: Any) -> Any:
    """Return what an operation returns if it asks the database for nothing, and None if not."""
    try:
        next(operation)
    except StopIteration as ended:
        return ended.value
    return None


def test_a_thread_that_meets_another_reading_salts_believes_in_none_that_it_does_not_use() -> None:
    tool = holdfast.tool(effect="mutate", name="act")(lambda: None)
    place = Place("s", 1, "s", None)
    request = EffectRequest(
        tool=tool, arguments={}, policy="none", distinct=None, holder="h", place=place, guard=None
    )
    own, imported, later = (f"{number:064x}" for number in range(3))
    readings = [{1: own}, {1: own, 3: imported}, {1: own, 3: imported, 4: later}]
    salts, identified = Salts(None, DEFAULT_LIMITS), 0

    def identify() -> None:
        nonlocal identified
        if returned(salts.load()):
            identity = returned(salts.identify(request))
            known = next(each for each in readings if max(each) == identity.salts_number)
            assert len(salts.of(request)) >= len(known)
            identified += 1

    for reading in readings:
        note = partial(salts._note, StoreSalts(reading, "", max(reading)))
        assert overtaken(note, Salts._note, identify) >= 3
    assert identified >= 6
