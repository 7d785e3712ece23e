"""Killed agents: what another process finds, finishes and never does twice."""

from __future__ import annotations

import os
import signal
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each child.
from holdfast.agent import Agent, Called, Plan, Step, call, every, read_plan, read_transcript
from holdfast.agent.progress import Answered, Asking, Saved
from holdfast.checkpoints.keys import VERSIONS
from holdfast.effects.tools import tool
from holdfast.errors import CheckpointNotFound, Unresolved
from holdfast.kernel.operation import rows
from holdfast.testing.crashes import CrashPoints
from tests.agent.helpers import World, results
from tests.crash.children import run as run_child
from tests.work.working import unhurried

KILLED = -signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_run(
    place: dict[str, Any], world: World, script: Any, dies_at: Any, **options: Any
) -> None:
    """Run an agent in a child that kills itself with SIGKILL when progress matches."""

    def work(say: Any) -> None:
        def listen(event: Any) -> None:
            if dies_at(event):
                die()

        with holdfast.open(**place) as store:
            agent = Agent(
                store.session("s"),
                world.model(script),
                instance="agent-1",
                on_progress=listen,
                **{"tools": world.tools(lease_seconds=0.3), **options},
            )
            agent.run("go", message_id="m-1")

    with unhurried():
        status, _ = run_child(work)
    assert status == KILLED


def resumed(
    place: dict[str, Any], world: World, script: Any, message: str | None = "go", **options: Any
) -> Any:
    with unhurried(), holdfast.open(**place) as store:
        session = store.session("s")
        agent = Agent(
            session,
            world.model(script),
            instance="agent-1",
            **{"tools": world.tools(lease_seconds=0.3), **options},
        )
        message_id = "m-1" if message == "go" else None
        return agent.run(message, message_id=message_id), session.latest(), session.spent()


def really_spent(world: World) -> Decimal:
    return sum((Decimal(line.split()[1]) for line in world.lines if "asked" in line), Decimal(0))


THREE = [
    [call("look", city="Oslo"), call("write", path="plan", text="Oslo"), call("mail", to="ann")],
    "Booked.",
]


@pytest.mark.parametrize("cadence", ["turn", "call", every(turns=10)], ids=["turn", "call", "10"])
def test_three_calls_interrupted_between_the_second_and_the_third(
    place: dict[str, Any], tmp_path: Path, cadence: Any
) -> None:
    """The same assistant message, only what is missing runs, the model is asked nothing twice."""
    world = World(tmp_path)
    killed_run(
        place,
        world,
        THREE,
        lambda event: isinstance(event, Called) and event.call.name == "write",
        cadence=cadence,
    )
    assert [line.split()[0] for line in world.lines] == ["asked", "look", "write"]
    with holdfast.open(**place) as store:
        latest = store.find_session("s").latest()
        assert latest is not None
        before = [
            message
            for message in read_transcript(latest["transcript"])
            if message.role == "assistant"
        ]
    outcome, latest, spent = resumed(place, world, THREE)
    assert outcome.text == "Booked."
    assert [line.split()[0] for line in world.lines] == ["asked", "look", "write", "mail", "asked"]
    messages = read_transcript(latest["transcript"])
    assert [message for message in messages if message.role == "assistant"][:1] == before
    assert [message.role for message in messages] == [
        "user", "assistant", "tool", "tool", "tool", "assistant",
    ]  # fmt: skip
    replays = [result.replay_of for message in messages for result in message.results]
    assert [bool(replay) for replay in replays] == (
        [False, False, False] if cadence == "call" else [True, True, False]
    )
    assert (spent.usd, spent.uncertain_attempts) == (really_spent(world), 0)


@pytest.mark.parametrize("moment", ["asking", "answered", "saved"])
def test_the_budget_after_a_crash_is_the_money_really_spent(
    place: dict[str, Any], tmp_path: Path, moment: str
) -> None:
    """Also when the crash came before the turn's checkpoint, or while the model was being asked."""
    world = World(tmp_path)
    kinds: dict[str, Any] = {"asking": Asking, "answered": Answered, "saved": Saved}

    def dies_at(event: Any) -> bool:
        return isinstance(event, kinds[moment]) and event.iteration == 1

    if moment == "asking":

        def dying(request: Any) -> Any:
            return THREE[sum(message.role == "assistant" for message in request.messages)]

        # The request reached the model, and the process died before it had the answer.
        def work(say: Any) -> None:
            model = world.model(dying)

            def asked(request: Any) -> Any:
                model(request)
                die()

            asked.estimate = model.estimate  # type: ignore[attr-defined]
            with holdfast.open(**place) as store:
                Agent(store.session("s"), asked, tools=world.tools(), instance="agent-1").run(
                    "go", message_id="m-1"
                )

        assert run_child(work)[0] == KILLED
    else:
        killed_run(place, world, THREE, dies_at)
    outcome, latest, spent = resumed(place, world, THREE)
    assert outcome.text == "Booked."
    assert spent.usd == really_spent(world)
    assert spent.uncertain_attempts == (1 if moment == "asking" else 0)
    assert world.count("asked") == (3 if moment == "asking" else 2)
    assert latest["budget"]["spent_usd"] == float(spent.usd)
    assert (world.count("look"), world.count("write"), world.count("mail")) == (1, 1, 1)


def test_a_message_after_a_crash_comes_behind_the_finished_turn(
    place: dict[str, Any], tmp_path: Path
) -> None:
    world = World(tmp_path)
    killed_run(place, world, THREE, lambda event: isinstance(event, Answered))
    outcome, latest, _ = resumed(place, world, THREE, message="and hurry")
    assert outcome.text == "Booked."
    roles = [message.role for message in read_transcript(latest["transcript"])]
    assert roles == ["user", "assistant", "tool", "tool", "tool", "user", "assistant"]


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_dying_at_every_place_repeats_nothing_and_forgets_no_money(
    place: dict[str, Any], tmp_path: Path, step: int
) -> None:
    """Killed before and after each statement of a run, one at a time, and resumed each time."""
    script = [THREE[0], call("mail", to="ann"), "Booked."]
    world = World(tmp_path)
    tools = world.tools(lease_seconds=0.2)

    def run_once(session_id: str, points: CrashPoints) -> tuple[Any, Any]:
        points.is_armed = False
        with holdfast.open(**place, hooks=points.hooks) as store:
            session = store.session(session_id, reopen=True)
            points.is_armed = True
            agent = Agent(session, world.model(script), tools=tools, instance="a")
            return agent.run("go", message_id="m"), session.latest()

    number, status = 1, KILLED
    # Short leases, so that the dead are not waited for; the living keep theirs on a busy machine.
    with unhurried():
        while status == KILLED:
            world.path.write_text("")
            dying = partial(run_once, f"s{number}", CrashPoints(die_at=number, action="kill"))
            status, _ = run_child(lambda say, dying=dying: dying() and None)  # type: ignore[misc]
            check_outcome(
                world, *run_once(f"s{number}", CrashPoints()), f"killed at place {number}"
            )
            number += step
    assert status == 0
    # A run has more places than this, also where each is a request to a server.
    assert number > 30


def check_outcome(world: World, outcome: Any, latest: Any, where: str) -> None:
    spent = outcome.spent
    assert outcome.text == "Booked.", where
    assert world.count("mail") == 1, where
    # Who writes or reads once more after a crash in the middle of it has done no harm.
    assert world.count("write") in {1, 2}, where
    assert really_spent(world) <= spent.usd, where
    assert spent.usd - spent.uncertain_usd <= really_spent(world), where
    messages = read_transcript(latest["transcript"])
    assert [message.role for message in messages] == [
        "user", "assistant", "tool", "tool", "tool", "assistant", "tool", "assistant",
    ], where  # fmt: skip
    assert len(results(messages)) == 4, where
    assert messages[0].id == "m", where


# The exercises of "Try It Yourself", by their names.


def long_script(turns: int) -> list[Any]:
    return [*(call("mail", to=f"person {number}") for number in range(turns)), "All written."]


def test_exercise_1_crash_and_resume(place: dict[str, Any], tmp_path: Path) -> None:
    """Killed after turn 4 of a long session: the transcript is loaded, nothing is sent twice."""
    world = World(tmp_path)
    script = long_script(8)
    killed_run(
        place, world, script, lambda event: isinstance(event, Saved) and event.iteration == 4
    )
    with holdfast.open(**place) as store:
        latest = store.find_session("s").latest()
        assert latest is not None
        before = latest["transcript"]
        assert len(before) == 1 + 4 * 2
    outcome, latest, _ = resumed(place, world, script)
    assert outcome.text == "All written."
    assert latest["transcript"][: len(before)] == before
    assert (world.count("mail"), world.count("asked")) == (8, 9)


@pytest.mark.parametrize("is_verified", [True, False])
def test_exercise_1_a_pending_call_is_verified_or_surfaced(
    place: dict[str, Any], tmp_path: Path, is_verified: bool
) -> None:
    """Killed inside the tool, after its effect: verified, or handed to a person; never repeated."""
    world = World(tmp_path)
    safe = world.tools()[2].verify if is_verified else None

    @tool(effect="mutate", verify=safe, lease_seconds=0.3)
    def mail(to: str, *, idempotency_key: str) -> dict[str, Any]:
        world.note(f"mail {to} {idempotency_key}")
        if is_dying:
            die()
        return {"sent": to}

    is_dying = True
    script = [call("mail", to="ann"), "Sent."]
    killed_run(place, world, script, lambda event: False, tools=[mail])
    is_dying = False
    if not is_verified:
        with pytest.raises(Unresolved) as raised:
            resumed(place, world, script, tools=[mail])
        with holdfast.open(**place) as store:
            (effect,) = store.find_session("s").unresolved()
            assert effect.id == raised.value.effect_id
            store.resolve(effect.id, holdfast.Landed({"sent": "ann"}), by="ann")
    outcome, latest, _ = resumed(place, world, script, tools=[mail])
    assert outcome.text == "Sent."
    assert results(read_transcript(latest["transcript"])) == [{"sent": "ann"}]
    assert (world.count("mail"), world.count("asked")) == (1, 2)


def test_exercise_2_duplicate_write(place: dict[str, Any], tmp_path: Path) -> None:
    """The same mail twice in one session is sent once, also by another process; in two, twice."""
    world = World(tmp_path)
    script = [call("mail", to="ann"), "Sent.", call("mail", to="ann"), "Sent before."]
    for session_id in ("one", "one", "two"):
        with holdfast.open(**place) as store:
            session = store.session(session_id, reopen=True)
            Agent(session, world.model(script), tools=world.tools()).run("mail ann")
    assert world.count("mail") == 2
    with holdfast.open(**place) as store:
        latest = store.find_session("one").latest()
        assert latest is not None
        first, second = [
            result
            for message in read_transcript(latest["transcript"])
            for result in message.results
        ]
    assert first.content == second.content
    assert (first.replay_of, second.replay_of is not None) == (None, True)


def test_exercise_3_corruption_audit(place: dict[str, Any], tmp_path: Path) -> None:
    """Every version shows the session as it was; one that is removed takes no other with it."""
    world = World(tmp_path)
    script = [*long_script(3), "Once more."]
    with holdfast.open(**place) as store:
        session = store.session("s")
        Agent(session, world.model(script), tools=world.tools()).run("go")
        history = session.history()
        versions = [each.version for each in reversed(history)]
        assert versions == list(range(1, len(versions) + 1))
        assert session.counts()["turn"] == 4
        lengths = [len(session.at(version).channels["transcript"]) for version in versions]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 1 + 3 * 2 + 1
        whole = session.at(versions[-1])["transcript"]
        for version, length in zip(versions, lengths, strict=True):
            assert session.at(version)["transcript"] == whole[:length]
        middle = versions[len(versions) // 2]

        def remove(tx: holdfast.Transaction) -> holdfast.Op[None]:
            yield from rows("INSERT INTO hf_doors (name) VALUES ('audit')")
            key = session.number * VERSIONS + middle
            yield from rows("DELETE FROM hf_checkpoints WHERE key = :key", key=key)
            yield from rows("DELETE FROM hf_doors")

        store.run(remove)
    with holdfast.open(**place) as store:
        session = store.session("s", reopen=True)
        with pytest.raises(CheckpointNotFound):
            session.at(middle)
        assert session.at(middle - 1)["transcript"] == whole[: lengths[middle - 2]]
        outcome = Agent(session, world.model(script), tools=world.tools()).run("again")
        assert outcome.text == "Once more."
        assert session.history()[0].version > versions[-1]


def test_the_resume_example_ch21(place: dict[str, Any], tmp_path: Path) -> None:
    """Verify what was interrupted, rehydrate transcript and plan, go on from where it was left."""
    world = World(tmp_path)
    plan = Plan(goal="a trip", steps=(Step(id="look", title="Look", status="active"),))
    script = [*THREE, "As I said: booked."]
    killed_run(
        place,
        world,
        script,
        lambda event: isinstance(event, Called) and event.call.name == "look",
        plan=plan,
        cadence="call",
        scratchpad=tmp_path / "pad",
    )
    (tmp_path / "pad" / "notes.txt").write_text("already on disk")
    with holdfast.open(**place) as store:
        session = store.session("s")
        # 1. Side effects that were interrupted are surfaced.
        assert session.unresolved() == []
        # 2. What was in memory is rebuilt from the newest checkpoint.
        latest = session.latest()
        assert latest is not None
        assert read_plan(latest["plan"]) == plan
        transcript = read_transcript(latest["transcript"])
        assert [message.role for message in transcript] == ["user", "assistant", "tool"]
        # 3. The new message joins the conversation; it does not replace it.
        agent = Agent(session, world.model(script), tools=world.tools(), instance="agent-1")
        outcome = agent.run("continue from where we left off")
        assert outcome.text == "Booked."
        assert (agent.plan, agent.scratchpad) == (plan, tmp_path / "pad")
        messages = read_transcript(session.latest()["transcript"])  # type: ignore[index]
    assert messages[: len(transcript)] == transcript
    assert [message.text for message in messages if message.role == "user"] == [
        "go",
        "continue from where we left off",
    ]
    assert [line.split()[0] for line in world.lines] == ["asked", "look", "write", "mail", "asked"]


def test_an_imported_transcript_with_a_dangling_call_goes_on(
    place: dict[str, Any], tmp_path: Path
) -> None:
    """Of a conversation in the old format the last call is made, and an older one is repaired."""
    world = World(tmp_path)
    old = [
        {"id": "1", "role": "user", "created_at": "2026-01-01T00:00:00+00:00", "blocks": []},
        {
            "id": "2",
            "role": "assistant",
            "created_at": "2026-01-01T00:00:01+00:00",
            "blocks": [{"kind": "tool_call", "id": "a", "name": "look", "args": {"city": "Bonn"}}],
        },
        {
            "id": "3",
            "role": "user",
            "created_at": "2026-01-01T00:00:02+00:00",
            "blocks": [{"kind": "text", "text": "hello?"}],
        },
        {
            "id": "4",
            "role": "assistant",
            "created_at": "2026-01-01T00:00:03+00:00",
            "blocks": [{"kind": "tool_call", "id": "b", "name": "look", "args": {"city": "Oslo"}}],
        },
    ]
    seen: list[Any] = []

    def script(request: Any) -> str:
        seen.append([(message.role, results([message])) for message in request.messages])
        return "Oslo is 120."

    with holdfast.open(**place) as store:
        session = store.session("s")
        session.save(transcript=old)
        outcome = Agent(session, world.model(script), tools=world.tools()).run("well?")
    assert outcome.text == "Oslo is 120."
    assert [line.split()[0] for line in world.lines] == ["look", "asked"]
    roles = [role for role, _ in seen[-1]]
    assert roles == ["user", "assistant", "tool", "user", "assistant", "tool", "user"]
    assert "interrupted" in seen[-1][2][1][0]
    assert seen[-1][5][1] == [{"city": "Oslo", "price": 120}]
