"""Crashes of agents: every commit is one to crash at, and a double effect is found."""

from __future__ import annotations

from typing import Any, Literal

import pytest

import holdfast
from holdfast.agent import Agent, ScriptedModel, call
from holdfast.effects.tools import Tool
from holdfast.errors import InvalidArgument, Unresolved
from holdfast.worlds import MailSystem, World, explore_crashes, invariant

SCRIPT = [call("send", to="ann"), "Sent."]


def make_world() -> World:
    return World({"mail": MailSystem()})


def mail(world: World) -> MailSystem:
    system = world.systems["mail"]
    assert isinstance(system, MailSystem)
    return system


def sending(
    world: World, effect: Literal["write", "mutate"], *, verifies: bool = False
) -> Tool[..., Any]:
    """A tool that sends a mail; whether it may be repeated is what it says of itself."""

    def find(args: dict[str, Any], idempotency_key: str) -> object:
        is_sent = any(each["body"] == idempotency_key for each in mail(world).sent)
        return holdfast.Landed("sent") if is_sent else holdfast.NotLanded()

    @holdfast.tool(effect=effect, verify=find if verifies else None)
    def send(to: str, *, idempotency_key: str) -> str:
        """Send a mail."""
        mail(world).send(to, "hello", idempotency_key)
        return "sent"

    return send


def run(world: World, store: holdfast.Store, tool: Tool[..., Any]) -> None:
    session = store.session("s", reopen=True)
    outcome = Agent(session, ScriptedModel(SCRIPT), tools=[tool]).run("go", message_id="m")
    assert outcome.text == "Sent."


def safe(world: World, store: holdfast.Store) -> None:
    run(world, store, sending(world, "mutate", verifies=True))


def careful(world: World, store: holdfast.Store) -> None:
    run(world, store, sending(world, "mutate"))


def unsafe(world: World, store: holdfast.Store) -> None:
    """It says that it may be repeated, and sends another mail each time."""
    run(world, store, sending(world, "write"))


@invariant
def at_most_one_mail(world: World) -> None:
    assert len(mail(world).sent) <= 1, f"{len(mail(world).sent)} mails"


@invariant
def one_mail(world: World) -> bool:
    return len(mail(world).sent) == 1


def test_a_safe_agent_survives_every_crash_and_the_places_are_listed() -> None:
    result = explore_crashes(make_world, safe, [one_mail])
    assert result.has_passed, result.summary()
    places = [crash.place for crash in result.crashes]
    # Before and after each commit, in the order of a run.
    assert [place.split()[0] for place in places] == ["before", "after"] * (len(places) // 2)
    assert {place.split()[-1] for place in places} >= {
        "StoreSessions.session", "Ledger.take", "Ledger.finish", "Session.end",
    }  # fmt: skip
    assert [crash.number for crash in result.crashes] == list(range(1, len(places) + 1))
    assert {crash.ended for crash in result.crashes} == {"finished"}
    lines = result.summary().splitlines()
    assert len(lines) == len(places) + 1
    assert lines[0] == "1. before the commit of StoreSessions.session: finished"
    assert (
        lines[-1] == f"{len(places)} crashes, {len(places)} finished afterwards, 0 with violations"
    )


def test_the_double_effect_of_an_unsafe_tool_is_found_where_it_happens() -> None:
    with make_world() as world:
        result = explore_crashes(world, unsafe, [at_most_one_mail])
        assert mail(world).sent == []
        assert len(world.checkpoints) == 0
    assert not result.has_passed
    assert result.undisturbed == ()
    [found] = result.violations
    assert found.place == "before the commit of Ledger.finish"
    [problem] = found.problems
    assert problem.startswith("at_most_one_mail: AssertionError: 2 mails")
    assert f"{found.place}: finished; at_most_one_mail" in result.summary()


def test_a_doubtful_effect_stops_the_agent_unless_that_is_not_expected() -> None:
    result = explore_crashes(make_world, careful, [at_most_one_mail])
    assert result.has_passed
    stopped = [crash.place for crash in result.crashes if crash.ended.startswith("Unresolved: ")]
    # Nobody can know whether the mail was sent before or after the crash.
    assert stopped == ["after the commit of Ledger.take", "before the commit of Ledger.finish"]
    strict = explore_crashes(make_world, careful, [at_most_one_mail], expects=())
    assert [crash.place for crash in strict.violations] == stopped
    assert "the resumption raises Unresolved: " in strict.violations[0].problems[0]


def test_what_is_wrong_without_a_crash_and_what_is_not_reached_again_is_said() -> None:
    runs: list[int] = []

    def forgetful(world: World, store: holdfast.Store) -> None:
        session = store.session("s", reopen=True)
        runs.append(1)
        if len(runs) == 1:
            session.append("notes", ["first"])

    result = explore_crashes(make_world, forgetful, [one_mail])
    assert result.undisturbed == ("one_mail: one_mail does not hold",)
    assert [crash.place for crash in result.crashes[2:]] == ["-", "-"]
    assert result.crashes[2].problems == ("this commit was not reached again",)


def test_what_runs_while_a_crash_unwinds_writes_nothing() -> None:
    def tidy(world: World, store: holdfast.Store) -> None:
        session = store.session("s", reopen=True)
        latest = session.latest()
        mail(world).send("log", str(latest and latest["notes"]))
        try:
            session.append("notes", ["begun"])
        finally:
            session.append("notes", ["tidied up"])

    @invariant
    def nothing_was_tidied_up(world: World) -> bool:
        return len(mail(world).sent) < 2 or "tidied up" not in mail(world).sent[-1]["subject"]

    result = explore_crashes(make_world, tidy, [nothing_was_tidied_up])
    assert len(result.crashes) == 6
    # After its last commit it really was.
    assert [crash.number for crash in result.violations] == [6]


def test_bad_arguments_and_errors_of_the_agent_itself_are_raised() -> None:
    with pytest.raises(InvalidArgument, match="invariants must not be empty"):
        explore_crashes(make_world, safe, [])
    with pytest.raises(InvalidArgument, match="must be a World or a function that returns one"):
        explore_crashes(lambda: 7, safe, [one_mail])  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidArgument, match=r"crashes to try, and max_crashes is 2"):
        explore_crashes(make_world, safe, [one_mail], max_crashes=2)

    def broken(world: World, store: holdfast.Store) -> None:
        raise Unresolved("by itself", effect_id="e", tool="t")

    with pytest.raises(Unresolved, match="by itself"):
        explore_crashes(make_world, broken, [one_mail])
