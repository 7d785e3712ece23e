"""Operations inside `store.run`: one that fails is written whole or not at all."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import holdfast
from holdfast import Ask, InvalidArgument, RequestMismatch, Submission, VersionConflict
from holdfast.feed import event
from holdfast.kernel.operation import (
    AfterCommit,
    C,
    Command,
    Deferred,
    Lock,
    Op,
    Query,
    operation,
)
from holdfast.testing.nouns import ADD, Counter, Setup
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import both_colours


@both_colours
async def test_what_an_operation_wrote_before_it_failed_is_not_committed(subject: Subject) -> None:
    store = await subject.open()
    await done(store.work.submit("report", 1, id="taken"))

    def submit(tx: holdfast.Transaction) -> holdfast.Op[str]:
        yield from tx.work.submit("before", 0)
        try:
            yield from tx.work.submit_many([Submission("mail", 1), Submission("x", 2, id="taken")])
        except RequestMismatch:
            return "caught"
        return "done"

    with pytest.raises(RequestMismatch) as caught:
        await done(store.run(submit))
    assert "rolled back" in "".join(caught.value.__notes__)
    assert [item.type for item in await done(store.work.list())] == ["report"]


@both_colours
async def test_a_pause_that_is_refused_leaves_nothing_behind(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("asker", agent="a"))
    await done(store.session("other"))

    def pause(tx: holdfast.Transaction) -> holdfast.Op[None]:
        try:
            yield from tx.within(session).pause(asks=[Ask("b", 1), Ask("b", 2, id="other")])
        except InvalidArgument:
            return

    with pytest.raises(InvalidArgument):
        await done(store.run(pause))
    assert (await done(session.info())).status == "active"
    assert await done(session.asks()) == []


@both_colours
async def test_a_completion_that_is_refused_leaves_the_item_and_all_that_came_with_it(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(store.work.submit("report", 1, id="taken"))
    await done(store.work.submit("parse", session=session))
    [item] = await done(store.work.claim("w", queues="parse"))
    begun = await done(item.session.begin("pdf", {"page": 1}, "c1", item=item))

    def complete(tx: Any) -> Any:
        then = [Submission("summarize", 1), Submission("x", 2, id="taken")]
        try:
            yield from tx.work.within(item).complete(7, effect=(begun, 1), then=then)
        except RequestMismatch:
            return

    with pytest.raises(RequestMismatch):
        await done(store.run(complete))
    assert [effect.status for effect in await done(store.effects(session="s"))] == ["issued"]
    assert await done(store.work.list(type="summarize")) == []
    assert (await done(store.work.get(item.id))).status == "in_progress"


@both_colours
async def test_an_error_of_an_operation_that_wrote_nothing_can_be_caught(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(n=1))
    await done(session.state.set("k", 1))
    await done(store.work.submit("report", 1, id="taken"))

    def go_on(tx: holdfast.Transaction) -> holdfast.Op[list[str]]:
        caught = []
        try:
            yield from tx.state(session).set("k", 2, if_version=7)
        except VersionConflict:
            caught.append("set")
        try:
            yield from tx.within(session).save(n=2, expected_version=7)
        except VersionConflict:
            caught.append("save")
        try:
            yield from tx.work.submit("x", 2, id="taken")
        except RequestMismatch:
            caught.append("submit")
        yield from tx.state(session).set("k", 3)
        return caught

    assert await done(store.run(go_on)) == ["set", "save", "submit"]
    assert await done(session.state.get("k")) == 3


class Stop(BaseException):
    """An interrupt, whenever it comes."""


class Interrupted(Counter[C]):
    """A counter whose caller is interrupted after it was written."""

    @operation
    def add_and_stop(self) -> Op[None]:
        yield from Counter.add(self)
        raise Stop


@both_colours
async def test_an_interrupt_that_is_caught_leaves_no_half_of_an_operation(subject: Subject) -> None:
    store = await subject.open()
    await done(Setup(store).install())
    await done(Counter(store).plant())

    def catch(tx: holdfast.Transaction) -> holdfast.Op[None]:
        with contextlib.suppress(Stop):
            yield from Interrupted(tx).add_and_stop()

    with pytest.raises(Stop):
        await done(store.run(catch))
    assert await done(Counter(store).value()) == 0


class Failing(Counter[C]):
    """A counter that fails after one command."""

    @operation
    def fail_after(self, command: Command) -> Op[None]:
        yield Lock(self.root_id)
        yield command
        raise LookupError


@both_colours
async def test_what_is_to_be_written_at_the_end_counts_as_written(subject: Subject) -> None:
    store = await subject.open()
    await done(Setup(store).install())
    await done(Counter(store).plant())

    def catch(tx: holdfast.Transaction, command: Command) -> holdfast.Op[str]:
        try:
            yield from Failing(tx).fail_after(command)
        except LookupError:
            return "caught"
        return "done"

    found_nothing = "UPDATE hf_test_counters SET value = 9 WHERE id = 'nobody' RETURNING id"
    assert await done(store.run(catch, Query(found_nothing, {}))) == "caught"
    root = Counter(store).root_id
    for command in (
        event(store.runtime.codec, root, root, "counter_added", {}),
        Deferred([Query(ADD, {"id": root, "amount": 1})]),
        AfterCommit(lambda: None),
        Query(found_nothing.partition(" RETURNING")[0], {}),
    ):
        with pytest.raises(LookupError):
            await done(store.run(catch, command))
    assert await done(Counter(store).value()) == 0
    assert await done(store.events(root)) == []
