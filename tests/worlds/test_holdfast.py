"""A store as a system of a world: sessions, shared state and effects go back, versions go on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

import holdfast
from holdfast import Store
from holdfast.clock import VirtualClock
from holdfast.errors import (
    CheckpointError,
    InvalidArgument,
    RollbackError,
    SystemBusy,
    WorldInconsistent,
)
from holdfast.store import check
from holdfast.worlds import (
    HoldfastSystem,
    MemorySystem,
    SqliteSystem,
    World,
    action,
    check_system,
    explore,
)
from holdfast.worlds.values import decode, encode
from tests.worlds.killed import killed, pay
from tests.worlds.systems import Failing

Ask = Callable[..., Any]


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[Store]:
    with holdfast.open(**place) as opened:
        yield opened


@pytest.fixture
def user(place: dict[str, Any]) -> Iterator[Ask]:
    """Another process, which has the store open until the test ends."""
    command = [sys.executable, "-m", "tests.worlds.holdfast_user", json.dumps(place)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answers = process.stdin, process.stdout
    assert answers.readline() == "ready\n"

    def ask(*what: object) -> Any:
        asked.write(json.dumps(what) + "\n")
        asked.flush()
        return json.loads(answers.readline())

    yield ask
    asked.close()
    assert process.wait(60) == 0
    answers.close()


def ids_of(system: HoldfastSystem) -> list[str]:
    return [session.id for session in system.sessions()]


@pytest.mark.parametrize("seed", range(2))
def test_changes_of_another_process_go_back_in_any_order(
    store: Store, place: dict[str, Any], user: Ask, seed: int
) -> None:
    store.session("first").append("log", [0])
    system = HoldfastSystem(store)

    def change(random: Random) -> object:
        return user("change", ids_of(system), random.randrange(10**6))

    def content() -> object:
        # Numbers and ids are those of the first time, so the very same sessions are back.
        return user("content", ids_of(system))

    check_system(system, change, content, seed=seed)
    assert "first" in ids_of(system)
    assert len(store.sessions(limit=1_000)) > len(ids_of(system))
    assert not [each for each in check(**place) if each.level == "problem"]


def shop(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", "wal")
    connection.execute("CREATE TABLE IF NOT EXISTS charges (card TEXT, cents INTEGER)")
    return connection


def test_calls_are_answered_as_the_world_stands(store: Store, tmp_path: Path) -> None:
    """A model in this test says which calls run; the shop's rows say which did."""
    shop(tmp_path / "shop.db").close()
    random = Random(7)
    systems = {"store": HoldfastSystem(store), "shop": SqliteSystem(tmp_path / "shop.db")}
    with World(systems) as world:
        connection = shop(tmp_path / "shop.db")
        world.on_close(connection.close)

        @holdfast.tool
        def pay(card: str) -> str:
            connection.execute("INSERT INTO charges VALUES (?, 100)", (card,))
            return f"paid {card}"

        sessions = [store.session(f"agent {n}") for n in range(2)]
        paid: frozenset[tuple[int, str]] = frozenset()
        once: frozenset[str] = frozenset()
        kept = [(world.checkpoint("first"), paid, once)]
        for step in range(150):
            match random.randrange(5):
                case 0:
                    kept.append((world.checkpoint(f"at {step}"), paid, once))
                case 1:
                    checkpoint, paid, once = random.choice(kept)
                    world.rollback(checkpoint)
                case 2:
                    key = random.choice("xyz")
                    ran: list[str] = []
                    store.once(key, lambda ran=ran: ran.append("ran"))
                    assert bool(ran) == (key not in once)
                    once |= {key}
                case _:
                    number, card = random.randrange(2), random.choice("abcdef")
                    result = sessions[number].call(pay, card=card)
                    assert result.replayed == ((number, card) in paid), step
                    paid |= {(number, card)}
            rows = connection.execute("SELECT card FROM charges ORDER BY card").fetchall()
            assert [card for (card,) in rows] == sorted(card for _, card in paid), step


def test_a_rollback_shows_values_and_goes_on_with_versions(store: Store) -> None:
    session = store.session("s")
    session.save(plan="a")
    session.state.set("k", 1)
    system = HoldfastSystem(store)
    seen = system.observe()
    token = system.checkpoint("a")
    session.save(plan="b")
    session.state.set("k", 2)
    child = store.session(parent=session)
    version, sequence = session.info().version, session.state.version()
    assert system.observe() != seen
    system.rollback(token)
    assert system.observe() == seen
    assert session.latest().channels == {"plan": "a"}  # type: ignore[union-attr]
    assert session.state.get("k") == 1
    assert session.info().version > version
    assert session.state.version() > sequence
    assert child.info().status == "cancelled"
    assert [each.id for each in system.sessions()] == ["s"]


def test_generated_ids_are_no_part_of_a_state(store: Store) -> None:
    system = HoldfastSystem(store)
    token = system.checkpoint("empty")
    seen = []
    for _ in range(2):
        session = store.session(metadata={"n": 1})
        store.session(parent=session).append("log", [1])
        seen.append(system.observe())
        system.rollback(token)
    assert seen[0] == seen[1]
    assert seen[0] != system.observe()


def test_ended_and_cancelled_sessions_come_back_with_their_labels(store: Store) -> None:
    system = HoldfastSystem(store)
    one, two = store.session("one"), store.session("two", name="b", metadata={"x": 1})
    two.end("failed")
    token = system.checkpoint("before")
    seen = system.observe()
    one.cancel()
    store.session("two", reopen=True, name="c", agent="planner", metadata={})
    later = system.checkpoint("later")
    seen_later = system.observe()
    for _ in range(2):
        system.rollback(token)
        assert system.observe() == seen
        assert (one.info().status, two.info().status) == ("active", "failed")
        assert (two.info().name, two.info().agent) == ("b", None)
        system.rollback(later)
        assert system.observe() == seen_later
        assert (one.info().status, two.info().status) == ("cancelled", "active")


def test_a_session_that_ended_after_the_point_is_hidden_until_it_is_opened_again(
    store: Store,
) -> None:
    system = HoldfastSystem(store)
    token, seen = system.checkpoint("empty"), system.observe()
    store.session("done").end()
    later, seen_later = system.checkpoint("later"), system.observe()
    system.rollback(token)
    assert system.observe() == seen
    assert store.find_session("done").info().status == "completed"
    store.session("done", reopen=True)
    assert ids_of(system) == ["done"]
    system.rollback(later)
    assert system.observe() == seen_later


def test_effects_after_the_point_may_run_again_unless_they_act_outside(store: Store) -> None:
    ran: list[str] = []

    @holdfast.tool
    def inside(n: int) -> int:
        ran.append("inside")
        return len(ran)

    @holdfast.tool(outside=True)
    def outside(n: int) -> int:
        ran.append("outside")
        return len(ran)

    system = HoldfastSystem(store)
    session = store.session("s")
    token = system.checkpoint("before")
    seen = system.observe()
    results = [session.call(each, n=1).value for each in (inside, outside)]
    later = system.checkpoint("later")
    system.rollback(token)
    assert system.observe() == seen
    effects = {each.tool: each for each in store.effects(session=session)}
    assert (effects["inside"].undone_by, effects["outside"].undone_by) == ("world", None)
    assert (effects["inside"].is_outside, effects["outside"].is_outside) == (False, True)
    assert session.call(outside, n=1).value == results[1]
    assert session.call(inside, n=1).value == 3
    assert ran == ["inside", "outside", "inside"]
    # The one that ran the second time goes, and the first one answers again.
    system.rollback(later)
    assert [session.call(each, n=1).value for each in (inside, outside)] == results
    assert len(ran) == 3


def test_an_undo_goes_back_and_forth_with_the_world(store: Store) -> None:
    @holdfast.tool(undo=lambda args, result, key: "undone")
    def book(room: int) -> int:
        return room

    session = store.session("s")
    session.record("manual_checkpoint")
    system = HoldfastSystem(store)
    booked = session.call(book, room=1)
    before = system.checkpoint("booked")
    assert len(session.compensate(to=1).undone) == 1
    after = system.checkpoint("undone")
    [effect, undo] = store.effects(session=session)
    assert effect.undone_by == undo.id
    for _ in range(2):
        system.rollback(before)
        [effect, undo] = store.effects(session=session)
        assert (effect.undone_by, undo.undone_by) == (None, "world")
        assert session.call(book, room=1).replay_of == booked.effect_id
        system.rollback(after)
        first, undo, *_ = store.effects(session=session)
        assert (first.undone_by, undo.undone_by) == (undo.id, None)


def test_a_write_is_answered_if_what_came_after_it_went_back(store: Store) -> None:
    ran: list[int] = []

    @holdfast.tool(effect="write")
    def put(value: int) -> None:
        ran.append(value)

    session = store.session("s")
    system = HoldfastSystem(store)
    session.call(put, value=1)
    token = system.checkpoint("one")
    session.call(put, value=2)
    system.rollback(token)
    session.call(put, value=1)
    assert ran == [1, 2]
    session.call(put, value=2)
    assert ran == [1, 2, 2]


def test_a_checkpoint_needs_a_store_at_rest(store: Store) -> None:
    system = HoldfastSystem(store, wait_seconds=0)
    session = store.session("s")
    token = system.checkpoint("rest")
    with session.drive("agent"):
        for use in (lambda: system.checkpoint("x"), lambda: system.prepare(token)):
            with pytest.raises(SystemBusy, match="session s is driven by 'agent'"):
                use()

    @holdfast.tool
    def lost() -> None:
        for use in (lambda: system.checkpoint("x"), lambda: system.rollback(token)):
            with pytest.raises(SystemBusy, match="a call of lost is running"):
                use()
        raise OSError("who knows")

    with pytest.raises(holdfast.Unresolved):
        session.call(lost)
    with pytest.raises(SystemBusy, match="of lost is in doubt"):
        system.checkpoint("x")
    system.rollback(token)
    assert session.unresolved() == []
    item = store.work.submit("job", {})
    with pytest.raises(SystemBusy, match=f"work item {item.id} is pending"):
        system.checkpoint("x")
    system.rollback(token)
    assert store.work.get(item.id).status == "cancelled"
    system.checkpoint("at rest again")


def test_a_waiting_session_is_active_again_where_it_was(store: Store) -> None:
    session = store.session("s", agent="planner")
    session.save(plan=1)
    system = HoldfastSystem(store)
    token, seen = system.checkpoint("before"), system.observe()
    ask = session.ask("researcher", {"q": 1})
    with pytest.raises(SystemBusy):
        system.checkpoint("asking")
    session.pause()
    with pytest.raises(SystemBusy):
        system.checkpoint("paused")
    system.rollback(token)
    assert system.observe() == seen
    assert store.peer_call(ask.id).state != "open"
    system.checkpoint("at rest")


def test_a_deleted_session_and_a_pruned_version_are_refused_by_name(store: Store) -> None:
    system = HoldfastSystem(store)
    session = store.session("s")
    for n in range(3):
        session.save(n=n)
    with World({"store": system}) as world:
        world.checkpoint("three")
        for n in range(8):
            session.save(n=n)
        seen = system.observe()
        store.prune(keep=1)
        with pytest.raises(RollbackError, match="store: refused: CheckpointNotFound"):
            world.rollback("three")
        assert system.observe() == seen
        session.delete(force=True)
        with pytest.raises(RollbackError, match="session s was deleted since"):
            world.rollback("three")
        assert world.is_consistent


def test_a_store_cannot_keep_the_world_that_rolls_it_back(store: Store) -> None:
    system = HoldfastSystem(store)
    for use in (
        lambda: World({"agents": system}, store=store, id="w"),
        lambda: explore(World({"agents": system}), [lambda world: None], store=store, id="w"),
    ):
        with pytest.raises(InvalidArgument, match="store is rolled back as system agents"):
            use()
    assert store.sessions() == []


def test_other_stores_are_refused(store: Store, place: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="store must be a Store"):
        HoldfastSystem("sqlite:///x.db")  # type: ignore[arg-type]
    with (
        holdfast.open(**place, mode="read") as reader,
        pytest.raises(InvalidArgument, match="open for writing"),
    ):
        HoldfastSystem(reader)


def test_what_is_observed_can_be_chosen(store: Store) -> None:
    session = store.session("s")
    system = HoldfastSystem(store, observe=lambda store: store.find_session("s").state.get("k"))
    token = system.checkpoint("x")
    session.state.set("k", 3)
    assert system.observe() == 3
    system.rollback(token)
    assert system.observe() is None


def test_another_process_goes_on_from_what_was_kept(store: Store, place: dict[str, Any]) -> None:
    session = store.session("s")
    ran: list[int] = []

    @holdfast.tool
    def count(n: int) -> int:
        ran.append(n)
        return n

    first = HoldfastSystem(store)
    session.call(count, n=1)
    store.once("key", lambda: "a")
    kept = decode(encode(first.keep(first.checkpoint("one")), "kept"))
    seen = first.observe()
    session.call(count, n=2)
    store.once("other", lambda: "b")
    store.session("late")
    with holdfast.open(**place) as again:
        second = HoldfastSystem(again)
        four = second.checkpoint("four")
        seen_at_four = second.observe()
        for _ in range(2):
            second.restore(kept)
            assert second.observe() == seen
            second.rollback(four)
            assert second.observe() == seen_at_four
        second.restore(kept)
        mine = again.session("s")
        assert mine.call(count, n=1).replayed
        assert not mine.call(count, n=2).replayed
        assert again.once("key", lambda: "c").value == "a"
        assert again.once("other", lambda: "c").value == "c"


@pytest.mark.parametrize("after", range(5))
def test_a_rollback_that_was_killed_between_two_trees_is_finished(
    store: Store, place: dict[str, Any], tmp_path: Path, after: int
) -> None:
    for n in range(3):
        session = store.session(f"agent {n}")
        session.call(pay, card="early")
        session.append("log", ["early"])
    seen = HoldfastSystem(store).observe()
    url = f"sqlite:///{tmp_path}/keeper.db"
    killed("roll_back_a_store", url, json.dumps(place), after)
    with holdfast.open(url) as keeper:
        system = HoldfastSystem(store)
        world = World({"agents": system}, store=keeper, id="agents")
        assert world.recovery is not None
        assert world.recovery.is_complete
        assert system.observe() == seen
        session = store.session("agent 1")
        assert session.call(pay, card="early").replayed
        assert not session.call(pay, card="late").replayed
        assert store.once("late 1", lambda: "again").value == "again"
        world.rollback("one")
        assert system.observe() == seen
        world.close()


def test_an_agent_and_its_shop_are_explored_together(place: dict[str, Any], tmp_path: Path) -> None:
    """The bug: a refund that is asked for twice pays twice, because each call is its own effect."""
    shop(tmp_path / "shop.db").close()

    def make_world() -> World:
        store = holdfast.open(**place)
        store.session("agent")
        systems = {"agent": HoldfastSystem(store), "shop": SqliteSystem(tmp_path / "shop.db")}
        world = World(systems, clients={"store": store, "shop": shop(tmp_path / "shop.db")})
        world.on_close(store.close)
        world.on_close(world.clients["shop"].close)
        return world

    def count(world: World) -> int:
        [[found]] = world.clients["shop"].execute("SELECT count(*) FROM charges").fetchall()
        return int(found)

    def pay(world: World, card: str, dedupe: Any) -> None:
        @holdfast.tool(name=f"pay {dedupe}", dedupe=dedupe)
        def tool(card: str) -> str:
            world.clients["shop"].execute("INSERT INTO charges VALUES (?, 1)", (card,))
            return card

        session = world.clients["store"].session("agent")
        number = len(session.recent_calls(50))
        session.call(tool, card=card, call_id=f"call {number}")

    @action(parameters={"card": ["a", "b"]})
    def buy(world: World, card: str) -> None:
        pay(world, card, "session")

    @action(requires=lambda world: count(world) < 4)
    def refund(world: World) -> None:
        pay(world, "refund", "call")

    def at_most_one_refund(world: World) -> bool:
        query = "SELECT count(*) FROM charges WHERE card = 'refund'"
        [[found]] = world.clients["shop"].execute(query).fetchall()
        return bool(found < 2)

    result = explore(make_world, [buy, refund], [at_most_one_refund], max_depth=3)
    [violation] = result.nearest()
    assert [step.action for step in violation.path] == ["refund", "refund"]
    assert result.leaks == ()
    assert result.warnings == []


def test_a_failed_rollback_of_another_system_brings_the_store_back(store: Store) -> None:
    session = store.session("s")
    failing = Failing({"n": 1})
    with World({"store": HoldfastSystem(store), "zz": failing}) as world:
        session.save(plan="a")
        world.checkpoint("a")
        session.save(plan="b")
        session.state.set("k", 1)
        seen = world.systems["store"].observe()
        failing.fail("rollback", times=1)
        with pytest.raises(RollbackError):
            world.rollback("a")
        assert world.is_consistent
        assert world.systems["store"].observe() == seen
        with session.drive("agent"), pytest.raises(CheckpointError, match="driven by"):
            world.checkpoint("busy")


def test_the_example_finds_its_bug_and_nothing_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import agent_world as example

    given = [example.ask, example.return_goods], [example.no_order_is_refunded_twice]
    monkeypatch.setenv("REFUNDS", "session")
    found = explore(example.make_world, *given, max_depth=2)
    [violation] = found.nearest()
    assert [step.action for step in violation.path] == ["ask", "ask"]
    assert {step.arguments["channel"] for step in violation.path} == {"chat", "phone"}
    assert found.warnings == []
    monkeypatch.setenv("REFUNDS", "global")
    mended = explore(example.make_world, *given, max_depth=2)
    assert mended.violations == []
    assert mended.warnings == []


def leave_open(store: Store, what: str) -> None:
    """Have something in the store that no checkpoint covers."""

    @holdfast.tool
    def lost() -> None:
        raise OSError("who knows")

    if what == "work":
        store.work.submit("job", {})
    else:
        with pytest.raises(holdfast.Unresolved):
            store.find_session("s").call(lost)


@pytest.mark.parametrize("what", ["work", "doubt"])
def test_a_world_goes_back_from_a_store_that_is_not_at_rest(store: Store, what: str) -> None:
    session, other = store.session("s"), MemorySystem({"n": 0})
    # Of two systems the last one in order is in this process, and changes nothing if it fails.
    with World({"store": HoldfastSystem(store), "other": other}) as world:
        rest = world.checkpoint("rest")
        leave_open(store, what)
        session.save(n=1)
        other.data["n"] = 1
        with pytest.raises(CheckpointError, match="a checkpoint needs a store at rest"):
            world.checkpoint("busy")
        world.rollback(rest)
        assert (session.latest(kind="turn"), other.data["n"]) == (None, 0)
        assert session.unresolved() == []
        assert store.work.list(status="pending") == []
        world.checkpoint("at rest again")


def test_a_store_that_is_not_at_rest_moves_last_and_flags_the_world(store: Store) -> None:
    system, first, last = HoldfastSystem(store), Failing({"n": 0}), MemorySystem({"n": 0})
    world = World({"store": system, "first": first, "last": last})
    rest = world.checkpoint("rest")
    item = store.work.submit("job", {})
    first.data["n"] = last.data["n"] = 1
    first.fail("rollback", times=1)
    with pytest.raises(RollbackError) as refused:
        world.rollback(rest)
    assert world.is_consistent
    assert refused.value.outcomes["store"] == "untouched"
    assert (first.data["n"], last.data["n"]) == (1, 1)
    assert store.work.get(item.id).status == "pending"

    def fails(*_: object) -> None:
        raise OSError("no rollback today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "rollback", fails)
        with pytest.raises(RollbackError, match=r"store: failed: .*; not moved back: ") as failed:
            world.rollback(rest)
    assert not failed.value.is_consistent
    assert (first.data["n"], last.data["n"]) == (1, 1)
    with pytest.raises(WorldInconsistent):
        world.checkpoint("flagged")
    world.rollback(rest)
    assert (first.data["n"], last.data["n"]) == (0, 0)
    assert store.work.get(item.id).status == "cancelled"
    world.close()


def test_an_exploration_leaves_states_in_which_a_store_is_not_at_rest(store: Store) -> None:
    session = store.session("s")

    @action(limit=1)
    def submit(world: World) -> None:
        store.work.submit("job", {})

    @action(limit=1)
    def say(world: World) -> None:
        session.append("said", ["hello"])

    with World({"store": HoldfastSystem(store)}) as world:
        result = explore(world, [submit, say])
        assert [len(result.graph.states), len(result.graph.transitions)] == [4, 4]
        assert not any("not explored" in warning for warning in result.warnings)
        assert store.work.list(status="pending") == []


def test_work_of_a_living_worker_is_waited_for_and_that_of_a_dead_one_is_cancelled(
    place: dict[str, Any],
) -> None:
    clock = VirtualClock(1_700_000_000_000)
    with holdfast.open(**place, clock=clock) as store:
        store.session("s")
        system = HoldfastSystem(store, wait_seconds=0)
        token = system.checkpoint("rest")
        item = store.work.submit("job", {})
        [claimed] = store.work.claim("worker", lease_seconds=60)
        assert claimed.id == item.id
        for use in (system.prepare, system.rollback):
            with pytest.raises(SystemBusy, match=f"work item {item.id} is held by 'worker'"):
                use(token)
        assert store.work.get(item.id).status == "in_progress"
        # The lease has expired, and nobody has taken the item over.
        clock.advance(61)
        system.prepare(token)
        system.rollback(token)
        assert store.work.get(item.id).status == "cancelled"
        system.checkpoint("at rest again")
