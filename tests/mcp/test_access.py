"""Who may do what over MCP: sessions, trees, tokens, names of the server and origins of pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError

import holdfast
from holdfast.mcp.tools import tools
from holdfast.server import mcp as mounted
from holdfast.server.options import Options, ServerLimits
from tests.mcp.clients import MODES, Mode, call, in_memory, over_http, refused
from tests.mcp.conftest import Served
from tests.server.live import Live, live
from tests.server.serving import error, serving
from tests.server.test_access import HOSTS, ORIGINS

ARGUMENTS: dict[str, dict[str, Any]] = {
    "state_set": {"key": "forged", "value": "1"},
    "state_delete": {"key": "k"},
    "state_increment": {"key": "forged"},
    "state_append": {"key": "forged", "items": "[1]"},
    "state_patch": {"patch": '{"forged": 1}'},
    "answer": {"result": "1"},
}
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
ACCEPT = {"accept": "application/json, text/event-stream"}


def post(server: Live, secret: str | None, body: Any = LIST, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    authorization = "" if secret is None else f"Bearer {secret}"
    sent = ACCEPT | {"authorization": authorization} | named
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    return server.client.post("/mcp", headers=sent, **given)


def keys_of(served: Served, root: str) -> list[str]:
    with holdfast.open(**served.place) as store:
        return store.find_session(root).state.keys()


@pytest.mark.parametrize("mode", MODES)
def test_a_tree_token_reaches_its_tree_and_nothing_else(served: Served, mode: Mode) -> None:
    before = keys_of(served, "theirs")

    async def main() -> None:
        async with over_http(served.url, served.secrets["writer"], mode) as client:
            for session in ("theirs", "theirs-child", "never-was", "min", "../theirs", "mine\0"):
                for tool in tools.all:
                    given = ARGUMENTS.get(tool.name, {})
                    problem = await refused(client, tool.name, session=session, **given)
                    assert problem["error"] in {"session_not_found", "invalid_request"}
                    assert "theirs" not in json.dumps(problem).replace(session, "")
            for name in ("root", "root_id", "root_session_id", "parent", "actor", "namespace"):
                problem = await refused(client, "state_get", **{name: "theirs"})
                assert problem["error"] == "invalid_request"
            for uri in ("state://theirs", "state://theirs/k", "state://never-was", "state://mine/no",
                        "file:///etc/passwd", "state://", "state:///mine", "state://MINE",
                        "state://mine%2Fk", "state://%ff"):  # fmt: skip
                with pytest.raises(MCPError) as raised:
                    await client.read_resource(uri)
                assert raised.value.error.code == -32602
            assert (await call(client, "state_get", key="k", session="mine-child"))["value"] == 1

    asyncio.run(main())
    assert keys_of(served, "theirs") == before == ["k"]


def test_whom_a_call_acts_for_is_told_and_can_only_be_narrowed(served: Served) -> None:
    async def acted(
        token: str, header: str | None, meta: str | None, argument: str | None
    ) -> tuple[str, str] | str:
        async with over_http(served.url, served.secrets[token], session=header) as client:
            given = {} if argument is None else {"session": argument}
            named: Any = None if meta is None else {"holdfast/session": meta}
            result = await client.call_tool("state_get", given, meta=named)
            if result.is_error:
                return str(result.structured_content["error"])
            assert result.meta is not None
            return result.meta["holdfast/session"], result.meta["holdfast/session-source"]

    async def main() -> None:
        assert await acted("writer", None, None, None) == ("mine", "token")
        assert await acted("writer", None, None, "mine-child") == ("mine-child", "argument")
        assert await acted("writer", "mine-child", None, None) == ("mine-child", "header")
        assert await acted("writer", None, "mine-child", None) == ("mine-child", "metadata")
        assert await acted("writer", "mine-child", "mine-child", "mine-child") == (
            "mine-child", "metadata"
        )  # fmt: skip
        assert await acted("writer", "mine-child", None, "mine") == "forbidden"
        assert await acted("writer", "mine-child", "mine", None) == "invalid_request"
        assert await acted("writer", "theirs", None, None) == "session_not_found"
        assert await acted("writer", None, "theirs", None) == "session_not_found"
        assert await acted("all", None, None, None) == "invalid_request"
        async with over_http(served.url, served.secrets["all"]) as client:
            assert (await client.list_resources()).resources == []
        async with over_http(served.url, served.secrets["writer"], session="theirs") as client:
            with pytest.raises(MCPError, match="there is no session 'theirs'"):
                await client.list_resources()
        assert await acted("all", None, None, "theirs") == ("theirs", "argument")
        assert await acted("all", "theirs", None, None) == ("theirs", "header")

    asyncio.run(main())


def test_what_is_written_names_the_session_that_acted(served: Served) -> None:
    async def main() -> None:
        secret = served.secrets["writer"]
        async with over_http(served.url, secret, session="mine-child") as client:
            await call(client, "state_set", key="by-child", value="1")
            entry = await call(client, "state_get", key="by-child")
            assert entry["updated_by"] == "mine-child"
            await call(client, "state_delete", key="by-child")

    asyncio.run(main())


def test_a_bound_connection_acts_for_its_session_within_its_tree(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}

    async def main() -> None:
        async with in_memory("one", place) as (client, store):
            await store.session("child", parent="one")
            await store.session("two-and-more")
            for session in ("child", "two-and-more", "never-was", "1"):
                problem = await refused(client, "state_get", session=session)
                assert problem["error"] == "forbidden"
            assert (await call(client, "state_get", session="one"))["root_session_id"] == "one"
            for named, code in (("child", None), ("two-and-more", "session_not_found"),
                                ("two-and-", "session_not_found"), ("1", "session_not_found"),
                                ("never-was", "session_not_found")):  # fmt: skip
                meta: Any = {"holdfast/session": named}
                result = await client.call_tool("state_get", {}, meta=meta)
                assert (result.structured_content or {}).get("error") == code, named

    asyncio.run(main())


def test_a_token_does_no_more_than_it_is_for(served: Served) -> None:
    writing = [each.name for each in tools.all if each.permission == "write"]
    assert writing == list(ARGUMENTS)

    async def main() -> None:
        async with over_http(served.url, served.secrets["reader"]) as client:
            for name in writing:
                assert (await refused(client, name, **ARGUMENTS[name]))["error"] == "forbidden"
            assert (await call(client, "state_get", key="k"))["value"] == 1

    asyncio.run(main())
    assert keys_of(served, "mine") == ["k"]


def test_a_read_only_server_only_reads(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one").state.set("k", 1)
        secret = store.tokens.create("writer", permission="write", session="one").secret

    async def main(url: str) -> None:
        async with over_http(url, secret) as client:
            for name, given in ARGUMENTS.items():
                assert (await refused(client, name, **given))["error"] == "read_only"
            assert (await call(client, "state_get", key="k"))["value"] == 1

    with live(Options(is_read_only=True), **place) as server:
        asyncio.run(main(server.url))


def test_the_gate_is_that_of_every_route(served: Served) -> None:
    server, secret = served.server, served.secrets["writer"]
    assert post(server, secret).status_code == 200
    for wrong in (None, "hf_wrong", f"{secret}x"):
        answer = post(server, wrong)
        assert (answer.status_code, answer.json()["error"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
    for host, status in HOSTS.items():
        if host:
            assert post(server, secret, host=host).status_code == status, host
    for origin, status in ORIGINS.items():
        if origin.startswith(("http://localhost", "https://app")) and status == 200:
            continue
        answer = post(server, secret, origin=origin)
        assert (answer.status_code, answer.json()["error"]) == (403, "foreign_origin"), origin
    own = server.url
    assert post(server, secret, origin=own).status_code == 200
    for method in ("GET", "DELETE", "PUT"):
        answer = server.client.request(
            method, "/mcp", headers={"authorization": f"Bearer {secret}"}
        )
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    metrics = server.client.get("/metrics").text
    assert 'holdfast_requests_total{method="POST",route="/mcp",status="200"}' in metrics


def test_requests_that_are_none_are_answered_without_harm(served: Served) -> None:
    server, secret = served.server, served.secrets["writer"]
    deep = b"[" * 100_000
    modern = {"mcp_protocol_version": "2026-07-28"}
    for body in (b"", b"{", b"null", b"[]", b"1", deep, b"\xff", b'{"jsonrpc": "2.0"}',
                 b'{"jsonrpc": "2.0", "id": 1, "method": "no/such"}',
                 b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 1}}',
                 b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": []}',
                 b'[{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}]'):  # fmt: skip
        for era in ({}, modern):
            answer = post(server, secret, body, content_type="application/json", **era)
            assert answer.status_code in {200, 202, 400, 404, 422}, (body[:80], answer.text)
    form = post(server, secret, b"a=b", content_type="application/x-www-form-urlencoded")
    assert (form.status_code, form.json()["error"]) == (415, "unsupported_media_type")
    large = post(server, secret, b" " * 4_200_000, content_type="application/json")
    assert (large.status_code, large.json()["error"]) == (413, "too_large")
    assert post(server, secret).status_code == 200


def test_refusals_are_in_the_audit_trail(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
        secret = store.tokens.create("reader", permission="read", session="one").secret

    async def main(url: str) -> None:
        async with over_http(url, secret) as client:
            await refused(client, "state_increment", key="n")

    with live(**place) as server:
        asyncio.run(main(server.url))
    with holdfast.open(**place) as store:
        assert "forbidden" in [each.reason for each in store.audit.list()]


def test_a_token_that_ends_ends_its_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted, "TICK_SECONDS", 0.05)
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
        made = store.tokens.create("soon", permission="read", session="one")

    async def main(url: str) -> None:
        async with (
            asyncio.timeout(60),
            over_http(url, made.secret) as client,
            client.listen(resource_subscriptions=["state://one"]) as listening,
        ):
            with holdfast.open(**place) as store:
                store.tokens.revoke(made.id)
            with pytest.raises(SubscriptionLost):
                await anext(aiter(listening))

    with live(**place) as server:
        asyncio.run(main(server.url))


def test_a_token_listens_only_so_often(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
        secret = store.tokens.create("t", session="one").secret

    async def main(url: str) -> None:
        uris = ["state://one"]
        async with asyncio.timeout(60), over_http(url, secret) as client:
            async with client.listen(resource_subscriptions=uris):
                with pytest.raises(MCPError):
                    async with client.listen(resource_subscriptions=uris):
                        pass
                await call(client, "state_get")
            while True:
                # The server may learn a little later that the first has gone.
                with contextlib.suppress(MCPError):
                    async with client.listen(resource_subscriptions=uris):
                        return

    with live(Options(limits=ServerLimits(streams_per_token=1)), **place) as server:
        asyncio.run(main(server.url))


def test_a_session_must_be_named_as_one_text(served: Served) -> None:
    server, secret = served.server, served.secrets["writer"]
    params: dict[str, Any] = {"name": "state_get", "arguments": {}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    for wrong in (1, None, ["mine"], {"id": "mine"}, ""):
        params["_meta"] = {"holdfast/session": wrong}
        problem = post(server, secret, body).json()["result"]["structuredContent"]
        assert problem["error"] in {"invalid_request", "session_not_found"}, wrong
    del params["_meta"]
    authorization = ("authorization", f"Bearer {secret}")
    twice = [("x-agent-session-id", "mine"), ("x-agent-session-id", "mine-child"), authorization]
    answer = server.client.post("/mcp", json=body, headers=[*ACCEPT.items(), *twice])
    assert answer.json()["result"]["structuredContent"]["error"] == "invalid_request"


def test_without_the_extra_the_server_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.streamable_http_manager", None)
    with serving(url=f"sqlite:///{tmp_path}/store.db") as served:
        for _ in range(2):
            answer = served.post("/mcp", json=LIST, headers=ACCEPT)
            assert error(answer) == (501, "not_installed")
            assert "pip install 'holdfast-agents[mcp]'" in answer.json()["detail"]
        assert served.get("/limits").status_code == 200
