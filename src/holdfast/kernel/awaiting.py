"""What is opened in an event loop, by `await` or by `async with` alike."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """What is closed in an event loop."""

    def close(self) -> Awaitable[None]:
        """Close it."""
        ...


C = TypeVar("C", bound=Closable)


class Opening(Coroutine[Any, Any, C]):
    """What is being opened: `await` it, or open and close it by `async with`."""

    def __init__(self, opening: Coroutine[Any, Any, C]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, C]:
        return self._opening.__await__()

    async def __aenter__(self) -> C:
        self._opened = await self._opening
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        await self._opened.close()

    def send(self, value: Any, /) -> Any:
        """Go on, as a task does that runs this."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error inside, as a task does that is cancelled."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """Give up before it has begun."""
        self._opening.close()
