"""Explorations in a store: killed at any moment, resumed, exported, pruned, removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import apsw
import psycopg
import pytest

import holdfast
from holdfast import store as store_module
from holdfast.clock import VirtualClock
from holdfast.errors import Conflict, InvalidArgument, LeaseLost
from holdfast.explorations import KeptStep
from holdfast.worlds import (
    Exploration,
    MemorySystem,
    World,
    action,
    clean,
    explore,
    invariant,
    journal,
)
from holdfast.worlds.journal import journal_of
from tests.work.fleet import wait_until
from tests.worlds import grid
from tests.worlds.grid import ACTIONS, INVARIANTS, explored, facts, make_memory_world
from tests.worlds.test_postgres import at, leftovers

_OTHERS = (
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name = 'holdfast world'"
)


@pytest.fixture(autouse=True)
def environment(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes of a test know; they leave nothing in the temporary directory."""
    monkeypatch.setenv(grid.SIDE, "4")
    monkeypatch.setenv(grid.FOLDER, str(tmp_path / "systems"))


def each_step(process: subprocess.Popen[str]) -> Iterator[int]:
    """Give the steps that a process says; it goes on to the next when this does."""
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        yield int(line)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\n")
            process.stdin.flush()


def run_until(step: int, kind: str, url: str, *, workers: int = 1, commit_every: int = 1) -> bool:
    """Explore in a process of its own and kill it after a step; say whether it had ended."""
    command = [sys.executable, "-m", "tests.worlds.grid", kind, url, str(workers)]
    with subprocess.Popen(
        [*command, str(commit_every)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    ) as process:
        assert process.stderr is not None
        for said in each_step(process):
            if said >= step:
                process.send_signal(signal.SIGKILL)
                break
        process.wait(180)
        if process.returncode not in (0, -signal.SIGKILL):
            pytest.fail(process.stderr.read())
    if kind == "servers":
        # The server may notice later that a process has died; until then it is alive for others.
        with psycopg.connect(os.environ[grid.DSN], autocommit=True) as connection:
            wait_until(lambda: not connection.execute(_OTHERS).fetchall())
    return process.returncode == 0


def kill_at_random(kind: str, url: str, kills: int, steps: int, **options: int) -> int:
    """Kill an exploration at random, again and again; return how often it was."""
    random = Random(kind)
    for count in range(kills):
        # Each run begins where the one before was, so the kills are spread over the whole.
        at = (steps * count + random.randrange(steps)) // kills
        if run_until(at, kind, url, **options):
            return count
    return kills


def killed_and_resumed(kind: str, url: str, kills: int, **options: int) -> Exploration:
    undisturbed = explored(kind)
    assert undisturbed.is_complete
    wanted = facts(undisturbed)
    assert wanted["violations"], "the grid has something to find"
    count = kill_at_random(kind, url, kills, undisturbed.steps, **options)
    assert count >= kills - 1
    with holdfast.open(url) as store:
        result = explored(kind, store=store, id="grid", resume=True)
        assert facts(result) == wanted
        assert store.find_session("grid").info().status == "completed"
    return result


@pytest.mark.parametrize("commit_every", [1, 7])
def test_an_exploration_that_was_killed_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_every: int
) -> None:
    monkeypatch.setenv(grid.SIDE, "14")
    url = f"sqlite:///{tmp_path}/store.db"
    killed_and_resumed("memory", url, 4, commit_every=commit_every)


def test_an_exploration_by_two_workers_that_was_killed_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(grid.SIDE, "14")
    killed_and_resumed("memory", f"sqlite:///{tmp_path}/store.db", 3, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_exploration_of_2000_states_that_was_killed_20_times_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv(grid.SIDE, "45")
    url = f"sqlite:///{tmp_path}/store.db"
    result = killed_and_resumed("memory", url, 20, workers=workers)
    assert len(result.graph.states) == 2_025


def test_an_exploration_of_real_systems_goes_on_from_whatever_a_kill_left(tmp_path: Path) -> None:
    monkeypatched = tmp_path / "systems"
    grid.make_folder(monkeypatched)
    result = killed_and_resumed("real", f"sqlite:///{tmp_path}/store.db", 3)
    assert len(result.graph.states) == 16
    assert (monkeypatched / "files" / "y").read_text() == "0"
    left = [path.name for path in monkeypatched.rglob("*")]
    assert sorted(left) == ["files", "x.db", "y"]


def test_what_a_killed_exploration_left_is_removed_by_clean(
    tmp_path: Path, temporary: Path
) -> None:
    folder, url = tmp_path / "systems", f"sqlite:///{tmp_path}/store.db"
    grid.make_folder(folder)
    assert not run_until(20, "real", url)
    assert list(temporary.iterdir()) != []
    with holdfast.open(url) as store:
        assert [session.id for session in store.sessions()] == ["grid"]
        # Another exploration removes nothing that this one needs.
        other = clean(grid.make_real_world, store, "other")
        assert not other.is_found
        kept = list(temporary.iterdir())
        assert len(kept) == 2
        cleaned = clean(grid.make_real_world, store, "grid")
        assert cleaned.is_found
        assert cleaned.problem is None
        assert store.sessions() == []
        assert (folder / "files" / "y").read_text() == "0"
        with grid.make_real_world() as world:
            assert grid.place(world) == (0, 0)
        assert sorted(path.name for path in folder.rglob("*")) == ["files", "x.db", "y"]
        assert not clean(grid.make_real_world, store, "grid").is_found


@pytest.fixture
def servers(
    postgres_dsn: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[psycopg.Connection[Any], Any]]:
    """A database and some keys, and users of both."""
    redis = pytest.importorskip("redis")
    name = f"grid_{uuid.uuid4().hex[:12]}"
    dsn = at(postgres_dsn, name)
    monkeypatch.setenv(grid.DSN, dsn)
    monkeypatch.setenv(grid.REDIS_URL, redis_url)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        with psycopg.connect(dsn, autocommit=True) as user, redis.Redis.from_url(redis_url) as keys:
            user.execute("CREATE TABLE place (id integer PRIMARY KEY, x integer)")
            user.execute("INSERT INTO place VALUES (1, 0)")
            keys.set("grid:y", 0)
            keys.set("of others", "stays")
            yield user, keys
            assert keys.get("of others") == b"stays"
            assert leftovers(user) == []
            assert list(keys.scan_iter("grid:*")) == [b"grid:y"]
            keys.delete("grid:y", "of others")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_an_exploration_of_servers_goes_on_from_whatever_a_kill_left(
    tmp_path: Path, servers: tuple[psycopg.Connection[Any], Any]
) -> None:
    result = killed_and_resumed("servers", f"sqlite:///{tmp_path}/store.db", 3)
    assert len(result.graph.states) == 16
    user, keys = servers
    assert user.execute("SELECT * FROM place").fetchall() == [(1, 0)]
    assert keys.get("grid:y") == b"0"


def test_what_a_killed_exploration_left_in_servers_is_removed_by_clean(
    tmp_path: Path, servers: tuple[psycopg.Connection[Any], Any]
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    assert not run_until(20, "servers", url)
    user, keys = servers
    assert leftovers(user) != []
    with holdfast.open(url) as store:
        cleaned = clean(grid.make_servers_world, store, "grid")
        assert (cleaned.is_found, cleaned.problem) == (True, None)
        assert cleaned.things == 1
        assert store.sessions() == []
    assert user.execute("SELECT * FROM place").fetchall() == [(1, 0)]
    assert keys.get("grid:y") == b"0"


def test_clean_says_what_cannot_be_restored(tmp_path: Path, temporary: Path) -> None:
    folder, url = tmp_path / "systems", f"sqlite:///{tmp_path}/store.db"
    grid.make_folder(folder)
    assert not run_until(20, "real", url)
    for path in temporary.iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    with holdfast.open(url) as store:
        with pytest.raises(holdfast.HoldfastError, match="initial state was not restored"):
            explored("real", store=store, id="grid", resume=True)
        cleaned = clean(grid.make_real_world, store, "grid")
        assert cleaned.is_found
        assert "no longer exist" in (cleaned.problem or "")
        assert store.sessions() == []


def test_a_limit_ends_it_and_it_goes_on_later(place: dict[str, Any]) -> None:
    whole = facts(explored("memory"))
    with holdfast.open(**place) as store:
        steps = 0
        for most in (1, 10, 11, 30):
            part = explore(
                make_memory_world,
                ACTIONS,
                INVARIANTS,
                max_steps=most,
                store=store,
                id="parts",
                resume=True,
                strategy="random",
            )
            assert (part.ended, part.steps) == ("max_steps", most)
            steps = part.steps
        assert store.find_session("parts").info().status == "active"
        rest = explored("memory", store=store, id="parts", resume=True)
        assert rest.steps > steps
        assert facts(rest) == whole
        # What is complete is read again, and nothing is tried.
        again = explored("memory", store=store, id="parts", resume=True)
        assert (facts(again), again.steps) == (whole, rest.steps)


def test_outcomes_warnings_and_depth_are_those_of_the_first_run(place: dict[str, Any]) -> None:
    @action(expects=LookupError)
    def odd(world: World) -> object:
        data = memory(world)
        data["n"] += 1
        if data["n"] == 2:
            raise LookupError("two")
        if data["n"] == 4:
            raise ValueError("four")
        return object() if data["n"] == 3 else data["n"]

    @action(requires=lambda world: 1 // (memory(world)["n"] - 1) > 100)
    def never(world: World) -> None: ...

    @invariant(when="before")
    def below_three(world: World) -> bool:
        return bool(memory(world)["n"] < 3)

    def run(**options: Any) -> Exploration:
        world = World({"m": MemorySystem({"n": 0})})
        return explore(world, [odd, never], [below_three], max_depth=5, **options)

    def told(result: Exploration) -> list[object]:
        outcomes = [
            (repr(edge.outcome.error), edge.outcome.is_expected)
            for edge in result.graph.transitions
        ]
        seen = [repr(state.observations) for state in result.graph.states.values()]
        violations = [(str(each), each.key) for each in result.violations]
        rest = [result.warnings, result.is_cut, result.unused_actions, result.steps]
        return [outcomes, seen, violations, rest]

    plain = run()
    assert plain.warnings
    assert plain.is_cut
    with holdfast.open(**place) as store:
        first = run(store=store, id="odd")
        assert told(first) == told(plain)
        again = run(store=store, id="odd", resume=True)
        assert told(again) == told(plain)
        assert again.graph.transitions[0].outcome.value == 1
        assert again.graph.transitions[2].outcome.value.startswith("<object object")


def memory(world: World) -> dict[str, Any]:
    system = world.systems["m"]
    assert isinstance(system, MemorySystem)
    return system.data


def test_another_exploration_is_not_resumed(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        explore(make_memory_world, ACTIONS, INVARIANTS, max_steps=3, store=store, id="a")
        with pytest.raises(Conflict, match="already in the store"):
            explored("memory", store=store, id="a")
        again: dict[str, Any] = {"store": store, "id": "a", "resume": True}
        with pytest.raises(InvalidArgument, match="different settings: actions"):
            explore(make_memory_world, ACTIONS[:2], INVARIANTS, **again)
        with pytest.raises(InvalidArgument, match="different settings: invariants"):
            explore(make_memory_world, ACTIONS, [], **again)
        with pytest.raises(InvalidArgument, match="different settings: max_depth"):
            explore(make_memory_world, ACTIONS, INVARIANTS, max_depth=2, **again)

        def moved() -> World:
            world = make_memory_world()
            grid.put(world, 1, 1)
            return world

        with pytest.raises(Conflict, match="not at the initial state of exploration a"):
            explore(moved, ACTIONS, INVARIANTS, **again)
        assert explored("memory", **again).is_complete


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        wrong: list[dict[str, Any]] = [
            {"store": store},
            {"id": "x"},
            {"resume": True},
            {"store": "x", "id": "x"},
            {"store": store, "id": ""},
            {"store": store, "id": "x", "commit_every": 0},
        ]
        for given in wrong:
            with pytest.raises(InvalidArgument):
                explored("memory", **given)
        assert store.sessions() == []


def test_who_was_taken_over_stops_and_its_world_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = facts(explored("memory"))
    world = make_memory_world()
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:

        def take_over(now: Any) -> None:
            if now.steps == 5:
                monkeypatch.setattr("holdfast.session.default_holder", lambda: "another")
                result = explored("memory", store=store, id="a", resume=True)
                assert facts(result) == whole

        with pytest.raises(LeaseLost):
            explore(world, ACTIONS, INVARIANTS, store=store, id="a", on_progress=take_over)
        assert grid.place(world) == (0, 0)
        assert facts(explored("memory", store=store, id="a", resume=True)) == whole


def test_an_exploration_is_exported_deleted_and_imported_with_its_session(
    place: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "export"
    with holdfast.open(**place) as store:
        whole = facts(explored("memory", store=store, id="a"))
        explore(make_memory_world, ACTIONS, INVARIANTS, max_steps=4, store=store, id="b")
        steps = [len(journal_of(store.find_session(id)).steps()) for id in ("a", "b")]
        assert steps[1] == 4
        store.export(file)
        store.find_session("a").delete()
        store.find_session("b").delete()
        assert store.sessions() == []
    with holdfast.open(**other) as store:
        store.import_sessions(file)
        journals = [journal_of(store.find_session(id)) for id in ("a", "b")]
        assert [len(each.steps()) for each in journals] == steps
        for id in ("a", "b"):
            result = explored("memory", store=store, id=id, resume=True)
            assert facts(result) == whole
    for where, message in (
        (place, "0 worlds, 0 explored states."),
        (other, "2 worlds, 32 explored states."),
    ):
        found = store_module.check(where["url"], namespace=where.get("namespace"))
        told = [(each.level, each.message) for each in found if each.check == "worlds"]
        assert told == [("ok", message)]


def test_the_graph_of_an_exploration_that_ended_long_ago_is_pruned(place: dict[str, Any]) -> None:
    clock = VirtualClock(1_700_000_000_000)
    with holdfast.open(**place, clock=clock) as store:
        explored("memory", store=store, id="old")
        explore(make_memory_world, ACTIONS, INVARIANTS, max_steps=4, store=store, id="open")
        clock.advance(100 * 86_400)
        explored("memory", store=store, id="new")
        assert not store.prune(history_days=101).others
        pruned = store.prune()
        journals = [journal_of(store.find_session(id)) for id in ("old", "open", "new")]
        assert [len(each.states()) > 0 for each in journals] == [False, True, True]
        assert [len(each.steps()) > 0 for each in journals] == [False, True, True]
        assert pruned.others["row of explorations"] > 16
        assert all(each.world().settings for each in journals)


def test_doctor_names_explorations_that_lack_rows(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    with holdfast.open(f"sqlite:///{file}") as store:
        explored("memory", store=store, id="a")
    connection = apsw.Connection(str(file))
    connection.execute("DELETE FROM hf_world_states WHERE number = 3")
    connection.close()
    [found] = [each for each in store_module.check(f"sqlite:///{file}") if each.check == "worlds"]
    assert (found.level, "lack rows: 1" in found.message) == ("problem", True)


def test_an_interrupt_in_the_middle_of_a_step_leaves_no_half_of_it(tmp_path: Path) -> None:
    whole = facts(explored("memory"))
    checked = 0

    @invariant
    def interrupted_once(world: World) -> None:
        nonlocal checked
        checked += 1
        if checked == count:
            raise KeyboardInterrupt

    checks = [*INVARIANTS, interrupted_once]
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        for count in range(2, 12):
            checked = 0
            kept: dict[str, Any] = {"store": store, "id": f"a{count}", "commit_every": 3}
            part = explore(make_memory_world, ACTIONS, checks, **kept)
            assert part.ended == "interrupted"
            # The newest first: a state without the step that led to it would be tried at once.
            rest = explore(make_memory_world, ACTIONS, checks, resume=True, strategy="dfs", **kept)
            assert facts(rest) == whole


def test_a_state_that_was_too_deep_at_first_is_resumed_with_what_was_tried_there(
    tmp_path: Path,
) -> None:
    @action(requires=lambda world: memory(world)["n"] < 7)
    def three(world: World) -> None:
        memory(world)["n"] += 3

    @action(requires=lambda world: memory(world)["n"] < 9)
    def one(world: World) -> None:
        memory(world)["n"] += 1

    def run(**options: Any) -> Exploration:
        # First 1, 2 and 3, where it is too deep to go on; then 3 at once.
        given: dict[str, Any] = {"strategy": "dfs", "max_depth": 3, **options}
        return explore(World({"m": MemorySystem({"n": 0})}), [three, one], **given)

    whole = run()
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        for steps in range(1, whole.steps):
            run(store=store, id="a", resume=True, max_steps=steps)
        rest = run(store=store, id="a", resume=True)
        assert (facts(rest), rest.steps) == (facts(whole), whole.steps)


@pytest.mark.parametrize("body", [b"\x01", b"\xc1", b"\x80"])
def test_rows_that_make_no_sense_are_named(tmp_path: Path, body: bytes) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        explore(make_memory_world, ACTIONS, INVARIANTS, max_steps=3, store=store, id="a")
        with journal.drive(store, "a") as session:
            odd = KeptStep(from_id="nowhere", candidate=999, to_id=None, body=body)
            journal_of(session).add([], [odd])
        with pytest.raises(holdfast.CorruptRecord, match="exploration a cannot be read"):
            explored("memory", store=store, id="a", resume=True)
