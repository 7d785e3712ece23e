"""Artifacts of attempts that were repeated, and of epochs that were left behind."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast import Artifact
from holdfast.testing.subject import Subject, done
from tests.checkpoints.colours import sql
from tests.conftest import InColour
from tests.peers.agents import claim, opened, planner, resume


async def begun(store: Any, agent: str = "maker") -> tuple[Any, Any]:
    """Claim the request of an agent, and drive its session."""
    item = await claim(store, agent, lease_seconds=30)
    return item, (await done(item.receive())).session


async def begun_again(store: Any, clock: Any) -> tuple[Any, Any]:
    """Let the lease of the attempt expire, and begin another."""
    clock.advance(31)
    await done(store.recover())
    clock.advance(60)
    await done(store.recover())
    return await begun(store)


async def asked(store: Any) -> Any:
    session = await planner(store)
    call = await done(session.ask("maker", timeout_seconds="never"))
    await done(session.pause())
    return call


async def sent_with(store: Any, call: Any) -> list[tuple[str, int, Any]]:
    answer = (await done(store.peer_call(call.id))).answer
    return [(each.name, each.version, each.data) for each in answer.artifacts]


def test_what_a_repeated_attempt_makes_again_replaces_what_the_first_made(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        call = await asked(store)
        _, session = await begun(store)
        await done(session.add_artifact("report", data="first of A"))
        await done(session.add_artifact("report", data="second of A"))
        await done(session.add_artifact("other", data="of A"))
        item, session = await begun_again(store, clock)
        assert (await done(session.add_artifact("report", data="first of B"))).version == 1
        assert (await done(session.add_artifact("report", data="second of B"))).version == 2
        await done(item.complete("made"))
        assert await sent_with(store, call) == [
            ("other", 1, "of A"),
            ("report", 1, "first of B"),
            ("report", 2, "second of B"),
        ]

    in_colour(case)


def test_what_a_repeated_attempt_makes_the_same_way_stays_and_can_be_followed(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        call = await asked(store)
        _, session = await begun(store)
        await done(session.add_artifact("report", data="first"))
        item, session = await begun_again(store, clock)
        assert (await done(session.add_artifact("report", data="first"))).version == 1
        assert (await done(session.add_artifact("report", data="second"))).version == 2
        await done(item.complete("made"))
        assert await sent_with(store, call) == [("report", 1, "first"), ("report", 2, "second")]

    in_colour(case)


def test_of_several_versions_a_repeated_attempt_leaves_only_its_own(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        call = await asked(store)
        _, session = await begun(store)
        await done(session.add_artifact("report", data="before the turn"))
        await done(session.save(step=1))
        for text in ("begun", "half", "begun"):
            await done(session.add_artifact("report", data=text))
        # The first version that it makes equals the newest one.
        item, session = await begun_again(store, clock)
        for text in ("begun", "half", "begun"):
            await done(session.add_artifact("report", data=text))
        await done(item.complete("made"))
        sent = [data for _, _, data in await sent_with(store, call)]
        assert sent == ["before the turn", "begun", "half", "begun"]

    in_colour(case)


def test_what_was_made_before_a_saved_turn_is_not_replaced(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        call = await asked(store)
        _, session = await begun(store)
        await done(session.add_artifact("report", data="draft"))
        await done(session.save(step="drafted"))
        await done(session.add_artifact("report", data="final of A"))
        item, session = await begun_again(store, clock)
        assert (await done(session.add_artifact("report", data="final of B"))).version == 2
        await done(item.complete("made"))
        assert await sent_with(store, call) == [("report", 1, "draft"), ("report", 2, "final of B")]

    in_colour(case)


def test_a_session_without_an_item_adds_versions_as_before(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        session = await planner(store)
        for text in ("one", "two", "three"):
            await done(session.add_artifact("report", data=text))
        assert [each.version for each in await done(session.artifacts())] == [1, 2, 3]

    in_colour(case)


def test_artifacts_of_an_epoch_that_was_left_do_not_go_out(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        top = await planner(store, "top")
        call = await done(top.ask("maker", timeout_seconds="never"))
        await done(top.pause())
        _, session = await begun(store)
        await done(session.add_artifact("early", data="kept"))
        kept = await done(session.save(step=1))
        await done(session.add_artifact("report", data="left behind"))
        await done(session.save(step=2))
        await done(session.add_artifact("late", data="left behind too"))
        peer = await done(session.ask("helper", timeout_seconds="never"))
        await done(session.pause())
        helper, at_helper = await begun(store, "helper")
        await done(at_helper.add_artifact("help", data="of a call left behind"))
        await done(helper.complete("helped"))
        item, resumption = await resume(store, "maker")
        assert [each.name for each in resumption.artifacts] == ["early", "report", "late", "help"]
        await done(resumption.session.rewind(kept.version))
        names = [each.name for each in await done(resumption.session.artifacts())]
        assert names == ["early"]
        # Versions go on: nobody takes the new one for the one that was left.
        again = await done(resumption.session.add_artifact("report", data="of the new epoch"))
        assert again.version == 2
        await done(item.complete("done"))
        assert await sent_with(store, call) == [
            ("early", 1, "kept"),
            ("report", 2, "of the new epoch"),
        ]
        assert (await done(store.peer_call(peer.id))).answer.artifacts[0].name == "help"

    in_colour(case)


def test_artifacts_of_an_epoch_that_was_left_are_in_no_later_resumption(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        call = await done(store.request("maker"))
        _, session = await begun(store)
        await done(session.add_artifact("early", data="kept"))
        kept = await done(session.save(step=1))
        await done(session.add_artifact("report", data="left behind"))
        await done(session.ask("helper", id="left"))
        await done(session.pause())
        await done(store.answer("left", 1, artifacts=[Artifact(name="of left", data=1)]))
        _, resumption = await resume(store, "maker")
        names = [each.name for each in resumption.artifacts]
        assert names == ["early", "report", "of left"]
        await done(resumption.session.rewind(kept.version))
        await done(resumption.session.add_artifact("report", data="of the new epoch"))
        await done(resumption.session.ask("helper", id="new"))
        await done(resumption.session.pause())
        await done(store.answer("new", 2, artifacts=[Artifact(name="of new", data=2)]))
        item, again = await resume(store, "maker")
        expected = [("early", "kept"), ("report", "of the new epoch"), ("of new", 2)]
        assert [(each.name, each.data) for each in again.artifacts] == expected
        assert [answer.result for answer in again.answers] == [2]
        await done(item.complete("made"))
        assert [(name, data) for name, _, data in await sent_with(store, call)] == expected

    in_colour(case)


def test_a_repeated_attempt_does_not_reuse_the_version_that_a_rewind_left_behind(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, clock = await opened(subject)
        call = await asked(store)
        _, session = await begun(store)
        kept = await done(session.save(step=1))
        await done(session.add_artifact("report", data="left behind"))
        await done(session.rewind(kept.version))
        await done(session.add_artifact("report", data="of A"))
        item, session = await begun_again(store, clock)
        assert (await done(session.add_artifact("report", data="of B"))).version == 2
        await done(session.rewind(kept.version))
        # Equal to one that was left behind, it is made again.
        assert (await done(session.add_artifact("report", data="of B"))).version == 3
        await done(item.complete("made"))
        assert await sent_with(store, call) == [("report", 3, "of B")]

    in_colour(case)


def test_a_repeated_resumption_leaves_what_was_made_before_the_pause(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        call = await done(store.request("maker"))
        _, session = await begun(store)
        await done(session.add_artifact("report", data="before the pause"))
        peer = await done(session.ask("helper"))
        await done(session.pause())
        await done(store.answer(peer.id, "helped"))
        item, resumption = await resume(store, "maker")
        await done(resumption.session.add_artifact("report", data="of A"))
        await done(item.fail("again", delay_seconds=0))
        item, resumption = await resume(store, "maker")
        await done(resumption.session.add_artifact("report", data="of B"))
        await done(item.complete("made"))
        assert await sent_with(store, call) == [
            ("report", 1, "before the pause"),
            ("report", 2, "of B"),
        ]

    in_colour(case)


def test_a_call_that_is_made_again_after_a_rewind_sends_its_artifacts_again(
    in_colour: InColour,
) -> None:
    async def case(subject: Subject) -> None:
        store, _ = await opened(subject)
        call = await done(store.request("maker"))
        item, session = await begun(store)
        first = await done(session.save(step=1))
        for name in ("kept", "left"):
            made = [Artifact(name=name, data=name)]
            await done(session.ask("helper", id=name))
            await done(store.answer(name, "helped", artifacts=made))
        await done(session.rewind(first.version))
        await done(session.ask("helper", id="kept"))
        second = await done(session.save(step=2))
        await done(session.ask("helper", id="left"))
        await done(session.rewind(second.version))
        await done(item.complete("made"))
        assert await sent_with(store, call) == [("kept", 1, "kept")]

    in_colour(case)


ENDS: dict[str, tuple[str, Any]] = {
    # How a session whose artifacts cannot go out ends, and what its caller is told.
    "it fails": ("error", lambda store, item: item.fail("no", retry=False)),
    "it is ended": ("error", lambda store, item: item.session.end()),
    "it is cancelled": ("cancelled", lambda store, item: store.find_session("r").cancel()),
    "it is deleted": ("cancelled", lambda store, item: store.find_session("r").delete(force=True)),
    "somebody answers": ("error", lambda store, item: store.answer("r", "no", status="error")),
}


@pytest.mark.parametrize("damage", ["too large", "overwritten"])
@pytest.mark.parametrize("end", ENDS)
def test_artifacts_that_cannot_go_out_keep_no_session_from_ending(
    end: str, damage: str, place: dict[str, Any]
) -> None:
    limits = holdfast.Limits(value_bytes=10_000)
    with holdfast.open(**place, limits=limits, durability="normal") as store:
        asker = store.session("asker", agent="planner")
        asker.pause(asks=[holdfast.Ask("peer", id="r", timeout_seconds="never")])
        [item] = store.work.claim("w", queues="agent:peer")
        session = item.receive().session
        for number in range(3):
            session.add_artifact(f"a{number}", data="x" * 5_000)
        if damage == "overwritten":
            sql(store, "UPDATE hf_artifacts SET data = CAST('x' AS BLOB) WHERE name = 'a1'")
        error = holdfast.LimitExceeded if damage == "too large" else holdfast.CorruptRecord
        with pytest.raises(error):
            item.complete("done")
        assert store.peer_call("r").state == "open"
        status, ends = ENDS[end]
        ends(store, item)
        [resumed] = store.work.claim("w", queues="agent:planner")
        [answer] = resumed.resume().answers
        assert (answer.status, answer.artifacts) == (status, ())


def test_artifacts_that_cannot_go_out_do_not_stop_the_sweep(place: dict[str, Any]) -> None:
    limits, clock = holdfast.Limits(value_bytes=10_000), holdfast.VirtualClock()
    with holdfast.open(**place, limits=limits, clock=clock, durability="normal") as store:
        store.request("peer", request_id="r")
        other = store.request("nobody", request_id="other", timeout_seconds=3_600)
        for _ in range(4):
            [item] = store.work.claim("w", queues="agent:peer", lease_seconds=10)
            session = item.receive().session
            for number in range(3):
                session.add_artifact(f"a{number}", data="x" * 5_000)
            for _ in range(2):
                clock.advance(900)
                store.recover()
        call = store.peer_call("r")
        assert call.answer is not None
        assert (call.state, call.answer.artifacts) == ("error", ())
        assert store.peer_call(other.id).state == "timeout"
