"""An export is written and read group by group: bounded memory, and no old snapshot."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

import holdfast
from holdfast.codec import Codec
from holdfast.errors import CorruptRecord
from holdfast.feed.portable import TreeRecord
from holdfast.portable import file as format
from holdfast.portable import plan
from holdfast.sessions.portable import SessionRecord
from holdfast.store import NOUNS
from tests.maintenance.stores import contents, everything, sound
from tests.maintenance.test_portable import open_at

T = TypeVar("T")
calls: list[int] = []


@holdfast.tool(effect="mutate")
def charge(cents: int) -> int:
    calls.append(cents)
    return cents


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sessions.export"


@pytest.fixture
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SESSIONS_PER_GROUP", 1)


def between_groups(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Do something before each group of an export, told how many came before it."""
    begin, begun = format.ExportWriter.begin_group, iter(range(1_000))

    def begin_group(self: format.ExportWriter) -> None:
        act(next(begun))
        begin(self)

    monkeypatch.setattr(format.ExportWriter, "begin_group", begin_group)


@pytest.mark.usefixtures("_small_groups")
def test_each_group_is_as_of_its_own_moment(
    place: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_at(place) as store, open_at({"url": "sqlite://"}) as second:
        for number in range(3):
            store.session(f"s{number}").append("log", [0])

        def write(group: int) -> None:
            for number in range(3):
                store.find_session(f"s{number}").append("log", [group + 1])
            if group == 1:
                store.find_session("s0").fork(1, id="later").save(a=1)
                store.session("new")
                store.find_session("s2").delete(force=True)

        between_groups(monkeypatch, lambda group: write(group) if group < 2 else None)
        store.export(file)
        second.import_sessions(file)
        sound(second)
        # What began after the export is not in it, nor what was deleted before its turn came.
        assert sorted(contents(second)) == ["s0", "s1"]
        assert second.find_session("s0").latest()["log"] == [0, 1]  # type: ignore[index]
        assert second.find_session("s1").latest()["log"] == [0, 1, 2]  # type: ignore[index]


@pytest.mark.usefixtures("_small_groups")
def test_trees_that_share_history_travel_together(
    place: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    between_groups(monkeypatch, groups.append)
    calls.clear()
    with open_at(place) as store, open_at({"url": "sqlite://"}) as second:
        origin = store.session("origin")
        origin.append("log", ["x" * 300])
        origin.call(charge, cents=5, call_id="c")
        origin.save(done=True)
        for id in ("one", "two"):
            origin.fork(2, id=id)
        origin.delete(force=True)
        live = store.session("live")
        live.append("log", [1])
        live.fork(1, id="of live").append("log", [2])
        store.session("alone")
        store.export(file)
        assert groups == [0, 1, 2]
        second.import_sessions(file, store_keys=True)
        sound(second)
        assert contents(second) == contents(store)
        for id in ("one", "two"):
            assert second.session(id).call(charge, cents=5, call_id="c").replayed
        assert calls == [5]
        again = file.with_name("again.export")
        assert second.export(again).sessions == 5
        with open_at({"url": "sqlite://"}) as third:
            third.import_sessions(again, store_keys=True)
            assert contents(third) == contents(second)


@pytest.mark.usefixtures("_small_groups")
def test_a_long_session_among_many_short_ones_travels_whole(place: Any, file: Path) -> None:
    with open_at(place) as store, open_at({"url": "sqlite://"}) as second:
        for number in range(6):
            store.session(f"s{number}").save(a=number)
        tree = store.session("tree")
        for number in range(8):
            child = store.session(f"c{number}", parent=tree)
            for turn in range(600 if number == 3 else 2):
                child.append("log", [turn])
        store.export(file)
        second.import_sessions(file)
        assert contents(second) == contents(store)
        assert second.events("tree", limit=10_000)[:-1] == store.events("tree", limit=10_000)


def crafted(file: Path, *records: Any) -> None:
    with file.open("wb") as opened:
        writer = format.ExportWriter(opened, Codec(), format.Format(NOUNS), "crafted")
        writer.begin("nowhere")
        for record in records:
            writer.write(record)
        writer.end()


def tree(id: str, *, number: int = 1, origin: int | None = None) -> list[Any]:
    session = SessionRecord(
        number=number, id=id, root_id=id, status="active", version=1, metadata=b"\x80",
        origin_number=origin, origin_version=None if origin is None else 1,
        created_at=1, updated_at=1, last_resumed_at=1,
    )  # fmt: skip
    return [TreeRecord(id, 0, 0), session]


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([*tree("a"), format.GroupRecord(), TreeRecord("a", 0, 0)], "tree 'a' comes twice"),
        ([*tree("a"), format.GroupRecord(), *tree("b", number=2, origin=1)],
            "session 'b' has an origin that is not before it"),
        ([*tree("a"), format.GroupRecord(), tree("a")[1]],
            "session 'a' has a parent or root that is not before it"),
        ([*tree("a"), format.EndRecord(0, ""), *tree("b")], "it has an end record before its end"),
    ],
)  # fmt: skip
def test_a_group_names_and_repeats_nothing_of_another(
    file: Path, records: list[Any], problem: str
) -> None:
    crafted(file, *records)
    with open_at({"url": "sqlite://"}) as store:
        before = everything(store)
        with pytest.raises(CorruptRecord) as raised:
            store.import_sessions(file)
        assert str(raised.value).endswith(problem)
        assert everything(store) == before


def start_many(
    tx: holdfast.Transaction, first: int, last: int, root: str | None
) -> holdfast.Op[None]:
    for number in range(first, last):
        session = yield from tx.session(f"session number {number}", parent=root)
        yield from session.append("log", ["x" * 100])


def collecting(method: Callable[..., T]) -> Callable[..., T]:
    def collect(*args: Any) -> T:
        gc.collect()
        return method(*args)

    return collect


def peak_bytes(act: Callable[[], object]) -> int:
    """Return how much memory an act had at most, beyond what there was before."""
    gc.collect()
    # For good, as after the collection of tests: thawed, they would slow every later test down.
    gc.freeze()
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("root", [None, "root"], ids=["of many trees", "of one tree"])
def test_memory_does_not_grow_with_the_file(
    place: Any, tmp_path: Path, root: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SESSIONS_PER_GROUP", 20)
    for module in ("kernel.owned_rows", "sessions.portable"):
        monkeypatch.setattr(f"holdfast.{module}.ROWS_PER_PAGE", 50)
    for name, size in {
        "kernel.kept.ENTRIES_IN_MEMORY": 20,
        "kernel.owned_rows.OWNERS_PER_PAGE": 20,
        "kernel.portable.ROWS_PER_BATCH": 8,
        "portable.file.FRAME_BYTES": 2_048,
    }.items():
        monkeypatch.setattr(f"holdfast.{name}", size)
    # What is only garbage, or free for new objects, is not kept: it goes with each frame.
    for kind, name in ((format.ExportWriter, "flush"), (format.ExportFile, "_read_frame")):
        monkeypatch.setattr(kind, name, collecting(getattr(kind, name)))
    peaks: dict[int, tuple[int, int]] = {}

    def another(name: str) -> holdfast.Store:
        if "namespace" in place:
            return open_at({**place, "namespace": f"{place['namespace']}_{name}"})
        return open_at({"url": f"sqlite:///{tmp_path}/{name}.db"})

    for size in (40, 160, 880):
        file = tmp_path / f"{size}.export"
        with another(f"from{size}") as store, another(f"to{size}") as second:
            if root:
                store.session(root)
            for first in range(0, size, 10):
                store.run(start_many, first, first + 10, root)
                store.find_session(f"session number {first}").call(charge, cents=first)
                store.work.submit("task", session=f"session number {first}")
            exported, imported = partial(store.export, file), partial(second.import_sessions, file)
            peaks[size] = peak_bytes(exported), peak_bytes(imported)
    # The first size fills caches; of the 720 sessions more, none may leave 100 bytes.
    for few, many in zip(peaks[160], peaks[880], strict=True):
        assert many - few < 72_000, peaks
