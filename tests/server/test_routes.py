"""Sessions, checkpoints, effects, work and spend over HTTP, on both databases."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx

import holdfast
from tests.server.serving import Served, error


def started(shared: Served, **given: Any) -> str:
    answer = shared.post("/sessions", json=given)
    assert answer.status_code == 201
    id: str = answer.json()["id"]
    return id


def test_sessions_are_started_resumed_listed_and_changed(shared: Served) -> None:
    root = started(shared, name="research", agent="planner", metadata={"a": 1})
    child = started(shared, parent=root)
    answer = shared.get(f"/sessions/{child}")
    body = answer.json()
    assert (body["root_id"], body["parent_id"], body["status"]) == (root, root, "active")
    assert (body["activity"], body["created_at"][-1]) == ("idle", "Z")
    again = shared.post("/sessions", json={"id": root, "name": "again"})
    assert (again.status_code, again.json()["name"]) == (200, "again")
    changed = shared.request("PATCH", f"/sessions/{root}", json={"metadata": {"b": 2}})
    assert (changed.json()["metadata"], changed.json()["name"]) == ({"b": 2}, "again")
    page = shared.get(f"/sessions?root={root}&limit=1")
    assert [each["id"] for each in page.json()["sessions"]] == [root]
    following = page.headers["link"].partition(">")[0].removeprefix("<")
    assert [each["id"] for each in shared.get(following).json()["sessions"]] == [child]
    assert error(shared.post("/sessions", json={"parent": "none"})) == (404, "session_not_found")
    assert error(shared.get("/sessions?status=other")) == (422, "invalid_request")


def test_the_address_of_something_new_can_be_used_whatever_its_id_is(shared: Served) -> None:
    for id in ("\U0001f600 \u00e9/%2F?#", "a\u2028b".replace("\u2028", "\u0416")):
        made = shared.post("/sessions", json={"id": id, "reopen": True})
        assert made.status_code in {200, 201}
        assert shared.get(made.headers["location"]).json()["id"] == id
        asked = shared.post("/agents/planner/requests", json={"request_id": f"{id} asked"})
        assert asked.status_code == 202
        assert shared.get(asked.headers["location"]).json()["id"] == f"{id} asked"


def test_sessions_end_are_cancelled_and_deleted(shared: Served) -> None:
    root = started(shared)
    child = started(shared, parent=root)
    ended = shared.post(f"/sessions/{child}/end", json={"status": "failed"})
    assert ended.json()["status"] == "failed"
    path = f"/sessions/{child}/state/keys/k"
    refused = shared.put(path, json={"value": 1}, headers={"if-match": "*"})
    assert error(refused) == (409, "session_closed")
    assert refused.json()["retryable"] is False
    assert error(shared.post("/sessions", json={"id": child})) == (409, "session_closed")
    assert shared.post("/sessions", json={"id": child, "reopen": True}).status_code == 200
    cancelled = shared.post(f"/sessions/{root}/cancel").json()["session_ids"]
    assert sorted(cancelled) == sorted([root, child])
    gone = shared.delete(f"/sessions/{root}")
    assert sorted(gone.json()["session_ids"]) == sorted([root, child])
    assert error(shared.get(f"/sessions/{root}")) == (404, "session_not_found")
    assert error(shared.get(f"/sessions/{root}/state")) == (404, "session_not_found")


def test_checkpoints_are_saved_listed_read_compared_forked_and_rewound(shared: Served) -> None:
    root = started(shared)
    path = f"/sessions/{root}/checkpoints"
    first = shared.post(path, json={"channels": {"messages": ["a"], "plan": 1}})
    assert (first.status_code, first.json()["version"]) == (201, 1)
    part = {"append": {"channel": "messages", "items": ["b", "c"]}, "expected_version": 1}
    assert shared.post(path, json=part).json()["version"] == 2
    assert error(shared.post(path, json=part)) == (409, "version_conflict")
    both = {"channels": {"a": 1}, "append": {"channel": "b", "items": []}}
    assert error(shared.post(path, json=both)) == (422, "invalid_request")
    keyed = {"data": {"why": "test"}, "kind": "manual_checkpoint", "key": "once"}
    assert [shared.post(path, json=keyed).json()["version"] for _ in range(2)] == [3, 3]
    loaded = shared.get(f"{path}/2").json()
    assert loaded["channels"] == {"messages": ["a", "b", "c"], "plan": 1}
    latest = shared.get(f"{path}/latest?last=1").json()
    assert (latest["version"], latest["channels"]["messages"]) == (3, ["c"])
    assert latest["left_out"] == {"messages": 2}
    assert error(shared.get(f"{path}/9")) == (404, "checkpoint_not_found")
    assert error(shared.get(f"{path}/x")) == (404, "checkpoint_not_found")
    listed = shared.get(f"{path}?limit=2").json()
    assert [each["version"] for each in listed["checkpoints"]] == [3, 2]
    assert shared.get(f"{path}?kind=turn").json()["checkpoints"][0]["version"] == 2
    [channel] = shared.get(f"/sessions/{root}/diff?a=1&b=2").json()["channels"]
    assert channel["channel"] == "messages"
    forked = shared.post(f"/sessions/{root}/fork", json={"version": 1, "name": "other"})
    assert (forked.status_code, forked.json()["origin_version"]) == (201, 1)
    rewound = shared.post(f"/sessions/{root}/rewind", json={"version": 1}).json()
    assert (rewound["checkpoint"]["version"], rewound["not_undone"]) == (4, [])
    assert shared.get(f"{path}/latest").json()["channels"]["messages"] == ["a"]
    actions = [(each.action, each.actor) for each in shared.runner.run(audited(shared))]
    assert ("session_rewound", "all") in actions


def test_a_rewind_lists_what_was_not_undone(shared: Served, database: dict[str, Any]) -> None:
    root = started(shared)

    @holdfast.tool(effect="mutate", undo=lambda arguments, result, key: None)
    def book() -> None:
        """Book a room."""

    @holdfast.tool(effect="mutate", name="mail")
    def mail() -> None:
        """Send a mail."""

    with holdfast.open(**database) as store:
        session = store.find_session(root)
        session.save(n=1)
        session.call(book)
        session.call(mail)
        session.begin("charge", {"cents": 5})
    told = shared.post(f"/sessions/{root}/rewind", json={"version": 1}).json()
    assert told["undone"] == told["given_up"] == []
    assert [each["tool"] for each in told["irreversible"]] == ["mail"]
    assert [each["tool"] for each in told["in_flight"]] == ["charge"]
    [left] = told["not_undone"]
    assert left["effect"]["tool"] == "book"
    assert "its tool was not given" in left["reason"]


async def audited(shared: Served) -> Any:
    return await shared.store.audit.list(limit=1_000)


def test_effects_are_listed_read_and_resolved(shared: Served) -> None:
    root = started(shared)

    async def unknown() -> str:
        session = await shared.store.find_session(root)
        begun = await session.begin("pay", {"amount": 5})
        assert isinstance(begun, holdfast.Issued)
        await begun.fail("the connection broke")
        [effect] = await session.unresolved()
        return effect.id

    id = shared.runner.run(unknown())
    [listed] = shared.get(f"/effects?session={root}").json()["effects"]
    assert (listed["id"], listed["tool"], listed["status"]) == (id, "pay", "unknown")
    assert shared.get("/effects?tool=none").json() == {"effects": [], "next_cursor": None}
    assert shared.get(f"/effects/{id}").json()["arguments"] == {"amount": 5}
    assert error(shared.get("/effects/none")) == (404, "not_found")
    verdict = {"verdict": "landed", "result": {"id": 1}, "note": "seen"}
    resolved = shared.post(f"/effects/{id}/resolve", json=verdict).json()
    assert (resolved["status"], resolved["decided_by"]) == ("completed", "all")
    assert error(shared.post(f"/effects/{id}/resolve", json=verdict)) == (409, "refused")


def test_work_items_are_submitted_claimed_and_finished(shared: Served) -> None:
    root, queue = started(shared), started(shared)

    def submit(**given: Any) -> Any:
        answer = shared.post("/work-items", json={"type": "t", "queue": queue, **given})
        assert answer.status_code == 201
        return answer.json()

    def claim() -> Any:
        body = {"holder": "w", "queues": [queue], "lease_seconds": 60}
        return shared.post("/work-items/claim", json=body).json()["items"]

    def act(item: Any, what: str, **given: Any) -> httpx.Response:
        body = {"fence": item["fence"], **given}
        return shared.post(f"/work-items/{item['id']}/{what}", json=body)

    first = submit(input={"n": 1}, session=root)
    assert (first["status"], first["input"], first["session_id"]) == ("pending", {"n": 1}, root)
    [held] = claim()
    assert (held["id"], held["holder"], held["status"]) == (first["id"], "w", "in_progress")
    beat = act(held, "heartbeat", lease_seconds=60).json()
    assert (beat["cancel_requested"], beat["lease_expires_at"][-1]) == (False, "Z")
    done = act(held, "complete", output=[1])
    assert done.json() == {"id": first["id"], "status": "completed"}
    assert shared.get(f"/work-items/{first['id']}").json()["output"] == [1]
    assert error(act(held, "complete", output=[2])) == (409, "lease_lost")
    submit(max_retries=0)
    [second] = claim()
    assert act(second, "release").json()["status"] == "pending"
    [second] = claim()
    failed = act(second, "fail", error="HTTP 503").json()
    assert failed["status"] == "failed"
    again = shared.post(f"/work-items/{second['id']}/redrive")
    assert (again.status_code, again.json()["redriven_from"]) == (201, second["id"])
    cancelled = shared.post(f"/work-items/{again.json()['id']}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    later = submit(delay_seconds=600)
    assert (later["waits_for"], claim()) == ("time", [])
    assert shared.post(f"/work-items/{later['id']}/retry").json()["waits_for"] is None
    listed = shared.get(f"/work-items?queue={queue}&status=failed").json()["items"]
    assert [each["id"] for each in listed] == [second["id"]]
    assert error(shared.get("/work-items/none")) == (404, "not_found")


def test_spend_is_summed(shared: Served) -> None:
    root = started(shared)

    async def spend() -> None:
        session: Any = await shared.store.find_session(root)
        await session.spend("m", input_tokens=10, output_tokens=5, usd="0.25")

    shared.runner.run(spend())
    [group] = shared.get(f"/spend?session={root}").json()["groups"]
    assert (group["name"], group["usd"], group["input_tokens"]) == ("m", "0.25", 10)
    [group] = shared.get(f"/spend?by=session&session={root}").json()["groups"]
    assert group["name"] == root
    models = f"/spend?session={root}&limit=1"

    async def spend_more() -> None:
        session: Any = await shared.store.find_session(root)
        await session.spend("n/é", usd="1")

    shared.runner.run(spend_more())
    first = shared.get(models)
    assert [each["name"] for each in first.json()["groups"]] == ["m"]
    following = first.links["next"]["url"]
    assert [each["name"] for each in shared.get(following).json()["groups"]] == ["n/é"]
    assert error(shared.get(f"{models}&cursor=%C3%A9")) == (422, "invalid_request")


async def conflicts(shared: Served, id: str) -> Any:
    session: Any = await shared.store.find_session(id)
    return await session.state.conflicts()


def test_repetitions_during_the_request_wait_for_its_response(shared: Served) -> None:
    root = started(shared)
    path = f"/sessions/{root}/state/keys/at_once"
    headers = shared.bearer | {"idempotency-key": "at once"}

    async def together() -> list[httpx.Response]:
        body = {"operation": "increment"}
        sent = [
            shared.client.post(f"{path}/ops", json=body, headers=headers, timeout=120)
            for _ in range(10)
        ]
        return await asyncio.gather(*sent)

    answers = shared.runner.run(together())
    assert {each.status_code for each in answers} == {200}
    assert len({each.content for each in answers}) == 1
    replayed = [each.headers.get("idempotency-replayed") for each in answers]
    assert sorted(replayed, key=str) == [None, *["true"] * 9]
    assert shared.get(path).json()["value"] == 1


def test_a_repeated_request_is_answered_and_not_repeated(shared: Served) -> None:
    root = started(shared)
    path = f"/sessions/{root}/state/keys/n"

    def increment(key: str, delta: int = 1) -> httpx.Response:
        body = {"operation": "increment", "delta": delta}
        return shared.post(f"{path}/ops", json=body, headers={"idempotency-key": key})

    first, second = increment('"k 1"'), increment('"k 1"')
    assert first.json() == second.json()
    assert (first.headers.get("idempotency-replayed"), second.headers["idempotency-replayed"]) == (
        None, "true",
    )  # fmt: skip
    assert increment("k 1").headers["idempotency-replayed"] == "true"
    assert error(increment("k 1", delta=2)) == (422, "idempotency_key_reused")
    # A conditional write that succeeded is replayed, and does not conflict with itself.
    headers = {"if-match": '"1"', "idempotency-key": "put"}
    puts = [shared.put(path, json={"value": None}, headers=headers) for _ in range(2)]
    assert [(each.status_code, each.json()["version"]) for each in puts] == [(200, 2)] * 2
    # What failed was not remembered.
    headers = {"if-match": '"1"', "idempotency-key": "late"}
    assert error(shared.put(path, json={"value": 1}, headers=headers)) == (409, "version_conflict")
    [refused] = shared.runner.run(conflicts(shared, root))
    assert (refused.key, refused.expected, refused.current) == ("n", 1, 2)
    headers["if-match"] = '"2"'
    assert shared.put(path, json={"value": 1}, headers=headers).status_code == 200
    gone = [shared.delete(path, headers={"idempotency-key": "gone"}) for _ in range(2)]
    assert [(each.status_code, each.content) for each in gone] == [(204, b"")] * 2
    body = {"type": "t", "input": 1}
    made = [
        shared.post("/work-items", json=body, headers={"idempotency-key": root}) for _ in range(2)
    ]
    assert made[0].json()["id"] == made[1].json()["id"]
    assert [each["seq"] for each in shared.get(f"/sessions/{root}/state/events").json()["events"]] \
        == [1, 2, 3, 4]  # fmt: skip
    keyed = shared.post(f"/sessions/{root}/cancel", headers={"idempotency-key": "k"})
    assert error(keyed) == (422, "invalid_request")
    assert error(increment("x" * 256)) == (422, "invalid_request")


def test_keys_are_listed_by_prefix_and_without_values(shared: Served) -> None:
    root, child = shared.tree()
    path = f"/sessions/{root}/state/keys"
    assert shared.get(path).json() == {"keys": [], "next_cursor": None}
    for key in ("b%2Fé", "b%2F%F0%9F%8C%8D", "a", "b", "c", "b%2F1"):
        shared.put(f"{path}/{key}", json={"value": None}, headers={"if-match": "*"})
    shared.delete(f"{path}/c")
    listed = shared.get(f"{path}?prefix=b").json()["keys"]
    assert [each["key"] for each in listed] == ["b", "b/1", "b/é", "b/🌍"]
    assert listed[0].keys() == {"key", "version", "updated_at", "updated_by", "sequence"}
    # An empty value is told as one where values are asked for.
    [one] = shared.get(f"{path}?prefix=b%2F1&include=value").json()["keys"]
    assert (one["key"], one["value"], one["updated_by"]) == ("b/1", None, root)
    written = shared.put(
        f"/sessions/{child}/state/keys/a", json={"value": 2}, headers={"if-match": "*"}
    )
    assert written.status_code == 200
    for query in (f"updated_by={child}", f"since={one['sequence']}", "since=7&prefix=a"):
        [other] = shared.get(f"{path}?{query}").json()["keys"]
        assert (other["key"], other["updated_by"]) == ("a", child)
    assert shared.get(f"{path}?updated_by=nobody").json()["keys"] == []
    found: list[str] = []
    url = f"/sessions/{child}/state/keys?limit=2"
    while url:
        page = shared.get(url)
        found += [each["key"] for each in page.json()["keys"]]
        url = page.links["next"]["url"] if "link" in page.headers else ""
    assert found == ["a", "b", "b/1", "b/é", "b/🌍"]
    for query in ("cursor=%FF", "cursor=_w==", "include=all", "prefix=%00", "since=-1", "since=x"):
        assert shared.get(f"{path}?{query}").status_code in {400, 422}


def test_the_pages_of_a_list_are_of_one_moment(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state/keys"
    for key in "abcdef":
        shared.put(f"{path}/{key}", json={"value": key}, headers={"if-match": "*"})
    page = shared.get(f"{path}?limit=2&include=value")
    found = page.json()["keys"]
    shared.delete(f"{path}/c")
    shared.put(f"{path}/d", json={"value": "changed"}, headers={"if-match": "*"})
    shared.put(f"{path}/dd", json={"value": "new"}, headers={"if-match": "*"})
    first = page.json()["next_cursor"]
    while "link" in page.headers:
        page = shared.get(page.links["next"]["url"])
        found += page.json()["keys"]
    assert [(each["key"], each["value"], each["version"]) for each in found] == [
        (key, key, 1) for key in "abcdef"
    ]
    now = [each["key"] for each in shared.get(path).json()["keys"]]
    assert now == ["a", "b", "d", "dd", "e", "f"]
    shared.runner.run(_compact(shared, root))
    gone = shared.get(f"{path}?cursor={first}")
    assert error(gone) == (410, "history_compacted")
    assert gone.json()["oldest_sequence"] == 9
    for text in ("99 a", "x a", "5", "5 ", "-1 a", "9" * 16 + " a", "\u0665 a"):
        cursor = base64.urlsafe_b64encode(text.encode()).decode()
        assert shared.get(f"{path}?cursor={cursor}").status_code in {400, 422}


async def _compact(shared: Served, root: str) -> None:
    state = (await shared.store.find_session(root)).state
    await state.compact(before=await state.version())


def test_a_session_that_was_deleted_and_made_again_is_not_taken_for_the_old_one(
    shared: Served,
) -> None:
    root, other = shared.tree()[0], shared.tree()[0]
    child = f"again-{root}"
    put = {"json": {"value": 1}, "headers": {"if-match": "*"}}
    path = f"/sessions/{child}/state/keys/k"
    for parent in (root, other, root):
        started(shared, id=child, parent=parent)
        assert shared.put(path, **put).status_code == 200
        assert shared.get(f"/sessions/{parent}/state/keys/k").json()["updated_by"] == child
        saved = shared.post(f"/sessions/{child}/checkpoints", json={"channels": {"c": 1}})
        assert (saved.status_code, saved.json()["version"]) == (201, 1)
        # Behind the back of the server, as another one does it.
        shared.runner.run(_delete(shared, child))
        for answer in (
            shared.put(path, **put),
            shared.delete(path),
            shared.post(f"{path}/ops", json={"operation": "increment"}),
            shared.post(f"/sessions/{child}/checkpoints", json={"channels": {"c": 1}}),
            shared.post(
                f"/sessions/{child}/state/batch",
                json={"operations": [{"op": "delete", "key": "never"}]},
            ),
            shared.patch(path, {"a": 1}, if_match="*"),
            shared.get(path),
            shared.get(f"{path}?at_sequence=1"),
        ):
            assert error(answer) == (404, "session_not_found")
            assert answer.json()["detail"] == f"there is no session {child!r}"
    started(shared, id=child, parent=root)
    assert shared.put(path, **put).status_code == 200
    shared.runner.run(_delete(shared, child))
    shared.runner.run(shared._make(child, other))
    assert shared.put(path, **put).status_code == 200
    assert shared.get(f"/sessions/{other}/state/keys/k").json()["version"] == 2


async def _delete(shared: Served, id: str) -> None:
    await (await shared.store.find_session(id)).delete()


def test_an_increment_tells_the_number_before_it(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state/keys/n/ops"
    told = [
        shared.post(path, json={"operation": "increment", "delta": each}).json()
        for each in (2, 0.5, -1)
    ]
    assert [each["previous"] for each in told] == [None, 2, 2.5]
    other = shared.post(
        f"/sessions/{root}/state/keys/l/ops", json={"operation": "append", "items": [1]}
    )
    assert "previous" not in other.json()
