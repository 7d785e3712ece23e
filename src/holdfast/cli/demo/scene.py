"""A newsroom of agents for the dashboard: trees, shared state, effects, work, pauses and spend."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...effects import Issued, Landed, tool
from ...errors import SessionNotFound, VersionConflict
from ...session import Session
from ...store import Store, open
from . import newsletter

REPORT = "report-tides"
LETTER = "newsletter-12"
BRIEFING = "briefing-9"
DESK = "news-desk"
QUEUE = "newsroom"
BEATS_MAX = 1_000
BEAT_SECONDS = 1.5
HEADLINES = ("Ferries late in the fog", "A new pier", "Spring tide on Friday", "Herring is back")

Passes = Callable[[float], None]


@tool(effect="read")
def search_archive(query: str) -> list[str]:
    """Search the archive of the paper."""
    return [f"{query}, {year}" for year in (1953, 1987, 2011)]


@tool(effect="read")
def read_gauge(harbour: str) -> dict[str, Any]:
    """Read a tide gauge."""
    return {"harbour": harbour, "centimetres": 100 + 17 * len(harbour)}


def _is_paid(arguments: dict[str, Any], idempotency_key: str) -> Landed:
    """Ask the bank, which has received the payment."""
    return Landed({"receipt": f"r-{arguments['cents']}"})


@tool(effect="mutate", verify=_is_paid)
def pay_fee(to: str, cents: int) -> None:
    """Pay a fee; the response to the payment was lost."""


def furnish(store: Store, passes: Passes = lambda seconds: None) -> None:
    """Fill a store, unless it has been; `passes` is called with the time between the steps."""
    with contextlib.suppress(SessionNotFound):
        store.find_session(REPORT)
        return
    _report(store, passes)
    passes(240)
    _letter(store)
    _briefing(store)
    newsletter.explore_newsletter(store)
    _desk(store, passes)


def _report(store: Store, passes: Passes) -> None:
    """Write an article with three agents, one of which rewinds once."""
    editor = store.session(REPORT, name="Report: living with the tide", agent="editor", user="ada")
    gauges = store.session(f"{REPORT}-gauges", parent=editor, agent="researcher")
    archive = store.session(f"{REPORT}-archive", parent=editor, agent="archivist")
    draft = store.session(f"{REPORT}-draft", parent=editor, agent="writer")
    editor.append(
        "transcript", [_says("user", "600 words on how the harbour lives with the tide.")]
    )
    editor.state.set("plan", {"words": 600, "parts": ["harbour", "history"], "status": "open"})
    editor.state.set("sources", [])
    editor.spend("large-2", input_tokens=2_140, output_tokens=310, usd="0.0181")
    for place, harbour in enumerate(("Bergen", "Stavanger", "Svolvaer")):
        passes(21)
        found = gauges.call(read_gauge, harbour=harbour).value
        gauges.append(
            "transcript", [_calls(place, "read_gauge", harbour=harbour), _got(place, found)]
        )
        gauges.state.append("sources", [f"gauge of {harbour}"])
        gauges.spend("small-1", input_tokens=820, output_tokens=64, usd="0.0009")
    passes(12)
    found = archive.call(search_archive, query="storm surge").value
    archive.append("transcript", [_calls(0, "search_archive", query="storm surge"), _got(0, found)])
    archive.state.append("sources", found[:2])
    archive.spend("small-1", input_tokens=1_410, output_tokens=122, usd="0.0017")
    archive.end()
    _write(draft, passes)
    editor.append("transcript", [_says("assistant", "The draft stands; the figures are checked.")])
    editor.state.merge("plan", {"status": "draft"})
    gauges.end()
    _pay(editor, passes)


def _write(draft: Session[Any], passes: Passes) -> None:
    text = ["The sea comes twice a day.", "In 1953 it stayed.", "Nobody in town owns a cellar."]
    for place, line in enumerate(text, 1):
        passes(33)
        draft.save({"draft": text[:place], "words": 190 * place})
        draft.state.set("words", 190 * place)
        draft.spend("large-2", input_tokens=3_000 + 400 * place, output_tokens=420, usd="0.0214")
        draft.append("transcript", [_says("assistant", line)])
    draft.rewind(2)
    passes(9)
    draft.save({"draft": [text[0], "In 1987 the pier went."], "words": 380})
    with contextlib.suppress(VersionConflict):
        draft.state.set("words", 380, if_version=1)
    draft.state.set("words", 380)


def _pay(editor: Session[Any], passes: Passes) -> None:
    """Send a picture desk its fee, and lose the connection on the way."""
    passes(15)
    issued = editor.begin(pay_fee.name, {"to": "picture desk", "cents": 12_000}, "call-fee")
    if isinstance(issued, Issued):
        issued.fail("the connection was reset after the request was sent")


def _letter(store: Store) -> None:
    letter = store.session(LETTER, name="Newsletter 12", agent="newsletter", user="ada")
    letter.append("transcript", [_says("assistant", "The newsletter is ready for 4,812 readers.")])
    letter.spend("small-1", input_tokens=5_100, output_tokens=840, usd="0.0072")
    question = {"send": "Newsletter 12", "readers": 4_812, "subject": "Living with the tide"}
    letter.wait_for_approval(question, context={"step": "send"})


def _briefing(store: Store) -> None:
    briefing = store.session(BRIEFING, name="Morning briefing", agent="planner", user="ben")
    briefing.append("transcript", [_says("user", "What do I need to know today?")])
    weather = briefing.ask("weather", {"city": "Bergen"}, id=f"{BRIEFING}-weather")
    briefing.ask("agenda", {"user": "ben"}, id=f"{BRIEFING}-agenda", timeout_seconds="never")
    briefing.pause({"step": "compose"})
    store.answer(weather.id, {"rain": True, "celsius": 9})


def _desk(store: Store, passes: Passes) -> None:
    """Submit work that is done, has failed, is running, and is scheduled for later."""
    submitted = ("caption", "translate", "fact-check", "caption", "index")
    for place, kind in enumerate(submitted):
        store.work.submit(
            kind, {"page": place + 1}, queue=QUEUE, id=f"{QUEUE}-{place}", max_retries=0
        )
    for place, item in enumerate(store.work.claim("desk-worker-1", queues=[QUEUE], limit=4)):
        passes(6)
        if place < 2:
            item.complete({"page": place + 1})
        elif place == 2:
            item.fail("HTTP 503 from the archive")
    store.work.submit("archive-nightly", queue=QUEUE, delay_seconds=36_000, id=f"{QUEUE}-night")


@contextlib.contextmanager
def lively(url: str) -> Iterator[None]:
    """Keep an agent of the newsroom working in the background until the end of the block."""
    stopped = threading.Event()
    thread = threading.Thread(target=_beat, args=(url, stopped))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _beat(url: str, stopped: threading.Event) -> None:
    """Read the wires: what it finds is in its transcript, the shared state and the work queue."""
    with open(url) as store:
        desk = store.session(DESK, name="News desk", agent="desk", reopen=True)
        for beat in range(BEATS_MAX):
            if stopped.wait(BEAT_SECONDS):
                return
            headline = HEADLINES[beat % len(HEADLINES)]
            read = desk.state.increment("wires_read")
            desk.append("transcript", [_says("assistant", f"{read.value}: {headline}")])
            desk.state.set("headline", headline)
            store.work.submit("wire", {"headline": headline}, queue=DESK, session=desk)
            for item in store.work.claim("desk-worker-2", queues=[DESK]):
                item.complete({"filed": headline})


def _says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _calls(place: int, tool: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": f"call-{place}", "name": tool, "arguments": arguments}
    return {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}


def _got(place: int, result: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call-{place}", "content": result}
