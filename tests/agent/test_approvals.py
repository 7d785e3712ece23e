"""An agent whose call needs a person: its session waits, and goes on by itself once decided."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.agent import Agent, call, read_transcript
from holdfast.errors import ApprovalNeeded
from holdfast.mesh import Service
from holdfast.testing.subject import Subject, done, raises
from tests.agent.helpers import World, run
from tests.checkpoints.colours import both_colours

SCRIPT = [
    [call("look", city="Oslo"), call("mail", to="ann"), call("mail", to="bob")],
    "Sent.",
]


def permit(made: Any, known: Any) -> Any:
    return ("ask", "it is a mail") if made.name == "mail" else "allow"


def agent(session: Any, world: World) -> Agent:
    return Agent(session, world.model(SCRIPT), tools=world.tools(), permit=permit)


def results(session: Any, latest: Any) -> list[bool]:
    messages = read_transcript(latest.channels["transcript"])
    return [result.is_error for message in messages for result in message.results]


@both_colours
async def test_what_was_done_before_the_question_is_kept_and_the_session_waits(
    subject: Subject,
) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session("s", agent="mailer"))
    error = await raises(ApprovalNeeded, lambda: run(agent(session, world), "mail them"))
    [pause] = await done(store.pauses(reason="approval", state="waiting"))
    assert (pause.id, pause.question["tool"]) == (error.pause_id, "mail")
    assert list(pause.question) == ["tool", "arguments", "reason", "block_id"]
    info = await done(session.info())
    assert (info.status, info.is_driven, world.count("look")) == ("waiting", False, 1)
    # Run again before the decision, it says so again, and asks nobody twice.
    again = await raises(ApprovalNeeded, lambda: run(agent(session, world)))
    assert again.block_id == error.block_id
    assert len(await done(store.pauses())) == 1
    await done(store.approve(pause.id, by="ann"))
    error = await raises(ApprovalNeeded, lambda: run(agent(session, world)))
    assert (world.count("look"), world.count("mail")) == (1, 1)


def test_a_service_goes_on_by_itself_after_each_decision(
    place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)

    def on_request(request: holdfast.PeerRequest[Any]) -> str:
        return agent(request.session, world).run(request.input).text

    def on_resume(resumption: holdfast.Resumption[Any]) -> str:
        return agent(resumption.session, world).run().text

    service = Service("mailer", on_request, on_resume)
    with holdfast.open(**place, durability="normal") as store:
        store.request("mailer", "mail them", request_id="r1")
        for decide in (store.approve, store.reject):
            service.worker(store, poll_seconds=0.05).run(until_empty=True)
            [pause] = store.pauses(reason="approval", state="waiting")
            assert store.find_session("r1").info().status == "waiting"
            decide(pause.id, by="ann")
        service.worker(store, poll_seconds=0.05).run(until_empty=True)
        answer = store.peer_call("r1").answer
        assert answer is not None
        assert (answer.status, answer.result) == ("ok", "Sent.")
        assert (world.count("look"), world.count("mail ann"), world.count("mail bob")) == (1, 1, 0)
        session = store.find_session("r1")
        assert results(session, session.latest()) == [False, False, True]


@pytest.mark.parametrize("way", ["rewind", "fork"])
def test_an_approval_counts_neither_after_a_rewind_nor_in_a_fork(
    way: str, place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("s", agent="mailer")
        with pytest.raises(ApprovalNeeded):
            agent(session, world).run("mail them")
        [pause] = store.pauses(state="waiting")
        store.approve(pause.id, by="ann")
        asked = next(each.version for each in session.history() if each.kind == "llm_response")
        if way == "rewind":
            session.rewind(asked)
        else:
            session = session.fork(session.info().version, id="fork")
        with pytest.raises(ApprovalNeeded):
            agent(session, world).run()
        assert world.count("mail") == 0
        assert store.pauses(state="waiting")[0].session_id == session.id
