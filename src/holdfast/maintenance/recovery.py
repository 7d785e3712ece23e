"""Recovery: what everything that starts does first, always in the same order.

Opening the store has migrated it. Then, noun by noun: fence what an earlier boot of this instance
still holds, settle what dead owners left, sweep leases and begin what is due. Claiming comes after.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_text, require_text_or_none
from ..effects.tools import by_name
from ..kernel.flow import Flow, flow, perform
from ..kernel.nouns import SWEPT_PER_PASS
from ..kernel.operation import C, Handle, Op, Query, Runtime, batch, operation
from ..leases import default_holder
from ..records import Effect, Swept
from ..sessions.rows import BOOT_MARK


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What recovery did.

    `fenced` counts leases of earlier boots of this instance. `settled` are effects of dead
    owners whose outcome is known now, or that are parked; `left` are those whose tool was not
    given, for a process that knows it.
    """

    fenced: int
    settled: tuple[Effect, ...]
    left: tuple[Effect, ...]
    swept: Swept


class RecoveryOps(Handle[C]):
    """What a store does when a process starts."""

    @flow
    def recover(
        self, holder: str | None = None, *, instance: str | None = None, tools: object = None
    ) -> Flow[Recovered]:
        """Bring the store in order after a crash, as everything that starts does first.

        With `instance`, a name that one process at a time has, what an earlier boot of it holds
        is fenced at once; without it leases run out by themselves. Effects whose owner is dead
        are verified with the hooks of `tools`, or parked.
        """
        known = by_name(tools)
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
        swept = yield from sweep(self.runtime)
        return Recovered(fenced=fenced, settled=tuple(settled), left=tuple(left), swept=swept)


class _Instance:
    """A name that one process at a time has."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @operation
    def fence(self, holder: str, instance: str) -> Op[int]:
        """Take away every lease that an earlier boot of this instance holds."""
        boots = f"{instance}{BOOT_MARK}"
        own = {"holder": f"{boots}{holder}", "boots": boots}
        statements = [noun.fencing for noun in self.runtime.nouns if noun.fencing]
        found = yield from batch(*(Query(statement, own) for statement in statements))
        return sum(map(len, found))


def sweep(runtime: Runtime, limit: int = SWEPT_PER_PASS) -> Flow[Swept]:
    """Sweep every noun once."""
    swept = Swept()
    for noun in runtime.nouns:
        swept += yield from noun.sweep(runtime, limit)
    return swept
