"""The demo as people meet it: real processes, killed around a charge that is made once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from rich.console import Console
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app as app_module
from holdfast.cli import demo as demo_module
from holdfast.cli.demo import timeline as timeline_module
from holdfast.cli.demo.running import LEDGER_AT, Kill, Trip
from holdfast.cli.demo.telling import POINTS

COMMAND = [sys.executable, "-m", "holdfast"]
SECONDS_MAX = 120
LOOKS = 10
WIDTH = 80


def environment(**changes: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, **changes}


def run(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=here,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_a_trip_is_charged_once_however_often_its_agent_is_killed(tmp_path: Path) -> None:
    here = tmp_path / "new" / "place"
    done = run(tmp_path, "demo", "--directory=new/place", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    (trip,), (plain,) = told["trips"], told["plain"]

    assert [kill["point"] for kill in trip["kills"]] == list(POINTS)
    assert len({kill["process_id"] for kill in trip["kills"]}) == len(POINTS)
    assert [kill["ledger"] for kill in trip["kills"]] == list(LEDGER_AT)
    assert [kill["charges"] for kill in trip["kills"]] == [0, 0, 1, 1, 1]
    assert (trip["restarts"], trip["charges"], trip["model_calls"]) == (5, 1, 4)

    assert [kill["point"] for kill in plain["kills"]] == list(POINTS)
    assert [kill["charges"] for kill in plain["kills"]] == [0, 0, 1, 2, 3]
    assert (plain["restarts"], plain["charges"], plain["model_calls"]) == (5, 4, 5 * 3 + 4)

    assert trip["answer"] == plain["answer"] == "Your trip to Oslo is booked."
    assert trip["tokens_not_spent_again"] == plain["tokens"] - trip["tokens"] > 0
    assert told["problems"] == []

    assert {path.name for path in here.iterdir()} <= {"demo.db", "demo.db-lock", "demo.db-turn"}
    with holdfast.open(f"sqlite:///{here}/demo.db") as store:
        session = store.find_session(trip["id"])
        assert session.spent().tokens == trip["tokens"]
        assert session.unresolved() == []
        charges = store.effects(session=trip["id"], tool="charge_card")
        assert [(each.status, each.attempt) for each in charges] == [
            ("failed", 1),
            ("completed", 2),
        ]
    assert len(told["try_next"]) >= 5
    for command in told["try_next"]:
        looked = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, check=False
        )
        assert (looked.returncode, looked.stderr) == (0, b""), command
        assert looked.stdout.strip(), command


def test_the_timeline_fits_a_log_and_a_second_demo_plans_the_next_trip(tmp_path: Path) -> None:
    directory = tmp_path / "what? 100%41"
    directory.mkdir()
    url = f"sqlite:///{quote(str(directory))}/demo.db"
    with holdfast.open(url) as store:
        store.session("trip-1").append("transcript", ["somebody else's"])
    done = run(tmp_path, "demo", "--directory", directory.name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    timeline, _, commands = done.stdout.partition("\nEverything is in ")
    assert max(map(len, timeline.splitlines())) <= WIDTH
    assert len(re.findall(r"\n +[\d.]+ +\d+  SIGKILL \(\d\) ", timeline)) == 2 * len(POINTS)
    assert "To Bergen with Holdfast" in timeline
    for line in (
        r"SIGKILL \(2\) after the intent +issued +0",
        r"asks the server: charged\? no",
        r"charges 149\.00",
        r"SIGKILL \(3\) after the charge +issued +1",
        r"asks the server: charged\? yes",
        r"charge_card: stored result, not run again",
        r"\nForked from before it paid: ",
        r'\n  \+ \[6\] tool: \{"charge": ',
    ):
        assert len(re.findall(line, timeline)) == 1, line
    assert re.search(r"\ncharges at the payment server +4 +1\n", timeline)
    assert str(directory / "demo.db") in commands
    assert "--session trip-2 " in commands
    with holdfast.open(url) as store:
        (fork,) = [each for each in store.sessions() if each.origin_version is not None]
        assert fork.id in timeline
        latest = store.find_session("trip-1").latest()
        assert latest is not None
        assert latest["transcript"] == ["somebody else's"]


def test_the_introduction_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(timeline_module, "console", lambda: narrow)
    timeline_module.Timeline().introduce()
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 60
    # Only the end of a paragraph is shorter than a line.
    assert all(len(line) > 45 for line in lines[:4])


def trip(**changes: object) -> Trip:
    kills = [
        Kill(point=point, process_id=number, ledger=ledger, charges=1)
        for number, (point, ledger) in enumerate(zip(POINTS, LEDGER_AT, strict=True))
    ]
    whole = Trip(
        id="trip-1", number=1, loop="durable", kills=kills, charges=1, answer="It is booked."
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (trip(charges=2), "trip-1 was charged 2 times"),
        (trip(charges=0), "trip-1 was charged 0 times"),
        (trip(answer=None), "trip-1 was never answered"),
        (trip(kills=trip().kills[:4]), "trip-1 was not killed at every point"),
        (trip(kills=[replace(kill, ledger="issued") for kill in trip().kills]),
         "trip-1 was killed at other points than it was meant to be"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_the_demo_tells_of_a_broken_promise(
    found: Trip, problem: str, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_module, "_play", lambda *_: ([(trip(charges=4), found)], []))
    result = CliRunner().invoke(app_module.app, ["demo", *(["--json"] if as_json else [])])
    assert result.exit_code == 1
    if as_json:
        assert problem in json.loads(result.output)["problems"]
    else:
        assert f"This is wrong: {problem}." in result.output


def test_a_trip_that_went_well_has_no_problems() -> None:
    assert trip().problems() == []


def test_the_demo_says_that_it_cannot_create_its_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in (("file", "File exists"), ("file/in", "Not a directory")):
        done = run(tmp_path, "demo", "--directory", place)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"Error: cannot create {place}: {why}\n"


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_demo_that_is_ended_leaves_no_process_and_a_sound_store(
    sent: signal.Signals, code: int, tmp_path: Path
) -> None:
    rest = tmp_path / "temporary"
    rest.mkdir()
    with subprocess.Popen(
        [*COMMAND, "demo"],
        cwd=tmp_path,
        env=environment(TMPDIR=str(rest), PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any("SIGKILL (3)" in line for line in process.stdout)
        os.killpg(process.pid, sent)
        _, complaint = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, complaint) == (code, "")
    # One look can miss a process that is just being started, or that was when the look began.
    deadline, looks = time.monotonic() + SECONDS_MAX, [["not looked yet"]]
    while any(looks[-LOOKS:]) and time.monotonic() < deadline:
        looks.append(running(rest))
        time.sleep(0.02)
    assert looks[-LOOKS:] == [[]] * LOOKS
    assert list(rest.iterdir()) == [] or sent == signal.SIGKILL
    assert run(tmp_path, "doctor", "--url", "sqlite:///demo.db").returncode == 0


def running(directory: Path) -> list[str]:
    """Return the processes that have a directory as their temporary one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={directory}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found
