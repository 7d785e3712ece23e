"""Workers: what they do with handlers of both kinds, in both colours, on both databases."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, Submission, Worker, WorkFailed
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.work.working import SECONDS_MAX, ended, opened, running, until, work


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait before another attempt is as random as always, but short."""
    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 0.02)


# Handlers of both kinds


@both_colours
async def test_plain_and_async_handlers_run_and_return_the_output(subject: Subject) -> None:
    store = await opened(subject)
    session = await done(store.session("s"))

    def plain(item: Any) -> Any:
        item.session.save(seen=item.input)
        item.progress({"percent": 50})
        return {"doubled": item.input * 2}

    async def asynchronous(item: Any) -> Any:
        await asyncio.sleep(0)
        await done(item.session.record("manual_checkpoint", {"n": item.input}, item=item))
        await done(item.progress("half"))
        return [item.input, item.fence]

    first = await done(store.work.submit("plain", 21, session=session))
    second = await done(store.work.submit("asynchronous", 4, session=session))
    worker = await work(store, {"plain": plain, "asynchronous": asynchronous})
    assert worker.counts == {"completed": 2}
    first, second = [await done(store.work.get(each.id)) for each in (first, second)]
    assert (first.status, first.output) == ("completed", {"doubled": 42})
    assert (second.status, second.output) == ("completed", [4, 1])
    assert (first.last_progress, second.last_progress) == ({"percent": 50}, "half")
    assert (await done(session.latest())).channels == {"seen": 21}
    history = await done(session.history(kind="manual_checkpoint"))
    assert [each.data for each in history if "n" in each.data] == [{"n": 4}]


@both_colours
async def test_a_worker_serves_the_queues_of_its_types_or_those_given(subject: Subject) -> None:
    store = await opened(subject)
    ids = {}
    for queue in ("mail", "fast", "other"):
        ids[queue] = (await done(store.work.submit("mail", queue, queue=queue))).id
    seen: list[str] = []
    await work(store, {"mail": lambda item: seen.append(item.input)})
    assert seen == ["mail"]
    await work(store, {"mail": lambda item: seen.append(item.input)}, queues=["fast"])
    assert seen == ["mail", "fast"]
    assert (await done(store.work.get(ids["other"]))).attempts == 0


@both_colours
async def test_no_more_than_concurrency_run_at_once_and_that_many_do(subject: Subject) -> None:
    store = await opened(subject)
    await done(store.work.submit_many([Submission("t", n) for n in range(12)]))
    at_once, most, lock = 0, 0, threading.Lock()
    meeting = threading.Barrier(3, timeout=SECONDS_MAX)

    def handler(item: Any) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        meeting.wait()
        with lock:
            at_once -= 1

    worker = await work(store, {"t": handler}, concurrency=3, prefetch=4)
    assert (worker.counts, most) == ({"completed": 12}, 3)


@both_colours
async def test_a_handler_may_end_its_item_itself(subject: Subject) -> None:
    """So it can commit a checkpoint and follow-up items together with the output."""
    store = await opened(subject)
    session = await done(store.session("s"))

    def first(item: Any) -> str:
        follow_up = Submission("second", item.input + 1)
        item.complete("mine", checkpoint={"channels": {"n": item.input}}, then=[follow_up])
        item.progress("too late")
        return "not this"

    async def second(item: Any) -> None:
        if item.releases == 0:
            await done(item.release())
        elif item.failures == 0:
            await done(item.fail("later", delay_seconds=0))

    item = await done(store.work.submit("first", 1, session=session))
    worker = await work(store, {"first": first, "second": second})
    assert worker.counts == {"completed": 2, "released": 1, "retried": 1}
    assert (await done(store.work.get(item.id))).output == "mine"
    assert (await done(session.latest())).channels == {"n": 1}
    [follow_up] = await done(store.work.list(type="second"))
    assert (follow_up.input, follow_up.status, follow_up.session_id) == (2, "completed", "s")
    assert (follow_up.releases, follow_up.failures, follow_up.retry_count) == (1, 1, 1)


@both_colours
async def test_effects_of_an_item_happen_once_over_its_attempts(subject: Subject) -> None:
    store = await opened(subject)
    sent: list[str] = []

    @holdfast.tool(effect="mutate")
    def send(to: str) -> str:
        sent.append(to)
        return f"sent to {to}"

    def log() -> str:
        sent.append("logged")
        return "ok"

    async def handler(item: Any) -> Any:
        result = await done(item.call(send, to=item.input))
        once = await done(item.once("log", log))
        if item.retry_count < 2:
            raise ConnectionError("after the effect")
        return [result.value, result.replayed, once.value]

    item = await done(store.work.submit("mail", "ann"))
    async with running(store, {"mail": handler}, poll_seconds=0.05):
        item = await ended(store, item.id)
    assert item.output == ["sent to ann", True, "ok"]
    assert (sent, item.attempts) == (["ann", "logged"], 3)


# Failures


@both_colours
async def test_exceptions_use_the_budget_of_retries(subject: Subject) -> None:
    store = await opened(subject)
    runs: list[int] = []

    def handler(item: Any) -> None:
        runs.append(item.max_retries)
        raise ValueError(f"attempt {item.attempts}")

    budgets = (0, 1, 3)
    items = [await done(store.work.submit("t", max_retries=budget)) for budget in budgets]
    async with running(store, {"t": handler}, poll_seconds=0.02):
        items = [await ended(store, item.id) for item in items]
    assert {budget: runs.count(budget) for budget in budgets} == {0: 1, 1: 2, 3: 4}
    for item, budget in zip(items, budgets, strict=True):
        assert (item.status, item.error) == ("failed", f"ValueError: attempt {budget + 1}")
        assert (item.retry_count, item.attempts, item.failures) == (budget, budget + 1, budget + 1)


@both_colours
async def test_what_cannot_succeed_is_not_tried_again(subject: Subject) -> None:
    store = await opened(subject)

    def handler(item: Any) -> Any:
        if item.input == "refused":
            raise WorkFailed("the card was refused")
        if item.input == "limited" and item.failures == 0:
            raise WorkFailed("too many requests", retry=True, delay_seconds=0)
        if item.input == "hasty":
            raise WorkFailed("too early", delay_seconds=-1)
        return object() if item.input == "odd" else None

    inputs = ("refused", "limited", "odd", "hasty")
    ids = [(await done(store.work.submit("t", text))).id for text in inputs]
    await work(store, {"t": handler})
    refused, limited, odd, hasty = [await done(store.work.get(id)) for id in ids]
    assert (refused.status, refused.error) == ("failed", "the card was refused")
    assert (refused.attempts, refused.retry_count) == (1, 0)
    assert (limited.status, limited.attempts, limited.retry_count) == ("completed", 2, 1)
    assert (odd.status, odd.attempts) == ("failed", 1)
    assert "the output cannot be stored" in odd.error
    assert hasty.status == "failed"
    assert "too early (delay_seconds must be" in hasty.error


@both_colours
async def test_an_item_without_a_handler_fails_and_says_so(subject: Subject) -> None:
    store = await opened(subject)
    item = await done(store.work.submit("fax", queue="office", max_retries=0))
    await work(store, {"mail": lambda item: None}, queues="office")
    item = await done(store.work.get(item.id))
    assert item.status == "failed"
    assert "no handler for type 'fax', only for mail" in item.error


@both_colours
async def test_an_async_function_in_disguise_is_named(subject: Subject) -> None:
    store = await opened(subject)

    async def real(item: Any) -> None:
        raise AssertionError("it must not run")

    item = await done(store.work.submit("t", max_retries=0))

    def disguised(item: Any) -> Any:
        return real(item)

    await work(store, {"t": disguised})
    assert "write it as `async def`" in (await done(store.work.get(item.id))).error


@both_colours
async def test_bad_arguments_are_refused_before_anything_runs(subject: Subject) -> None:
    store = await opened(subject)

    def nothing(item: Any) -> None: ...

    wrong_handlers: tuple[Any, ...] = ({}, {"t": 3}, [], None, {"": nothing})
    for handlers in wrong_handlers:
        await raises(InvalidArgument, partial(Worker, store, handlers))
    wrong: tuple[dict[str, Any], ...] = (
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": 10_000},
        {"prefetch": -1},
        {"lease_seconds": 0},
        {"lease_seconds": "long"},
        {"poll_seconds": 0},
        {"sweep_interval_seconds": -1},
        {"drain_seconds": float("nan")},
        {"queues": []},
        {"queues": [3]},
        {"holder": ""},
        {"holder": "a\nb"},
        {"work_days": -1},
        {"tools": [len]},
    )
    for arguments in wrong:
        await raises(InvalidArgument, partial(Worker, store, {"t": nothing}, **arguments))
    not_a_store: Any = "sqlite://"
    await raises(InvalidArgument, partial(Worker, not_a_store, {"t": nothing}))
    worker = Worker(store, {"t": nothing})
    await done(worker.run(until_empty=True))
    await raises(InvalidArgument, lambda: worker.run(until_empty=True))


# What every worker does beside its items


@both_colours
async def test_a_delayed_item_runs_when_it_is_due(subject: Subject) -> None:
    """Also if the worker sweeps hardly ever."""
    store = await opened(subject)
    options = {"poll_seconds": 0.1, "sweep_interval_seconds": 3600}
    async with running(store, {"t": lambda item: "done"}, **options):
        item = await done(store.work.submit("t", delay_seconds=0.5))
        assert (item.status, item.waits_for) == ("pending", "time")
        item = await ended(store, item.id)
    assert item.output == "done"
    assert item.started_at >= item.available_at


@both_colours
async def test_a_new_boot_of_an_instance_takes_back_what_the_old_one_held(subject: Subject) -> None:
    store = await opened(subject)
    mine, other = [await done(store.work.submit("t")) for _ in range(2)]
    await done(store.work.claim("pod-1 @ the last boot", lease_seconds=3600))
    await done(store.work.claim("pod-2 @ the last boot", lease_seconds=3600))
    async with running(store, {"t": lambda item: item.holder}, instance="pod-1") as worker:
        mine = await ended(store, mine.id)
    assert worker.holder.startswith("pod-1 @ ")
    assert (mine.output, mine.rescues) == (worker.holder, 1)
    assert (await done(store.work.get(other.id))).holder == "pod-2 @ the last boot"


async def left_in_doubt(subject: Subject, tool: Any) -> None:
    """Begin a call in a session, and leave it as a process does that dies."""
    dying = await opened(subject)
    with contextlib.suppress(holdfast.LeaseLost):  # On a busy machine the lease may end before.
        await done((await done(dying.session("s"))).begin(tool, {"cents": 5}))
    await done(dying.close())


@both_colours
async def test_a_worker_verifies_what_a_dead_process_left(subject: Subject) -> None:
    """With hooks of both kinds in an async store, before it takes its first item."""
    store = await opened(subject)
    is_async = isinstance(store, holdfast.AsyncStore)

    async def found_async(args: dict[str, Any], idempotency_key: str) -> Any:
        return holdfast.Landed("found")

    def found(args: dict[str, Any], idempotency_key: str) -> Any:
        return holdfast.Landed("found")

    verify = found_async if is_async else found

    @holdfast.tool(effect="mutate", verify=verify, lease_seconds=0.1)
    def charge(cents: int) -> str:
        raise AssertionError("it must not run")

    await left_in_doubt(subject, charge)
    session = await done(store.session("s"))
    await until(session.unresolved, lambda found: len(found) == 1)
    await work(store, {"t": lambda item: None}, tools=[charge])
    [effect] = await done(store.effects())
    assert (effect.status, effect.reason, effect.result) == ("completed", "verified", "found")


@both_colours
async def test_a_worker_verifies_what_is_left_while_it_runs(subject: Subject) -> None:
    """An owner whose lease ends after the worker has started is not left to the next start."""
    store = await opened(subject)

    @holdfast.tool(
        effect="mutate", verify=lambda args, key: holdfast.Landed("found"), lease_seconds=0.1
    )
    def charge(cents: int) -> str:
        raise AssertionError("it must not run")

    given: dict[str, Any] = {"tools": [charge], "sweep_interval_seconds": 0.05}
    async with running(store, {"t": lambda item: "served"}, instance="one", **given):
        await ended(store, (await done(store.work.submit("t"))).id)
        successor = await done((await done(store.session("driven"))).drive("next", instance="one"))
        await left_in_doubt(subject, charge)
        [effect] = await until(store.effects, lambda found: found[0].status != "issued")
        await done(successor.save(step=1))  # It was not fenced: only a start does that.
        await done(successor.close())
    assert (effect.status, effect.reason, effect.result) == ("completed", "verified", "found")


@both_colours
async def test_a_hook_that_raises_what_ends_programs_ends_neither_loop_nor_verification(
    subject: Subject,
) -> None:
    store = await opened(subject)
    errors = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]

    def verify(args: dict[str, Any], idempotency_key: str) -> Any:
        if errors:
            raise errors.pop()
        return holdfast.Landed("found")

    async def verify_async(args: dict[str, Any], idempotency_key: str) -> Any:
        return verify(args, idempotency_key)

    is_async = isinstance(store, holdfast.AsyncStore)
    hook = verify_async if is_async else verify

    @holdfast.tool(effect="mutate", verify=hook, lease_seconds=0.1)
    def charge(cents: int) -> str:
        raise AssertionError("it must not run")

    given: dict[str, Any] = {"tools": [charge], "sweep_interval_seconds": 0.05}
    async with running(store, {"t": lambda item: "served"}, **given):
        await ended(store, (await done(store.work.submit("t"))).id)
        dying = await opened(subject)
        begun = await done((await done(dying.session("s"))).begin(charge, {"cents": 5}))
        await done(dying.close())
        effect = await until(
            lambda: store.effect(begun.effect_id), lambda found: found.status == "completed"
        )
    assert (effect.reason, effect.result, errors) == ("verified", "found", [])


@both_colours
async def test_a_handler_that_raises_what_ends_programs_has_failed(subject: Subject) -> None:
    """Async handlers, alone in an event loop and beside handlers that run in threads."""
    store = await opened(subject)

    async def raising(item: Any) -> None:
        await asyncio.sleep(0)
        raise {"exit": SystemExit, "interrupt": KeyboardInterrupt}[item.input]

    for others in ({}, {"other": lambda item: None}):
        items = [
            await done(store.work.submit("t", text, max_retries=0))
            for text in ("exit", "interrupt")
        ]
        await work(store, {"t": raising, **others})
        for item in items:
            found = await done(store.work.get(item.id))
            assert (found.status, found.attempts) == ("failed", 1)


def test_workers_remove_finished_items_that_are_old(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.upkeep.RETENTION_SECONDS", 0.05)

    def count() -> int:
        return len(store.work.list(status="completed"))

    with holdfast.open(**place, durability="normal") as store:
        for number in range(5):
            store.work.submit("t", number, session=store.session("s") if number % 2 else None)
        waits = store.work.submit("later", queue="later")
        done_by = Worker(store, {"t": lambda item: None}, work_days=None)
        done_by.run(until_empty=True)
        assert count() == 5
        worker = Worker(store, {"t": lambda item: None}, work_days=0, sweep_interval_seconds=0.05)
        thread = threading.Thread(target=worker.run)
        thread.start()
        deadline = time.monotonic() + SECONDS_MAX
        while count() and time.monotonic() < deadline:
            time.sleep(0.02)
        worker.stop()
        thread.join()
        assert count() == 0
        assert store.work.get(waits.id).status == "pending"
