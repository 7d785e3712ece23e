"""The tools on a server that somebody else has made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.server import MCPServer
from mcp.shared.exceptions import MCPError

import holdfast
from holdfast.mcp import register_tools
from tests.mcp.clients import MODES, Mode, call, refused
from tests.mcp.test_tools import call_every_tool, prepare


def server_of(url: str, session: str | None) -> MCPServer[Any]:
    """Return a server with a tool of its own, whose life a store shares."""

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[dict[str, Any]]:
        async with holdfast.aopen(url) as store:
            yield {"store": store}

    server: MCPServer[Any] = MCPServer("mine", log_level="WARNING", lifespan=lifespan)

    @server.tool()
    def greet(name: str) -> str:
        """Greet somebody."""
        return f"hello {name}"

    register_tools(server, lambda request: request.lifespan_context["store"], session=session)
    return server


@pytest.mark.parametrize("mode", MODES)
def test_all_tools_work_beside_those_of_the_server(tmp_path: Path, mode: Mode) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    prepare({"url": url}, "run")
    server = server_of(url, "run")

    async def main() -> None:
        async with Client(server, mode=mode) as client:
            greeted = await client.call_tool("greet", {"name": "you"})
            assert greeted.structured_content == {"result": "hello you"}
            server.remove_tool("greet")
            await call_every_tool(client, "run", lists_resources=False)
            for key in ("null", "[1]", '{"a": 1}', "true", "a/../b"):
                await call(client, "state_set", key=key, value='"text"')
                assert (await call(client, "state_get", key=key))["value"] == "text"
            for given in ({"root": "other"}, {"session": "other"}, {"key": ["k"]}, {"key": 1}):
                problem = await refused(client, "state_get", **given)
                assert problem["error"] in {"invalid_request", "forbidden"}
            for uri in ("state://other", "state://run/never"):
                with pytest.raises(MCPError):
                    await client.read_resource(uri)
            assert (await client.read_resource("state://run/null")).contents

    asyncio.run(main())


def test_an_open_store_can_be_given(tmp_path: Path) -> None:
    async def main() -> None:
        async with holdfast.aopen(f"sqlite:///{tmp_path}/store.db") as store:
            server: MCPServer[Any] = MCPServer("mine", log_level="WARNING")
            register_tools(server, store, session="run")
            async with Client(server) as client:
                await call(client, "state_set", key="k", value="1")
            assert await (await store.find_session("run")).state.get("k") == 1

    asyncio.run(main())


def test_a_store_of_the_wrong_kind_is_refused_at_once(tmp_path: Path) -> None:
    server: MCPServer[Any] = MCPServer("mine", log_level="WARNING")
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        for wrong in (store, "sqlite:///agents.db", None):
            with pytest.raises(holdfast.InvalidArgument, match="store must be an AsyncStore"):
                register_tools(server, wrong)  # type: ignore[arg-type]


def test_a_session_that_cannot_be_found_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.delenv("AGENT_SESSION_ID", raising=False)

    async def main() -> None:
        server = server_of(url, None)
        async with Client(server) as client:
            problem = await refused(client, "state_get")
            assert "AGENT_SESSION_ID" in problem["detail"]
            monkeypatch.setenv("AGENT_SESSION_ID", "later")
            assert (await refused(client, "state_get"))["error"] == "session_not_found"
            with holdfast.open(url) as store:
                store.session("later")
            assert (await call(client, "state_get"))["root_session_id"] == "later"
        async with Client(server) as client:
            # The store of before is closed.
            assert (await call(client, "state_get"))["root_session_id"] == "later"

    asyncio.run(main())
