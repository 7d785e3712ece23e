"""The command line where its streams, its start or somebody's code fail: no traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.app import run

COMMAND = [sys.executable, "-m", "holdfast"]
SECONDS_MAX = 180
Result = subprocess.CompletedProcess[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.session("s").save(a=1)
    return tmp_path / "store.db"


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        (">/dev/full", 1, "cannot write the output: No space left on device"),
        (">&-", 1, "cannot write the output: Bad file descriptor"),
        (">/dev/null 2>&-", 0, ""),
        (">/dev/null 2>/dev/full", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_told_or_told_by_the_code(
    file: Path, closed: str, code: int, said: str, options: list[str]
) -> None:
    def ended(*arguments: str) -> Result:
        words = shlex.join([*COMMAND, *arguments, *options])
        return subprocess.run(
            ["/bin/sh", "-c", f"{words} {closed}"],
            cwd=file.parent,
            env={**os.environ, "HOLDFAST_DEBUG": "0"},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    before = file.read_bytes()
    result = ended("sessions", "list", "--url", f"sqlite:///{file.name}")
    assert result.returncode == code
    assert said in result.stderr
    assert not {"Traceback", "defect"} & set(re.findall(r"\w+", result.stderr))
    assert bool(result.stderr) == bool(said)
    # What is wrong is told by the code, whoever listens.
    assert ended("sessions", "show", "nobody", "--url", f"sqlite:///{file.name}").returncode == 3
    # No stream's number went to the database.
    assert file.read_bytes() == before


@pytest.mark.parametrize("module", ["holdfast.codec", "holdfast.store", "typer"])
@pytest.mark.parametrize("started", ["-c from holdfast_command import main; main()", "-m holdfast"])
def test_ctrl_c_while_the_command_is_imported_says_nothing(
    tmp_path: Path, module: str, started: str
) -> None:
    program = f"""
import os, signal, sys
class Interrupting:
    def find_spec(name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting)
"""
    # Python imports it before anything else.
    (tmp_path / "sitecustomize.py").write_text(program)
    result = subprocess.run(
        [sys.executable, *started.split(" ", 1), "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("json:dumps", "was called to get the handlers, and failed: TypeError: dumps() missing"),
        ("json:nothing", "cannot be loaded: AttributeError: module 'json' has no attribute"),
        ("broken:handlers", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("json:__name__", "must be a dict of type to function, not str"),
    ],
)
def test_handlers_that_fail_are_told_as_what_they_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("broken.py").write_text("1 / 0\n")
    assert run(["work", "run", name]) == 2
    said = capfd.readouterr().err
    assert f"'{name}' {problem}" in said
    assert "defect" not in said


def test_tools_that_cannot_be_imported_are_told_as_what_they_are(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("broken.py").write_text("1 / 0\n")
    options = ["--tools", "broken", "--url", "sqlite:///store.db"]
    assert run(["effects", "verify", "1", *options]) == 2
    assert "--tools broken: ZeroDivisionError: division by zero" in capfd.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_that_is_not_utf_8_shows_escapes(tmp_path: Path, encoding: str) -> None:
    id = "caf\u00e9 \u2713 \U0001f600"
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.session(id).save(a=id)

    def ended(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*COMMAND, *arguments, f"--url=sqlite:///{tmp_path}/store.db"],
            env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
            capture_output=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    listed = ended("sessions", "list")
    assert (listed.returncode, listed.stderr) == (0, b"")
    assert r"\u2713 \ud83d\ude00" in listed.stdout.decode(encoding)
    data = json.loads(ended("sessions", "list", "--json").stdout.decode(encoding))
    assert [each["id"] for each in data["sessions"]] == [id]
    events = ended("feed", "export", "-", id).stdout.decode(encoding).splitlines()
    assert {json.loads(line)["session_id"] for line in events} == {id}
    missing = ended("sessions", "show", "\u2713", "--json")
    assert missing.returncode == 3
    assert "\u2713" in json.loads(missing.stderr.decode(encoding))["message"]


@pytest.mark.parametrize(
    "arguments",
    [["export", "-"], ["import", "-"], ["backup", "-"], ["prune", "--archive", "-"],
     ["state", "export", "s", "-"]],
)  # fmt: skip
def test_a_dash_is_never_the_name_of_a_file(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with holdfast.open(url) as store:
        store.session("s").append("transcript", [1])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run([*arguments, "--url", url]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.split(":")[0]) == ("", "Error")
    assert "- is no file here: this command cannot use" in told.err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["state", "--help"]])
@pytest.mark.parametrize("columns", [40, 51, 52, 80])
def test_help_fits_the_terminal(
    arguments: list[str],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(arguments) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns
