"""A store with something of everything, and the addresses of all pages that show it."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import quote

import holdfast
from holdfast import worlds

ROOT = "trip"
CHILD = "trip-hotels"
ITEM = "failed-mail"
LETTER = "letter"
ASKER = "asker"
EXPLORED = "explored"


def fill(store: holdfast.Store, mark: str = "", turned: str = "") -> None:
    """Make a tree of sessions; `mark` is put into every text that users may choose.

    `turned` is put into values beside it, which may hold what names may not.
    """
    root = store.session(
        ROOT, name=f"Trip{mark}", agent=f"traveller{mark}", user=f"user{mark}",
        metadata={f"m{mark}": mark + turned},
    )  # fmt: skip
    child = store.session(CHILD, parent=root, agent="booker")
    root.append("transcript", [said("user", f"Find a hotel in Rome{mark}{turned}")])
    root.save({"plan": {"city": f"Rome{mark}{turned}"}, "notes": [f"one{mark}"]})
    root.save({"plan": {"city": f"Paris{mark}{turned}"}})
    root.rewind(2)
    root.append("transcript", [_asked(mark + turned), _answered(mark + turned)])
    root.spend(f"model{mark}", source=f"loop{mark}", input_tokens=900, output_tokens=90, usd="0.01")
    root.call(search, city=f"Rome{mark}{turned}")
    doubt(root, "book_hotel", mark)
    child.append("transcript", [said("user", "Which hotels?")])
    child.state.set(f"plan{mark}", {"city": f"Rome{mark}{turned}", "nights": 1})
    root.state.merge(f"plan{mark}", {"nights": 2})
    root.state.set("budget/euro", 300)
    with contextlib.suppress(holdfast.VersionConflict):
        child.state.set("budget/euro", 400, if_version=7)
    fill_work(store, mark, turned)
    fill_peers(store, mark, turned)
    fill_exploration(store, mark, turned)


def fill_exploration(
    store: holdfast.Store, mark: str = "", turned: str = "", most: int = 3, **options: Any
) -> worlds.Exploration:
    """Explore a counter that must not come to two, and fails when it does."""
    counter = worlds.MemorySystem({"n": 0, f"note{mark}": mark + turned})

    @worlds.action(
        name=f"count{mark}",
        parameters={"by": [1, mark + turned]},
        requires=lambda _, by: bool(counter.data["n"] < most),
    )
    def count(_: worlds.World, by: Any) -> None:
        counter.data["n"] += 1 if by == 1 else 2
        if counter.data["n"] == most + 1:
            raise ValueError(f"too much{mark}{turned}")

    @worlds.action
    def restart(_: worlds.World) -> None:
        counter.data["n"] = 0

    @worlds.invariant(name=f"never two{mark}", message=f"it is two{mark}{turned}")
    def never_two(_: worlds.World) -> bool:
        return bool(counter.data["n"] != 2)

    given = {"store": store, "id": EXPLORED, "shrinks": False, **options}
    world = worlds.World({f"counter{mark}": counter})
    return worlds.explore(world, [count, restart], [never_two], **given)


def fill_peers(store: holdfast.Store, mark: str = "", turned: str = "") -> None:
    """Let a session wait for a person, and one for agents of which one has answered."""
    store.session(LETTER, agent=f"letters{mark}").wait_for_approval(
        {f"send{mark}": mark + turned}, context={"step": mark + turned}
    )
    asker = store.session(ASKER, agent="planner")
    call = asker.ask(f"weather{mark}", {"city": mark + turned}, id="ask-weather")
    asker.ask("agenda", mark + turned, id="ask-agenda", timeout_seconds=3_600)
    asker.pause({"step": 1})
    offer = holdfast.Artifact(name=f"offer{mark}", data=mark)
    store.answer(call.id, {"sun": mark + turned}, artifacts=[offer])
    store.progress("ask-agenda", {"half": mark + turned})


def fill_work(store: holdfast.Store, mark: str = "", turned: str = "") -> None:
    """Submit items that wait, run, have failed and are done."""
    store.work.submit(f"mail{mark}", {f"to{mark}": mark + turned}, id=ITEM, max_retries=0)
    [held] = store.work.claim(f"worker{mark}", lease_seconds=3_600)
    held.fail(f"HTTP 503{mark}{turned}")
    store.work.submit("mail", session=ROOT, id="later", delay_seconds=3_600)
    store.work.submit("mail", session=ROOT, id="runs")
    store.work.claim(f"worker{mark}", lease_seconds=3_600)


@holdfast.tool(effect="read")
def search(city: str) -> list[str]:
    return [f"Casa {city}"]


def doubt(session: Any, tool: str, mark: str = "") -> str:
    """Issue an effect whose outcome nobody knows; return its id."""
    begun = session.begin(f"{tool}{mark}", {f"hotel{mark}": mark}, f"call-{tool}{mark}")
    assert isinstance(begun, holdfast.Issued)
    begun.fail(f"the connection broke{mark}")
    id: str = session.unresolved()[-1].id
    return id


def _asked(mark: str) -> dict[str, Any]:
    call = {
        "id": "c1",
        "function": {"name": f"search{mark}", "arguments": f'{{"q": "{len(mark)}"}}'},
    }
    reasoning = {"kind": "reasoning", "text": f"Think{mark}"}
    return {"role": "assistant", "content": [reasoning, f"I look{mark}"], "tool_calls": [call]}


def _answered(mark: str) -> dict[str, Any]:
    result = {"kind": "tool_result", "call_id": f"c1{mark}", "content": [mark], "is_error": True}
    return {"role": f"tool{mark}", "blocks": [result, {"odd": mark}]}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def kinds_of_pages() -> list[str]:
    """Return one address of each kind of page."""
    parts = (
        "", "/transcript", "/checkpoints", "/checkpoints/2", "/diff?a=2&b=3", "/effects", "/spend",
        "/state", "/state/budget%2Feuro", "/state/budget%2Feuro/diff?a=2", "/timeline",
        "/moments?a=3&b=15",
    )  # fmt: skip
    of_session = [f"/ui/sessions/{ROOT}{part}" for part in parts]
    names = ("", "sessions", "in-doubt", "work", f"work/{ITEM}", "events", "conflicts", "storage",
             "explorations", f"explorations/{EXPLORED}", "pauses", f"sessions/{ASKER}/peers",
             "search?q=trip")  # fmt: skip
    alone = [f"/ui/{name}" for name in names]
    return [*alone, *of_session, "/ui/spend?by=session"]


def pages() -> list[str]:
    """Return the address of every page, also of those with little to show."""
    parts = (
        "/transcript?version=1&last=1", "/checkpoints/4", "/diff?a=2&b=2", "/state?at=1",
        "/state?prefix=none", "/timeline?at=5", "/timeline?until=4", "/moments?a=9&b=9",
    )  # fmt: skip
    return [
        *kinds_of_pages(),
        f"/ui/sessions?status=failed&agent={quote('no one')}",
        *(f"/ui/sessions/{ROOT}{part}" for part in parts),
        *(f"/ui/sessions/{CHILD}{part}" for part in ("/effects", "/spend")),
        "/ui/work?status=completed",
        f"/ui/explorations/{EXPLORED}?limit=1",
        f"/ui/events?session={CHILD}&kind=state",
        "/ui/events?kind=none",
        "/ui/search",
        "/ui/search?q=nothing%20like%20this",
        "/ui/pauses?state=any&reason=approval",
        f"/ui/sessions/{LETTER}",
        f"/ui/sessions/{LETTER}/peers",
        f"/ui/sessions/{ROOT}/peers",
        *(f"/ui/work/{id}" for id in ("later", "runs")),
    ]
