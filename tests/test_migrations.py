"""Migrations, tested with an example: nothing is released yet, so there is only format 1."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.kernel import schema
from holdfast.store import NOUNS
from tests.schemas import describe, next_format


def test_every_text_of_tables_is_part_of_format_1() -> None:
    [first] = schema.migrations(NOUNS)
    texts = sorted(Path(holdfast.__file__).parent.rglob("schema.sql"))
    assert len(texts) == len(NOUNS) + 1
    assert all(text.read_text() in first.text for text in texts)


def test_migrations_are_numbered_without_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    with next_format(monkeypatch):
        numbers = [migration.version for migration in schema.migrations(NOUNS)]
        assert numbers == list(schema.formats()) == list(range(1, schema.newest() + 1))
    assert schema.newest() == 1


def test_a_migrated_schema_equals_a_fresh_one(
    new_place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with holdfast.open(**new_place) as store:
        store_id = store.store_id()
        store.session("kept").save(plan="kept")
    fresh = dict(new_place)
    if "namespace" in fresh:
        fresh["namespace"] += "_fresh"
    else:
        fresh["url"] = f"sqlite:///{tmp_path}/fresh.db"
    with next_format(monkeypatch):
        with pytest.raises(holdfast.SchemaMismatch, match="run `holdfast migrate`"):
            holdfast.open(**new_place, migrate=False)
        with holdfast.open(**new_place) as store, holdfast.open(**fresh) as other:
            assert store.store_id() == store_id
            assert describe(store) == describe(other)
            latest = store.session("kept").latest()
            assert latest is not None
            assert latest.channels == {"plan": "kept"}
    with pytest.raises(holdfast.SchemaMismatch, match="install a newer Holdfast"):
        holdfast.open(**new_place)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_the_second_opening_migrates_nothing(new_place: dict[str, Any], colour: str) -> None:
    if colour == "async":
        asyncio.run(open_async(new_place))
    with holdfast.open(**new_place, migrate=colour == "sync") as store:
        before = describe(store)
    with holdfast.open(**new_place, migrate=False) as store:
        assert describe(store) == before


async def open_async(place: dict[str, Any]) -> None:
    await (await holdfast.aopen(**place)).close()
