"""Sessions, checkpoints, pruning and moving on the command line, on both databases."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.cli import app as app_module
from holdfast.kernel.operation import rows
from tests.maintenance.stores import contents, everything

COMMAND = [sys.executable, "-m", "holdfast"]
SECONDS_MAX = 180
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]


@pytest.fixture
def quick(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command in this process, on the place, with nobody at the keyboard."""

    def quick(*arguments: str | Path, at: Mapping[str, str] = place) -> Result:
        options = [f"--{name}={text}" for name, text in at.items()]
        monkeypatch.setattr("sys.stdin", io.StringIO())
        capfd.readouterr()
        code = app_module.run([*map(str, arguments), *options])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return quick


@pytest.fixture
def filled(place: dict[str, str]) -> dict[str, str]:
    """A place with a small tree, a fork and a long session."""
    with holdfast.open(**place) as store:  # type: ignore[arg-type]
        root = store.session("root-session", name="Root", agent="planner", metadata={"title": "T"})
        root.save(transcript=[{"role": "user", "content": "Hi"}], plan={"steps": [{"done": False}]})
        root.append("transcript", [{"role": "assistant", "content": "Hello \x1b[31m\x9b"}])
        root.save(plan={"steps": [{"done": True}]})
        root.record("iteration_end", {"iteration": 2})
        child = store.session("child-session", parent=root, agent="worker")
        child.save(a=1)
        store.session("grandchild", parent=child)
        long = store.session("long-session")
        for number in range(12):
            long.append("transcript", [number])
    return place


def data(result: Result) -> Any:
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def lines(result: Result) -> list[str]:
    assert (result.returncode, result.stderr) == (0, "")
    return [line.rstrip() for line in result.stdout.splitlines()]


def test_listing_pages_by_number(filled: Any, quick: Run) -> None:
    first = data(quick("sessions", "list", "--limit", "3", "--json"))
    ids = [each["id"] for each in first["sessions"]]
    assert ids == ["root-session", "child-session", "grandchild"]
    after = str(first["next_after"])
    rest = data(quick("sessions", "list", "--limit", "3", "--after", after, "--json"))
    assert [each["id"] for each in rest["sessions"]] == ["long-session"]
    assert rest["next_after"] is None
    root = first["sessions"][0]
    assert (root["name"], root["agent"], root["version"]) == ("Root", "planner", 4)
    assert all(ISO.fullmatch(root[name]) for name in ("created_at", "updated_at"))
    table = lines(quick("sessions", "list", "--limit", "2"))
    assert table[0].split() == [
        "number",
        "id",
        "name",
        "agent",
        "status",
        "version",
        "updated",
    ]
    assert table[1].split()[:6] == [str(root["number"]), "root-session", "Root", "planner",
                                    "idle", "4"]  # fmt: skip
    assert table[-1] == f"There may be more: --after {first['sessions'][1]['number']}"


def test_listing_tells_running_waiting_and_idle_apart(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place) as store:
        store.session("idle")
        driven = store.session("running").drive("me")
        lost = store.session("lost").lease("dead", 0.001)
        store.session("done").end()
        waiting = store.session("waiting")
        store.run(lambda tx: rows("UPDATE hf_sessions SET status = 'waiting' WHERE id = 'waiting'"))
        while store.find_session(lost.id).info().is_driven:
            pass
        assert waiting.info().activity == "waiting"
        found = data(quick("sessions", "list", "--json"))["sessions"]
        shown = {each["id"]: (each["status"], each["activity"]) for each in found}
        assert shown == {
            "idle": ("active", "idle"),
            "running": ("active", "running"),
            "lost": ("active", "idle"),
            "done": ("completed", "completed"),
            "waiting": ("waiting", "waiting"),
        }
        assert "running" in lines(quick("sessions", "list"))[2].split()[2:]
        driven.close()


def test_listing_filters(filled: Any, quick: Run) -> None:
    def ids(*options: str) -> list[str]:
        found = data(quick("sessions", "list", "--json", *options))["sessions"]
        return [each["id"] for each in found]

    assert ids("--agent", "worker") == ["child-session"]
    assert ids("--root", "child-session") == ["root-session", "child-session", "grandchild"]
    assert ids("--status", "failed") == []
    wrong = quick("sessions", "list", "--status", "odd")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Error: --status must be one of active, waiting")


def test_show_and_tree(filled: Any, quick: Run) -> None:
    shown = data(quick("sessions", "show", "root-session", "--json"))
    assert shown["metadata"] == {"title": "T"}
    assert shown["checkpoints"] == {"turn": 3, "iteration_end": 1}
    assert (shown["resume_iteration"], shown["resume_version"]) == (3, 4)
    assert shown["children"] == ["child-session"]
    text = lines(quick("sessions", "show", "root-session"))
    assert ["resume", "iteration", "3"] in [line.split() for line in text]
    assert [line.split()[0] for line in text[:4]] == ["number", "id", "name", "activity"]
    assert shown["parent_id"] is None
    assert not any(line.startswith("parent") for line in text), "what is absent is left out"
    below = data(quick("sessions", "tree", "root-session", "--json"))
    assert [each["id"] for each in below] == ["root-session", "child-session", "grandchild"]
    assert lines(quick("sessions", "tree", "root-session")) == [
        "root-session Root  planner: idle, version 4",
        "└── child-session  worker: idle, version 1",
        "    └── grandchild  idle, version 0",
    ]


def test_the_beginning_of_an_id_is_enough_if_it_is_the_only_one(filled: Any, quick: Run) -> None:
    assert data(quick("sessions", "show", "root-ses", "--json"))["id"] == "root-session"
    with holdfast.open(**filled) as store:
        store.session("root-sess%_x")
        store.session("ROOT-SESSION-2")
    twice = quick("sessions", "show", "root-ses")
    assert (twice.returncode, twice.stderr) == (
        2,
        "Error: more than one session's id begins with 'root-ses': root-sess%_x, root-session …; "
        "give more of it, or the number\n",
    )
    assert data(quick("sessions", "show", "root-sess%", "--json"))["id"] == "root-sess%_x"
    for missing in ("root", "root-sess_", "nobody-at-all", "ROOT-SESSION-3"):
        result = quick("sessions", "show", missing, "--json")
        assert result.returncode == 3
        assert json.loads(result.stderr) == {
            "error": "SessionNotFound",
            "message": f"there is no session {missing!r}",
            "id": missing,
        }


def test_looking_changes_nothing(filled: Any, quick: Run) -> None:
    with holdfast.open(**filled) as store:
        store.find_session("grandchild").end("failed")
        before = everything(store)
    for command in (
        "sessions list", "sessions show grandchild", "sessions tree root-session",
        "checkpoints list grandchild", "checkpoints show root-session",
        "checkpoints diff root-session 1 3",
    ):  # fmt: skip
        assert quick(*command.split()).returncode == 0
    with holdfast.open(**filled) as store:
        assert everything(store) == before


def test_a_store_that_is_missing_is_not_made(tmp_path: Path, quick: Run) -> None:
    file = tmp_path / "none.db"
    for command in ("sessions list", "checkpoints list abc", "prune --yes"):
        result = quick(*command.split(), at={"url": f"sqlite:///{file}"})
        assert (result.returncode, result.stdout) == (3, "")
        assert "holdfast migrate" in result.stderr
    assert not file.exists()


def test_sessions_end_cancel_and_delete(filled: Any, quick: Run) -> None:
    assert data(quick("sessions", "end", "long-session", "--status", "failed", "--json")) == {
        "session_id": "long-session",
        "status": "failed",
    }
    again = quick("sessions", "end", "long-session")
    assert again.returncode == 4
    suggested = "`holdfast sessions reopen long-session --url [^`]*` makes it active again"
    assert re.fullmatch(f"Error: session long-session is failed; {suggested}\n", again.stderr)
    assert lines(quick("sessions", "reopen", "long-session")) == ["Session long-session is active."]
    reopened = data(quick("sessions", "reopen", "long-session", "--json"))
    assert reopened == {"session_id": "long-session", "status": "active"}
    busy = quick("sessions", "delete", "root-session", "--yes")
    assert busy.returncode == 4
    assert "is active; end it first, or delete with --force" in busy.stderr
    cancelled = data(quick("sessions", "cancel", "child-session", "--yes", "--json"))
    assert cancelled == {"cancelled": ["child-session", "grandchild"]}
    assert lines(quick("sessions", "cancel", "child-session", "--yes")) == [
        "Nothing was cancelled: the sessions had ended."
    ]
    assert lines(quick("sessions", "delete", "root-session", "--yes")) == [
        "deleted root-session", "deleted child-session", "deleted grandchild",
    ]  # fmt: skip
    left = data(quick("sessions", "list", "--json"))["sessions"]
    assert [each["id"] for each in left] == ["long-session"]
    wrong = quick("sessions", "end", "long-session", "--status", "active")
    assert wrong.returncode == 2


def test_checkpoints_are_listed_shown_and_compared(filled: Any, quick: Run) -> None:
    page = data(quick("checkpoints", "list", "long-session", "--limit", "5", "--json"))
    assert [each["version"] for each in page["checkpoints"]] == [12, 11, 10, 9, 8]
    assert page["next_before"] == 8
    before = ("--before", "8", "--limit", "10", "--json")
    rest = data(quick("checkpoints", "list", "long-session", *before))
    assert [each["version"] for each in rest["checkpoints"]] == list(range(7, 0, -1))
    assert rest["next_before"] is None
    oldest = ("--oldest-first", "--limit", "5", "--json")
    page = data(quick("checkpoints", "list", "long-session", *oldest))
    assert [each["version"] for each in page["checkpoints"]] == [1, 2, 3, 4, 5]
    assert page["next_after"] == 5
    page = data(quick("checkpoints", "list", "long-session", "--after", "5", *oldest))
    assert [each["version"] for each in page["checkpoints"]] == [6, 7, 8, 9, 10]
    kinds = data(quick("checkpoints", "list", "root-session", "--kind=iteration_end", "--json"))
    assert [each["data"] for each in kinds["checkpoints"]] == [{"iteration": 2}]
    shown = data(quick("checkpoints", "show", "root-session", "2", "--json"))
    assert shown["channels"]["transcript"][1]["content"] == "Hello \x1b[31m\x9b"
    assert ISO.fullmatch(shown["created_at"])
    last = data(quick("checkpoints", "show", "long-session", "--last", "2", "--json"))
    assert (last["version"], last["channels"]) == (12, {"transcript": [10, 11]})
    assert last["left_out"] == {"transcript": 10}
    compared = data(quick("checkpoints", "diff", "root-session", "1", "3", "--json"))
    assert (compared["before"], compared["after"]) == (1, 3)
    assert [each["channel"] for each in compared["channels"]] == ["plan", "transcript"]
    assert lines(quick("checkpoints", "diff", "root-session", "1", "3")) == [
        "plan (changed)",
        "~ plan.steps[0].done: false → true",
        "transcript (changed): 1 stay, 0 removed, 1 added",
        "+ [1] assistant: Hello \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}",
    ]
    assert lines(quick("checkpoints", "diff", "root-session", "3", "4")) == [
        "Versions 3 and 4 have the same channels."
    ]


def test_what_is_stored_cannot_command_the_terminal(filled: Any, quick: Run) -> None:
    with holdfast.open(**filled) as store:
        hostile = "\x1b]0;owned\x07\x9b2J[red]\u202e"
        store.session("hostile-one").record("turn", {"say": hostile})
        store.session("hostile-one").save({"[bold]name": hostile, "list": [hostile]})
        store.session("hostile-two", name="[red]name[/]", metadata={hostile: hostile})
    for command in (
        "sessions list", "sessions show hostile-two", "sessions tree hostile-two",
        "checkpoints list hostile-one", "checkpoints show hostile-one",
        "checkpoints diff hostile-one 1 2",
    ):  # fmt: skip
        result = quick(*command.split())
        assert result.returncode == 0
        assert not set(result.stdout) & set("\x1b\x07\x9b\u202e"), command
    assert "[red]name[/]" in quick("sessions", "list").stdout
    assert "[bold]name" in quick("checkpoints", "show", "hostile-one").stdout


def test_versions_are_forked_rewound_and_pinned(filled: Any, quick: Run) -> None:
    forked = data(quick("checkpoints", "fork", "long-session", "5", "--id", "my-fork", "--json"))
    assert forked == {"session_id": "my-fork", "origin": "long-session", "version": 5}
    named = lines(quick("checkpoints", "fork", "long-session", "6", "--name", "Other"))
    assert named[0].endswith("continues from version 6 of long-session.")
    rewound = data(quick("checkpoints", "rewind", "long-session", "4", "--yes", "--json"))
    assert (rewound["version"], rewound["epoch"], rewound["kind"]) == (13, 2, "state_transition")
    assert lines(quick("checkpoints", "rewind", "long-session", "3", "--yes")) == [
        "Session long-session continues from version 3, in epoch 3; its newest version is 14."
    ]
    assert data(quick("checkpoints", "pin", "long-session", "2", "--reason", "why", "--json")) == {
        "session_id": "long-session",
        "version": 2,
        "reason": "why",
    }
    pruned = data(quick("prune", "--keep", "1", "--yes", "--json"))
    assert (pruned["sessions"], pruned["checkpoints"]) == (2, 13)
    with holdfast.open(**filled) as store:
        left = store.find_session("long-session").history()
        assert [found.version for found in left] == [14, 6, 5, 2]
    assert lines(quick("checkpoints", "unpin", "long-session", "2")) == [
        "Version 2 of session long-session is not pinned."
    ]
    gone = quick("checkpoints", "show", "long-session", "3")
    assert (gone.returncode, gone.stderr) == (
        3, "Error: session long-session has no version 3: never written, or pruned\n",
    )  # fmt: skip
    empty = quick("checkpoints", "show", "grandchild")
    assert (empty.returncode, empty.stderr) == (
        3, "Error: session grandchild has no checkpoint yet\n",
    )  # fmt: skip


def test_prune_archives_vacuums_and_tells(filled: Any, quick: Run, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    told = lines(quick("prune", "--keep", "10", "--archive", file, "--vacuum", "--yes"))
    assert told == [
        "Removed 2 checkpoints of 1 session.", f"Archived 2 in {file}.",
        "Returned the free space.",
    ]  # fmt: skip
    assert len(file.read_text().splitlines()) == 3
    assert data(quick("prune", "--keep", "10", "--archive", file, "--yes", "--json")) == {
        "sessions": 0, "checkpoints": 0, "archived": 0, "lines": 0, "writers": 0, "items": 0,
        "events": 0, "state_changes": 0,
        "effects": 0, "is_vacuumed": False, "damaged": [],
    }  # fmt: skip
    wrong = quick("prune", "--keep", "0", "--yes")
    assert (wrong.returncode, wrong.stderr) == (
        2, "Error: --keep must be 1 to 4294967295, not 0\n",
    )  # fmt: skip


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_prune_says_what_is_damaged(filled: Any, quick: Run) -> None:
    connection = apsw.Connection(filled["url"].removeprefix("sqlite:///"))
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
    connection.execute(
        "UPDATE hf_checkpoints SET manifest = zeroblob(30) WHERE key % 268435456 = 11"
    )
    connection.close()
    result = quick("prune", "--keep=2", "--yes")
    assert (result.returncode, result.stderr) == (7, "")
    assert result.stdout == (
        "Session long-session was skipped: one of its records is damaged.\n"
        "Removed 2 checkpoints of 1 session.\n"
    )


def test_an_ended_session_is_rewound_only_with_reopen(filled: Any, quick: Run) -> None:
    with holdfast.open(**filled) as store:
        store.find_session("long-session").end("completed")
    rewind = ("checkpoints", "rewind", "long-session")
    refused = quick(*rewind, "3", "--yes")
    assert refused.returncode == 4
    assert "long-session is completed; open it with --reopen" in refused.stderr
    assert quick(*rewind, "999", "--yes", "--reopen").returncode == 3
    with holdfast.open(**filled) as store:
        assert store.find_session("long-session").info().status == "completed"
    assert quick(*rewind, "3", "--yes", "--reopen").returncode == 0
    with holdfast.open(**filled) as store:
        assert store.find_session("long-session").info().status == "active"
        assert store.find_session("long-session").latest(last=1) is not None


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("export", "[OPTIONS] FILE [SESSION]..."),
        ("checkpoints show", "[OPTIONS] SESSION [VERSION]"),
        ("sessions list", "[OPTIONS]"),
    ],
)
def test_the_usage_line_shows_arguments_as_the_reference_does(
    command: str, usage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    app_module.run([*command.split(), "--help"])
    assert capfd.readouterr().out.splitlines()[0].endswith(f" {command} {usage}")


def test_what_destroys_asks_first(filled: Any, quick: Run) -> None:
    with holdfast.open(**filled) as store:
        before = everything(store)
    questions = {
        "sessions cancel root-session": "Cancel session root-session and everything below it?",
        "sessions delete root-session":
            "Delete session root-session and everything below it, with all checkpoints?",
        "checkpoints rewind long-session 2": "Rewind session long-session to version 2?",
        "prune --keep 1":
            "Remove all but 1 checkpoint of each session? They cannot be restored.",
    }  # fmt: skip
    for command, question in questions.items():
        result = quick(*command.split())
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == f"Error: {question} This is not a terminal; pass --yes\n"
    with holdfast.open(**filled) as store:
        assert everything(store) == before


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("\x04", 130)])
def test_a_person_is_asked_at_a_terminal(filled: Any, answer: str, code: int) -> None:
    command = [*COMMAND, "sessions", "delete", "long-session", f"--url={filled['url']}"]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(command[0], command)
    shown = ""
    deadline = time.monotonic() + SECONDS_MAX
    is_answered = False
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            shown += os.read(terminal, 4_096).decode()
        except OSError:
            break
        if "[y/N]" in shown and not is_answered:
            os.write(terminal, f"{answer}\n".encode() if answer != "\x04" else b"\x04")
            is_answered = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == code
    assert "Delete session long-session and everything below it" in shown
    assert ("Nothing was changed." in shown) == (code == 1)
    with holdfast.open(**filled) as store:
        assert ("long-session" in [info.id for info in store.sessions()]) == (code != 0)


def test_sessions_move_to_another_database(
    filled: Any, quick: Run, tmp_path: Path, postgres_dsn: str, namespace: str
) -> None:
    file = tmp_path / "all.export"
    if "namespace" in filled:
        other = {"url": f"sqlite:///{tmp_path}/other.db"}
    else:
        other = {"url": postgres_dsn, "namespace": f"{namespace}_other"}
    exported = data(quick("export", file, "--json"))
    assert (exported["sessions"], exported["checkpoints"]) == (4, 17)
    assert exported["path"] == str(file)
    assert data(quick("import", file, "--json", at=other)) == {
        "sessions": 4, "checkpoints": 17, "effects": 0, "items": 0, "spends": 0, "entries": 0,
        "notes": [],
    }  # fmt: skip
    with holdfast.open(**filled) as store, holdfast.open(**other) as second:  # type: ignore[arg-type]
        assert contents(second) == contents(store)
    again = quick("import", file, at=other)
    assert (again.returncode, again.stderr) == (
        2, "Error: session 'root-session' exists already; nothing was imported\n",
    )  # fmt: skip
    part = tmp_path / "part.export"
    assert lines(quick("export", part, "long-ses"))[0].startswith(
        f"Exported 1 session with 12 checkpoints to {part} ("
    )
    part.write_bytes(part.read_bytes()[:-1])
    damaged = quick("import", part)
    assert damaged.returncode == 7
    assert damaged.stderr == (
        f"Error: {part} is damaged: it is truncated; export the sessions again\n"
    )


def test_an_export_says_what_stays_behind(
    filled: Any, quick: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(**filled) as store:
        store.work.submit_many([holdfast.Submission("t")] * 3)
        store.once("k", lambda: 1)
    told = "Not exported, as they belong to no session: 1 once key and 3 work items."
    assert lines(quick("export", tmp_path / "a"))[1:] == [told]
    counted = data(quick("export", tmp_path / "b", "--json"))["left_behind"]
    assert counted == {"work_items": 3, "once_keys": 1}
    assert len(lines(quick("export", tmp_path / "c", "root-session"))) == 1
    monkeypatch.setattr("holdfast.cli.transfer.LEFT_MAX", 3)
    assert lines(quick("export", tmp_path / "d"))[1].endswith(
        ": 1 once key and 3 work items or more."
    )


def test_a_legacy_database_is_adopted_into_a_new_store(
    place: Any, quick: Run, tmp_path: Path
) -> None:
    new: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/new.db"}
    if "namespace" in place:
        new = {**place, "namespace": f"{place['namespace']}_new"}
    file = tmp_path / "old.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("""
            CREATE TABLE sessions (session_id TEXT PRIMARY KEY, session_name TEXT NOT NULL,
                status TEXT NOT NULL, created_at TEXT NOT NULL, project_dir TEXT, agent_name TEXT,
                last_resumed_at TEXT, parent_session_name TEXT);
            INSERT INTO sessions VALUES
                ('s1', 'top', 'running', '2025-12-20T12:00:00Z', NULL, NULL, NULL, 'gone');
        """)
    note = "session 's1' becomes a root: its parent 'gone' is missing"
    assert lines(quick("import", "--legacy", file, at=new)) == [
        f"Note: {note}", "Imported 1 session with 0 checkpoints.",
    ]  # fmt: skip
    refused = quick("import", "--legacy", file, "--json", at=new)
    assert refused.returncode == 2
    assert json.loads(refused.stderr)["session_id"] == "s1"
    foreign = quick("import", file, at=new)
    assert f"{file} is an SQLite database, not a Holdfast export" in foreign.stderr
    assert "`holdfast import --legacy FILE" in foreign.stderr
    with holdfast.open(**new) as store:
        assert [info.id for info in store.sessions()] == ["s1"]


def test_a_file_that_cannot_be_imported_creates_no_store(quick: Run, tmp_path: Path) -> None:
    database, text = tmp_path / "old.db", tmp_path / "text"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE other (id TEXT)")
    text.write_text("no export\n")
    new = {"url": f"sqlite:///{tmp_path}/new.db"}
    for file, options, told in (
        (tmp_path / "none", [], "there is no file"),
        (text, [], "is not a Holdfast export"),
        (database, [], "is an SQLite database, not a Holdfast export"),
        (tmp_path / "none", ["--legacy"], "there is no file"),
        (text, ["--legacy"], "is not an SQLite database"),
        (database, ["--legacy"], "is not a database of a supported older format"),
    ):
        refused = quick("import", file, *options, at=new)
        assert (refused.returncode != 0, told in refused.stderr) == (True, True), refused.stderr
        assert not list(tmp_path.glob("new.db*"))


def test_it_works_as_a_process_of_its_own(filled: Any) -> None:
    options = [f"--{name}={text}" for name, text in filled.items()]
    done = subprocess.run(
        [*COMMAND, "sessions", "list", "--json", *options],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert len(data(done)["sessions"]) == 4
    # A reader that goes away early is no error worth a traceback.
    with subprocess.Popen(
        [*COMMAND, "checkpoints", "list", "long-session", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() in {0, 1, -signal.SIGPIPE}


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sessions", "xyz"], 2,
         "No such command 'xyz'; see `holdfast sessions --help`"),
        (["sessions", "lists"], 2,
         "No such command 'lists'. Did you mean 'list'? See `holdfast sessions --help`"),
        (["sessions", "show"], 2,
         "Missing argument 'SESSION'; see `holdfast sessions show --help`"),
        (["sessions", "list", "--limit", "x"], 2,
         "Invalid value for '--limit': "),
        (["sessions", "list", "--limit", "0"], 2, "--limit must be 1 to 1000, not 0"),
        (["checkpoints", "show", "root-session", "0"], 2,
         "VERSION must be 1 to 268435455, not 0"),
        (["checkpoints", "show", "root-session", "99"], 3,
         "session root-session has no version 99: never written, or pruned"),
        (["checkpoints", "list", "root-session", "--kind", "odd"], 2, "--kind must be one of "),
        (["checkpoints", "pin", "root-session", "1"], 2, "Missing option '--reason'; "),
        (["checkpoints", "pin", "root-session", "1", "--reason", " "], 2, "a pin needs a reason"),
        (["checkpoints", "fork", "root-session", "1", "--id", "long-session"], 2,
         "session 'long-session' exists already"),
        (["export", "/nowhere/x"], 2,
         "there is no directory /nowhere; create it first"),
        (["import", "/nowhere"], 2, "there is no file /nowhere"),
        (["import", "--legacy", "/nowhere"], 2, "there is no file /nowhere"),
        (["sessions", "show", "a\x1bb"], 2,
         "id must be text of 1 to 256 printable characters, not 'a\\x1bb'"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_sentence_and_an_exit_code(
    arguments: list[str], code: int, message: str, filled: Any, quick: Run
) -> None:
    result = quick(*arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(f"Error: {message}")
    as_json = quick(*arguments, "--json")
    assert as_json.returncode == code
    assert json.loads(as_json.stderr)["message"].startswith(message)
