"""A caller that is interrupted leaves no effect behind of which nobody knows what became."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, NotLanded, VirtualClock
from holdfast.effects import ledger, recorder
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.kernel.flow import Flow
from tests.effects.world import World


class Interrupts:
    """Counts the points of calls, and does something at one of them, once."""

    def __init__(self) -> None:
        self.count = 0
        self.at: int | None = None
        self.act: Callable[[], object] = lambda: None
        self.act_again: Callable[[], object] | None = None
        self.left = 0
        """How often to act again."""

    def probe(self, point: Point) -> None:
        if not point.call.startswith("Ledger."):
            return
        self.count += 1
        if self.count == self.at:
            self.at = None
            self.act()
        elif self.at is None and self.act_again is not None and self.left:
            self.left -= 1
            self.act_again()

    def begin(self, at: int | None, act: Callable[[], object] = lambda: None) -> None:
        self.count, self.at, self.act, self.act_again = 0, at, act, None


def judge(world: World, effects: list[holdfast.Effect]) -> None:
    """Make sure that what was run is completed, and the rest is known not to have happened."""
    ran = [to for to, _ in world.done]
    assert len(set(ran)) == len(ran)
    for effect in effects:
        was_run = effect.arguments["to"] in ran
        expected = ("completed", None) if was_run else ("failed", "not_landed")
        assert (effect.status, effect.reason) == expected, effect


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["call", "once", "begin"])
def test_a_call_that_is_interrupted_at_any_point(place: dict[str, Any], way: str) -> None:
    world, interrupts = World(), Interrupts()
    mail = world.tool()

    def call(to: str) -> None:
        if way == "once":
            store.once(to, mail, request={"to": to})
        elif way == "call":
            session.call(mail, to=to)
        elif not isinstance(begun := session.begin(mail, {"to": to}), holdfast.Replay):
            begun.complete(mail(to=to, idempotency_key=begun.idempotency_key))

    with holdfast.open(**place, hooks=Hooks(probe=interrupts.probe)) as store:
        session = store.session("s")
        call("first")
        interrupts.begin(None)
        call("second")
        points = interrupts.count
        assert points > 8
        for point in range(1, points + 1):
            interrupts.begin(point, interrupt)
            with pytest.raises(KeyboardInterrupt):
                call(str(point))
        judge(world, store.effects())
        assert 2 < len(world.done) < points + 2
        for point in range(1, points + 1):
            call(str(point))
        judge(world, [effect for effect in store.effects() if effect.status != "failed"])
        assert len(world.done) == points + 2


def test_a_call_that_is_interrupted_while_it_steps_in(place: dict[str, Any]) -> None:
    world, interrupts, clock = World(), Interrupts(), VirtualClock()
    world.verdict = NotLanded()
    mail = world.tool(verify=world.verify)
    with holdfast.open(**place, clock=clock, hooks=Hooks(probe=interrupts.probe)) as store:
        session = store.session("s")

        def call_after_a_death(to: str, point: int | None) -> None:
            session.begin(mail, {"to": to})
            clock.advance(3600)
            interrupts.begin(point, interrupt)
            session.call(mail, to=to)

        call_after_a_death("first", None)
        points = interrupts.count
        assert points > 12
        for point in range(1, points + 1):
            with pytest.raises(KeyboardInterrupt):
                call_after_a_death(str(point), point)
            # What was issued anew is settled; of what the dead one did nothing was learned.
            issued = store.effects(status="issued")
            assert all(effect.attempt == 1 for effect in issued)
            clock.advance(3600)
            session.call(mail, to=str(point))
        assert sorted(to for to, _ in world.done) == sorted(
            ["first", *map(str, range(1, points + 1))]
        )
        assert store.effects(status="issued") == []


def test_a_call_that_is_interrupted_again_while_that_is_handled(place: dict[str, Any]) -> None:
    world, interrupts = World(), Interrupts()
    mail = world.tool()
    with holdfast.open(**place, hooks=Hooks(probe=interrupts.probe)) as store:
        session = store.session("s")
        session.call(mail, to="first")
        interrupts.begin(None)
        session.call(mail, to="second")
        points = interrupts.count
        for point in range(1, points + 1):
            interrupts.begin(point, interrupt)
            interrupts.act_again = interrupt
            interrupts.left = 3
            with pytest.raises(KeyboardInterrupt):
                session.call(mail, to=str(point))
            interrupts.begin(None)
        judge(world, store.effects())


def turn_of(tools: list[Any], to: str) -> list[holdfast.ToolUse]:
    return [
        holdfast.ToolUse(tool, {"to": f"{to} {number}"}, f"{to} {number}")
        for number, tool in enumerate(tools)
    ]


def test_a_turn_that_is_interrupted_again_while_that_is_handled(place: dict[str, Any]) -> None:
    world, interrupts = World(), Interrupts()
    mail = world.tool()
    with holdfast.open(**place, hooks=Hooks(probe=interrupts.probe)) as store:
        session = store.session("s")
        session.call_all(turn_of([mail] * 3, "first"))
        interrupts.begin(None)
        session.call_all(turn_of([mail] * 3, "second"))
        points = interrupts.count
        for point in range(1, points + 1):
            interrupts.begin(point, interrupt)
            interrupts.act_again, interrupts.left = interrupt, 3
            with contextlib.suppress(KeyboardInterrupt):
                session.call_all(turn_of([mail] * 3, str(point)))
            interrupts.begin(None)
        judge(world, store.effects(limit=1_000))


def test_a_turn_whose_cleaning_up_is_interrupted_at_every_step(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls before the interrupted one are recorded, and those after it are closed."""
    monkeypatch.setattr(recorder, "HOLD_SECONDS", 60.0)
    world, interrupted = World(), set[str]()
    mail = world.tool()

    def probe(point: Point) -> None:
        if len(world.done) == 2 and point.call not in interrupted and "Ledger." in point.call:
            interrupted.add(point.call)
            raise KeyboardInterrupt

    def stop() -> None:
        if len(world.done) == 2:
            raise KeyboardInterrupt

    world.inside = stop
    with holdfast.open(**place, hooks=Hooks(probe=probe)) as store:
        session = store.session("s")
        with pytest.raises(KeyboardInterrupt):
            session.call_all(turn_of([mail] * 4, "to"))
        assert {"Ledger.finish", "Ledger.finish_all", "Ledger.withdraw"} <= interrupted
        statuses = [(effect.status, effect.reason) for effect in store.effects()]
    assert statuses == [
        ("completed", None),
        ("unknown", "cancelled"),
        ("failed", "not_landed"),
        ("failed", "not_landed"),
    ]


def test_an_interrupt_while_an_outcome_waits_for_a_busy_store_loses_no_outcome(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, has_failed = World(), threading.Event()

    def probe(point: Point) -> None:
        if point.call == "Ledger.finish" and not has_failed.is_set():
            has_failed.set()
            raise holdfast.StoreUnavailable("not now")

    def wait(*_: object) -> Flow[bool]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(ledger, "wait", wait)
    with holdfast.open(**place, hooks=Hooks(probe=probe)) as store:
        session = store.session("s")
        with pytest.raises(KeyboardInterrupt):
            session.call(world.tool(), to="ann")
        assert has_failed.is_set()
        judge(world, store.effects())


@pytest.mark.parametrize("way", ["call", "turn", "once", "item", "once of an item"])
@pytest.mark.parametrize("times", ["once", "again and again"])
def test_a_task_that_is_cancelled_at_any_point(place: dict[str, Any], times: str, way: str) -> None:
    asyncio.run(cancel_at_every_point(place, way, is_repeated=times != "once"))


async def cancel_at_every_point(place: dict[str, Any], way: str, *, is_repeated: bool) -> None:
    world, interrupts, loop = World(), Interrupts(), asyncio.get_running_loop()
    mail, calls = world.tool(), 3 if way == "turn" else 1
    here = threading.current_thread()

    def cancelling(task: list[asyncio.Task[Any]]) -> Callable[[], object]:
        def cancel() -> None:
            if threading.current_thread() is here:
                task[0].cancel()
                return
            # The writer is another thread, and waits here until the task is cancelled.
            is_cancelled = threading.Event()
            loop.call_soon_threadsafe(task[0].cancel)
            loop.call_soon_threadsafe(is_cancelled.set)
            assert is_cancelled.wait(120)

        return cancel

    async with await holdfast.aopen(**place, hooks=Hooks(probe=interrupts.probe)) as store:
        session = await store.session("s")
        await store.work.submit("t", session=session)
        (item,) = await store.work.claim("me")
        ways: dict[str, Callable[[str], Any]] = {
            "call": lambda to: session.call(mail, to=to),
            "turn": lambda to: session.call_all(turn_of([mail] * calls, to)),
            "once": lambda to: store.once(to, mail, request={"to": to}),
            "item": lambda to: item.call(mail, to=to),
            "once of an item": lambda to: item.once(to, mail, request={"to": to}),
        }
        call = ways[way]
        await call("first")
        interrupts.begin(None)
        await call("second")
        points = interrupts.count
        cancelled = 0
        for point in range(1, points + 1):
            tasks: list[asyncio.Task[Any]] = []
            interrupts.begin(point, cancelling(tasks))
            if is_repeated:
                interrupts.act_again = cancelling(tasks)
                interrupts.left = 100
            tasks.append(asyncio.ensure_future(call(str(point))))
            await asyncio.wait(tasks)
            cancelled += tasks[0].cancelled()
            interrupts.begin(None)
        assert cancelled > points / 2
        judge(world, await store.effects(limit=1_000))
        assert 2 * calls < len(world.done) < (points + 2) * calls
        for point in range(1, points + 1):
            await call(str(point))
        assert len(world.done) == (points + 2) * calls


@pytest.mark.parametrize("count", [80, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("times", ["once", "again and again"])
def test_tasks_that_are_cancelled_at_random_moments(
    place: dict[str, Any], times: str, count: int
) -> None:
    asyncio.run(cancel_at_random(place, count, is_repeated=times != "once"))


async def cancel_at_random(place: dict[str, Any], count: int, *, is_repeated: bool) -> None:
    world, chance = World(), random.Random(5)

    @holdfast.tool(effect="mutate")
    async def mail(to: str) -> int:
        return world.act((to, ""))

    async with await holdfast.aopen(**place, durability="normal") as store:
        session = await store.session("s")
        cancelled = 0
        for number in range(count):
            task = asyncio.ensure_future(session.call(mail, to=str(number)))
            await asyncio.sleep(chance.choice([0, 0, 0.0003, 0.0006, 0.001, 0.002, 0.004]))
            task.cancel()
            while is_repeated and not task.done():
                await asyncio.sleep(chance.choice([0, 0, 0.0003, 0.001]))
                task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
        assert cancelled > count / 10, "the cancellations must hit something"
        judge(world, await store.effects(limit=1_000))
        ran = {to for to, _ in world.done}
        for number in range(count):
            result = await session.call(mail, to=str(number))
            assert result.replayed == (str(number) in ran)
        assert len(world.done) == count


def test_a_loop_that_ends_while_a_cancellation_is_handled(place: dict[str, Any]) -> None:
    world, interrupts = World(), Interrupts()
    mail = world.tool()

    async def call() -> None:
        store = await holdfast.aopen(**place, hooks=Hooks(probe=interrupts.probe))
        session = await store.session("s")
        await session.call(mail, to="first")
        loop = asyncio.get_running_loop()
        issued = asyncio.Event()
        interrupts.begin(1, lambda: loop.call_soon_threadsafe(issued.set))
        task = asyncio.ensure_future(session.call(mail, to="second"))
        await issued.wait()
        task.cancel()
        await asyncio.sleep(0)
        # The loop cancels every task that is left, and closes.

    asyncio.run(call())
    with holdfast.open(**place) as store:
        judge(world, store.effects())


@pytest.mark.parametrize("way", ["call", "once", "read"])
def test_an_async_tool_in_a_sync_store_is_refused_before_its_intent(
    place: dict[str, Any], way: str
) -> None:
    async def act(to: str = "") -> None:
        raise AssertionError("nothing awaits it")

    class Acting:
        async def __call__(self, to: str = "") -> None:
            raise AssertionError("nothing awaits it")

    async def verify(arguments: dict[str, Any], idempotency_key: str) -> Any:
        raise AssertionError("nothing awaits it")

    effect: Any = "read" if way == "read" else "mutate"
    tools: list[Any] = [
        holdfast.tool(effect=effect)(act),
        holdfast.tool(effect=effect, name="acting")(Acting()),
        holdfast.tool(effect=effect, verify=verify)(lambda: None),
    ]
    with holdfast.open(**place) as store:
        session = store.session("s")
        for tool in tools:
            call = partial(store.once, "k") if way == "once" else session.call
            with pytest.raises(InvalidArgument, match="async store"):
                call(tool)
        assert store.effects() == []


def test_an_async_verify_hook_in_a_sync_store_settles_nothing(place: dict[str, Any]) -> None:
    async def verify(arguments: dict[str, Any], idempotency_key: str) -> Any:
        raise AssertionError("nothing awaits it")

    clock = VirtualClock()
    with holdfast.open(**place, clock=clock) as store:
        session = store.session("s")
        for if_unknown in ("park", "fail", "retry"):
            mail = World().tool(verify=verify, on_unknown=if_unknown)
            begun = session.begin(mail, {"to": if_unknown})
            assert isinstance(begun, holdfast.Issued)
            before = store.effect(begun.effect_id)
            del begun
            clock.advance(3600)
            with pytest.raises(InvalidArgument, match="async store"):
                store.recover(tools=[mail])
            with pytest.raises(InvalidArgument, match="async store"):
                store.verify(before.id, [mail])
            assert store.effect(before.id) == before


def test_an_async_undo_hook_in_a_sync_store_is_not_run(place: dict[str, Any]) -> None:
    async def undo(arguments: dict[str, Any], result: Any, idempotency_key: str) -> None:
        raise AssertionError("nothing awaits it")

    with holdfast.open(**place) as store:
        session = store.session("s")
        session.save(n=1)
        session.call(World().tool(undo=undo), to="ann")
        ((_, why),) = session.compensate(to=1).not_undone
        assert "async store" in why
        assert len(store.effects()) == 1


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_waits_polls_as_well(place: dict[str, Any], colour: str) -> None:
    """The owner's notification never comes, as if it had exited before it was sent."""
    url = place["url"]
    if url.startswith("postgresql"):
        place["url"] = f"{url}{'&' if '?' in url else '?'}listen=off"
    world = World()
    mail = world.tool(lease_seconds=3600, wait_seconds=60)
    with holdfast.open(**place) as owner:
        begun = owner.session("s").begin(mail, {"to": "ann"})
        assert isinstance(begun, holdfast.Issued)
        polls = Polls()
        hooks = Hooks(trace=polls.trace)

        async def call_async() -> Any:
            async with await holdfast.aopen(**place, hooks=hooks) as store:
                return await (await store.session("s")).call(mail, to="ann")

        def call() -> Any:
            if colour == "async":
                return asyncio.run(call_async())
            with holdfast.open(**place, hooks=hooks) as store:
                return store.session("s").call(mail, to="ann")

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(call)
            assert polls.has_waited.wait(120)
            begun.complete("sent")
            result = waiting.result(60)
    assert (result.value, result.replayed) == ("sent", True)
    assert world.done == []


class Polls:
    """Tells when a caller has looked often enough to be waiting."""

    def __init__(self) -> None:
        self.count = 0
        self.has_waited = threading.Event()

    def trace(self, trace: Trace) -> None:
        self.count += trace.call == "Ledger.take"
        if self.count > 3:
            self.has_waited.set()
