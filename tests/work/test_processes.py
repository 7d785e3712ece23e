"""Several processes over one queue: order, races of heartbeat and sweep, keys, deadlocks."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each child.
from holdfast import LeaseLost, Submission, VirtualClock
from tests.crash.children import Child

Say = Callable[[str], None]


def opened(place: dict[str, Any], **arguments: Any) -> holdfast.Store:
    # A process that holds a lock may stand still for long where the machine is busy.
    return holdfast.open(**place, durability="normal", busy_timeout_seconds=60, **arguments)


def together(*functions: Callable[[Say], None]) -> list[list[str]]:
    """Run functions in processes of their own, at the same time; return what each said."""
    children = [Child(function) for function in functions]
    found = []
    for child in children:
        status, lines = child.wait()
        assert status == 0
        found.append(lines)
    return found


def make(place: dict[str, Any]) -> None:
    [[]] = together(lambda _: opened(place).close())


def test_ten_thousand_items_of_one_millisecond_are_claimed_in_exact_order(
    place: dict[str, Any],
) -> None:
    """Submitted by four processes whose clocks stand still, one item or many at a time."""
    make(place)

    def submit(number: int, say: Say) -> None:
        chosen = random.Random(number)
        with opened(place, clock=VirtualClock()) as store:
            left = list(range(2_500))
            while left:
                size = chosen.choice((1, 10, 250))
                page, left = left[:size], left[size:]
                store.work.submit_many(
                    [Submission("t", [number, n], priority=chosen.randint(0, 2)) for n in page]
                )

    together(*(lambda say, number=number: submit(number, say) for number in range(4)))
    with opened(place, clock=VirtualClock()) as store:
        found: list[Any] = []
        while items := store.work.claim("w", limit=len(found) % 7 + 300):
            found += items
    assert len(found) == 10_000
    assert len({item.created_at for item in found}) == 1
    order = [(-item.priority, item.number) for item in found]
    assert order == sorted(order)
    for number in range(4):
        # Of each process and priority, in the order in which it submitted them.
        for priority in range(3):
            own = [
                item.input[1]
                for item in found
                if item.input[0] == number and item.priority == priority
            ]
            assert own == sorted(own)


def test_several_claimers_take_every_item_once(place: dict[str, Any]) -> None:
    make(place)
    with opened(place) as store:
        store.work.submit_many([Submission("t", n, priority=n % 3) for n in range(2_000)])

    def claim(limit: int, say: Say) -> None:
        with opened(place) as store:
            empty = 0
            while empty < 3:
                items = store.work.claim("same name", limit=limit)
                empty = 0 if items else empty + 1
                order = [(-item.priority, item.number) for item in items]
                assert order == sorted(order)
                for item, kept in zip(
                    items,
                    store.work.complete_many([(item, limit) for item in items]),
                    strict=True,
                ):
                    assert kept
                    say(str(item.input))

    said = together(*(lambda say, limit=limit: claim(limit, say) for limit in (1, 3, 10, 50)))
    assert sorted(int(line) for lines in said for line in lines) == list(range(2_000))
    with opened(place) as store:
        [count] = store.work.counts()
        assert (count.status, count.items) == ("completed", 2_000)


def sweep_until_stopped(place: dict[str, Any], say: Say) -> None:
    with opened(place) as store:
        while not store.work.list(type="stop", limit=1):
            say(str(store.work.sweep(limit=200).parked))


@pytest.mark.parametrize("rounds", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_heartbeat_races_two_sweeps_thousands_of_times(
    place: dict[str, Any], rounds: int
) -> None:
    """A lease in the future is never taken, and what is taken is counted once."""
    make(place)
    sweepers = [Child(lambda say: sweep_until_stopped(place, say)) for _ in range(2)]
    lost: dict[str, bool] = {}
    made = 0
    with opened(place) as store:
        # Who wins depends on the machine: both have to, now and then.
        while rounds > 0 or len(set(lost.values())) < 2:
            rounds -= 1
            made += 100
            # One that is swept waits for review, so that each is raced for only once.
            store.work.submit_many([Submission("t", on_crash="review")] * 100)
            items = store.work.claim("w", limit=100, queues="t", lease_seconds=0.01)
            time.sleep(random.uniform(0, 0.02))
            for start in range(0, 100, 10):
                beats = store.work.heartbeat(items[start : start + 10], lease_seconds=600)
                lost |= {beat.id: beat.is_lost for beat in beats}
        store.work.submit("stop")
        parked = 0
        for sweeper in sweepers:
            status, lines = sweeper.wait()
            assert status == 0
            parked += sum(map(int, lines))
        found: list[Any] = []
        while page := store.work.list(
            type="t", before=found[-1].number if found else None, limit=1000
        ):
            found += page
    assert len(found) == len(lost) == made
    for item in found:
        expected = ("review", 1) if lost[item.id] else (None, 0)
        assert (item.waits_for, item.rescues) == expected
        assert item.status == ("pending" if lost[item.id] else "in_progress")
    assert parked == sum(lost.values())
    assert 0 < parked < made, "both must win now and then"


def test_one_key_is_submitted_by_many_at_once(place: dict[str, Any]) -> None:
    make(place)

    def submit(say: Say) -> None:
        with opened(place) as store:
            for _ in range(50):
                item = store.work.submit("t", key="one")
                for held in store.work.claim("w", queues="t"):
                    try:
                        held.complete()
                    except LeaseLost:
                        raise AssertionError("nobody else may have it") from None
                    say(held.id)
                assert item.key == "one"

    said = [line for lines in together(*[submit] * 4) for line in lines]
    assert len(said) == len(set(said))
    with opened(place) as store:
        found = store.work.list(type="t", limit=1000)
        assert {item.status for item in found} <= {"completed", "pending"}
        assert sum(item.status == "pending" for item in found) <= 1
        assert len(found) - len(said) <= 1


@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once_ends_without_a_deadlock(place: dict[str, Any], seed: int) -> None:
    """Trees and items are locked in one order, whoever does what; every item ends once."""
    make(place)
    with opened(place) as store:
        for name in ("b", "a", "c"):
            store.session(name)

    def act(number: int, say: Say) -> None:
        chosen = random.Random(seed * 100 + number)
        with opened(place) as store:
            for _ in range(60):
                wanted = [
                    Submission("t", number, session=chosen.choice(("a", "b", "c", None)))
                    for _ in range(chosen.randint(1, 5))
                ]
                store.work.submit_many(wanted)
                items = store.work.claim(f"w{number}", limit=6, lease_seconds=60)
                chosen.shuffle(items)
                store.work.heartbeat(items)
                done = store.work.complete_many([(item, number) for item in items[:3]])
                assert all(done)
                for item in items[3:]:
                    if item.session is not None:
                        item.session.record("turn", item=item)
                    chosen.choice((item.complete, item.release, item.cancel))()
                store.work.sweep()

    together(*(lambda say, number=number: act(number, say) for number in range(3)))
    with opened(place) as store:
        for item in store.work.claim("end", limit=1000):
            item.complete()
        assert store.work.counts(finished=False) == []
        for root_id in ("a", "b", "c"):
            kinds = Counter(event.kind for event in store.events(root_id, limit=10_000))
            ended = kinds["work_completed"] + kinds["work_cancelled"]
            assert kinds["work_submitted"] == ended
