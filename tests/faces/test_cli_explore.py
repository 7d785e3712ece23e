"""`holdfast explore`: what it finds, where it writes it, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import app as app_module

SHOP = """
from holdfast.worlds import MemorySystem, World, action, invariant

FIXED = False


def make_world():
    return World({"shop": MemorySystem({"stock": 1})})


@action(requires=lambda world: world.systems["shop"].data["stock"] > -2)
def buy(world):
    if world.systems["shop"].data["stock"] > 0 or not FIXED:
        world.systems["shop"].data["stock"] -= 1


@invariant(severity="critical")
def stock_is_never_negative(world):
    return world.systems["shop"].data["stock"] >= 0


again = buy
number = 7
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, which no other test has imported."""
    name = f"shop_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = app_module.run(["explore", *arguments])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


def test_a_violation_is_shown_with_its_path_and_decides_the_exit_code(shop: str, run: Run) -> None:
    found = run(f"{shop}:make_world")
    assert found.returncode == 1
    assert "4 states, 3 transitions" in found.stdout
    assert "[critical] stock_is_never_negative in" in found.stdout
    assert "\n  buy() → buy()\n" in found.stdout
    assert "2 violations" in found.stdout
    data = json.loads(run(f"{shop}:make_world", "--json", "--stop", "--strategy=dfs").stdout)
    assert (data["ended"], len(data["violations"])) == ("stop_on_violation", 1)


def test_without_a_violation_it_ends_well(shop: str, run: Run) -> None:
    file = Path(f"{shop}.py")
    file.write_text(file.read_text().replace("FIXED = False", "FIXED = True"))
    found = run(f"{shop}:make_world")
    assert (found.returncode, "0 violations" in found.stdout) == (0, True)
    cut = run(f"{shop}:make_world", "--max-steps=1", "--max-states=9", "--max-seconds=9")
    assert "ended by max_steps" in cut.stdout
    assert "not beyond max_depth" in run(f"{shop}:make_world", "--max-depth=1").stdout


def test_reports_and_tests_are_written(shop: str, run: Run) -> None:
    Path("tests").mkdir()
    reports = ["r.json", "r.html", "r.xml", "r.mmd", "r.dot"]
    options = [f"--report={name}" for name in reports]
    found = run(f"{shop}:make_world", *options, "--tests=tests")
    assert found.returncode == 1
    for name in reports:
        assert Path(name).read_text()
        assert f"wrote {Path(name).resolve()}" in found.stdout
    [test] = Path("tests").iterdir()
    assert test.name == "test_stock_is_never_negative.py"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        env={"PYTHONPATH": str(Path.cwd()), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed" in ran.stdout
    assert "stock_is_never_negative does not hold" in ran.stdout


def test_invariants_with_similar_names_have_a_test_each(shop: str, run: Run) -> None:
    Path("tests").mkdir()
    names = ("never negative", "never-negative", "¡!", "?")
    with Path(f"{shop}.py").open("a") as module:
        for number, name in enumerate(names):
            module.write(
                f"\n@invariant(name={name!r})\n"
                f"def check_{number}(world):\n    return stock_is_never_negative(world)\n"
            )
    run(f"{shop}:make_world", "--tests=tests")
    assert sorted(file.name for file in Path("tests").iterdir()) == [
        "test_never_negative.py",
        "test_never_negative_2.py",
        "test_stock_is_never_negative.py",
        "test_violation.py",
        "test_violation_2.py",
    ]


def test_what_the_explored_code_says_does_not_command_a_terminal(shop: str, run: Run) -> None:
    with Path(f"{shop}.py").open("a") as module:
        module.write(
            "\n@action(limit=1)\ndef fail(world):\n    raise OSError('\\x1b[2J\\udc80\\nnext')\n"
        )
    found = run(f"{shop}:make_world")
    assert ("\x1b" in found.stdout, "\ufffd[2J\ufffd\nnext" in found.stdout) == (False, True)
    data = json.loads(run(f"{shop}:make_world", "--json").stdout)
    assert "\x1b[2J\udc80\nnext" in {each["message"] for each in data["violations"]}


def test_what_cannot_be_explored_is_named(shop: str, run: Run) -> None:
    Path("empty_of_actions.py").write_text("def make_world(): ...\n")
    for arguments, said in (
        (["nowhere"], "must be MODULE:WORLD"),
        (["nowhere:make_world"], "cannot be loaded: ModuleNotFoundError"),
        ([f"{shop}:number"], "must be a function that makes a world"),
        (["empty_of_actions:make_world"], "has no action"),
        ([f"{shop}:make_world", "--strategy=best"], "--strategy must be one of bfs"),
        ([f"{shop}:make_world", "--max-steps=0"], "--max-steps must be"),
        ([f"{shop}:make_world", "--report=r.pdf"], "a report ends in one of"),
        ([f"{shop}:make_world", "--tests=nowhere"], "--tests must name a directory"),
        ([f"{shop}:make_world", "--report=nowhere/r.html"], "--report needs a directory"),
    ):
        found = run(*arguments)
        assert (found.returncode, said in found.stderr) == (2, True), (arguments, found.stderr)


def test_an_exploration_in_a_store_is_resumed_and_removed(
    shop: str, run: Run, tmp_path: Path
) -> None:
    world, url = f"{shop}:make_world", f"--url=sqlite:///{tmp_path}/store.db"
    part = json.loads(run(world, url, "--max-steps=1", "--json").stdout)
    assert (part["ended"], part["steps"]) == ("max_steps", 1)
    refused = run(world, url)
    assert refused.returncode not in (0, 1)
    assert "already: --resume continues it, and holdfast.worlds.clean, or" in refused.stderr
    rest = run(world, url, "--resume", "--commit-every=5")
    assert rest.returncode == 1
    assert "4 states, 3 transitions" in rest.stdout
    other = json.loads(run(world, url, "--id=other", "--json").stdout)
    assert other["steps"] == 3
    assert run(world, url, "--clean").stdout == f"Removed exploration {world}.\n"
    assert run(world, url, "--clean").stdout == f"There is no exploration {world}.\n"
    gone = json.loads(run(world, url, "--clean", "--id=other", "--json").stdout)
    assert gone == {"id": "other", "removed": True, "leftovers": 0, "problem": None}


def test_without_a_store_none_is_made(shop: str, run: Run, tmp_path: Path) -> None:
    run(f"{shop}:make_world")
    assert list(tmp_path.glob("*.db*")) == []


def test_workers_find_the_same_in_processes_of_their_own(shop: str, run: Run) -> None:
    alone = json.loads(run(f"{shop}:make_world", "--json").stdout)
    together = run(f"{shop}:make_world", "--json", "--workers=2")
    assert together.returncode == 1
    data = json.loads(together.stdout)
    assert data["states"] == alone["states"]
    assert [each["path"] for each in data["violations"]] == [
        each["path"] for each in alone["violations"]
    ]
