"""The rules of sessions and of their versions, on both databases and in both colours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import (
    CheckpointNotFound,
    InvalidArgument,
    LeaseLost,
    Refused,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
    Submission,
    VersionConflict,
)
from holdfast.checkpoints import Heads
from holdfast.checkpoints.keys import VERSIONS
from holdfast.clock import iso
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.records import KINDS
from holdfast.sessions import Identity
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours, sql
from tests.checkpoints.tables import dump


def writes(session: Any) -> dict[str, Any]:
    """Everything that writes a session's versions or decides over it."""
    return {
        "save": lambda: session.save(x=1),
        "append": lambda: session.append("log", [1]),
        "record": lambda: session.record("turn"),
        "rewind": lambda: session.rewind(1),
        "end": session.end,
        "lease": lambda: session.lease("me", 60),
    }


# Status


@both_colours
async def test_every_end_refuses_writes_and_only_reopening_goes_on(subject: Subject) -> None:
    store = await subject.open()
    for number, status in enumerate(("completed", "failed", "cancelled")):
        session = await done(store.session(f"s{number}"))
        await done(session.append("log", ["a"]))
        if status == "cancelled":
            assert await done(session.cancel()) == [f"s{number}"]
        else:
            await done(session.end(status))
        before = await done(dump(store))
        for write in writes(session).values():
            error = await raises(SessionEnded, write)
            assert (error.session_id, error.status) == (session.id, status)
        error = await raises(SessionEnded, partial(store.session, session.id))
        assert (
            str(error) == f"session {session.id} is {status}; open it with reopen=True to continue"
        )
        assert await done(session.cancel()) == []
        assert await done(dump(store)) == before
        assert (await done(session.at(1)))["log"] == ["a"]
        fork = await done(session.fork(2))
        assert (await done(fork.info())).status == "active"
        again = await done(store.session(session.id, reopen=True))
        assert (await done(again.append("log", ["b"]))).version == 4
        assert (await done(again.latest()))["log"] == ["a", "b"]
        found = await done(again.history(kind="state_transition"))
        assert [checkpoint.data for checkpoint in found] == [
            {"from": status, "to": "active"},
            {"from": "active", "to": status},
        ]
        kinds = [event.kind for event in await done(store.events(session.id))]
        assert kinds.count("session_status_changed") == 2


@both_colours
async def test_a_waiting_session_can_be_written_resumed_and_cancelled(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(sql(store, "UPDATE hf_sessions SET status = 'waiting'"))
    await done(session.save(x=1))
    again = await done(store.session("s"))
    assert (await done(again.info())).status == "waiting"
    assert [found.id for found in await done(store.sessions(status="waiting"))] == ["s"]
    await done(again.cancel())
    latest = await done(again.latest())
    assert latest.data == {"from": "waiting", "to": "cancelled"}


@both_colours
async def test_resuming_moves_only_what_it_was_given(subject: Subject) -> None:
    clock = holdfast.VirtualClock()
    store = await subject.open(clock=clock)
    first = await done(store.session("s", name="n", agent="a", user="u", metadata={"title": "t"}))
    born = await done(first.info())
    clock.advance(5)
    again = await done(store.session("s", agent="b"))
    now = await done(again.info())
    assert (now.name, now.agent, now.user, now.metadata) == ("n", "b", "u", {"title": "t"})
    assert (now.created_at, now.last_resumed_at) == (born.created_at, born.created_at + 5000)
    assert (now.version, now.epoch, again.number) == (0, 1, first.number)
    await done(store.session("s", metadata={}))
    assert (await done(first.info())).metadata == {}


# Trees


@both_colours
async def test_a_root_is_inherited_by_id_and_never_changes(subject: Subject) -> None:
    store = await subject.open()
    one = await done(store.session("one", name="same"))
    two = await done(store.session("two", name="same"))
    child = await done(store.session("child", parent=one))
    grandchild = await done(store.session("grandchild", parent="child"))
    assert (child.root_id, grandchild.root_id, two.root_id) == ("one", "one", "two")
    for parent in (two, "two", grandchild):
        again = await done(store.session("child", parent=parent))
        info = await done(again.info())
        assert (again.root_id, info.root_id, info.parent_id) == ("one", "one", "one")
    assert [found.id for found in await done(one.tree())] == ["one", "child", "grandchild"]
    assert [found.id for found in await done(one.children())] == ["child"]
    fork = await done((await with_version(child)).fork(1))
    assert (fork.root_id, (await done(fork.info())).parent_id) == ("one", "one")
    root_fork = await done((await with_version(one)).fork(1))
    assert root_fork.root_id == root_fork.id
    assert (await done(root_fork.info())).parent_id is None
    assert await done(root_fork.children()) == []


async def with_version(session: Any) -> Any:
    await done(session.save(x=1))
    return session


def test_a_child_process_finds_the_session_that_started_it(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        parent = store.session("parent", name="planner")
        session = store.session("child", name="helper", parent=parent)
        environment = session.environment()
        assert environment == {
            "AGENT_SESSION_ID": "child",
            "AGENT_SESSION_NAME": "helper",
            "AGENT_ROOT_SESSION_ID": "parent",
            "AGENT_ROOT_SESSION_NAME": "planner",
            "HOLDFAST_URL": store.url,
        }
        program = (
            "import holdfast\n"
            "me = holdfast.current_session()\n"
            "with holdfast.open() as store:\n"
            "    store.session(me.id).append('log', [me.name, me.root_id, me.url == store.url])\n"
        )
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            cwd="/",
            check=True,
        )
        latest = session.latest()
        assert latest is not None
        assert latest["log"] == ["helper", "parent", True]
        text = "${AGENT_SESSION_ID} ${AGENT_SESSION_NAME} ${HOLDFAST_URL} ${AGENT_X} $HOME ${}"
        assert session.expand(text) == f"child helper {store.url} ${{AGENT_X}} $HOME ${{}}"
        assert session.expand("${AGENT_ROOT_SESSION_NAME}") == "planner"
        assert holdfast.current_session(environment) == Identity(
            "child", "helper", "parent", "planner", store.url
        )


@both_colours
async def test_the_environment_names_the_session_and_its_root_as_they_are_stored(
    subject: Subject,
) -> None:
    store = await subject.open()
    root = await done(store.session("root"))
    child = await done(store.session("child", parent=root))
    environment = await done(child.environment())
    assert environment["AGENT_SESSION_NAME"] == environment["AGENT_ROOT_SESSION_NAME"] == ""
    await done(store.session("root", name="planner"))
    await done(store.session("child", name="helper"))
    environment = await done(child.environment())
    assert environment["AGENT_SESSION_NAME"] == "helper"
    assert environment["AGENT_ROOT_SESSION_NAME"] == "planner"
    assert environment["AGENT_ROOT_SESSION_ID"] == "root"
    text = "${AGENT_ROOT_SESSION_NAME}/${AGENT_SESSION_NAME}"
    assert await done(child.expand(text)) == "planner/helper"
    with pytest.raises(holdfast.InvalidArgument, match="text must be text, not int"):
        await done(child.expand(1))


def test_a_process_is_who_the_store_says_it_is(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("mine")
        store.session("foreign")
        environment = session.environment()
    found = holdfast.current_session(environment)
    assert found is not None
    assert (found.id, found.name, found.root_id, found.root_name) == ("mine", None, "mine", None)
    with pytest.raises(holdfast.Forbidden, match="'foreign' is not the root of session 'mine'"):
        holdfast.current_session({**environment, "AGENT_ROOT_SESSION_ID": "foreign"})
    with pytest.raises(holdfast.SessionNotFound, match="'nobody'"):
        holdfast.current_session({**environment, "AGENT_SESSION_ID": "nobody"})
    assert holdfast.current_session({"AGENT_SESSION_ID": "mine"}) is None
    assert holdfast.current_session({"HOLDFAST_URL": environment["HOLDFAST_URL"]}) is None


def test_a_temporary_store_has_no_url_and_says_so() -> None:
    with holdfast.open("sqlite://") as store:
        session = store.session("s", name="helper")
        assert session.expand("${AGENT_SESSION_NAME}") == "helper"
        for ask in (
            lambda: store.url,
            lambda: session.url,
            session.environment,
            lambda: session.expand("${HOLDFAST_URL}"),
        ):
            with pytest.raises(holdfast.InvalidArgument, match="no other process can open it"):
                ask()
        assert repr(store) == "<Store sqlite://>"


@both_colours
async def test_listings_read_no_channel_and_cost_one_statement(subject: Subject) -> None:
    traces: list[Trace] = []
    texts: list[str] = []

    def probe(point: Point) -> None:
        texts.append(point.sql)

    store = await subject.open(hooks=Hooks(probe=probe, trace=traces.append))
    root = await done(store.session("root"))
    for number in range(30):
        child = await done(store.session(f"s{number}", parent=root, agent=f"a{number % 2}"))
        await done(child.save(log=["x"] * 100))
        if number % 3 == 0:
            await done(child.end())
    traces.clear()
    texts.clear()
    seen: list[str] = []
    after = 0
    while page := await done(store.sessions(after=after, limit=7)):
        seen += [info.id for info in page]
        after = page[-1].number
        if len(seen) == 7:
            gone = await done(store.session("s20"))
            await done(gone.delete())
    wanted = [f"s{number}" for number in range(30) if number != 20]
    assert seen == ["root", *wanted], "a deletion meanwhile moves nothing"
    newest = await done(store.sessions(newest_first=True, limit=2))
    older = await done(store.sessions(newest_first=True, before=newest[-1].number, limit=1))
    assert [info.id for info in (*newest, *older)] == ["s29", "s28", "s27"]
    found = await done(store.sessions(root="root", agent="a1", status="completed"))
    assert [info.id for info in found] == ["s3", "s9", "s15", "s21", "s27"]
    # A tree has the id of its root only.
    for given in ({}, {"status": "active"}, {"status": "completed"}, {"agent": "a1"}):
        assert await done(store.sessions(root="s3", **given)) == []
    assert len(await done(store.sessions(root=found[0], limit=1000))) == 30
    assert len(await done(root.children())) == 29
    assert len(await done(root.tree())) == 30
    reads = {"StoreSessions.sessions", "Session.children", "Session.tree"}
    costs = {trace.statements for trace in traces if trace.call in reads}
    assert costs == {1}
    listings = [text for text in texts if "SELECT number, id" in text and "ORDER BY" in text]
    assert all("hf_checkpoints" not in text and "hf_items" not in text for text in listings)


@both_colours
async def test_deleting_is_refused_while_something_lives(subject: Subject) -> None:
    clock = holdfast.VirtualClock()
    store = await subject.open(clock=clock)
    root = await done(store.session("root"))
    child = await done(store.session("child", parent=root))
    await done(child.save(log=[1] * 70))
    fork = await done(child.fork(1))
    error = await raises(SessionBusy, root.delete)
    assert (error.session_id, str(error)) == (
        "child",
        "session child is active; end it first, or delete with force=True",
    )
    await done(fork.end())
    await done(child.lease("driver", 10))
    await raises(SessionBusy, child.delete)
    clock.advance(10)
    assert await done(child.delete()) == ["child"]
    assert (await done(fork.latest()))["log"] == [1] * 70
    calls = (child.info, child.delete, child.cancel, lambda: child.fork(1), child.drive)
    # A session that is gone is not one that has only begun.
    reads = (child.latest, child.history, child.counts, child.resume_point, lambda: child.at(1))
    for call in (*calls, *reads, lambda: child.latest(kind="turn"), lambda: child.pin(1, "x")):
        error = await raises(SessionNotFound, call)
        assert str(error) == "there is no session 'child'"
    again = await done(store.session("child", parent=root))
    assert await done(again.latest()) is None
    assert (await done(again.save(x=2))).version == 1
    await raises(SessionNotFound, lambda: child.save(x=3))
    await done(again.lease("driver", 10))
    assert await done(root.delete(force=True)) == ["root", fork.id, "child"]
    assert await done(store.sessions()) == []
    deleted = [e.data for e in await done(store.events("root")) if e.kind == "session_deleted"]
    # Deleting a session empties its earlier events, the one of its own deletion too.
    assert deleted == [{}, {"sessions": 3}]


# Leases


@both_colours
async def test_while_a_lease_lives_only_its_driver_writes(subject: Subject) -> None:
    clock = holdfast.VirtualClock()
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))
    await done(session.save(x=0))
    driver = await done(store.find_session("s"))
    lease = await done(session.lease("driver", 30))
    driver.fence = lease.fence
    before = await done(dump(store))
    for name, write in writes(session).items():
        error = await raises(SessionBusy, write)
        assert (error.holder, error.expires_at) == ("driver", clock.now_ms() + 30_000), name
        until = f"(at {iso(error.expires_at)} unless renewed)"
        assert str(error) == (
            "session s is driven by 'driver'; only the driver may write, until its lease expires "
            + until
        ), name
    assert await done(dump(store)) == before
    await done(driver.save(x=1))
    # What says something about versions, or reads them, stays open to all.
    await done(session.pin(1, "good"))
    await done(session.attest(1, ["seen"]))
    await done(session.fork(1))
    await done(store.session("s"))
    assert (await done(session.latest()))["x"] == 1
    clock.advance(29.999)
    await raises(SessionBusy, writes(session)["save"])
    clock.advance(0.001)
    await done(session.save(x=2))
    await done(driver.save(x=3))
    heir = await done(session.lease("heir", 30))
    assert heir.fence == lease.fence + 1
    before = await done(dump(store))
    started = {
        "submit": lambda: store.work.submit("t", session=driver),
        "submit_many": lambda: store.work.submit_many([Submission("t", session=driver)]),
        "child": lambda: store.session("child", parent=driver),
    }
    for name, write in {**writes(driver), **others(driver), **started}.items():
        if name != "lease":
            lost = await raises(LeaseLost, write)
            assert (lost.fence, lost.current_fence) == (1, 2), name
    for stale in (lambda: session.renew(lease, 30), lambda: session.release(lease)):
        await raises(LeaseLost, stale)
    assert await done(dump(store)) == before
    await done(session.release(heir))
    await done(session.save(x=4))
    driver.fence = heir.fence
    lost = await raises(LeaseLost, lambda: driver.save(x=5))
    assert "this driver's fence 2 was released" in str(lost)


def others(session: Any) -> dict[str, Any]:
    return {
        "fork": lambda: session.fork(1),
        "pin": lambda: session.pin(1, "x"),
        "unpin": lambda: session.unpin(1),
        "attest": lambda: session.attest(1, "x"),
        "cancel": session.cancel,
        "delete": lambda: session.delete(force=True),
    }


@both_colours
async def test_a_driver_keeps_its_lease_by_its_heart(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    driver = await done(session.drive("me", lease_seconds=3))
    first = (await done(session.info())).lease_expires_at
    # It is renewed every second; this waits until it was renewed twice.
    while (await done(session.info())).lease_expires_at < first + 1_500:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert not driver.held.is_lost
    await raises(SessionBusy, lambda: session.save(x=1))
    await done(driver.save(x=2))
    await done(driver.close())
    await done(session.save(x=3))
    async_with = await done(session.drive())
    assert async_with.fence == 2
    await done(async_with.end())
    await done(async_with.close())
    assert (await done(session.info())).holder is None
    deleted = await done((await done(store.session("t"))).drive())
    await done((await done(store.find_session("t"))).delete(force=True))
    await done(deleted.close())


# Versions


@both_colours
async def test_a_save_can_insist_on_the_version_it_knows(subject: Subject) -> None:
    store = await subject.open()
    other = await subject.open()
    session = await done(store.session("s"))
    assert (await done(session.save(x=1, expected_version=0))).version == 1
    elsewhere = await done(other.find_session("s"))
    await done(elsewhere.append("log", [1], expected_version=1))
    late = (
        lambda: session.save(x=2, expected_version=1),
        lambda: session.append("log", [2], expected_version=1),
        lambda: session.record("turn", expected_version=3),
    )
    for call in late:
        error = await raises(VersionConflict, call)
        assert error.current_version == 2
        expected = error.expected_version
        wanted = f"session s is at version 2, not {expected}; load it and decide again"
        assert str(error) == wanted
    calls: list[Any] = [partial(attempt, session, number) for number in range(12)]
    if subject.colour == "sync":
        calls = [partial(asyncio.run, call()) for call in calls]
    outcomes = await subject.together(calls)
    assert sorted(outcomes) == ["conflict"] * 11 + ["saved"]
    assert (await done(session.info())).version == 3


async def attempt(session: Any, number: int) -> str:
    try:
        await done(session.save(x=number, expected_version=2))
    except VersionConflict:
        return "conflict"
    return "saved"


@both_colours
async def test_each_of_many_at_once_loads_back_what_it_saved(subject: Subject) -> None:
    """One store, one session, one channel: full lists that share beginnings, and appends."""
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(log=[0], other=[]))
    saved: dict[int, Any] = {}

    async def save(number: int) -> None:
        for turn in range(6):
            wanted = [0, *([number] * (turn * 20))]
            if turn % 3 == 2:
                await done(session.append("other", [[number, turn]]))
            else:
                saved[(await done(session.save(log=wanted))).version] = wanted

    if subject.colour == "async":
        await asyncio.gather(*(save(number) for number in range(10)))
    else:
        tasks = (asyncio.to_thread(asyncio.run, save(number)) for number in range(10))
        await asyncio.gather(*tasks)
    assert len(saved) == 40
    for version, wanted in saved.items():
        assert (await done(session.at(version)))["log"] == wanted
    latest = await done(session.latest())
    assert latest.version == 61
    assert sorted(latest["other"]) == [[number, turn] for number in range(10) for turn in (2, 5)]


RESUME = [
    ([], 1),
    (["start 1"], 1),
    (["start 1", "end 1"], 2),
    (["start 1", "end 1", "start 2"], 2),
    (["start 1", "end 1", "start 2", "error"], 2),
    (["start 1", "end 1", "error", "error"], 2),
    (["start 3", "start 1"], 1),
    (["end 7", "turn", "tool", "approval"], 8),
    (["start 1", "start 2", "rewind 1"], 1),
    (["start 1", "end 1", "rewind 1", "error"], 1),
    (["start 1", "end 1", "rewind 1", "end 1", "rewind 2"], 2),
    (["start 5", "rewind 1", "rewind 2", "error"], 5),
]


@both_colours
async def test_the_resume_point_is_the_newest_iteration_on_the_path(subject: Subject) -> None:
    store = await subject.open()
    names = {"tool": "tool_executed", "error": "error_boundary", "approval": "approval_point"}
    for steps, wanted in RESUME:
        session = await done(store.session())
        for step in steps:
            name, _, number = step.partition(" ")
            if name == "rewind":
                await done(session.rewind(int(number)))
            elif name in {"start", "end"}:
                await done(session.record(f"iteration_{name}", {"iteration": int(number)}))
            else:
                await done(session.record(names.get(name, name), None))
        point = await done(session.resume_point())
        assert point.iteration == wanted, steps
        if not steps:
            assert point.checkpoint is None
        else:
            fork = await done(session.fork(len(steps)))
            assert (await done(fork.resume_point())).iteration == wanted, steps


@both_colours
async def test_latest_and_resume_point_of_forks_follow_the_path_they_came_by(
    subject: Subject,
) -> None:
    store = await subject.open()
    origin = await done(store.session("origin"))
    for number in range(1, 6):
        await done(origin.record("iteration_start", {"iteration": number}))
    await done(origin.rewind(2))
    at_the_rewind = await done(origin.fork(6))
    assert (await done(at_the_rewind.resume_point())).iteration == 2
    newest = await done(at_the_rewind.latest(kind="iteration_start"))
    assert newest.version == 2
    aside = await done(origin.fork(4))
    assert (await done(aside.resume_point())).iteration == 4
    await done(aside.rewind(3))
    assert (await done(aside.resume_point())).iteration == 3
    below = await done(aside.fork(2))
    assert [found.version for found in await done(below.history())] == [2, 1]
    await raises(CheckpointNotFound, lambda: below.at(3))
    await done(below.save(x=1))
    assert [found.version for found in await done(below.history())] == [3, 2, 1]
    assert (await done(below.resume_point())).iteration == 2


@both_colours
async def test_pins_and_attestations_belong_to_the_sessions_own_versions(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    for number in range(3):
        await done(session.save(x=number))
    fork = await done(session.fork(2))
    await done(fork.pin(2, "the fork's own copy"))
    for call in (fork.pin, fork.attest):
        error = await raises(InvalidArgument, partial(call, 1, "why"))
        assert str(error) == "version 1 belongs to the session that this one was forked from", (
            "it is pinned there"
        )
    await raises(CheckpointNotFound, lambda: session.pin(4, "never written"))
    await done(session.pin(1, "one"))
    await done(session.pin(1, "two"))
    await done(session.unpin(1))
    await done(session.unpin(1))
    await done(session.attest(1, {"test": "green"}))
    await done(session.attest(1, ["again"]))
    found = await done(dump(store))
    assert [row["key"] % VERSIONS for row in found["hf_pins"]] == [2]
    evidence = [
        store.runtime.codec.unpack(row["evidence"], context=("hf_attestations", str(row["key"])))
        for row in found["hf_attestations"]
    ]
    assert evidence == [{"test": "green"}, ["again"]]
    await done(session.end())
    await done(session.pin(3, "people may still speak of an ended session"))


# What the database itself refuses


INSERT = """
INSERT INTO hf_checkpoints (key, epoch, kind, iteration, state_sequence, manifest, created_at)
VALUES (:key, 1, :kind, CAST(:iteration AS INTEGER), 0, CAST(:manifest AS BLOB), 0)
"""


@both_colours
async def test_the_database_refuses_unknown_words(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    before = await done(dump(store))
    await raises(InvalidArgument, lambda: session.record("note"))
    row = {"key": session.number * VERSIONS + 9, "manifest": b"x"}
    bad: list[dict[str, Any]] = [
        {"kind": "note", "iteration": None},
        {"kind": "", "iteration": None},
        {"kind": "TURN", "iteration": None},
        {"kind": "turn", "iteration": 1},
        {"kind": "iteration_start", "iteration": None},
    ]
    for columns in bad:
        await raises(Refused, partial(sql, store, INSERT, **row, **columns))
    for change in ("status = 'running'", "version = -1", "epoch = 0", "id = NULL"):
        await raises(Refused, partial(sql, store, f"UPDATE hf_sessions SET {change}"))
    assert await done(dump(store)) == before
    for kind in KINDS:
        iteration = 1 if kind.startswith("iteration") else None
        await done(sql(store, INSERT, **{**row, "kind": kind, "iteration": iteration}))
        row["key"] += 1


@both_colours
async def test_the_database_refuses_to_change_a_version(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(x=1))
    await done(session.save(x=2))
    before = await done(dump(store))
    columns = ("key", "epoch", "kind", "manifest", "data", "metadata", "created_at")
    refused = [f"UPDATE hf_checkpoints SET {column} = {column}" for column in columns]
    refused += ["DELETE FROM hf_checkpoints", "DELETE FROM hf_checkpoints WHERE kind = 'turn'"]
    for statement in refused:
        error = await raises(Refused, partial(sql, store, statement))
        assert "hf_checkpoints is append-only" in str(error)
    open_door = "INSERT INTO hf_doors (name) VALUES ('a door')"
    await raises(Refused, partial(sql, store, open_door, refused[0]))
    assert await done(dump(store)) == before
    await done(
        sql(
            store,
            open_door,
            f"DELETE FROM hf_checkpoints WHERE key = {session.number * VERSIONS + 1}",
            "DELETE FROM hf_doors",
        )
    )
    await raises(Refused, partial(sql, store, "DELETE FROM hf_checkpoints"))
    assert (await done(session.latest()))["x"] == 2
    assert (await done(session.save(x=3))).version == 3


@both_colours
async def test_a_composition_that_fails_leaves_neither_rows_nor_memories(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(log=list(range(60))))

    def compose(tx: Any, *, fails: bool) -> Any:
        inside = tx.within(session)
        yield from inside.append("log", list(range(60, 70)))
        yield from inside.save(log=[*range(70), "edited"], memo="m" * 200)
        fork = yield from inside.fork(2, id="fork")
        yield from fork.append("log", ["f"])
        child = yield from tx.session("child", parent=session)
        yield from child.save(x=1)
        yield from inside.move_back(1)
        yield from inside.end()
        if fails:
            raise KeyError("on purpose")

    before = await done(dump(store))
    await raises(KeyError, lambda: store.run(compose, fails=True))
    assert await done(dump(store)) == before
    await done(session.append("log", ["after"]))
    assert (await done(session.latest()))["log"] == [*range(60), "after"]
    await done(session.rewind(1))
    await done(store.run(compose, fails=False))
    fork = await done(store.find_session("fork"))
    assert (await done(fork.latest()))["log"] == [*range(60), "after", "f"]
    assert (await done(session.at(5)))["log"] == [*range(70), "edited"]
    assert (await done(session.latest()))["log"] == list(range(60))
    assert (await done(session.info())).status == "completed"


def test_hundreds_of_remembered_sessions_are_forgotten_without_harm(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.checkpoints import changes

    monkeypatch.setattr(changes, "TOTAL_BYTES_MAX", 20_000)
    with holdfast.open(**place, durability="normal") as store:
        sessions = [store.session(f"s{number}") for number in range(12)]
        for turn in range(9):
            for number, session in enumerate(sessions):
                full = [f"{number} {index}" for index in range(turn * 15 + 1)]
                session.save(log=full)
        assert 0 < Heads.of(store.runtime)._total_bytes <= 20_000
        for number, session in enumerate(sessions):
            for turn in range(9):
                full = [f"{number} {index}" for index in range(turn * 15 + 1)]
                assert session.at(turn + 1)["log"] == full


@both_colours
async def test_what_was_saved_loads_under_narrower_limits(subject: Subject) -> None:
    wide = await subject.open()
    session = await done(wide.session("s", metadata={"title": "t" * 90}))
    channels = {
        "small": "s" * 100,
        "large": "l" * 5000,
        "log": [{"text": "x" * 200}] * 70,
        "nested": {"a": [[[[1]]]]},
        "number": 2**100,
    }
    await done(session.save(channels, data="d" * 100, metadata={"m": "m" * 90}))
    limits = holdfast.Limits(value_bytes=64, record_bytes=64, depth=2)
    narrow = await subject.open(limits=limits)
    found = await done(narrow.find_session("s"))
    loaded = await done(found.latest())
    assert loaded.channels == channels
    assert (loaded.data, loaded.metadata) == ("d" * 100, {"m": "m" * 90})
    assert (await done(found.info())).metadata == {"title": "t" * 90}
    await raises(holdfast.LimitExceeded, lambda: found.save(x="x" * 65))


@both_colours
async def test_a_channel_that_is_not_there_is_named_with_those_that_are(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.save(plan=1, notes=2))
    latest = await done(session.latest())
    with pytest.raises(KeyError) as caught:
        latest["transcript"]
    assert caught.value.args == (
        "version 1 of session s has no channel 'transcript'; it has plan, notes",
    )
