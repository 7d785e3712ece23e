"""A noun that is added to the list travels with its trees; exports know none of them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import portable
from holdfast.codec import Codec
from holdfast.errors import CorruptRecord, InvalidArgument
from holdfast.feed.portable import TreeRecord
from holdfast.portable.file import ExportWriter, Format
from holdfast.store import NOUNS
from holdfast.testing.nouns import NOUNS as EXAMPLES
from holdfast.testing.nouns import Counter, CounterRecord
from tests.maintenance.stores import everything

LISTED = (*NOUNS, *EXAMPLES)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sessions.export"


@pytest.fixture
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.NOUNS", LISTED)


def open_at(place: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal")


def values(store: holdfast.Store) -> dict[str, int]:
    return Counter(store).all_values()


def craft(file: Path, *records: Any) -> None:
    with file.open("wb") as opened:
        writer = ExportWriter(opened, Codec(), Format(LISTED), "crafted")
        writer.begin("nowhere")
        for record in records:
            writer.write(record)
        writer.end()


@pytest.mark.usefixtures("_listed")
def test_a_noun_in_the_list_travels_with_its_trees(place: Any, file: Path) -> None:
    with open_at(place) as store, open_at({"url": "sqlite://"}) as target:
        for number in range(3):
            store.session(f"s{number}")
            Counter(store, f"s{number}").add(number - 1)
        store.session("without")
        exported = store.export(file, ["s0", "s2", "without"])
        assert +exported.others == {"counters": 2}
        imported = target.import_sessions(file)
        assert (imported.sessions, +imported.others) == (3, {"counters": 2})
        assert values(target) == {"s0": -1, "s2": 1}


@pytest.mark.usefixtures("_listed")
def test_its_records_are_checked_before_anything_is_written(place: Any, file: Path) -> None:
    tree = TreeRecord("s", 0, 0)
    with open_at(place) as store:
        before = everything(store)
        for records, problem in (
            ([CounterRecord("s", 1), tree], "counter 's' comes twice, or without its tree"),
            ([tree, CounterRecord("s", 1), CounterRecord("s", 1)], "counter 's' comes twice"),
            ([tree, CounterRecord("s", "x")], "has a wrong counter.value: Expected `int`"),  # type: ignore[arg-type]
        ):
            craft(file, *records)
            with pytest.raises(CorruptRecord, match=problem):
                store.import_sessions(file)
        assert everything(store) == before
        assert values(store) == {}


@pytest.mark.usefixtures("_listed")
def test_what_is_here_already_takes_back_the_whole_import(place: Any, file: Path) -> None:
    craft(file, TreeRecord("s", 0, 0), CounterRecord("s", 1))
    with open_at(place) as store:
        Counter(store, "s").plant()
        Counter(store, "s").add(7)
        before = everything(store)
        with pytest.raises(InvalidArgument, match="counter 's' is here already; nothing was"):
            store.import_sessions(file)
        assert everything(store) == before
        assert values(store) == {"s": 7}


def test_a_store_without_the_noun_refuses_the_file(file: Path) -> None:
    craft(file, TreeRecord("s", 0, 0), CounterRecord("s", 1))
    with open_at({"url": "sqlite://"}) as store:
        with pytest.raises(CorruptRecord, match="record 1 is not one of ours"):
            store.import_sessions(file)
        assert store.sessions() == []


def test_exports_name_no_table() -> None:
    for path in Path(portable.__file__).parent.glob("*.py"):
        assert "hf_" not in path.read_text(), path.name
