"""Who is let in: tokens, trees, names of the server and origins of pages, on every route."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

import holdfast
from holdfast.server import channels, stream
from holdfast.server.endpoints import Endpoint
from holdfast.server.options import Options, ServerLimits
from holdfast.server.routes import ENDPOINTS
from tests.server.live import live
from tests.server.serving import Served, error, serving

CLOSED = [each for each in ENDPOINTS if each.permission is not None and not each.is_hidden]
IN_SESSION = [each for each in CLOSED if each.names_session]
ROUTES = {f"{each.method} {each.path}": each for each in ENDPOINTS}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two trees, and tokens that are limited in their ways."""
    url = f"sqlite:///{tmp_path_factory.mktemp('access')}/store.db"
    options = Options(limits=ServerLimits(wrong_tokens_per_minute=1_000))
    with serving(options, url=url) as served:
        run = served.runner.run
        for name in ("mine", "theirs"):
            run(_start(served, name))
        make = {
            "reader": {"permission": "read"},
            "writer": {"permission": "write"},
            "approver": {"permission": "approve"},
            "limited": {"permission": "admin", "session": "mine"},
        }
        for name, given in make.items():
            served.secrets[name] = run(served.token(name, **given))
        yield served


async def _start(served: Served, name: str) -> None:
    session = await served.store.session(name)
    await session.save({"c": 1})
    await session.state.set("k", 1)
    await session.spend("model", input_tokens=1)
    await served.store.work.submit("t", session=session, id=f"item-{name}")
    begun = await session.begin("pay", {"n": 1}, f"call-{name}")
    assert isinstance(begun, holdfast.Issued)
    await begun.fail("broke")
    waiting = await served.store.session(f"waiting-{name}", parent=session, agent="planner")
    await waiting.ask("peer", id=f"ask-{name}")
    await waiting.wait_for_approval("pay?")
    await served.store.request("planner", request_id=f"request-{name}")


def path_of(endpoint: Endpoint, session: str, served: Served) -> str:
    """Return a path of a route that concerns this session."""
    id = session
    if endpoint.path.startswith("/work-items"):
        id = f"item-{session}"
    elif endpoint.path.startswith("/effects"):
        [effect] = served.runner.run(_effects(served, session))
        id = effect.id
    elif endpoint.path.startswith("/pauses"):
        [pause] = served.runner.run(_pauses(served, session))
        id = pause.id
    elif endpoint.path.startswith(("/asks", "/requests")):
        id = f"{endpoint.path[1:].partition('s/')[0]}-{session}"
    return endpoint.path.format(
        id=id, name="planner", key="k", version="1", operation="StoreHandle.now_ms"
    )


async def _pauses(served: Served, session: str) -> Any:
    return await (await served.store.session(f"waiting-{session}")).pauses()


async def _effects(served: Served, session: str) -> Any:
    return await served.store.effects(session=session)


def ask(served: Served, endpoint: Endpoint, session: str, token: str | None, **headers: str) -> Any:
    body = None if endpoint.body is None else json.dumps(endpoint.example).encode()
    media = {} if body is None else {"content-type": endpoint.media}
    path = path_of(endpoint, session, served)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.request(endpoint.method, path, token=token, content=body, headers=media | named)


@pytest.mark.parametrize("name", sorted(ROUTES))
def test_without_a_token_nothing_is_told(guarded: Served, name: str) -> None:
    endpoint = ROUTES[name]
    answer = ask(guarded, endpoint, "mine", None)
    if endpoint.permission is None:
        # A form that takes a token is open, and refuses one that is missing.
        assert answer.status_code in ({401, 403, 422} if endpoint.method == "POST" else {200, 303})
        return
    assert error(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"
    for wrong in ("hf_wrong", ""):
        assert error(ask(guarded, endpoint, "mine", wrong)) == (401, "unauthorized")
    basic = ask(guarded, endpoint, "mine", None, authorization="Basic YTpi")
    assert error(basic) == (401, "unauthorized")


@pytest.mark.parametrize("endpoint", CLOSED, ids=lambda each: f"{each.method} {each.path}")
def test_a_token_does_no_more_than_it_is_for(guarded: Served, endpoint: Endpoint) -> None:
    claimed = {"x_permission": "admin", "x_forwarded_user": "admin", "x_scope": "admin"}
    if endpoint.permission != "read":
        refused = ask(guarded, endpoint, "mine", "reader", **claimed)
        assert error(refused) == (403, "forbidden")
    if endpoint.permission in {"approve", "admin"}:
        assert error(ask(guarded, endpoint, "mine", "writer", **claimed)) == (403, "forbidden")
    if endpoint.permission == "admin":
        assert error(ask(guarded, endpoint, "mine", "approver", **claimed)) == (403, "forbidden")


@pytest.mark.parametrize("endpoint", IN_SESSION, ids=lambda each: f"{each.method} {each.path}")
def test_another_tree_is_as_unknown_as_one_that_never_was(
    guarded: Served, endpoint: Endpoint
) -> None:
    foreign = ask(guarded, endpoint, "theirs", "limited", if_match="*")
    never = ask(guarded, endpoint, "never-was", "limited", if_match="*")
    assert error(foreign) == error(never) == (404, "session_not_found")
    told = [
        {name: value for name, value in each.json().items() if name != "request_id"}
        for each in (foreign, never)
    ]
    assert json.dumps(told[0]).replace("theirs", "never-was") == json.dumps(told[1])


def test_whether_a_session_of_another_tree_has_ended_is_not_told(guarded: Served) -> None:
    assert guarded.post("/sessions", json={"id": "ended-theirs"}).status_code == 201
    assert guarded.post("/sessions/ended-theirs/end", json={}).status_code == 200
    for id in ("ended-theirs", "never-was"):
        answer = guarded.request("POST", "/sessions", token="limited", json={"id": id})
        assert error(answer) == (403, "forbidden")


def test_a_limited_token_stays_in_its_tree(guarded: Served) -> None:
    def limited(method: str, path: str, **given: Any) -> Any:
        return guarded.request(method, path, token="limited", **given)

    found = limited("GET", "/sessions").json()["sessions"]
    assert sorted(each["id"] for each in found) == ["ask-mine", "mine", "waiting-mine"]
    assert error(limited("GET", "/sessions?root=theirs")) == (403, "forbidden")
    for body in ({}, {"id": "new"}, {"id": "theirs"}, {"id": "theirs", "parent": "mine"}):
        assert error(limited("POST", "/sessions", json=body)) == (403, "forbidden")
    for parent in ("theirs", "never-was"):
        answer = limited("POST", "/sessions", json={"parent": parent})
        assert error(answer) == (404, "session_not_found")
    assert error(guarded.get("/sessions/new")) == (404, "session_not_found")
    assert limited("POST", "/sessions", json={"parent": "mine"}).status_code == 201
    assert error(limited("POST", "/sessions/mine/fork", json={"version": 1})) == (403, "forbidden")
    items = limited("GET", "/work-items").json()["items"]
    assert {each["root_id"] for each in items} == {"mine"}
    assert "item-mine" in {each["id"] for each in items}
    assert error(limited("GET", "/work-items?root=theirs")) == (403, "forbidden")
    for path in ("/feed", "/metrics"):
        assert error(limited("GET", path)) == (403, "forbidden")
    for path in ("/effects", "/work-items", "/spend"):
        assert error(limited("GET", f"{path}?session=theirs")) == (404, "session_not_found")
        assert limited("GET", f"{path}?session=mine").status_code == 200
    claim = {"holder": "w"}
    assert error(limited("POST", "/work-items/claim", json=claim)) == (403, "forbidden")
    assert error(limited("POST", "/work-items", json={"type": "t"})) == (403, "forbidden")
    foreign = {"type": "t", "session": "theirs"}
    assert error(limited("POST", "/work-items", json=foreign)) == (404, "session_not_found")
    taken = {"type": "t", "session": "mine", "id": "item-theirs"}
    assert limited("POST", "/work-items", json=taken).status_code in {403, 409}
    by_id = ("/effects/{id}", "/work-items/{id}", "/pauses/{id}", "/asks/{id}", "/requests/{id}")
    for endpoint in CLOSED:
        if endpoint.path.startswith(by_id):
            answer = ask(guarded, endpoint, "theirs", "limited")
            unknown = (403, "forbidden") if endpoint.is_store_wide else (404, "not_found")
            assert error(answer) == unknown, endpoint.path
            told = answer.text.replace(answer.json().get("instance", ""), "")
            for prefix in ("item", "ask", "request"):
                told = told.replace(f"{prefix}-theirs", "")
            assert "theirs" not in told
            # What never was is told in the same words.
            id = path_of(endpoint, "theirs", guarded).split("/")[2]
            content = None if endpoint.body is None else json.dumps(endpoint.example).encode()
            path = endpoint.path.format(id="never-was")
            media = {} if content is None else {"content-type": endpoint.media}
            never = limited(endpoint.method, path, content=content, headers=media)
            alike = [
                {name: each for name, each in found.json().items() if name != "request_id"}
                for found in (answer, never)
            ]
            assert json.dumps(alike[0]).replace(id, "never-was") == json.dumps(alike[1])
            assert answer.headers.keys() == never.headers.keys()
    for decision in ("approve", "reject"):
        for token in ("limited", "writer"):
            refused = ask(guarded, ROUTES[f"POST /pauses/{{id}}/{decision}"], "mine", token)
            assert error(refused) == (403, "forbidden")
    assert limited("GET", "/asks/ask-mine").json()["state"] == "open"
    assert [each["state"] for each in limited("GET", "/sessions/waiting-mine/pauses").json()[
        "pauses"]] == ["waiting"]  # fmt: skip
    actor = {"type": "set", "key": "k", "value": 1, "actor": "theirs"}
    assert error(limited("POST", "/sessions/mine/state/events", json=actor)) == (403, "forbidden")
    assert guarded.get("/sessions/theirs/state/keys/k").json()["value"] == 1


@pytest.mark.parametrize(
    ("path", "sessions"),
    [
        ("/pauses?", {"waiting-mine"}),
        ("/asks?", {"waiting-mine"}),
        ("/effects?", {"mine"}),
        ("/spend?by=session", {"mine"}),
    ],
)
def test_a_list_shows_a_limited_token_what_is_in_its_tree(
    guarded: Served, path: str, sessions: set[str]
) -> None:
    everything = guarded.get(path).text
    assert "mine" in everything
    assert "theirs" in everything
    for query in ("", "&limit=1"):
        answer = guarded.request("GET", path + query, token="limited")
        assert "theirs" not in answer.text
        [listed] = [each for each in answer.json().values() if isinstance(each, list)]
        assert {each.get("session_id") or each.get("name") for each in listed} == sessions


@pytest.mark.parametrize("token", ["writer", "limited"])
def test_no_decision_is_recorded_with_a_token_that_may_not_approve(
    guarded: Served, token: str
) -> None:
    path = "/sessions/mine/checkpoints"
    forged = {"kind": "approval_point", "data": {"block_id": "b", "decision": "allow"}}
    assert error(guarded.request("POST", path, token=token, json=forged)) == (403, "forbidden")
    # What a pause has asked cannot be replaced by another question.
    swapped = {"kind": "approval_point", "data": {"pause": "p", "question": {"block_id": "b"}}}
    assert error(guarded.request("POST", path, token=token, json=swapped)) == (403, "forbidden")
    asked = {"kind": "approval_point", "data": {"block_id": "b", "tool": "pay"}}
    assert guarded.request("POST", path, token=token, json=asked).status_code == 201
    assert guarded.request("POST", path, token="approver", json=forged).status_code == 201


HOSTS = {
    "localhost": 200, "LOCALHOST": 200, "localhost:8317": 200, "127.0.0.1": 200,
    "127.0.0.1:1": 200, "[::1]": 200, "[::1]:99": 200,
    "": 421, "evil.example": 421, "localhost.evil": 421, "evil.localhost": 421,
    "127.0.0.1.nip.io": 421, "127.0.0.2": 421, "localhost.": 421, "localhost@evil.example": 421,
    "user:pass@localhost": 421, "localhost:80:80": 421, "localhost, evil": 421, "localhost/x": 421,
    "0.0.0.0": 421, "[::ffff:127.0.0.1]": 421, "2130706433": 421, "localhost:": 421,
    "localhost:123456": 421, "localhost evil": 421,
}  # fmt: skip
ORIGINS = {
    "http://localhost": 200, "https://app.example": 200,
    "null": 403, "http://localhost:81": 403, "https://localhost": 403, "http://evil.example": 403,
    "http://localhost.evil": 403, "http://app.example": 403, "https://app.example.evil": 403,
    "https://app.example:444": 403, "https://app.example/": 403, "": 403, "file://": 403,
    "http://localhost, http://evil": 403, "HTTP://LOCALHOST": 403,
}  # fmt: skip


@pytest.fixture(scope="module")
def open_to_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    url = f"sqlite:///{tmp_path_factory.mktemp('access')}/store.db"
    with serving(Options(origins=frozenset({"https://app.example"})), url=url) as served:
        yield served


@pytest.mark.parametrize("path", ["/limits", "/feed", "/healthz"])
def test_only_known_names_and_origins_are_served(open_to_one: Served, path: str) -> None:
    for host, status in HOSTS.items():
        assert open_to_one.get(path, headers={"host": host}).status_code == status, host
    for origin, status in ORIGINS.items():
        answer = open_to_one.get(path, headers={"origin": origin})
        assert answer.status_code == status, origin
        assert "access-control-allow-origin" not in answer.headers


def test_websockets_and_streams_have_the_same_gate(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "TICK_SECONDS", 0.05)
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
        made = store.tokens.create("soon", session="one")
    with live(**place) as server:
        path = "/sessions/one/state/stream"
        for headers, status in (
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"host": "evil.example"}, 421),
            ({"authorization": "Bearer hf_wrong"}, 401),
        ):
            accept = {"accept": "text/event-stream"}
            assert server.client.get(path, headers=headers | accept).status_code == status
            if "host" in headers:
                continue
            with pytest.raises(InvalidStatus) as caught:
                server.socket(path, **headers)
            assert caught.value.response.status_code == status
            assert json.loads(caught.value.response.body)["status"] == status
        # A token in the address is not looked at.
        asked = f"{path}?token={made.secret}"
        assert server.client.get(asked, headers={"authorization": ""}).status_code == 401
        with server.socket(path, authorization=f"Bearer {made.secret}") as watching:
            server.put("one", "k", 1)
            assert json.loads(watching.recv(30))["key"] == "k"
            with holdfast.open(**place) as store:
                store.tokens.revoke("soon")
            with pytest.raises(Exception, match="4401"):
                watching.recv(30)
        bearer = {"authorization": f"Bearer {made.secret}"}
        assert server.client.get("/sessions/one/state", headers=bearer).status_code == 401
    assert made.secret.encode() not in b"".join(each.read_bytes() for each in tmp_path.iterdir())
    with holdfast.open(**place) as store:
        refused = [each for each in store.audit.list() if each.action == "refused"]
    counts = {each.reason: each.count for each in refused}
    assert counts["foreign_origin"] == 4
    assert counts["foreign_host"] == 1


def test_a_revoked_token_is_refused_within_seconds(guarded: Served) -> None:
    secret = guarded.runner.run(guarded.token("short"))
    assert guarded.get("/limits", token=secret).status_code == 200

    async def revoke() -> None:
        await guarded.store.tokens.revoke("short")

    guarded.runner.run(revoke())
    deadline = time.monotonic() + 30
    while guarded.get("/limits", token=secret).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert error(guarded.get("/limits", token=secret)) == (401, "unauthorized")


def test_a_revoked_token_follows_no_more_however_much_happens(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "TICK_SECONDS", 1.0)
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        store.session("one")
        bearer = f"Bearer {store.tokens.create('soon', permission='read').secret}"
    again = json.dumps({"leave": ["topic"], "listen": ["topic"]})
    with (
        live(**place) as server,
        server.socket("/feed", authorization=bearer) as feed,
        server.socket("/call", authorization=bearer) as rings,
    ):
        with holdfast.open(**place) as store:
            store.tokens.revoke("soon")
        sockets, deadline = [feed, rings], time.monotonic() + 30
        while sockets and time.monotonic() < deadline:
            server.put("one", "k", 1)
            for each in list(sockets):
                try:
                    if each is rings:
                        each.send(again)
                    each.recv(30)
                except ConnectionClosed:
                    sockets.remove(each)
        assert not sockets
        assert (feed.close_code, rings.close_code) == (4401, 4401)


def test_wrong_tokens_are_slowed_and_right_ones_are_not(local: Served) -> None:
    codes = [error(local.get("/limits", token=f"hf_{n}"))[0] for n in range(12)]
    assert codes == [401] * 10 + [429] * 2
    assert "retry-after" in local.get("/limits", token="hf_x").headers
    assert local.get("/limits").status_code == 200


def test_a_server_that_only_reads_refuses_changes(tmp_path: Any) -> None:
    with serving(Options(is_read_only=True), url=f"sqlite:///{tmp_path}/store.db") as served:
        assert served.get("/sessions").json() == {"sessions": [], "next_cursor": None}
        assert error(served.post("/sessions", json={})) == (403, "read_only")


ATTACKS = [
    "'; DROP TABLE hf_state_entries; --", '" OR "1"="1', "../../etc/passwd", "%2e%2e%2f",
    "${jndi:x}", "<script>alert(1)</script>", "{{7*7}}",
    "a/ops", "a/history", "ключ", "🔑", " ", ".", "..", "%",
    "a?b=c#d", "\\", "a;b", "__proto__", "$where", "key\u202eevil", "NULL", "a\u0301",
]  # fmt: skip


@pytest.mark.parametrize("text", ATTACKS)
def test_strange_keys_and_values_are_data(guarded: Served, text: str) -> None:
    from urllib.parse import quote

    path = f"/sessions/mine/state/keys/{quote(text, safe='').replace('.', '%2E')}"
    put = guarded.put(path, json={"value": {text: text}}, headers={"if-match": "*"})
    assert put.status_code == 200
    got = guarded.get(path).json()
    assert (got["key"], got["value"]) == (text, {text: text})
    operated = guarded.post(f"{path}/ops", json={"operation": "merge", "patch": {"n": 1}})
    assert operated.json()["value"] == {text: text, "n": 1}
    assert guarded.get("/sessions/mine/state").json()["state"][text] == {text: text, "n": 1}
    assert guarded.delete(path).status_code == 204


@pytest.mark.parametrize("raw", ["%00", "a%0Ab", "%7F", "x" * 257, "%C2%80"])
def test_keys_with_controls_or_of_too_much_length_are_refused(guarded: Served, raw: str) -> None:
    path = f"/sessions/mine/state/keys/{raw}"
    for answer in (
        guarded.get(path),
        guarded.put(path, json={"value": 1}, headers={"if-match": "*"}),
    ):
        assert error(answer) == (422, "invalid_request")
    assert error(guarded.get("/sessions/mine/state/keys/%FF")) == (400, "malformed")


def test_what_fails_inside_tells_nothing_of_it(
    guarded: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(call: Any) -> Any:
        raise RuntimeError("SELECT secret FROM /var/lib/holdfast.db")

    [found] = [each for each in ENDPOINTS if each.name == "limits"]
    monkeypatch.setattr(
        guarded.api, "_router", type(guarded.api._router)([replace(found, handler=broken)])
    )
    answer = guarded.get("/limits")
    assert error(answer) == (500, "internal")
    assert set(answer.json()) == {"type", "title", "status", "error", "retryable", "request_id"}
    assert "SELECT" not in answer.text
    assert answer.json()["request_id"] in caplog.text
