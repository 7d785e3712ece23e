"""Many processes and one effect: it runs once, and all of them learn what came of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import holdfast
from holdfast import Landed, NotDone, NotLanded
from tests.crash.children import Child
from tests.effects.cases import Outcome, told
from tests.effects.server import Receiver

Say = Callable[[str], None]
Way = Literal["call", "once"]

PROCESSES = 16
DEAD_SECONDS = 1.5


class Crowd:
    """Processes that want the same effect, and wait for a sign to begin."""

    def __init__(
        self, place: dict[str, Any], receiver: Receiver, directory: Path, way: Way, **rules: Any
    ) -> None:
        self.place = place
        self.receiver = receiver
        self.what = f"crowd-{directory.name}"
        self._way = way
        self._rules = {"wait_seconds": 60.0, **rules}
        self._signs = directory
        with holdfast.open(**place) as store:
            store.session(self.what)

    def give(self, sign: str) -> None:
        """Let all go on who wait for a sign."""
        (self._signs / sign).touch()

    def await_sign(self, sign: str) -> None:
        """Wait until a sign is given."""
        wait_for((self._signs / sign).exists)

    def call(self, act: Callable[[str], str], say: Say, number: int = 0, **more_rules: Any) -> None:
        """Call the effect in this process and say how that ended."""

        def run(what: str, *, idempotency_key: str) -> str:
            say("inside")
            return act(idempotency_key)

        def verify(arguments: dict[str, Any], idempotency_key: str) -> Landed | NotLanded:
            say("verifies")
            seen = self.receiver.look(arguments["what"])
            return Landed(seen.receipt) if seen.count else NotLanded()

        rules = {**self._rules, **more_rules}
        if rules.pop("verify", False):
            rules["verify"] = verify
        tool = holdfast.tool(name="act", effect="mutate", **rules)(run)
        with holdfast.open(**self.place) as store:
            session = store.find_session(self.what)
            say("ready")
            self.await_sign("go")
            arguments = {"what": self.what}
            if self._way == "once":
                outcome = told(lambda: store.once(self.what, tool, request=arguments))
            else:
                id = f"call_{number}"
                outcome = told(lambda: session.call_with(tool, arguments, call_id=id))
        say(json.dumps(vars_of(outcome)))

    def wait_for_all(self, count: int, act: Callable[[str], str]) -> list[Child]:
        """Start processes, and return them once each has its store open."""
        children = [
            Child(lambda say, number=number: self.call(act, say, number))  # type: ignore[misc]
            for number in range(count)
        ]
        for child in children:
            assert child.lines.readline() == "ready\n"
        return children


def vars_of(outcome: Outcome) -> list[Any]:
    return [outcome.ended, outcome.receipt, outcome.replayed, outcome.effect_id]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


def ends(children: list[Child]) -> tuple[list[Outcome], list[str]]:
    """Return how the calls of processes ended, and what their tools said meanwhile."""
    outcomes, said = [], []
    for child in children:
        status, lines = child.wait()
        assert status == 0
        outcomes.append(Outcome(*json.loads(lines[-1])))
        said += lines[:-1]
    return outcomes, said


@pytest.mark.parametrize("way", ["call", "once"])
def test_sixteen_processes_at_once_run_an_effect_once_and_get_equal_results(
    place: dict[str, Any], receiver: Receiver, tmp_path: Path, way: Way
) -> None:
    crowd = Crowd(place, receiver, tmp_path, way)

    def act(key: str) -> str:
        return receiver.act(crowd.what, key, place, delay_seconds=0.3)

    children = crowd.wait_for_all(PROCESSES, act)
    crowd.give("go")
    outcomes, said = ends(children)
    seen = receiver.look(crowd.what)
    assert (seen.count, seen.had_intent, said) == (1, [True], ["inside"])
    assert {(outcome.ended, outcome.receipt) for outcome in outcomes} == {("ok", seen.receipt)}
    assert sum(not outcome.replayed for outcome in outcomes) == 1
    assert len({outcome.effect_id for outcome in outcomes}) == 1


@pytest.mark.parametrize(
    "others", [7, pytest.param(PROCESSES - 1, marks=pytest.mark.slow)], ids="{} wait".format
)
@pytest.mark.parametrize("way", ["call", "once"])
@pytest.mark.parametrize("has_acted", [True, False], ids=["after it acted", "before it acted"])
@pytest.mark.parametrize("verify", [True, False], ids=["verify", "park"])
def test_the_owner_is_killed_while_others_wait(
    place: dict[str, Any],
    receiver: Receiver,
    tmp_path: Path,
    way: Way,
    has_acted: bool,
    verify: bool,
    others: int,
) -> None:
    crowd = Crowd(place, receiver, tmp_path, way, verify=verify)
    crowd.give("go")

    def act_and_hang(key: str) -> str:
        if has_acted:
            receiver.act(crowd.what, key, place)
        crowd.give("inside")
        time.sleep(60)
        return "never"

    # Only who is to die has a short lease: many processes can keep each other from the store,
    # or from two cores, for longer than that.
    owner = Child(lambda say: crowd.call(act_and_hang, say, lease_seconds=DEAD_SECONDS))
    crowd.await_sign("inside")
    waiting = crowd.wait_for_all(
        others, lambda key: receiver.act(crowd.what, key, place, delay_seconds=0.1)
    )
    owner.kill()
    assert owner.wait()[0] == -9
    outcomes, said = ends(waiting)
    seen = receiver.look(crowd.what)
    assert all(seen.had_intent)
    if verify:
        assert seen.count == 1
        assert sorted(said) == ["verifies"] if has_acted else ["inside", "verifies"]
        assert {(outcome.ended, outcome.receipt) for outcome in outcomes} == {("ok", seen.receipt)}
    else:
        assert (seen.count, said) == (int(has_acted), [])
        assert {outcome.ended for outcome in outcomes} == {"Unresolved"}
        assert len({outcome.effect_id for outcome in outcomes}) == 1


def raises(store: holdfast.Store, other: Callable[[], object], status: str) -> None:
    """Make sure that another request is refused in this state, and changes nothing."""
    before = store.effects()
    assert before[-1].status == status
    with pytest.raises(holdfast.RequestMismatch) as refused:
        other()
    assert (refused.value.effect_id, refused.value.status) == (before[-1].id, status)
    # Only the owner's heartbeat goes on.
    after = store.effects()
    still = [replace(effect, lease_expires_at=None, takeover_at=None) for effect in after]
    assert still == [replace(effect, lease_expires_at=None, takeover_at=None) for effect in before]


@pytest.mark.parametrize("way", ["call", "once"])
def test_the_same_key_with_another_request_fails_in_every_state(
    place: dict[str, Any], tmp_path: Path, way: Way
) -> None:
    ran: list[int] = []

    def calls(
        store: holdfast.Store, act: Callable[[], Any], lease_seconds: float | None = None
    ) -> Callable[[str, int], Any]:
        def run(n: int) -> Any:
            ran.append(n)
            return act()

        tool = holdfast.tool(name="act", effect="mutate", lease_seconds=lease_seconds)(run)
        session = store.find_session("s")
        if way == "once":
            return lambda key, n: store.once(key, tool, request={"n": n})
        return lambda key, n: session.call(tool, n=n, call_id=key)

    def hang(say: Say) -> None:
        def act() -> None:
            say("inside")
            time.sleep(60)

        with holdfast.open(**place) as store:
            calls(store, act, lease_seconds=0.3)("hung", 1)

    def fail() -> None:
        raise NotDone("no")

    with holdfast.open(**place) as store:
        store.session("s")
    owner = Child(hang)
    assert owner.lines.readline() == "inside\n"
    with holdfast.open(**place) as store:
        call = calls(store, lambda: "done")
        raises(store, lambda: call("hung", 2), "issued")
        owner.kill()
        owner.wait()
        with pytest.raises(holdfast.Unresolved):
            call("hung", 1)
        raises(store, lambda: call("hung", 2), "unknown")
        assert call("done", 3).value == "done"
        raises(store, lambda: call("done", 4), "completed")
        failing = calls(store, fail)
        with pytest.raises(NotDone):
            failing("failed", 5)
        raises(store, lambda: failing("failed", 6), "failed")
    assert ran == [3, 5]


def test_a_request_is_refused_whose_owner_has_just_died(place: dict[str, Any]) -> None:
    """An attempt that nobody took over yet is `issued` still, and its key is taken."""

    def die(say: Say) -> None:
        with holdfast.open(**place) as store:
            store.once("key", lambda: os._exit(7), request=1)

    child = Child(die)
    assert child.wait()[0] == 7
    with holdfast.open(**place) as store:
        raises(store, lambda: store.once("key", lambda: None, request=2), "issued")
