"""JSON Patch (RFC 6902) on one key and on the whole state, on both databases."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from holdfast.answers.conversion import converted
from holdfast.answers.problems import Refusal
from holdfast.server.json_patch import COPIED_NODES_MAX, MEDIA, MISSING, Patch, patched
from tests.server.serving import Served, error

# The value, the patch, and what comes of it; most are the examples of the RFC's appendix.
FITTING: list[tuple[Any, list[dict[str, Any]], Any]] = [
    ({"foo": "bar"}, [{"op": "add", "path": "/baz", "value": "qux"}], {"foo": "bar", "baz": "qux"}),
    ({"foo": [1, 3]}, [{"op": "add", "path": "/foo/1", "value": 2}], {"foo": [1, 2, 3]}),
    ({"foo": [1]}, [{"op": "add", "path": "/foo/1", "value": 2}], {"foo": [1, 2]}),
    ({"baz": 1, "foo": 2}, [{"op": "remove", "path": "/baz"}], {"foo": 2}),
    ({"foo": [1, 2, 3]}, [{"op": "remove", "path": "/foo/1"}], {"foo": [1, 3]}),
    ({"baz": 1}, [{"op": "replace", "path": "/baz", "value": "boo"}], {"baz": "boo"}),
    ([1, 2], [{"op": "replace", "path": "/1", "value": None}], [1, None]),
    (
        {"foo": {"bar": 1, "waldo": 2}, "qux": {"corge": 3}},
        [{"op": "move", "from": "/foo/waldo", "path": "/qux/thud"}],
        {"foo": {"bar": 1}, "qux": {"corge": 3, "thud": 2}},
    ),
    ({"foo": [1, 2, 3, 4]}, [{"op": "move", "from": "/foo/1", "path": "/foo/3"}],
     {"foo": [1, 3, 4, 2]}),
    ({"a": 1}, [{"op": "move", "from": "/a", "path": "/a"}], {"a": 1}),
    ({"a": [1]}, [{"op": "copy", "from": "/a", "path": "/b"},
                  {"op": "add", "path": "/b/-", "value": 2}], {"a": [1], "b": [1, 2]}),
    ({"a": 1}, [{"op": "test", "path": "/a", "value": 1}], {"a": 1}),
    ({"a": 1.0}, [{"op": "test", "path": "/a", "value": 1}], {"a": 1.0}),
    ({"a": {"b": [1, {}]}}, [{"op": "test", "path": "", "value": {"a": {"b": [1, {}]}}}],
     {"a": {"b": [1, {}]}}),
    ({"foo": "bar"}, [{"op": "add", "path": "/child", "value": {"x": {}}, "unknown": 1}],
     {"foo": "bar", "child": {"x": {}}}),
    ({"/": 9, "~1": 10}, [{"op": "test", "path": "/~01", "value": 10},
                          {"op": "remove", "path": "/~1"}], {"~1": 10}),
    ({"": 1}, [{"op": "replace", "path": "/", "value": 2}], {"": 2}),
    ({"a": 1}, [{"op": "replace", "path": "", "value": [1]}], [1]),
    (1, [], 1),
    (MISSING, [{"op": "add", "path": "", "value": {}}, {"op": "add", "path": "/a", "value": 1}],
     {"a": 1}),
]  # fmt: skip
# What does not fit, and the operation that does not.
MISFITS: list[tuple[Any, list[dict[str, Any]], int]] = [
    ({"a": 1}, [{"op": "test", "path": "/a", "value": 2}], 0),
    ({"a": 1}, [{"op": "test", "path": "/a", "value": True}], 0),
    ({"a": "1"}, [{"op": "test", "path": "/a", "value": 1}], 0),
    ({"a": None}, [{"op": "test", "path": "/b", "value": None}], 0),
    ({"a": 1}, [{"op": "add", "path": "/b", "value": 1}, {"op": "remove", "path": "/c"}], 1),
    ({"a": 1}, [{"op": "replace", "path": "/b", "value": 1}], 0),
    ({"a": 1}, [{"op": "add", "path": "/b/c", "value": 1}], 0),
    ({"a": 1}, [{"op": "add", "path": "/a/c", "value": 1}], 0),
    ({"a": []}, [{"op": "add", "path": "/a/1", "value": 1}], 0),
    ({"a": [1]}, [{"op": "remove", "path": "/a/-"}], 0),
    ({"a": [1]}, [{"op": "remove", "path": "/a/01"}], 0),
    ({"a": [1]}, [{"op": "remove", "path": "/a/-1"}], 0),
    ({"a": [1]}, [{"op": "replace", "path": "/a/1", "value": 1}], 0),
    ({"a": [1]}, [{"op": "remove", "path": "/a/\u0660"}], 0),
    ({"a": [1]}, [{"op": "remove", "path": "/a/" + "9" * 50}], 0),
    ({"a": 1}, [{"op": "move", "from": "/b", "path": "/c"}], 0),
    ({"a": 1}, [{"op": "copy", "from": "/b", "path": "/c"}], 0),
    (MISSING, [{"op": "remove", "path": ""}], 0),
    (MISSING, [{"op": "add", "path": "/a", "value": 1}], 0),
]


def patch_of(operations: list[dict[str, Any]]) -> Any:
    return converted(operations, Patch)


@pytest.mark.parametrize(("value", "operations", "expected"), FITTING)
def test_operations_are_applied_in_order(value: Any, operations: Any, expected: Any) -> None:
    patch = patch_of(operations)
    assert patched(value, patch) == expected


@pytest.mark.parametrize(("value", "operations", "number"), MISFITS)
def test_what_does_not_fit_names_its_operation(value: Any, operations: Any, number: int) -> None:
    with pytest.raises(Refusal) as refused:
        patched(value, patch_of(operations))
    assert (refused.value.code, refused.value.members["operation"]) == ("patch_conflict", number)


def test_a_patch_is_the_same_when_it_is_applied_again() -> None:
    patch = patch_of(
        [{"op": "add", "path": "/a", "value": {}}, {"op": "add", "path": "/a/b", "value": 1}]
    )
    assert patched({}, patch) == patched({}, patch) == {"a": {"b": 1}}
    assert patch[0].value == {}


def send(shared: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    media = {"content-type": MEDIA}
    return shared.request("PATCH", path, json=body, headers=media | named)


def test_one_key_is_patched_under_its_precondition(shared: Served) -> None:
    root, child = shared.tree()
    path = f"/sessions/{child}/state/keys/plan"
    append = [{"op": "add", "path": "/steps/-", "value": "b"}]
    assert error(send(shared, path, append)) == (428, "precondition_required")
    missing = send(shared, path, append, if_match="*")
    assert error(missing) == (409, "patch_conflict")
    assert missing.json()["operation"] == 0
    made = send(
        shared, path, [{"op": "add", "path": "", "value": {"steps": ["a"]}}], if_none_match="*"
    )
    assert (made.status_code, made.json()["created"], made.headers["etag"]) == (200, True, '"1"')
    done = send(shared, path, append, if_match='"1"')
    assert (done.json()["value"], done.json()["version"]) == ({"steps": ["a", "b"]}, 2)
    assert done.json()["updated_by"] == child
    late = send(shared, path, append, if_match='"1"')
    assert error(late) == (409, "version_conflict")
    assert (late.json()["current_version"], late.json()["your_version"]) == (2, 1)
    refused = send(
        shared,
        path,
        [{"op": "add", "path": "/x", "value": 1}, {"op": "test", "path": "/steps/0", "value": "z"}],
        if_match="*",
    )
    assert (error(refused), refused.json()["operation"]) == ((409, "patch_conflict"), 1)
    assert shared.get(path).json()["version"] == 2
    malformed: tuple[Any, ...] = (
        {},
        [{"op": "add", "path": "/a"}],
        [{"op": "spoil", "path": "/a"}],
        [{"op": "add", "path": "a", "value": 1}],
        [{"op": "add", "path": "/~2", "value": 1}],
        [{"op": "move", "from": "/steps", "path": "/steps/0"}],
        [{"op": "remove", "path": ""}],
        [1],
    )
    for wrong in malformed:
        assert error(send(shared, path, wrong, if_match="*")) == (422, "invalid_request"), wrong
    other = shared.request("PATCH", path, json={}, headers={"if-match": "*"})
    assert error(other) == (415, "unsupported_media_type")
    assert other.headers["accept-patch"] == f"application/merge-patch+json, {MEDIA}"
    assert shared.get(f"/sessions/{root}/state/keys/plan").json()["value"] == {"steps": ["a", "b"]}


def test_a_repeated_patch_is_answered_and_not_repeated(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state/keys/list"
    shared.put(path, json={"value": []}, headers={"if-match": "*"})
    body = [{"op": "add", "path": "/-", "value": 1}]
    answers = [send(shared, path, body, if_match='"1"', idempotency_key="p") for _ in range(2)]
    assert [each.json()["version"] for each in answers] == [2, 2]
    assert answers[1].headers["idempotency-replayed"] == "true"
    assert shared.get(path).json()["value"] == [1]
    events = shared.get(f"/sessions/{root}/state/events").json()["events"]
    assert len(events) == 2


def test_the_whole_state_is_patched_in_one_step(shared: Served) -> None:
    root, _ = shared.tree()
    path = f"/sessions/{root}/state"
    shared.post(path, json={"initial_state": {"a": {"b": 1}, "list": [1], "gone": 1}})
    body = [
        {"op": "test", "path": "/a/b", "value": 1},
        {"op": "add", "path": "/list/-", "value": 2},
        {"op": "remove", "path": "/gone"},
        {"op": "copy", "from": "/a", "path": "/c~1d"},
    ]
    done = send(shared, path, body, if_match='"g1"')
    assert done.json()["state"] == {"a": {"b": 1}, "list": [1, 2], "c/d": {"b": 1}}
    assert (done.json()["version"], done.headers["etag"]) == (2, '"g2"')
    assert done.json()["keys"]["a"]["version"] == 1
    assert error(send(shared, path, body)) == (409, "patch_conflict")
    assert error(send(shared, path, [], if_match='"g1"')) == (409, "version_conflict")
    whole = [{"op": "replace", "path": "", "value": 1}]
    assert error(send(shared, path, whole)) == (422, "invalid_request")
    assert shared.get(path).json()["version"] == 2


def test_patches_that_come_at_once_lose_nothing(shared: Served) -> None:
    root, child = shared.tree()
    key = f"/sessions/{root}/state/keys/list"
    shared.put(key, json={"value": []}, headers={"if-match": "*"})

    async def one(number: int) -> int:
        path = key.replace(root, child) if number % 2 else key
        prefix, address = ("", path) if number % 3 else ("/list", path.partition("/keys")[0])
        answer = await shared.client.request(
            "PATCH",
            address,
            json=[{"op": "add", "path": f"{prefix}/-", "value": number}],
            headers={"content-type": MEDIA, "if-match": "*", **shared.bearer},
        )
        return answer.status_code

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(one, range(30)))

    assert shared.runner.run(all_of_them()) == [200] * 30
    found = shared.get(key).json()
    assert (sorted(found["value"]), found["version"]) == (list(range(30)), 31)


def test_patches_that_grow_without_bound_are_refused(local: Served) -> None:
    root, _ = local.tree()
    path = f"/sessions/{root}/state/keys/bomb"
    local.put(path, json={"value": [[]]}, headers={"if-match": "*"})
    double = [{"op": "copy", "from": "", "path": "/-"}] * 40
    bomb = send(local, path, double, if_match="*")
    assert (error(bomb), bomb.json()["limit"]) == ((413, "too_large"), COPIED_NODES_MAX)
    many = send(local, path, [{"op": "test", "path": "", "value": 0}] * 1_001, if_match="*")
    assert (error(many), many.json()["limit"]) == ((413, "too_large"), 1_000)
    deep = [{"op": "copy", "from": "/0", "path": "/0/-"}] * 100
    deep += [{"op": "move", "from": "/0", "path": "/" + "0/" * 5 + "-"}]
    assert send(local, path, deep, if_match="*").status_code in {409, 413, 422}
    nested = [{"op": "add", "path": "/" + "0/" * n + "0", "value": []} for n in range(200)]
    assert send(local, path, nested, if_match="*").status_code == 422
    assert local.get(path).json()["version"] == 1
