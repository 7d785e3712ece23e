"""A world: what goes back, what survives, how checkpoints are found, and when it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.errors import (
    CheckpointError,
    CheckpointInvalid,
    CheckpointNotFound,
    InvalidArgument,
    InvalidValue,
    ReplayFailed,
    RollbackError,
    WorldInconsistent,
)
from holdfast.worlds import Action, MemorySystem, Observation, State, World, action
from tests.worlds.systems import Failing, Fault, Stack


def memory_world(**options: Any) -> tuple[World, dict[str, Any]]:
    system = MemorySystem({"stock": 3})
    return World({"db": system}, **options), system.data


def test_systems_and_context_go_back_and_clients_stay() -> None:
    client = object()
    world, data = memory_world(context={"cart": ["book"]}, clients={"api": client})
    here = world.checkpoint("here")
    data["stock"] = 0
    data["new"] = True
    world.context["cart"].append("pen")
    world.context.set("added", 1)
    world.rollback(here)
    assert data == {"stock": 3}
    assert world.context.to_dict() == {"cart": ["book"]}
    assert world.context.get("added") is None
    assert world.clients["api"] is client
    # What was restored is a copy too: the checkpoint is as good as new.
    world.context["cart"].clear()
    world.rollback(here)
    assert world.context["cart"] == ["book"]


def test_every_checkpoint_can_be_restored_any_number_of_times_in_any_order() -> None:
    world, data = memory_world()
    ids = []
    for stock in range(5):
        data["stock"] = stock
        ids.append(world.checkpoint("same name"))
    assert len(set(ids)) == 5
    for index in (3, 0, 4, 4, 1, 0, 2, 3):
        world.rollback(ids[index])
        assert data["stock"] == index
        assert world.is_valid(ids[4])
    world.rollback("same name")
    assert data["stock"] == 4
    found = world.find(ids[1])
    assert (found.id, found.name, set(found.tokens)) == (ids[1], "same name", {"db"})


def test_an_unknown_checkpoint_is_a_key_error_that_says_so() -> None:
    world, _ = memory_world()
    with pytest.raises(KeyError) as missing:
        world.rollback("nonexistent_checkpoint")
    assert isinstance(missing.value, CheckpointNotFound)
    assert str(missing.value) == "Checkpoint not found: nonexistent_checkpoint"
    assert not world.is_valid("nonexistent_checkpoint")


def test_a_released_checkpoint_is_gone_and_its_name_finds_the_one_before() -> None:
    world, data = memory_world()
    first = world.checkpoint("point")
    data["stock"] = 2
    second = world.checkpoint("point")
    world.release("point")
    assert not world.is_valid(second)
    assert list(world.checkpoints) == [first]
    world.rollback("point")
    assert data["stock"] == 3
    world.release(first)
    with pytest.raises(CheckpointNotFound):
        world.rollback("point")


def test_a_context_value_without_a_copy_is_named_before_any_system_is_asked() -> None:
    system = Failing()
    world = World({"db": system}, context={"lock": threading.Lock()})
    with pytest.raises(InvalidValue, match=r"context\['lock'\] cannot be copied"):
        world.checkpoint("here")
    assert system.kept == []
    assert not world.checkpoints


@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_a_checkpoint_is_all_or_nothing(failing: str) -> None:
    systems = {name: Failing({"n": 1}) for name in "abc"}
    world = World(systems)
    systems[failing].fail("checkpoint")
    with pytest.raises(CheckpointError, match=f"System {failing} could not .*here: no") as failed:
        world.checkpoint("here")
    assert failed.value.system == failing
    assert isinstance(failed.value.__cause__, Fault)
    assert not world.checkpoints
    assert [system.kept for system in systems.values()] == [[], [], []]
    systems[failing].fails.clear()
    world.rollback(world.checkpoint("here"))


def test_a_token_that_is_none_is_refused() -> None:
    class Forgetful(MemorySystem):
        def checkpoint(self, name: str) -> Any:
            return None

    with pytest.raises(CheckpointError, match="token is None"):
        World({"db": Forgetful()}).checkpoint("here")


def three(world_at: int = 2) -> tuple[World, dict[str, Failing], str]:
    systems = {name: Failing({"n": 1}) for name in "abc"}
    world = World(systems, context={"n": 1})
    target = world.checkpoint("target")
    for system in systems.values():
        system.data["n"] = world_at
    world.context["n"] = world_at
    return world, systems, target


def places(systems: dict[str, Failing]) -> list[Any]:
    return [system.data for system in systems.values()]


@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_a_system_that_refuses_keeps_all_where_they_are(failing: str) -> None:
    world, systems, target = three()
    systems[failing].fail("prepare")
    with pytest.raises(RollbackError) as failed:
        world.rollback(target)
    outcomes = dict.fromkeys("abc", "untouched")
    outcomes[failing] = "refused: Fault: no prepare today"
    assert failed.value.outcomes == outcomes
    assert failed.value.is_consistent
    assert world.is_consistent
    assert places(systems) == [{"n": 2}] * 3
    assert world.context["n"] == 2


@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_a_rollback_that_fails_is_undone_in_all_systems(failing: str) -> None:
    world, systems, target = three()
    systems[failing].fail("rollback", times=1)
    with pytest.raises(RollbackError, match="The world is as it was before") as failed:
        world.rollback(target)
    order = "abc"
    at = order.index(failing)
    expected = {
        name: "moved back" if place < at else "untouched" for place, name in enumerate(order)
    }
    expected[failing] = "failed: Fault: no rollback today; moved back"
    assert failed.value.outcomes == expected
    assert places(systems) == [{"n": 2}] * 3
    assert world.context["n"] == 2
    assert world.is_consistent
    # Only the target's snapshots are left.
    assert [len(system.kept) for system in systems.values()] == [1, 1, 1]
    systems[failing].fails.clear()
    world.rollback(target)
    assert places(systems) == [{"n": 1}] * 3


def test_a_world_that_could_not_go_back_refuses_all_but_a_rollback() -> None:
    world, systems, target = three()
    systems["b"].fail("rollback")
    with pytest.raises(RollbackError, match="The world is inconsistent") as failed:
        world.rollback(target)
    assert failed.value.outcomes["a"] == "moved back"
    assert "not moved back: Fault" in failed.value.outcomes["b"]
    assert failed.value.outcomes["c"] == "untouched"
    assert not world.is_consistent
    for refused in (
        lambda: world.act(lambda w: None),
        lambda: world.checkpoint("x"),
        lambda: world.observe_and_checkpoint("x"),
    ):
        with pytest.raises(WorldInconsistent, match="Roll back to a checkpoint first"):
            refused()
    # It fails again: still flagged. Then it succeeds.
    with pytest.raises(RollbackError):
        world.rollback(target)
    assert not world.is_consistent
    systems["b"].fails.clear()
    world.rollback(target)
    assert world.is_consistent
    assert places(systems) == [{"n": 1}] * 3
    world.checkpoint("usable again")


def test_an_interrupt_in_the_middle_of_a_rollback_leaves_the_world_flagged() -> None:
    class Interrupted(MemorySystem):
        is_armed = True

        def rollback(self, token: bytes) -> None:
            if self.is_armed:
                self.is_armed = False
                raise KeyboardInterrupt
            super().rollback(token)

    world = World({"a": Failing({"n": 1}), "b": Interrupted({"n": 1})})
    target = world.checkpoint("target")
    with pytest.raises(KeyboardInterrupt):
        world.rollback(target)
    assert not world.is_consistent
    world.rollback(target)
    assert world.is_consistent


def test_without_a_way_back_nothing_is_moved() -> None:
    world, systems, target = three()
    systems["c"].fail("checkpoint")
    with pytest.raises(RollbackError, match="could not have been undone") as failed:
        world.rollback(target)
    assert failed.value.outcomes["c"].startswith("refused: ")
    assert places(systems) == [{"n": 2}] * 3
    assert world.is_consistent


def test_a_checkpoint_with_other_systems_is_refused() -> None:
    world, _ = memory_world()
    here = world.checkpoint("here")
    world.add_system("late", MemorySystem())
    assert not world.is_valid(here)
    with pytest.raises(CheckpointInvalid, match=r"different systems then \(late\)"):
        world.rollback(here)
    with pytest.raises(InvalidArgument, match="already has a system late"):
        world.add_system("late", MemorySystem())
    with pytest.raises(InvalidArgument, match=r"must be a holdfast\.worlds\.System"):
        World({"db": object()})  # type: ignore[dict-item]


def test_a_system_that_is_a_stack_moves_last_and_its_dead_checkpoints_are_known() -> None:
    stack, memory = Stack(), MemorySystem()
    world = World({"stack": stack, "memory": memory})
    ids = []
    for n in range(3):
        stack.data["n"] = memory.data["n"] = n
        ids.append(world.checkpoint(f"at {n}"))
    world.rollback(ids[1])
    assert [world.is_valid(id) for id in ids] == [True, True, False]
    with pytest.raises(CheckpointInvalid, match="destroyed it"):
        world.rollback(ids[2])
    assert stack.data == memory.data == {"n": 1}
    failing = Failing({})
    world = World({"stack": stack, "last": failing})
    target = world.checkpoint("target")
    above = world.checkpoint("above")
    failing.fail("rollback", times=1)
    with pytest.raises(RollbackError) as failed:
        world.rollback(target)
    assert failed.value.outcomes["stack"] == "untouched"
    assert world.is_valid(above)


@action(parameters={"by": [1, 2]})
def add(world: World, by: int) -> None:
    for system in world.systems.values():
        assert isinstance(system, MemorySystem | Stack)
        system.data["n"] = system.data.get("n", 0) + by


def test_a_dead_checkpoint_is_reached_by_replay() -> None:
    world = World({"stack": Stack()})
    states = [world.observe_and_checkpoint("initial")]
    for by in (1, 2, 2):
        world.act(add, by=by)
        states.append(world.observe_and_checkpoint("after"))
    dead = states[3].checkpoint_id
    assert dead is not None
    world.rollback("initial")
    world.rollback(dead, replay=True)
    assert world.observe()[0].data == {"n": 5}
    assert world.replay_to(states[1].id) is states[1]
    assert world.observe()[0].data == {"n": 1}
    assert [str(step) for step in world.graph.path_to(states[2].id)] == ["add(by=1)", "add(by=2)"]
    assert world.graph.action("add") is add
    assert world.graph.state(states[2].shown_id) is states[2]


def data_of(world: World) -> dict[str, Any]:
    system = world.systems["stack"]
    assert isinstance(system, Stack)
    return system.data


def dead_state_after(step: Action) -> tuple[World, Stack, State]:
    stack = Stack()
    world = World({"stack": stack})
    world.observe_and_checkpoint("initial")
    world.act(step)
    reached = world.observe_and_checkpoint("reached")
    world.rollback("initial")
    return world, stack, reached


def test_a_replay_that_arrives_elsewhere_says_at_which_step() -> None:
    results = iter([1, 2])

    @action
    def draw(world: World) -> None:
        data_of(world)["drawn"] = next(results)

    world, stack, reached = dead_state_after(draw)
    with pytest.raises(
        ReplayFailed, match=r"Step 1 of the replay, draw\(\), led to state"
    ) as failed:
        world.replay_to(reached.id)
    assert failed.value.expected == reached.id
    assert stack.data == {"drawn": 2}


def test_what_must_not_be_repeated_is_not() -> None:
    @action(replayable=False)
    def pay(world: World) -> None:
        data_of(world)["paid"] = True

    world, stack, reached = dead_state_after(pay)
    stack.data["untouched"] = True
    assert reached.checkpoint_id is not None
    with pytest.raises(ReplayFailed, match="pay must not be repeated"):
        world.rollback(reached.checkpoint_id, replay=True)
    assert stack.data == {"untouched": True}


def test_an_exception_is_an_outcome_and_expected_ones_are_told_apart() -> None:
    world, _ = memory_world()

    @action(expects=KeyError)
    def pick(world: World, error: type[Exception]) -> None:
        raise error("gone")

    expected, unexpected = (world.act(pick, error=error) for error in (KeyError, OSError))
    assert isinstance(expected.error, KeyError)
    assert not expected.is_failure
    assert unexpected.is_failure
    assert world.act(lambda world: 7).value == 7


def test_a_state_is_the_same_by_every_path_and_adopts_a_later_checkpoint() -> None:
    world, data = memory_world()
    first = world.observe_and_checkpoint("initial")
    data["stock"] = 9
    data["stock"] = 3
    assert world.observe_and_checkpoint("again") is first
    assert len(world.checkpoints) == 1
    world.release("initial")
    assert world.observe_and_checkpoint("adopted") is first
    assert first.checkpoint_id == world.find("adopted").id
    assert len(first.id) == 64
    assert first.shown_id == first.id[:16]


def test_the_order_of_systems_and_keys_is_no_part_of_the_identity() -> None:
    def state_of(names: str) -> str:
        systems = {name: MemorySystem(dict.fromkeys(names, 1)) for name in names}
        return World(systems).observe_state()[0].id

    assert state_of("ab") == state_of("ba")
    assert state_of("ab") != state_of("ac")


def test_metadata_is_no_part_of_the_identity_and_declared_context_is() -> None:
    class Noisy(MemorySystem):
        calls = 0

        def observe(self) -> Observation:
            self.calls += 1
            return Observation("my own name", self.data["n"], {"calls": self.calls})

    noisy = Noisy({"n": 1})
    world = World({"db": noisy}, context={"token": "a", "seen": 0}, identity=["token"])
    first = world.observe_and_checkpoint("initial")
    assert world.observe()[0].system == "db"
    assert world.observe()[0].metadata["calls"] > 1
    world.context["seen"] = 1
    assert world.observe_state()[0] is first
    world.context["token"] = "b"
    other, is_new = world.observe_state()
    assert is_new
    assert other.id != first.id
    with pytest.raises(InvalidArgument, match="nothing to observe"):
        World({}).observe()


def test_a_leak_is_reported_with_the_system_that_did_not_go_back() -> None:
    class Leaky(MemorySystem):
        def rollback(self, token: bytes) -> None:
            pass

    leaky = Leaky({"n": 1})
    world = World({"fine": MemorySystem({"n": 1}), "leaky": leaky}, verify=True)
    world.observe_and_checkpoint("initial")
    world.rollback("initial")
    assert world.leaks == []
    leaky.data["n"] = 2
    world.rollback("initial")
    [leak] = world.leaks
    assert (leak.system, leak.before, leak.after) == ("leaky", {"n": 1}, {"n": 2})
    assert leak.checkpoint_id == world.find("initial").id


def test_closing_a_world_closes_its_systems_even_if_one_fails() -> None:
    closed: list[str] = []

    class Closing(MemorySystem):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise Fault

    world = World({name: Closing(name) for name in "abc"})
    world.on_close(lambda: closed.append("factory"))
    with pytest.raises(Fault), world:
        world.checkpoint("here")
    assert closed == ["c", "b", "a", "factory"]
    assert not world.checkpoints
