"""What a person sees in a terminal of 80 columns, on both databases."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import holdfast
from holdfast.cli import app as app_module
from holdfast.cli.command import Group
from holdfast.cli.output import with_place, wrapped
from holdfast.formatting import ago, plural
from tests.faces import forked

STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = "ConnectionError: the other side did not answer within the time that it was given"

Look = Callable[..., list[str]]


@holdfast.tool(effect="mutate")
def charge(cents: int) -> None:
    raise ConnectionError("the other side did not answer within the time that it was given")


@pytest.fixture
def filled(place: dict[str, Any]) -> dict[str, Any]:
    """A store with a row in every listing, each too wide for 80 columns."""
    with holdfast.open(**place) as store:
        session = store.session(name="A trip to Oslo, and back by another way", agent="planner")
        session.save(transcript=["Hi"])
        session.record("tool_executed", {"tool": "bash", "output": "x" * 100})
        for _ in range(2):
            with pytest.raises(holdfast.Unresolved) as caught:
                session.call(charge, cents=500)
            store.resolve(str(caught.value.effect_id), holdfast.NotLanded(), by="ann")
        with pytest.raises(holdfast.Unresolved):
            session.call(charge, cents=500)
        store.work.submit("send-the-invoice", {"month": 11}, queue="letters-by-post")
        [item] = store.work.claim("worker-1 on the first machine", queues="letters-by-post")
        item.fail(LONG, retry=False)
    return place


@pytest.fixture
def look(filled: dict[str, str], tmp_path: Path) -> Look:
    """Runs a command in a terminal of 80 columns and returns the lines that it shows."""
    options = [f"--{name}={text}" for name, text in filled.items()]

    environment = {n: text for n, text in os.environ.items() if not n.startswith("HOLDFAST_")}

    def look(*arguments: str) -> list[str]:
        words = [*arguments, *options]
        _, text = forked.show(words, directory=tmp_path, environment=environment)
        return STYLES.sub("", text).splitlines()

    return look


def columns(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_a_listing_keeps_what_identifies_a_row(filled: dict[str, Any], look: Look) -> None:
    with holdfast.open(**filled) as store:
        (session,) = store.sessions()
    age = r"(\d+ (s|min) ago|now)"
    error = re.escape(LONG[:20]) + ".*…"
    expected: dict[tuple[str, ...], tuple[list[str], list[str]]] = {
        ("sessions", "list"): (
            ["number", "id", "name", "status", "updated"],
            [
                "1",
                re.escape(session.id[:13]),
                re.escape(str(session.name)[:20]) + ".*",
                "idle",
                age,
            ],
        ),
        ("checkpoints", "list", session.id): (
            ["version", "kind", "created", "data"],
            ["2", "tool_executed", age, r'\{"tool": "bash".*…'],
        ),
        ("effects", "list", "--status", "unknown"): (
            ["number", "tool", "status", "reason", "issued", "error"],
            [r"\d+", "charge", "unknown", "raised", age, error],
        ),
        ("work", "list"): (
            ["number", "type", "status", "updated", "error"],
            ["1", "send-the-invoice", "failed", age, error],
        ),
    }
    for command, (headings, patterns) in expected.items():
        lines = look(*command)
        assert max(map(len, lines)) <= 80 or command[0] == "effects", lines
        place = next(n for n, line in enumerate(lines) if columns(line) == headings)
        found = columns(lines[place + 1])
        assert len(found) == len(patterns), found
        for cell, pattern in zip(found, patterns, strict=True):
            assert re.fullmatch(pattern, cell), (command, cell)


def test_what_waits_for_a_person_names_its_session(filled: dict[str, Any], look: Look) -> None:
    with holdfast.open(**filled) as store:
        ticket = store.session("ticket-42", agent="desk")
        ticket.wait_for_approval({"tool": "refund", "arguments": {"reason": "x" * 200}})
    heading, row = look("approvals", "list")[:2]
    assert columns(heading) == ["number", "session", "asked", "question"]
    assert (columns(row)[1], len(row) <= 80) == ("ticket-42", True)


def test_what_is_shown_is_not_cut(filled: dict[str, Any], look: Look) -> None:
    with holdfast.open(**filled) as store:
        (session,) = store.sessions()
    shown = "".join(look("checkpoints", "show", session.id, "2")).replace(" ", "")
    assert f'"output":"{"x" * 100}"' in shown


def test_long_names_leave_room_for_errors_and_numbers(filled: dict[str, Any], look: Look) -> None:
    name = "charge_the_credit_card_of_the_customer_once_more"
    fail = holdfast.tool(effect="mutate", name=name)(charge.function)
    with holdfast.open(**filled) as store:
        with pytest.raises(holdfast.Unresolved):
            store.session("s").call(fail, cents=500)
        store.work.submit(name, delay_seconds=600)
        store.work.submit(name, queue="q", max_retries=0)
        [item] = store.work.claim("worker", queues="q")
        item.fail(LONG)
    for command, rows in ((("work", "list"), 2), (("effects", "list", "--status", "unknown"), 1)):
        lines = look(*command)
        place = next(n for n, line in enumerate(lines) if "error" in columns(line))
        assert columns(lines[place])[0] == "number"
        found = [columns(line) for line in lines[place + 1 :] if name[:15] in line]
        assert len(found) == rows
        for number, shown, status, *_, error in found:
            assert number.isdecimal()
            assert shown.endswith("…")
            assert status in {"pending (time)", "failed", "unknown"}
            assert error.startswith(LONG[:15]) or status == "pending (time)"
        assert max(map(len, lines[place:])) <= 80


def test_short_ids_are_told_apart_and_taken(filled: dict[str, Any], look: Look) -> None:
    with holdfast.open(**filled) as store:
        (first,) = store.sessions()
        alike = f"{first.id[:-1]}{'0' if first.id[-1] != '0' else '1'}"
        store.session(alike, name="Another trip")
    lines = look("sessions", "list")
    shown = [columns(line)[1] for line in lines[1:3]]
    assert shown == [first.id, alike]
    with holdfast.open(**filled) as store:
        store.find_session(alike).delete(force=True)
        other = store.session("f" + alike[1:], name="Another trip").id
    shown = [columns(line)[1] for line in look("sessions", "list")[1:3]]
    assert shown == [first.id[:13], other[:13]]
    with holdfast.open(**filled) as store:
        assert [store.find_session(id).id for id in shown] == [first.id, other]


def test_an_empty_listing_says_so(place: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    options = [f"--{name}={text}" for name, text in place.items()]
    with holdfast.open(**place):
        pass
    for command, said in {
        "sessions list": "No sessions.",
        "work list": "No work items.",
        "effects list": "No effects.",
        "spend list": "No model calls.",
        "spend sums": "Nothing was spent.",
    }.items():
        assert app_module.run([*command.split(), *options]) == 0
        assert capfd.readouterr().out == f"{said}\n"
        assert app_module.run([*command.split(), "--json", *options]) == 0
        assert [] in json.loads(capfd.readouterr().out).values()
    with holdfast.open(**place) as store:
        store.session("new-session")
    assert app_module.run(["checkpoints", "list", "new-session", *options]) == 0
    assert capfd.readouterr().out == "No checkpoints.\n"


@pytest.mark.parametrize(
    "command",
    [
        "sessions end SESSION",
        "checkpoints rewind SESSION 1 --yes",
        "work submit t --session=SESSION",
    ],
)
def test_what_refuses_an_ended_session_names_an_option_or_a_command(
    place: dict[str, Any], capfd: pytest.CaptureFixture[str], command: str
) -> None:
    options = [f"--{name}={text}" for name, text in place.items()]
    with holdfast.open(**place) as store:
        session = store.session("old-session")
        session.save(a=1)
        session.end()
    assert app_module.run([*command.replace("SESSION", session.id).split(), *options]) == 4
    said = capfd.readouterr().err
    assert "reopen=True" not in said
    assert "--reopen" in said or "`holdfast sessions reopen old-session --url" in said


def test_attempts_are_listed_with_their_errors(filled: dict[str, Any], look: Look) -> None:
    with holdfast.open(**filled) as store:
        number = store.effects(status="unknown")[0].number
    lines = look("effects", "show", str(number))
    start = lines.index("Attempts:") + 1
    assert columns(lines[start]) == ["number", "attempt", "status", "reason", "issued", "error"]
    rows = [columns(line) for line in lines[start + 1 : start + 4]]
    assert [row[1:3] for row in rows] == [["1", "failed"], ["2", "failed"], ["3", "unknown"]]
    assert rows[2][5].startswith(LONG[:15])


def suggestions(lines: list[str]) -> list[str]:
    """The commands that an output suggests, each as it can be copied from one line."""
    return [
        found for line in lines for found in re.findall(r"(?:`|^  )(holdfast [a-z][^`]*)", line)
    ]


def test_suggested_commands_are_whole_and_name_the_store(
    filled: dict[str, str], look: Look
) -> None:
    with holdfast.open(**filled) as store:  # type: ignore[arg-type]
        number = store.effects(status="unknown")[0].number
    place = " ".join(f"--{name} {shlex.quote(text)}" for name, text in filled.items())
    for command, suggested in (
        (["doctor"], ["holdfast effects list"]),
        (["effects", "list"], ["holdfast effects show NUMBER"]),
        (
            ["effects", "show", str(number)],
            [
                f"holdfast effects resolve {number} --landed --result JSON --by NAME",
                f"holdfast effects resolve {number} --not-landed --by NAME",
                f"holdfast effects verify {number} --tools MODULE:TOOL",
            ],
        ),
        (["spend", "correct", "9", "--usd", "1"], ["holdfast spend list"]),
        (["work", "why", "1"], ["holdfast work redrive 1"]),
    ):
        assert suggestions(look(*command)) == [f"{each} {place}" for each in suggested]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> Any:
    """Runs a command in this process and returns what it says on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_URL", raising=False)

    def run(*arguments: str) -> str:
        capfd.readouterr()
        assert app_module.run(arguments) != 0
        return str(capfd.readouterr().err)

    return run


def test_a_missing_store_is_made_by_the_command_that_is_suggested(run: Any) -> None:
    url = "sqlite:///not here.db"
    suggested = f"or create one here with `holdfast migrate --url {shlex.quote(url)}`\n"
    for command in (["doctor"], ["sessions", "list"], ["migrate", "--status"]):
        assert run(*command, "--url", url).endswith(f", {suggested}")
        assert "`holdfast migrate`" in run(*command)
    for server in ("u:s3cret@127.0.0.1:1/d", "u:s3cret", "u:s/3cret@h", "u:s[3cret@h", "h?token=s"):
        assert with_place("run `holdfast migrate`", f"postgresql://{server}", "a b") == (
            "run `holdfast migrate --url URL --namespace 'a b'`"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("effects list --limit 0", "--limit must be 1 to 1000"),
        ("sessions list --limit 0", "--limit must be 1 to"),
        ("sessions list --after -1", "--after must be a whole number from 0 up"),
        ("checkpoints list s --limit 0", "--limit must be 1 to"),
        ("prune --keep 0", "--keep must be"),
        ("prune --keep some", "Invalid value for '--keep': 'some' is not a whole number;"),
        ("prune --work-days x", "Invalid value for '--work-days': 'x' is not a number;"),
        ("prune --work-days -1 --yes", "--work-days must be"),
        ("effects resolve 1 --landed --by ''", "--by must be text of 1 to 256"),
        ("sessions list --namespace A", "--namespace 'A' must be"),
        ("work list --limit 0", "--limit must be"),
        ("work submit t --priority 99999999999", "--priority must be"),
        ("work submit t --max-retries -1", "--max-retries must be"),
        ("work submit t --delay -1", "--delay must be"),
        ("sessions delete s --yes", "or delete with --force"),
    ],
)
def test_errors_name_options(arguments: str, message: str, run: Any) -> None:
    with holdfast.open("sqlite:///holdfast.db") as store:
        session = store.session("s")
        session.save(a=1)
        with pytest.raises(holdfast.Unresolved):
            session.call(charge, cents=1)
        with session.drive("me"):
            said = run(*shlex.split(arguments))
    assert message in said, said


def test_an_option_that_would_help_is_named_once(tmp_path: Path, run: Any) -> None:
    with holdfast.open("sqlite:///holdfast.db") as store:
        store.work.submit("mail", session=store.session("s"), key="once")
        store.export(tmp_path / "out.jsonl")
    said = run("import", "out.jsonl", "--url", "sqlite:///other.db")
    assert said.endswith(" import it with --store-keys\n"), said


# They go on until somebody ends them, or do much more than to answer.
LASTING = {
    "agent request", "agent run", "bench", "demo", "explore", "feed follow", "mcp", "serve",
    "state watch", "work run",
}  # fmt: skip
ARGUMENTS = {"SESSION": "some-session", "KEY": "key", "VERSION": "1", "TYPE": "mail"}


def wrong_uses(command: Any, *path: str) -> Iterator[list[str]]:
    """Every command with one of its options or arguments wrong, the others right."""
    if isinstance(command, Group):
        context: Any = None
        for name in command.list_commands(context):
            yield from wrong_uses(command.get_command(context, name), *path, name)
        return
    if " ".join(path) in LASTING:
        return
    yes = ["--yes"] if any("--yes" in each.opts for each in command.params) else []
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    right = [ARGUMENTS.get((each.metavar or "").strip("[]."), "1") for each in arguments]
    for each in command.params:
        if each in arguments:
            place = arguments.index(each)
            yield [*path, *yes, "--", *right[:place], "", *right[place + 1 :]]
        elif not each.is_flag and each.name != "url":
            yield [*path, *yes, f"{max(each.opts, key=len)}=-1", "--", *right]


def test_no_error_names_an_argument_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with holdfast.open("sqlite:///holdfast.db") as store:
        session = store.session("some-session", agent="planner")
        session.save(a=1)
        session.state.set("key", 1)
        store.work.submit("mail")
        session.ask("researcher")
    uses = list(wrong_uses(get_command(app_module.app)))
    assert len(uses) > 150
    refused = 0
    for words in uses:
        code, said = app_module.run(words), capfd.readouterr().err
        refused += code != 0
        told = re.sub(r"'[^']*'|`[^`]*`|must be one of .*", "", said.replace(str(tmp_path), ""))
        assert not re.search(r"[a-z]_[a-z]|[a-z]=[A-Z1]|is a bug", told), (words, said)
    assert refused > 100


def test_the_shell_completes_ids_and_statuses(
    filled: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(line: str) -> set[str]:
        words = f"holdfast {line}"
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        environment = {**os.environ, **variables, "_HOLDFAST_COMPLETE": "complete_bash"}
        return set(forked.run([], directory=tmp_path, environment=environment).stdout.split())

    place = " ".join(f"--{name} {text}" for name, text in filled.items())
    with holdfast.open(**filled) as store:
        session = store.sessions()[0].id
        effects = store.effects()
        item = store.work.list()[0]
    assert complete(f"sessions show {place} ") == {session}
    assert complete(f"sessions show {place} {session[:9]}") == {session}
    assert complete(f"checkpoints rewind {place} nothing") == set()
    assert complete(f"effects list {place} --session ") == {session}
    assert complete(f"effects show {place} ") == {str(effect.number) for effect in effects}
    assert complete(f"effects show {place} {effects[0].id}") == {effects[0].id}
    assert complete(f"work show {place} ") == {str(item.number)}
    assert complete("effects list --status un") == {"unknown"}
    assert complete("sessions list --status w") == {"waiting"}
    assert complete("work list --status in") == {"in_progress"}
    assert complete("checkpoints list s --kind iteration_") == {"iteration_start", "iteration_end"}
    before = sorted(path.name for path in tmp_path.iterdir())
    assert complete("sessions show --url sqlite:///nowhere.db ") == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_times_are_told_as_people_tell_them() -> None:
    now = 1_700_000_000_000
    told = {-0.9: "now", 0.5: "now", 12: "12 s ago", 90: "1 min ago", 7_300: "2 h ago"}
    told |= {86_400 * 3: "3 d ago", -30: "in 30 s"}
    assert {seconds: ago(now - int(seconds * 1000), now) for seconds in told} == told


def test_counts_have_the_right_plural() -> None:
    assert [plural(n, "session") for n in (0, 1, 2_000)] == [
        "0 sessions",
        "1 session",
        "2,000 sessions",
    ]


def test_text_is_wrapped_at_words_and_commands_stay_whole() -> None:
    text = "one two three `holdfast sessions list --url x`; four\n  holdfast effects show 1 --url y"
    assert wrapped(text, 20).split("\n") == [
        "one two three",
        "`holdfast sessions list --url x`;",
        "four",
        "  holdfast effects show 1 --url y",
    ]
    assert wrapped("one two three", 11, 4) == "one two\n    three"


def test_what_runs_now_keeps_its_holder_and_its_heartbeat(
    filled: dict[str, Any], look: Look
) -> None:
    with holdfast.open(**filled) as store:
        store.work.submit("send-the-invoice", queue="letters-by-post")
        [item] = store.work.claim("worker-1 on the first machine", queues="letters-by-post")
    lines = look("work", "top", "--once")
    assert max(map(len, lines)) <= 80
    names, running = lines[-2:]
    assert columns(names) == ["id", "type", "holder", "heartbeat"]
    id, kind, holder, heartbeat = columns(running)
    assert item.id.startswith(id)
    assert (kind, holder) == ("send-the-invoice", "worker-1 on the first machine")
    assert re.fullmatch(r"\d+ (s|min) ago|now", heartbeat)


def test_a_long_key_leaves_room_for_the_values_that_a_diff_compares(
    filled: dict[str, Any], look: Look
) -> None:
    with holdfast.open(**filled) as store:
        session = store.session("report")
        session.state.set("k" * 200, "before " * 40)
        session.state.set("k" * 200, "after " * 40)
        session.state.set("short", 1)
    old, new, short = look("state", "diff", "report", "1", "3")
    assert {len(old), len(new)} == {80}
    assert (old[:46], old[-1]) == (f'- {"k" * 39}…: "b', "…")
    assert (new[:46], new[-1]) == (f'+ {"k" * 39}…: "a', "…")
    assert short == "+ short: 1"
