"""Handles: what users hold of a store, its sessions and its work, each class written once.

A handle is generic in its colour, which decides what a call of it gives: `Sync` the result,
`Async` an awaitable of it, and `Tx`, inside `store.run`, the generator to `yield from`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import TypeVar

    from ..codec import Codec
    from ..redaction import Redaction
    from .driver import Driver
    from .flow import Flow, Stream
    from .nouns import Noun
    from .operation import Call
    from .settings import Settings
    from .signals import Signals
    from .url import Target


class Sync:
    """The colour of handles whose calls return their results."""


class Async:
    """The colour of handles whose calls return awaitables."""


class Tx:
    """The colour of handles inside `store.run`, whose calls are generators to `yield from`."""


if TYPE_CHECKING:
    C = TypeVar("C", bound=Sync | Async | Tx, default=Sync)
else:
    from typing import TypeVar

    C = TypeVar("C", bound=Sync | Async | Tx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What every handle of one open store needs; handles share it and copy nothing from it."""

    driver: Driver
    codec: Codec
    redactor: Redaction
    target: Target
    settings: Settings
    start: Callable[[Call[Any]], Any]
    """Runs a call, in the colour of the handles."""
    start_flow: Callable[[Flow[Any]], Any] | None
    """Runs a flow; None where that cannot be, inside a transaction."""
    start_stream: Callable[[Stream[Any]], Any] | None
    """Runs a stream, as an iterator; None inside a transaction."""
    is_async: bool
    states: dict[type, Any] = field(default_factory=dict)
    """What nouns keep in memory for this store, by class; see `PerStore`."""

    @property
    def nouns(self) -> Sequence[Noun]:
        """Everything that the store keeps, each after what it stands on."""
        return self.settings.nouns

    @property
    def signals(self) -> Signals:
        """The wake-ups of this store."""
        return self.driver.signals

    def run_flow(self, steps: Flow[Any]) -> Any:
        """Run a flow, in the colour of the handles."""
        if self.start_flow is None:
            raise InvalidArgument("what waits between transactions cannot be part of one")
        return self.start_flow(steps)

    def run(self, call: Call[Any]) -> Any:
        """Run a call on this thread, whatever the colour: for threads of our own."""
        return self.driver.twin().run(call)

    def checked(self, check: Callable[[], None]) -> Runtime:
        """Return a runtime that calls `check` before every call; if it raises, nothing is run."""
        start = self.start

        def start_checked(call: Call[Any]) -> Any:
            check()
            return start(call)

        return replace(self, start=start_checked)


class PerStore:
    """What a noun keeps in memory for one open store; made when it is first asked for."""

    def __init__(self, runtime: Runtime) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        """Return the one of this store."""
        found: Self | None = runtime.states.get(cls)
        # Two threads may make one each; both get the first that was stored.
        return found if found is not None else runtime.states.setdefault(cls, cls(runtime))


class Handle(Generic[C]):
    """One object of a store, in one colour: it has its runtime and names what it stands for."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
