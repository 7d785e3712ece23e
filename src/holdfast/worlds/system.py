"""What a world can roll back: the protocol of a system, and observations of its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, ClassVar, Final, Literal

import msgspec

from ..errors import CheckpointInvalid
from .values import canonical

RollbackOrder = Literal["any", "stack"]

_SHOWN_DIGITS: Final = 16
_encode: Final = msgspec.msgpack.Encoder().encode


class Observation(msgspec.Struct, frozen=True):
    """The observed state of a system; the metadata is not part of the state's identity."""

    system: str
    data: Any
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)


class System(ABC):
    """A part of a world: it can be observed, and restored to each of its checkpoints.

    `rollback_order` is "any" if every checkpoint can be restored any number of times, in any
    order. It is "stack" if restoring one destroys those that were made after it.
    """

    rollback_order: ClassVar[RollbackOrder] = "any"
    # A system in this process hardly ever fails to roll back, so the others move first.
    is_in_process: ClassVar[bool] = False
    # A rollback that raises has changed nothing, so it need not be undone.
    is_atomic: ClassVar[bool] = False
    # Ctrl-C may stop it anywhere: the token alone tells all. Else it waits until the end of a call.
    is_interruptible: ClassVar[bool] = False
    # It goes back from a state in which it makes no checkpoint, raising SystemBusy; not to it.
    leaves_without_checkpoint: ClassVar[bool] = False
    not_covered: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for promise in ("is_atomic", "is_interruptible"):
            if "rollback" in cls.__dict__ and promise not in cls.__dict__:
                setattr(cls, promise, False)

    @abstractmethod
    def checkpoint(self, name: str) -> object:
        """Save the current state and return its token; the name is a label, not an id."""

    @abstractmethod
    def rollback(self, token: Any) -> None:
        """Restore the state that a token stands for, or raise; may be called repeatedly."""

    @abstractmethod
    def observe(self) -> object:
        """Return the state as fresh plain data, or as an Observation that also has metadata."""

    def identity(self) -> bytes | None:
        """Return the canonical form of what `observe` would return, or None to have it observed.

        It is called after every action; a state that is known is then not observed again.
        """
        return None

    # By default there is nothing to check, release, keep or close.
    def prepare(self, token: Any) -> None:  # noqa: B027
        """Raise if this token cannot be restored now; change nothing."""

    def release(self, token: Any) -> None:  # noqa: B027
        """Release a token, which will not be restored again."""

    def position(self) -> object | None:
        """Return the token that was restored or made last, if the system keeps it itself."""
        return None

    def keep(self, token: Any) -> object | None:
        """Return plain data with which `restore` works in another process, or None.

        It is called right after the checkpoint was made. None means that only this process can
        restore it.
        """
        return None

    def restore(self, kept: Any) -> None:
        """Restore what a dead process has kept, whatever state the system is in."""
        raise CheckpointInvalid("only the process that made the checkpoint can restore it")

    def discard(self, kept: Any) -> None:  # noqa: B027
        """Remove what `keep` has saved."""

    def sweep(self) -> int:
        """Remove what killed processes left behind in this system; return how many things."""
        return 0

    def uses(self, store_id: str) -> bool:
        """Return whether a rollback would roll back the store with this id."""
        return False

    def close(self) -> None:  # noqa: B027
        """Remove everything that the system created for its checkpoints."""


def observation_of(name: str, system: System) -> Observation:
    """Observe a system under its name in the world."""
    seen = system.observe()
    if isinstance(seen, Observation):
        return Observation(name, seen.data, seen.metadata)
    return Observation(name, seen)


def identity_of(seen: Observation) -> bytes:
    """Return the canonical form of what was observed."""
    return canonical(seen.data, seen.system)


def state_id(systems: Mapping[str, bytes], facts: Mapping[str, object]) -> str:
    """Return the SHA-256, in hex, of the observations by system, and of further facts by name."""
    shown = sorted(systems.items()) if len(systems) > 1 else list(systems.items())
    others = (
        sorted((name, canonical(value, name)) for name, value in facts.items()) if facts else ()
    )
    return sha256(_encode((shown, others))).hexdigest()


def shown_id(state: str) -> str:
    """Return the part of a state's id that is displayed."""
    return state[:_SHOWN_DIGITS]
