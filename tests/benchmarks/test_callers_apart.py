"""A contestant in a process of its own: what the benchmark of effects asks of it."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.callers import HOLDFAST, HOLDFAST_ASYNC, HoldfastProduct, Product, opened
from benchmarks.callers_apart import ApartProduct
from benchmarks.keepers import Place
from benchmarks.measure import RATE, TIME

SECONDS = 0.02


class Broken(Product):
    """A product that cannot be opened."""

    def open(self) -> None:
        raise SystemExit("there is no such library")


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_it_measures_what_its_product_offers(tmp_path: Path, runner: asyncio.Runner) -> None:
    product = ApartProduct(Place(path=tmp_path / "calls.db"), runner, HoldfastProduct)
    with opened([product]):
        rounds, awaited, crowds = product.rounds(), product.awaited_rounds(), product.crowds()
        assert list(rounds) == [HOLDFAST]
        assert list(awaited) == list(crowds) == [HOLDFAST_ASYNC]
        assert rounds[HOLDFAST](SECONDS)[TIME] > 0
        assert awaited[HOLDFAST_ASYNC](SECONDS)[TIME] > 0
        assert crowds[HOLDFAST_ASYNC](2, SECONDS)[RATE] > 0
    assert multiprocessing.active_children() == []


def test_a_product_that_does_not_open_is_reported(tmp_path: Path, runner: asyncio.Runner) -> None:
    product = ApartProduct(Place(path=tmp_path / "calls.db"), runner, Broken)
    with pytest.raises(RuntimeError, match="process of Broken has ended"), opened([product]):
        pass
    product.close()
    assert multiprocessing.active_children() == []
