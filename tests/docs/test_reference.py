"""The reference names everything that is public; what lags behind fails here."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.app import run
from holdfast.records import EVENT_KINDS, KINDS, STATUSES
from tests.faces.commands import commands

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
SOURCES = "\n".join(path.read_text() for path in (ROOT / "src" / "holdfast").rglob("*.py"))


def methods(owner: type) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


def is_named(word: str) -> bool:
    return re.search(rf"`[^`\n]*\b{re.escape(word)}\b[^`\n]*`", REFERENCE) is not None


@pytest.mark.parametrize("name", sorted(set(holdfast.__all__)))
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert is_named(name)


OWNERS = [holdfast.Store, holdfast.Session, holdfast.Work, holdfast.WorkItem]


@pytest.mark.parametrize("owner", OWNERS, ids=lambda o: o.__name__)
def test_every_method_is_in_the_reference(owner: type) -> None:
    internal = {"runtime", "ledger"}
    missing = [name for name in methods(owner) if name not in internal and not is_named(name)]
    assert missing == []


def test_what_the_reference_names_is_there(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        session = store.session("s")
        store.work.submit("task", session=session)
        [item] = store.work.claim("worker")
        running = holdfast.RunningItem
        handles: dict[str, list[object]] = {
            "store": [store], "session": [session], "state": [session.state],
            "work": [store.work], "item": [item, running],
        }  # fmt: skip
        for handle, owners in handles.items():
            named = set(re.findall(rf"`{handle}\.([a-z_]+)", REFERENCE))
            there = {name for name in named if any(hasattr(owner, name) for owner in owners)}
            assert named == there != set(), handle


def test_both_colours_have_the_same_methods() -> None:
    assert set(methods(holdfast.Store)) == set(methods(holdfast.AsyncStore))


def test_every_argument_of_open_is_in_the_reference() -> None:
    arguments = list(inspect.signature(holdfast.open).parameters)
    assert [name for name in arguments if not is_named(name)] == []
    assert arguments == list(inspect.signature(holdfast.aopen).parameters)


def test_every_kind_status_and_event_is_in_the_reference() -> None:
    events = set(re.findall(r'(?:emit|event)\(\s*(?:[^"\'()]|\([^()]*\))*"([a-z_]+)"', SOURCES))
    assert "checkpoint_saved" in events
    ours = {event for event in events if not event.startswith(("counter_", "item_"))}
    columns = {"id", "root_id", "session_id", "state"}
    assert sorted(ours - set(EVENT_KINDS) - columns) == []
    wanted = [*KINDS, *STATUSES, *EVENT_KINDS]
    assert [word for word in wanted if not is_named(word)] == []
    told = re.search(r"\| event \| data \|\n\|---\|---\|\n((?:\|.*\n)+)", REFERENCE)
    assert told is not None
    kinds = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in told[1].splitlines()))
    assert sorted(kinds) == sorted(EVENT_KINDS)


def test_every_command_is_in_the_reference() -> None:
    assert [name for name in commands() if f"holdfast {name}" not in REFERENCE] == []


def test_listings_print_the_members_that_the_reference_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = REFERENCE.partition("| listing | members |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `holdfast ([a-z ]+)` \| (.+) \|$", part, re.MULTILINE)
    told = {command: sorted(re.findall(r"\w+", members)) for command, members in rows}
    assert {name for name in commands() if name.endswith(" list")} <= set(told)
    url = f"sqlite:///{tmp_path}/store.db"
    with holdfast.open(url) as store:
        store.session("a-session").state.set("key", 1)
    more = {"checkpoints": ["a-session"], "state": ["a-session"], "state history": ["key"]}
    for command, members in told.items():
        words = [*command.split(), *more.get(command.split()[0], []), *more.get(command, [])]
        assert run([*words, "--json", "--url", url]) == 0
        assert sorted(json.loads(capsys.readouterr().out)) == members, command


def test_every_error_is_told_with_its_status_and_exit_code() -> None:
    part = REFERENCE.partition("## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\d+) \| (\d+) \|", part, re.MULTILINE)
    told = {
        name: (int(status), int(code))
        for names, status, code in rows
        for name in re.findall(r"\w+", names)
    }
    errors = [
        each
        for each in vars(holdfast).values()
        if isinstance(each, type) and issubclass(each, holdfast.HoldfastError)
    ]
    expected = {each.__name__: (each.http_status, each.exit_code) for each in errors}
    del expected["HoldfastError"]
    assert told == expected
