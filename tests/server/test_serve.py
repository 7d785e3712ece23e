"""`holdfast serve`: its start, its end, its sockets, and what kills leave."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import resource
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

import holdfast
from holdfast.cli.app import run
from holdfast.server import serve
from holdfast.server.serve import Address, bound
from holdfast.server.start import start_token
from tests.server.live import live
from tests.server.processes import (
    client_of,
    free_port,
    made_token,
    server_process,
    token_file,
)


@pytest.fixture
def file(tmp_path: Path) -> dict[str, Any]:
    return {"url": f"sqlite:///{tmp_path}/store.db"}


def test_the_first_start_makes_a_token_that_only_its_owner_can_read(file: dict[str, Any]) -> None:
    path = token_file(file)
    with server_process("--port=0", **file) as (process, told):
        assert (told["token_file"], set(told)) == (
            str(path),
            {"url", "token_file", "dashboard", "mcp"},
        )
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = path.read_text().strip()
        with client_of(told, secret) as client:
            assert client.get("/sessions").json()["sessions"] == []
            assert client.get("/readyz").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with server_process("--port=0", "--read-only", **file) as (_, told):
        assert path.read_text().strip() == secret
        with client_of(told, secret) as client:
            assert client.post("/sessions", json={}).status_code == 403
    with holdfast.open(**file) as store:
        [token] = store.tokens.list()
        assert (token.name, token.permission) == ("first-start", "admin")


def test_servers_that_start_at_once_agree_on_one_token(file: dict[str, Any]) -> None:
    arguments = [sys.executable, "-m", "holdfast", "serve", "--json", "--port=0"]
    arguments.append(f"--url={file['url']}")
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
            for _ in range(3)
        ]
        try:
            told = [json.loads(each.stdout.readline()) for each in started if each.stdout]
        finally:
            for each in started:
                each.terminate()
    assert {each["token_file"] for each in told} == {str(token_file(file))}
    with holdfast.open(**file) as store:
        [token] = store.tokens.list()
        assert (token.name, token.revoked_at) == ("first-start", None)
        assert store.tokens.find(token_file(file).read_text().strip()) == token


def test_the_token_of_another_machine_is_left_alone(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for machine in ("one", "two"):
        monkeypatch.setenv("XDG_CONFIG_HOME", f"{tmp_path}/{machine}")
        monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
        made.append(start_token(place, is_read_only=False))
        if "namespace" not in place:
            # A file is on one machine only; what is left of a start that was killed is replaced.
            made[-1].path.unlink()
    with holdfast.open(**place) as store:
        alive = [each.name for each in store.tokens.list() if each.revoked_at is None]
        assert store.tokens.find(made[0].secret or "") is None or "namespace" in place
    if "namespace" in place:
        assert [each.is_new for each in made] == [True, False]
        assert (alive, made[1].secret) == (["first-start one"], None)
    else:
        assert [each.is_new for each in made] == [True, True]
        assert alive == ["first-start"]


def test_the_token_of_a_schema_is_kept_with_the_users_settings(
    postgres_dsn: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = {"url": postgres_dsn, "namespace": namespace}
    first = start_token(place, is_read_only=False)
    assert (first.path.parent, first.is_new) == (tmp_path / "holdfast", True)
    assert start_token(place, is_read_only=False).secret == first.secret
    # A start that was killed before it wrote the file has left a token that nobody knows.
    first.path.unlink()
    again = start_token(place, is_read_only=False)
    assert (again.is_new, again.secret != first.secret) == (True, True)
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        assert store.tokens.find(first.secret or "") is None
        store.tokens.create("own")
    first.path.unlink()
    assert start_token(place, is_read_only=False).secret is None
    first.path.write_text("x")
    first.path.chmod(0o644)
    with pytest.raises(holdfast.InvalidArgument, match="others can read"):
        start_token(place, is_read_only=False)


def test_what_people_are_told_can_be_pasted(file: dict[str, Any]) -> None:
    arguments = [sys.executable, "-m", "holdfast", "serve", "--port=0", f"--url={file['url']}"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(10)]
        assert lines[0].startswith("Serving at http://127.0.0.1:")
        assert lines[1] == f"Dashboard: {lines[0].split()[-1]}/ui/\n"
        path = token_file(file)
        assert lines[2] == f"The token is in {path}, which only you can read.\n"
        assert path.read_text().strip() not in "".join(lines), "a log keeps what is printed"
        assert lines[4] == "Try it:\n"
        assert lines[5].startswith('  curl -H "Authorization: Bearer $(cat ')
        [local, over_http] = (json.loads(each)["mcpServers"]["holdfast"] for each in lines[8:])
        assert local["args"][-4:] == ["--url", file["url"], "--session", "my-agent"]
        assert over_http["url"] == f"{lines[0].split()[-1]}/mcp"
        shown = subprocess.run(["sh", "-c", lines[5]], capture_output=True, text=True, check=False)
        assert shown.returncode == 127 or '"sessions":[]' in shown.stdout
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode in {0, 130}


def test_the_command_that_makes_a_token_names_the_store(place: dict[str, Any]) -> None:
    made_token(place)
    options = [text for name, each in place.items() for text in (f"--{name}", each)]
    arguments = [sys.executable, "-m", "holdfast", "serve", "--port=0", *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    create = shlex.join(["holdfast", "tokens", "create", "NAME", *options])
    assert lines[2] == f"Use an existing token, or create one: `{create}`.\n"


def test_a_terminal_is_shown_the_token_and_a_link_that_signs_in(file: dict[str, Any]) -> None:
    arguments = [sys.executable, "-m", "holdfast", "serve", "--port=0", f"--url={file['url']}"]
    controller, terminal = pty.openpty()
    with subprocess.Popen(arguments, stdout=terminal) as process, os.fdopen(controller) as lines:
        os.close(terminal)
        told = [lines.readline() for _ in range(4)]
        assert "/ui/login?code=" in told[1]
        assert told[2] == f"Token: {token_file(file).read_text().strip()}\n"
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path, file: dict[str, Any]) -> None:
    path = tmp_path / "s"
    secret = made_token(file)
    for _ in range(2):
        with server_process(f"--uds={path}", **file) as (process, _):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            transport = httpx.HTTPTransport(uds=str(path))
            bearer = {"authorization": f"Bearer {secret}"}
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                assert client.get("/sessions/one/state", headers=bearer).status_code == 200
            # What a killed server leaves behind does not stop the next one.
            process.kill()
            process.wait(60)
    path.unlink()
    path.write_text("mine")
    with server_process(f"--uds={path}", **file) as (process, told):
        assert told is None
        assert process.wait(60) == 2
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "given",
    [
        {"host": "0.0.0.0"},
        {"host": "192.0.2.1"},
        {"host": "127.0.0.1.example.org"},
        {"host": "127.evil"},
        {"host": "::"},
        {"certfile": "x"},
        {"port": 99_999},
    ],
)
def test_addresses_that_are_unsafe_or_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(holdfast.InvalidArgument):
        Address(**given)


def has_ipv6() -> bool:
    try:
        bound(Address(host="::1"))[0].close()
    except holdfast.InvalidArgument:
        return False
    return True


def test_by_default_both_loopback_addresses_are_served_and_no_other(file: dict[str, Any]) -> None:
    secret = made_token(file)
    with server_process("--port=0", **file) as (process, told):
        port = httpx.URL(told["url"]).port
        expected = {("127.0.0.1", port)} | ({("::1", port)} if has_ipv6() else set())
        assert listened_at(process.pid) == expected
        for host, _ in expected:
            shown = f"[{host}]" if ":" in host else host
            with client_of({"url": f"http://{shown}:{port}"}, secret) as client:
                assert client.get("/sessions").status_code == 200


def listened_at(pid: int) -> set[tuple[str, int]]:
    """Return the addresses at which a process listens."""
    inodes = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(each))
            inodes |= {found[1]} if found else set()
    listening = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        path = Path(f"/proc/{pid}/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw, port = fields[1].split(":")
                words = [bytes.fromhex(raw[at : at + 8])[::-1] for at in range(0, len(raw), 8)]
                listening.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return listening


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_a_port_that_another_program_has_at_the_other_loopback_is_refused() -> None:
    [squatter] = bound(Address(host="::1"))
    with squatter:
        squatter.listen()
        port = squatter.getsockname()[1]
        with pytest.raises(holdfast.InvalidArgument, match=f"cannot listen at ::1 port {port}"):
            bound(Address(port=port))
        # The other socket was closed again.
        [alone] = bound(Address(host="127.0.0.1", port=port))
        alone.close()


def test_as_many_files_may_be_open_as_connections(file: dict[str, Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1_000:
        pytest.skip("this machine allows few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        with server_process("--port=0", "--limit=connections=600", **file) as (process, _):
            limits = Path(f"/proc/{process.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    [line] = [each for each in limits.splitlines() if each.startswith("Max open files")]
    assert int(line.split()[3]) > 600


def test_without_free_files_connections_wait_and_one_line_is_logged(
    file: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    secret = made_token(file)
    with (
        server_process("--port=0", **file) as (process, told),
        client_of(told, secret) as client,
        ExitStack() as stack,
    ):
        assert client.get("/sessions/one").is_success
        place = (client.base_url.host, client.base_url.port or 0)
        opened = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (opened + 3, opened + 100))
        for _ in range(8):
            stack.enter_context(socket.create_connection(place))
        logged = ""
        while not logged:
            logged += capfd.readouterr().err
            assert process.poll() is None
            time.sleep(0.01)
        stack.close()
        with client_of(told, secret) as late:
            assert late.get("/sessions/one").is_success
        logged += capfd.readouterr().err
    [line] = logged.splitlines()
    assert line == "connections wait, as none can be accepted now: Too many open files"


def test_a_listener_that_finds_no_free_file_is_asked_once_and_then_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def accept(_: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "no file is free")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with serve.Listener() as listener:
        for _ in range(2):
            with pytest.raises(OSError, match="no file is free"):
                listener.accept()
            # The event loop takes this for the end of the queue.
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_stop_tells_followers_where_to_go_on_and_waits_for_none_that_does_not_read(
    file: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Longer than the end of a server is waited for.
    monkeypatch.setattr(serve, "GRACE_SECONDS", 3_600)
    made_token(file)
    path, told = "/sessions/one/state/stream", list[bytes]()
    with ExitStack() as stack:
        with live(**file) as server:
            frames = stack.enter_context(server.socket(path))
            events = stack.enter_context(server.raw())
            unread = [stack.enter_context(server.raw()) for _ in range(2)]
            host = server.url.removeprefix("http://")
            login = f"HTTP/1.1\r\nauthorization: Bearer {server.secret}\r\nhost: {host}\r\n\r\n"
            for each in (events, unread[0]):
                each.sendall(f"GET {path} {login}".encode())
                while b"retry:" not in each.recv(4_096):
                    pass
            for number in range(12):
                assert server.put("one", f"k{number}", "x" * 900_000).is_success
            unread[1].sendall(f"GET /sessions/one/state {login}".encode())
            last = 0
            while last < 12:
                last = json.loads(frames.recv())["sequence"]
            received = iter(partial(events.recv, 65_536), b"")
            reading = threading.Thread(target=lambda: told.extend(received))
            reading.start()
        reading.join(60)
        assert b"event: ended" in b"".join(told[-3:])
        with pytest.raises(ConnectionClosed):
            frames.recv(timeout=60)
        assert (frames.close_code, frames.close_reason) == (1012, "after=12")
    assert not [each for each in caplog.records if each.exc_info]


def test_limits_can_be_set(file: dict[str, Any]) -> None:
    secret = made_token(file)
    options = ["--limit=body_bytes=2000", "--limit=wait_seconds=0.5", "--limit=keys_per_root=1"]
    with (
        server_process("--port=0", *options, **file) as (_, told),
        client_of(told, secret) as client,
    ):
        limits = client.get("/limits").json()
        assert (limits["server"]["body_bytes"], limits["server"]["wait_seconds"]) == (2000, 0.5)
        assert limits["store"]["keys_per_root"] == 1
        path, any_version = "/sessions/one/state/keys/", {"if-match": "*"}
        large = client.put(path + "a", json={"value": "x" * 2000}, headers=any_version)
        assert (large.status_code, large.json()["limit"]) == (413, 2000)
        assert client.put(path + "a", json={"value": 1}, headers=any_version).is_success
        second = client.put(path + "b", json={"value": 1}, headers=any_version)
        assert (second.status_code, second.json()["error"]) == (413, "too_large")


@pytest.mark.parametrize(
    "given",
    ["body_bytes", "body_bytes=", "body_bytes=x", "body_bytes=-1", "body_bytes=1.5", "bodies=1",
     "ping_seconds=nan", "wait_seconds=inf", "depth=0", "idempotency_hours=1"],
)  # fmt: skip
def test_limits_that_are_none_are_refused(
    given: str, capsys: pytest.CaptureFixture[str], file: dict[str, Any]
) -> None:
    assert run(["serve", f"--url={file['url']}", f"--limit={given}"]) == 2
    assert "limit" in capsys.readouterr().err.lower()
    assert not Path(file["url"].removeprefix("sqlite:///")).exists()


def test_what_is_refused_at_the_start_is_one_sentence(file: dict[str, Any]) -> None:
    for options in (["--host=0.0.0.0"], ["--host=203.0.113.1", "--insecure"], ["--base-path=x"]):
        with server_process(*options, **file) as (process, told):
            assert told is None
            assert process.wait(60) == 2


def test_a_server_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "t")
    assert run(["serve", "--url=http://127.0.0.1:1"]) == 2
    assert "name the database to serve" in capsys.readouterr().err


def test_a_kill_under_load_loses_no_answered_write(place: dict[str, Any]) -> None:
    secret = made_token(place)
    answered: list[list[int]] = [[] for _ in range(3)]
    with server_process("--port=0", **place) as (process, told):
        enough = threading.Event()

        def write(number: int) -> None:
            with client_of(told, secret) as client:
                for value in range(10_000):
                    path = f"/sessions/one/state/keys/w{number}-{value}"
                    try:
                        answer = client.put(path, json={"value": 1}, headers={"if-match": "*"})
                    except httpx.TransportError:
                        return
                    if answer.status_code == 200:
                        answered[number].append(value)
                    if sum(map(len, answered)) >= 60:
                        enough.set()

        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        assert enough.wait(120)
        process.kill()
        for thread in threads:
            thread.join(60)
    with holdfast.open(**place) as store:
        kept = set(store.find_session("one").state.keys())
    lost = [f"w{n}-{v}" for n, values in enumerate(answered) for v in values]
    assert [key for key in lost if key not in kept] == []


def increment_over_rest(client: httpx.Client, key: str) -> bool:
    path, body = "/sessions/one/state/keys/n/ops", {"operation": "increment"}
    return client.post(path, json=body, headers={"idempotency-key": key}).status_code == 200


def increment_over_mcp(client: httpx.Client, key: str) -> bool:
    call = {"name": "state_increment", "arguments": {"key": "n", "idempotency_key": key}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    answer = client.post("/mcp", json=body, headers={"x-agent-session-id": "one"})
    return answer.status_code == 200 and not answer.json()["result"].get("isError")


@pytest.mark.parametrize(
    ("restarts", "increment_once"),
    [
        (2, increment_over_rest),
        pytest.param(10, increment_over_rest, marks=pytest.mark.slow),
        pytest.param(10, increment_over_mcp, marks=pytest.mark.slow),
    ],
)
def test_a_client_with_keys_counts_exactly_through_restarts(
    place: dict[str, Any], restarts: int, increment_once: Callable[[httpx.Client, str], bool]
) -> None:
    secret, port = made_token(place), free_port()
    counted = 0
    stop = threading.Event()

    def increment() -> None:
        nonlocal counted
        bearer = {"authorization": f"Bearer {secret}"}
        base = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=base, headers=bearer, timeout=60) as client:
            while not stop.is_set():
                try:
                    counted += increment_once(client, f"k{counted}")
                except httpx.TransportError:
                    stop.wait(0.05)

    thread = threading.Thread(target=increment)
    thread.start()
    try:
        for _ in range(restarts):
            before = counted
            with server_process(f"--port={port}", **place) as (process, told):
                assert told is not None
                while counted < before + 15:
                    assert thread.is_alive()
                    stop.wait(0.01)
                process.kill()
                process.wait(60)
        # One more, so that the last request is answered.
        with server_process(f"--port={port}", **place):
            before = counted
            while counted == before:
                assert thread.is_alive()
                stop.wait(0.01)
            stop.set()
            thread.join(60)
    finally:
        stop.set()
        thread.join(60)
    with holdfast.open(**place) as store:
        assert store.find_session("one").state.get("n") == counted


def test_two_servers_on_one_store_behave_as_one(place: dict[str, Any]) -> None:
    secret = made_token(place)
    path = "/sessions/one/state/keys/n"
    with (
        server_process("--port=0", **place) as (_, first),
        server_process("--port=0", **place) as (_, second),
        client_of(first, secret) as one,
        client_of(second, secret) as two,
    ):
        stream = two.stream("GET", "/sessions/one/state/stream?after_sequence=0")

        def increment(client: httpx.Client) -> None:
            for _ in range(10):
                body = {"operation": "increment"}
                assert client.post(f"{path}/ops", json=body).status_code == 200

        threads = [threading.Thread(target=increment, args=(each,)) for each in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [client.get(path).json()["value"] for client in (one, two)] == [20, 20]
        with stream as answer:
            ids = (line for line in answer.iter_lines() if line.startswith("id: "))
            # The first says where the stream begins.
            assert [next(ids) for _ in range(21)] == [f"id: {n}" for n in range(21)]
            one.post(f"{path}/ops", json={"operation": "increment"})
            assert next(ids) == "id: 21"
        late = {"if-match": '"1"', "idempotency-key": "same"}
        assert [c.put(path, json={"value": 0}, headers=late).status_code for c in (one, two)] == [
            409, 409,
        ]  # fmt: skip
        key = {"idempotency-key": "both"}
        body = {"operation": "increment"}
        answers = [c.post(f"{path}/ops", json=body, headers=key) for c in (one, two)]
        assert answers[0].json() == answers[1].json()
        assert answers[1].headers["idempotency-replayed"] == "true"
