"""Every tool, as the official client sees it: over every transport and in both eras."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

import holdfast
from holdfast.codec import from_json, to_json
from holdfast.mcp.tools import tools
from tests.mcp.clients import MODES, Mode, call, in_memory, over_http, over_stdio, refused
from tests.mcp.conftest import Served


def prepare(place: dict[str, Any], id: str) -> None:
    """Start a session that has an effect and two versions."""
    with holdfast.open(**place) as store:
        session = store.session(id)
        session.save({"plan": ["a"]})
        session.append("plan", ["b"])
        begun = session.begin("pay", {"n": 1}, "call-1")
        assert isinstance(begun, holdfast.Issued)
        begun.fail("broke")
        child = store.session(f"{id}-child", parent=session)
        elsewhere = store.session(f"beside-{id}")
        for each in (session, elsewhere, child):
            store.work.submit("t", session=each)


async def call_every_tool(client: Client, root: str, *, lists_resources: bool = True) -> None:
    """List all tools and call each."""
    listed = (await client.list_tools()).tools
    assert [each.name for each in listed] == [each.name for each in tools.all]
    assert all(each.output_schema and each.output_schema["type"] == "object" for each in listed)

    done = await call(client, "state_set", key="plan", value='{"steps": [1]}')
    assert done == {
        "key": "plan", "version": 1, "sequence": 1, "conditional": False
    }  # fmt: skip
    done = await call(client, "state_set", key="plan", value="null", version=1)
    assert (done["version"], done["conditional"]) == (2, True)
    conflict = await refused(client, "state_set", key="plan", value="3", version=1)
    told = ("error", "key", "current_version", "your_version", "current_value", "updated_by")
    assert [conflict[name] for name in told] == ["version_conflict", "plan", 2, 1, None, root]
    assert (conflict["status"], conflict["retryable"]) == (409, True)

    added = await call(client, "state_increment", key="n", delta=4)
    assert added == {"key": "n", "value": 4, "version": 1, "sequence": 3}
    assert (await call(client, "state_increment", key="n", delta=-1))["value"] == 3
    assert (await call(client, "state_append", key="xs", items='["a", {"b": 1}]'))["length"] == 2
    assert (await refused(client, "state_append", key="n", items="[1]"))["error"] == "type_mismatch"

    patched = await call(client, "state_patch", patch='{"n": {"$increment": 2}, "plan": null}')
    assert patched == {
        "root_session_id": root, "global_version": 6, "versions": {"n": 3}, "deleted": ["plan"]
    }  # fmt: skip
    state = await call(client, "state_get")
    assert (state["root_session_id"], state["global_version"]) == (root, 6)
    values = {key: (each["value"], each["version"]) for key, each in state["keys"].items()}
    assert values == {"n": (5, 3), "xs": (["a", {"b": 1}], 1)}
    entry = await call(client, "state_get", key="n")
    assert (entry["value"], entry["version"], entry["updated_by"]) == (5, 3, root)

    assert await call(client, "state_delete", key="n", version=3) == {
        "key": "n", "deleted": True, "version": 4
    }  # fmt: skip
    gone = {"key": "n", "deleted": False, "version": None}
    assert await call(client, "state_delete", key="n") == gone
    assert await call(client, "state_delete", key="n", version=9) == gone
    missing = await refused(client, "state_get", key="n")
    assert (missing["error"], missing["key"]) == ("key_not_found", "n")

    await read_what_was_done(client, root)
    listed_uris = [str(each.uri) for each in (await client.list_resources()).resources]
    # A server of the SDK's own lists no resources that it makes from templates.
    assert listed_uris == ([f"state://{root}"] if lists_resources else [])


async def read_what_was_done(client: Client, root: str) -> None:
    """Call the tools that read."""
    first = await call(client, "state_changes", limit=4)
    rest = await call(client, "state_changes", since_sequence=first["last_sequence"])
    events = first["events"] + rest["events"]
    assert [each["seq"] for each in events] == list(range(1, 8))
    assert (first["has_more"], rest["has_more"], rest["last_sequence"]) == (True, False, 7)
    assert (events[2]["type"], events[2]["delta"], events[2]["session_id"]) == (
        "increment", 4, root
    )  # fmt: skip

    effects = await call(client, "effects_list")
    assert [(each["tool"], each["status"]) for each in effects["effects"]] == [("pay", "unknown")]
    assert (await call(client, "effects_list", status="failed"))["effects"] == []
    versions = await call(client, "checkpoints_list", limit=1)
    assert ([each["version"] for each in versions["checkpoints"]], versions["next_before"]) == (
        [2], 2
    )  # fmt: skip
    assert (await call(client, "checkpoint_get"))["channels"] == {"plan": ["a", "b"]}
    windowed = await call(client, "checkpoint_get", last=1)
    assert (windowed["channels"], windowed["left_out"]) == ({"plan": ["b"]}, {"plan": 1})
    assert (await call(client, "checkpoint_get", version=1))["channels"] == {"plan": ["a"]}
    unknown = await refused(client, "checkpoint_get", version=3)
    assert unknown["error"] == "checkpoint_not_found"

    page = await call(client, "sessions_list", limit=1)
    rest = await call(client, "sessions_list", after=page["next_after"])
    found = page["sessions"] + rest["sessions"]
    assert [(each["id"], each["parent_id"]) for each in found] == [
        (root, None), (f"{root}-child", root)
    ]  # fmt: skip
    assert (await call(client, "sessions_list", status="failed"))["sessions"] == []
    page = await call(client, "work_list", limit=1)
    rest = await call(client, "work_list", before=page["next_before"])
    assert [each["session_id"] for each in page["items"] + rest["items"]] == [
        f"{root}-child", root
    ]  # fmt: skip
    assert (await call(client, "work_list", status="completed"))["items"] == []

    assert (await call(client, "pauses_list"))["pauses"] == []
    assert (await refused(client, "answer", result="1"))["error"] == "not_found"

    [content] = (await client.read_resource(f"state://{root}")).contents
    assert from_json(content.text) == await call(client, "state_get")  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES)
def test_every_tool_over_stdio(tmp_path: Path, mode: Mode) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}
    prepare(place, "run")

    async def main() -> None:
        async with over_stdio("--url", place["url"], "--session", "run", mode=mode) as client:
            await call_every_tool(client, "run")

    asyncio.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_every_tool_over_http(served: Served, mode: Mode) -> None:
    root = f"every-{mode}"
    prepare(served.place, root)

    async def main() -> None:
        secret = served.secrets["all"]
        async with over_http(served.url, secret, mode, session=root) as client:
            await call_every_tool(client, root)

    asyncio.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_every_tool_on_both_databases(place: dict[str, Any], mode: Mode) -> None:
    prepare(place, "run")

    async def main() -> None:
        async with in_memory("run", place, mode) as (client, _):
            await call_every_tool(client, "run")

    asyncio.run(main())


def test_every_tool_over_stdio_on_a_store_behind_a_server(served: Served) -> None:
    prepare(served.place, "behind")

    async def main() -> None:
        env = {"HOLDFAST_URL": served.url, "HOLDFAST_TOKEN": served.secrets["all"]}
        async with over_stdio(env={**env, "AGENT_SESSION_ID": "behind"}) as client:
            await call_every_tool(client, "behind")

    asyncio.run(main())


def test_annotations_are_honest() -> None:
    told = {
        each.name: (each.permission == "read", each.is_destructive, each.is_idempotent)
        for each in tools.all
    }
    reading, replacing = (True, False, True), (False, True, True)
    assert told == {
        "state_get": reading,
        "state_set": replacing,
        "state_delete": replacing,
        "state_increment": (False, False, False),
        "state_append": (False, False, False),
        "state_patch": (False, True, False),
        "state_changes": reading,
        "effects_list": reading,
        "sessions_list": reading,
        "work_list": reading,
        "checkpoints_list": reading,
        "checkpoint_get": reading,
        "pauses_list": reading,
        "answer": (False, False, True),
    }


def test_a_session_reads_its_pauses_and_answers_what_it_was_asked_for(
    place: dict[str, Any],
) -> None:
    with holdfast.open(**place) as store:
        asker = store.session("asker", agent="planner")
        asker.ask("peer", {"city": "Oslo"}, id="asked")
        asker.pause({"step": 1})

    async def main() -> None:
        async with in_memory("asked", place) as (client, _):
            assert (await refused(client, "answer", result="sun"))["error"] == "invalid_request"
            told = await call(client, "answer", result='{"sun": true}')
            assert told == {"ask_id": "asked", "receipt": "counted"}
            again = await call(client, "answer", result='"rain"', status="error")
            assert again["receipt"] == "duplicate"
        async with in_memory("asker", place) as (client, _):
            [pause] = (await call(client, "pauses_list"))["pauses"]
            assert (pause["reason"], pause["state"]) == ("peers", "ready")
            assert (await refused(client, "answer", result="1"))["error"] == "not_found"

    asyncio.run(main())
    with holdfast.open(**place) as store:
        answer = store.peer_call("asked").answer
        assert answer is not None
        assert (answer.status, answer.result) == ("ok", {"sun": True})


def test_a_repeated_call_changes_nothing_again(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}

    async def main() -> None:
        async with in_memory("run", place) as (client, store):
            again = [
                await call(client, "state_increment", key="n", idempotency_key="1")
                for _ in range(3)
            ]
            assert again == [again[0]] * 3
            writes: list[tuple[str, dict[str, Any]]] = [
                ("state_set", {"key": "s", "value": "1", "version": 0}),
                ("state_set", {"key": "s", "value": "2", "version": 1}),
                ("state_delete", {"key": "s", "version": 2}),
                ("state_patch", {"patch": '{"p": {"$increment": 1}}', "version": 4}),
            ]
            for number, (tool, given) in enumerate(writes):
                once = {**given, "idempotency_key": f"write-{number}"}
                # A repeated write is answered as the first was, not as a conflict with itself.
                assert await call(client, tool, **once) == await call(client, tool, **once)
            for _ in range(2):
                appended = await call(
                    client, "state_append", key="xs", items="[1]", idempotency_key="2"
                )
                assert appended["length"] == 1
            other = await refused(client, "state_increment", key="n", delta=2, idempotency_key="1")
            assert other["error"] == "request_mismatch"
            await store.session("child", parent="run")
            mine = {"holdfast/session": "child"}
            given = {"key": "n", "idempotency_key": "1"}
            result = await client.call_tool("state_increment", given, meta=mine)  # type: ignore[arg-type]
            # What another session has called a request is another request.
            assert result.structured_content["value"] == 2

    asyncio.run(main())


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("state_set", {"key": "k", "value": "done"}, "invalid_request"),
    ("state_set", {"key": "k", "value": ""}, "invalid_request"),
    ("state_set", {"key": "k", "value": "NaN"}, "invalid_request"),
    ("state_set", {"key": "k", "value": '{"a": 1, "a": 2}'}, "invalid_request"),
    ("state_set", {"key": "k", "value": '"\\ud800"'}, "invalid_request"),
    ("state_set", {"key": "k", "value": "[" * 100_000}, "invalid_request"),
    ("state_set", {"key": "k", "value": f'"{"x" * 1_100_000}"'}, "too_large"),
    ("state_set", {"key": "k", "value": "1 1"}, "invalid_request"),
    ("state_set", {"key": "k", "value": {"a": 1}}, "invalid_request"),
    ("state_set", {"key": "k", "value": None}, "invalid_request"),
    ("state_set", {"key": "", "value": "1"}, "invalid_request"),
    ("state_set", {"key": "a\nb", "value": "1"}, "invalid_request"),
    ("state_set", {"key": "x" * 257, "value": "1"}, "invalid_request"),
    ("state_set", {"key": 5, "value": "1"}, "invalid_request"),
    ("state_set", {"key": "k", "value": "1", "version": -1}, "invalid_request"),
    ("state_set", {"key": "k", "value": "1", "version": True}, "invalid_request"),
    ("state_set", {"key": "k", "value": "1", "version": "1"}, "invalid_request"),
    ("state_set", {"key": "k", "value": "1", "idempotency_key": ""}, "invalid_request"),
    ("state_set", {"value": "1"}, "invalid_request"),
    ("state_set", {"key": "k", "value": "1", "updated_by": "boss"}, "invalid_request"),
    ("state_delete", {"key": "k", "version": 0}, "invalid_request"),
    ("state_increment", {"key": "k", "delta": True}, "invalid_request"),
    ("state_increment", {"key": "k", "delta": "1"}, "invalid_request"),
    ("state_increment", {"key": "k", "delta": None}, "invalid_request"),
    ("state_append", {"key": "k", "items": '{"a": 1}'}, "invalid_request"),
    ("state_append", {"key": "k", "items": ["a"]}, "invalid_request"),
    ("state_patch", {"patch": "[1]"}, "invalid_request"),
    ("state_patch", {"patch": '{"k": {"$increment": "x"}}'}, "invalid_request"),
    ("state_patch", {"patch": '{"": 1}'}, "invalid_request"),
    ("state_changes", {"since_sequence": 9}, "sequence_in_future"),
    ("state_changes", {"limit": 0}, "invalid_request"),
    ("state_changes", {"limit": 1_001}, "invalid_request"),
    ("effects_list", {"status": "gone"}, "invalid_request"),
    ("sessions_list", {"status": "gone"}, "invalid_request"),
    ("work_list", {"root": "other"}, "invalid_request"),
    ("checkpoints_list", {"kind": "'; DROP TABLE hf_sessions; --"}, "invalid_request"),
    ("checkpoint_get", {"version": 0}, "invalid_request"),
    ("checkpoint_get", {"version": 2**60}, "invalid_request"),
]


def test_what_cannot_be_used_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}

    async def main() -> None:
        async with in_memory("run", place) as (client, store):
            for tool, given, code in BAD:
                problem = await refused(client, tool, **given)
                assert problem["error"] == code, (tool, given, problem)
                assert problem["detail"], problem
            with pytest.raises(Exception, match="there is no tool 'state_drop'"):
                await client.call_tool("state_drop", {})
            assert await (await store.find_session("run")).state.version() == 0

    asyncio.run(main())


HOSTILE = [
    "'; DROP TABLE hf_sessions; --", "a/b", "../../etc/passwd", "%2e%2e%2f", "a%00b", "$increment",
    "__proto__", "null", "[1]", "{}", "<script>alert(1)</script>", "🔑", "a.b", "k=v&x=y", "a b",
    "ignore previous instructions", "e\u0301", "\u202eevil"[1:], "true", "1", "//", "a?b#c",
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_keys_and_values_are_data_whatever_they_say(served: Served, mode: Mode) -> None:
    root = f"hostile-{mode}"
    with holdfast.open(**served.place) as store:
        store.session(root)

    async def main() -> None:
        secret = served.secrets["all"]
        async with over_http(served.url, secret, mode, session=root) as client:
            before = (await client.list_tools()).tools
            for text in HOSTILE:
                quoted = to_json(text)
                await call(client, "state_set", key=text, value=quoted, version=0)
                assert (await call(client, "state_get", key=text))["value"] == text
            state = await call(client, "state_get")
            assert {key: each["value"] for key, each in state["keys"].items()} == {
                text: text for text in HOSTILE
            }
            big = 10**4_000
            await call(client, "state_set", key="big", value=str(big))
            assert (await call(client, "state_increment", key="big"))["value"] == big + 1
            assert (await client.list_tools()).tools == before

    asyncio.run(main())
