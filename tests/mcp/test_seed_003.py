"""The MCP tools and examples of the design document for shared state, in its order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

import holdfast
from holdfast.mcp.tools import tools
from tests.mcp.clients import call, in_memory, refused

Case = Callable[[Client], Awaitable[None]]
SCHEMAS = {each.name: each.input_schema for each in tools.all}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Case], None]:
    """Runs a case as a child of a root, as the document's agents are."""
    url = f"sqlite:///{tmp_path}/store.db"
    with holdfast.open(url) as store:
        store.session("child_session_xyz", parent=store.session("sess_abc123"))

    def running(case: Case) -> None:
        async def main() -> None:
            async with in_memory("child_session_xyz", {"url": url}) as (client, _):
                await case(client)

        asyncio.run(main())

    return running


def parameters(name: str) -> dict[str, Any]:
    """Return the parameters of a tool that every caller must know: type and default."""
    schema = SCHEMAS[name]
    return {
        each: (about.get("type") or [one["type"] for one in about["anyOf"]], about.get("default"))
        for each, about in schema["properties"].items()
        if each not in {"session", "idempotency_key"}
    }


OPTIONAL_TEXT, OPTIONAL_NUMBER = ["string", "null"], ["integer", "null"]


def test_appendix_c_signatures() -> None:
    assert parameters("state_get") == {"key": (OPTIONAL_TEXT, None)}
    assert parameters("state_set") == {
        "key": ("string", None), "value": ("string", None), "version": (OPTIONAL_NUMBER, None)
    }  # fmt: skip
    assert parameters("state_delete") == {
        "key": ("string", None), "version": (OPTIONAL_NUMBER, None)
    }  # fmt: skip
    assert parameters("state_increment") == {
        "key": ("string", None), "delta": (["integer", "number"], 1)
    }  # fmt: skip
    assert parameters("state_append") == {"key": ("string", None), "items": ("string", None)}
    assert "patch" in parameters("state_patch")
    needed = {name: schema.get("required", []) for name, schema in SCHEMAS.items()}
    assert needed["state_set"] == ["key", "value"]
    assert needed["state_append"] == ["key", "items"]
    assert needed["state_delete"] == needed["state_increment"] == ["key"]


def test_state_get_of_a_key_returns_its_value_and_version(run: Callable[[Case], None]) -> None:
    async def case(client: Client) -> None:
        for value in ("10", "30", "50"):
            await call(client, "state_set", key="progress", value=value)
        found = await call(client, "state_get", key="progress")
        assert {name: found[name] for name in ("value", "version")} == {"value": 50, "version": 3}

    run(case)


def test_state_get_without_a_key_returns_all_state(run: Callable[[Case], None]) -> None:
    async def case(client: Client) -> None:
        given = {"tasks_completed": 3, "findings": ["f1", "f2"], "config": {"mode": "parallel"}}
        await call(client, "state_patch", patch=json.dumps(given))
        found = await call(client, "state_get")
        assert found["root_session_id"] == "sess_abc123"
        assert {key: each["value"] for key, each in found["keys"].items()} == given
        assert found["global_version"] == 1

    run(case)


def test_state_set_returns_the_new_version_and_conflicts_on_a_mismatch(
    run: Callable[[Case], None],
) -> None:
    async def case(client: Client) -> None:
        assert (await call(client, "state_set", key="tasks_completed", value="3"))["version"] == 1
        again = await call(client, "state_set", key="tasks_completed", value="4", version=1)
        assert again["version"] == 2
        late = await refused(client, "state_set", key="tasks_completed", value="9", version=1)
        told = {
            name: late[name]
            for name in ("error", "key", "current_version", "your_version", "current_value")
        }
        assert told == {
            "error": "version_conflict",
            "key": "tasks_completed",
            "current_version": 2,
            "your_version": 1,
            "current_value": 4,
        }

    run(case)


def test_state_delete_takes_an_optional_version(run: Callable[[Case], None]) -> None:
    async def case(client: Client) -> None:
        await call(client, "state_set", key="temp_key", value="1")
        late = await refused(client, "state_delete", key="temp_key", version=5)
        assert late["error"] == "version_conflict"
        assert (await call(client, "state_delete", key="temp_key", version=1))["deleted"]
        await call(client, "state_set", key="temp_key", value="1")
        assert (await call(client, "state_delete", key="temp_key"))["deleted"]

    run(case)


def test_state_increment_creates_a_key_and_takes_a_negative_delta(
    run: Callable[[Case], None],
) -> None:
    async def case(client: Client) -> None:
        assert (await call(client, "state_increment", key="n", delta=5))["value"] == 5
        assert (await call(client, "state_increment", key="n"))["value"] == 6
        assert (await call(client, "state_increment", key="n", delta=-7))["value"] == -1

    run(case)


def test_state_append_returns_the_new_length(run: Callable[[Case], None]) -> None:
    async def case(client: Client) -> None:
        assert (await call(client, "state_append", key="findings", items='["f1"]'))["length"] == 1
        more = await call(client, "state_append", key="findings", items='["f2", {"n": 3}]')
        assert more["length"] == 3
        await call(client, "state_set", key="config", value="{}")
        wrong = await refused(client, "state_append", key="config", items='["f1"]')
        assert wrong["error"] == "type_mismatch"

    run(case)


def test_state_patch_merges_a_json_object(run: Callable[[Case], None]) -> None:
    async def case(client: Client) -> None:
        await call(client, "state_patch", patch='{"config": {"mode": "parallel"}, "findings": []}')
        operators = (
            '{"findings": {"$append": ["new_finding"]}, "counters.processed": {"$increment": 1}}'
        )
        await call(client, "state_patch", patch=operators)
        await call(client, "state_patch", patch='{"config": {"depth": 2}}')
        found = await call(client, "state_get")
        assert {key: each["value"] for key, each in found["keys"].items()} == {
            "config": {"mode": "parallel", "depth": 2},
            "findings": ["new_finding"],
            "counters.processed": 1,
        }

    run(case)


def test_three_children_in_parallel_lose_nothing(run: Callable[[Case], None]) -> None:
    async def case(client: Client) -> None:
        calls = [call(client, "state_increment", key="progress", delta=n) for n in (10, 20, 30)]
        calls += [call(client, "state_append", key="done", items=f'["{n}"]') for n in "ABC"]
        await asyncio.gather(*calls)
        assert (await call(client, "state_get", key="progress"))["value"] == 60
        assert sorted((await call(client, "state_get", key="done"))["value"]) == ["A", "B", "C"]

    run(case)
