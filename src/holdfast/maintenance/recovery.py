"""Recovery: what every process does first when it starts, in a fixed order.

Opening the store has migrated it. Then, noun by noun: fence leases of earlier boots of this
instance, settle effects of dead owners, sweep expired leases and promote due items. Claiming comes
after.
"""

from __future__ import annotations

from ..arguments import require_text, require_text_or_none
from ..dataclass import dataclass
from ..effects.tools import by_name
from ..kernel.flow import Flow, flow, perform, require_colour, served
from ..kernel.nouns import SWEPT_PER_PASS
from ..kernel.operation import C, Handle, Op, Query, Runtime, batch, operation
from ..leases import default_holder
from ..records import Effect, Swept
from ..sessions.rows import BOOT_MARK
from ..wire import travels


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What recovery did.

    `fenced` counts leases of earlier boots of this instance. `settled` are effects of dead owners
    that now have an outcome or are parked; `left` are those whose tool was not given, for a process
    that has it.
    """

    fenced: int
    settled: tuple[Effect, ...]
    left: tuple[Effect, ...]
    swept: Swept


@travels
class RecoveryOps(Handle[C]):
    """Recovery of a store when a process starts."""

    @flow
    def recover(
        self, holder: str | None = None, *, instance: str | None = None, tools: object = None
    ) -> Flow[Recovered]:
        """Recover the store after a crash. Every process should do this first.

        `instance` is a name that only one process has at a time: leases of its earlier boots are
        fenced at once. Without it, they expire by themselves. Effects whose owner is dead are
        verified with the hooks of `tools`, or parked.
        """
        known = by_name(tools)
        require_colour(self.runtime, *(tool.verify for tool in known.values()))
        require_text_or_none("instance", instance)
        if holder is not None:
            require_text("holder", holder)
        name = default_holder() if holder is None else holder
        fenced = 0
        if instance is not None:
            fenced = yield from perform(_Instance.fence, _Instance(self.runtime), name, instance)
        settled: list[Effect] = []
        left: list[Effect] = []
        for noun in self.runtime.nouns:
            done, lacking = yield from noun.recover(self.runtime, name, known)
            settled += done
            left += lacking
        swept = yield from RecoveryOps._sweep(self)
        return Recovered(fenced=fenced, settled=tuple(settled), left=tuple(left), swept=swept)

    @served
    def _sweep(self) -> Flow[Swept]:
        """Requeue, end or promote what is due, once, in every noun."""
        swept = Swept()
        for noun in self.runtime.nouns:
            swept += yield from noun.sweep(self.runtime, SWEPT_PER_PASS)
        return swept


@travels
class _Instance:
    """An instance: a name that only one process has at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def _to_wire(self) -> tuple[()]:
        """Return nothing."""
        return ()

    @classmethod
    def _from_wire(cls, runtime: Runtime) -> _Instance:
        """Return that of the other end."""
        return cls(runtime)

    @operation
    def fence(self, holder: str, instance: str) -> Op[int]:
        """End every lease of an earlier boot of this instance; return how many."""
        boots = f"{instance}{BOOT_MARK}"
        own = {"holder": f"{boots}{holder}", "boots": boots}
        statements = [noun.fencing for noun in self.runtime.nouns if noun.fencing]
        found = yield from batch(*(Query(statement, own) for statement in statements))
        return sum(map(len, found))
