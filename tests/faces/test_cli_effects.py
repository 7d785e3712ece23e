"""Effects on the command line, on both databases: what is in doubt, and settling it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli import app as app_module
from holdfast.clock import VirtualClock

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]

TOOLS = """
import pathlib
import holdfast

def answer(args, idempotency_key):
    said = pathlib.Path("answer.txt").read_text()
    if said == "landed":
        return holdfast.Landed({"key": idempotency_key, "cents": args["cents"]})
    return holdfast.NotLanded() if said == "not landed" else holdfast.Unknown()

@holdfast.tool(effect="mutate", verify=answer)
def charge(card: str, cents: int, *, idempotency_key: str) -> dict:
    raise ConnectionError("no answer")

@holdfast.tool(effect="mutate")
def mail(to: str) -> str:
    return to

def cancel(args, result, idempotency_key):
    with open("cancelled.txt", "a") as file:
        file.write(args["room"] + " ")

@holdfast.tool(effect="mutate", undo=cancel)
def book(room: str) -> str:
    return room

ALL = [charge, mail, book]
NONE = 7
"""


@pytest.fixture
def quick(
    place: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Run:
    """Runs a command in this process, on the place, in an empty folder of its own."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def quick(*arguments: str) -> Result:
        options = [f"--{name}={text}" for name, text in place.items()]
        monkeypatch.setattr("sys.stdin", io.StringIO())
        capfd.readouterr()
        code = app_module.run([*arguments, *options])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return quick


@holdfast.tool(effect="mutate")
def charge(card: str, cents: int, *, idempotency_key: str) -> dict[str, int]:
    raise ConnectionError("no answer from the bank")


@holdfast.tool(effect="mutate")
def mail(to: str) -> dict[str, str]:
    return {"sent": to}


@holdfast.tool(effect="write")
def note(text: str) -> None:
    raise AssertionError("begin does not run it")


@pytest.fixture
def effects(place: dict[str, Any]) -> dict[str, str]:
    """A completed effect, one that is in doubt, and one whose owner is long dead."""
    with holdfast.open(**place, clock=VirtualClock(1_700_000_000_000)) as store:
        session = store.session("trip")
        completed = session.call(mail, to="ann").effect_id
        with pytest.raises(holdfast.Unresolved) as caught:
            session.call(charge, card="4111 1111 1111 1111", cents=500, call_id="call_7")
        begun = session.begin(note, {"text": "hello"})
        assert isinstance(begun, holdfast.Issued)
    return {"mail": completed, "charge": str(caught.value.effect_id), "note": begun.effect_id}


def data(result: Result) -> Any:
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def shown(result: Result) -> str:
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def failed(result: Result, code: int) -> str:
    assert (result.returncode, result.stdout) == (code, "")
    return result.stderr


def test_a_rewind_says_what_it_undid_and_what_not(place: dict[str, Any], quick: Run) -> None:
    @holdfast.tool(effect="mutate", undo=lambda args, result, key: None)
    def book(room: str) -> str:
        return room

    with holdfast.open(**place) as store:
        session = store.session("trip")
        session.save(n=1)
        session.call(book, room="12")
        session.call(mail, to="ann")
        session.call(book, room="password=hunter2hunter2")
        session.begin(note, {"text": "hello"})
    asked = failed(quick("checkpoints", "rewind", "trip", "1"), 2)
    before, _, question = asked.partition("Error: ")
    assert before.splitlines()[0] == "Done since version 1, and cannot be undone:"
    assert "  2 mail: at 20" in before
    assert "book" not in before
    assert "Rewind session trip to version 1?" in question
    told = data(quick("checkpoints", "rewind", "trip", "1", "--yes", "--json"))
    assert [each["tool"] for each in told["irreversible"]] == ["mail"]
    assert [each["number"] for each in told["not_undone"]] == [3, 1]
    assert all("its tool was not given" in each["why"] for each in told["not_undone"])
    assert [each["tool"] for each in told["in_flight"]] == ["note"]
    Path("mytools.py").write_text(TOOLS)
    text = shown(quick("checkpoints", "rewind", "trip", "1", "--yes", "--tools", "mytools:ALL"))
    sys.modules.pop("mytools", None)
    assert Path("cancelled.txt").read_text() == "12 "
    lines = text.splitlines()
    undone = lines.index("Undone:")
    left = lines.index("Not undone; identical calls get their results:")
    assert lines[undone + 1 : left] == ["  1 book"]
    assert lines[left + 1] == "  2 mail: it cannot be undone"
    assert lines[left + 2].startswith("  3 book: its stored arguments are redacted")
    assert lines[left + 3] == "In doubt:"
    assert lines[left + 4].startswith("  4 note: it was running")


def test_what_is_in_doubt_is_listed_first(effects: dict[str, str], quick: Run) -> None:
    listed = data(quick("effects", "list", "--json"))
    assert [each["tool"] for each in listed["in_doubt"]] == ["charge", "note"]
    assert [each["tool"] for each in listed["effects"]] == ["mail", "charge", "note"]
    assert listed["effects"][0]["issued_at"] == "2023-11-14T22:13:20.000Z"
    text = shown(quick("effects", "list"))
    places = [text.index(effects[name]) for name in ("charge", "note", "mail")]
    assert places == sorted(places)
    assert text.count(effects["charge"]) == 1
    assert text.startswith("In doubt")


def test_a_list_can_be_narrowed_and_paged(effects: dict[str, str], quick: Run) -> None:
    def tools(*options: str) -> list[str]:
        listed = data(quick("effects", "list", "--json", *options))
        return [each["tool"] for each in listed["effects"]]

    assert tools("--tool", "mail") == ["mail"]
    assert tools("--status", "unknown") == ["charge"]
    assert tools("--session", "trip", "--limit", "2") == ["mail", "charge"]
    first = data(quick("effects", "list", "--json", "--limit", "1"))
    assert tools("--after", str(first["next_after"])) == ["charge", "note"]
    assert "--status must be one of" in failed(quick("effects", "list", "--status", "odd"), 2)
    assert "no session" in failed(quick("effects", "list", "--session", "nowhere"), 3)


def test_an_effect_in_doubt_is_shown_with_what_each_choice_means(
    effects: dict[str, str], quick: Run
) -> None:
    text = shown(quick("effects", "show", effects["charge"]))
    for part in (
        "charge (not safe to repeat, cannot be undone)",
        "2023-11-14T22:13:20.000Z",
        '"cents": 500',
        '"card": "[redacted:card]"',
        "unknown: it raised an error, and may have acted before it did",
        "ConnectionError: no answer from the bank",
        "call_7",
        "holdfast effects resolve 2 --landed",
        "holdfast effects resolve 2 --not-landed",
        "If it did happen after all, it happens twice",
    ):
        assert part in text
    assert "4111 1111" not in text


def test_an_effect_of_a_dead_owner_is_in_doubt(effects: dict[str, str], quick: Run) -> None:
    text = shown(quick("effects", "show", effects["note"]))
    assert "issued: the process that runs it has stopped renewing its lease" in text
    assert "Repeating it has the same result" in text
    assert data(quick("effects", "show", effects["note"], "--json"))["is_in_doubt"] is True


def test_a_completed_effect_is_shown_with_its_result_and_without_choices(
    effects: dict[str, str], quick: Run
) -> None:
    text = shown(quick("effects", "show", "1"))
    assert effects["mail"] in text
    assert '"sent": "ann"' in text
    assert "resolve" not in text


def test_attempts_and_late_reports_are_shown(
    effects: dict[str, str], quick: Run, place: Any
) -> None:
    shown(quick("effects", "resolve", effects["charge"], "--not-landed", "--by", "ann"))
    with holdfast.open(**place) as store:
        session = store.session("trip")
        with pytest.raises(holdfast.Unresolved) as caught:
            session.call(charge, card="4111 1111 1111 1111", cents=500, call_id="call_7")
    id = str(caught.value.effect_id)
    attempts = data(quick("effects", "show", id, "--json"))["attempts"]
    assert [each["status"] for each in attempts] == ["failed", "unknown"]
    assert [each["attempt"] for each in attempts] == [1, 2]
    assert len({each["idempotency_key"] for each in attempts}) == 1
    assert "Attempts:" in shown(quick("effects", "show", id))


def test_what_landed_is_never_run_again(effects: dict[str, str], quick: Run, place: Any) -> None:
    words = ["--landed", "--result", '{"charge": 9}', "--by", "ann", "--note", "seen at the bank"]
    settled = data(quick("effects", "resolve", effects["charge"], *words, "--json"))
    assert settled["status"] == "completed"
    assert settled["result"] == {"charge": 9}
    assert (settled["decided_by"], settled["note"]) == ("ann", "seen at the bank")
    with holdfast.open(**place) as store:
        again = store.session("trip").call(
            charge, card="4111 1111 1111 1111", cents=500, call_id="call_7"
        )
    assert (again.value, again.replayed) == ({"charge": 9}, True)
    text = shown(quick("effects", "show", effects["charge"]))
    assert "a person confirmed that it had happened" in text
    assert "seen at the bank" in text


def test_what_was_settled_stays_as_it_is(effects: dict[str, str], quick: Run) -> None:
    said = shown(quick("effects", "resolve", effects["charge"], "--not-landed", "--by", "ann"))
    assert said.startswith("charge did not happen")
    again = quick("effects", "resolve", effects["charge"], "--landed", "--by", "bob", "--json")
    assert json.loads(failed(again, 4))["error"] == "Refused"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "ann"], "--landed or --not-landed"),
        (["--landed"], "--by NAME is required"),
        (["--landed", "--not-landed", "--by", "ann"], "either --landed or --not-landed"),
        (["--not-landed", "--landed", "--by", "ann"], "either --landed or --not-landed"),
        (["--not-landed", "--by", "ann", "--result", "1"], "has no result"),
        (["--landed", "--by", "ann", "--result", "{"], "--result"),
        (["--landed", "--by", "", "--result", "1"], "by must be text of 1 to 256"),
    ],
)
def test_a_decision_without_its_parts_changes_nothing(
    effects: dict[str, str], quick: Run, words: list[str], message: str
) -> None:
    assert message in failed(quick("effects", "resolve", effects["charge"], *words), 2)
    assert data(quick("effects", "show", effects["charge"], "--json"))["status"] == "unknown"


@pytest.mark.parametrize("name", ["nothing-of-this-id", "99"])
def test_an_effect_that_is_not_there_is_an_error(
    effects: dict[str, str], quick: Run, name: str
) -> None:
    assert "there is no effect" in failed(quick("effects", "show", name), 3)


def test_async_hooks_of_tools_are_awaited(
    place: Any, quick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "hotel", raising=False)
    Path("hotel.py").write_text(
        "import pathlib, holdfast\n"
        "async def seen(arguments, idempotency_key):\n"
        "    return holdfast.Landed('seen')\n"
        "async def cancel(arguments, result, idempotency_key):\n"
        "    pathlib.Path('cancelled.txt').write_text(f'{arguments} {result}')\n"
        "@holdfast.tool(effect='mutate', verify=seen, undo=cancel)\n"
        "async def book(room): ...\n"
    )
    with holdfast.open(**place, clock=VirtualClock(1_700_000_000_000)) as store:
        session = store.session("trip")
        session.save(n=1)
        begun = session.begin("book", {"room": "12"})
        assert isinstance(begun, holdfast.Issued)
    settled = data(quick("effects", "verify", begun.effect_id, "--tools=hotel", "--json"))
    assert (settled["status"], settled["result"]) == ("completed", "seen")
    rewound = data(
        quick("checkpoints", "rewind", "trip", "1", "--yes", "--tools=hotel:book", "--json")
    )
    assert [each["id"] for each in rewound["undone"]] == [begun.effect_id]
    assert (rewound["not_undone"], rewound["irreversible"]) == ([], [])
    assert Path("cancelled.txt").read_text() == "{'room': '12'} seen"
    monkeypatch.delitem(sys.modules, "hotel")


@pytest.mark.parametrize("tools", ["bank:charge", "bank:ALL", "bank"])
def test_the_verify_hook_of_a_tool_is_asked(
    effects: dict[str, str], quick: Run, tools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "bank", raising=False)
    Path("bank.py").write_text(TOOLS)
    Path("answer.txt").write_text("nobody knows")
    unknown = quick("effects", "verify", effects["charge"], "--tools", tools)
    assert (unknown.returncode, unknown.stderr) == (4, "")
    assert "still in doubt" in unknown.stdout
    Path("answer.txt").write_text("landed")
    settled = data(quick("effects", "verify", effects["charge"], "--tools", tools, "--json"))
    assert (settled["status"], settled["reason"]) == ("completed", "verified")
    assert settled["decided_by"] is None
    assert settled["result"] == {"key": settled["idempotency_key"], "cents": 500}
    text = shown(quick("effects", "show", effects["charge"]))
    assert "completed: its verify hook found that it had happened" in text
    assert "person" not in text
    monkeypatch.delitem(sys.modules, "bank")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("no_such_module:charge", "No module named"),
        ("shop:missing", "missing"),
        ("shop:NONE", "no tool found"),
        ("shop:mail", "not among the given tools"),
        ("not a name", "--tools not a name"),
    ],
)
def test_tools_that_cannot_be_used_are_an_error(
    effects: dict[str, str],
    quick: Run,
    tools: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    Path("shop.py").write_text(TOOLS)
    assert message in failed(quick("effects", "verify", effects["charge"], "--tools", tools), 2)
    missing = failed(quick("effects", "verify", effects["charge"]), 2)
    assert missing.startswith("Error: --tools MODULE:TOOL is required")


def test_doctor_tells_of_effects_in_doubt_and_of_dead_owners(
    effects: dict[str, str], quick: Run
) -> None:
    found = [each for each in data(quick("doctor", "--json")) if each["check"] == "effects"]
    assert [each["level"] for each in found] == ["warning", "warning"]
    assert "1 effect in doubt" in found[0]["message"]
    assert "1 effect left by an owner whose lease ended" in found[1]["message"]
    assert "`holdfast effects verify 3 --tools MODULE:TOOL" in found[1]["advice"]
    for name in ("charge", "note"):
        shown(quick("effects", "resolve", effects[name], "--not-landed", "--by", "ann"))
    found = [each for each in data(quick("doctor", "--json")) if each["check"] == "effects"]
    assert [(each["level"], each["message"]) for each in found] == [
        ("ok", "None in doubt, 0 effects in flight.")
    ]
