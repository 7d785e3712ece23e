"""What a case of the conformance suite is given: a place for stores, and a colour."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ..store import aopen, open
from . import nouns

Colour = Literal["sync", "async"]
Case = Callable[["Subject"], Awaitable[None]]
CASES: list[Case] = []


def case(function: Case) -> Case:
    """Add a case to the suite."""
    CASES.append(function)
    return function


async def done(result: Any) -> Any:
    """Return a sync result as it is, and an awaitable one awaited."""
    return await result if inspect.isawaitable(result) else result


class Subject:
    """A place for stores and a colour; every store it opened is closed at the end."""

    def __init__(self, place: Mapping[str, Any], colour: Colour, directory: Path) -> None:
        self.place = dict(place)
        self.colour = colour
        self.directory = directory
        self._stores: list[Any] = []

    async def open(self, **arguments: Any) -> Any:
        """Open a store with the tables of the example nouns, or a client of a served one."""
        opener: Any = open if self.colour == "sync" else aopen
        if "serve" in self.place:
            store = await done(opener(**self.place["serve"](**arguments)))
            self._stores.append(store)
            return store
        store = await done(opener(**{**self.place, **arguments}))
        self._stores.append(store)
        await done(nouns.Setup(store).install())
        return store

    async def close(self) -> None:
        """Close every store."""
        for store in self._stores:
            await done(store.close())

    def counter(self, store: Any, root_id: str = "root") -> Any:
        """Return a counter of this colour."""
        return nouns.Counter(store, root_id)

    def queue(self, store: Any, root_id: str = "root") -> Any:
        """Return a queue of this colour."""
        return nouns.Queue(store, root_id)

    async def planted(self, store: Any, root_id: str = "root") -> Any:
        """Return a counter whose tree exists."""
        counter = self.counter(store, root_id)
        await done(counter.plant())
        return counter

    async def together(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Run calls at the same time: in threads, or as tasks of the loop."""
        if self.colour == "async":
            return list(await asyncio.gather(*(call() for call in calls)))
        return list(await asyncio.gather(*(asyncio.to_thread(call) for call in calls)))


async def raises(error: type[BaseException], result: Callable[[], Any]) -> Any:
    """Check that a call raises an error, and return the error."""
    try:
        await done(result())
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised")
