"""The loop in both colours and on both databases: turns, tools, permissions, repeats, cadence."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.agent import (
    Agent,
    Answered,
    Asking,
    Budget,
    Called,
    Calling,
    Plan,
    Price,
    ReasoningBlock,
    Request,
    Response,
    Resumed,
    Saved,
    ScriptedModel,
    Stopped,
    TextBlock,
    ToolCall,
    call,
    every,
    read_transcript,
)
from holdfast.effects.tools import NotLanded, tool
from holdfast.errors import (
    ApprovalNeeded,
    InvalidArgument,
    InvalidValue,
    LimitExceeded,
    LoopDetected,
    ModelFailed,
    SessionBusy,
    SessionEnded,
    Unresolved,
)
from holdfast.testing.subject import Subject, done, raises
from tests.agent.helpers import World, results, run
from tests.checkpoints.colours import both_colours


async def transcript(session: Any) -> list[Any]:
    latest = await done(session.latest())
    return read_transcript(None if latest is None else latest.channels.get("transcript"))


async def kinds(session: Any) -> list[str]:
    return [each.kind for each in reversed(await done(session.history(limit=1000)))]


@both_colours
async def test_a_run_goes_turn_by_turn_to_the_answer(subject: Subject) -> None:
    world = World(subject.directory)
    script = [
        [ReasoningBlock(text="hm"), TextBlock(text="I look."), call("look", city="Oslo")],
        [call("write", path="plan", text="Oslo"), call("mail", to="ann")],
        "Booked.",
    ]
    model = world.model(script)
    store = await subject.open()
    session = await done(store.session())
    outcome = await run(Agent(session, model, tools=world.tools(), system="Be good."), "Book it")
    assert (outcome.text, outcome.is_old, outcome.iteration) == ("Booked.", False, 3)
    assert [line.split()[0] for line in world.lines] == [
        "asked", "look", "asked", "write", "mail", "asked",
    ]  # fmt: skip
    messages = await transcript(session)
    assert [message.role for message in messages] == [
        "user", "assistant", "tool", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert results(messages) == [{"city": "Oslo", "price": 120}, "4 characters", {"sent": "ann"}]
    ids = [part.id for message in messages for part in (message, *message.blocks)]
    assert len(set(ids)) == len(ids)
    assert all(part.created_at > 0 for message in messages for part in (message, *message.blocks))
    turn = ["iteration_start", "llm_response"]
    assert await kinds(session) == [
        *turn, "tool_executed", "iteration_end", "turn",
        *turn, "tool_executed", "tool_executed", "iteration_end", "turn",
        *turn, "iteration_end", "turn", "state_transition",
    ]  # fmt: skip
    assert (await done(session.resume_point())).iteration == 4
    info = await done(session.info())
    assert (info.holder, info.status, info.activity) == (None, "completed", "completed")


@both_colours
async def test_a_session_that_an_agent_has_finished_ends_and_a_new_message_opens_it_again(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    seen: list[str] = []

    def model(request: Any) -> str:
        with holdfast.open(**subject.place) as other:
            seen.append(other.find_session("s").info().activity)
        return f"answer {len(seen)}"

    agent = Agent(session, model, plan=Plan(goal="g", steps=()))
    assert (await done(session.info())).activity == "idle"
    await run(agent, "one", message_id="m-1")
    error = await raises(SessionEnded, lambda: store.session("s"))
    assert (error.status, "reopen=True" in str(error)) == ("completed", True)
    version = (await done(session.info())).version
    again = Agent(await done(store.find_session("s")), model)
    for old in (await run(again), await run(again, "one", message_id="m-1")):
        assert (old.text, old.is_old) == ("answer 1", True)
    assert again.plan == agent.plan
    assert (await done(session.info())).version == version, "an old answer writes nothing"
    assert (await run(again, "two")).text == "answer 2"
    assert seen == ["running", "running"]
    changes = await done(session.history(kind="state_transition", oldest_first=True))
    assert [each.data for each in changes] == [
        {"from": "active", "to": "completed"},
        {"from": "completed", "to": "active"},
        {"from": "active", "to": "completed"},
    ]
    reopened = await done(store.session("s", reopen=True))
    assert (await done(reopened.info())).activity == "idle"
    assert (await run(Agent(reopened, model))).text == "answer 2"
    assert (await done(session.info())).status == "completed"


@both_colours
async def test_an_agent_opens_no_session_again_that_was_cancelled_or_failed(
    subject: Subject,
) -> None:
    store = await subject.open()
    for status in ("cancelled", "failed"):
        session = await done(store.session(status))
        await done(session.end(status))
        await raises(SessionEnded, partial(run, Agent(session, ScriptedModel(["a"])), "hi"))
        assert (await done(session.info())).status == status
    empty = await done(store.session("ended by hand"))
    await done(empty.end())
    await raises(SessionEnded, lambda: run(Agent(empty, ScriptedModel(["a"]))))


@both_colours
async def test_whoever_drives_a_session_decides_when_it_ends(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    driven = await done(session.drive("me"))
    assert (await run(Agent(driven, ScriptedModel(["a"])), "hi")).text == "a"
    await done(driven.save(x=1))
    assert (await done(session.info())).activity == "running"
    await done(driven.close())
    assert (await done(session.info())).activity == "idle"


@both_colours
async def test_an_agent_in_a_handler_ends_its_session_and_a_retry_gets_the_stored_answer(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(store.work.submit("t", None, session=session))
    model = ScriptedModel(["a", "b"])
    for attempt in (1, 2):
        (item,) = await done(store.work.claim("w"))
        outcome = await run(Agent(item.session, model), "hi", message_id="m")
        assert (outcome.text, outcome.is_old) == ("a", attempt == 2)
        assert (await done(session.info())).status == "completed"
        await done(item.release() if attempt == 1 else item.complete(outcome.text))
    assert model.asked == 1
    assert (await done(store.work.list()))[0].output == "a"


@both_colours
async def test_a_run_that_stops_without_an_answer_leaves_its_session_open(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session())
    await raises(ModelFailed, lambda: run(Agent(session, ScriptedModel([])), "hi"))
    assert (await done(session.info())).activity == "idle"


@both_colours
async def test_an_answered_question_costs_nothing_when_it_is_asked_again(subject: Subject) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())
    agent = Agent(session, world.model(["One.", "Two."]))
    first = await run(agent, "hello", message_id="m-1")
    again = await run(agent, "hello", message_id="m-1")
    assert (first.text, again.text, again.is_old) == ("One.", "One.", True)
    assert (await run(agent)).text == "One."
    assert world.count("asked") == 1
    assert (await run(agent, "more", message_id="m-2")).text == "Two."
    assert (await run(agent, "hello", message_id="m-1")).text == "One."
    assert [message.id for message in await transcript(session)][::2] == ["m-1", "m-2"]


@both_colours
async def test_the_assistants_message_is_stored_before_its_tools_run(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    seen: list[Any] = []

    def look(city: str) -> str:
        with holdfast.open(**subject.place) as other:
            latest = other.find_session(session.id).latest()
            assert latest is not None
            seen.append(latest["transcript"][-1]["blocks"][0]["name"])
            seen.append(other.find_session(session.id).spent().attempts)
        return "seen"

    await run(
        Agent(session, ScriptedModel([call("look", city="x"), "ok"]), tools=[tool(look)]), "go"
    )
    assert seen == ["look", 1]


@both_colours
async def test_channels_that_no_agent_wrote_are_refused_with_what_to_do(subject: Subject) -> None:
    store = await subject.open()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"transcript": [{"role": "user", "content": "Hi"}]}, "transcript[0].blocks must be"),
        ({"plan": {"steps": ["look"]}}, "plan.steps[0] must be a dict, not str; an agent"),
        ({"plan": ["look"]}, "plan must be a dict, not list; an agent keeps its own messages"),
    ]
    for number, (channels, problem) in enumerate(cases):
        session = await done(store.session(f"s-{number}"))
        await done(session.save(**channels))
        agent = Agent(session, ScriptedModel(["Done."]))
        error = await raises(InvalidValue, partial(run, agent, "go"))
        assert str(error).startswith(problem)
        assert str(error).endswith("give it a session where nobody else writes these")
        assert (await done(session.latest())).channels == channels


@both_colours
async def test_bad_calls_are_told_to_the_model_and_run_nothing(subject: Subject) -> None:
    world = World(subject.directory)
    script = [
        [
            call("look"),
            call("look", city=7),
            call("fly", to="Oslo"),
            ToolCall(call_id="x", name="look", arguments="{oops"),
            ToolCall(call_id="y", name="look", arguments='{"city": "Rome"}'),
            ToolCall(call_id="z", name="look", arguments=None),
            call("mail", to="ann", idempotency_key="mine"),
        ],
        "Sorry.",
    ]
    store = await subject.open()
    session = await done(store.session())
    await run(Agent(session, world.model(script), tools=world.tools()), "go")
    found = [result for message in await transcript(session) for result in message.results]
    assert [result.is_error for result in found] == [True, True, True, True, False, True, True]
    said = [str(result.content) for result in found]
    assert "missing required field `city`" in said[0]
    assert "Expected `str`, got `int` - at `$.city`" in said[1]
    assert "no tool named 'fly'; the tools are: look, write, mail" in said[2]
    assert "not valid JSON" in said[3]
    assert "unknown field `idempotency_key`" in said[6]
    assert world.lines[1:-1] == ["look Rome"]


@both_colours
async def test_a_tool_that_raises_is_told_to_the_model(subject: Subject) -> None:
    @tool(effect="read")
    def broken() -> None:
        raise ValueError("no such shelf")

    store = await subject.open()
    session = await done(store.session())
    await run(Agent(session, ScriptedModel([call("broken"), "ok"]), tools=[broken]), "go")
    assert results(await transcript(session)) == ["broken raised ValueError: no such shelf"]


@both_colours
async def test_a_call_in_doubt_stops_the_run_until_it_is_resolved(subject: Subject) -> None:
    world = World(subject.directory)

    @tool(effect="mutate")
    def charge(cents: int) -> str:
        world.note(f"charge {cents}")
        raise ConnectionError("the line broke")

    store = await subject.open()
    session = await done(store.session())
    script = [
        [call("look", city="Oslo"), call("charge", cents=5), call("look", city="Rome")],
        "Ok.",
    ]
    agent = Agent(session, world.model(script), tools=[*world.tools(), charge])
    error = await raises(Unresolved, lambda: run(agent, "pay"))
    assert results(await transcript(session)) == [{"city": "Oslo", "price": 120}]
    assert (await kinds(session))[-1] == "error_boundary"
    again = await raises(Unresolved, lambda: run(agent, "go on"))
    assert again.effect_id == error.effect_id
    await done(store.resolve(error.effect_id, holdfast.Landed("paid"), by="ann"))
    assert (await run(agent, "go on")).text == "Ok."
    assert results(await transcript(session))[1:] == ["paid", {"city": "Rome", "price": 120}]
    assert (world.count("charge"), world.count("asked"), world.count("look Oslo")) == (1, 2, 1)


@both_colours
async def test_a_model_can_be_told_of_a_call_in_doubt(subject: Subject) -> None:
    @tool(effect="mutate")
    def charge(cents: int) -> str:
        raise ConnectionError("the line broke")

    store = await subject.open()
    session = await done(store.session())
    model = ScriptedModel([call("charge", cents=5), "A person must look."])
    outcome = await run(Agent(session, model, tools=[charge], on_unresolved="tell"), "pay")
    assert outcome.text == "A person must look."
    (said,) = results(await transcript(session))
    (effect,) = await done(session.unresolved())
    assert effect.id in said


@both_colours
async def test_permissions_allow_deny_and_ask(subject: Subject) -> None:
    world = World(subject.directory)
    asked: list[str] = []

    def permit(made: ToolCall, known: Any) -> Any:
        assert known.name == made.name
        return {"look": "allow", "write": ("deny", "Read only."), "mail": "ask"}[made.name]

    def approve(made: ToolCall, known: Any) -> bool:
        asked.append(made.arguments["to"])
        return bool(made.arguments["to"] == "ann")

    script = [
        [
            call("look", city="Oslo"),
            call("write", path="a", text="b"),
            call("mail", to="ann"),
            call("mail", to="bob"),
        ],
        "Ok.",
    ]
    store = await subject.open()
    session = await done(store.session())
    agent = Agent(session, world.model(script), tools=world.tools(), permit=permit, approve=approve)
    await run(agent, "go")
    found = [result for message in await transcript(session) for result in message.results]
    assert [result.is_error for result in found] == [False, True, False, True]
    assert "not permitted, nothing was run. Read only." in found[1].content
    assert asked == ["ann", "bob"]
    assert (world.count("mail"), world.count("write")) == (1, 0)
    points = await done(session.history(kind="approval_point"))
    assert [point.data.get("decision") for point in reversed(points)] == [
        None, "allow", None, "deny",
    ]  # fmt: skip


@both_colours
async def test_a_permission_hook_that_fails_stops_the_run_and_nothing_runs(
    subject: Subject,
) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())
    model = world.model([call("mail", to="ann"), "Sent."])

    def broken(made: ToolCall, known: Any) -> Any:
        raise RuntimeError("the policy server is away")

    agent = Agent(session, model, tools=world.tools(), permit=broken)
    await raises(RuntimeError, lambda: run(agent, "mail ann"))
    perhaps: Any = lambda made, known: "perhaps"  # noqa: E731
    vague = Agent(session, model, tools=world.tools(), permit=perhaps)
    await raises(InvalidArgument, lambda: run(vague))
    assert world.count("mail") == 0
    assert (await run(Agent(session, model, tools=world.tools()))).text == "Sent."


@both_colours
async def test_a_question_waits_for_a_decision_that_is_asked_for_once(subject: Subject) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())
    agent = Agent(
        session,
        world.model([call("mail", to="ann"), "Sent."]),
        tools=world.tools(),
        permit=lambda made, known: "ask",
    )
    error = await raises(ApprovalNeeded, lambda: run(agent, "mail ann"))
    assert (await raises(ApprovalNeeded, lambda: run(agent))).block_id == error.block_id
    assert len(await done(session.history(kind="approval_point"))) == 1
    decision = {"block_id": error.block_id, "decision": "allow", "by": "ann"}
    # A decision that does not say on what counts for nothing.
    await done(session.record("approval_point", decision))
    await raises(ApprovalNeeded, lambda: run(agent))
    await done(session.record("approval_point", {**decision, "request": error.request}))
    assert (await run(agent)).text == "Sent."
    assert (world.count("mail"), world.count("asked")) == (1, 2)


@both_colours
async def test_equal_calls_in_a_row_are_refused_and_then_stop_the_run(subject: Subject) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())

    def stubborn(request: Request) -> Any:
        said = request.messages[-1]
        if said.role == "user" and said.text == "try Rome":
            return call("look", city="Rome")
        if said.results and said.results[0].content == {"city": "Rome", "price": 120}:
            return "Rome it is."
        return call("look", city="Oslo")

    agent = Agent(session, world.model(stubborn), tools=world.tools(), repeats_max=2)
    error = await raises(LoopDetected, lambda: run(agent, "go"))
    assert (error.tool, error.repeats) == ("look", 4)
    assert world.count("look") == 2
    found = results(await transcript(session))
    assert [isinstance(content, str) for content in found] == [False, False, True, True]
    # A new process reads the same repeats from what is stored.
    fresh = Agent(session, world.model(stubborn), tools=world.tools(), repeats_max=2)
    assert (await raises(LoopDetected, lambda: run(fresh, "again"))).repeats == 5
    assert (await run(fresh, "try Rome")).text == "Rome it is."
    assert (world.count("look Oslo"), world.count("look Rome")) == (2, 1)


@both_colours
async def test_other_calls_between_equal_ones_are_no_loop(subject: Subject) -> None:
    world = World(subject.directory)
    cities = ["Oslo", "Rome"] * 4
    script = [*(call("look", city=city) for city in cities), "ok"]
    store = await subject.open()
    session = await done(store.session())
    agent = Agent(session, world.model(script), tools=world.tools(), repeats_max=1)
    assert (await run(agent, "go")).text == "ok"
    assert world.count("look") == 8


@both_colours
async def test_equal_mails_are_sent_once_and_say_so(subject: Subject) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())
    script = [call("mail", to="ann"), call("mail", to="ann"), "ok"]
    await run(Agent(session, world.model(script), tools=world.tools()), "go")
    first, second = [result for message in await transcript(session) for result in message.results]
    found = await done(store.effects(session=session.id, tool="mail"))
    effect = min(found, key=lambda each: int(each.number))
    assert world.count("mail") == 1
    assert (first.replay_of, second.replay_of) == (None, effect.id)
    assert first.content == second.content
    data = [each.data for each in await done(session.history(kind="tool_executed"))]
    assert [each["replay_of"] for each in reversed(data)] == [None, effect.id]


@both_colours
async def test_a_loop_is_seen_in_the_ledger_when_the_transcript_was_compacted(
    subject: Subject,
) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())

    def stubborn(_: Any) -> Any:
        return call("look", city="Oslo")

    agent = Agent(session, world.model(stubborn), tools=world.tools(), repeats_max=2, turns_max=1)
    whole: list[Any] = []
    for _ in range(3):
        await raises(LimitExceeded, lambda: run(agent, "go"))
        whole = (await done(session.latest()))["transcript"]
        await done(session.save(transcript=whole[:1]))
    assert world.count("look") == 2
    result = read_transcript(whole)[-1].results[0]
    assert (result.is_error, "2 times in a row" in result.content) == (True, True)
    calls = await done(session.recent_calls())
    assert [each.tool for each in calls] == ["look", "look"]
    await done(session.rewind(1))
    await raises(LimitExceeded, lambda: run(agent, "go"))
    assert world.count("look") == 3, "what a rewind left behind does not count"


@both_colours
async def test_a_run_ends_after_its_turns_and_goes_on(subject: Subject) -> None:
    world = World(subject.directory)
    script = [*(call("look", city=str(number)) for number in range(5)), "ok"]
    store = await subject.open()
    session = await done(store.session())
    agent = Agent(session, world.model(script), tools=world.tools(), turns_max=3)
    await raises(LimitExceeded, lambda: run(agent, "go"))
    assert (await run(agent)).text == "ok"
    assert (world.count("look"), world.count("asked")) == (5, 6)


CADENCES: dict[str, tuple[Any, int]] = {
    "turn": ("turn", 6),
    "call": ("call", 6),
    "every 3 turns": (every(turns=3), 2),
    "every 0 seconds": (every(seconds=0), 6),
    "every day": (every(seconds=86_400), 1),
}


@pytest.mark.parametrize("name", CADENCES)
def test_a_cadence_decides_when_turns_are_saved(
    place: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """The answer, the transcript and the ledgers are the same; only the saved turns differ."""
    cadence, turns = CADENCES[name]
    world = World(tmp_path)
    script = [
        *([call("look", city=f"{number}a"), call("mail", to=str(number))] for number in range(5)),
        "ok",
    ]
    saved: list[int] = []
    with holdfast.open(**place) as store:
        session = store.session()
        agent = Agent(
            session,
            world.model(script),
            tools=world.tools(),
            cadence=cadence,
            on_progress=lambda event: saved.append(1) if isinstance(event, Saved) else None,
        )
        outcome = agent.run("go")
        latest = session.latest()
        assert latest is not None
        messages = read_transcript(latest["transcript"])
        assert [len(message.calls) for message in messages].count(2) == 5
        assert len(results(messages)) == 10
        assert latest["budget"]["spent_usd"] == float(outcome.spent.usd)
        counts = session.counts()
        assert counts["turn"] == len(saved) == turns
        assert (counts["llm_response"], counts["tool_executed"]) == (6, 10)
        assert len(store.effects(session=session.id)) == 10


def test_a_cadence_per_call_stores_each_result_before_the_next_call(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        session = store.session()
        seen: list[int] = []

        @tool(effect="read")
        def count(number: int) -> int:
            latest = session.latest()
            assert latest is not None
            seen.append(sum(len(read.results) for read in read_transcript(latest["transcript"])))
            return number

        script = [[call("count", number=number) for number in range(3)], "ok"]
        Agent(session, ScriptedModel(script), tools=[count], cadence="call").run("go")
        assert seen == [0, 1, 2]
        seen.clear()
        other = session = store.session()
        Agent(other, ScriptedModel(script), tools=[count], cadence="turn").run("go")
        assert seen == [0, 0, 0]


@both_colours
async def test_progress_is_told_in_order_and_a_broken_listener_breaks_nothing(
    subject: Subject,
) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())
    told: list[Any] = []

    def listen(event: Any) -> None:
        told.append(event)
        raise RuntimeError("the screen is gone")

    model = world.model([call("mail", to="ann"), "ok"])
    agent = Agent(session, model, tools=world.tools(), on_progress=listen)
    await run(agent, "go")
    turn = [Asking, Answered]
    assert [type(event) for event in told] == [
        Resumed, *turn, Calling, Called, Saved, *turn, Saved,
    ]  # fmt: skip
    assert told[-2].usage.usd > 0
    told.clear()
    limited = Agent(session, model, budget=Budget(usd=0), on_progress=listen)
    await raises(holdfast.HoldfastError, lambda: run(limited, "more"))
    assert isinstance(told[-1], Stopped)
    assert told[-1].error == "BudgetExceeded"


@both_colours
async def test_a_scratchpad_is_named_in_the_session_and_reopened(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s", metadata={"title": "trip"}))
    path = subject.directory / "pads" / "s"
    await run(Agent(session, ScriptedModel(["a", "b", "c"]), scratchpad=path), "hi")
    assert path.is_dir()
    (path / "finding.txt").write_text("Oslo is cold")
    again = await done(store.session("s", reopen=True))
    agent = Agent(again, ScriptedModel(["a", "b", "c"]))
    await run(agent, "more")
    assert agent.scratchpad == path
    assert (path / "finding.txt").read_text() == "Oslo is cold"
    assert (await done(again.info())).metadata == {"title": "trip", "scratchpad": str(path)}
    elsewhere = Agent(again, ScriptedModel(["a"]), scratchpad=subject.directory / "other")
    await raises(InvalidArgument, lambda: run(elsewhere, "x"))


@both_colours
async def test_one_process_at_a_time_runs_a_session(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    driven = await done(session.drive("other"))
    agent = Agent(session, ScriptedModel(["a", "b"]))
    await raises(SessionBusy, lambda: run(agent, "hi"))
    assert (await run(Agent(driven, ScriptedModel(["a", "b"])), "hi")).text == "a"
    assert (await done(session.info())).holder == "other"
    await done(driven.close())
    assert (await run(agent, "more")).text == "b"


@both_colours
async def test_agents_of_one_instance_do_not_fence_each_other(subject: Subject) -> None:
    store = await subject.open()
    inner = Agent(await done(store.session("b")), ScriptedModel(["inner"]), instance="one")

    if subject.colour == "sync":

        @tool(effect="read")
        def ask_other() -> str:
            return inner.run("hi").text

    else:

        @tool(effect="read")
        async def ask_other() -> str:
            return (await inner.arun("hi")).text

    model = ScriptedModel([call("ask_other"), "outer"])
    session = await done(store.session("a"))
    outcome = await run(Agent(session, model, tools=[ask_other], instance="one"), "go")
    assert outcome.text == "outer"
    assert results(await transcript(session)) == ["inner"]


@both_colours
async def test_a_large_result_is_cut_for_the_model_and_whole_in_the_ledger(
    subject: Subject,
) -> None:
    @tool(effect="read")
    def dump() -> list[str]:
        return ["line"] * 100_000

    store = await subject.open()
    session = await done(store.session())
    await run(Agent(session, ScriptedModel([call("dump"), "ok"]), tools=[dump]), "go")
    (shown,) = results(await transcript(session))
    assert shown.startswith('["line","line"')
    assert "700001 bytes in all" in shown
    (effect,) = await done(store.effects(session=session.id))
    assert len(effect.result) == 100_000


@both_colours
async def test_a_secret_in_a_result_is_not_stored(subject: Subject) -> None:
    secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" + "k1L2m3N4o5P6q7R8"

    @tool(effect="read")
    def login() -> dict[str, str]:
        return {"note": f"use {secret} now"}

    store = await subject.open()
    session = await done(store.session())
    await run(Agent(session, ScriptedModel([call("login"), "ok"]), tools=[login]), "go")
    assert secret not in repr((await done(session.latest())).channels)


def test_async_models_tools_and_hooks_run_in_an_async_store(tmp_path: Path) -> None:
    @tool(effect="read")
    async def look(city: str) -> str:
        await asyncio.sleep(0)
        return city

    async def model(request: Request) -> Response | str:
        await asyncio.sleep(0)
        return "ok" if request.messages[-1].results else Response(blocks=[call("look", city="x")])

    async def permit(made: ToolCall, known: Any) -> Any:
        return "allow"

    told: list[Any] = []

    async def listen(event: Any) -> None:
        told.append(event)

    async def main() -> str:
        async with await holdfast.aopen(f"sqlite:///{tmp_path}/a.db") as store:
            session = await store.session()
            agent = Agent(session, model, tools=[look], permit=permit, on_progress=listen)
            with pytest.raises(InvalidArgument, match="arun"):
                agent.run("go")
            return (await agent.arun("go")).text

    assert asyncio.run(main()) == "ok"
    assert len(told) == 9
    with holdfast.open(f"sqlite:///{tmp_path}/b.db") as store:
        agent = Agent(store.session(), model, tools=[look])
        with pytest.raises(InvalidArgument, match="use it with an async store"):
            agent.run("go")


@pytest.mark.parametrize(
    "options",
    [
        {"model": "gpt"},
        {"tools": [print]},
        {"budget": 5},
        {"cadence": "sometimes"},
        {"on_unresolved": "ignore"},
        {"repeats_max": 0},
        {"turns_max": 0},
        {"retries": -1},
        {"backoff_seconds": -1},
        {"permit": "allow"},
        {"session": "s"},
    ],
)
def test_bad_arguments_are_refused_before_anything_happens(options: dict[str, Any]) -> None:
    with holdfast.open("sqlite://") as store:
        session = options.pop("session", store.session())
        model = options.pop("model", ScriptedModel(["hi"]))
        with pytest.raises(InvalidArgument):
            Agent(session, model, **options)
    for wrong in ({}, {"turns": 0}, {"seconds": -1}):
        with pytest.raises(InvalidArgument):
            every(**wrong)


def test_a_run_without_any_message_is_refused() -> None:
    with holdfast.open("sqlite://") as store:
        session = store.session()
        agent = Agent(session, ScriptedModel(["hi"]))
        for wrong in ({"message": None}, {"message": 7}, {"message": "x", "message_id": ""}):
            with pytest.raises(InvalidArgument):
                agent.run(**wrong)
        assert session.latest() is None


def test_a_verify_hook_settles_what_raised(place: dict[str, Any]) -> None:
    @tool(effect="mutate", verify=lambda args, key: NotLanded())
    def charge(cents: int) -> str:
        raise ConnectionError("refused")

    with holdfast.open(**place) as store:
        session = store.session()
        model = ScriptedModel([call("charge", cents=5), "No money."], price=Price())
        outcome = Agent(session, model, tools=[charge]).run("pay")
        assert outcome.text == "No money."
        latest = session.latest()
        assert latest is not None
        assert results(read_transcript(latest["transcript"])) == [
            "charge raised ConnectionError: refused"
        ]
