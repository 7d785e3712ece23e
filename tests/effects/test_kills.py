"""Promise 2 under SIGKILL: no effect without its durable intent, none repeated in silence.

Agents die at every statement boundary of a call and inside the tool, and others go on in new
processes, which may die as well. A receiver that outlives them all counts.
"""

from __future__ import annotations

import json
import random
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest

import holdfast
from holdfast import Landed, NotLanded
from tests.crash.children import run
from tests.effects.cases import (
    MOMENTS,
    SETTLE_SECONDS,
    Agent,
    Case,
    Kill,
    Outcome,
)
from tests.effects.server import Receiver

Say = Callable[[str], None]
Plans = dict[str, list[Kill]]
"""For each thing to be done, where the agents die that try it, one after the other."""

CASES = {
    "park": Case(),
    "fail": Case(on_unknown="fail"),
    "retry": Case(on_unknown="retry"),
    "atomic park": Case(atomic=True),
    "atomic fail": Case(atomic=True, on_unknown="fail"),
    "atomic retry": Case(atomic=True, on_unknown="retry"),
    "verify park": Case(verify=True),
    "verify fail": Case(verify=True, on_unknown="fail"),
    "verify retry": Case(verify=True, on_unknown="retry"),
    "verify atomic": Case(verify=True, atomic=True),
    "key park": Case(honours=True),
    "key fail": Case(honours=True, on_unknown="fail"),
    "key retry": Case(honours=True, on_unknown="retry"),
    "key atomic retry": Case(honours=True, atomic=True, on_unknown="retry"),
    "write": Case(effect="write"),
    "write verify": Case(effect="write", verify=True),
    "write key": Case(effect="write", honours=True),
    "timed park": Case(way="timed"),
    "timed verify": Case(way="timed", verify=True),
    "begin park": Case(way="begin"),
    "begin verify": Case(way="begin", verify=True),
    "once park": Case(way="once"),
    "once verify": Case(way="once", verify=True),
    "once key retry": Case(way="once", honours=True, on_unknown="retry"),
    "async park": Case(way="async"),
    "async verify": Case(way="async", verify=True),
    "async key retry": Case(way="async", honours=True, on_unknown="retry"),
    "recover park": Case(recovers=True),
    "recover fail": Case(recovers=True, on_unknown="fail"),
    "recover verify": Case(recovers=True, verify=True),
    "recover key retry": Case(recovers=True, honours=True, on_unknown="retry"),
}
SHORT = (
    "park",
    "fail",
    "retry",
    "verify park",
    "key retry",
    "write",
    "timed park",
    "once verify",
    "async verify",
)


@dataclass(frozen=True)
class Found:
    """What a new process found of a thing, and how it went on."""

    statuses: list[str]
    count: int
    outcome: Outcome
    is_listed: bool
    decided: Outcome | None
    attempts: int


@dataclass(frozen=True)
class Trial:
    """Agents of one case against one database."""

    place: dict[str, str]
    receiver: Receiver
    case: Case

    def prepare(self, whats: list[str]) -> None:
        """Make the sessions, so that only the call itself is what agents die in."""

        def make(say: Say) -> None:
            with holdfast.open(**self.place, durability="normal") as store:  # type: ignore[arg-type]
                for what in whats:
                    store.session(what)

        assert run(make)[0] == 0

    def live(self, what: str, kill: Kill = None) -> tuple[int, list[str]]:
        """Let an agent try a thing in a process of its own."""
        agent = Agent(self.place, self.receiver, self.case, kill)
        return run(lambda say: agent.live(what, say))

    def places(self, *deaths: Kill) -> list[int]:
        """Return the places that a call passes which comes after such deaths."""
        what = new("count")
        self.prepare([what])
        for kill in deaths:
            assert self.live(what, kill)[0] == -signal.SIGKILL
        # A lease that is lost on the way, on a slow machine, has places of its own.
        counting = Agent(self.place, self.receiver, self.case, lease_seconds=600)
        status, lines = run(lambda say: counting.live(what, say))
        assert status == 0
        found: list[int] = json.loads(lines[0])[1]
        return found

    def carry_out(self, plans: Plans) -> int:
        """Kill agents as planned; return how many died."""
        self.prepare(list(plans))
        killed = 0
        for level in range(max(map(len, plans.values()))):
            if level:
                time.sleep(self.case.lease_seconds + SETTLE_SECONDS)
            for what, deaths in plans.items():
                if level < len(deaths):
                    status, _ = self.live(what, deaths[level])
                    assert status in {0, -signal.SIGKILL}, f"{what}: {deaths[level]}"
                    # The first lives in a session where nothing was tried: it cannot get by. Who
                    # recovered something else has asked for less in its own call.
                    can_survive = level > 0 or self.case.recovers
                    assert status or can_survive, f"{what} survived {deaths[level]}"
                    killed += status == -signal.SIGKILL
        return killed

    def resume(self, plans: Plans) -> dict[str, Found]:
        """Go on in a new process; what is parked is decided by a person who looks."""
        agent = Agent(self.place, self.receiver, self.case)

        def go_on(say: Say) -> None:
            with holdfast.open(**self.place, durability="normal") as store:  # type: ignore[arg-type]
                agent.recover(store)
                for what in plans:
                    say(json.dumps(asdict(self._go_on(store, agent, what))))

        status, lines = run(go_on)
        assert status == 0
        found = {}
        for what, line in zip(plans, map(json.loads, lines), strict=True):
            decided = line.pop("decided")
            outcome = Outcome(**line.pop("outcome"))
            found[what] = Found(outcome=outcome, decided=decided and Outcome(**decided), **line)
        return found

    def _go_on(self, store: holdfast.Store, agent: Agent, what: str) -> Found:
        wanted: dict[str, Any] = {"session": what}
        if self.case.way == "once":
            wanted = {"key": what}
        statuses: list[str] = [effect.status for effect in store.effects(**wanted)]
        count = self.receiver.look(what).count
        if self.case.way == "async":
            outcome = json.loads(self.live(what)[1][0])[0]
            outcome = Outcome(**outcome)
        else:
            outcome = agent.call(store, what)
        listed = store.find_session(what).unresolved()
        if self.case.way == "once":
            listed = store.effects(key=what, status="unknown")
        decided = None
        if outcome.ended == "Unresolved":
            assert outcome.effect_id is not None
            decided = self._decide(store, agent, what, outcome.effect_id)
        is_listed = outcome.effect_id in {effect.id for effect in listed}
        attempts = len(store.effects(**wanted))
        return Found(statuses, count, outcome, is_listed, decided, attempts)

    def _decide(self, store: holdfast.Store, agent: Agent, what: str, id: str) -> Outcome:
        """Resolve as the receiver tells; who relies on the key need not even look."""
        seen = self.receiver.look(what)
        landed = seen.count > 0 and not self.case.honours
        store.resolve(id, Landed(seen.receipt) if landed else NotLanded(), by="ann")
        if self.case.way == "async":
            return Outcome(**json.loads(self.live(what)[1][0])[0])
        return agent.call(store, what)

    def judge(self, what: str, found: Found) -> None:
        """Hold what happened against what was promised."""
        seen = self.receiver.look(what)
        assert all(seen.had_intent), "an effect came before its intent was durable"
        assert seen.count <= found.attempts, "an effect was repeated in silence"
        newest = found.statuses[-1] if found.statuses else None
        if newest is None:
            assert found.count == 0
            assert found.outcome == Outcome("ok", f"{what}#1", False, found.outcome.effect_id)
        if newest == "completed":
            assert (found.outcome.ended, found.outcome.replayed) == ("ok", True)
            assert seen.count == found.count, "what was completed ran again"
        match self.case.promise:
            case "once":
                assert (seen.count, found.outcome.ended) == (1, "ok")
                assert found.outcome.receipt == seen.receipt
            case "repeated":
                assert found.outcome.ended == "ok"
            case "surfaced" if newest in {"issued", "unknown", "failed"}:
                self._judge_surfaced(seen.count, seen.receipt, found)
            case "surfaced":
                assert (seen.count, found.outcome.ended) == (1, "ok")

    def _judge_surfaced(self, count: int, receipt: str | None, found: Found) -> None:
        if self.case.on_unknown == "fail":
            assert found.outcome.ended == "EffectFailed"
            assert count <= 1
            return
        assert found.outcome.ended == "Unresolved"
        assert found.is_listed
        assert found.decided is not None
        assert (found.decided.ended, found.decided.receipt, count) == ("ok", receipt, 1)


def new(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"


def check(trial: Trial, plans: Plans) -> int:
    """Kill as planned, go on, and judge; return the number of kills."""
    killed = trial.carry_out(plans)
    for what, found in trial.resume(plans).items():
        try:
            trial.judge(what, found)
        except AssertionError as error:
            error.add_note(f"{trial.case}\nkilled at {plans[what]}\n{found}")
            raise
    return killed


def every_point(trial: Trial) -> Plans:
    """Die once: at each boundary of the call, and at each moment inside the tool."""
    kills: list[Kill] = [*trial.places(), *MOMENTS]
    return {new("one"): [kill] for kill in kills}


def every_point_of_a_resume(trial: Trial, *firsts: str) -> Plans:
    """Die twice: in the tool, and then at each place of the call that goes on."""
    plans: Plans = {}
    for first in firsts:
        moments = (*MOMENTS, "verifying", "verified") if first == "before" else ("verified",)
        for second in (*trial.places(first), *moments):
            plans[new("two")] = [first, second]
    return plans


def at_random(trial: Trial, chance: random.Random, count: int) -> Plans:
    """Die up to four times, anywhere."""
    plans: Plans = {}
    places = trial.places()
    for _ in range(count):
        first: list[Kill] = [*MOMENTS, chance.choice(places)]
        deaths = [chance.choice(first)]
        for _ in range(chance.randint(1, 3)):
            later: list[Kill] = [*first, "verifying", "verified", chance.randint(1, 60)]
            deaths.append(chance.choice(later))
        plans[new("some")] = deaths
    return plans


@pytest.mark.parametrize("name", SHORT)
def test_killed_at_every_point_of_a_call(
    place: dict[str, str], receiver: Receiver, name: str
) -> None:
    trial = Trial(place, receiver, CASES[name])
    assert check(trial, every_point(trial)) > 10


@pytest.mark.parametrize("name", ["recover verify", "key retry"])
def test_killed_again_while_going_on(place: dict[str, str], receiver: Receiver, name: str) -> None:
    trial = Trial(place, receiver, CASES[name])
    plans = every_point_of_a_resume(trial, "sent")
    assert check(trial, dict(list(plans.items())[::3])) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_anywhere_and_as_often_as_one_likes(
    place: dict[str, str], receiver: Receiver, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial(place, receiver, CASES[name])
    killed = check(trial, every_point(trial))
    killed += check(trial, every_point_of_a_resume(trial, "before", "sent"))
    killed += check(trial, at_random(trial, random.Random(name), 15))
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}, {name}: {killed} kills")
    assert killed > 70
