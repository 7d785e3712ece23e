"""Plans: typed steps that come back as they were, and three kinds of nothing."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.agent import Agent, Plan, Postcondition, ScriptedModel, Step, call, read_plan
from holdfast.agent.plan import UNSET, write_plan
from holdfast.codec import Codec
from holdfast.testing.subject import Subject, done
from tests.agent.helpers import run
from tests.checkpoints.colours import both_colours

FULL = Plan(
    goal="a trip",
    steps=(
        Step(
            id="look",
            title="Look at prices",
            status="done",
            postconditions=(Postcondition(text="a price is known", evidence={"price": 120}),),
            evidence="call_7",
        ),
        Step(id="pay", title="Pay", postconditions=(Postcondition(text="paid once"),)),
    ),
)


def test_a_plan_comes_back_typed_and_equal() -> None:
    plan = read_plan(write_plan(FULL))
    assert plan == FULL
    assert plan is not None
    assert isinstance(plan.step("look").postconditions[0], Postcondition)
    assert plan.step("look").postconditions[0].is_met
    assert not plan.step("pay").postconditions[0].is_met
    assert not plan.is_done


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"steps": []},
        {"goal": None},
        {"format": 1, "goal": "", "steps": [{"id": "a"}]},
        {"steps": [{"evidence": None, "id": "a", "title": "", "later": 1}], "x": {}},
        {"steps": [{"id": "a", "evidence": {}, "postconditions": []}]},
        {
            "steps": [
                {"id": "a", "postconditions": [{"text": "t", "evidence": None}, {"text": "u"}]}
            ]
        },
    ],
)
def test_none_empty_and_missing_stay_distinct(stored: dict[str, Any]) -> None:
    codec = Codec()
    assert codec.encode(write_plan(read_plan(stored))) == codec.encode(stored)


def test_no_plan_is_no_plan() -> None:
    assert read_plan(None) is None
    assert write_plan(None) is None
    assert Step(id="a").evidence is UNSET
    assert Step(id="a", evidence=None).to_plain()["evidence"] is None


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"steps": [{"title": "x"}]}, r"steps\[0\] has no 'id'"),
        ({"steps": [{"id": "a", "status": "maybe"}]}, "status is 'maybe'"),
        ({"steps": [{"id": "a"}, {"id": "a"}]}, "two steps with the same id"),
        ({"format": 9}, "reads formats up to 1"),
        ([], "must be a dict"),
    ],
)
def test_what_is_no_plan_says_why(stored: Any, says: str) -> None:
    with pytest.raises(holdfast.HoldfastError, match=says):
        read_plan(stored)


def test_steps_are_replaced_by_their_id() -> None:
    plan = FULL.with_step(Step(id="pay", status="skipped")).with_step(Step(id="new", status="done"))
    assert [step.id for step in plan.steps] == ["look", "pay", "new"]
    assert plan.is_done
    with pytest.raises(holdfast.InvalidArgument, match="no step 'zzz'"):
        plan.step("zzz")


@both_colours
async def test_a_model_makes_a_plan_that_is_stored_with_its_turn(subject: Subject) -> None:
    store = await subject.open()
    steps = [{"id": "a", "title": "First", "postconditions": [{"text": "done"}]}]
    script = [call("update_plan", steps=[{"id": 7}]), call("update_plan", steps=steps), "Planned."]
    session = await done(store.session())
    agent = Agent(session, ScriptedModel(script), planning=True)
    await run(agent, "plan")
    latest = await done(session.latest())
    assert latest["plan"] == {"format": 1, "steps": steps}
    assert agent.plan is not None
    assert agent.plan.step("a").title == "First"
    contents = [
        block["content"]
        for message in latest["transcript"]
        for block in message["blocks"]
        if block["kind"] == "tool_result"
    ]
    assert "id must be str" in contents[0]
    assert contents[1] == "The plan is stored."


@both_colours
async def test_a_loop_keeps_every_kind_of_nothing_in_the_channel(subject: Subject) -> None:
    store = await subject.open()
    stored: dict[str, Any] = {"missing": UNSET, "none": None, "empty": {}}
    for name, before in stored.items():
        session = await done(store.session(name))
        if before is not UNSET:
            await done(session.save({"plan": before}))
        await run(Agent(session, ScriptedModel(["hello"])), "hi")
        channels = (await done(session.latest())).channels
        assert channels.get("plan", UNSET) == before
        assert ("plan" in channels) == (before is not UNSET)
        if before == {}:
            assert type(channels["plan"]) is dict


@both_colours
async def test_a_given_plan_starts_a_session_and_does_not_replace_a_stored_one(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session())
    await run(Agent(session, ScriptedModel(["one", "two"]), plan=FULL), "hi")
    assert (await done(session.latest()))["plan"] == FULL.to_plain()
    second = Agent(session, ScriptedModel(["one", "two"]), plan=Plan(goal="another"))
    await run(second, "again")
    assert second.plan == FULL
