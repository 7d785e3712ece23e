"""Several calls at once: one commit for the intents, and each is known or in doubt by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import groupby, product
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, Result, ToolUse
from holdfast.effects import recorder, turns
from holdfast.kernel.driver import Hooks, Point
from holdfast.kernel.operation import Call
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.client.served import embedded


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes wait for each other however slow the machine is."""
    monkeypatch.setattr(recorder, "HOLD_SECONDS", 3600)
    monkeypatch.setattr(turns, "LOOK_SECONDS", 3600)


class Desk:
    """Tools that say what they did, and what the store knew when they did it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.look: Any = None
        self.seen: list[list[str]] = []

        @holdfast.tool(effect="mutate")
        def send(to: str) -> str:
            """Send something."""
            self.done.append(to)
            if self.look is not None:
                self.seen.append(self.look())
            if to.startswith("bad"):
                raise LookupError(to)
            if to == "stop":
                raise KeyboardInterrupt
            return f"sent {to}"

        @holdfast.tool(effect="read")
        def read(what: str) -> str:
            """Read something."""
            self.done.append(what)
            return f"read {what}"

        self.send, self.read = send, read

    def sends(self, *names: str) -> list[ToolUse]:
        return [ToolUse(self.send, {"to": name}, f"call {name}") for name in names]


def outcomes(answers: list[Any]) -> list[Any]:
    return [a.value if isinstance(a, Result) else type(a).__name__ for a in answers]


@both_colours
async def test_each_call_has_its_result_and_its_row_in_order(subject: Subject) -> None:
    store, desk = await subject.open(), Desk()
    session = await done(store.session("s"))
    uses = desk.sends("a", "b")
    uses.insert(1, ToolUse(desk.read, {"what": "x"}, "call x"))
    answers = await done(session.call_all(uses))
    assert outcomes(answers) == ["sent a", "read x", "sent b"]
    assert [answer.replayed for answer in answers] == [False] * 3
    rows = await done(store.effects(session="s"))
    assert {(row.call_id, row.status) for row in rows} == {
        ("call a", "completed"),
        ("call x", "completed"),
        ("call b", "completed"),
    }
    again = await done(session.call_all(uses))
    assert outcomes(again) == outcomes(answers)
    assert all(answer.replayed for answer in again)
    assert desk.done == ["a", "x", "b"]


@both_colours
async def test_all_intents_are_durable_before_the_first_tool_runs(subject: Subject) -> None:
    store, desk = await subject.open(), Desk()
    session = await done(store.session("s"))

    def look() -> list[str]:
        with holdfast.open(**subject.place) as other:
            return [effect.status for effect in other.effects(session="s")]

    desk.look = look
    await done(session.call_all(desk.sends("a", "b", "c")))
    assert desk.seen == [["issued"] * 3] * 3
    assert look() == ["completed"] * 3


@both_colours
async def test_the_intents_and_the_outcomes_cost_one_commit_each(subject: Subject) -> None:
    commits: list[str] = []

    def probe(point: Point) -> None:
        if point.boundary == "commit" and point.moment == "after":
            commits.append(point.call)

    store, desk = await subject.open(hooks=Hooks(probe=probe)), Desk()
    session = await done(store.session("s"))
    await done(session.call(desk.send, to="first"))
    commits.clear()
    await done(session.call_all(desk.sends(*"abcdefgh")))
    assert len(commits) == 2


@both_colours
async def test_what_one_call_raises_is_its_answer_and_the_others_go_on(subject: Subject) -> None:
    store, desk = await subject.open(), Desk()
    session = await done(store.session("s"))
    answers = await done(session.call_all(desk.sends("a", "bad", "b")))
    assert outcomes(answers) == ["sent a", "Unresolved", "sent b"]
    rows = {row.call_id: row.status for row in await done(store.effects(session="s"))}
    assert rows == {"call a": "completed", "call bad": "unknown", "call b": "completed"}


@both_colours
async def test_equal_calls_run_once_and_do_not_wait_for_each_other(subject: Subject) -> None:
    store, desk = await subject.open(), Desk()
    session = await done(store.session("s"))
    uses = [ToolUse(desk.send, {"to": "a"}, "one"), ToolUse(desk.send, {"to": "a"}, "two")]
    first, second = await done(session.call_all(uses, wait_seconds=0))
    assert (first.replayed, second.replayed) == (False, True)
    assert desk.done == ["a"]


WRITTEN = [list(turn) for size in range(1, 5) for turn in product("ab", repeat=size)]


@both_colours
async def test_a_turn_of_writes_ends_as_if_they_were_called_one_after_the_other(
    subject: Subject,
) -> None:
    store, written = await subject.open(), list[str]()

    @holdfast.tool(effect="write")
    def put(text: str) -> None:
        written.append(text)

    for number, (before, turn) in enumerate(product(["", "a", "ab"], WRITTEN)):
        session = await done(store.session(f"s{number}"))
        written.clear()
        for text in before:
            await done(session.call(put, text=text))
        uses = [ToolUse(put, {"text": text}, f"c{at}") for at, text in enumerate(turn)]
        answers = await done(session.call_all(uses))
        assert not [answer for answer in answers if isinstance(answer, Exception)]
        # Equal writes in a row are one; a write after another one runs, whatever came before it.
        assert written == [text for text, _ in groupby([*before, *turn])], (before, turn)
        await done(session.call_all(uses))
        assert written == [text for text, _ in groupby([*before, *turn])], (before, turn)


@both_colours
async def test_a_read_of_the_latest_is_not_older_than_the_writes_of_its_turn(
    subject: Subject,
) -> None:
    store, file = await subject.open(), {"text": ""}
    session = await done(store.session("s"))

    @holdfast.tool(effect="write")
    def put(text: str) -> None:
        file["text"] = text

    @holdfast.tool(effect="read", dedupe="latest")
    def get() -> str:
        return file["text"]

    uses = [ToolUse(get, {}), ToolUse(put, {"text": "a"}), ToolUse(put, {"text": "b"})]
    assert outcomes(await done(session.call_all([*uses, ToolUse(get, {})]))) == [
        "",
        None,
        None,
        "b",
    ]
    assert (await done(session.call(get))).value == "b"


CHANGES: dict[str, tuple[Callable[[holdfast.Session], Any], str | None]] = {
    "cancelled": (lambda session: session.cancel(), "SessionEnded"),
    "ended": (lambda session: session.end("completed"), "SessionEnded"),
    "deleted": (lambda session: session.delete(force=True), "SessionNotFound"),
    "driven": (lambda session: session.drive("other", 600), "SessionBusy"),
    "rewound": (lambda session: session.rewind(1), None),
}


@both_colours
async def test_a_call_that_is_not_allowed_any_more_when_its_time_comes_is_not_made(
    subject: Subject,
) -> None:
    store = await subject.open()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "LOOK_SECONDS", 0)
        for name, (change, refusal) in CHANGES.items():
            await _change_during_the_first(store, subject.place, name, change, refusal)


async def _change_during_the_first(
    store: Any, place: dict[str, Any], name: str, change: Callable[[Any], Any], refusal: str | None
) -> None:
    def look() -> list[str]:
        if desk.done == [f"{name} a"]:
            with holdfast.open(**place) as other:
                kept.append(change(other.find_session(name)))
        return []

    desk, kept, answers = Desk(), list[Any](), list[Any]()
    desk.look = look
    session = await done(store.session(name))
    await done(session.save(x=1))
    before = len(await done(store.effects(limit=1000)))
    try:
        answers = await done(session.call_all(desk.sends(*(f"{name} {each}" for each in "abc"))))
    except holdfast.HoldfastError as error:
        answers = [error]
    made = [each.removeprefix(f"{name} ") for each in desk.done]
    rows = [row.reason for row in (await done(store.effects(limit=1000)))[before:]]
    if refusal is None:
        assert outcomes(answers) == ["LeaseLost", f"sent {name} b", f"sent {name} c"]
        assert made == ["a", "b", "c"]
        assert rows == ["rewound", "not_landed", "not_landed", None, None]
    else:
        assert outcomes(answers)[-1] == refusal
        assert made == ["a"]
        assert rows == [None, "not_landed", "not_landed"]


@both_colours
async def test_a_tool_that_ends_the_session_is_the_last_of_its_turn(subject: Subject) -> None:
    store, desk = await subject.open(), Desk()
    session = await done(store.session("s"))
    end = Call(holdfast.Session.end, session, ("completed",))
    desk.look = lambda: store.runtime.run(end)
    await raises(holdfast.SessionEnded, lambda: session.call_all(desk.sends("a", "b")))
    assert desk.done == ["a"]


def test_an_interrupt_records_what_has_returned_and_closes_what_has_not_begun(
    place: dict[str, Any],
) -> None:
    desk = Desk()
    with holdfast.open(**place) as store:
        session = store.session("s")
        uses = desk.sends("a", "stop", "b", "c")
        with pytest.raises(KeyboardInterrupt):
            session.call_all(uses)
        assert desk.done == ["a", "stop"]
        rows = {row.call_id: (row.status, row.reason) for row in store.effects(session="s")}
        assert rows == {
            "call a": ("completed", None),
            "call stop": ("unknown", "cancelled"),
            "call b": ("failed", "not_landed"),
            "call c": ("failed", "not_landed"),
        }
        assert outcomes(session.call_all([uses[0], *uses[2:]])) == ["sent a", "sent b", "sent c"]
    assert desk.done == ["a", "stop", "b", "c"]


def test_a_cancelled_task_records_what_has_returned_and_closes_what_has_not_begun(
    place: dict[str, Any],
) -> None:
    async def run() -> None:
        ran: list[str] = []
        begun = asyncio.Event()

        @holdfast.tool(effect="mutate")
        async def send(to: str) -> str:
            """Send something."""
            ran.append(to)
            if to == "b":
                begun.set()
                await asyncio.Event().wait()
            return to

        async with holdfast.aopen(**place) as store:
            session = await store.session("s")
            uses = [ToolUse(send, {"to": name}, name) for name in "abc"]
            task = asyncio.ensure_future(session.call_all(uses))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            rows = {row.call_id: row.status for row in await store.effects(session="s")}
            assert rows == {"a": "completed", "b": "unknown", "c": "failed"}
            assert ran == ["a", "b"]

    asyncio.run(run())


@both_colours
async def test_bad_input_is_refused_before_anything_is_written(subject: Subject) -> None:
    store, desk = await subject.open(), Desk()
    session = await done(store.session("s"))
    good = desk.sends("a")
    for wrong in (
        [*good, (desk.send, {"to": "b"})],
        [*good, ToolUse(desk.send, {"nobody": "b"})],
        [*good, ToolUse(desk.send, {"to": {1, 2}})],
    ):
        await raises(holdfast.HoldfastError, partial(session.call_all, wrong))
    assert await done(session.call_all([])) == []
    assert (desk.done, await done(store.effects(session="s"))) == ([], [])


def test_an_async_tool_in_a_sync_store_is_refused_before_anything_is_written(
    place: dict[str, Any],
) -> None:
    @holdfast.tool(effect="mutate")
    async def act() -> None:
        """Do something."""

    with holdfast.open(**place) as store:
        session = store.session("s")
        with pytest.raises(InvalidArgument, match="aopen"):
            session.call_all([*Desk().sends("a"), ToolUse(act, {})])
        assert store.effects(session="s") == []


@both_colours
async def test_what_returned_is_recorded_and_told_also_if_the_session_was_deleted(
    subject: Subject,
) -> None:
    store, desk = await subject.open(), Desk()
    root = await done(store.session("root"))
    child = await done(store.session("child", parent=root))

    def deleted() -> list[str]:
        if desk.done[-1] != "b":
            return []
        if "serve" in subject.place:
            embedded(store).find_session("child").delete(force=True)
            return []
        with holdfast.open(**subject.place) as other:
            other.find_session("child").delete(force=True)
        return []

    desk.look = deleted
    assert outcomes(await done(child.call_all(desk.sends("a", "b")))) == ["sent a", "sent b"]
    effects = await done(store.effects())
    assert [effect.status for effect in effects] == ["completed", "completed"]
    events = await done(store.events("root"))
    told = [event.data["effect_id"] for event in events if event.kind == "effect_completed"]
    assert told == [effect.id for effect in effects]
