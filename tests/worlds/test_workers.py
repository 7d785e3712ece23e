"""Several processes on one frontier: the same result, whatever dies, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

import holdfast
from holdfast.errors import Conflict, ExplorationAborted, InvalidArgument
from holdfast.worlds import Exploration, action, explore, shared
from holdfast.worlds.journal import journal_of
from tests.worlds import crew, grid
from tests.worlds.grid import ACTIONS, INVARIANTS, explored, facts, make_memory_world
from tests.worlds.test_resumed import each_step, run_until


@pytest.fixture(autouse=True)
def environment(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes of a test know; they leave nothing in the temporary directory."""
    monkeypatch.setenv(grid.SIDE, "5")
    monkeypatch.setenv(crew.PLACE, str(tmp_path / "mark"))


def told(result: Exploration) -> dict[str, Any]:
    seen = {state.id: repr(state.observations) for state in result.graph.states.values()}
    rest = [sorted(result.warnings), result.unused_actions, result.steps, result.is_cut]
    return {**facts(result), "seen": seen, "rest": rest}


@pytest.mark.parametrize("strategy", ["bfs", "random"])
def test_two_workers_find_what_one_process_finds(
    strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = 0
    actions = [crew.grow, crew.shrink, crew.limited]
    given: dict[str, Any] = {"strategy": strategy, "max_depth": 5}
    for make in (crew.make_world, crew.make_leaking):
        alone = explore(make, actions, [crew.below_five], **given)
        printed += capfd.readouterr().out.count("growing")
        together = explore(make, actions, [crew.below_five], **given, workers=2)
        if make is crew.make_world:
            assert told(together) == told(alone)
            assert alone.violations
            assert alone.is_cut
        else:
            assert alone.leaks
            assert together.leaks
            assert {leak.system for leak in together.leaks} == {"m"}
        assert "growing" not in capfd.readouterr().out, "it goes to stderr"
    assert printed


def test_workers_on_real_systems_have_one_each(temporary: Path) -> None:
    alone = explored("own")
    together = explored("own", workers=2)
    assert facts(together) == facts(alone)
    assert len(alone.graph.states) == 25


def test_an_exploration_changes_between_one_and_two_workers(tmp_path: Path) -> None:
    whole = facts(explored("memory"))
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        for steps, workers in ((10, 2), (20, 1)):
            part = explore(
                make_memory_world,
                ACTIONS,
                INVARIANTS,
                max_steps=steps,
                store=store,
                id="a",
                resume=True,
                workers=workers,
            )
            assert (part.steps, part.ended) == (steps, "max_steps")
            # Nor has any worker tried more.
            assert len(journal_of(store.find_session("a")).steps()) == steps
        rest = explored("memory", store=store, id="a", resume=True, workers=2)
        assert facts(rest) == whole
        again = explored("memory", store=store, id="a", resume=True)
        assert (facts(again), again.steps) == (whole, rest.steps)


def test_one_that_was_killed_alone_is_resumed_by_workers(tmp_path: Path) -> None:
    whole = facts(explored("memory"))
    url = f"sqlite:///{tmp_path}/store.db"
    assert not run_until(9, "memory", url)
    with holdfast.open(url) as store:
        journal = journal_of(store.find_session("grid"))
        assert len(journal.checkpoints()) == 1
        rest = explored("memory", store=store, id="grid", resume=True, workers=2)
        assert facts(rest) == whole
        assert journal.checkpoints() == []


def workers_of(pid: int) -> list[int]:
    """The living worker processes of a process."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def test_workers_that_are_killed_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(grid.SIDE, "12")
    url = f"sqlite:///{tmp_path}/store.db"
    whole = facts(explored("memory"))
    random, kills = Random(3), 0
    command = [sys.executable, "-m", "tests.worlds.grid", "memory", url, "2", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for number, _ in enumerate(each_step(process)):
            children = workers_of(process.pid)
            if number % 90 == 89 and children:
                kills += 1
                os.kill(random.choice(children), signal.SIGKILL)
        assert process.wait(180) == 0
    assert kills >= 3
    with holdfast.open(url) as store:
        assert facts(explored("memory", store=store, id="grid", resume=True)) == whole


def test_an_action_that_kills_its_process_is_tried_again_and_then_left_out() -> None:
    actions = [crew.grow, crew.die_once, crew.die]
    result = explore(crew.make_world, actions, workers=2)
    assert result.warnings == ["die was left out: 3 processes died of it"]
    assert not result.is_complete
    assert result.unused_actions == ["die"]
    assert len(result.graph.states) == 7


def test_of_a_batch_only_what_kills_is_left_out(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        # Nothing of a batch is written before its end, until a process has died of it.
        given: dict[str, Any] = {"store": store, "id": "a", "commit_every": 100}
        result = explore(crew.make_world, [crew.grow, crew.die_of], workers=2, **given)
    assert result.warnings == ["die_of was left out: 3 processes died of it"]
    tried = [edge.step for edge in result.graph.transitions]
    assert [step.arguments["of"] for step in tried if step.action == "die_of"].count(7) == 0
    assert len(tried) == 6 + 19


def test_a_limit_or_a_violation_ends_all_workers() -> None:
    others = workers_of(os.getpid())  # A server that other tests use is a child too.
    actions = [crew.grow, crew.shrink]
    for given, ended in (
        ({"max_states": 4}, "max_states"),
        ({"stop_on_violation": True}, "stop_on_violation"),
        ({"max_seconds": 0}, "max_seconds"),
    ):
        options: dict[str, Any] = given
        result = explore(crew.make_world, actions, [crew.below_five], workers=2, **options)
        assert result.ended == ended
    assert workers_of(os.getpid()) == others


def test_an_interrupt_ends_all_workers() -> None:
    others = workers_of(os.getpid())  # A server that other tests use is a child too.

    def interrupt(now: Any) -> None:
        if now.steps == 3:
            raise KeyboardInterrupt

    result = explore(crew.make_world, [crew.grow, crew.shrink], workers=2, on_progress=interrupt)
    assert (result.ended, result.steps) == ("interrupted", 3)
    assert workers_of(os.getpid()) == others


def test_worlds_that_differ_or_cannot_be_made_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others = workers_of(os.getpid())  # A server that other tests use is a child too.
    with pytest.raises(Conflict, match="different initial states"):
        explore(crew.make_another_each_time, [crew.shrink], workers=2)
    with pytest.raises(ExplorationAborted, match="LookupError: the database is down"):
        explore(crew.make_none, [crew.grow], workers=2)
    with pytest.raises(ExplorationAborted, match="exit as soon as they start, with exit code 3"):
        explore(crew.make_dead, [crew.grow], workers=2)
    assert workers_of(os.getpid()) == others


def test_bad_input_is_refused_before_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    @action
    def local(world: Any) -> None: ...

    monkeypatch.setattr(shared, "_Process", None)
    with pytest.raises(InvalidArgument, match="local cannot be imported"):
        explore(crew.make_world, [local], workers=2)
    with pytest.raises(InvalidArgument, match="cannot be imported"):
        explore(lambda: make_memory_world(), [crew.grow], workers=2)  # noqa: PLW0108
    with (
        crew.make_world() as world,
        pytest.raises(InvalidArgument, match="a function that returns"),
    ):
        explore(world, [crew.grow], workers=2)
    for wrong in (0, 101, "2"):
        with pytest.raises(InvalidArgument, match="workers"):
            explore(crew.make_world, [crew.grow], workers=wrong)  # type: ignore[arg-type]
