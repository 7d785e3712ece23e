"""How many functions of ours one call passes, in how many files and how deep.

A reader has to follow them and the processor too. `pytest -s` prints the walks; the limits are what
a walk takes today, so that one that grows is seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import holdfast

HOME = str(Path(holdfast.__file__).parent) + os.sep
# The methods that every record has are not counted, compiled by the standard library or not.
RECORDS = f"{HOME}dataclass.py"
MESSAGES = [{"role": "user", "content": "hello"}]

LIMITS = {
    "append": (60, 13, 12),
    "save": (64, 13, 12),
    "call": (112, 19, 16),
    "claim": (40, 12, 12),
    "complete": (40, 11, 11),
    "increment": (76, 17, 16),
}


@dataclass
class Walk:
    """The functions that were entered, each with its depth; comprehensions are no functions."""

    steps: list[tuple[int, str, str]] = field(default_factory=list)
    depth: int = 0

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(HOME) or file == RECORDS or code.co_name.startswith("<"):
            return
        if event == "call":
            self.depth += 1
            self.steps.append((self.depth, code.co_qualname, file.removeprefix(HOME)))
        elif event == "return":
            self.depth -= 1

    @property
    def size(self) -> tuple[int, int, int]:
        """Functions, files, and the deepest of them."""
        functions = {(name, file) for _, name, file in self.steps}
        deepest = max(depth for depth, _, _ in self.steps)
        return len(functions), len({file for _, file in functions}), deepest


def walk(call: Callable[[], Any]) -> Walk:
    taken = Walk()
    sys.setprofile(taken.watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return taken


@holdfast.tool(effect="mutate")
def act(number: int) -> int:
    """Do nothing."""
    return number


def calls(store: holdfast.Store) -> dict[str, Callable[[], Any]]:
    """Return calls as they are in the middle of a loop: the caches are warm."""
    session = store.session("s")
    whole = [dict(message, number=number) for number in range(20) for message in MESSAGES]
    for number in range(2):
        session.append("log", MESSAGES)
        whole.append({"number": number})
        session.save(whole=whole)
        session.call(act, number=number)
        session.state.increment("count")
        store.work.submit("t")
        store.work.submit("t")
    store.work.claim("w")[0].complete(1)
    whole.append({"number": 2})
    held: list[holdfast.WorkItem] = []
    return {
        "append": lambda: session.append("log", MESSAGES),
        "save": lambda: session.save(whole=whole),
        "call": lambda: session.call(act, number=2),
        "claim": lambda: held.extend(store.work.claim("w")),
        "complete": lambda: held[0].complete(1),
        "increment": lambda: session.state.increment("count"),
    }


def test_a_call_passes_no_more_functions_than_it_did(tmp_path: Path) -> None:
    if sys.getprofile() is not None:
        pytest.skip("somebody else profiles this run")
    longer = {}
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        for name, call in calls(store).items():
            taken = walk(call)
            functions, files, deepest = taken.size
            print(f"\n{name}: {functions} functions in {files} files, {deepest} deep")
            for depth, function, file in taken.steps:
                print(f"{'  ' * depth}{function}  {file}")
            if any(now > limit for now, limit in zip(taken.size, LIMITS[name], strict=True)):
                longer[name] = (taken.size, LIMITS[name])
    assert not longer
