"""Explorations: complete with every strategy, on every kind of system, and honest about limits."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from holdfast.errors import ExplorationAborted, InvalidArgument
from holdfast.worlds import (
    Candidate,
    Exploration,
    FileSystem,
    MemorySystem,
    Progress,
    SqliteConnectionSystem,
    SqliteSystem,
    Strategy,
    System,
    Violation,
    World,
    action,
    explore,
    invariant,
    reproducer,
    write_reproducer,
)
from holdfast.worlds.strategies import STRATEGIES
from tests.worlds import counter_shop
from tests.worlds.counter_shop import ACTIONS, data, make_world, stock_is_never_negative
from tests.worlds.systems import Failing, Stack

SIZE = 4
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Grid:
    """A place on a grid, kept in some system; the graph of it has cycles and a reset."""

    def __init__(
        self, system: System, read: Callable[[], int], write: Callable[[int], object]
    ) -> None:
        self.world = World({"grid": system}, verify=True)

        def move(name: str, go: Callable[[int, int], tuple[int, int]]) -> Any:
            @action(name=name)
            def run(world: World) -> None:
                x, y = go(read() % SIZE, read() // SIZE)
                write(max(0, min(SIZE - 1, x)) + SIZE * max(0, min(SIZE - 1, y)))

            return run

        self.actions = [
            move("right", lambda x, y: (x + 1, y)),
            move("left", lambda x, y: (x - 1, y)),
            move("up", lambda x, y: (x, y + 1)),
            move("down", lambda x, y: (x, y - 1)),
            move("reset", lambda x, y: (0, 0)),
            move("swap", lambda x, y: (y, x)),
        ]


def in_memory(tmp_path: Path) -> Grid:
    system = MemorySystem({"at": 0})
    return Grid(system, lambda: int(system.data["at"]), lambda at: system.data.update(at=at))


def in_stack(tmp_path: Path) -> Grid:
    system = Stack()
    system.data["at"] = 0
    return Grid(system, lambda: int(system.data["at"]), lambda at: system.data.update(at=at))


def in_files(tmp_path: Path) -> Grid:
    root = tmp_path / "root"
    root.mkdir()
    file = root / "at"
    file.write_text("0")
    system = FileSystem(root)
    return Grid(system, lambda: int(file.read_text()), lambda at: file.write_text(str(at)))


def in_sqlite(connection: apsw.Connection, system: System) -> Grid:
    return Grid(
        system,
        lambda: int(connection.execute("SELECT at FROM grid").fetchall()[0][0]),  # type: ignore[arg-type]
        lambda at: connection.execute("UPDATE grid SET at = ?", (at,)),
    )


def in_sqlite_connection(tmp_path: Path) -> Grid:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE grid (at); INSERT INTO grid VALUES (0)")
    return in_sqlite(connection, SqliteConnectionSystem(connection))


def in_sqlite_file(tmp_path: Path) -> Grid:
    connection = apsw.Connection(str(tmp_path / "grid.db"))
    connection.pragma("journal_mode", "wal")
    connection.execute("CREATE TABLE grid (at); INSERT INTO grid VALUES (0)")
    return in_sqlite(connection, SqliteSystem(tmp_path / "grid.db"))


SYSTEMS = [in_memory, in_stack, in_files, in_sqlite_connection, in_sqlite_file]


def check_whole_grid(result: Exploration) -> None:
    assert result.is_complete, result.summary()
    assert len(result.graph.states) == SIZE**2
    assert result.steps == SIZE**2 * 6
    assert result.leaks == ()
    depths = sorted(state.depth for state in result.graph.states.values())
    expected = sorted(x + y for x in range(SIZE) for y in range(SIZE))
    assert depths == expected
    for state in result.graph.states.values():
        path = result.graph.path_to(state.id)
        assert len(path) == state.depth
        ends = [step.to_id for step in path]
        assert ends[-1:] == [state.id][: len(path)]


@every_strategy
@pytest.mark.parametrize("place", SYSTEMS)
def test_a_graph_with_cycles_and_a_reset_is_explored_completely(
    place: Callable[[Path], Grid], strategy: str, tmp_path: Path
) -> None:
    grid = place(tmp_path)
    with grid.world:
        before = grid.world.observe()
        result = explore(grid.world, grid.actions, strategy=strategy)
        check_whole_grid(result)
        assert grid.world.observe() == before
        assert not grid.world.checkpoints
        # Going back the way it came, a search never asks a stack for what it destroyed.
        assert (result.replayed > 0) == (place is in_stack and strategy != "dfs")


def lengths(result: Exploration) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for violation in result.violations:
        found.setdefault(violation.invariant, []).append(len(violation.path))
    return {name: sorted(numbers) for name, numbers in found.items()}


@every_strategy
def test_every_strategy_finds_the_same_violations_with_paths_of_the_same_length(
    strategy: str,
) -> None:
    result = explore(make_world, ACTIONS, [stock_is_never_negative], strategy=strategy)
    assert result.is_complete
    expected = explore(make_world, ACTIONS, [stock_is_never_negative])
    wanted = lengths(expected)
    assert lengths(result) == wanted
    assert min(wanted["stock_is_never_negative"]) == 2
    assert wanted["refund raises LookupError"] == [1]
    assert result.worst() == "critical"
    assert not result.has_passed
    assert "[critical] stock_is_never_negative" in result.summary()


def test_the_fixed_shop_has_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_shop, "FIXED", {"oversell", "refund"})
    result = explore(make_world, ACTIONS, [stock_is_never_negative])
    assert result.has_passed
    assert result.is_complete
    assert result.worst() is None


def test_a_violation_is_reported_once_for_each_state() -> None:
    result = explore(make_world, ACTIONS, [stock_is_never_negative])
    keys = [violation.key for violation in result.violations]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("strategy", ["dfs", "random", "weighted"])
def test_the_path_of_an_unfinished_exploration_is_shrunk(strategy: str) -> None:
    system = MemorySystem({"noise": 0, "armed": 0})

    @action(parameters={"by": [1, 2, 3]})
    def wander(world: World, by: int) -> None:
        system.data["noise"] = (system.data["noise"] + by) % 50

    @action
    def arm(world: World) -> None:
        system.data["armed"] += 1

    @invariant
    def is_safe(world: World) -> None:
        assert system.data["armed"] < 3

    world = World({"memory": system})
    result = explore(
        world, [arm, wander], [is_safe], strategy=strategy, seed=5, stop_on_violation=True
    )
    assert result.ended == "stop_on_violation"
    [violation] = result.violations
    assert [str(step) for step in violation.path] == ["arm()", "arm()", "arm()"]
    unshrunk = explore(
        world, [arm, wander], [is_safe], strategy=strategy, seed=5, stop_on_violation=True,
        shrinks=False,
    )  # fmt: skip
    assert len(unshrunk.violations[0].path) > 3 or strategy != "dfs"
    assert system.data == {"noise": 0, "armed": 0}


@pytest.mark.parametrize(
    ("limits", "ended"),
    [
        ({"max_steps": 3}, "max_steps"),
        ({"max_states": 3}, "max_states"),
        ({"max_seconds": 0}, "max_seconds"),
    ],
)
def test_the_result_says_which_limit_ended_it(limits: dict[str, Any], ended: str) -> None:
    result = explore(make_world, ACTIONS, **limits)
    assert result.ended == ended
    assert not result.is_complete
    assert f"ended by {ended}" in result.summary()


@every_strategy
def test_no_state_deeper_than_the_limit_is_left(strategy: str, tmp_path: Path) -> None:
    grid = in_memory(tmp_path)
    result = explore(grid.world, grid.actions, strategy=strategy, max_depth=2)
    assert result.is_cut
    assert not result.is_complete
    expected = {x + SIZE * y for x in range(SIZE) for y in range(SIZE) if x + y <= 2}
    found = {state.observation("grid")["at"] for state in result.graph.states.values()}
    assert found == expected


def test_an_interrupt_ends_it_with_what_was_found() -> None:
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.steps == 5:
            raise KeyboardInterrupt

    world = make_world()
    result = explore(world, ACTIONS, on_progress=stop)
    assert result.ended == "interrupted"
    assert result.steps == 5
    assert [progress.steps for progress in seen] == [1, 2, 3, 4, 5]
    assert seen[-1].states == len(result.graph.states)
    assert data(world) == {"stock": 2, "sold": 0, "refunds": 0}
    assert not world.checkpoints


def test_limits_and_what_ran_before_are_counted_on_the_path() -> None:
    system = MemorySystem({"on": False})

    @action
    def login(world: World) -> None:
        system.data["on"] = True

    @action
    def logout(world: World) -> None:
        system.data["on"] = False

    @action(after=["login"], limit=2)
    def visit(world: World) -> None:
        pass

    result = explore(World({"memory": system}), [login, logout, visit])
    assert result.is_complete
    # Before any login; then on or off, with 0, 1 or 2 visits.
    assert len(result.graph.states) == 1 + 2 * 3
    for state in result.graph.states.values():
        names = [step.step.action for step in result.graph.path_to(state.id)]
        assert names.count("visit") <= 2
        assert "visit" not in names or names.index("login") < names.index("visit")


def test_an_action_that_is_never_possible_is_named() -> None:
    never = action(name="never", requires=lambda world: False)(lambda world: None)
    broken = action(name="broken", requires=lambda world: 1 / 0 > 0)(lambda world: None)
    result = explore(make_world, [*ACTIONS, never, broken])
    assert result.unused_actions == ["never", "broken"]
    assert "the precondition of broken raised ZeroDivisionError" in result.warnings[0]


def test_invariants_run_before_and_after_actions_and_never_in_a_replay() -> None:
    system = Stack()
    seen: list[str] = []

    @action
    def step(world: World) -> None:
        seen.append("act")
        system.data["n"] = (system.data.get("n", 0) + 1) % 4

    before = invariant(name="b", when="before")(lambda world: seen.append("before"))
    after = invariant(name="a")(lambda world: seen.append("after"))
    result = explore(World({"stack": system}), [step], [before, after])
    assert len(result.graph.states) == 5
    assert seen == ["after", *["before", "act", "after"] * 5]


def test_a_checkpoint_that_fails_is_a_warning_and_the_state_is_replayed() -> None:
    system = Failing({"n": 0})
    calls = 0

    def sometimes() -> bool:
        nonlocal calls
        calls += 1
        return calls % 4 == 3

    @action(parameters={"by": [1, 2]})
    def add(world: World, by: int) -> None:
        system.data["n"] = (system.data["n"] + by) % 8

    world = World({"memory": system})
    system.fails["checkpoint"] = sometimes
    result = explore(world, [add], strategy="dfs")
    assert result.warnings
    assert len(result.graph.states) >= 7
    assert "memory could not make a checkpoint, so states are replayed" in " ".join(result.warnings)
    assert not result.is_complete


def line(system: MemorySystem, length: int) -> Any:
    @action(requires=lambda world: system.data["n"] < length)
    def forward(world: World) -> None:
        system.data["n"] += 1

    return forward


def test_a_state_that_the_world_is_in_is_not_restored_and_one_that_is_done_is_forgotten() -> None:
    class Counting(MemorySystem):
        rollbacks = 0

        def rollback(self, token: bytes) -> None:
            self.rollbacks += 1
            super().rollback(token)

    system = Counting({"n": 0})
    world = World({"memory": system})
    kept: list[int] = []
    result = explore(
        world, [line(system, 20)], on_progress=lambda progress: kept.append(len(world.checkpoints))
    )
    assert len(result.graph.states) == 21
    assert system.rollbacks == 1
    assert max(kept) == 2


def test_a_state_that_cannot_be_restored_is_left_out_with_a_warning() -> None:
    system = Failing({"n": 0})

    @action(parameters={"by": [1, 2]})
    def add(world: World, by: int) -> None:
        system.data["n"] += by
        system.fail("prepare")

    result = explore(World({"memory": system}), [add], max_depth=2, strategy="dfs")
    assert not result.is_complete
    assert "was not explored: The rollback failed. memory: refused" in result.warnings[0]
    assert "could not be restored to its initial state" in result.warnings[-1]


def test_a_shrunk_path_keeps_what_its_actions_require() -> None:
    system = MemorySystem({"noise": 0, "key": False, "open": False})

    @action
    def find_key(world: World) -> None:
        system.data["key"] = True

    @action(requires=lambda world: system.data["key"])
    def unlock(world: World) -> None:
        system.data["open"] = True

    @action
    def wander(world: World) -> None:
        system.data["noise"] = (system.data["noise"] + 1) % 30

    @invariant
    def stays_closed(world: World) -> bool:
        return not system.data["open"]

    result = explore(
        World({"memory": system}),
        [unlock, find_key, wander],
        [stays_closed],
        strategy="dfs",
        stop_on_violation=True,
    )
    [violation] = result.violations
    assert [str(step) for step in violation.path] == ["find_key()", "unlock()"]


def test_only_the_nearest_violation_is_shrunk_and_its_message_is_that_of_its_end() -> None:
    system = MemorySystem({"noise": 0, "n": 0})

    @action
    def add(world: World) -> None:
        system.data["n"] += 1

    @action
    def wander(world: World) -> None:
        system.data["noise"] = (system.data["noise"] + 1) % 5

    @invariant
    def is_small(world: World) -> None:
        if system.data["n"] > 1:
            raise ValueError(f"{system.data['n']} with noise {system.data['noise']}")

    world = World({"memory": system})
    result = explore(world, [add, wander], [is_small], strategy="dfs", max_steps=40)
    nearest, *others = sorted(result.violations, key=lambda found: len(found.path))
    assert [str(step) for step in nearest.path] == ["add()", "add()"]
    assert nearest.message == "ValueError: 2 with noise 0"
    for violation in result.violations:
        for step in violation.path:
            world.act(result.graph.action(step.action), **step.arguments)
        with pytest.raises(ValueError, match=violation.message.partition(": ")[2]):
            is_small(world)
        system.data.update(noise=0, n=0)
    assert len({found.key for found in result.violations}) == len(others) + 1
    assert "… and 4 more, farther away" in result.summary()


def test_an_exploration_ends_when_neither_target_nor_origin_can_be_restored() -> None:
    system = Failing({"n": 0})

    @action
    def add(world: World) -> None:
        system.data["n"] += 1
        if system.data["n"] == 1:
            system.fail("rollback")

    @action
    def wait(world: World) -> None:
        pass

    world = World({"memory": system})
    with pytest.raises(ExplorationAborted, match="Neither a state nor the initial one"):
        explore(world, [add, wait])
    assert not world.is_consistent


def test_a_strategy_of_ones_own_and_bad_arguments() -> None:
    class Last(Strategy):
        def __init__(self, random: Any) -> None:
            super().__init__(random)
            self.waiting: list[Candidate] = []

        def add(self, candidate: Candidate) -> None:
            self.waiting.append(candidate)

        def next(self) -> Candidate:
            return self.waiting.pop()

        def __len__(self) -> int:
            return len(self.waiting)

    assert explore(make_world, ACTIONS, strategy=Last).strategy == "Last"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "best"}, "strategy must be one of bfs, dfs"),
        ({"actions": []}, "must not be empty"),
        ({"actions": [counter_shop.buy, counter_shop.buy]}, "two actions are called buy"),
        ({"actions": [action(name="x", after=["y"])(print)]}, "unknown action: y"),
        ({"max_steps": 0}, "max_steps"),
        ({"world": lambda: None}, "must be a World or a function that returns one"),
        ({"invariants": ["x"]}, "an invariant must be a function"),
    ]
    for arguments, match in refused:
        given = {"world": make_world, "actions": ACTIONS, **arguments}
        with pytest.raises(InvalidArgument, match=match):
            explore(given.pop("world"), given.pop("actions"), **given)
    with pytest.raises(InvalidArgument, match="combinations of arguments"):
        action(parameters={"a": range(200), "b": range(200)})(print)
    with pytest.raises(InvalidArgument, match="list of values"):
        action(parameters={"a": []})(print)


@pytest.fixture
def generated() -> Callable[[Path, str], subprocess.CompletedProcess[str]]:
    def run(file: Path, fixed: str) -> subprocess.CompletedProcess[str]:
        head = (
            f"from tests.worlds import counter_shop\ncounter_shop.FIXED.update({fixed!r}.split())\n"
        )
        file.with_name("conftest.py").write_text(head)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
            capture_output=True,
            text=True,
            cwd=file.parent,
            env={
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            check=False,
        )

    return run


def test_a_generated_test_fails_with_the_bug_and_passes_without(
    tmp_path: Path, generated: Callable[[Path, str], subprocess.CompletedProcess[str]]
) -> None:
    result = explore(make_world, ACTIONS, [stock_is_never_negative])
    first: dict[str, Violation] = {}
    for violation in result.violations:
        first.setdefault(violation.invariant, violation)
    assert len(first) == 2
    for number, violation in enumerate(first.values()):
        file = tmp_path / "new folder" / f"test_{number}.py"
        assert write_reproducer(violation, result.graph, make_world, file) == file
    failed = generated(tmp_path, "")
    assert "2 failed" in failed.stdout, failed.stdout
    assert "more was sold than there was" in failed.stdout
    assert "nothing was sold" in failed.stdout
    passed = generated(tmp_path, "oversell refund")
    assert "2 passed" in passed.stdout, passed.stdout


def test_what_cannot_be_imported_or_written_is_refused() -> None:
    @action(parameters={"x": [1]})
    def local(world: World, x: int) -> None:
        raise OSError

    result = explore(make_world, [local], max_steps=2)
    with pytest.raises(InvalidArgument, match="local cannot be imported"):
        reproducer(result.violations[0], result.graph, make_world)


def test_what_stands_in_the_program_itself_is_refused_before_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = explore(make_world, ACTIONS, [stock_is_never_negative])
    monkeypatch.setattr(make_world, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "make_world", make_world, raising=False)
    file = tmp_path / "tests" / "test_stock.py"
    with pytest.raises(InvalidArgument, match=r"make_world .* is defined in the main program"):
        write_reproducer(result.violations[0], result.graph, make_world, file)
    assert not file.parent.exists()


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explore(make_world, ACTIONS, [stock_is_never_negative])


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_max_depth_counts_along_shortest_paths_whatever_the_strategy(strategy: str) -> None:
    @action(requires=lambda world: counter(world)["n"] < 9)
    def one(world: World) -> None:
        counter(world)["n"] += 1

    @action(requires=lambda world: counter(world)["n"] < 7)
    def three(world: World) -> None:
        counter(world)["n"] += 3

    def counter(world: World) -> dict[str, Any]:
        system = world.systems["m"]
        assert isinstance(system, MemorySystem)
        return system.data

    result = explore(
        World({"m": MemorySystem({"n": 0})}), [one, three], strategy=strategy, max_depth=3
    )
    seen: list[Any] = [state.observation("m") for state in result.graph.states.values()]
    assert sorted(each["n"] for each in seen) == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert {edge.step.action for edge in result.graph.transitions} == {"one", "three"}
    assert len(result.graph.transitions) == 12
    assert result.is_cut
