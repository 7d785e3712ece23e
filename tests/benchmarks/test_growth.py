"""The benchmark of growth: its stores are what Holdfast itself would have written."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from rich.console import Console

from benchmarks import growth
from benchmarks.bulk import BIG
from benchmarks.growth import EXPONENT, READS_ALL, SIZE_MIN
from benchmarks.growth_operations import GROUPS, WHOLE, Filled


def test_doctor_accepts_a_filled_store_and_every_operation_works_in_it(
    place: dict[str, str],
) -> None:
    with ExitStack() as stack:
        filled = growth.filled(
            Console(quiet=True), stack, place["url"], place.get("namespace"), SIZE_MIN
        )
        assert len(filled.store.events(BIG, limit=10_000)) == SIZE_MIN + 1
        assert len(filled.store.effects(limit=1_000)) == SIZE_MIN
        newest = filled.big.latest()
        assert newest is not None
        assert newest.version == len(newest.channels["messages"]) == SIZE_MIN
        assert filled.big.spent().attempts == SIZE_MIN // 2
        assert sum(each.attempts for each in filled.store.spending("session")) == SIZE_MIN
        for operations in (*GROUPS.values(), WHOLE):
            for operation in operations.values():
                operation(filled)
        filled.doctor()


def test_the_exponent_tells_what_grows_from_what_does_not() -> None:
    assert growth.slope({1_000: 5.0, 100_000: 5.0}) == pytest.approx(0)
    assert growth.slope({1_000: 1.0, 100_000: 100.0, 1_000_000: 1_000.0}) == pytest.approx(1)


def test_a_round_measures_every_store() -> None:
    seen: list[int] = []
    stores = [Filled.__new__(Filled), Filled.__new__(Filled)]
    for filled, size in zip(stores, (10, 1_000), strict=True):
        filled.size = size
    figures = growth._round(stores, lambda filled: seen.append(filled.size))
    assert set(seen) == {10, 1_000}
    assert set(figures) == {"10 µs", "1,000 µs", EXPONENT}


def test_a_run_can_be_limited_to_some_operations() -> None:
    assert growth.choose(()) == {**GROUPS, READS_ALL: WHOLE}
    chosen = growth.choose(["asks(root=, agent=)", "effects(root="])
    names = [name for operations in chosen.values() for name in operations]
    assert "asks(root=, agent=)" in names
    assert all("(root=" in name for name in names)
    assert growth.choose(["nothing like this"]) == {}
