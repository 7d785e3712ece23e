"""Every endpoint, field and example of the design document for shared state, in its order."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.server.serving import Served, error

EXAMPLE = {"tasks_completed": 0, "findings": [], "config": {"mode": "parallel"}}


def initialized(shared: Served, state: dict[str, Any] | None = None) -> tuple[str, str]:
    root, child = shared.tree()
    body = {"initial_state": EXAMPLE if state is None else state}
    assert shared.post(f"/sessions/{root}/state", json=body).status_code == 201
    return root, child


# Design A


def test_a_initialize_state(shared: Served) -> None:
    root, child = shared.tree()
    answer = shared.post(f"/sessions/{child}/state", json={"initial_state": EXAMPLE})
    body = answer.json()
    assert answer.status_code == 201
    assert (body["root_session_id"], body["state"], body["version"]) == (root, EXAMPLE, 1)
    assert body["created_at"].endswith("Z")
    again = shared.post(f"/sessions/{root}/state", json={"initial_state": {}})
    assert error(again) == (409, "version_conflict")
    assert again.json()["current_state"] == EXAMPLE


def test_a_get_current_state(shared: Served) -> None:
    root, child = initialized(shared)
    answer = shared.get(f"/sessions/{child}/state", headers={"if-none-match": '"3"'})
    body = answer.json()
    assert (answer.status_code, answer.headers["etag"]) == (200, '"g1"')
    assert (body["root_session_id"], body["state"], body["version"]) == (root, EXAMPLE, 1)
    assert body["updated_at"] <= body["materialized_at"]
    for tag in ('"1"', '"g1"', '"global_version_1"', 'W/"g1"', '"7", "g1"'):
        same = shared.get(f"/sessions/{root}/state", headers={"if-none-match": tag})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", '"g1"')


def test_a_update_state_full_replacement(shared: Served) -> None:
    root, _child = initialized(shared)
    wanted = {**EXAMPLE, "tasks_completed": 4}
    path = f"/sessions/{root}/state"
    answer = shared.put(path, json={"state": wanted}, headers={"if-match": '"1"'})
    assert (answer.status_code, answer.headers["etag"]) == (200, '"g2"')
    assert answer.json()["state"] == wanted
    late = shared.put(path, json={"state": {}}, headers={"if-match": '"1"'})
    assert error(late) == (409, "version_conflict")
    told = late.json()
    assert (told["current_version"], told["your_version"]) == (2, 1)
    assert told["current_state"] == wanted
    assert error(shared.put(path, json={"state": {}})) == (428, "precondition_required")
    assert shared.get(path).json()["version"] == 2


def test_a_patch_state_partial_update_with_merge(shared: Served) -> None:
    _root, child = initialized(shared)
    path = f"/sessions/{child}/state"
    patch = {"tasks_completed": 4, "new_key": "new_value"}
    answer = shared.patch(path, patch, if_match='"g1"')
    assert (answer.status_code, answer.headers["etag"]) == (200, '"g2"')
    assert answer.json()["state"] == {**EXAMPLE, **patch}
    assert answer.json()["keys"]["new_key"]["updated_by"] == child
    assert error(shared.patch(path, {}, if_match='"g1"')) == (409, "version_conflict")
    plain = shared.request("PATCH", path, json={})
    assert error(plain) == (415, "unsupported_media_type")
    accepted = "application/merge-patch+json, application/json-patch+json"
    assert plain.headers["accept-patch"] == accepted


def test_a_optimistic_concurrency_and_client_retry(shared: Served) -> None:
    root, _ = initialized(shared, {"progress": []})
    path = f"/sessions/{root}/state"

    async def patch_by_reading(number: int) -> int:
        headers, attempts = shared.bearer, 0
        while True:
            attempts += 1
            read = (await shared.client.get(path, headers=headers)).json()
            state = {"progress": [*read["state"]["progress"], number]}
            tag = {"if-match": f'"{read["version"]}"'}
            answer = await shared.client.put(path, json={"state": state}, headers=headers | tag)
            if answer.status_code == 200:
                return attempts
            assert error(answer) == (409, "version_conflict")

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(patch_by_reading, range(5)))

    attempts = shared.runner.run(all_of_them())
    assert sorted(shared.get(path).json()["state"]["progress"]) == [0, 1, 2, 3, 4]
    assert max(attempts) > 1


def test_a_server_side_json_merge_and_its_operators(shared: Served) -> None:
    root, _child = initialized(shared)
    path = f"/sessions/{root}/state"
    patch = {"findings": {"$append": ["new_finding"]}, "counters.processed": {"$increment": 1}}
    answer = shared.patch(path, patch, x_merge_strategy="deep")
    state = answer.json()["state"]
    assert (state["findings"], state["counters.processed"]) == (["new_finding"], 1)
    more = {"findings": {"$delete": True}, "config": {"$set": {"a": None}}}
    assert shared.patch(path, more).json()["state"]["config"] == {"a": None}
    shallow = shared.patch(path, {"config": {"b": 1}}, x_merge_strategy="shallow")
    assert shallow.json()["state"]["config"] == {"b": 1}
    deep = shared.patch(path, {"config": {"c": 1}, "tasks_completed": None})
    assert deep.json()["state"] == {"config": {"b": 1, "c": 1}, "counters.processed": 1}
    # One document write is one event, whatever it changes.
    assert deep.json()["version"] == 5
    assert error(shared.patch(path, {}, x_merge_strategy="other")) == (422, "invalid_request")


# Design B


def test_b_get_all_keys(shared: Served) -> None:
    root, child = initialized(shared)
    shared.put(f"/sessions/{child}/state/keys/tasks_completed", json={"value": 3},
               headers={"if-match": '"1"'})  # fmt: skip
    answer = shared.get(f"/sessions/{child}/state")
    body = answer.json()
    assert (body["root_session_id"], body["global_version"]) == (root, 2)
    assert answer.headers["etag"] == '"g2"'
    assert set(body["keys"]) == set(EXAMPLE)
    entry = body["keys"]["tasks_completed"]
    assert (entry["value"], entry["version"], entry["updated_by"]) == (3, 2, child)
    assert entry["updated_at"].endswith("Z")


def test_b_get_single_key(shared: Served) -> None:
    root, child = initialized(shared)
    answer = shared.get(f"/sessions/{child}/state/keys/tasks_completed")
    body = answer.json()
    assert (answer.status_code, answer.headers["etag"]) == (200, '"1"')
    assert answer.headers["last-modified"].endswith("GMT")
    assert (body["key"], body["value"], body["version"]) == ("tasks_completed", 0, 1)
    assert (body["updated_by"], body["changed_by"]) == (root, root)
    assert body["updated_at"].endswith("Z")
    missing = shared.get(f"/sessions/{root}/state/keys/none")
    assert error(missing) == (404, "key_not_found")
    path = f"/sessions/{root}/state/keys/tasks_completed"
    assert shared.get(path, headers={"if-none-match": '"1"'}).status_code == 304
    head = shared.request("HEAD", path)
    assert (head.content, head.headers["etag"]) == (b"", '"1"')


def test_b_set_single_key_compare_and_swap(shared: Served) -> None:
    root, _child = initialized(shared)
    path = f"/sessions/{root}/state/keys/tasks_completed"
    answer = shared.put(path, json={"value": 4}, headers={"if-match": '"1"'})
    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    body = answer.json()
    assert (body["key"], body["value"], body["version"]) == ("tasks_completed", 4, 2)
    late = shared.put(path, json={"value": 5}, headers={"if-match": '"1"'})
    assert error(late) == (409, "version_conflict")
    told = late.json()
    assert (told["key"], told["current_version"]) == ("tasks_completed", 2)
    assert (told["your_version"], told["current_value"]) == (1, 4)
    assert (told["updated_by"], told["retryable"]) == (root, True)
    session = shared.runner.run(_found(shared, root))
    [conflict] = shared.runner.run(_conflicts(session))
    assert (conflict.key, conflict.expected, conflict.current) == ("tasks_completed", 1, 2)


async def _found(shared: Served, id: str) -> Any:
    return await shared.store.find_session(id)


async def _conflicts(session: Any) -> Any:
    return await session.state.conflicts()


def test_b_set_key_unconditional_last_writer_wins(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state/keys/k"
    # The example sends no Content-Type.
    skip = {"x-if-match": "skip"}
    first = shared.put(path, content=b'{"value": "new_value"}', headers=skip)
    assert (first.status_code, first.json()["created"]) == (200, True)
    assert first.headers["location"] == path
    star = shared.put(path, json={"value": 2}, headers={"if-match": "*"})
    assert (star.json()["version"], "created" in star.json()) == (2, False)
    create = shared.put(path, json={"value": 3}, headers={"if-none-match": "*"})
    assert error(create) == (409, "version_conflict")
    assert create.json()["your_version"] == 0


def test_b_delete_key(shared: Served) -> None:
    root, _ = initialized(shared)
    path = f"/sessions/{root}/state/keys/tasks_completed"
    assert error(shared.delete(path, headers={"if-match": '"3"'})) == (409, "version_conflict")
    answer = shared.delete(path, headers={"if-match": '"1"'})
    assert (answer.status_code, answer.content) == (204, b"")
    for headers in ({}, {"if-match": '"1"'}):
        assert error(shared.delete(path, headers=headers)) == (404, "key_not_found")
    late = shared.put(path, json={"value": 1}, headers={"if-match": '"1"'})
    assert (late.json()["current_version"], late.json()["deleted"]) == (2, True)
    created = shared.put(path, json={"value": 1}, headers={"if-none-match": "*"})
    assert (created.json()["version"], created.json()["created"]) == (3, True)


def test_b_batch_update_transactional(shared: Served) -> None:
    root, _ = initialized(shared, {"tasks_completed": 0, "temp_key": 1})
    path = f"/sessions/{root}/state"
    operations: list[dict[str, Any]] = [
        {"op": "set", "key": "tasks_completed", "value": 5, "if_match": 1},
        {"op": "set", "key": "new_key", "value": "hello"},
        {"op": "delete", "key": "temp_key", "if_match": 3},
    ]
    refused = shared.post(f"{path}/batch", json={"operations": operations})
    assert error(refused) == (409, "version_conflict")
    assert refused.json()["applied"] is False
    assert refused.json()["results"] == [
        {"key": "tasks_completed", "status": "not_applied"},
        {"key": "new_key", "status": "not_applied"},
        {
            "key": "temp_key",
            "status": "conflict",
            "current_version": 1,
            "your_version": 3,
            "current_value": 1,
        },
    ]
    assert shared.get(path).json()["version"] == 1
    operations[2]["if_match"] = 1
    done = shared.post(f"{path}/batch", json={"operations": operations})
    assert (done.status_code, done.json()) == (200, {
        "applied": True,
        "results": [
            {"key": "tasks_completed", "status": "success", "version": 2},
            {"key": "new_key", "status": "success", "version": 1},
            {"key": "temp_key", "status": "success", "version": 2},
        ],
    })  # fmt: skip


def test_b_atomic_operators_per_key(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state/keys"

    def operate(key: str, **given: Any) -> httpx.Response:
        return shared.post(f"{path}/{key}/ops", json=given)

    assert operate("n", operation="increment", delta=1).json()["value"] == 1
    assert operate("n", operation="increment", delta=-0.5).json()["value"] == 0.5
    assert operate("l", operation="append", items=["new_item"]).json()["value"] == ["new_item"]
    merged = operate("o", operation="merge", patch={"nested.field": "value"})
    # A dot is part of a name.
    assert (merged.json()["value"], merged.headers["etag"]) == ({"nested.field": "value"}, '"1"')
    assert operate("s", operation="add", item=1).json()["value"] == [1]
    assert operate("s", operation="remove", item=1).json()["value"] == []
    assert error(operate("l", operation="increment")) == (422, "type_mismatch")
    assert error(operate("l", operation="other")) == (422, "invalid_request")
    assert error(operate("n", operation="increment", delta=True)) == (422, "invalid_request")
    stale = shared.post(
        f"{path}/n/ops", json={"operation": "increment"}, headers={"if-match": '"1"'}
    )
    assert error(stale) == (409, "version_conflict")


# Design C


def test_c_append_mutation_event(shared: Served) -> None:
    _root, child = shared.tree()
    path = f"/sessions/{child}/state/events"
    answer = shared.post(path, json={"type": "set", "key": "tasks_completed", "value": 5})
    assert answer.status_code == 201
    assert set(answer.json()) == {"event_id", "sequence_number", "timestamp"}
    assert answer.json()["sequence_number"] == 1


def test_c_event_types(shared: Served) -> None:
    root, _child = shared.tree()
    path = f"/sessions/{root}/state"
    given: list[dict[str, Any]] = [
        {"type": "init", "payload": {"a": {"x": 1}}},
        {"type": "set", "key": "x", "value": 1},
        {"type": "patch", "key": "a", "patch": {"y": 2}},
        {"type": "increment", "key": "x", "delta": 2},
        {"type": "append", "key": "l", "items": [1]},
        {"type": "set_add", "key": "s", "item": 1},
        {"type": "set_remove", "key": "s", "item": 1},
        {"type": "delete", "key": "s"},
    ]
    for number, event in enumerate(given, 1):
        answer = shared.post(f"{path}/events", json=event)
        assert (answer.status_code, answer.json()["sequence_number"]) == (201, number)
    assert shared.get(path).json()["state"] == {"a": {"x": 1, "y": 2}, "x": 3, "l": [1]}
    told = shared.get(f"{path}/events").json()["events"]
    extra = ("event_id", "seq", "session_id", "timestamp", "version")
    plain = [{k: v for k, v in each.items() if k not in extra} for each in told]
    assert plain == [{"key": None, **given[0]}, *given[1:]]
    assert shared.post(f"{path}/events", json={"type": "init", "payload": {}}).status_code == 409
    replaced = shared.post(f"{path}/events", json={"type": "full_replace", "payload": {"z": 1}})
    assert replaced.status_code == 201
    assert shared.get(path).json()["state"] == {"z": 1}


def test_c_append_only_last_write_wins_by_sequence(shared: Served) -> None:
    root, child = shared.tree()
    for session, value in ((root, 1), (child, 2)):
        event = {"type": "set", "key": "x", "value": value}
        assert shared.post(f"/sessions/{session}/state/events", json=event).status_code == 201
    entry = shared.get(f"/sessions/{root}/state/keys/x").json()
    assert (entry["value"], entry["sequence"], entry["updated_by"]) == (2, 2, child)


def test_c_distributed_counter(shared: Served) -> None:
    root, child = shared.tree()
    for session, value in ((root, 5), (child, 3)):
        path = f"/sessions/{session}/state/events"
        event = {"type": "counter_add", "key": "processed", "value": value, "actor": session}
        assert shared.post(path, json=event).status_code == 201
    assert shared.get(f"/sessions/{root}/state/keys/processed").json()["value"] == 8
    told = shared.get(f"/sessions/{root}/state/events").json()["events"]
    assert [(each["session_id"], each["delta"]) for each in told] == [(root, 5), (child, 3)]
    other = {"type": "counter_add", "key": "processed", "value": 1, "actor": root}
    assert error(shared.post(f"/sessions/{child}/state/events", json=other)) == (403, "forbidden")


def test_c_get_current_state_materialized(shared: Served) -> None:
    root, _ = initialized(shared, {"tasks_completed": 5, "findings": ["f1", "f2"]})
    body = shared.get(f"/sessions/{root}/state").json()
    assert body["root_session_id"] == root
    assert body["state"] == {"findings": ["f1", "f2"], "tasks_completed": 5}
    assert body["last_sequence"] == 1
    assert body["materialized_at"].endswith("Z")


def test_c_get_event_history(shared: Served) -> None:
    root, child = shared.tree()
    for number in range(5):
        shared.put(f"/sessions/{child}/state/keys/x", json={"value": number},
                   headers={"if-match": "*"})  # fmt: skip
    path = f"/sessions/{root}/state/events"
    page = shared.get(f"{path}?since=1&limit=2").json()
    assert [each["seq"] for each in page["events"]] == [2, 3]
    assert page["has_more"] is True
    first = page["events"][0]
    assert (first["event_id"], first["type"], first["key"]) == (2, "set", "x")
    assert (first["value"], first["session_id"]) == (1, child)
    assert shared.get(f"{path}?since=3&limit=2").json()["has_more"] is False
    assert shared.get(f"{path}?since=5").json() == {"events": [], "has_more": False}
    ahead = shared.get(f"{path}?since=6")
    assert error(ahead) == (400, "sequence_in_future")
    assert ahead.json()["head_sequence"] == 5


def test_c_replay_state_at_point_in_time(shared: Served) -> None:
    root, _ = initialized(shared, {"n": 0})
    path = f"/sessions/{root}/state"
    for _ in range(3):
        shared.post(f"{path}/keys/n/ops", json={"operation": "increment"})
    past = shared.get(f"{path}?at_sequence=2").json()
    assert (past["state"], past["sequence"]) == ({"n": 1}, 2)
    assert shared.get(f"{path}/keys/n?at_sequence=1").json()["value"] == 0
    assert error(shared.get(f"{path}/keys/n?at_sequence=0")) == (404, "key_not_found")
    assert error(shared.get(f"{path}?at_sequence=9")) == (400, "sequence_in_future")

    async def compact() -> None:
        session: Any = await shared.store.find_session(root)
        await session.state.compact(3)

    shared.runner.run(compact())
    gone = shared.get(f"{path}?at_sequence=2")
    assert error(gone) == (410, "history_compacted")
    assert gone.json()["oldest_sequence"] == 3


# What the recommended plan adds


def test_key_history(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state/keys/k"
    for value in range(3):
        shared.put(path, json={"value": value}, headers={"if-match": "*"})
    shared.delete(path)
    page = shared.get(f"{path}/history?limit=3")
    found = page.json()["history"]
    assert [each["version"] for each in found] == [4, 3, 2]
    assert (found[0]["deleted"], found[1]["value"]) == (True, 2)
    assert [each["operation"] for each in found] == ["delete", "set", "set"]
    assert page.headers["link"].endswith('rel="next"')
    following = page.headers["link"].partition(">")[0].removeprefix("<")
    assert [each["version"] for each in shared.get(following).json()["history"]] == [1]
    newer = shared.get(f"{path}/history?after_sequence={found[2]['sequence']}&limit=1")
    assert [each["version"] for each in newer.json()["history"]] == [4]
    following = newer.headers["link"].partition(">")[0].removeprefix("<")
    last = shared.get(following)
    assert [each["version"] for each in last.json()["history"]] == [3]
    assert error(shared.get(f"{path}/history?cursor=x")) == (422, "invalid_request")


def test_parallel_updates_different_keys(shared: Served) -> None:
    root, _ = shared.tree()

    async def put(number: int) -> int:
        path = f"/sessions/{root}/state/keys/child_{number}_result"
        headers = {**shared.bearer, "if-none-match": "*"}
        answer = await shared.client.put(path, json={"value": number}, headers=headers)
        return answer.status_code

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(put, range(5)))

    assert shared.runner.run(all_of_them()) == [200] * 5
    assert len(shared.get(f"/sessions/{root}/state").json()["keys"]) == 5


def test_atomic_increment_no_conflicts(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state/keys/counter/ops"

    async def increment(_: int) -> int:
        headers, body = shared.bearer, {"operation": "increment", "delta": 1}
        return (await shared.client.post(path, json=body, headers=headers)).status_code

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(increment, range(10)))

    assert shared.runner.run(all_of_them()) == [200] * 10
    entry = shared.get(f"/sessions/{root}/state/keys/counter").json()
    assert (entry["value"], entry["version"]) == (10, 10)


def test_multi_level_hierarchy(shared: Served) -> None:
    root, child = shared.tree()

    async def grandchild() -> str:
        return (await shared.store.session(parent=child)).id

    below = shared.runner.run(grandchild())
    shared.put(f"/sessions/{below}/state/keys/k", json={"value": 1}, headers={"if-match": "*"})
    entry = shared.get(f"/sessions/{root}/state/keys/k").json()
    assert (entry["value"], entry["updated_by"]) == (1, below)
    assert error(shared.get("/sessions/none/state")) == (404, "session_not_found")
    empty, _ = shared.tree()
    body = shared.get(f"/sessions/{empty}/state").json()
    assert (body["keys"], body["global_version"]) == ({}, 0)
