"""`holdfast mcp` as a process: how it starts, what it prints, and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

import holdfast
from holdfast.cli.app import run as command_line
from holdfast.mcp.bound import BoundReach, bound_claim, bound_reach
from holdfast.mcp.caller import Claim
from tests.mcp.clients import call, over_stdio, stdio_parameters

CHATTER = """
import os, subprocess, sys, threading, time
def chatter():
    while not os.path.sameopenfile(1, 2):
        time.sleep(0.01)
    print("stray", flush=True)
    os.write(1, b"raw\\n")
    subprocess.run(["echo", "child"])
threading.Thread(target=chatter, daemon=True).start()
"""


def run(*options: str, cwd: Path, code: str | None = None, **env: str) -> Any:
    """Run `holdfast mcp` with nothing to read."""
    given = stdio_parameters(*options, code=code, env=env)
    return subprocess.run(
        [given.command, *given.args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=given.env,
        cwd=cwd,
        check=False,
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a new store."""
    url = f"sqlite:///{tmp_path}/store.db"
    holdfast.open(url).close()
    return url


class Raw:
    """A server that is spoken to line by line, so that it can be killed."""

    def __init__(self, url: str) -> None:
        given = stdio_parameters("--url", url, "--session", "run")
        self.process = subprocess.Popen(
            [given.command, *given.args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=given.env,
        )
        info = {"clientInfo": {"name": "raw", "version": "1"}, "capabilities": {}}
        self.ask("initialize", {"protocolVersion": "2025-11-25", **info})
        self.tell({"method": "notifications/initialized"})

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        self.tell({"id": 1, "method": method, "params": params})
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())["result"]

    def increment(self) -> Any:
        given = {"name": "state_increment", "arguments": {"key": "n"}}
        return self.ask("tools/call", given)["structuredContent"]["value"]

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_answered_survives_a_kill(url: str, number: signal.Signals) -> None:
    with Raw(url) as server:
        assert [server.increment() for _ in range(5)] == [1, 2, 3, 4, 5]
        # It ends at once, although its input is still open.
        server.process.send_signal(number)
        assert server.process.wait(60) == -number
    with holdfast.open(url) as store:
        assert store.find_session("run").state.get("n") == 5


def test_what_is_printed_by_mistake_cannot_break_the_stream(tmp_path: Path, url: str) -> None:
    async def main() -> None:
        options = ("--url", url, "--session", "run")
        with (tmp_path / "errors").open("w+") as errors:
            async with over_stdio(*options, code=CHATTER, errors=errors) as client:
                called = 0
                async with asyncio.timeout(60):
                    while "child" not in (tmp_path / "errors").read_text() or not called:
                        called += 1
                        counted = await call(client, "state_increment", key="n")
                        assert counted["value"] == called
        printed = (tmp_path / "errors").read_text()
        assert printed.split() == ["stray", "raw", "child"]

    asyncio.run(main())


def test_it_ends_with_its_input_and_prints_nothing(tmp_path: Path, url: str) -> None:
    done = run("--url", url, "--session", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("option", ["--session", "AGENT_SESSION_ID"])
def test_a_mistyped_url_is_no_new_store(
    new_place: dict[str, Any],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AGENT_SESSION_ID", "run")
    place = [text for name, value in new_place.items() for text in (f"--{name}", value)]
    named = [option, "run"] if option.startswith("--") else []
    assert command_line(["mcp", *place, *named]) == holdfast.NotFound.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Error: there is no store in ")
    assert "or create one here with `holdfast migrate --url " in printed.err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(holdfast.NotFound):
        holdfast.open(**new_place, migrate=False)


def test_what_cannot_be_served_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGENT_SESSION_ID", raising=False)
    for options, problem in (
        ([], "no session to act for"),
        (["--session", "a\nb"], "--session must be text"),
        (["--session", "x" * 300], "--session must be text"),
        (["--config"], "--session ID is required"),
    ):
        assert command_line(["mcp", *options]) != 0
        printed = capsys.readouterr()
        assert (problem in printed.err, printed.out) == (True, "")
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_an_existing_session_of_its_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        child = store.session("child", parent=store.session("one"))
        store.session("two")
        given = child.environment()
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    async def bound() -> BoundReach:
        async with holdfast.aopen() as store:
            return await bound_reach(store, bound_claim(None))

    reach = asyncio.run(bound())
    assert (reach.session.id, reach.session.root_id, reach.source) == (
        "child", "one", "environment"
    )  # fmt: skip
    monkeypatch.setenv("AGENT_ROOT_SESSION_ID", "two")
    with pytest.raises(holdfast.Forbidden, match="'two' is not the root of session 'child'"):
        asyncio.run(bound())
    monkeypatch.setenv("AGENT_SESSION_ID", "never-was")
    with pytest.raises(holdfast.SessionNotFound, match="names no session: 'never-was'"):
        asyncio.run(bound())


def test_a_session_is_named_whole(tmp_path: Path) -> None:
    async def bound(id: str) -> str:
        async with holdfast.aopen(f"sqlite:///{tmp_path}/store.db") as store:
            return (await bound_reach(store, Claim("option", id))).session.id

    for id in ("agent-number-1", "agent-number", "1", "agent-number-1"):
        assert asyncio.run(bound(id)) == id


def test_the_configuration_can_be_used_as_it_is_printed(tmp_path: Path) -> None:
    printed = run("--config", "--url", "sqlite:///store.db", "--session", "run", cwd=tmp_path)
    server = json.loads(printed.stdout)["mcpServers"]["holdfast"]
    assert not (tmp_path / "store.db").exists()
    holdfast.open(f"sqlite:///{tmp_path}/store.db").close()

    async def main() -> None:
        async with Client(StdioServerParameters(**server)) as client:
            await call(client, "state_set", key="k", value="1")

    asyncio.run(main())
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        assert store.find_session("run").state.get("k") == 1


def test_the_configuration_has_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(url: str) -> str:
        assert command_line(["mcp", "--config", "--url", url, "--session", "run"]) == 0
        return capsys.readouterr().out

    assert json.loads(printed("https://state.example/"))["mcpServers"]["holdfast"] == {
        "type": "http",
        "url": "https://state.example/mcp",
        "headers": {"Authorization": "Bearer ${HOLDFAST_TOKEN}", "X-Agent-Session-Id": "run"},
    }
    with_password = printed("postgresql://me:secret@localhost/db")
    assert "secret" not in with_password
    assert "me:***@localhost" in with_password


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    missing = "import sys; sys.modules['mcp'] = None"
    done = run("--session", "run", cwd=tmp_path, code=missing)
    assert done.returncode != 0
    assert "pip install 'holdfast-agents[mcp]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_does_not_load_the_sdk() -> None:
    code = "import sys, holdfast.mcp, holdfast.server.app; print('mcp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
