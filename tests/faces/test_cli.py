"""The command line as people and scripts meet it: real processes on real databases."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import apsw
import psycopg
import pytest
from typer.testing import CliRunner

import holdfast
from holdfast import store as store_module
from holdfast.cli import app as app_module
from holdfast.kernel.health import SECONDS_PER_GB
from holdfast.kernel.postgres import health as server
from holdfast.kernel.schema import formats, newest
from holdfast.kernel.sqlite import health as sqlite
from holdfast.records import Finding
from holdfast.testing.nouns import Counter, Setup
from tests.faces import forked
from tests.faces.commands import commands
from tests.faces.writer import SESSION_ID
from tests.schemas import next_format

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "holdfast"]
COMMANDS = {
    "migrate", "doctor", "backup", "demo", "prune", "import", "sessions", "checkpoints",
    "effects", "spend", "work", "state", "feed", "peers", "agent", "approvals", "tokens", "audit",
    "serve", "mcp", "explore", "explorations", "export", "bench",
}  # fmt: skip
SECONDS_MAX = 180

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, **changes}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory on a disk, because `doctor` warns of a store in memory."""
    with TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An empty directory to run commands in."""
    directory = tmp_path / "here"
    directory.mkdir()
    return directory


@pytest.fixture
def run(here: Path) -> Run:
    """Runs the command line in a process of its own, forked from this one."""

    def run(*arguments: str | Path, **variables: str) -> Result:
        words = list(map(str, arguments))
        return forked.run(words, directory=here, environment=environment(variables))

    return run


@pytest.fixture
def quick(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process, where a process of its own would prove no more."""

    def quick(*arguments: str | Path, **variables: str) -> Result:
        with monkeypatch.context() as patched:
            patched.chdir(here)
            for name in ("HOLDFAST_URL", "HOLDFAST_DEBUG"):
                patched.delenv(name, raising=False)
            for name, text in variables.items():
                patched.setenv(name, text)
            capfd.readouterr()
            code = app_module.run(list(map(str, arguments)))
            return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return quick


@pytest.fixture
def options(place: dict[str, str]) -> list[str]:
    """The options that name an empty store."""
    return [f"--{name}={text}" for name, text in place.items()]


@pytest.fixture
def new_options(new_place: dict[str, str]) -> list[str]:
    """The options that name a place where a store can be made."""
    return [f"--{name}={text}" for name, text in new_place.items()]


@pytest.fixture
def filled(place: dict[str, str]) -> dict[str, str]:
    """A place with a store in which a counter is at 3."""
    fill(place)
    return place


def fill(place: Mapping[str, Any]) -> None:
    with holdfast.open(**place) as store:
        Setup(store).install()
        Counter(store).plant()
        for _ in range(3):
            Counter(store).add(note="x" * 100)


def file_of(place: Mapping[str, str]) -> Path:
    return Path(place["url"].removeprefix("sqlite:///"))


def execute(place: Mapping[str, str], *statements: str) -> None:
    """Change a store behind its back, with triggers and foreign keys off."""
    if "namespace" in place:
        with psycopg.connect(place["url"], autocommit=True) as other:
            other.execute(f'SET search_path = "{place["namespace"]}"')
            other.execute("SET session_replication_role = replica")
            for statement in statements:
                other.execute(statement)
    else:
        connection = apsw.Connection(str(file_of(place)))
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
        for statement in statements:
            connection.execute(statement)
        connection.close()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def where(place: Mapping[str, str]) -> str:
    """How the command line names a place."""
    if "namespace" in place:
        return f"schema '{place['namespace']}'"
    return str(file_of(place))


def bad(result: Result) -> list[str]:
    """The checks of a doctor's report that are not ok, with their level."""
    findings = json.loads(result.stdout)
    return [f"{found['level']}: {found['check']}" for found in findings if found["level"] != "ok"]


def test_the_entry_point_is_the_one_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"holdfast": "holdfast_command:main"}
    assert project["version"] == holdfast.__version__
    command = str(Path(sys.executable).with_name("holdfast"))
    shown = [
        subprocess.run([*words, "--help"], capture_output=True, text=True, check=True).stdout
        for words in (COMMAND, [command])
    ]
    assert shown[0] == shown[1]


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"holdfast {holdfast.__version__}\n"


def test_without_a_command_it_shows_its_help(run: Run) -> None:
    result = run()
    assert (result.returncode, result.stderr) == (2, "")
    assert result.stdout == run("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout


def test_help_tells_whole_sentences(quick: Run) -> None:
    groups = {name.partition(" ")[0] for name in commands() if " " in name}
    for words in ([], *([group] for group in sorted(groups))):
        told = quick(*words, "--help", COLUMNS="80").stdout
        _, _, listed = told.partition("Commands:")
        assert listed.strip().endswith("."), words
        assert "..." not in listed, words
        assert max(map(len, told.splitlines())) <= 80, words


def test_every_command_offers_json_and_explains_itself() -> None:
    found = {name: command for name, command in commands().items() if not command.hidden}
    assert {name.partition(" ")[0] for name in found} == COMMANDS
    for name, command in found.items():
        offered = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in offered, name
        has_store = name not in {"demo", "explore"}
        assert not has_store or {"--url", "--namespace"} <= offered, name
        shown = CliRunner().invoke(app_module.app, [*name.split(), "--help"])
        assert shown.exit_code == 0
        assert command.help is not None
        assert " ".join(command.help.partition(".")[0].split()) in " ".join(shown.output.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_prints_a_completion_script(shell: str, run: Run) -> None:
    variables = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    result = run("--show-completion", shell, **variables)
    assert (result.returncode, result.stderr) == (0, "")
    assert "_HOLDFAST_COMPLETE" in result.stdout
    sourced = run(_HOLDFAST_COMPLETE=f"source_{shell}")
    assert result.stdout.strip() == sourced.stdout.strip()


def test_it_completes_commands_and_options(run: Run) -> None:
    def complete(words: str, place: int) -> set[str]:
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(place)}
        return set(run(_HOLDFAST_COMPLETE="complete_bash", **variables).stdout.split())

    assert complete("holdfast ", 1) == COMMANDS
    assert complete("holdfast mi", 1) == {"migrate"}
    assert complete("holdfast migrate --s", 2) == {"--status"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--nope"],
         "No such option: --nope; see `holdfast doctor --help`"),
        (["nope"], "No such command 'nope'; see `holdfast --help`"),
        (["backup"], "Missing argument 'PATH'; see `holdfast backup --help`"),
        (["demo", "--trips", "0"],
         "Invalid value for '--trips': 0 is not in the range 1<=x<=20; "
         "see `holdfast demo --help`"),
        (["sessions", "list", "--limit", "few"],
         "Invalid value for '--limit': 'few' is not a whole number; "
         "see `holdfast sessions list --help`"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_use_is_one_sentence(arguments: list[str], message: str, quick: Run) -> None:
    result = quick(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"Error: {message}\n"
    as_json = quick(*arguments, "--json")
    assert (as_json.returncode, as_json.stdout) == (2, "")
    error = json.loads(as_json.stderr)
    kinds = {"NoSuchOption", "UsageError", "MissingParameter", "BadParameter"}
    assert (error["error"] in kinds, error["message"]) == (True, message)


def test_migrate_makes_a_store_and_says_so(
    run: Run, new_place: dict[str, str], new_options: list[str]
) -> None:
    first = run("migrate", *new_options)
    assert (first.returncode, first.stderr) == (0, "")
    *applied, last = first.stdout.splitlines()
    assert applied == [f"applied {version:04} {name}" for version, name in formats().items()]
    assert where(new_place) in last
    assert last.endswith(f"now has format {newest()}, the newest.")
    second = run("migrate", *new_options)
    assert second.returncode == 0
    assert second.stdout.endswith(f"already has format {newest()}, the newest.\n")
    with holdfast.open(**new_place, migrate=False) as store:  # type: ignore[arg-type]
        assert (
            json.loads(run("migrate", *new_options, "--json").stdout)["store_id"]
            == store.store_id()
        )


def test_migrate_as_json(quick: Run, new_options: list[str]) -> None:
    data = json.loads(quick("migrate", *new_options, "--json").stdout)
    versions = list(formats())
    assert (data["format"], data["newest"], data["applied_now"]) == (newest(), newest(), versions)
    assert [step["name"] for step in data["migrations"]] == list(formats().values())
    for step in data["migrations"]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", step["applied_at"])
    status = json.loads(quick("migrate", "--status", *new_options, "--json").stdout)
    assert status == {**data, "applied_now": []}


def test_status_of_a_missing_store_makes_nothing(
    quick: Run, here: Path, new_place: dict[str, str], new_options: list[str], tmp_path: Path
) -> None:
    before = names_in(tmp_path)
    for arguments in (["migrate", "--status"], ["doctor"]):
        result = quick(*arguments, *new_options)
        assert (result.returncode, result.stdout) == (3, "")
        assert result.stderr.startswith("Error: there is no store ")
        assert "; name another place, or create one here with `holdfast migrate --url " in (
            result.stderr
        )
        assert result.stderr.endswith("`\n")
    refused = quick("backup", here / "copy.db", *new_options)
    assert refused.returncode == 3
    assert "there is no store in" in refused.stderr
    assert names_in(tmp_path) == before
    assert names_in(here) == []
    if "namespace" in new_place:
        with psycopg.connect(new_place["url"]) as other:
            found = other.execute(
                "SELECT 1 FROM pg_namespace WHERE nspname = %s", [new_place["namespace"]]
            )
            assert found.fetchall() == []


def test_status_shows_what_is_pending_and_migrate_applies_it(
    quick: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.open(f"sqlite:///{here}/holdfast.db").close()
    files = names_in(here)
    before = (here / "holdfast.db").read_bytes()
    with next_format(monkeypatch) as number:
        lines = quick("migrate", "--status").stdout.splitlines()
        assert lines[0] == str(here / "holdfast.db")
        assert re.fullmatch(r"0001 +tables +\d{4}-.*Z *", lines[2])
        assert re.fullmatch(rf"{number:04} +example +pending *", lines[-1])
        assert bad(quick("doctor", "--json")) == ["warning: schema format"]
        assert quick("doctor").returncode == 0
        assert names_in(here) == files
        assert (here / "holdfast.db").read_bytes() == before
        refused = quick("backup", "copy.db")
        assert (refused.returncode, refused.stdout) == (8, "")
        assert "run `holdfast migrate`" in refused.stderr
        assert json.loads(quick("migrate", "--json").stdout)["applied_now"] == [number]


def test_a_newer_store_is_refused_and_explained(
    quick: Run, here: Path, filled: dict[str, str], options: list[str]
) -> None:
    execute(filled, "INSERT INTO hf_migrations (version, name, applied_at) VALUES (99, 'later', 0)")
    for arguments in (["migrate"], ["backup", here / "copy.db"]):
        result = quick(*arguments, *options)
        assert (result.returncode, result.stdout) == (8, "")
        assert result.stderr == (
            f"Error: {where(filled)} has format 99 and this Holdfast knows formats up to "
            f"{newest()}; install a newer Holdfast\n"
        )
    error = json.loads(quick("migrate", "--json", *options).stderr)
    assert (error["error"], error["current"], error["newest"]) == ("SchemaMismatch", 99, newest())
    status = quick("migrate", "--status", *options)
    assert status.returncode == 0
    assert "1970-01-01T00:00:00.000Z by a newer Holdfast" in status.stdout
    report = quick("doctor", *options, "--json")
    assert (report.returncode, bad(report)) == (1, ["problem: schema format"])


def test_doctor_finds_a_sound_store_well(
    run: Run, filled: dict[str, str], options: list[str]
) -> None:
    result = run("doctor", *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("\n\nNo problems found.\n")
    assert "No gaps: 1 tree, 3 events." in result.stdout
    findings = json.loads(run("doctor", "--full", *options, "--json").stdout)
    assert {tuple(found) for found in findings} == {("check", "level", "message", "advice")}
    assert len(findings) == len(result.stdout.splitlines()) - 2
    if "namespace" not in filled:
        assert "integrity_check found no damage." in [found["message"] for found in findings]
        assert names_in(file_of(filled).parent) == [
            "here",
            "store.db",
            "store.db-lock",
            "store.db-turn",
        ]


def test_doctor_looks_at_a_store_that_is_in_use(
    run: Run, filled: dict[str, str], options: list[str]
) -> None:
    with holdfast.open(**filled) as store:  # type: ignore[arg-type]
        Counter(store).add()
        result = run("doctor", *options)
        assert result.returncode == 0
        assert "1 tree, 4 events" in result.stdout
        assert Counter(store).add() == 5


PLANTED: dict[str, tuple[str, list[str]]] = {
    "an event was removed": ("DELETE FROM hf_events WHERE position = 2", ["problem: feed"]),
    "the last event was removed": ("DELETE FROM hf_events WHERE position = 3", ["problem: feed"]),
    "the position is too low": ("UPDATE hf_trees SET position = 2", ["problem: feed"]),
    "positions begin at zero": (
        "UPDATE hf_events SET position = 0 WHERE position = 1", ["problem: feed"],
    ),
    "a door stands open": ("INSERT INTO hf_doors (name) VALUES ('prune')", ["problem: history"]),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_doctor_finds_what_was_changed_by_hand(
    planted: str, quick: Run, filled: dict[str, str], options: list[str]
) -> None:
    statement, expected = PLANTED[planted]
    execute(filled, statement)
    result = quick("doctor", *options, "--json")
    assert (result.returncode, bad(result)) == (1, expected)


def test_doctor_says_what_to_do(quick: Run, filled: dict[str, str], options: list[str]) -> None:
    execute(filled, "DELETE FROM hf_events WHERE position = 2")
    result = quick("doctor", *options)
    assert (result.returncode, result.stderr) == (1, "")
    assert (
        "Tree 'root' is at position 3 and has 2 events, from 1 to 3. "
        "Events were removed or added manually: restore a backup." in result.stdout
    )
    assert result.stdout.endswith("\n\n1 problem, 0 warnings.\n")


@pytest.fixture
def file(here: Path) -> Path:
    """A store in the file that the command line takes by default."""
    path = here / "holdfast.db"
    fill({"url": f"sqlite:///{path}"})
    return path


@pytest.mark.parametrize("suffix", ["", "-lock", "-turn"])
def test_doctor_finds_files_that_others_can_read(suffix: str, quick: Run, file: Path) -> None:
    path = file.with_name(file.name + suffix)
    path.chmod(0o640)
    result = quick("doctor")
    assert result.returncode == 1
    message = f"{path} is open to other users (mode 0640). Run `chmod 600 {path}`."
    assert message in result.stdout


def test_doctor_finds_a_damaged_page(quick: Run, file: Path) -> None:
    connection = apsw.Connection(str(file))
    found: Any = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_hf_events_1'"
    ).fetchall()
    connection.close()
    with file.open("r+b") as opened:
        opened.seek((found[0][0] - 1) * 4096)
        opened.write(b"\xa5" * 4096)
    result = quick("doctor", "--json")
    assert result.returncode == 1
    assert {"problem: integrity", "problem: feed"} <= set(bad(result))


@pytest.mark.parametrize("keep", [0, 60, 5000])
def test_doctor_finds_a_damaged_file(keep: int, quick: Run, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:keep] if keep else b"X" + data[1:])
    result = quick("doctor", "--json")
    assert (result.returncode, result.stderr) == (1, "")
    assert "problem: database" in bad(result)


def test_doctor_says_nothing_good_about_a_file_that_is_no_store(quick: Run, here: Path) -> None:
    (here / "text.db").write_text("not a database at all\n" * 50)
    connection = apsw.Connection(str(here / "foreign.db"))
    connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    for name, message in (
        ("text.db", "is not an SQLite database"),
        ("foreign.db", "is an SQLite database of another program"),
    ):
        result = quick("doctor", "--url", f"sqlite:///{name}", "--json")
        assert result.returncode == 1
        (found,) = json.loads(result.stdout)
        assert (found["check"], found["level"]) == ("database", "problem")
        assert message in found["message"]


def test_doctor_finds_leases_of_the_dead(
    quick: Run, place: dict[str, Any], options: list[str]
) -> None:
    def leases() -> list[tuple[str, str]]:
        findings = json.loads(quick("doctor", *options, "--json").stdout)
        return [(f["level"], f["message"]) for f in findings if f["check"] == "leases"]

    with holdfast.open(**place) as store:
        store.work.submit("mail", {})
        (item,) = store.work.claim("worker-1", lease_seconds=3600)
        driver = store.session("s").drive("agent-1", lease_seconds=3600)
        assert leases() == [("ok", "None has expired: 1 work item, 1 session.")]
        expire = "SET lease_expires_at = 1 WHERE lease_expires_at IS NOT NULL"
        expire_work = expire.replace("SET", "SET sweep_at = 1,")
        execute(place, f"UPDATE hf_work {expire_work}", f"UPDATE hf_sessions {expire}")
        assert leases() == [
            ("warning", "1 work item with an expired lease: the worker died."),
            ("warning", "1 session with an expired lease: the driver died."),
        ]
        item.complete(None)
        driver.close()
    assert leases() == [("ok", "None has expired: 0 work items, 0 sessions.")]


def test_doctor_finds_a_broken_reference(quick: Run, file: Path) -> None:
    execute(
        {"url": f"sqlite:///{file}"},
        "CREATE TABLE hf_test_leaves (root_id TEXT REFERENCES hf_trees (root_id))",
        "INSERT INTO hf_test_leaves VALUES ('nowhere')",
    )
    assert bad(quick("doctor", "--json")) == ["problem: foreign keys"]


def test_doctor_finds_a_log_that_only_grows(quick: Run, file: Path) -> None:
    log = file.with_name(f"{file.name}-wal")
    log.touch(mode=0o600)
    os.truncate(log, sqlite.WAL_BYTES_MAX + 1)
    result = quick("doctor", "--json")
    assert (result.returncode, bad(result)) == (0, ["warning: wal size"])
    (found,) = (each for each in json.loads(result.stdout) if each["check"] == "wal size")
    assert "unless a long-running reader prevents that" in found["advice"]


def test_doctor_names_who_has_a_file_open(file: Path) -> None:
    assert sqlite.users_of(file) == []
    with file.open("rb") as opened:
        holder = subprocess.Popen(["sleep", "60"], stdin=opened)
        try:
            assert sqlite.users_of(file) == [holder.pid]
        finally:
            holder.kill()
            holder.wait()


def test_doctor_names_what_holds_back_dead_rows() -> None:
    assert server.slots_finding([]).level == "ok"
    assert server.prepared_finding([]).level == "ok"
    slot = server.slots_finding([{"name": "old", "transactions": 1_200_000}])
    assert (slot.level, slot.message) == (
        "warning",
        "1 replication slot without a reader: 'old', 1,200,000 transactions behind.",
    )
    prepared = server.prepared_finding([{"name": "x", "seconds": 4_000}])
    assert (prepared.level, prepared.message) == (
        "warning", "1 transaction prepared too long ago: 'x' for 4,000 s.",
    )  # fmt: skip


def test_only_commands_that_a_server_can_do_offer_its_address(quick: Run) -> None:
    for name in ("doctor", "migrate", "backup", "export", "import", "serve", "bench"):
        assert "https://" not in quick(name, "--help").stdout, name
        assert "postgresql://" in quick(name, "--help").stdout, name
    assert "https://" in quick("prune", "--help").stdout


def test_doctor_takes_a_store_without_a_log_for_sound(quick: Run, file: Path) -> None:
    execute({"url": f"sqlite:///{file}"}, "PRAGMA journal_mode = delete")
    result = quick("doctor")
    assert result.returncode == 0
    assert "No write-ahead log is in use (delete): the store is closed" in result.stdout


def test_doctor_finds_too_many_writers(
    quick: Run, filled: dict[str, str], options: list[str]
) -> None:
    now = "extract(epoch FROM now()) * 1000" if "namespace" in filled else "unixepoch() * 1000"
    series = "SELECT 1 AS n UNION ALL SELECT n + 1 FROM series WHERE n < 10001"
    execute(
        filled,
        f"WITH RECURSIVE series AS ({series}) INSERT INTO hf_writers (id, batch, updated_at) "
        f"SELECT 'writer-' || n, 1, {now} FROM series",
    )
    assert bad(quick("doctor", *options, "--json")) == ["warning: writers"]


def checked(place: Mapping[str, str]) -> list[Finding]:
    found = store_module.check(place["url"], namespace=place.get("namespace"))
    return [finding for finding in found if finding.level != "ok"]


def test_doctor_tells_of_each_check_as_it_begins(filled: dict[str, str]) -> None:
    told: list[tuple[str, int, int]] = []
    store_module.check(
        filled["url"],
        namespace=filled.get("namespace"),
        progress=lambda *each: told.append(each),
    )
    assert {"writers", "feed", "effects", "leases"} <= {name for name, _, _ in told}
    assert told[-1][1] + 1 == told[-1][2], "the last of them"


def test_doctor_knows_beforehand_how_much_there_is(filled: dict[str, str]) -> None:
    found = store_module.extent(filled["url"], namespace=filled.get("namespace"))
    assert 50_000 < found.bytes < 50_000_000
    assert found.seconds == pytest.approx(
        found.bytes / 1e9 * SECONDS_PER_GB["postgres" if "namespace" in filled else "sqlite"]
    )


def test_doctor_looks_at_the_machine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"url": f"sqlite:///{file}"}
    usage = shutil.disk_usage(file)
    for free, level in ((1_000, "problem"), (sqlite.FREE_BYTES_LOW, "warning")):
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
            assert [(found.check, found.level) for found in checked(place)] == [
                ("disk space", level)
            ]
    for kind, level in (("nfs4", "problem"), ("tmpfs", "warning")):
        with monkeypatch.context() as patched:
            patched.setattr(sqlite, "file_system", lambda path, kind=kind: kind)
            assert [(found.check, found.level) for found in checked(place)] == [
                ("file system", level)
            ]
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    (found,) = checked(place)
    assert found == Finding(
        "sqlite library",
        "problem",
        "SQLite 3.51.2 can lose commits when several connections write.",
        "Install apsw 3.54 or newer.",
    )


@pytest.fixture
def schema(postgres_dsn: str, namespace: str) -> dict[str, str]:
    """A filled store on PostgreSQL."""
    place = {"url": postgres_dsn, "namespace": namespace}
    fill(place)
    return place


def test_doctor_looks_at_the_settings_of_its_session(quick: Run, schema: dict[str, str]) -> None:
    def report(setting: str) -> list[str]:
        url = f"{schema['url']}&options=-c%20{setting}"
        return bad(quick("doctor", "--url", url, "--namespace", schema["namespace"], "--json"))

    assert report("synchronous_commit=off") == ["warning: synchronous_commit"]
    assert report("default_transaction_read_only=on") == ["problem: writable"]


def test_doctor_finds_a_transaction_that_nobody_ends(
    schema: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TRANSACTION_SECONDS_MAX", 0)
    # Those of tests beside this one are as old.
    monkeypatch.setattr(server, "SHOWN_MAX", 1_000)
    with psycopg.connect(schema["url"], application_name="sleeper") as other:
        other.execute("SELECT 1")
        time.sleep(0.01)
        found = [found for found in checked(schema) if found.check == "old transactions"]
        assert len(found) == 1
        assert f"process {other.info.backend_pid} sleeper idle in transaction" in found[0].message


def test_doctor_finds_a_table_that_is_not_cleaned(
    schema: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DEAD_ROWS_MIN", 100)
    with psycopg.connect(schema["url"], autocommit=True) as other:
        table = f'"{schema["namespace"]}".hf_meta'
        other.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        other.execute(f"INSERT INTO {table} SELECT 'x' || n, '' FROM generate_series(1, 500) AS n")
        other.execute(f"DELETE FROM {table} WHERE name LIKE 'x%'")
        other.execute("SELECT pg_stat_force_next_flush()")
        other.execute("SELECT 1")
    messages = [found.message for found in checked(schema) if found.check == "dead rows"]
    assert messages == ["hf_meta has 500 dead rows beside 1 live."]


def test_doctor_finds_clocks_that_differ(
    schema: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = holdfast.SystemClock().now_ms
    for seconds, words in ((-90, "90.0 s ahead of"), (90, "90.0 s behind")):
        monkeypatch.setattr(
            holdfast.SystemClock, "now_ms", lambda self, ms=seconds * 1000: real() + ms
        )
        (found,) = [found for found in checked(schema) if found.check == "clock"]
        assert (found.level, words in found.message) == ("warning", True)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"version_number": 130_011, "version": "13.11"}, "problem: server version"),
        ({"encoding": "SQL_ASCII"}, "problem: encoding"),
        ({"fsync": "off"}, "problem: fsync"),
        ({"full_page_writes": "off"}, "problem: full_page_writes"),
        ({"is_standby": True}, "problem: writable"),
        ({"connections": 80}, "warning: connections"),
        ({"autovacuum": "off"}, "warning: dead rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_doctor_looks_at_the_server(
    setting: dict[str, Any], expected: str, schema: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = server._rows

    def rows(driver: Any, sql: str, **parameters: object) -> Any:
        changed = setting if sql == server.READ_SERVER else {}
        return [{**row, **changed} for row in real(driver, sql, **parameters)]

    settled = {"connections": 1, "connections_max": 100}
    setting = {**settled, **setting}
    monkeypatch.setattr(server, "_rows", rows)
    assert [f"{found.level}: {found.check}" for found in checked(schema)] == [expected]


def test_backup_is_a_store(
    run: Run, here: Path, filled: dict[str, str], options: list[str]
) -> None:
    result = run("backup", "copy.db", *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(
        rf"Backed up to {re.escape(str(here))}/copy\.db \(\d+\.\d kB\)\.\n", result.stdout
    )
    assert names_in(here) == ["copy.db"]
    assert bad(run("doctor", "--url", "sqlite:///copy.db", "--json")) == []
    with holdfast.open(f"sqlite:///{here}/copy.db") as copy:
        assert [event.data["value"] for event in copy.events("root")] == [1, 2, 3]
    data = json.loads(run("backup", "second.db", *options, "--json").stdout)
    second = here / "second.db"
    assert data == {"path": str(second), "bytes": second.stat().st_size}


def test_backup_never_overwrites(quick: Run, here: Path, file: Path) -> None:
    (here / "copy.db").write_text("mine")
    result = quick("backup", "copy.db")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"Error: {here}/copy.db exists already; name a new file\n"
    result = quick("backup", "none/copy.db", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert json.loads(result.stderr) == {
        "error": "InvalidArgument",
        "message": f"there is no directory {here}/none; create it first",
    }
    assert (here / "copy.db").read_text() == "mine"


@pytest.fixture
def writer(place: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that writes to the place all the time."""
    command = [sys.executable, "-m", "tests.faces.writer", *place.values()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        yield process
        process.kill()


def test_backup_of_a_store_that_another_process_writes(
    run: Run, here: Path, writer: subprocess.Popen[bytes], options: list[str]
) -> None:
    assert writer.stdout is not None
    for number in range(3):
        result = run("backup", f"copy-{number}.db", *options)
        assert (result.returncode, result.stderr) == (0, "")
    assert writer.poll() is None
    values = []
    for number in range(3):
        assert bad(run("doctor", "--url", f"sqlite:///copy-{number}.db", "--json")) == []
        with holdfast.open(f"sqlite:///{here}/copy-{number}.db") as copy:
            events = copy.events(SESSION_ID, limit=10_000)
        values.append(events[-1].data["version"])
        assert [event.position for event in events] == list(range(1, values[-1] + 2))
    assert 0 < values[0] < values[1] < values[2]


def on_a_terminal(here: Path, *arguments: str) -> tuple[int, str]:
    """Run a command on a terminal of 80 columns and return what it shows."""
    return forked.show(list(arguments), directory=here, environment=environment({}))


def test_a_terminal_gets_colour_and_a_progress_bar(here: Path, file: Path) -> None:
    code, shown = on_a_terminal(here, "backup", "copy.db")
    assert code == 0
    assert "Copying" in shown
    assert "100%" in shown
    file.chmod(0o644)
    code, shown = on_a_terminal(here, "doctor")
    assert code == 1
    assert re.search(r"Examining [\d.]+ kB takes less than a second on an idle machine", shown)
    assert "Examining: leases" in shown
    assert re.search(r"\x1b\[1;31mproblem *\x1b\[0m", shown)
    assert re.search(r"\x1b\[32mok *\x1b\[0m", shown)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    # A path and a command are whole, so that they can be copied.
    assert all(len(line) <= 80 or str(here) in line for line in plain.splitlines())
    assert "…" not in plain


def test_an_interrupt_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "check", interrupt)
    assert app_module.run(["doctor"]) == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_defect_is_one_sentence_too(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise KeyError("nobody foresaw this")

    monkeypatch.delenv("HOLDFAST_DEBUG", raising=False)
    monkeypatch.setattr(store_module, "check", fail)
    message = (
        "KeyError: 'nobody foresaw this'; this is a bug, and HOLDFAST_DEBUG=1 shows the traceback"
    )
    assert app_module.run(["doctor", "--json"] if as_json else ["doctor"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    if as_json:
        assert json.loads(err) == {"error": "KeyError", "message": message}
    else:
        assert err == f"Error: {message}\n"


def test_a_traceback_is_shown_to_who_asks(run: Run) -> None:
    for result in (run("--debug", "doctor"), run("doctor", HOLDFAST_DEBUG="1")):
        assert (result.returncode, result.stdout) == (3, "")
        assert result.stderr.startswith("Traceback (most recent call last):\n")
        assert "\nError: there is no store " in result.stderr
    assert "Traceback" not in run("doctor", HOLDFAST_DEBUG="0").stderr


def test_who_reads_the_output_may_leave(file: Path) -> None:
    command = [*COMMAND, "doctor", "--json"]
    with subprocess.Popen(
        command, cwd=file.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_the_url_comes_from_the_environment(quick: Run, here: Path, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.db"
    assert quick("migrate", HOLDFAST_URL=f"sqlite:///{path}").returncode == 0
    assert path.exists()
    assert names_in(here) == []
    relative = quick("migrate", HOLDFAST_URL="sqlite:///a.db")
    assert (relative.returncode, relative.stdout) == (2, "")
    assert "HOLDFAST_URL 'sqlite:///a.db' is relative" in relative.stderr
    assert quick("migrate", "--url", "sqlite:///a.db", "--namespace", "tenant").returncode == 0
    assert names_in(here) == ["tenant-a.db", "tenant-a.db-lock", "tenant-a.db-turn"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["doctor", "--url", "mysql://u:s3cret@h/d"], 2, "'mysql://u:***@h/d' is not"),
        (["doctor", "--url", "sqlite://"], 2, "sqlite:// is a new temporary store each time"),
        (["migrate", "--namespace", "A"], 2, "namespace 'A' must be 1 to 40 of a-z"),
        (["migrate", "--url", "sqlite:///text.db"], 7, "text.db is not an SQLite database"),
        (["migrate", "--url", "sqlite:////proc/a.db"], 5, "cannot create /proc/a.db"),
        (["doctor", "--url", "postgresql://u:s3cret@127.0.0.1:1/d"], 5, "cannot be reached"),
    ],
    ids=lambda value: "" if isinstance(value, int | str) else value[-1],
)  # fmt: skip
def test_the_exit_code_tells_what_went_wrong(
    arguments: list[str], code: int, message: str, quick: Run, here: Path
) -> None:
    (here / "text.db").write_text("not a database at all\n" * 50)
    before = names_in(here)
    result = quick(*arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "s3cret" not in result.stderr
    error = json.loads(quick(*arguments, "--json").stderr)
    assert f"Error: {error['message']}\n" == result.stderr
    assert names_in(here) == before
