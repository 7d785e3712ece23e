"""Beside each form stands a curl command that does the same; parts of a key and who left them."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import holdfast
from holdfast.server.options import Options
from holdfast.server.ui.blame import PARTS_MAX, blame
from holdfast.state.records import Entry
from tests.server.serving import Served, error, serving
from tests.ui.content import doubt

HTML = {"accept": "text/html"}


@holdfast.tool(effect="mutate", verify=lambda *_: holdfast.Landed({"receipt": 1}))
def pay(hotel: str) -> None:
    """Never called."""


@pytest.fixture
def served(place: dict[str, Any]) -> Iterator[Served]:
    with serving(Options(tools={"pay": pay}), **place) as served:
        yield served


def curl_of(served: Served, path: str, id: str) -> str:
    """Return the command that stands beside a form."""
    page = served.get(path, headers=HTML)
    assert page.status_code == 200, path
    found = re.search(rf'id="curl-{id}">(.*?)</code>', page.text, re.S)
    assert found is not None, (path, id)
    return html.unescape(found[1])


def run(served: Served, command: str) -> httpx.Response:
    """Do what curl would do with a command."""
    words = iter(shlex.split(command.replace('"Authorization: Bearer $TOKEN"', "'x-token: 1'")))
    assert next(words) == "curl"
    method, headers, form, body, address = "GET", {}, {}, None, ""
    for word in words:
        match word:
            case "-X":
                method = next(words)
            case "-H":
                name, _, value = next(words).partition(": ")
                headers[name] = value
            case "-d":
                name, _, value = next(words).partition("=")
                form[name], method = value, "POST"
            case "--json":
                body, headers["content-type"] = next(words), "application/json"
                method = "POST" if method == "GET" else method
            case _:
                address = word
    assert headers.pop("x-token") == "1"
    assert address.startswith("http://localhost/")
    parts = urlsplit(address)
    sent: dict[str, Any] = {"content": body} if body is not None else {"data": form}
    return served.request(method, parts.path, headers=headers, **sent)


def test_the_curl_beside_each_form_does_the_same(served: Served, place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session('it\'s a "session"')
        for number in (1, 2, 3):
            session.save({"n": number})
        session.state.set("a key/part", {"n": 1})
        session.state.set("a key/part", {"n": 2})
        paid, lent = doubt(session, "pay"), doubt(session, "lend")
        store.work.submit("later", id="later", delay_seconds=3_600)
        store.work.submit("hangs", queue="hung", id="hung")
        store.work.claim("worker", queues=["hung"], lease_seconds=3_600)
        asked = [
            store.session(name, agent="a").wait_for_approval("Send?").pause_id
            for name in ("one", "two")
        ]
        here = "/ui/sessions/it%27s%20a%20%22session%22"

        def done(path: str, id: str, status: int) -> None:
            assert run(served, curl_of(served, path, id)).status_code == status, (path, id)

        done("/ui/work/later", "retry", 200)
        assert store.work.get("later").waits_for is None
        done("/ui/work/later", "cancel", 200)
        done("/ui/work/later", "redrive", 201)
        assert store.work.list(type="later")[0].redriven_from == "later"
        done("/ui/work/hung", "release", 303)
        assert store.work.errors("hung")[0].error == "TEXT"
        done(f"/ui/effects/{paid}", "verify", 303)
        assert store.effect(paid).result == {"receipt": 1}
        done(f"/ui/effects/{lent}", "decide", 200)
        assert (store.effect(lent).status, store.effect(lent).note) == ("completed", "TEXT")
        for id, verdict in zip(asked, ("approve", "reject"), strict=True):
            done(f"/ui/pauses/{id}", verdict, 200)
            decision = store.get_pause(id).decision
            assert decision is not None
            assert decision.is_approved is (verdict == "approve")
        done(f"{here}/checkpoints/2", "fork", 201)
        done(f"{here}/checkpoints/2", "rewind", 200)
        latest = session.latest()
        assert latest is not None
        assert latest.channels == {"n": 2}
        key = f"{here}/state/a%20key%2Fpart"
        done(key, "set", 200)
        assert session.state.get("a key/part") == "VALUE"
        assert run(served, curl_of(served, key, "set")).status_code == 200
        done(f"{key}/diff?a=1", "restore", 303)
        assert session.state.get("a key/part") == {"n": 1}
        session.state.delete("a key/part")
        done(key, "set", 200)
        assert session.state.get("a key/part") == "VALUE"


def test_every_form_of_a_page_has_its_twins(served: Served, place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.save({"n": 1})
        session.state.set("k", 1)
        session.state.set("k", 2)
        id = doubt(session, "pay")
        store.work.submit("later", id="later", delay_seconds=3_600)
        store.work.submit("hangs", queue="hung", id="hung")
        store.work.claim("worker", queues=["hung"], lease_seconds=3_600)
        asked = store.session("one", agent="a").wait_for_approval("Send?").pause_id
    paths = (
        f"effects/{id}", "work/later", "work/hung", f"pauses/{asked}", "sessions/s/checkpoints/1",
        "sessions/s/state/k", "sessions/s/state/k/diff?a=1",
    )  # fmt: skip
    for path in paths:
        page = served.get(f"/ui/{path}", headers=HTML).text
        main = page[page.index("<main") :]
        forms = re.findall(r'<form method="post"', main)
        assert len(forms) > 0, path
        told = (main.count('data-copy="cli-'), main.count('data-copy="curl-'))
        # A person who decides has two buttons in one form.
        wanted = len(forms) + path.startswith("pauses")
        assert told == (wanted, wanted), path


def test_a_key_is_set_if_it_is_still_at_the_version_that_was_shown(served: Served) -> None:
    async def made() -> Any:
        session = await served.store.session("s")
        await session.state.set("k", {"n": 1})
        return await served.token("reader", permission="read")

    reader = served.runner.run(made())
    path = "/ui/sessions/s/state/k"

    def sent(action: str = "set", token: str = "all", headers: Any = None, **fields: str) -> Any:
        given = {"value": "5", "expected_version": "1", "reason": "why", **fields}
        given = {name: text for name, text in given.items() if text != "none"}
        return served.post(f"{path}/{action}", data=given, token=token, headers=headers)

    restored = {"sequence": "1", "value": "none"}
    assert error(sent(token=reader)) == (403, "forbidden")
    assert error(sent("restore", token=reader, **restored)) == (403, "forbidden")
    assert "Change it" not in served.get(path, headers=HTML, token=reader).text
    for wrong in ({"value": "{"}, {"value": " "}, {"reason": " "}, {"reason": "x" * 1_001},
                  {"expected_version": "-1"}, {"reason": "none"}):  # fmt: skip
        assert sent(**wrong).status_code == 422, wrong
    assert error(sent(expected_version="0")) == (409, "version_conflict")
    page = sent(expected_version="0", headers=HTML, value='"</textarea><script>"')
    assert (page.status_code, "<script>" in page.text) == (409, False)
    assert "when the key did not exist" in page.text
    assert 'name="expected_version" value="1"' in page.text
    assert sent().headers["location"] == path
    assert error(sent()) == (409, "version_conflict")
    assert error(sent("restore", **restored, expected_version="1")) == (409, "version_conflict")
    assert sent("restore", **restored, expected_version="2").status_code == 303
    gone = {**restored, "sequence": "0", "expected_version": "3"}
    assert error(sent("restore", **gone)) == (404, "key_not_found")
    assert error(served.get("/ui/sessions/s/state/none/diff?a=1")) == (404, "key_not_found")

    async def state() -> Any:
        session = await served.store.find_session("s")
        return [(each.version, each.value) for each in await session.state.history("k")]

    assert served.runner.run(state()) == [(3, {"n": 1}), (2, 5), (1, {"n": 1})]


def entry(version: int, value: Any, *, is_deleted: bool = False) -> Entry:
    given: dict[str, Any] = {"key": "k", "sequence": version, "updated_at": 0}
    return Entry(
        **given, value=value, version=version, updated_by=f"w{version}", is_deleted=is_deleted
    )


def test_each_part_of_a_value_has_the_change_that_left_it() -> None:
    history = [
        entry(4, {"a": 1, "b": [1, {"c": True}], "d": {}, "e": 1}),
        entry(3, {"a": 1, "b": [1, {"c": 1}], "d": {}}),
        entry(2, {"a": 2, "b": [1], "d": {}}),
        entry(1, {"a": 1, "b": [1]}),
    ]

    def versions(is_whole: bool) -> dict[Any, int | None]:
        parts, is_all = blame(history, is_whole=is_whole)
        assert is_all
        return {part.path: None if part.by is None else part.by.version for part in parts}

    left: dict[Any, int | None] = {
        ("a",): 3, ("b", 0): 1, ("b", 1, "c"): 4, ("d",): 2, ("e",): 4,
    }  # fmt: skip
    assert versions(True) == left
    assert versions(False) == {**left, ("b", 0): None}
    assert blame([entry(2, None, is_deleted=True), history[-1]], is_whole=True) == ([], True)
    [again], _ = blame([entry(3, 1), entry(2, None, is_deleted=True), entry(1, 1)], is_whole=True)
    assert (again.path, again.by and again.by.version) == ((), 3)


def test_of_a_large_value_the_first_parts_are_blamed() -> None:
    parts, is_all = blame([entry(1, list(range(PARTS_MAX)))], is_whole=True)
    assert (len(parts), is_all) == (PARTS_MAX, True)
    parts, is_all = blame([entry(1, list(range(PARTS_MAX + 1)))], is_whole=True)
    assert (len(parts), is_all) == (PARTS_MAX, False)
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    [part], _ = blame([entry(1, deep)], is_whole=True)
    assert part.path == (0,) * 8
