"""Explorations of odd things: what cannot be shown, names that clash, and Ctrl-C at the end."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.worlds import (
    MemorySystem,
    World,
    action,
    explore,
    invariant,
    reproducer,
    write_report,
)
from tests.worlds.counter_shop import make_world


class Mute(Exception):
    """An exception that cannot be shown, and a value that cannot be written."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def test_what_cannot_be_shown_does_not_end_an_exploration(tmp_path: Path) -> None:
    def fails(world: World) -> bool:
        raise Mute

    @action(limit=1)
    def raises(world: World) -> None:
        raise Mute

    @action(limit=1)
    def returns(world: World) -> Mute:
        return Mute()

    actions = [raises, returns, action(name="impossible", requires=fails)(print)]
    result = explore(make_world, actions, [invariant(name="fails")(fails)])
    kinds = {violation.invariant: violation.message for violation in result.violations}
    assert kinds == {"raises raises Mute": "Mute", "fails": "Mute"}
    assert result.warnings == ["the precondition of impossible raised Mute"]
    write_report(result, tmp_path / "report.json")
    with holdfast.open("sqlite://") as store:
        kept = explore(make_world, actions, store=store, id="mute")
        assert kept.ended == "complete"


def test_foreign_code_that_exits_does_not_end_an_exploration() -> None:
    def exits(world: World) -> bool:
        raise SystemExit(0)

    @action(limit=1)
    def leaves(world: World) -> None:
        raise SystemExit(3)

    @action(limit=1, expects=SystemExit)
    def helps(world: World) -> None:
        raise SystemExit

    actions = [leaves, helps, action(name="impossible", requires=exits)(print)]
    result = explore(make_world, actions, [invariant(name="exits")(exits)])
    kinds = {violation.invariant: violation.message for violation in result.violations}
    assert kinds == {"leaves raises SystemExit": "3", "exits": "SystemExit: 0"}
    assert result.warnings == ["the precondition of impossible raised SystemExit: 0"]
    assert result.steps == 4


def test_an_interrupt_while_paths_are_shortened_keeps_what_was_found() -> None:
    system = MemorySystem({"n": 0})
    world, runs = World({"n": system}), 0

    @action
    def add(world: World) -> None:
        nonlocal runs
        runs += 1
        if runs > 8:
            raise KeyboardInterrupt
        system.data["n"] += 1

    @invariant
    def is_small(world: World) -> bool:
        return bool(system.data["n"] < 3)

    result = explore(world, [add], [is_small], max_steps=8)
    assert (runs, result.ended, len(result.violations)) == (9, "max_steps", 6)
    assert result.warnings == ["interrupted: paths may be longer than necessary"]
    assert (system.data, list(world.checkpoints)) == ({"n": 0}, [])


def test_a_generated_test_is_right_whatever_its_parts_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_one.py").write_text(
        "from holdfast.worlds import MemorySystem, World, action, invariant\n"
        "def outcome():\n    return World({'log': MemorySystem({'log': []})})\n"
        "@action(parameters={'class': [1], 'a b': [2]}, limit=1)\n"
        "def step(world, **given):\n    world.systems['log'].data['log'].append(given)\n"
        "@invariant(name='nothing')\n"
        "def world(world):\n    assert len(world.systems['log'].data['log']) < 2\n"
    )
    (tmp_path / "odd_two.py").write_text(
        "from holdfast.worlds import action\n"
        "@action(name='other', after=['step'], limit=1)\n"
        "def step(world):\n    world.systems['log'].data['log'].append('two')\n"
        "@action(after=['other'], limit=1)\n"
        "def test_me(world):\n    raise OSError('at last')\n"
    )
    one, two = importlib.import_module("odd_one"), importlib.import_module("odd_two")
    result = explore(one.outcome, [one.step, two.step, two.test_me], [one.world])
    assert sorted(each.invariant for each in result.nearest()) == [
        "nothing",
        "test_me raises OSError",
    ]
    for violation in result.nearest():
        names: dict[str, Any] = {}
        exec(reproducer(violation, result.graph, one.outcome), names)
        [test] = [name for name in names if name.startswith("test")]
        with pytest.raises(AssertionError, match=r"nothing: AssertionError|at last"):
            names[test]()
