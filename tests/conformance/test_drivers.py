"""The conformance suite, whole, for both databases in both colours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.testing.conformance import CASES
from holdfast.testing.subject import Case, Colour, Subject


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_driver(case: Case, colour: Colour, place: dict[str, str], tmp_path: Path) -> None:
    async def run() -> None:
        subject = Subject(place, colour, tmp_path)
        try:
            await case(subject)
        finally:
            await subject.close()

    asyncio.run(run())
