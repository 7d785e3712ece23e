"""Peer calls, pauses, approvals and requests over HTTP, on both databases."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

import holdfast
from tests.server.serving import Served, error

numbers = itertools.count(1)


def parked(shared: Served, asks: int = 1) -> tuple[str, list[str]]:
    """Return a session that waits, and the calls that it waits for."""

    async def make() -> tuple[str, list[str]]:
        session = await shared.store.session(f"s{next(numbers)}", agent="planner")
        calls = [await session.ask("peer", number) for number in range(asks)]
        await session.pause({"step": 1})
        return session.id, [each.id for each in calls]

    return shared.runner.run(make())


def test_calls_are_listed_read_answered_and_cancelled(shared: Served) -> None:
    session, [first, second, third] = parked(shared, 3)
    listed = shared.get(f"/sessions/{session}/asks").json()["asks"]
    assert [(each["id"], each["input"]) for each in listed] == [(first, 0), (second, 1), (third, 2)]
    assert listed[0]["created_at"][-1] == "Z"
    noted = shared.post(f"/asks/{first}/progress", json={"note": "half"})
    assert noted.json() == {"id": first, "changed": True}
    assert shared.get(f"/asks/{first}").json()["progress"] == "half"
    given = {"result": {"cents": 9}, "artifacts": [{"name": "offer", "data": [1]}]}
    answers = [shared.post(f"/asks/{first}/answer", json=given).json() for _ in range(2)]
    assert [each["receipt"] for each in answers] == ["counted", "duplicate"]
    answer = shared.get(f"/asks/{first}").json()["answer"]
    assert (answer["status"], answer["result"]) == ("ok", {"cents": 9})
    assert [(each["name"], each["data"]) for each in answer["artifacts"]] == [("offer", [1])]
    cancelled = [shared.post(f"/asks/{second}/cancel").json()["changed"] for _ in range(2)]
    assert cancelled == [True, False]
    found = shared.get(f"/asks/{second}").json()
    listed = shared.get(f"/sessions/{session}/asks").json()["asks"]
    assert found["open_effects"] == []
    assert [each["open_effects"] for each in listed] == [[], None, []]
    assert found["answer"]["result"].startswith("The call was cancelled by hand")
    late = shared.post(f"/asks/{second}/answer", json={"result": 1}).json()
    assert late["receipt"] == "late"
    broke = {"result": "no such city", "status": "error"}
    assert shared.post(f"/asks/{third}/answer", json=broke).json()["receipt"] == "counted"
    assert shared.post(f"/asks/{third}/progress", json={"note": 1}).json()["changed"] is False
    [pause] = shared.get(f"/sessions/{session}/pauses").json()["pauses"]
    assert (pause["state"], pause["context"], pause["open_asks"]) == ("ready", {"step": 1}, 0)
    for path in ("/asks/none", "/pauses/none", "/requests/none", f"/requests/{first}"):
        assert error(shared.get(path)) == (404, "not_found")
    both = {"artifacts": [{"name": "n", "data": 1, "uri": "s3://x"}]}
    assert error(shared.post(f"/asks/{third}/answer", json=both)) == (422, "invalid_request")


def test_calls_and_pauses_of_all_sessions_are_paged(shared: Served) -> None:
    made = [parked(shared) for _ in range(3)]
    seen = {"asks": [], "pauses": []}  # type: dict[str, list[str]]
    for name, query in (("asks", "agent=peer&state=open"), ("pauses", "reason=peers")):
        path: str | None = f"/{name}?{query}&limit=2"
        while path is not None:
            page = shared.get(path)
            seen[name] += [each["session_id"] for each in page.json()[name]]
            link = page.headers.get("link")
            path = None if link is None else link.partition(">")[0].removeprefix("<")
    assert {each for each, _ in made} <= set(seen["asks"]) & set(seen["pauses"])
    assert shared.get("/pauses?agent=nobody").json() == {"pauses": [], "next_cursor": None}
    assert error(shared.get("/asks?state=other")) == (422, "invalid_request")


def test_a_decision_is_made_once_in_the_name_of_the_token(shared: Served) -> None:
    async def make(agent: str) -> str:
        session = await shared.store.session(f"s{next(numbers)}", agent=agent)
        return (await session.wait_for_approval({"pay": 900})).pause_id

    ann = f"ann{next(numbers)}"
    shared.secrets["ann"] = shared.runner.run(shared.token(ann, permission="approve"))
    paid, refused = shared.runner.run(make("payer")), shared.runner.run(make("payer"))
    body = {"note": "within budget"}
    decided = shared.request("POST", f"/pauses/{paid}/approve", token="ann", json=body).json()
    assert (decided["state"], decided["question"]) == ("ready", {"pay": 900})
    decision = decided["decision"]
    assert (decision["is_approved"], decision["by"]) == (True, ann)
    assert (decision["note"], decision["decided_at"][-1]) == ("within budget", "Z")
    again = shared.post(f"/pauses/{paid}/approve", json={})
    assert again.json()["decision"] == decision
    assert error(shared.post(f"/pauses/{paid}/reject", json={})) == (409, "refused")
    rejected = shared.post(f"/pauses/{refused}/reject", json={}).json()
    assert rejected["decision"]["is_approved"] is False
    for_peers = shared.get(f"/sessions/{parked(shared)[0]}/pauses").json()["pauses"][0]["id"]
    assert error(shared.post(f"/pauses/{for_peers}/approve", json={})) == (422, "invalid_request")
    assert error(shared.post("/pauses/none/approve", json={})) == (404, "not_found")
    audited = shared.runner.run(_audited(shared))
    assert ("approved", ann, paid) in audited
    assert ("rejected", "all", refused) in audited


async def _audited(shared: Served) -> set[tuple[str, str, str | None]]:
    found = await shared.store.audit.list(limit=1_000)
    return {(each.action, each.actor, each.subject) for each in found}


def test_a_request_is_made_once_and_its_answer_can_be_waited_for_again(shared: Served) -> None:
    id = f"r{next(numbers)}"
    body = {"input": {"trip": "Oslo"}, "request_id": id, "user": "ann", "timeout_seconds": 600}
    asked = shared.post("/agents/planner/requests", json=body)
    assert (asked.status_code, asked.json()["state"]) == (202, "open")
    assert asked.headers["location"] == f"/requests/{id}"
    assert shared.get(f"/sessions/{id}").json()["user"] == "ann"
    other = {**body, "input": 1}
    assert error(shared.post("/agents/planner/requests", json=other)) == (409, "request_mismatch")

    noted = shared.post(f"/asks/{id}/progress", json={"note": "begun"})
    assert noted.json()["changed"] is True
    feed = shared.get(f"/sessions/{id}/feed?kinds=peer_progressed").json()["events"]
    assert [each["data"]["note"] for each in feed] == ["begun"]

    async def meanwhile(do: Callable[[], Awaitable[Any]]) -> tuple[httpx.Response, int, int]:
        waiting = asyncio.ensure_future(
            shared.client.get(f"/requests/{id}?wait_seconds=1000", headers=shared.bearer)
        )
        metrics = shared.api.context.metrics
        while not metrics.followers:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        counted = metrics.followers, metrics.answering
        await do()
        return await waiting, *counted

    answer, followers, answering = shared.runner.run(
        meanwhile(lambda: shared.store.answer(id, "booked"))
    )
    assert (answer.json()["state"], answer.json()["answer"]["result"]) == ("ok", "booked")
    # Who waits is counted among those who follow, and does not hold up the feeds of others.
    assert (followers, answering) == (1, 0)
    assert (shared.api.context.metrics.followers, shared.api.context.metrics.answering) == (0, 0)
    again = shared.post("/agents/planner/requests?wait_seconds=1000", json=body)
    assert (again.status_code, again.json()) == (200, answer.json())
    assert shared.get(f"/requests/{id}").json() == answer.json()


def test_waiting_ends_in_time_or_when_the_server_stops(shared: Served) -> None:
    id = f"r{next(numbers)}"
    body = {"request_id": id}
    waited = shared.post("/agents/planner/requests?wait_seconds=0.01", json=body)
    assert (waited.status_code, waited.json()["state"]) == (202, "open")
    shared.api.context.is_stopping = True
    try:
        assert shared.get(f"/requests/{id}?wait_seconds=1000").json()["state"] == "open"
    finally:
        shared.api.context.is_stopping = False
    ended = shared.runner.run(_cancelled(shared, id))
    assert ended == shared.get(f"/requests/{id}?wait_seconds=1000").json()["answer"]["status"]


async def _cancelled(shared: Served, id: str) -> str:
    await (await shared.store.find_session(id)).cancel()
    answer: holdfast.Answer | None = (await shared.store.peer_call(id)).answer
    assert answer is not None
    assert answer.status == "cancelled"
    return answer.status
