"""Migrations: a fresh schema equals a migrated one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.kernel import schema
from tests.schemas import describe

FOLDER = Path(schema.__file__).parent / "migrations"


def test_migrations_are_numbered_without_holes() -> None:
    names = sorted(path.name for path in FOLDER.iterdir() if path.suffix == ".sql")
    assert all(re.fullmatch(r"\d{4}_[a-z0-9_]+\.sql", name) for name in names)
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    assert schema.newest() == len(names)


@pytest.mark.parametrize("version", range(1, schema.newest() + 1))
def test_a_migrated_schema_equals_a_fresh_one(
    place: dict[str, Any], version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everything = schema.migrations()
    with monkeypatch.context() as patched:
        patched.setattr(schema, "migrations", lambda: everything[:version])
        with holdfast.open(**place) as store:
            store_id = store.store_id()
    if version < schema.newest():
        with pytest.raises(holdfast.SchemaMismatch, match="run `holdfast migrate`"):
            holdfast.open(**place, migrate=False)
    with holdfast.open(**place) as store:
        assert store.store_id() == store_id
        migrated = describe(store)
    fresh = dict(place)
    if "namespace" in fresh:
        fresh["namespace"] += "_fresh"
    else:
        fresh["url"] = f"sqlite:///{tmp_path}/fresh.db"
    with holdfast.open(**fresh) as store:
        assert describe(store) == migrated


def test_the_second_opening_migrates_nothing(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        before = describe(store)
    with holdfast.open(**place, migrate=False) as store:
        assert describe(store) == before
