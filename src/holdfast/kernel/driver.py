"""The driver protocol: all that the layers above ask of an open database.

There are four kinds: SQLite and PostgreSQL, sync and async; on PostgreSQL also inside a transaction
of the caller's (joined). Each is made by `opening`, for reading or for writing, and stays what it
is: nothing is set on it from outside. A driver

* runs calls (`run`), each in one transaction, again if the database asks for that, and returns what
  they return once it is durable; a call that only reads sees one snapshot and is traced as well.
  Opened for reading it refuses calls that write (StoreReadOnly) before their generator is run;
* refuses to be called from inside a call of its own (`entrance`);
* wakes those who wait when something may have changed, here or in another process (`signals`);
* has a sync twin on the same connections, for threads of our own (`twin`);
* copies itself into a new file (`copy_to`) and gives space back (`vacuum`), both outside the
  transactions of calls; a joined one has nothing outside its transaction and refuses
  (`require_own`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from ..clock import Clock
from .execution import Entrance, Hooks, Services
from .nouns import Noun
from .operation import Call
from .signals import Signals

R = TypeVar("R")

DialectName = Literal["sqlite", "postgres"]
Progress: TypeAlias = Callable[[int, int], None]


class Runner(Protocol):
    """Runs calls on this thread."""

    def run(self, call: Call[R]) -> R:
        """Run a call in one transaction and return its result once it is durable."""
        ...


class Driver(Protocol):
    """What sync and async drivers have in common; none of it is async, some of it blocks."""

    @property
    def dialect(self) -> DialectName:
        """Which database it is."""
        ...

    @property
    def mode(self) -> StoreMode:
        """Whether calls that write are run or refused."""
        ...

    @property
    def is_joined(self) -> bool:
        """Whether calls are part of a transaction that the caller began and will end."""
        ...

    @property
    def entrance(self) -> Entrance:
        """Knows which threads are inside a call."""
        ...

    @property
    def signals(self) -> Signals:
        """Wakes those who wait."""
        ...

    def run(self, call: Call[Any]) -> Any:
        """Run a call: return its result, or an awaitable of it."""
        ...

    def twin(self) -> SyncDriver:
        """Return a sync driver on the same store; itself if it is one. A joined one refuses."""
        ...

    def require_own(self, what: str) -> None:
        """Refuse a joined driver, which cannot do `what`, and one that is closed or forked."""
        ...

    def copy_to(self, path: Path, progress: Progress | None) -> None:
        """Copy one consistent moment of the store into a new SQLite file; blocks."""
        ...

    def vacuum(self) -> None:
        """Give the space of removed rows back; blocks. Refused where nothing may be written."""
        ...

    def close(self) -> Any:
        """Finish what is under way and let go of the database, or return an awaitable that does."""
        ...


class SyncDriver(Driver, Protocol):
    """Runs calls on the caller's thread."""

    def run(self, call: Call[R]) -> R:
        """Run a call in one transaction and return its result once it is durable."""
        ...

    def close(self) -> None:
        """Finish what is under way and let go of the database; a second time does nothing."""
        ...


class AsyncDriver(Driver, Protocol):
    """Runs calls in the event loop that it was made in."""

    async def run(self, call: Call[R]) -> R:
        """Run a call in one transaction and return its result once it is durable."""
        ...

    async def close(self) -> None:
        """Finish what is under way and let go of the database; a second time does nothing."""
        ...


Durability = Literal["full", "normal"]
StoreMode = Literal["write", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The choices that both drivers share."""

    services: Services
    nouns: Sequence[Noun]
    """Everything that the store keeps, each after what it stands on."""
    clock: Clock
    is_clock_virtual: bool = False
    durability: Durability = "full"
    mode: StoreMode = "write"
    busy_timeout_seconds: float = 10.0
    hooks: Hooks = field(default_factory=Hooks)
