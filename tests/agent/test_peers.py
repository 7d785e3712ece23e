"""Peers as tools: a call of the model asks, the session waits, and the answer is its result."""

from __future__ import annotations

import signal
from decimal import Decimal
from typing import Any

import pytest

import holdfast
from holdfast.agent import Agent, Budget, Peer, ToolCall, call, read_transcript
from holdfast.errors import InvalidArgument, LoopDetected, SessionWaiting
from holdfast.mesh import Mesh, Service, agent_service
from holdfast.testing.crashes import CrashPoints
from holdfast.testing.subject import Subject, done, raises
from tests.agent.helpers import World, run
from tests.checkpoints.colours import both_colours
from tests.crash.children import run as run_child

WEATHER = Peer(agent="weather", description="Forecasts.", timeout_seconds=60)
PRICER = Peer(agent="pricer", description="Prices.", name="price")
SCRIPT = [
    [call("weather", message="Oslo"), call("look", city="Oslo"), call("price", message="Oslo")],
    "Sun, for 9 euros.",
]


def agent(session: Any, world: World, script: Any = SCRIPT, **rules: Any) -> Agent:
    given = {"tools": world.tools(), "peers": [WEATHER, PRICER], **rules}
    return Agent(session, world.model(script), **given)


def told(latest: Any) -> dict[str, Any]:
    messages = read_transcript(latest.channels["transcript"])
    names = {call.call_id: call.name for message in messages for call in message.calls}
    return {
        names[result.call_id]: (result.content, result.is_error)
        for message in messages
        for result in message.results
    }


@both_colours
async def test_calls_become_asks_and_their_answers_results(subject: Subject) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session("trip", agent="planner"))
    error = await raises(SessionWaiting, lambda: run(agent(session, world), "Oslo?"))
    [pause] = await done(session.pauses())
    assert (pause.id, pause.state, pause.open_asks) == (error.pause_id, "waiting", 2)
    info = await done(session.info())
    assert (info.status, info.is_driven, world.count("look")) == ("waiting", False, 1)
    weather, price = await done(session.asks())
    assert (weather.agent, weather.input, weather.timeout_seconds) == (
        "weather", {"message": "Oslo"}, 60
    )  # fmt: skip
    [asking] = [each for each in read_transcript((await done(session.latest()))["transcript"])
                if each.calls]  # fmt: skip
    assert [each.correlation["tool_call"] for each in (weather, price)] == [
        asking.calls[0].call_id, asking.calls[2].call_id
    ]  # fmt: skip
    assert list(told(await done(session.latest()))) == ["look"]
    # Run again too early, it asks nobody twice and the model not at all.
    await raises(SessionWaiting, lambda: run(agent(session, world)))
    assert len(await done(session.asks())) == 2
    await done(store.answer(price.id, {"cents": 900}))
    await done(store.answer(weather.id, "no such city", status="error"))
    outcome = await run(agent(session, world))
    assert outcome.text == "Sun, for 9 euros."
    assert (world.count("asked"), world.count("look")) == (2, 1)
    assert told(await done(session.latest())) == {
        "weather": ("The agent weather failed: no such city.", True),
        "look": ({"city": "Oslo", "price": 120}, False),
        "price": ({"cents": 900}, False),
    }
    [pause] = await done(session.pauses())
    assert pause.state == "closed"


def test_answers_that_are_in_already_are_not_waited_for(
    place: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    with holdfast.open(**place, durability="normal") as store:
        ask = type(store.session("x", agent="y")).ask

        def quick(event: Any) -> None:
            for each in store.asks(state="open"):
                store.answer(
                    each.id, "sun", artifacts=[holdfast.Artifact(name="map", uri="s3://m")]
                )

        del ask
        session = store.session("trip", agent="planner")
        script = [[call("weather", message="Oslo"), call("look", city="Oslo")], "Sun."]
        outcome = agent(session, world, script, on_progress=quick).run("Oslo?")
        assert outcome.text == "Sun."
        found = told(session.latest())["weather"][0]
        artifact = {"name": "map", "version": 1, "media_type": "application/json", "uri": "s3://m"}
        assert found == {"result": "sun", "artifacts": [artifact]}
        assert [each.state for each in session.pauses()] != ["waiting"]


def test_what_a_session_had_is_the_same_after_a_resume_on_another_instance(
    place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    service = agent_service("planner", lambda session: agent(session, world))
    peers = [Service("weather", lambda request: "sun"), Service("pricer", lambda request: 9)]

    def look(store: holdfast.Store) -> Any:
        session = store.find_session("r1")
        latest = session.latest()
        assert latest is not None
        flags = {name: latest.channels[name] for name in ("flags", "buffer")}
        spent = session.spent()
        return flags, spent.usd, [(each.model, each.source, each.attempts) for each in spent.by]

    with holdfast.open(**place, durability="normal") as first:
        first.request("planner", {"message": "Oslo?"}, request_id="r1")
        first.find_session("r1").save(flags={"deep": True}, buffer="So far: ")
        service.worker(first, poll_seconds=0.05).run(until_empty=True)
        before = look(first)
    assert before[1] > 0
    with holdfast.open(**place, durability="normal") as second:
        assert second.find_session("r1").info().status == "waiting"
        assert look(second) == before
        for each in peers:
            each.worker(second, poll_seconds=0.05).run(until_empty=True)
        assert look(second) == before
    with holdfast.open(**place, durability="normal") as third:
        service.worker(third, poll_seconds=0.05).run(until_empty=True)
        answer = Mesh(third).request("planner", {"message": "Oslo?"}, request_id="r1").answer
        assert answer is not None
        assert (answer.status, answer.result) == ("ok", "Sun, for 9 euros.")
        flags, usd, by = look(third)
        assert flags == before[0]
        assert by == [("scripted", "agent", 2)]
        assert usd == sum(Decimal(line.split()[1]) for line in world.lines if "asked" in line)
        assert (world.count("asked"), world.count("look")) == (2, 1)


@pytest.mark.parametrize("step", [59, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_place_peers_are_asked_once_and_their_answers_told_once(
    step: int, place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)

    def live(id: str, points: CrashPoints) -> Any:
        """Run until the answer; whoever is waited for answers meanwhile."""
        points.is_armed = False
        with holdfast.open(**place, hooks=points.hooks, durability="normal") as store:
            session = store.session(id, agent="planner", reopen=True)
            points.is_armed = True
            while True:
                try:
                    outcome = agent(session, world, instance="planner-1").run("go", message_id="m")
                    return outcome, session.latest(), session.asks(), session.pauses()
                except SessionWaiting:
                    for each in session.asks():
                        store.answer(each.id, f"answer of {each.agent}")

    number, status = 1, -signal.SIGKILL
    while status == -signal.SIGKILL:
        id, points = f"s{number}", CrashPoints(die_at=number)
        status, _ = run_child(lambda say, id=id, points=points: live(id, points) and None)  # type: ignore[misc]
        outcome, latest, asks, pauses = live(id, CrashPoints())
        where = f"killed at place {number}"
        assert outcome.text == "Sun, for 9 euros.", where
        assert [each.agent for each in asks] == ["weather", "pricer"], where
        assert told(latest)["weather"] == ("answer of weather", False), where
        assert told(latest)["price"] == ("answer of pricer", False), where
        results = [each for each in read_transcript(latest["transcript"]) if each.results]
        assert len(results) == 3, where
        assert [each.state for each in pauses if each.state != "closed"] == [], where
        number += step
    assert status == 0
    # A run has more places than this.
    assert number > 100


def test_a_budget_counts_what_was_spent_before_the_pause(
    place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("trip", agent="planner")
        with pytest.raises(SessionWaiting):
            agent(session, world, budget=Budget(usd=1)).run("Oslo?")
        for each in session.asks():
            store.answer(each.id, "sun")
        with pytest.raises(holdfast.BudgetExceeded):
            agent(session, world, budget=Budget(usd=session.spent().usd)).run()
        assert (world.count("asked"), len(session.asks())) == (1, 2)
        assert agent(session, world, budget=Budget(usd=1)).run().text == "Sun, for 9 euros."


def test_equal_calls_to_peers_are_refused_and_then_end_the_run(
    place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    script = [[call("weather", message="Oslo")] for _ in range(9)]
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("trip", agent="planner")
        for number in range(1, 4):
            with pytest.raises(SessionWaiting):
                agent(session, world, script).run("Oslo?" if number == 1 else None)
            calls = session.asks()
            assert len(calls) == number
            # What was answered before the last pause belongs to none that follows.
            [*_, pause] = session.pauses()
            assert (pause.generation, pause.open_asks, pause.ok_asks) == (number, 1, 0)
            store.answer(calls[-1].id, "rain")
        with pytest.raises(LoopDetected):
            agent(session, world, script).run()
        assert (len(session.asks()), world.count("asked")) == (3, 5)


@pytest.mark.parametrize("way", ["rewind", "fork"])
def test_a_call_is_made_anew_after_a_rewind_and_in_a_fork(
    way: str, place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    script = [[call("weather", message="Oslo")], "Sun."]
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("trip", agent="planner")
        with pytest.raises(SessionWaiting):
            agent(session, world, script).run("Oslo?")
        [before] = session.asks()
        asked = next(each.version for each in session.history() if each.kind == "llm_response")
        if way == "rewind":
            session.rewind(asked)
            assert store.peer_call(before.id).state == "cancelled"
        else:
            session = session.fork(asked, id="fork")
        with pytest.raises(SessionWaiting):
            agent(session, world, script).run()
        [now] = [each for each in session.asks() if each.state == "open"]
        assert (now.session_id, now.id != before.id) == (session.id, True)
        store.answer(now.id, "sun")
        assert agent(session, world, script).run().text == "Sun."
        assert told(session.latest()) == {"weather": ("sun", False)}


def test_a_peer_that_is_not_permitted_or_misused_is_not_asked(
    place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    bad = ToolCall(call_id="", name="weather", arguments=["Oslo"])
    script = [[call("price", message="Oslo"), bad], "No."]

    def permit(made: Any, tool: Any) -> Any:
        return (
            ("deny", "Too dear.") if tool.effect == "mutate" and made.name == "price" else "allow"
        )

    with holdfast.open(**place, durability="normal") as store:
        session = store.session("trip", agent="planner")
        assert agent(session, world, script, permit=permit).run("Oslo?").text == "No."
        assert session.asks() == []
        refused = told(session.latest())
        assert refused["price"] == ("price was not permitted, nothing was run. Too dear.", True)
        assert refused["weather"][1] is True


def test_what_cannot_work_is_told_before_anything_is_written(
    place: dict[str, Any], tmp_path: Any
) -> None:
    world = World(tmp_path)
    given: dict[str, Any] = {"agent": "weather", "description": "Forecasts."}
    for wrong in (
        {"agent": ""},
        {"description": ""},
        {"agent": "my agent"},
        {"name": "a b"},
        {"parameters": {"type": "string"}},
        {"timeout_seconds": -1},
    ):
        with pytest.raises(InvalidArgument):
            Peer(**{**given, **wrong})
    look = Peer(agent="weather", description="d", name="look")
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("trip", agent="planner")
        for peers in ([WEATHER, WEATHER], [look], ["weather"]):
            with pytest.raises(InvalidArgument):
                agent(session, world, peers=peers)
        with pytest.raises(InvalidArgument, match="has no agent"):
            agent(store.session("nobody"), world).run("Oslo?")
        assert world.count("asked") == 0
