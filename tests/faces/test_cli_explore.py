"""`holdfast explore`: what it finds, where it writes it, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import app as app_module
from tests.faces import forked

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
    assert "\n1 violation\n" in run(f"{shop}:make_world", "--stop").stdout


@pytest.mark.parametrize(
    ("before", "exit_at", "said"),
    [
        ("    return World(", "    raise SystemExit(0)\n", "failed: SystemExit: 0"),
        ("number = 7", "raise SystemExit(0)\n", "cannot be loaded: SystemExit: 0"),
    ],
)
def test_a_module_that_exits_has_not_passed(
    shop: str, run: Run, before: str, exit_at: str, said: str
) -> None:
    file = Path(f"{shop}.py")
    file.write_text(file.read_text().replace(before, exit_at + before))
    found = run(f"{shop}:make_world")
    assert found.returncode == 2
    assert said in found.stderr


def test_a_report_is_not_written_over_a_directory(shop: str, run: Run) -> None:
    Path("r.json").mkdir()
    found = run(f"{shop}:make_world", "--report=r.json", "--id=x")
    assert (found.returncode, "'r.json' is a directory" in found.stderr) == (2, True)
    assert not Path("holdfast.db").exists()


def test_clean_needs_no_store_after_an_exploration_without_one(
    shop: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / ".holdfast-frontier-killed"
    left.mkdir()
    (left / "lock").touch()
    for place in ("--url=sqlite:///holdfast.db", "--id=x"):
        missing = run(f"{shop}:make_world", "--clean", place)
        assert (missing.returncode, "there is no store" in missing.stderr) == (3, True)
    cleaned = run(f"{shop}:make_world", "--clean")
    assert cleaned.stdout.endswith("\nRemoved 1 leftover of killed processes.\n")
    assert not left.exists()
    assert not Path("holdfast.db").exists()


TERMINATED = """
import os
import signal
from pathlib import Path

from holdfast.worlds import FileSystem, World, action

FILE = Path("files/number")


def make_world():
    return World({"files": FileSystem("files")})


@action
def add(world):
    number = int(FILE.read_text()) + 1
    FILE.write_text(str(number))
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_ends_it_and_restores_the_systems(tmp_path: Path) -> None:
    (tmp_path / "terminated.py").write_text(TERMINATED)
    number, left = tmp_path / "files" / "number", tmp_path / "left"
    number.parent.mkdir()
    number.write_text("0")
    left.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", "explore", "terminated:make_world"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(left)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "interrupted" in ended.stdout
    assert number.read_text() == "0"
    assert list(left.iterdir()) == []


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
        ([f"{shop}:make_world", "--report=r.pdf"], "the name of a report must end in one of"),
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
    assert "in the store: --resume continues it, and holdfast.worlds.clean, or" in refused.stderr
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


def test_only_what_is_in_the_store_is_resumed(shop: str, run: Run, tmp_path: Path) -> None:
    world, url = f"{shop}:make_world", f"--url=sqlite:///{tmp_path}/store.db"
    nowhere = run(world, url, "--resume")
    assert (nowhere.returncode, list(tmp_path.glob("store.db*"))) == (3, []), nowhere.stderr
    run(world, url, "--max-steps=1")
    unknown = run(world, url, "--resume", "--id=typo", "--json")
    assert unknown.returncode == 3
    told = json.loads(unknown.stderr)
    assert told["message"] == (
        "There is no exploration typo in the store to continue; leave out --resume."
    )
    # Nor is it begun by that.
    assert run(world, url, "--clean", "--id=typo").stdout == "There is no exploration typo.\n"
    both = run(world, url, "--resume", "--clean")
    assert both.returncode == 2
    assert "--clean removes what --resume would continue" in both.stderr
    assert json.loads(run(world, url, "--resume", "--json").stdout)["steps"] == 3


def test_only_what_is_running_can_be_joined(shop: str, run: Run, tmp_path: Path) -> None:
    world, url = f"{shop}:make_world", f"--url=sqlite:///{tmp_path}/store.db"
    assert run(world, url, "--workers=2", "--max-steps=1").returncode == 0
    for options, code, said in (
        (["--join", "--id=typo"], 3, "There is no exploration typo to take part in."),
        (["--join"], 4, "is not running: --resume continues it"),
        (["--join", "--resume"], 2, "--join takes part in what is running"),
        (["--join", "--clean"], 2, "--join takes part in what is running"),
        (["--join", "--workers=2"], 2, "--join adds one worker"),
        (["--join", "--report=r.json"], 2, "--join adds one worker"),
        (["--join", "--tests=."], 2, "--join adds one worker"),
        (["--id="], 2, "--id must be text of 1 to 256"),
    ):
        found = run(world, url, *options)
        assert (found.returncode, said in found.stderr) == (code, True), found.stderr
    assert run(world, url, "--clean").stdout == f"Removed exploration {world}.\n"


def test_what_fails_in_the_module_is_told_with_its_place(shop: str, run: Run) -> None:
    file = Path(f"{shop}.py")
    text = file.read_text()
    file.write_text(
        text.replace('return World({"shop"', 'return helped() or World({"shop"')
        + "\n\ndef helped():\n    raise LookupError('no such shop')\n"
    )
    for options in ([], ["--clean", "--url=sqlite:///store.db"]):
        if options:
            run(f"{shop}:make_world", options[1])
        found = run(f"{shop}:make_world", *options)
        assert found.returncode == 2, found.stderr
        first, *lines = found.stderr.splitlines()
        assert first == f"Error: '{shop}:make_world' failed: LookupError: no such shop"
        assert [line.strip() for line in lines if "File" not in line][::2] == [
            'return helped() or World({"shop": MemorySystem({"stock": 1})})',
            "raise LookupError('no such shop')",
        ]
        assert "cli/explore.py" not in found.stderr
        assert "bug" not in found.stderr


def test_what_cannot_be_imported_is_told_with_its_place(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"broken_{abs(hash(tmp_path))}"
    Path(f"{name}.py").write_text("import json\n\nvalue = json.loads('{')\n")
    found = run(f"{name}:make_world")
    assert found.returncode == 2
    assert f'{name}.py", line 3, in <module>\n    value = json.loads' in found.stderr
    assert "importlib" not in found.stderr


def test_an_id_may_begin_with_a_dash(shop: str, run: Run, tmp_path: Path) -> None:
    from holdfast.worlds.stored import explore_command

    world, url = f"{shop}:make_world", f"--url=sqlite:///{tmp_path}/store.db"
    assert run(world, url, "--id", "--odd id", "--max-steps=1").returncode in (0, 1)
    # What the list of explorations suggests is a command that works.
    words = shlex.split(explore_command("--odd id"))
    assert words[:2] == ["holdfast", "explore"]
    words[2] = world
    assert "4 states, 3 transitions" in run(*words[2:], url, "--resume").stdout
    assert run(*words[2:], url, "--clean").stdout == "Removed exploration --odd id.\n"


def test_the_answer_fits_a_terminal(shop: str, tmp_path: Path) -> None:
    with Path(f"{shop}.py").open("a") as module:
        module.write(
            "\n\n@action(parameters={'note': ['a note of some length', 'another one of length']})\n"
            "def write_down(world, note):\n    world.systems['shop'].data.setdefault('n', [])\n"
            "    notes = world.systems['shop'].data['n']\n"
            "    notes.append(note) if len(notes) < 4 else None\n\n\n"
            "@invariant(message='four notes are more than the counter of a small shop can hold')\n"
            "def notes_are_few(world):\n    notes = world.systems['shop'].data.get('n', ())\n"
            "    return len(notes) < 4\n"
        )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code, shown = forked.show(
        ["explore", f"{shop}:make_world"], directory=tmp_path, environment=environment
    )
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in shown.splitlines()]
    assert code == 1
    assert "  write_down(note='a note of some length') →" in shown
    assert max(map(len, lines)) <= 80, lines
    # A path is indented as a whole.
    assert any(line.startswith("  length')") or line.startswith("  write_down") for line in lines)
