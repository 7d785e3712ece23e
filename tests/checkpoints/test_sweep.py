"""Every edit of a short list, with runs of four: what was saved loads, before and after it grows.

What is planned does not depend on the database, so this runs on one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path

import pytest

import holdfast
from holdfast.checkpoints import Heads, changes
from tests.checkpoints import tables

RUN = 4
LENGTHS = (1, 4, 5, 9)
NEW = (0, 1, 3, 4, 5)
GROWTH = (3, 8)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[holdfast.Store]:
    for name, module in list(sys.modules.items()):
        if name.startswith("holdfast.") and hasattr(module, "RUN_ITEMS"):
            monkeypatch.setattr(module, "RUN_ITEMS", RUN)
    monkeypatch.setattr(changes, "PIECES_MAX", 3)
    with holdfast.open(f"sqlite:///{tmp_path}/store.db", durability="normal") as opened:
        yield opened


def splices(length: int) -> Iterator[tuple[int, int, int]]:
    """Every place, every length of what goes, and some lengths of what comes."""
    for low in range(length + 1):
        for high in range(low, length + 1):
            for new in NEW:
                if (low, high) != (low, low) or new:
                    yield low, high, new


class Writer:
    """Saves a list in one session, with what it remembers or without."""

    def __init__(self, session: holdfast.Session, *, is_cold: bool) -> None:
        self.session = session
        self.is_cold = is_cold
        self.wanted: dict[int, list[str]] = {}

    def save(self, log: list[str]) -> None:
        self._forget()
        self.wanted[self.session.save(log=log).version] = log

    def grow(self, log: list[str], count: int, *, by_append: bool = True) -> list[str]:
        self._forget()
        new = [f"after {len(log) + number}" for number in range(count)]
        full = [*log, *new]
        saved = self.session.append("log", new) if by_append else self.session.save(log=full)
        self.wanted[saved.version] = full
        return full

    def check(self) -> None:
        for version, log in self.wanted.items():
            assert self.session.at(version)["log"] == log, version

    def _forget(self) -> None:
        if self.is_cold:
            Heads.of(self.session.runtime).forget(self.session.number)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_cold", [False, True], ids=["warm", "cold"])
def test_every_edit_of_a_short_list_loads_back(
    store: holdfast.Store, is_cold: bool, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each grows by an append or a save, and by few or many items: in turn, or each in all ways."""
    count = 0
    ways = list(product(GROWTH, (True, False)))
    for length in LENGTHS:
        log = [f"item {number}" for number in range(length)]
        edits = list(product(splices(length), ways)) if whole else zip(splices(length), cycle(ways))
        for (low, high, new), (growth, by_append) in edits:
            writer = Writer(store.session(), is_cold=is_cold)
            writer.save(log)
            edited = [*log[:low], *(f"new {number}" for number in range(new)), *log[high:]]
            writer.save(edited)
            grown = writer.grow(edited, growth, by_append=by_append)
            # A second edit stands on the pieces of the first, and grows again.
            writer.save(["summary", *grown[len(grown) // 2 :]])
            writer.grow(writer.wanted[4], growth, by_append=by_append)
            writer.check()
            count += 1
        tables.check(store, RUN)
        tables.wipe(store)
    with capsys.disabled():
        print(f"\n{count} edits of short lists, each with two that follow it")


@pytest.mark.parametrize("how", ["fork", "rewind", "truncate"])
def test_every_way_back_can_go_on(store: holdfast.Store, how: str) -> None:
    """From each of several versions, with lists that are in one piece and in many."""
    for length, edits in product((3, 4, 9), range(5)):
        log = [f"item {number}" for number in range(length)]
        origin = Writer(store.session(), is_cold=False)
        origin.save(log)
        for edit in range(edits):
            log = [*log[:edit], f"edit {edit}", *log[edit + 1 :], "grown"]
            origin.save(log)
        for version, growth in product(list(origin.wanted), GROWTH):
            log = origin.wanted[version]
            match how:
                case "fork":
                    copy = Writer(origin.session.fork(version), is_cold=False)
                case "rewind":
                    copy = origin
                    copy.wanted[copy.session.rewind(version).version] = log
                case _:
                    copy = origin
                    log = log[: len(log) // 2]
                    copy.save(log)
            log = copy.grow(log, growth)
            copy.grow(log, RUN, by_append=False)
            copy.check()
        origin.check()
        tables.check(store, RUN)
        tables.wipe(store)
