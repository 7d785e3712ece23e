"""SIGKILL before and after every statement and COMMIT of every operation on work, on both
databases: each is whole or has left nothing, and the next process goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each of a thousand children.
from holdfast import Submission
from holdfast.checkpoints import Heads
from holdfast.kernel.operation import Call, rows
from holdfast.testing.crashes import CrashPoints
from holdfast.work.claims import Claim
from holdfast.work.noun import remove_finished
from holdfast.work.transitions import Transition
from holdfast.work.transitions import turn as complete_and_claim
from tests.checkpoints.colours import sql
from tests.checkpoints.looking import Look
from tests.crash.children import boundaries, run

Say = Callable[[str], None]

# Longer than the test, or a sweep finds what the other operations have claimed; shorter than what
# a heartbeat asks for.
LEASE_SECONDS = 3_600


class Desk:
    """A session and its items, found by the queue that bears its name."""

    def __init__(self, store: holdfast.Store, name: str) -> None:
        self.store = store
        self.name = name
        self.session: Any = None
        self.items: list[Any] = []

    def look(self) -> None:
        """Find the session and its items, so that the operation itself need not."""
        self.session = self.store.find_session(self.name)
        Heads.of(self.store.runtime).forget(self.session.number)
        self.items = [
            self.store.work.get(item.id, fence=item.fence) if item.status == "in_progress" else item
            for item in reversed(self.store.work.list(queue=self.name))
        ]

    def submit(self, type: str = "t", **given: Any) -> Any:
        return self.store.work.submit(type, {"n": 1}, **{"queue": self.name, **given})

    def claim(self, **given: Any) -> Any:
        wanted = {"queues": self.name, "lease_seconds": LEASE_SECONDS, **given}
        return self.store.work.claim("w", **wanted)


Act = Callable[[Desk], Any]


class Step(NamedTuple):
    """One operation: what is there before it, and the operation itself."""

    setup: Act
    act: Act


def empty(desk: Desk) -> None:
    desk.store.session(desk.name).save(plan=0)


def submitted(desk: Desk) -> None:
    """One item with the session, one without, one that waits."""
    empty(desk)
    desk.submit(session=desk.name, key="k")
    desk.submit(priority=-1)
    desk.submit(session=desk.name, delay_seconds=600)


def claimed(desk: Desk) -> None:
    submitted(desk)
    desk.claim(limit=2)


def last_try(desk: Desk) -> None:
    empty(desk)
    desk.submit(session=desk.name, max_retries=0)
    desk.claim()


def expired(desk: Desk, **given: Any) -> None:
    empty(desk)
    desk.submit(session=desk.name, **given)
    desk.claim(lease_seconds=0.001)
    time.sleep(0.01)


def expired_alone(desk: Desk) -> None:
    empty(desk)
    desk.submit()
    desk.claim(lease_seconds=0.001)
    time.sleep(0.01)


def asked_to_stop(desk: Desk) -> None:
    expired(desk)
    desk.store.work.cancel(desk.store.work.list(queue=desk.name)[0].id)


def due(desk: Desk) -> None:
    empty(desk)
    desk.submit(session=desk.name, delay_seconds=0.001)
    time.sleep(0.01)


def dead(desk: Desk) -> None:
    last_try(desk)
    desk.look()
    desk.items[0].fail("no")


class Naming:
    """Stands for an effect under way: its outcome is the session's name."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def completing(self, value: str) -> holdfast.Op[None]:
        statement = "UPDATE hf_sessions SET name = :name WHERE number = :number"
        yield from rows(statement, name=value, number=self._session.number)


def complete_all(desk: Desk) -> None:
    desk.items[0].complete(
        {"sent": 1},
        checkpoint={"kind": "tool_executed", "data": {"sent": 1}, "plan": 2},
        effect=(Naming(desk.session), "sent"),
        then=[Submission("next", 1, queue=desk.name), Submission("next", 2, queue=desk.name)],
    )


def composed(desk: Desk) -> None:
    def several(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from tx.within(desk.session).save(plan=3)
        yield from tx.work.within(desk.items[0]).complete("tx")
        made = yield from tx.work.submit("next", queue=desk.name, session=desk.session)
        yield from tx.work.cancel(made.id)

    desk.store.run(several)


def driving(desk: Desk) -> None:
    claimed(desk)
    desk.look()
    desk.items[0].drive()


def expired_driver(desk: Desk) -> None:
    expired(desk)
    desk.look()
    desk.items[0].drive()


def in_doubt(desk: Desk) -> None:
    """An item in review, and the effect that it waits for."""
    claimed(desk)
    desk.look()
    effect = desk.session.begin("charge", {"cents": 5})
    statement = "UPDATE hf_effects SET status = 'unknown', ended_at = 1 WHERE id = :id"
    sql(desk.store, statement, id=effect.effect_id)
    desk.items[0].fail(holdfast.Unresolved("in doubt", effect_id=effect.effect_id))


def resolve(desk: Desk) -> None:
    [effect] = desk.store.effects(session=desk.session)
    desk.store.resolve(effect.id, holdfast.NotLanded(), by="ann")


def prune(desk: Desk) -> None:
    """Remove this desk's items only, as a prune of the whole store does with each tree's."""
    store = desk.store
    found = [
        {"number": item.number, "root_id": item.root_id, "session_id": item.session_id}
        for item in desk.items
    ]
    store.runtime.driver.run(Call(remove_finished, store.runtime, (found,)))


def more_to_do(desk: Desk) -> None:
    claimed(desk)
    desk.submit()


def turn(desk: Desk) -> None:
    """Complete two items and claim the next, as a worker does."""
    store = desk.store
    change = Transition("completed", "completed", store.runtime.codec.encode({"ok": True}))
    ended = [(item, change) for item in desk.items[:2]]
    claim = Claim("w", 5, [desk.name], 86_400_000)
    store.runtime.driver.run(Call(complete_and_claim, None, (ended, claim)))


STEPS: dict[str, Step] = {
    "submit": Step(empty, lambda d: d.submit(session=d.session, key="k")),
    "submit without a session": Step(empty, lambda d: d.submit()),
    "submit many": Step(
        empty,
        lambda d: d.store.work.submit_many(
            [Submission("t", n, queue=d.name, session=d.name) for n in range(3)]
        ),
    ),
    "claim": Step(submitted, lambda d: d.claim(limit=5)),
    "claim of two queues": Step(submitted, lambda d: d.claim(queues=[d.name, "none"])),
    "heartbeat": Step(claimed, lambda d: d.store.work.heartbeat(d.items[:2], lease_seconds=86_400)),
    "progress": Step(claimed, lambda d: d.items[0].progress({"half": True})),
    "save under the lease": Step(claimed, lambda d: d.items[0].session.save(plan=1)),
    "complete": Step(claimed, lambda d: d.items[0].complete({"ok": True})),
    "complete without a session": Step(claimed, lambda d: d.items[1].complete({"ok": True})),
    "complete with everything": Step(claimed, complete_all),
    "complete many": Step(
        claimed, lambda d: d.store.work.complete_many([(item, 1) for item in d.items[:2]])
    ),
    "complete and claim": Step(more_to_do, turn),
    "fail": Step(claimed, lambda d: d.items[0].fail("no")),
    "fail for good": Step(last_try, lambda d: d.items[0].fail("no")),
    "release": Step(claimed, lambda d: d.items[0].release()),
    "cancel as its holder": Step(claimed, lambda d: d.items[0].cancel()),
    "cancel what waits": Step(claimed, lambda d: d.store.work.cancel(d.items[2].id)),
    "ask to stop": Step(claimed, lambda d: d.store.work.cancel(d.items[0].id)),
    "retry": Step(claimed, lambda d: d.store.work.retry(d.items[2].id)),
    "redrive": Step(dead, lambda d: d.store.work.redrive(d.items[0].id)),
    "sweep": Step(expired, lambda d: d.store.work.sweep()),
    "sweep without a session": Step(expired_alone, lambda d: d.store.work.sweep()),
    "sweep a last try": Step(lambda d: expired(d, max_retries=0), lambda d: d.store.work.sweep()),
    "sweep what was to stop": Step(asked_to_stop, lambda d: d.store.work.sweep()),
    "sweep for review": Step(
        lambda d: expired(d, on_crash="review"), lambda d: d.store.work.sweep()
    ),
    "drive": Step(claimed, lambda d: d.items[0].drive()),
    "heartbeat of a driver": Step(driving, lambda d: d.items[0].heartbeat(lease_seconds=86_400)),
    "complete as a driver": Step(driving, lambda d: d.items[0].complete({"ok": True})),
    "fail as a driver": Step(driving, lambda d: d.items[0].fail("no")),
    "sweep a driver": Step(expired_driver, lambda d: d.store.work.sweep()),
    "resolve what it waits for": Step(in_doubt, resolve),
    "rewind the session": Step(claimed, lambda d: d.session.rewind(1)),
    "promote": Step(due, lambda d: d.store.work.promote()),
    "cancel the session": Step(claimed, lambda d: d.session.cancel()),
    "delete the session": Step(claimed, lambda d: d.session.delete(force=True)),
    "prune": Step(dead, prune),
    "several in one commit": Step(claimed, composed),
}
FIELDS = (
    *("type", "stored_state", "holder", "fence", "cancel_requested", "retry_count", "attempts"),
    *("failures", "rescues", "releases", "key", "input", "output", "error", "last_progress"),
)


def shape(store: holdfast.Store, name: str) -> dict[str, Any]:
    """Everything that the store knows of a desk, without ids and times."""
    items = list(reversed(store.work.list(queue=name)))
    ids = {item.id: index for index, item in enumerate(items)}
    columns = "name, status, epoch, fence, holder IS NULL AS is_free, lease_expires_at > 6e6 + ("
    columns += "SELECT max(w.created_at) FROM hf_work w WHERE w.session_id = :id) AS is_long"
    sessions = Look(store).rows(f"SELECT {columns} FROM hf_sessions WHERE id = :id", id=name)
    found: dict[str, Any] = {
        "sessions": [[str(value) for value in row.values()] for row in sessions],
        "events": [event.kind for event in store.events(name)],
    }
    for index, item in enumerate(items):
        found[f"item {index}"] = [
            *(getattr(item, field) for field in FIELDS),
            ids.get(item.redriven_from or ""),
            item.lease_expires_at is not None and item.lease_expires_at > item.created_at + 6e6,
        ]
    if sessions:
        found["history"] = [
            (each.kind, repr(each.data).replace(each.item_id or "-", "item"))
            for each in store.find_session(name).history()
        ]
    return found


def opened(place: dict[str, str], points: CrashPoints) -> holdfast.Store:
    # Only power loss tells the durabilities apart.
    return holdfast.open(**place, hooks=points.hooks, durability="normal")  # type: ignore[arg-type]


def reference(place: dict[str, str], seen: set[str] | None, say: Say) -> None:
    """Say what every operation begins from and leads to, and at which places to die."""
    points = CrashPoints()
    with opened(place, points) as store:
        store.settle("nobody:1")
        for number, step in enumerate(STEPS.values()):
            desk = Desk(store, f"r{number}")
            points.is_armed = False
            step.setup(desk)
            desk.look()
            before = shape(store, desk.name)
            points.points.clear()
            points.is_armed = True
            step.act(desk)
            points.is_armed = False
            after = shape(store, desk.name)
            assert before != after, "the shape must tell whether the step was taken"
            say(repr((boundaries(points, seen), repr(before), repr(after))))


def die(place: dict[str, str], step: str, name: str, die_at: int) -> None:
    """Set one operation up, do it, and die at one of its places."""
    points = CrashPoints(die_at)
    points.is_armed = False
    with opened(place, points) as store:
        desk = Desk(store, name)
        STEPS[step].setup(desk)
        desk.look()
        points.is_armed = True
        STEPS[step].act(desk)


@pytest.mark.parametrize("in_each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_at_every_point_all_or_nothing(
    place: dict[str, str],
    in_each: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each statement is killed at in the operation that makes it first, or in all of them."""
    # Else a sweep promotes what earlier operations have left to be retried soon.
    monkeypatch.setattr("holdfast.work.transitions.backoff_ms", lambda _: LEASE_SECONDS * 1_000)
    status, lines = run(lambda say: reference(place, None if in_each else set(), say))
    assert status == 0
    expected = dict(zip(STEPS, map(eval, lines), strict=True))
    kills = 0
    for number, (step, (places, before, after)) in enumerate(expected.items()):
        names = {die_at: f"k{number}-{die_at}" for die_at in places}
        # A sweep takes everybody's items, so what it left is looked at before the next one.
        together = [[at] for at in places] if step.startswith(("sweep", "promote")) else [places]
        for group in together:
            for at in group:
                status, _ = run(lambda _: die(place, step, names[at], at))  # noqa: B023
                assert status == -signal.SIGKILL, f"{step}: {at} of {places[-1]}"
                kills += 1
            with holdfast.open(**place, durability="normal") as store:  # type: ignore[arg-type]
                for at in group:
                    found = repr(shape(store, names[at]))
                    assert found in {before, after}, f"{step}, killed at {at} of {places[-1]}"
                    assert found == after or at != places[-1]
                    if found == before:
                        desk = Desk(store, names[at])
                        desk.look()
                        STEPS[step].act(desk)
                        assert repr(shape(store, names[at])) == after, f"{step}, done again"
    with capsys.disabled():
        database = place["url"].partition(":")[0]
        print(f"\n{database}: killed at {kills} points of {len(STEPS)} operations")
