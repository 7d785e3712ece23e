"""An approval is for one call in one epoch, and is consumed with the intent of its effect."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast import NotDone, NotLanded
from holdfast.effects.calls import PreparedCall
from holdfast.effects.requests import Approval, ApprovalUsed
from holdfast.effects.tools import Tool
from holdfast.effects.turns import call_all
from holdfast.kernel.flow import Flow, run_flow
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours, sql

FIRST, SECOND = Approval("s", 1, 1), Approval("s", 2, 1)
CALLERS = 8


class Mails:
    """A tool that counts its calls, and raises what it is told to."""

    def __init__(self, **rules: Any) -> None:
        self.sent: list[str] = []
        self.error: Exception | None = NotDone("the receiver refused")

        def mail(to: str) -> str:
            self.sent.append(to)
            if self.error is not None:
                raise self.error
            return to

        self.tool: Tool[..., Any] = holdfast.tool(effect="mutate", **rules)(mail)


def approved(session: Any, mails: Mails, approval: Approval, to: str = "ann") -> PreparedCall:
    prepared: PreparedCall = session._prepare(mails.tool, {"to": to}, f"call to {to}")
    prepared.request.approval = approval
    return prepared


def run(session: Any, steps: Flow[Any]) -> Any:
    if session.runtime.is_async:
        return session.runtime.run_flow(steps)
    return run_flow(session.runtime.driver.twin(), steps)


async def consumed(store: Any) -> list[tuple[Any, ...]]:
    found = await done(sql(store, "SELECT approval, attempt FROM hf_effects ORDER BY number"))
    return [(row["approval"], row["attempt"]) for row in found]


@both_colours
async def test_a_failed_effect_has_consumed_its_approval_and_needs_another(
    subject: Subject,
) -> None:
    store, mails = await subject.open(), Mails()
    session = await done(store.session("s"))
    await raises(NotDone, lambda: run(session, approved(session, mails, FIRST).run()))
    for _ in range(2):
        await raises(ApprovalUsed, lambda: run(session, approved(session, mails, FIRST).run()))
    assert (mails.sent, await consumed(store)) == (["ann"], [("s 1", 1)])
    mails.error = None
    result = await done(run(session, approved(session, mails, SECOND).run()))
    assert (result.value, mails.sent) == ("ann", ["ann", "ann"])
    # What is completed needs no approval to be replayed.
    result = await done(run(session, approved(session, mails, FIRST).run()))
    assert (result.replayed, len(mails.sent)) == (True, 2)
    assert await consumed(store) == [("s 1", 1), ("s 2", 2)]


@both_colours
async def test_an_effect_that_did_not_land_is_run_again_under_its_own_approval(
    subject: Subject,
) -> None:
    mails = Mails(verify=lambda arguments, idempotency_key: NotLanded(), settle_seconds=0)
    store, mails.error = await subject.open(), OSError("no connection")
    session = await done(store.session("s"))
    await raises(OSError, lambda: run(session, approved(session, mails, FIRST).run()))
    mails.error = None
    await done(run(session, approved(session, mails, FIRST).run()))
    assert await consumed(store) == [("s 1", 1), ("s 1", 2)]
    assert len({each.idempotency_key for each in await done(store.effects())}) == 1


@both_colours
async def test_an_approval_does_not_count_after_a_rewind(subject: Subject) -> None:
    store, mails = await subject.open(), Mails()
    mails.error = None
    session = await done(store.session("s"))
    for number in range(2):
        await done(session.save(n=number))
    await done(session.rewind(1))
    await raises(ApprovalUsed, lambda: run(session, approved(session, mails, FIRST).run()))
    assert (mails.sent, await consumed(store)) == ([], [])
    await done(run(session, approved(session, mails, Approval("s", 4, 2)).run()))
    assert mails.sent == ["ann"]


@both_colours
async def test_of_calls_made_together_only_the_one_without_its_approval_is_not_run(
    subject: Subject,
) -> None:
    store, mails = await subject.open(), Mails()
    session = await done(store.session("s"))
    await raises(NotDone, lambda: run(session, approved(session, mails, FIRST).run()))
    mails.error = None
    calls = [
        approved(session, mails, Approval("s", 3, 1), "bob"),
        approved(session, mails, FIRST),
        approved(session, mails, Approval("s", 4, 1), "cid"),
    ]
    bob, ann, cid = await done(run(session, call_all(calls)))
    assert isinstance(ann, ApprovalUsed)
    assert (bob.value, cid.value, mails.sent) == ("bob", "cid", ["ann", "bob", "cid"])


@both_colours
async def test_of_callers_at_once_in_two_stores_one_uses_the_approval(
    subject: Subject,
) -> None:
    mails = Mails()
    stores = [await subject.open() for _ in range(2)]
    sessions = [await done(store.session("s")) for store in stores]

    async def caught(result: Any) -> Any:
        try:
            return await done(result())
        except (NotDone, ApprovalUsed) as error:
            return error

    def call(number: int) -> Any:
        session = sessions[number % 2]
        return run(session, approved(session, mails, FIRST).run())

    def tried(number: int) -> Any:
        if subject.colour == "async":
            return caught(lambda: call(number))
        try:
            return call(number)
        except (NotDone, ApprovalUsed) as error:
            return error

    found = await subject.together([partial(tried, number) for number in range(CALLERS)])
    assert sorted(type(each).__name__ for each in found) == [
        *["ApprovalUsed"] * (CALLERS - 1), "NotDone",
    ]  # fmt: skip
    assert (mails.sent, await consumed(stores[0])) == (["ann"], [("s 1", 1)])


def test_a_consumed_approval_stays_consumed_in_another_store(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    mails = Mails()

    def attempt(session: Any) -> str:
        try:
            run(session, approved(session, mails, FIRST).run())
        except (NotDone, ApprovalUsed) as error:
            return type(error).__name__
        return "ran"

    with holdfast.open(**place) as store, holdfast.open(**other) as target:
        session = store.session("s")
        assert attempt(session) == "NotDone"
        store.export(tmp_path / "file")
        target.import_sessions(tmp_path / "file")
        assert attempt(target.find_session("s")) == "ApprovalUsed"
        assert mails.sent == ["ann"]
