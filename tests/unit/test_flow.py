"""Flows run the same in both colours: results are sent in, errors thrown in, tools waited for."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.kernel.flow import Flow, Give, Stream, finish, flow, invoke, perform, stream, wait
from holdfast.kernel.operation import C
from holdfast.testing.nouns import Counter, Setup


class Tally(Counter[C]):
    """A counter that is fed by user code."""

    @flow
    def add_result(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Flow[int]:
        """Add what a function returns; add 100 if it fails, and raise its error."""
        try:
            amount = yield from invoke(function, *args, **kwargs)
        except BaseException:
            yield from perform(Counter.add, self, 100, note="failed")
            raise
        yield from wait(0.001)
        return (yield from perform(Counter.add, self, amount))

    @flow
    def add_both(self, first: Callable[[], int], second: Callable[[], int]) -> Flow[int]:
        """Use one flow inside another."""
        yield from Tally.add_result(self, first)
        return (yield from Tally.add_result(self, second))

    @stream
    def each_result(self, *functions: Callable[[], int]) -> Stream[int]:
        """Give the counter's value after each function's result was added to it."""
        for function in functions:
            try:
                amount = yield from invoke(function)
            except LookupError:
                amount = 1_000
            yield Give((yield from perform(Counter.add, self, amount)))


def in_both_colours(
    function: Callable[[Any, Callable[[Any], Any]], Any],
) -> list[Any]:
    """Run a scenario with a sync and with an async tally; `settle` returns a call's result."""
    outcomes = []
    with holdfast.open("sqlite://") as store:
        Setup(store).install()
        tally = Tally(store)
        tally.plant()
        outcomes.append(function(tally, lambda call: call()))

    async def run() -> Any:
        async with await holdfast.aopen("sqlite://") as store:
            await Setup(store).install()
            tally = Tally(store)
            await tally.plant()
            loop = asyncio.get_running_loop()

            def settle(call: Callable[[], Any]) -> Any:
                async def awaited() -> Any:
                    return await call()

                return asyncio.run_coroutine_threadsafe(awaited(), loop).result()

            return await asyncio.to_thread(function, tally, settle)

    outcomes.append(asyncio.run(run()))
    return outcomes


def test_a_flow_sends_results_in_and_returns_the_last() -> None:
    def scenario(tally: Any, settle: Callable[[Any], Any]) -> Any:
        return (
            settle(lambda: tally.add_result(lambda a, *, b: a + b, 2, b=3)),
            settle(lambda: tally.add_both(lambda: 10, lambda: 20)),
        )

    assert in_both_colours(scenario) == [(5, 35), (5, 35)]


def test_an_error_of_user_code_is_thrown_in_where_it_was_called() -> None:
    def scenario(tally: Any, settle: Callable[[Any], Any]) -> Any:
        with pytest.raises(ZeroDivisionError):
            settle(lambda: tally.add_result(lambda: 1 / 0))
        return settle(tally.value)

    assert in_both_colours(scenario) == [100, 100]


async def three() -> int:
    await asyncio.sleep(0)
    return 3


def returns_three() -> Any:
    """A sync function that returns an awaitable."""
    return three()


def test_an_async_function_needs_an_async_store() -> None:
    with holdfast.open("sqlite://") as store:
        Setup(store).install()
        tally = Tally(store)
        tally.plant()
        with pytest.raises(holdfast.InvalidArgument, match="three is async; use it with an async"):
            tally.add_result(three)
        assert tally.value() == 100

    async def run() -> None:
        async with await holdfast.aopen("sqlite://") as store:
            await Setup(store).install()
            tally = Tally(store)
            await tally.plant()
            assert await tally.add_result(three) == 3
            assert await tally.add_result(returns_three) == 6

    asyncio.run(run())


def test_a_sync_function_in_an_async_store_does_not_block_the_loop() -> None:
    async def run() -> None:
        async with await holdfast.aopen("sqlite://") as store:
            await Setup(store).install()
            tally = Tally(store)
            await tally.plant()
            loop_thread = threading.get_ident()
            threads = []

            def tool() -> int:
                threads.append(threading.get_ident())
                return 1

            await tally.add_result(tool)
            assert threads[0] != loop_thread

    asyncio.run(run())


def test_a_cancelled_flow_waits_for_its_sync_function_and_can_record_that() -> None:
    async def run() -> None:
        async with await holdfast.aopen("sqlite://") as store:
            await Setup(store).install()
            tally = Tally(store)
            await tally.plant()
            started, ended = threading.Event(), threading.Event()

            def tool() -> int:
                started.set()
                time.sleep(0.2)
                ended.set()
                return 1

            task = asyncio.ensure_future(tally.add_result(tool))
            await asyncio.to_thread(started.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set()
            assert [event.data["note"] for event in await store.events("root")] == ["failed"]

    asyncio.run(run())


def test_user_code_runs_in_a_copy_of_the_context() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    def tool() -> int:
        seen = variable.get()
        variable.set(99)
        return seen

    with holdfast.open("sqlite://") as store:
        Setup(store).install()
        tally = Tally(store)
        tally.plant()
        assert tally.add_result(tool) == 7
    assert variable.get() == 7


def test_a_transaction_cannot_run_a_flow() -> None:
    def composed(tx: holdfast.Transaction) -> holdfast.Op[None]:
        tally: Any = Tally(tx)
        yield from tally.add_result(lambda: 1)

    with (
        holdfast.open("sqlite://") as store,
        pytest.raises(holdfast.InvalidArgument, match="cannot run inside one"),
    ):
        store.run(composed)


def test_finish_waits_to_the_end_and_then_raises_the_cancellation() -> None:
    async def run() -> None:
        done = []

        async def work() -> str:
            await asyncio.sleep(0.05)
            done.append("yes")
            return "result"

        async def fails() -> None:
            await asyncio.sleep(0.01)
            raise KeyError("inner")

        task = asyncio.create_task(finish(work()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["yes"]
        assert await finish(work()) == "result"
        with pytest.raises(KeyError, match="inner"):
            await finish(fails())

    asyncio.run(run())


async def read(values: Any) -> list[int]:
    """Read a stream of either colour to its end."""
    if hasattr(values, "__aiter__"):
        return [value async for value in values]
    return list(values)


def test_a_stream_gives_values_in_both_colours_and_errors_are_thrown_in() -> None:
    def fail() -> int:
        raise LookupError

    def scenario(tally: Any, settle: Callable[[Any], Any]) -> Any:
        def call() -> Any:
            values = read(tally.each_result(lambda: 1, fail, lambda: 2))
            return values if tally.runtime.is_async else asyncio.run(values)

        return settle(call)

    assert in_both_colours(scenario) == [[1, 1_001, 1_003]] * 2


def test_a_stream_does_nothing_before_the_next_value_is_wanted() -> None:
    done: list[int] = []

    def count() -> int:
        done.append(1)
        return 1

    with holdfast.open("sqlite://") as store:
        Setup(store).install()
        tally = Tally(store)
        tally.plant()
        values = tally.each_result(count, count, count)
        assert done == []
        assert next(values) == 1
        assert done == [1]
        assert next(values) == 2
        assert (done, tally.value()) == ([1, 1], 2)


def test_a_stream_that_is_left_is_closed_where_it_stands() -> None:
    ended: list[str] = []

    class Watching(Tally[C]):
        """A stream that tells of its end."""

        @stream
        def forever(self) -> Stream[int]:
            """Give ones."""
            try:
                while True:
                    yield Give(1)
            finally:
                ended.append("closed")

    async def leave_early() -> None:
        async with holdfast.aopen("sqlite://") as store:
            values = Watching(store).forever()
            assert await anext(values) == 1
            await values.aclose()  # type: ignore[attr-defined]

    with holdfast.open("sqlite://") as store:
        for value in Watching(store).forever():
            assert value == 1
            break
    assert ended == ["closed"]
    asyncio.run(leave_early())
    assert ended == ["closed", "closed"]


def test_a_transaction_cannot_run_a_stream() -> None:
    def composed(tx: holdfast.Transaction) -> holdfast.Op[None]:
        tally: Any = Tally(tx)
        yield from tally.each_result()

    with (
        holdfast.open("sqlite://") as store,
        pytest.raises(holdfast.InvalidArgument, match="cannot run inside one"),
    ):
        store.run(composed)


def test_the_warning_about_a_forgotten_await_names_the_method() -> None:
    async def forget() -> None:
        async with holdfast.aopen("sqlite://") as store:
            session = await store.session("s")
            for call, name in (
                (lambda: session.append("log", [1]), "append"),
                (lambda: session.state.set("k", 1), "State.set"),
                (lambda: store.once("k", int), "once"),
            ):
                with pytest.warns(RuntimeWarning, match=rf"'\w*\.?{name}' was never awaited"):
                    call()

    asyncio.run(forget())
