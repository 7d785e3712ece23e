"""What pages read: lists read no channels, and no more statements the more there is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import holdfast
from holdfast.codec import Codec
from holdfast.kernel.driver import Hooks, Trace
from tests.server.serving import Served, serving
from tests.ui.content import EXPLORED, ROOT, doubt, fill

LISTS = (
    "", "sessions", "in-doubt", "work", "pauses", "events", "conflicts", "spend", "storage",
    "search?q=t", f"sessions/{ROOT}", f"sessions/{ROOT}/checkpoints", f"sessions/{ROOT}/effects",
    f"sessions/{ROOT}/timeline", f"sessions/{ROOT}/peers", f"sessions/{ROOT}/state",
    "explorations", f"explorations/{EXPLORED}",
)  # fmt: skip
CHANNELS = {"at", "latest", "diff", "resume_point"}


def test_lists_read_no_channels_and_cost_the_same_when_there_is_more(place: dict[str, Any]) -> None:
    traces: list[Trace] = []
    hooks = Hooks(trace=traces.append)
    with holdfast.open(**place) as store, serving(**place, hooks=hooks) as served:
        fill(store)
        before = {path: _cost(served, traces, path) for path in LISTS}
        for number in range(30):
            session = store.session(f"more-{number}", parent=ROOT, agent="more")
            session.append("transcript", [number])
            session.state.set(f"key-{number}", number)
            doubt(session, f"pay-{number}")
            session.wait_for_approval({"n": number})
            store.work.submit("mail", session=ROOT, id=f"more-{number}")
        store.find_session(ROOT).state.set("last", 1)
        after = {path: _cost(served, traces, path) for path in LISTS}
    for path in LISTS:
        assert not CHANNELS & {name.rpartition(".")[2] for name in before[path]}, path
        assert 0 < sum(before[path].values()) <= 30, path
        assert not after[path] - before[path], path


def _cost(served: Served, traces: list[Trace], path: str) -> Counter[str]:
    """Return how many statements each call of a page takes."""
    traces.clear()
    assert served.get(f"/ui/{path}", headers={"accept": "text/html"}).status_code == 200
    found: Counter[str] = Counter()
    for trace in traces:
        found[trace.call] += trace.statements
    # Tokens are remembered for a while.
    del found["Tokens.find"]
    return found


def test_pages_read_no_more_than_they_show(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that lie in the store as bytes are counted as they are made values again."""
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.state.initialize({f"key-{number:04}": number for number in range(600)})
        for number in (1, 2):
            session.state.set("key-0000", -number)
        for number in range(300):
            store.cancel_ask(session.ask("weather", number).id)
    read: list[object] = []
    body_of = Codec._body

    def counted(codec: Codec, *args: Any, **given: Any) -> Any:
        read.append(args)
        return body_of(codec, *args, **given)

    monkeypatch.setattr(Codec, "_body", counted)
    with serving(**place) as served:
        for path, most in (
            ("state", 60), ("state?at=2", 60), ("state?limit=10", 20), ("timeline", 400),
            ("peers", 500), ("", 210),
        ):  # fmt: skip
            read.clear()
            assert served.get(f"/ui/sessions/s/{path}".rstrip("/")).status_code == 200
            assert 0 < len(read) <= most, path
