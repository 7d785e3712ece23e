"""Whatever a tool or its hook raises, the outcome is recorded and the caller learns of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast
from holdfast import EffectFailed, InvalidValue, Landed, NotDone, ToolUse, Unresolved
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World, abandoned


class Speechless(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Halt(BaseException):
    """What is no Exception, and no interrupt either."""


class Deaf(NotDone):
    """A certain failure that cannot be shown."""

    __str__ = __repr__ = Speechless.__str__


def raising(error: BaseException, is_async: bool, **rules: Any) -> holdfast.Tool[..., Any]:
    async def act_async(n: int = 0) -> None:
        await asyncio.sleep(0)
        raise error

    def act(n: int = 0) -> None:
        raise error

    return holdfast.tool(name="act", **rules)(act_async if is_async else act)


async def statuses(store: Any, session: Any) -> list[tuple[str, str, str]]:
    found = await done(store.effects(session=session))
    return [(each.status, each.reason, each.error) for each in found]


@both_colours
async def test_an_error_that_cannot_be_shown_is_recorded_by_its_name(subject: Subject) -> None:
    store = await subject.open()
    parked, failed = ("unknown", "raised"), ("failed", "raised")
    cases: dict[str, tuple[Exception, dict[str, Any], type[Exception], tuple[str, str]]] = {
        "mutate": (Speechless(), {}, Unresolved, parked),
        "atomic": (Speechless(), {"atomic": True}, Speechless, failed),
        "not done": (Deaf(), {}, Deaf, failed),
        "write": (Speechless(), {"effect": "write"}, Speechless, failed),
        "read": (Speechless(), {"effect": "read"}, Speechless, failed),
        "timed": (Speechless(), {"timeout_seconds": 60}, Unresolved, parked),
        "verified": (Speechless(), {"verify": lambda *_: 1 / 0}, Unresolved, parked),
    }
    for is_async in {False, subject.colour == "async"}:
        for name, (error, rules, expected, recorded) in cases.items():
            tool = raising(error, is_async, **rules)
            session = await done(store.session(f"{name} {is_async}"))
            await raises(expected, lambda: session.call(tool))  # noqa: B023
            (status, reason, text), *_ = await statuses(store, session)
            assert (status, reason) == recorded, name
            assert text.split(";")[0] == type(error).__name__, name


@both_colours
async def test_a_turn_goes_on_after_an_error_that_cannot_be_shown(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    tool = raising(Speechless(), is_async=False)
    uses = [ToolUse(tool, {"n": 1}), ToolUse(tool, {"n": 2}), ToolUse(world.tool(), {"to": "ann"})]
    answers = await done(session.call_all(uses))
    assert [type(each).__name__ for each in answers] == ["Unresolved", "Unresolved", "Result"]
    assert [each[0] for each in await statuses(store, session)] == ["unknown"] * 2 + ["completed"]


@both_colours
async def test_a_hook_that_raises_what_cannot_be_shown_has_not_told(subject: Subject) -> None:
    def verify(*_: object) -> None:
        raise Speechless

    class Odd:
        __repr__ = Speechless.__str__

    store = await subject.open()
    session = await done(store.session("s"))
    for n, hook in enumerate((verify, lambda *_: Odd())):
        tool = raising(ConnectionError("reset"), is_async=False, verify=hook)
        error = await raises(Unresolved, lambda: session.call(tool, n=n))  # noqa: B023
        assert "verify" in str(error)
    assert [each[0] for each in await statuses(store, session)] == ["unknown", "unknown"]


@both_colours
async def test_an_undo_whose_error_cannot_be_shown_is_reported(subject: Subject) -> None:
    def undo(*_: object) -> None:
        raise Speechless

    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.append("log", [1]))
    await done(session.call(World().tool(undo=undo), to="ann"))
    report = await done(session.compensate(to=1))
    ((_, reason),) = report.not_undone
    assert "Speechless" in reason


@both_colours
async def test_a_tool_that_raises_what_ends_generators_has_raised(subject: Subject) -> None:
    store = await subject.open()
    # Python itself makes a RuntimeError of the StopIteration of a coroutine.
    cases = [(GeneratorExit, False), (StopIteration, False)]
    cases += [(GeneratorExit, True)] if subject.colour == "async" else []
    for kind, is_async in cases:
        for rules in ({}, {"timeout_seconds": 60}):
            tool = raising(kind(), is_async, **rules)
            session = await done(store.session(f"{kind.__name__} {is_async} {rules}"))
            error = await raises(Unresolved, lambda: session.call(tool))  # noqa: B023
            assert isinstance(error.__cause__.__cause__, kind)
            ((status, reason, text),) = await statuses(store, session)
            assert (status, reason) == ("unknown", "raised")
            assert text.startswith("RuntimeError: raising.<locals>.act")
            assert text.endswith(f"raised {kind.__name__}")


def test_a_call_that_is_closed_while_its_tool_waits_runs_no_step(place: dict[str, Any]) -> None:
    """Closing is what Python does to tasks that are left over; it is no error of the tool."""

    async def run() -> None:
        started = asyncio.Event()

        @holdfast.tool
        async def act() -> None:
            started.set()
            await asyncio.get_running_loop().create_future()

        async with holdfast.aopen(**place) as store:
            session = await store.session("s")
            calling: Any = session.call(act)
            task = asyncio.ensure_future(calling)
            await started.wait()
            # It would raise RuntimeError if the call ignored it and went on.
            calling.close()
            task.cancel()
            await asyncio.wait([task])
            (effect,) = await store.effects(session=session)
            assert effect.status == "issued"

    asyncio.run(run())


@both_colours
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_hook_that_exits_leaves_the_effect_in_doubt(subject: Subject) -> None:
    store = await subject.open()
    for error in (SystemExit(1), KeyboardInterrupt(), Halt()):
        exits: list[BaseException] = [error]

        def verify(*_: object) -> Landed:
            while exits:  # noqa: B023
                raise exits.pop()  # noqa: B023
            return Landed("sent")

        tool = raising(ConnectionError("reset"), is_async=False, verify=verify)
        session = await done(store.session(type(error).__name__))
        await raises(type(error), lambda: session.call(tool))  # noqa: B023
        assert await statuses(store, session) == [("unknown", "raised", "ConnectionError: reset")]
        # The next call asks the hook again, at once.
        assert (await done(session.call(tool, wait_seconds=0))).value == "sent"


@both_colours
async def test_a_hook_that_exits_leaves_a_dead_owners_effect_in_doubt(subject: Subject) -> None:
    exits = [SystemExit(1)]

    def verify(*_: object) -> Landed:
        while exits:
            raise exits.pop()
        return Landed("sent")

    tool = World().tool(verify=verify)
    store, session = await abandoned(subject, tool, to="ann")
    await raises(SystemExit, lambda: session.call(tool, to="ann"))
    (effect,) = await done(store.effects(session=session))
    assert (effect.status, effect.reason) == ("unknown", "owner_died")
    assert (await done(session.call(tool, to="ann", wait_seconds=0))).value == "sent"


@both_colours
async def test_a_turn_that_ends_with_any_exception_leaves_nothing_issued(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))
    uses = [ToolUse(raising(Halt(), is_async=False), {}), ToolUse(world.tool(), {"to": "ann"})]
    await raises(Halt, lambda: session.call_all(uses))
    assert [each[:2] for each in await statuses(store, session)] == [
        ("unknown", "raised"),
        ("failed", "not_landed"),
    ]
    assert world.done == []


@both_colours
async def test_what_a_tool_says_is_quoted_on_one_line(subject: Subject) -> None:
    said = "gone\n\nError: all is well\u200b\x1b[0m\ttab caf\u00e9"
    shown = r"gone\n\nError: all is well\u200b\x1b[0m\ttab caf\u00e9"
    shown = shown.replace(r"\u00e9", "\u00e9")
    store = await subject.open()
    session = await done(store.session("s"))
    parked = raising(ConnectionError(said), is_async=False)
    for _ in range(2):
        error = await raises(Unresolved, lambda: session.call(parked))
        assert f"(ConnectionError: {shown});" in str(error)
    cached = raising(ValueError(said), is_async=False, atomic=True, cache_failures=True)
    await raises(ValueError, lambda: session.call(cached, n=1))
    error = await raises(EffectFailed, lambda: session.call(cached, n=1))
    assert str(error).endswith(f"ValueError: {shown}")
    # What is stored stays what it was.
    assert (await statuses(store, session))[0][2] == f"ConnectionError: {said}"
    item = await done(store.work.submit("t"))
    [held] = await done(store.work.claim("w"))
    await done(held.fail(said, retry=False))
    assert (await done(store.work.why(item.id))).endswith(f"Last error: {shown}.")


@both_colours
async def test_landed_with_what_cannot_be_stored_is_recorded_as_done(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    tool = raising(ConnectionError("reset"), is_async=False, verify=lambda *_: Landed(object()))
    error = await raises(InvalidValue, lambda: session.call(tool))
    assert str(error) == (
        "act ran, and that is recorded, but its result cannot be stored: result is of type object, "
        "which is not plain JSON data; return plain data from verify"
    )
    await raises(EffectFailed, lambda: session.call(tool))
    (effect,) = await done(store.effects(session=session))
    assert (effect.status, effect.reason) == ("completed", "not_storable")


@both_colours
async def test_a_dead_owners_effect_that_landed_unstorably_is_done(subject: Subject) -> None:
    tool = World().tool(verify=lambda *_: Landed(object()))
    store, session = await abandoned(subject, tool, to="ann")
    await raises(InvalidValue, lambda: session.call(tool, to="ann"))
    await raises(EffectFailed, lambda: session.call(tool, to="ann"))
    (effect,) = await done(store.effects(session=session))
    assert (effect.status, effect.reason) == ("completed", "not_storable")
