"""An agent whose call needs a person: its session waits, and goes on by itself once decided."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from functools import partial
from typing import Any

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each child.
from holdfast.agent import Agent, Called, Peer, call, read_transcript
from holdfast.effects.tools import tool
from holdfast.errors import ApprovalNeeded, NotDone, SessionBusy, SessionEnded, SessionWaiting
from holdfast.mesh import Service
from holdfast.testing.crashes import CrashPoints
from holdfast.testing.subject import Colour, Subject, done, raises
from tests.agent.helpers import World, run
from tests.checkpoints.colours import both_colours, sql
from tests.crash.children import run as run_child
from tests.work.working import unhurried

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
    assert list(pause.question) == ["tool", "arguments", "reason", "block_id", "request"]
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


ONE = [call("mail", to="ann"), "Sent."]


class Killed(BaseException):
    """The process ends here, as far as the run is concerned."""


def asker(session: Any, world: World, script: Any = ONE, **rules: Any) -> Agent:
    given = {"tools": world.tools(), "permit": lambda made, known: "ask", **rules}
    return Agent(session, world.model(script), **given)


def dies_when_called(event: Any) -> None:
    """The outcome of the call is in the ledger, and its result is not in the transcript yet."""
    if isinstance(event, Called):
        raise Killed


def declined_once(tried: list[str]) -> Any:
    """Return a tool whose first call fails, and is known to have done nothing."""

    @tool(effect="mutate")
    def charge(to: str) -> str:
        tried.append(to)
        if len(tried) == 1:
            raise NotDone("declined")
        return "paid"

    return charge


async def approve_next(store: Any) -> Any:
    """Approve the only thing that waits, and return what it was."""
    [pause] = await done(store.pauses(reason="approval", state="waiting"))
    await done(store.approve(pause.id, by="ann"))
    return pause


async def change_transcript(session: Any, old: str, new: str) -> None:
    """Replace a text in the stored transcript; all ids stay."""
    latest = await done(session.latest())
    text = json.dumps(latest["transcript"]).replace(json.dumps(old), json.dumps(new))
    await done(session.save(transcript=json.loads(text)))


async def requests_approved(store: Any) -> list[tuple[str, int]]:
    """The digests and attempts of the effects that were issued under an approval."""
    asked = "SELECT request_digest, attempt FROM hf_effects WHERE approval IS NOT NULL"
    found = await done(sql(store, f"{asked} ORDER BY number"))
    return [(row["request_digest"], row["attempt"]) for row in found]


@both_colours
async def test_an_approval_names_the_request_of_the_effect_that_consumes_it(
    subject: Subject,
) -> None:
    world, store = World(subject.directory), await subject.open()
    session = await done(store.session("s", agent="mailer"))
    error = await raises(ApprovalNeeded, lambda: run(asker(session, world), "mail ann"))
    pause = await approve_next(store)
    assert (await run(asker(session, world))).text == "Sent."
    assert pause.question["request"] == error.request
    assert await requests_approved(store) == [(error.request, 1)]


@both_colours
async def test_an_approved_call_with_other_arguments_is_asked_about_anew(subject: Subject) -> None:
    world, store = World(subject.directory), await subject.open()
    session = await done(store.session("s", agent="mailer"))
    await raises(ApprovalNeeded, lambda: run(asker(session, world), "mail ann"))
    first = await approve_next(store)
    await done(session.resumption())
    await change_transcript(session, "ann", "eve")
    await raises(ApprovalNeeded, lambda: run(asker(session, world)))
    assert world.count("mail") == 0
    second = await approve_next(store)
    assert second.question["arguments"] == {"to": "eve"}
    assert second.question["block_id"] == first.question["block_id"]
    assert (await run(asker(session, world))).text == "Sent."
    assert (world.count("mail ann"), world.count("mail eve")) == (0, 1)


@both_colours
async def test_a_secret_that_was_not_shown_is_part_of_what_was_approved(subject: Subject) -> None:
    """The question shows no secret, so two requests can look the same to a person."""
    tokens = [f"ghp_{letter * 36}" for letter in "ab"]
    used: list[str] = []

    @tool(effect="mutate")
    def push(token: str) -> str:
        used.append(token)
        return "pushed"

    world, store = World(subject.directory), await subject.open()
    session = await done(store.session("s", agent="mailer"))
    script = [call("push", token=tokens[0]), "Pushed."]

    def pusher() -> Agent:
        return asker(session, world, script, tools=[push])

    await raises(ApprovalNeeded, lambda: run(pusher(), "push"))
    first = await approve_next(store)
    await done(session.resumption())
    await change_transcript(session, *tokens)
    await raises(ApprovalNeeded, lambda: run(pusher()))
    second = await approve_next(store)
    assert first.question["arguments"] == second.question["arguments"]
    assert (await run(pusher())).text == "Pushed."
    assert used == tokens[1:]


@both_colours
async def test_after_a_failed_attempt_a_killed_run_asks_anew(subject: Subject) -> None:
    tried: list[str] = []
    charge = declined_once(tried)
    world, store = World(subject.directory), await subject.open()
    session = await done(store.session("s", agent="payer"))
    script = [call("charge", to="ann"), "Paid."]

    def payer(**rules: Any) -> Agent:
        return asker(session, world, script, tools=[charge], **rules)

    await raises(ApprovalNeeded, lambda: run(payer(), "pay"))
    first = await approve_next(store)
    await raises(Killed, lambda: run(payer(on_progress=dies_when_called)))
    again = await raises(ApprovalNeeded, lambda: run(payer()))
    assert (tried, again.question["request"]) == (["ann"], first.question["request"])
    # Decided or not, it does not run under the first approval, and nobody is asked a third time.
    await raises(ApprovalNeeded, lambda: run(payer()))
    second = await approve_next(store)
    assert (second.id, second.question) == (again.pause_id, first.question)
    assert (await run(payer())).text == "Paid."
    assert (tried, len(await done(session.pauses()))) == (["ann"] * 2, 2)
    assert await requests_approved(store) == [(again.request, 1), (again.request, 2)]


@both_colours
async def test_a_hook_decides_anew_about_a_call_whose_approval_is_consumed(
    subject: Subject,
) -> None:
    tried: list[str] = []
    decided: list[str] = []
    charge = declined_once(tried)

    def approve(made: Any, known: Any) -> bool:
        decided.append(made.id)
        return True

    world, store = World(subject.directory), await subject.open()
    session = await done(store.session("s"))
    script = [call("charge", to="ann"), "Paid."]

    def payer(**rules: Any) -> Agent:
        return asker(session, world, script, tools=[charge], approve=approve, **rules)

    await raises(Killed, lambda: run(payer(on_progress=dies_when_called), "pay"))
    assert (len(decided), len(tried)) == (1, 1)
    assert (await run(payer())).text == "Paid."
    assert (decided, tried) == (decided[:1] * 2, ["ann"] * 2)


@both_colours
async def test_after_the_call_a_killed_run_replays_it_and_asks_nobody(subject: Subject) -> None:
    world, store = World(subject.directory), await subject.open()
    session = await done(store.session("s", agent="mailer"))
    await raises(ApprovalNeeded, lambda: run(asker(session, world), "mail ann"))
    await approve_next(store)
    dying = asker(session, world, on_progress=dies_when_called)
    await raises(Killed, lambda: run(dying))
    assert (await run(asker(session, world))).text == "Sent."
    assert (world.count("mail"), len(await done(session.pauses()))) == (1, 1)


@pytest.mark.parametrize("to", ["ann", "eve"])
def test_what_was_approved_and_done_is_not_done_again_after_a_rewind_without_a_decision(
    to: str, place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("s", agent="mailer")
        with pytest.raises(ApprovalNeeded):
            asker(session, world).run("mail ann")
        asyncio.run(approve_next(store))
        asker(session, world).run()
        [said, *_] = session.history(kind="llm_response", oldest_first=True)
        session = store.session("s", reopen=True)
        session.rewind(said.version)
        asyncio.run(change_transcript(session, "ann", to))
        with pytest.raises(ApprovalNeeded):
            asker(session, world).run()
        assert world.count("mail") == 1


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_of_two_that_resume_at_once_one_makes_the_call(
    colour: Colour, place: dict[str, Any], tmp_path: Any
) -> None:
    async def case() -> None:
        subject = Subject(place, colour, tmp_path)
        try:
            world = World(tmp_path)
            stores = [await subject.open() for _ in range(2)]
            for id in (f"s{number}" for number in range(5)):
                sessions = [await done(store.session(id, agent="mailer")) for store in stores]
                first = asker(sessions[0], world, [call("mail", to=id), "Sent."])
                await raises(ApprovalNeeded, partial(run, first, "go"))
                await approve_next(stores[0])
                await subject.together([partial(resume, each, world, id) for each in sessions])
                assert world.count(f"mail {id} ") == 1
        finally:
            await subject.close()

    def resume(session: Any, world: World, to: str) -> Any:
        agent = asker(session, world, [call("mail", to=to), "Sent."], holder=f"h{id(session)}")
        if session.runtime.is_async:
            return aresume(agent)
        with contextlib.suppress(SessionBusy, SessionEnded):
            agent.run()
        return None

    async def aresume(agent: Agent) -> None:
        with contextlib.suppress(SessionBusy, SessionEnded):
            await agent.arun()

    asyncio.run(case())


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_anywhere_an_approved_call_is_made_once_and_nobody_is_asked_again(
    place: dict[str, Any], tmp_path: Any, step: int
) -> None:
    """Killed before and after each statement from the decision to the answer, one at a time."""
    world = World(tmp_path)
    tools = world.tools(lease_seconds=0.2)

    def resume(id: str, points: CrashPoints, say: Any = None) -> None:
        points.is_armed = False
        with holdfast.open(**place, hooks=points.hooks) as store:
            agent = asker(store.find_session(id), world, tools=tools, instance="a")
            points.is_armed = True
            assert agent.run().text == "Sent."

    def asked_and_approved(id: str) -> None:
        with holdfast.open(**place) as store:
            with pytest.raises(ApprovalNeeded):
                asker(store.session(id, agent="mailer"), world, tools=tools).run("mail ann")
            store.approve(store.pauses(state="waiting")[0].id, by="ann")

    number, status = 1, -signal.SIGKILL
    while status == -signal.SIGKILL:
        id = f"s{number}"
        with unhurried():
            asked_and_approved(id)
            world.path.write_text("")
            status, _ = run_child(partial(resume, id, CrashPoints(die_at=number)))
            if status != 0:
                resume(id, CrashPoints())
        assert world.count("mail") == 1, number
        with holdfast.open(**place) as store:
            session = store.find_session(id)
            assert len(session.pauses()) == 1, number
            keys = {each.idempotency_key for each in store.effects(session=id)}
            assert len(keys) == 1, number
        number += step
    assert (status, number > 30) == (0, True)


def test_an_approved_question_to_a_peer_with_another_input_is_asked_about_anew(
    place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    weather = Peer(agent="weather", description="Forecasts.")
    script = [call("weather", message="Oslo"), "Sun."]

    async def change(session: Any) -> None:
        await change_transcript(session, "Oslo", "Rome")

    with holdfast.open(**place, durability="normal") as store:
        session = store.session("s", agent="planner")

        def planner() -> Agent:
            return asker(session, world, script, peers=[weather])

        with pytest.raises(ApprovalNeeded):
            planner().run("Sun?")
        asyncio.run(approve_next(store))
        session.resumption()
        asyncio.run(change(session))
        with pytest.raises(ApprovalNeeded):
            planner().run()
        assert session.asks() == []
        asyncio.run(approve_next(store))
        with pytest.raises(SessionWaiting):
            planner().run()
        [asked] = session.asks()
        assert asked.input == {"message": "Rome"}
