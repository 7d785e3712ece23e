"""Deleting a session leaves nothing of what it held, but what a late retry must not miss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Landed, VersionConflict, trees
from holdfast.checkpoints import needs
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.kernel.operation import rows
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.maintenance.stores import sound

BLOBS = (bytes, memoryview)
TABLES = sorted(
    {
        name
        for file in Path(holdfast.__file__).parent.rglob("schema.sql")
        for name in re.findall(r"CREATE TABLE (hf_\w+)", file.read_text())
    }
)
CANARY = re.compile(rb"canary (\w+)")
PUT = {
    "name", "agent", "user", "metadata", "item", "single", "large", "small", "data", "about",
    "edited", "pin", "evidence", "argument", "result", "error", "refused", "lost", "landed", "ann",
    "note", "type", "input", "progress", "failure", "spend", "holder",
}  # fmt: skip
SHARED = {
    "agent", "key", "value", "why", "schema", "list", "member", "peer", "question", "mark", "noted",
    "artifact", "content", "context", "answer", "once",
}  # fmt: skip


@holdfast.tool(effect="mutate")
def pay(to: str) -> str:
    return "canary result"


@holdfast.tool(effect="mutate", atomic=True)
def refuse(to: str) -> None:
    raise ValueError("canary error")


@holdfast.tool(effect="mutate")
def lose(to: str) -> None:
    raise ConnectionError("canary doubt")


async def fill(store: Any, session: Any) -> None:
    """Put a canary into every text that a session can hold."""
    await done(session.append("list", ["canary item"] * 70))
    await done(session.append("list", ["canary single"]))
    await done(session.save(large="canary large" + "." * 2_000, small="canary small"))
    await done(session.record("turn", "canary data", metadata={"m": "canary about"}))
    await done(session.save(large="", small="", list=["canary edited"]))
    await done(session.rewind(3))
    await done(session.pin(2, "canary pin"))
    await done(session.attest(2, {"e": "canary evidence"}))
    await done(session.call(pay, to="canary argument", call_id="c1"))
    await raises(ValueError, lambda: session.call(refuse, to="canary refused"))
    await raises(holdfast.Unresolved, lambda: session.call(lose, to="canary lost"))
    (effect,) = await done(session.unresolved())
    await done(
        store.resolve(effect.id, Landed("canary landed"), by="canary ann", note="canary note")
    )
    await done(
        store.work.submit("canary type", "canary input", session=session, queue="q", max_retries=1)
    )
    (item,) = await done(store.work.claim("canary holder"))
    await done(item.progress("canary progress"))
    await done(item.fail("canary failure", delay_seconds=0))
    await done(session.spend("model", usd="0.1", details={"d": "canary spend"}))


async def canaries(store: Any) -> set[str]:
    """The canaries that can be read in any table."""

    def read(tx: Any) -> Any:
        found = []
        for table in TABLES:
            for row in (yield from rows(f"SELECT * FROM {table}")):
                found += [value.encode() for value in row.values() if isinstance(value, str)]
                found += [bytes(value) for value in row.values() if isinstance(value, BLOBS)]
        return b"\n".join(found)

    return {name.decode() for name in CANARY.findall(await done(store.run(read)))}


@both_colours
async def test_nothing_of_a_deleted_session_can_be_read(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    parent = await done(store.session("parent"))
    given = {"name": "canary name", "agent": "canary agent", "user": "canary user"}
    metadata = {"title": "canary metadata"}
    session = await done(store.session("doomed", parent=parent, metadata=metadata, **given))
    await fill(store, session)
    assert await canaries(store) == PUT
    positions = [(e.position, e.kind) for e in await done(store.events("parent", limit=1000))]
    await done(session.delete())
    # What a retry that comes late must be answered with.
    assert await canaries(store) == {"result", "landed"}
    events = await done(store.events("parent", limit=1000))
    assert [(event.position, event.kind) for event in events[:-2]] == positions
    assert [event.kind for event in events[-2:]] == ["work_cancelled", "session_deleted"]
    assert all(event.data == {} for event in events[:-1] if event.session_id == "doomed")
    assert any(event.data for event in events if event.session_id == "parent")
    assert events[-1].data == {"sessions": 1}
    again = await done(store.session("doomed"))
    assert (await done(again.call(pay, to="canary argument", call_id="c1"))).replayed
    assert (await done(again.call(lose, to="canary lost"))).value == "canary landed"
    await done(again.delete())
    assert (await done(store.spending()))[0].attempts == 1
    await done(store.prune(effect_days=0, vacuum=True))
    assert await canaries(store) == set()
    assert await done(store.effects()) == []
    for file in subject.directory.iterdir():
        assert CANARY.findall(file.read_bytes()) == [], file
    if subject.colour == "sync":
        sound(store)


async def share(store: Any, session: Any) -> None:
    """Put a canary into all that a tree shares, asks and waits for."""
    await done(session.state.set("canary key", "canary value"))
    # The audit trail keeps the name of a key that a person corrects.
    await done(session.state.set("corrected", 1, reason="canary why"))
    await done(session.state.set_rule("n", schema={"title": "canary schema"}))
    await raises(VersionConflict, lambda: session.state.set("canary key", 1, if_version=7))
    await done(
        session.state.append("canary list", ["canary member"], idempotency_key="canary once")
    )
    asked = await done(session.ask("canary peer", "canary question", correlation="canary mark"))
    await done(store.progress(asked.id, "canary noted"))
    await done(session.add_artifact("canary artifact", data="canary content"))
    await done(session.pause(context="canary context"))
    await done(store.answer(asked.id, "canary answer"))


@both_colours
async def test_nothing_of_what_a_deleted_tree_shared_and_asked_can_be_read(
    subject: Subject,
) -> None:
    store = await subject.open(durability="normal")
    session = await done(store.session("doomed", agent="canary agent"))
    await share(store, session)
    assert await canaries(store) == SHARED
    await done(session.delete(force=True))
    await done(store.prune(effect_days=0, vacuum=True))
    assert await canaries(store) == set()
    for file in subject.directory.iterdir():
        assert CANARY.findall(file.read_bytes()) == [], file


@both_colours
async def test_what_a_deletion_itself_stops_and_answers_leaves_no_data(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    parent = await done(store.session("parent"))
    session = await done(store.session("doomed", parent=parent, agent="canary agent"))
    await done(session.ask("canary peer"))
    await done(session.pause())
    await done(store.work.submit("canary type", session=session))
    await done(session.delete(force=True))
    assert await canaries(store) == set()
    events = await done(store.events("parent", limit=1000))
    kept = {event.kind for event in events if event.data and event.session_id != "parent"}
    assert kept == {"session_deleted"}


def test_a_deletion_stops_everything_before_it_removes_anything(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Together they are more than one pass may change; of each kind there are fewer.
    monkeypatch.setattr(trees, "ROWS_PER_PASS", 3)
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("doomed", parent=store.session("parent"), agent="a")
        for _ in range(2):
            store.work.submit("t", session=session)
            session.ask("peer")
        session.delete(force=True)
        events = store.events("parent", limit=1000)
    kinds = [event.kind for event in events if event.session_id == "doomed"]
    assert kinds.count("work_cancelled") == kinds.count("work_submitted") == 2


@both_colours
async def test_what_was_spent_is_told_without_details_after_a_deletion(subject: Subject) -> None:
    store = await subject.open(durability="normal")
    session = await done(store.session("s", parent=await done(store.session("parent"))))
    for id in ("a1", "a2"):
        await done(session.spend("model", usd="1", state="open", id=id, details={"d": "canary 1"}))
    await done(session.delete())
    given = {"usd": "2", "details": {"d": "canary late"}}
    assert (await done(session.spend("model", id="a1", **given))).details is None
    await done(session.spend("model", **given))
    corrected = await done(store.correct_spend("a2", usd="3", by="ann"))
    assert corrected.details["corrected_by"] == "ann"
    assert [str(each.usd) for each in await done(store.spends(session="s"))] == ["2", "3", "2"]
    assert await canaries(store) == set()


def test_a_call_in_doubt_keeps_its_arguments_until_it_is_resolved(place: Any) -> None:
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("s")
        with pytest.raises(holdfast.Unresolved):
            session.call(lose, to="canary lost")
        session.delete()
        (effect,) = store.effects()
        assert effect.arguments == {"to": "canary lost"}
        store.resolve(effect.id, Landed("sent"), by="ann")
        (effect,) = store.effects()
        assert (effect.arguments, effect.result) == (None, "sent")
        assert store.session("s").call(lose, to="canary lost").value == "sent"


def test_a_cached_failure_is_still_one_after_its_session_is_gone(place: Any) -> None:
    @holdfast.tool(effect="mutate", atomic=True, cache_failures=True)
    def refuse_once(to: str) -> None:
        raise ValueError("canary error")

    with holdfast.open(**place, durability="normal") as store:
        with pytest.raises(ValueError, match="canary error"):
            store.session("s").call(refuse_once, to="x")
        store.session("s").delete()
        with pytest.raises(holdfast.EffectFailed):
            store.session("s").call(refuse_once, to="x")


def test_effects_of_a_deleted_session_still_move(place: Any, tmp_path: Path) -> None:
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("s")
        session.save(a=1)
        session.call(pay, to="x")
        session.fork(1, id="fork")
        session.delete()
        store.export(tmp_path / "file")
        store.find_session("fork").delete()
    with holdfast.open(f"sqlite:///{tmp_path}/other.db") as other:
        other.import_sessions(tmp_path / "file", store_keys=True)
        (effect,) = other.effects()
        assert (effect.arguments, effect.result) == (None, "canary result")
        assert effect.unlinked_at is not None


def test_what_a_deleted_origin_added_after_the_fork_is_gone(place: Any) -> None:
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("s")
        session.append("list", ["kept"] * 70)
        fork = session.fork(1, id="fork")
        session.append("list", ["canary later"] * 70)
        session.delete()
        assert store.run(items) == 70
        fork.append("list", ["more"])
        assert newest(fork) == ["kept"] * 70 + ["more"]
        sound(store)


def test_a_tail_that_a_rewind_left_is_pruned(place: Any) -> None:
    with holdfast.open(**place, durability="normal") as store:
        session = store.session("s")
        session.append("list", list(range(70)))
        session.append("list", list(range(70, 200)))
        session.rewind(1)
        session.append("list", ["new"])
        fork = session.fork(2, id="fork")
        for number in range(3):
            session.append("list", [number])
        store.prune(keep=2)
        assert store.run(items) == 204
        assert len(newest(fork)) == 200
        fork.delete()
        store.prune(keep=2)
        assert store.run(items) == 74
        assert newest(session) == [*range(70), "new", 0, 1, 2]
        sound(store)


@pytest.mark.parametrize("longest", ["a", "c"])
def test_a_tail_stays_while_any_user_of_its_line_refers_to_it(place: Any, longest: str) -> None:
    log = [f"item {number}" for number in range(10)]
    with holdfast.open(**place, durability="normal") as store:
        origin = store.session("a")
        for item in log:
            origin.append("list", [item])
        # Once the fork between them is gone, no version of the origin is a fork point.
        between = origin.fork(10, id="b")
        shorter = between.fork(10 if longest == "c" else 3, id="c")
        between.delete()
        if longest == "c":
            shorter = origin
            origin.rewind(3)
        shorter.append("list", ["another"])
        store.prune(session=shorter, keep=1)
        assert newest(store.find_session(longest)) == log
        assert newest(shorter) == [*log[:3], "another"]
        sound(store)
        store.find_session(longest).delete()
        assert newest(shorter) == [*log[:3], "another"]
        assert store.run(items) == 4
        sound(store)


def other(place: Any, tmp_path: Path, number: int, hooks: Hooks) -> holdfast.Store:
    """A store of its own beside others of one test."""
    if "namespace" in place:
        place = {**place, "namespace": f"{place['namespace']}_{number}"}
    else:
        place = {"url": f"sqlite:///{tmp_path}/{number}.db"}
    return holdfast.open(**place, durability="normal", hooks=hooks)


def grown(store: holdfast.Store, versions: int) -> tuple[holdfast.Session, holdfast.Session]:
    """An origin of ten items, and a fork that has the first three and many versions of its own."""
    origin = store.session("origin")
    for number in range(10):
        origin.append("list", [number])
    fork = origin.fork(3, id="fork")
    for number in range(versions):
        fork.append("list", [number])
    return origin, fork


@pytest.mark.parametrize("call", ["delete", "prune"])
def test_nobody_waits_while_the_versions_of_a_long_fork_are_read(
    call: str, place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "VERSIONS_AT_ONCE", 5)
    monkeypatch.setattr(needs, "MANIFESTS_PER_PAGE", 4)
    points: list[Point] = []
    pages = []
    for versions in (12, 48):
        with other(place, tmp_path, versions, Hooks(probe=points.append)) as store:
            origin, fork = grown(store, versions)
            points.clear()
            if call == "delete":
                origin.delete()
            else:
                origin.rewind(2)
                for number in range(3):
                    origin.append("list", [number])
                store.prune(session=origin, keep=2)
            before = [point for point in points if point.moment == "before"]
            read = [point.call for point in before if "SELECT key, manifest" in point.sql]
            pages.append(len([each for each in read if each not in {"read_ahead", "read_plan"}]))
            assert newest(fork) == [0, 1, 2, *range(versions)]
            assert store.run(items) == versions + (3 if call == "delete" else 6)
            sound(store)
    assert pages[0] == pages[1]


@pytest.mark.parametrize("meanwhile", ["append", "fork", "prune"])
def test_what_happens_after_the_reading_ahead_counts(
    meanwhile: str, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "VERSIONS_AT_ONCE", 5)

    def trace(trace: Trace) -> None:
        if trace.call != "read_ahead" or happened:
            return
        happened.append(meanwhile)
        if meanwhile == "append":
            happens.find_session("middle").append("list", ["more"])
        elif meanwhile == "fork":
            happens.find_session("middle").fork(7, id="late")
        else:
            happens.prune(session="middle", keep=1)

    happened: list[str] = []
    with (
        holdfast.open(**place, durability="normal") as happens,
        holdfast.open(**place, durability="normal", hooks=Hooks(trace=trace)) as store,
    ):
        origin = store.session("origin")
        for number in range(10):
            origin.append("list", [number])
        middle = origin.fork(7, id="middle")
        # What it needs last of the shared line is less than it needed before.
        middle.record("turn")
        middle.rewind(3)
        for number in range(7):
            middle.append("list", [number])
        origin.delete()
        assert happened == [meanwhile]
        more = ["more"] if meanwhile == "append" else []
        assert newest(middle) == [0, 1, 2, *range(7), *more]
        assert store.run(items) == {"append": 15, "fork": 14, "prune": 10}[meanwhile]
        sound(store)


def newest(session: holdfast.Session) -> Any:
    latest = session.latest()
    assert latest is not None
    return latest["list"]


def items(tx: holdfast.Transaction) -> holdfast.Op[int]:
    found = yield from rows("SELECT sum(count) AS total FROM hf_items")
    return int(found[0]["total"])
