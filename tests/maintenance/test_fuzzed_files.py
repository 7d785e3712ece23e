"""Whatever was changed in a file, it is refused with nothing written, or imported whole."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.errors import CorruptRecord, HoldfastError
from holdfast.store import check
from holdfast.worlds.stored import list_explorations, read_exploration
from tests.maintenance.crafted import craft, fill, open_at, read
from tests.maintenance.stores import everything, sound
from tests.ready import Schemas


@pytest.fixture
def frames(tmp_path: Path) -> list[Any]:
    with open_at({"url": "sqlite://"}) as store:
        fill(store)
        store.export(tmp_path / "whole.export")
    return read(tmp_path / "whole.export")


NASTY: list[Any] = [
    None, 0, 1, -1, 2, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, "", "a", "s", "b", "\x1b[31m",
    "x" * 300, "active", "issued", "completed", "review", "mutate", "item:1", "global", "once:x",
    "session:a:" + "0" * 32, [], {}, [[1, 0, 1]], [[2, 2, 1]], [["a", 1, 0, 5]], {"input": 1},
    b"\xc0", b"\x80", b"\x90", b"\x01",
    b"\xc1", b"\x91" * 90 + b"\x01", b"\xd9\x01a",
    b"\x81\xa1a\x93\x02\x01\x01", b"\x81\xa1a\x92\x01\xcb" + b"\0" * 8,
]  # fmt: skip


def mutated(frames: list[Any], choice: random.Random) -> list[Any]:
    """Return the frames with one to three things changed."""
    found = list(frames)
    for _ in range(choice.randint(1, 3)):
        place = choice.randrange(len(found))
        each = found[place]
        match choice.randrange(6):
            case 0:
                del found[place]
                found = found or [each]
            case 1:
                found.insert(choice.randrange(len(found)), each)
            case 2:
                other = choice.randrange(len(found))
                found[place], found[other] = found[other], found[place]
            case 3 if isinstance(each, msgspec.Struct):
                body = bytearray(msgspec.msgpack.encode(each))
                body[choice.randrange(len(body))] = choice.randrange(256)
                found[place] = bytes(body)
            case _ if getattr(each, "__struct_fields__", ()):
                name = choice.choice(each.__struct_fields__)
                found[place] = msgspec.structs.replace(each, **{name: choice.choice(NASTY)})
    return found


def survives(store: holdfast.Store, file: Path, where: str) -> bool:
    """Import a file; it is refused with nothing written, or is whole and in order."""
    problem = None
    try:
        store.import_sessions(file, store_keys=True)
    except HoldfastError as error:
        problem = str(error)
    if problem is not None:
        assert problem.isprintable(), where
        assert "constraint" not in problem.lower(), f"{where}: {problem}"
        return False
    for finding in check(store.url):
        assert finding.level != "problem", f"{where}: {finding}"
    sound(store)
    for info in store.sessions():
        session = store.find_session(info.id)
        session.latest()
        session.resume_point()
        session.spent()
        store.work.list(session=session)
        [effect.arguments for effect in store.effects(session=session)]
        session.asks(), session.pauses(), session.artifacts(), session.state.snapshot()
    store.pauses()
    for explored in list_explorations(store):
        # What the world of an exploration makes of it is known only when it is read.
        with contextlib.suppress(CorruptRecord):
            read_exploration(store, explored.id)
    return True


NewPlace = Callable[[], dict[str, Any]]


def fuzz(file: Path, frames: list[Any], seeds: range, new_place: NewPlace) -> dict[bool, int]:
    counts = {True: 0, False: 0}
    store: holdfast.Store | None = None
    before: dict[str, list[Any]] = {}
    try:
        for seed in seeds:
            if store is None:
                store = open_at(new_place())
                before = everything(store)
            craft(file, mutated(frames, random.Random(seed)))
            is_taken = survives(store, file, f"seed {seed}")
            counts[is_taken] += 1
            if is_taken:
                store.close()
                store = None
            else:
                assert everything(store) == before, f"seed {seed}"
    finally:
        if store is not None:
            store.close()
    return counts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fuzzed.export"


@pytest.fixture
def new_file(tmp_path: Path) -> NewPlace:
    """Return places of new files."""
    numbers = count()
    return lambda: {"url": f"sqlite:///{tmp_path}/fuzzed{next(numbers)}.db"}


@pytest.fixture
def new_schema(postgres_dsn: str, ready_schemas: Schemas) -> Iterator[NewPlace]:
    """Return places of empty schemas, one at a time."""
    with contextlib.ExitStack() as lent:

        def new_place() -> dict[str, Any]:
            lent.close()
            return {"url": postgres_dsn, "namespace": lent.enter_context(ready_schemas.lent())}

        yield new_place


def test_a_thousand_changed_files_are_refused_or_whole(
    file: Path, frames: list[Any], new_file: NewPlace
) -> None:
    counts = fuzz(file, frames, range(1_000), new_file)
    assert counts[True] > 10
    assert counts[False] > 500


def test_changed_files_are_refused_or_whole_on_postgresql_too(
    file: Path, frames: list[Any], new_schema: NewPlace
) -> None:
    counts = fuzz(file, frames, range(200), new_schema)
    assert counts[True] > 2
    assert counts[False] > 100


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_twenty_thousand_changed_files_are(
    file: Path, frames: list[Any], new_file: NewPlace, part: int
) -> None:
    fuzz(file, frames, range(1_000 + part * 2_000, 3_000 + part * 2_000), new_file)


@pytest.mark.slow
def test_five_thousand_changed_files_are_on_postgresql_too(
    file: Path, frames: list[Any], new_schema: NewPlace
) -> None:
    fuzz(file, frames, range(5_000), new_schema)
