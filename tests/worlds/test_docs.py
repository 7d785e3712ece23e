"""The pages name what is public, and what each system does not cover, in its own words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import worlds
from holdfast.worlds.systems.http import HttpSystem
from holdfast.worlds.systems.postgres import PostgresSystem
from holdfast.worlds.systems.postgres_connection import PostgresConnectionSystem
from holdfast.worlds.systems.redis import RedisSystem

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
PAGE = (ROOT / "docs" / "rollback.md").read_text()
# These need the client of their system, so the package does not import them.
OTHERS: list[type[worlds.System]] = [
    HttpSystem,
    PostgresConnectionSystem,
    PostgresSystem,
    RedisSystem,
]
SYSTEMS = OTHERS + [
    thing
    for name in worlds.__all__
    if isinstance(thing := getattr(worlds, name), type)
    and issubclass(thing, worlds.System)
    and thing is not worlds.System
]


@pytest.mark.parametrize("name", [*worlds.__all__, *(other.__name__ for other in OTHERS)])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", REFERENCE)


@pytest.mark.parametrize("name", [name for name in dir(worlds.World) if not name.startswith("_")])
def test_every_method_of_a_world_is_in_the_reference(name: str) -> None:
    assert re.search(rf"`world\.{name}\b", REFERENCE)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.__name__)
def test_the_page_says_what_a_system_does_not_cover(system: type[worlds.System]) -> None:
    assert f"| `{system.__name__}` |" in PAGE
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{system.__name__}` |"))
    assert row.split("|")[-2].strip() == "; ".join(system.not_covered)
