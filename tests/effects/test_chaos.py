"""Many processes, many effects, and deaths at any time: takeovers, waiters and kills at once."""

from __future__ import annotations

import mmap
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.crash.children import Child
from tests.effects.cases import Agent, Case
from tests.effects.server import Receiver

Say = Callable[[str], None]

CASES = {
    "verify": Case(verify=True),
    "key": Case(honours=True, on_unknown="retry"),
    "once verify": Case(verify=True, way="once"),
    "park": Case(),
}
WORKERS = 6
# Longer than a process on a busy machine is kept waiting: who is merely slow shall stay the owner.
LEASE_SECONDS = 2.0
SETTLE_SECONDS = 1.5
THINGS_PER_SECOND = 10
KILLS = 21


class Chaos:
    """Workers that always want the same thing at the same time, and somebody who kills them."""

    def __init__(
        self, place: dict[str, Any], receiver: Receiver, case: Case, seconds: float
    ) -> None:
        self._agent = Agent(
            place,
            receiver,
            case,
            lease_seconds=LEASE_SECONDS,
            settle_seconds=SETTLE_SECONDS,
        )
        self._name = f"chaos-{uuid.uuid4().hex[:12]}"
        self._began = time.monotonic()
        self._seconds = seconds
        self._is_over = mmap.mmap(-1, 1)  # Shared with the workers, which are forked.
        self.things: list[str] = []
        self.kills = 0
        holdfast.open(**place).close()

    def _slot(self) -> int:
        return int((time.monotonic() - self._began) * THINGS_PER_SECOND)

    def work(self, say: Say) -> None:
        """Want one thing after the other done, each when all others want it too."""
        with self._open() as store:
            while not self._is_over[0]:
                slot = self._slot()
                self._do(store, f"{self._name}-{slot}")
                while self._slot() == slot:
                    time.sleep(0.005)

    def reign(self) -> None:
        """Kill and replace workers for a time, and often enough; at the end somebody looks after
        what they left.
        """
        chance = random.Random(5)
        workers = [Child(self.work) for _ in range(WORKERS)]
        while time.monotonic() - self._began < self._seconds or self.kills < KILLS:
            time.sleep(chance.uniform(0.05, 0.2))
            number = chance.randrange(WORKERS)
            workers[number].kill()
            self.kills += workers[number].wait()[0] < 0
            workers[number] = Child(self.work)
        time.sleep(LEASE_SECONDS)
        self._is_over[0] = 1
        assert [worker.wait()[0] for worker in workers] == [0] * WORKERS
        with self._open() as store:
            self.things = [info.id for info in store.sessions(limit=1000)]
            for what in self.things:
                self._do(store, what)

    def _open(self) -> holdfast.Store:
        return holdfast.open(**self._agent.place, durability="normal")  # type: ignore[arg-type]

    def _do(self, store: holdfast.Store, what: str) -> None:
        store.session(what)
        outcome = self._agent.call(store, what)
        assert outcome.ended in {"ok", "Unresolved"}, outcome

    def judge(self, store: holdfast.Store) -> None:
        """Hold every thing against what was promised of it."""
        for what in self.things:
            seen = self._agent.receiver.look(what)
            assert all(seen.had_intent), f"{what} came before its intent was durable"
            key = {"key": what} if self._agent.case.way == "once" else {"session": what}
            rows = store.effects(**key)  # type: ignore[arg-type]
            if self._agent.case.promise == "once":
                assert (seen.count, rows[-1].status) == (1, "completed"), rows
                assert rows[-1].result == seen.receipt
            else:
                assert seen.count <= 1
                assert rows[-1].status == "unknown" or seen.count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_done_twice_when_workers_die_all_the_time(
    place: dict[str, Any], receiver: Receiver, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chaos = Chaos(place, receiver, CASES[name], seconds=18)
    chaos.reign()
    with holdfast.open(**place) as store:
        chaos.judge(store)
    database, things = place["url"].partition(":")[0], len(chaos.things)
    with capsys.disabled():
        print(f"\n{database}, {name}: {chaos.kills} kills, {things} effects")
    assert (chaos.kills >= KILLS, things > 20) == (True, True)
