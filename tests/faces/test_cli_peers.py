"""Calls to other agents and approvals on the command line, on both databases."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from tests.faces.test_cli_sessions import Run, data, lines, quick

__all__ = ["quick"]


@holdfast.tool(effect="write")
def send(to: str) -> str:
    return f"sent to {to}"


def asked(place: dict[str, Any]) -> tuple[str, str]:
    """A session that waits for two peers; returns the ids of its calls."""
    with holdfast.open(**place) as store:
        session = store.session("trip", agent="planner")
        first = session.ask("weather", {"city": "Oslo"}, correlation="c_7").id
        second = session.ask("pricer", {"city": "Oslo"}).id
        session.pause()
        store.progress(first, "half")
    return first, second


def test_calls_are_listed_shown_answered_and_cancelled(place: dict[str, Any], quick: Run) -> None:
    first, second = asked(place)
    table = lines(quick("peers", "list"))
    assert table[0].split()[:3] == ["number", "id", "agent"]
    assert [line.split()[0] for line in table[1:3]] == ["1", "2"]
    found = data(quick("peers", "list", "--agent=pricer", "--state=open", "--json"))
    assert [each["id"] for each in found["calls"]] == [second]
    assert quick("peers", "list", "--state=lost").returncode == 2
    shown = quick("peers", "show", "1").stdout
    for text in ("weather", "trip", "Oslo", "c_7", "half"):
        assert text in shown
    answered = quick("peers", "answer", first[:35], "--result", '{"sun": true}')
    assert "counted" in answered.stdout
    assert data(quick("peers", "answer", "1", "--result=1", "--json"))["receipt"] == "duplicate"
    assert "sun" in quick("peers", "show", first).stdout
    assert quick("peers", "answer", "2", "--result=1", "--error=no").returncode == 2
    assert quick("peers", "answer", "2", "--result={").returncode == 2
    # There is one answer: none is given by a command that does not say which.
    forgotten = quick("peers", "answer", "2")
    assert (forgotten.returncode, "--result JSON" in forgotten.stderr) == (2, True)
    assert data(quick("peers", "show", "2", "--json"))["state"] == "open"
    assert data(quick("peers", "cancel", "2", "--json"))["is_cancelled"]
    assert "nothing was changed" in quick("peers", "cancel", "2").stdout
    assert data(quick("peers", "answer", "2", "--error=down", "--json"))["receipt"] == "late"
    late = data(quick("peers", "show", "2", "--json"))["late"]
    assert (late["status"], late["result"]) == ("error", "down")
    assert quick("peers", "show", "99").returncode == 3
    with holdfast.open(**place) as store:
        [item] = store.work.claim("w", queues="agent:planner")
        assert [each.status for each in item.resume().answers] == ["ok", "cancelled"]


def test_a_cancelled_call_shows_why_and_what_its_peer_may_have_done(
    place: dict[str, Any], quick: Run
) -> None:
    @holdfast.tool(effect="mutate")
    def pay(order: str) -> str:
        """Pay, while somebody cancels the call."""
        with holdfast.open(**place) as other:
            assert other.cancel_ask(call.id)
        return "paid"

    with holdfast.open(**place) as store:
        session = store.session("trip", agent="planner")
        call = session.ask("payer", "o-1")
        session.pause()
        [item] = store.work.claim("w", queues="agent:payer")
        with pytest.raises(holdfast.LeaseLost):
            item.receive().session.call(pay, order="o-1")
    shown = quick("peers", "show", call.id).stdout
    for text in ("The call was cancelled by hand.", "The peer may have acted", "pay", "completed"):
        assert text in shown
    [effect] = data(quick("peers", "show", call.id, "--json"))["open_effects"]
    assert (effect["tool"], effect["status"]) == ("pay", "issued")
    shown = quick("effects", "show", str(effect["number"])).stdout
    assert "Its owner reported that it landed; confirm with" in shown
    doctor = quick("doctor").stdout
    assert "1 effect whose outcome was reported too late to count" in doctor
    assert data(quick("peers", "list", "--json"))["calls"][0]["open_effects"] is None


def test_approvals_are_listed_shown_and_decided_with_who_and_why(
    place: dict[str, Any], quick: Run
) -> None:
    with holdfast.open(**place) as store:
        for name in ("one", "two"):
            store.session(name, agent="planner").wait_for_approval({"pay": name}, context="why")
        store.session("nap", agent="planner").sleep(store.now_ms() + 3_600_000)
    table = lines(quick("approvals", "list"))
    assert [line.split()[0] for line in table[1:3]] == ["1", "2"]
    shown = quick("approvals", "show", "1").stdout
    for text in ("one", "pay", "why", "holdfast approvals approve 1 --by NAME"):
        assert text in shown
    assert "--by NAME" in quick("approvals", "approve", "1").stderr
    assert "approved" in quick("approvals", "approve", "1", "--by=ann", "--note=fine").stdout
    again = quick("approvals", "approve", "1", "--by=bob")
    assert (again.returncode, again.stdout) == (
        0,
        "It was already approved by ann; nothing was changed.\n",
    )
    other = quick("approvals", "reject", "1", "--by=bob")
    assert (other.returncode, "was approved by ann" in other.stderr) == (4, True)
    decision = data(quick("approvals", "reject", "2", "--by=ann", "--json"))["decision"]
    assert (decision["is_approved"], decision["by"]) == (False, "ann")
    assert quick("approvals", "approve", "2", "--by=bob").returncode == 4
    assert quick("approvals", "show", "3").returncode == 2
    assert lines(quick("approvals", "list")) == ["Nothing waits for a decision."]
    both = data(quick("approvals", "list", "--all", "--json"))["approvals"]
    assert [each["decision"]["is_approved"] for each in both] == [True, False]
    assert "fine" in quick("approvals", "show", "1").stdout
    with holdfast.open(**place) as store:
        waiting = store.work.list(queue="agent:planner", status="pending")
        assert sorted(item.waits_for or "ready" for item in waiting) == ["ready", "ready", "time"]


def test_listings_are_narrowed_to_the_tree_of_any_of_its_sessions(
    place: dict[str, Any], quick: Run
) -> None:
    with holdfast.open(**place) as store:
        for name in ("one", "two"):
            store.session(f"{name}-root", agent="desk").ask("weather", name)
            child = store.session(f"{name}-child", agent="desk", parent=f"{name}-root")
            child.wait_for_approval({"pay": name})
            child.spend("big", usd="1")
            store.work.submit("mail", name, session=child)
            store.session(f"{name}-root").call(send, to=name)
    for root in ("two-root", "two-chil"):
        (call,) = data(quick("peers", "list", "--root", root, "--json"))["calls"]
        assert call["session_id"] == "two-root"
        for listing in ("approvals list", "peers pauses"):
            found = data(quick(*listing.split(), "--root", root, "--json"))
            (pause,) = found.get("approvals") or found["pauses"]
            assert pause["session_id"] == "two-child"
        items = data(quick("work", "list", "--type=mail", "--root", root, "--json"))["items"]
        assert [each["input"] for each in items] == ["two"]
        (effect,) = data(quick("effects", "list", "--root", root, "--json"))["effects"]
        assert effect["session_id"] == "two-root"
        sums = data(quick("spend", "sums", "--by=session", "--root", root, "--json"))["sums"]
        assert [each["name"] for each in sums] == ["two-child"]
    for listing in ("peers list", "peers pauses", "approvals list", "work list", "effects list"):
        assert quick(*listing.split(), "--root=nobody").returncode == 3
