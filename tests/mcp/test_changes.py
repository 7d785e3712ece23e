"""Changes of shared state for those who listen, whoever made them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourceUpdated

import holdfast
from holdfast.mcp.changes import Changes
from holdfast.server.options import Options
from holdfast.server.serve import Address, Serving
from tests.mcp.clients import call, in_memory, over_http, over_stdio
from tests.mcp.conftest import Served


async def told(listening: Any, count: int) -> list[str]:
    async with asyncio.timeout(60):
        events = [await anext(listening) for _ in range(count)]
    assert all(isinstance(each, ResourceUpdated) for each in events)
    return [each.uri for each in events]


def test_two_clients_under_one_root_share_state_and_see_each_others_changes(
    served: Served,
) -> None:
    with holdfast.open(**served.place) as store:
        for child in ("left", "right"):
            store.session(child, parent=store.session("shared"))

    async def main() -> None:
        secret = served.secrets["all"]
        env = {"AGENT_SESSION_ID": "right", "HOLDFAST_URL": served.place["url"]}
        async with (
            over_http(served.url, secret, session="left") as left,
            over_stdio(env=env) as right,  # Its session is that of the environment.
            left.listen(resource_subscriptions=["state://shared/a/b c"]) as at_left,
            right.listen(resource_subscriptions=["state://shared"]) as at_right,
        ):
            # The name of a key is written in one way, which is told.
            assert at_left.honored.resource_subscriptions == ["state://shared/a/b%20c"]
            lefts, rights = aiter(at_left), aiter(at_right)
            await call(right, "state_set", key="a/b c", value="1")
            assert await told(lefts, 1) == ["state://shared/a/b%20c"]
            assert await told(rights, 1) == ["state://shared"]
            seen = await call(left, "state_get", key="a/b c")
            assert (seen["value"], seen["updated_by"]) == (1, "right")
            await call(left, "state_increment", key="unheard")
            await call(left, "state_set", key="a/b c", value="2", version=seen["version"])
            assert await told(lefts, 1) == ["state://shared/a/b%20c"]
            await call(right, "state_patch", patch='{"a/b c": null, "x": 1}')
            assert await told(lefts, 1) == ["state://shared/a/b%20c"]
            assert await told(rights, 1) == ["state://shared"]
            changes = await call(left, "state_changes")
            assert [each["session_id"] for each in changes["events"]] == [
                "right", "left", "left", "right"
            ]  # fmt: skip

    asyncio.run(main())


def test_writes_of_other_processes_are_told_on_both_databases(place: dict[str, Any]) -> None:
    async def main() -> None:
        async with (
            in_memory("run", place) as (client, _),
            client.listen(resource_subscriptions=["state://run/n"]) as listening,
        ):
            with holdfast.open(**place) as store:
                store.find_session("run").state.increment("n")
            assert await told(aiter(listening), 1) == ["state://run/n"]

    asyncio.run(main())


def test_each_change_after_the_beginning_is_told(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}

    async def main() -> None:
        uris = ["state://run/old", "state://run/new"]
        async with in_memory("run", place) as (client, store):
            state = (await store.find_session("run")).state
            await state.set("old", 1)
            async with client.listen(resource_subscriptions=uris) as listening:
                events = aiter(listening)
                for _ in range(5):
                    await asyncio.gather(*(state.increment("new") for _ in range(10)))
                    assert await told(events, 1) == ["state://run/new"]
                    # Those that came while the others were told may have been told apart.
                    await state.set("old", 2)
                    while await told(events, 1) != ["state://run/old"]:
                        pass

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
def test_older_clients_subscribe(place: dict[str, Any]) -> None:
    told_uris: asyncio.Queue[str] = asyncio.Queue()

    async def on_message(message: Any) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            told_uris.put_nowait(message.params.uri)

    async def main() -> None:
        async with in_memory("run", place, "legacy", on_message) as (client, store):
            session: Any = client.session
            state = (await store.find_session("run")).state
            for uri in ("state://run/a b", "state://run"):
                await session.subscribe_resource(uri)
            await state.set("a b", 1)
            async with asyncio.timeout(60):
                assert {await told_uris.get(), await told_uris.get()} == {
                    "state://run", "state://run/a%20b"
                }  # fmt: skip
            await session.unsubscribe_resource("state://run")
            await state.set("other", 1)
            await state.set("a b", 2)
            async with asyncio.timeout(60):
                assert await told_uris.get() == "state://run/a%20b"
            assert told_uris.empty()
            for uri in ("state://other", "file:///x"):
                with pytest.raises(MCPError, match="there is no resource"):
                    await session.subscribe_resource(uri)

    asyncio.run(main())


def test_older_clients_over_http_are_not_promised_what_cannot_come(served: Served) -> None:
    async def main() -> None:
        async with over_http(served.url, served.secrets["reader"], "legacy") as client:
            capabilities: Any = client.server_capabilities
            assert not capabilities.resources.subscribe

    asyncio.run(main())


def test_listeners_are_told_when_the_server_stops(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
        secret = store.tokens.create("t", session="one").secret

    async def main() -> None:
        serving, ready = Serving(place, Address(), Options()), asyncio.Event()
        process = serving.process(ready.set)
        running = asyncio.create_task(process.serve(sockets=serving.sockets))
        async with asyncio.timeout(60):
            await ready.wait()
            async with (
                over_http(serving.url, secret) as client,
                client.listen(resource_subscriptions=["state://one"]) as listening,
            ):
                process.should_exit = True
                assert [event async for event in listening] == []
            await running
        serving.close()

    asyncio.run(main())


def test_however_many_listen_all_are_told(tmp_path: Path) -> None:
    uris = ("state://run", "state://run/a", "state://run/b")

    async def main() -> None:
        async with holdfast.aopen(f"sqlite:///{tmp_path}/store.db") as store:
            session, changes = await store.session("run"), Changes()
            missing = {(number, uri) for number in range(40) for uri in uris}
            all_heard = asyncio.Event()

            def listener(number: int) -> Any:
                def hear(event: Any) -> None:
                    missing.discard((number, event.uri))
                    if not missing:
                        all_heard.set()

                return hear

            for number in range(40):
                changes.subscribe(listener(number))
            async with asyncio.timeout(60), changes.following(session):
                await session.state.patch({"a": 1, "b": 2})
                await all_heard.wait()

    asyncio.run(main())


def test_other_trees_cannot_be_listened_to(served: Served) -> None:
    async def main() -> None:
        async with over_http(served.url, served.secrets["reader"]) as client:
            for uri in ("state://theirs", "state://theirs/k", "state://never-was", "file:///x"):
                with pytest.raises(MCPError, match="there is no resource"):
                    async with client.listen(resource_subscriptions=["state://mine", uri]):
                        pass

    asyncio.run(main())


def test_following_ends_with_the_last_listener(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}

    def readers() -> list[Any]:
        return [task for task in asyncio.all_tasks() if "Changes._follow" in repr(task.get_coro())]

    async def main() -> None:
        async with in_memory("run", place) as (client, _):
            async with client.listen(resource_subscriptions=["state://run"]):
                async with client.listen(resource_subscriptions=["state://run/k"]) as second:
                    [_] = readers()
                    await call(client, "state_set", key="k", value="1")
                    assert await told(aiter(second), 1) == ["state://run/k"]
                [_] = readers()
            async with asyncio.timeout(60):
                while readers():
                    await call(client, "state_get")

    asyncio.run(main())


def test_a_listener_is_ended_when_the_state_cannot_be_followed(tmp_path: Path) -> None:
    place = {"url": f"sqlite:///{tmp_path}/store.db"}

    async def main() -> None:
        async with (
            in_memory("run", place) as (client, store),
            client.listen(resource_subscriptions=["state://run"]) as listening,
        ):
            session = await store.find_session("run")
            await session.end()
            await session.delete()
            async with asyncio.timeout(60):
                assert [event async for event in listening] == []

    asyncio.run(main())
