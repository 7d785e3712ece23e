"""One test, both colours: written as a coroutine, run with a sync and with an async store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.kernel.operation import rows
from holdfast.testing.subject import Colour, Subject
from tests.client.served import embedded


def both_colours(case: Callable[[Subject], Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a case; `done` of the conformance suite awaits only what is awaitable."""

    @pytest.mark.parametrize("colour", ["sync", "async"])
    def test(place: dict[str, Any], colour: Colour, tmp_path: Path) -> None:
        async def run() -> None:
            subject = Subject(place, colour, tmp_path)
            try:
                await case(subject)
            finally:
                await subject.close()

        asyncio.run(run())

    test.__name__, test.__doc__ = case.__name__, case.__doc__
    return cast("Callable[..., None]", test)


def sql(store: Any, *statements: str, **parameters: object) -> Any:
    """Run statements in one transaction, as somebody with the database's password could."""

    def run(tx: Any) -> Any:
        found = []
        for statement in statements:
            found = yield from rows(statement, **parameters)
        return found

    return embedded(store).run(run)
