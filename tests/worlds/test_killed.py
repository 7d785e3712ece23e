"""A world whose process is killed: the one that opens it next finishes the rollback, or says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast import store as store_module
from holdfast.errors import (
    CheckpointError,
    CheckpointInvalid,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    RollbackError,
    SessionBusy,
    WorldInconsistent,
)
from holdfast.worlds import FileSystem, MemorySystem, SqliteSystem, System, World
from holdfast.worlds.journal import journal_of
from holdfast.worlds.values import decode
from tests.worlds.killed import NAMES, Trapped, change, killed, numbers, real_systems, three
from tests.worlds.systems import Failing


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "systems"
    place.mkdir()
    for name in NAMES:
        (place / name).write_text("1")
    return place


pytestmark = pytest.mark.usefixtures("temporary")


def findings(url: str) -> list[tuple[str, str]]:
    found = store_module.check(url)
    return [(finding.level, finding.message) for finding in found if finding.check == "worlds"]


@pytest.mark.parametrize("at", NAMES)
def test_a_rollback_that_was_killed_at_a_system_is_finished(
    url: str, folder: Path, at: str
) -> None:
    killed("roll_back", url, folder, json.dumps({at: {"rollback": ["die"]}}))
    with holdfast.open(url) as store:
        world = World(three(folder), store=store, id="three")
        assert world.recovery is not None
        assert world.recovery.is_complete
        assert world.recovery.outcomes == dict.fromkeys(NAMES, "moved")
        assert world.is_consistent
        assert numbers(folder) == ["1", "1", "1"]
        assert world.context.to_dict() == {"n": 1}
        # Another process would not repeat what is finished.
        assert journal_of(store.find_session("three")).world().intent is None
        # It is an ordinary world again, and knows the checkpoint of the dead process.
        (folder / "b").write_text("7")
        world.checkpoint("seven")
        world.rollback("one")
        assert numbers(folder) == ["1", "1", "1"]
        world.rollback("seven")
        assert numbers(folder) == ["1", "7", "1"]
        world.close()
        again = World(three(folder), store=store, id="three")
        assert again.recovery is None
        assert not again.checkpoints
        again.close()


@pytest.mark.parametrize("what", ["checkpoint", "keep"])
@pytest.mark.parametrize("at", NAMES)
def test_a_checkpoint_that_was_killed_at_a_system_was_not_made(
    url: str, folder: Path, at: str, what: str
) -> None:
    killed("roll_back", url, folder, json.dumps({at: {what: ["die"]}}))
    with holdfast.open(url) as store:
        world = World(three(folder), store=store, id="three")
        assert world.recovery is None
        assert numbers(folder) == ["2", "2", "2"]
        assert [made.name for made in world.checkpoints.values()] == ["one"]
        world.rollback("one")
        assert numbers(folder) == ["1", "1", "1"]
        world.close()


def test_an_undo_that_was_killed_is_no_reason_to_leave_the_systems_apart(
    url: str, folder: Path
) -> None:
    # b fails, so a is moved back, and the process dies there.
    traps = {"a": {"rollback": ["", "die"]}, "b": {"rollback": ["fail"]}}
    killed("roll_back", url, folder, json.dumps(traps))
    with holdfast.open(url) as store:
        world = World(three(folder), store=store, id="three")
        assert world.is_consistent
        assert numbers(folder) == ["1", "1", "1"]
        world.close()


@pytest.mark.parametrize("failing", NAMES)
def test_what_cannot_be_finished_is_inconsistent_and_says_where_each_system_is(
    url: str, folder: Path, failing: str
) -> None:
    killed("roll_back", url, folder, json.dumps({"b": {"rollback": ["die"]}}))
    assert findings(url)[0][0] == "ok", "somebody may still drive it"
    with holdfast.open(url) as store:
        broken = three(folder, {failing: {"restore": ["fail"]}})
        world = World(broken, store=store, id="three")
        assert world.recovery is not None
        assert not world.recovery.is_complete
        assert not world.is_consistent
        told = "failed: Fault: no restore today"
        assert world.recovery.outcomes == {**dict.fromkeys(NAMES, "moved"), failing: told}
        for refused in (lambda: world.checkpoint("x"), lambda: world.act(lambda world: None)):
            with pytest.raises(WorldInconsistent, match=f"{failing}: {told}"):
                refused()
        world.close()
        # Closing it has not forgotten what is to be finished.
        assert findings(url) == [("warning", "A rollback was not finished in these worlds: three.")]
        world = World(three(folder, {failing: {"restore": ["fail"]}}), store=store, id="three")
        assert not world.is_consistent
        world.rollback("one")
        assert world.is_consistent
        assert numbers(folder) == ["1", "1", "1"]
        assert findings(url)[0][0] == "ok"
        world.close()


@pytest.mark.parametrize("failing", NAMES)
@pytest.mark.parametrize("fails", ["rollback", "undo", "checkpoint", "keep"])
def test_without_a_kill_a_failing_system_is_as_without_a_store(
    url: str, folder: Path, failing: str, fails: str
) -> None:
    with holdfast.open(url) as store:
        systems = three(folder)
        world = World(systems, store=store, id="three")
        world.checkpoint("one")
        for name in NAMES:
            (folder / name).write_text("2")
        if fails in ("checkpoint", "keep"):
            systems[failing].traps[fails] = ["fail"]
            with pytest.raises(CheckpointError) as refused:
                world.checkpoint("two")
            assert refused.value.system == failing
            assert [made.name for made in world.checkpoints.values()] == ["one"]
        else:
            systems[failing].traps["rollback"] = ["fail", "fail" if fails == "undo" else ""]
            with pytest.raises(RollbackError):
                world.rollback("one")
        assert world.is_consistent == (fails != "undo")
        intent = journal_of(store.find_session("three")).world().intent
        assert (intent is not None) == (fails == "undo")
        world.close()
        again = World(three(folder), store=store, id="three")
        assert (again.recovery is not None) == (fails == "undo")
        assert again.is_consistent
        assert numbers(folder) == (["1", "1", "1"] if fails == "undo" else ["2", "2", "2"])
        again.close()


def test_real_systems_are_restored_after_a_kill_and_nothing_is_left(
    url: str, tmp_path: Path, temporary: Path
) -> None:
    folder = tmp_path / "systems"
    (folder / "files").mkdir(parents=True)
    (folder / "n").write_text("0")
    connection = apsw.Connection(str(folder / "db.sqlite"))
    connection.pragma("journal_mode", "wal")
    connection.execute("CREATE TABLE t (n); CREATE TABLE total (n); INSERT INTO total VALUES (0)")
    connection.close()
    killed("roll_back_real_systems", url, folder)
    # Others went on with what they found.
    change(folder, 9)
    with holdfast.open(url) as store:
        world = World(real_systems(folder), store=store, id="real")
        assert str(world.recovery) == "files: moved; db: moved; zz: moved; memory: moved"
        for n, name in ((2, ""), (3, "at 3"), (2, "at 2")):
            if name:
                world.rollback(name)
            made = {"same.txt", "sub", *(f"sub/{each}.txt" for each in range(2, n + 1))}
            files = folder / "files"
            assert {path.relative_to(files).as_posix() for path in files.rglob("*")} == made
            assert (files / "same.txt").read_text() == f"now {n}"
            assert (folder / "n").read_text() == str(n)
            assert world.context["n"] == n
            system = world.systems["db"]
            assert isinstance(system, SqliteSystem)
            tables: Any = system.observe()
            assert tables["t"]["rows"] == [[each] for each in range(2, n + 1)]
            assert tables["total"]["rows"] == [[n]]
        # A checkpoint of the dead process can be released like any other.
        world.release("at 3")
        assert not world.is_valid("at 3")
        world.rollback("at 2")
        world.close()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_system_that_keeps_nothing_for_others_is_named(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Private(MemorySystem):
        def keep(self, token: bytes) -> Any:
            return None

    with holdfast.open(url) as store:
        world = World({"a": MemorySystem(), "b": Private()}, store=store, id="w")
        world.checkpoint("here")
        world.rollback("here")
        with pytest.raises(SessionBusy, match="driven by this process"):
            World({"a": MemorySystem()}, store=store, id="w")
        # Another process takes the world over, as after a kill.
        monkeypatch.setattr("holdfast.session.default_holder", lambda: "another process")
        other = World({"a": MemorySystem(), "b": Private()}, store=store, id="w")
        with pytest.raises(RollbackError, match=r"b: refused: .*only the process that made"):
            other.rollback("here")
        with pytest.raises(LeaseLost):
            world.checkpoint("late")
        assert other.is_consistent
        other.close()
        with pytest.raises(LeaseLost):
            world.close()


def test_other_systems_than_before_are_named(url: str, folder: Path) -> None:
    killed("roll_back", url, folder, json.dumps({"b": {"rollback": ["die"]}}))
    with holdfast.open(url) as store:
        less = {name: system for name, system in three(folder).items() if name != "c"}
        world = World({**less, "d": MemorySystem()}, store=store, id="three")
        assert world.recovery is not None
        assert world.recovery.outcomes["c"] == "failed: the world has no such system"
        assert "the checkpoint does not include it" in world.recovery.outcomes["d"]
        assert not world.is_consistent
        with pytest.raises(CheckpointInvalid):
            world.rollback("one")
        world.close()


def test_a_context_that_is_not_plain_data_is_refused_and_nothing_is_kept(url: str) -> None:
    with holdfast.open(url) as store:
        system = Failing()
        world = World({"a": system}, context={"x": object}, store=store, id="w")
        with pytest.raises(holdfast.InvalidValue, match="context"):
            world.checkpoint("here")
        assert not world.checkpoints
        assert system.kept == []
        world.close()


def test_a_sweep_leaves_what_living_processes_have(tmp_path: Path, temporary: Path) -> None:
    place = tmp_path / "files"
    place.mkdir()
    (place / "a").write_text("1")
    living, other = FileSystem(place), FileSystem(place)
    token = living.checkpoint("one")
    (place / "a").write_text("2")
    assert other.sweep() == 0
    living.rollback(token)
    assert (place / "a").read_text() == "1"
    living.close()
    other.close()


def test_what_was_kept_for_released_checkpoints_is_not_kept_any_more(
    url: str, tmp_path: Path, temporary: Path
) -> None:
    place = tmp_path / "files"
    place.mkdir()
    with holdfast.open(url) as store:
        world = World({"files": FileSystem(place)}, store=store, id="w")
        first, second = world.checkpoint("one"), world.checkpoint("two")
        world.release(first)
        assert list(temporary.glob("*/kept"))
        world.release(second)
        assert not list(temporary.glob("*/kept"))
        world.checkpoint("three")
        world.close()


def test_bad_input_is_refused_before_a_session_is_made(url: str) -> None:
    systems: dict[str, System] = {"a": MemorySystem()}
    with holdfast.open(url) as store:
        wrong: list[dict[str, Any]] = [
            {"store": store},
            {"id": "x"},
            {"store": url, "id": "x"},
            {"store": store, "id": ""},
        ]
        for given in wrong:
            with pytest.raises(InvalidArgument):
                World(systems, **given)
        assert store.sessions() == []


KINDS = ("files", "sqlite", "sqlite copies")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*copies the whole database")
def test_what_a_killed_process_kept_is_restored_exactly(
    kind: str, tmp_path: Path, temporary: Path
) -> None:
    place = tmp_path / "place"
    if kind == "files":
        place.mkdir()
    else:
        connection = apsw.Connection(str(place))
        connection.pragma("journal_mode", "wal" if kind == "sqlite" else "delete")
        made = "CREATE TABLE t (n); CREATE TABLE total (n); INSERT INTO total VALUES (0)"
        connection.execute(made)
        connection.close()
    check_kept(kind, str(place), tmp_path)


def check_kept(kind: str, place: str, tmp_path: Path) -> None:
    """Have a process die, restore what it kept, and go on as if nothing had been."""
    from tests.worlds.killed import system, touch

    # The same changes, as far as the checkpoint, and what they look like.
    killed("keep", kind, place, tmp_path / "kept")
    kept = decode((tmp_path / "kept").read_bytes())
    opened = system(kind, place)
    at_four = opened.checkpoint("four")
    seen_at_four = opened.observe()
    opened.restore(kept)
    restored = opened.observe()
    assert restored != seen_at_four
    # From here to anywhere and back, also to what is kept.
    touch(kind, place, 7)
    at_seven = opened.checkpoint("seven")
    seen_at_seven = opened.observe()
    for token, wanted in ((at_four, seen_at_four), (at_seven, seen_at_seven)):
        opened.prepare(token)
        opened.rollback(token)
        assert opened.observe() == wanted
        opened.restore(kept)
        assert opened.observe() == restored
    text = repr(restored)
    for n in (1, 2, 3, 4, 7):
        mark = {"sqlite": f"made_{n}", "sqlite copies": f"made_{n}", "postgres": f"n{n}"}
        is_there = mark.get(kind, f"only {n}") in text
        assert is_there == (n <= 2), (n, text)
    opened.discard(kept)
    opened.sweep()
    with pytest.raises(CheckpointInvalid) if kind in KINDS else nothing():
        opened.restore(kept)
    opened.close()


def nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_a_trapped_system_does_what_its_traps_say(folder: Path) -> None:
    system = Trapped(folder / "a", {"rollback": ["", "fail"]})
    token = system.checkpoint("x")
    system.rollback(token)
    with pytest.raises(Exception, match="no rollback today"):
        system.rollback(token)
    system.rollback(token)


def test_rows_of_a_world_go_with_its_session(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        world = World({"a": MemorySystem({"n": 1})}, store=store, id="w")
        world.checkpoint("here")
        session = store.find_session("w")
        assert session.info().status == "active"
        with pytest.raises(holdfast.SessionBusy):
            session.delete()
        session.delete(force=True)
        with pytest.raises(holdfast.SessionNotFound):
            world.checkpoint("late")
        again = World({"a": MemorySystem()}, store=store, id="w")
        assert not again.checkpoints
        again.close()
        assert store.find_session("w").info().status == "completed"
        World({"a": MemorySystem()}, store=store, id="w").close()


def test_a_context_that_could_not_be_read_again_is_refused_before_it_is_kept(
    tmp_path: Path,
) -> None:
    deep: Any = ()
    for _ in range(250):
        deep = (deep,)
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        data = Failing({"n": 1})
        with World({"data": data}, store=store, id="w", context={"deep": 1}) as world:
            here = world.checkpoint("here")
            world.context["deep"] = deep
            with pytest.raises(InvalidValue, match="nested too deeply"):
                world.checkpoint("there")
            assert len(data.kept) == len(world.checkpoints) == 1
            world.rollback(here)
            assert world.context["deep"] == 1


@pytest.mark.parametrize("is_written", [False, True])
def test_a_store_that_fails_at_the_beginning_of_a_rollback_costs_nothing(
    url: str, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the store has the intent, and only the answer was lost."""
    with holdfast.open(url) as store:
        data, other = Failing({"n": 1}), Failing({"n": 1})
        with World({"data": data, "other": other}, store=store, id="w") as world:
            here = world.checkpoint("here")
            kept: Any = world._journal
            begin = kept.begin
            data.data["n"] = 2

            def failing(id: str) -> None:
                if is_written:
                    begin(id)
                raise OSError("no answer")

            with monkeypatch.context() as patch:
                patch.setattr(kept, "begin", failing)
                with pytest.raises(OSError, match="no answer"):
                    world.rollback(here)
            assert world.is_consistent
            assert data.data == {"n": 2}
            assert [len(system.kept) for system in (data, other)] == [1, 1]
            assert kept._journal.world().intent is None
            world.rollback(here)
            assert data.data == {"n": 1}


def test_a_world_that_is_inconsistent_keeps_its_intent_if_the_store_fails(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(url) as store:
        data, other = Failing({"n": 1}), Failing({"n": 1})
        with World({"data": data, "other": other}, store=store, id="w") as world:
            here = world.checkpoint("here")
            other.fail("rollback")
            with pytest.raises(RollbackError):
                world.rollback(here)
            assert not world.is_consistent
            kept: Any = world._journal
            before = kept._journal.world().intent
            assert before is not None

            def failing(id: str) -> None:
                raise OSError("no answer")

            with monkeypatch.context() as patch:
                patch.setattr(kept, "begin", failing)
                with pytest.raises(OSError, match="no answer"):
                    world.rollback(here)
            assert not world.is_consistent
            assert kept._journal.world().intent == before
            other.fails.clear()
            world.rollback(here)
            assert world.is_consistent


def test_a_store_that_fails_at_the_end_of_a_rollback_leaves_the_world_flagged(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill would have it rolled back again, so nothing may be done until the store says so."""
    with holdfast.open(url) as store:
        data = Failing({"n": 1})
        with World({"data": data}, store=store, id="w") as world:
            here = world.checkpoint("here")
            data.data["n"] = 2

            def failing() -> None:
                raise OSError("no answer")

            with monkeypatch.context() as patch:
                patch.setattr(world._journal, "end", failing)
                with pytest.raises(OSError, match="no answer"):
                    world.rollback(here)
            with pytest.raises(WorldInconsistent):
                world.act(lambda world: None)
            world.rollback(here)
            assert world.is_consistent
