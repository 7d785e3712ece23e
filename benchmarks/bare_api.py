"""The same transactions by hand behind FastAPI, without tokens, limits or problems.

With `langgraph`, a LangGraph saver stands behind it: a turn reads the newest checkpoint and puts
the next, a call writes the result of its task and the checkpoint that follows.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from .keepers import Message, Place
from .registers import ADD_EVENT, ApswRegister, PsycopgRegister, SqlRegister

TABLES = """
CREATE TABLE thread (id TEXT PRIMARY KEY, version BIGINT NOT NULL, position BIGINT NOT NULL);
CREATE TABLE checkpoint (
    session_id TEXT, version BIGINT, channel TEXT NOT NULL, items TEXT NOT NULL,
    created_at BIGINT NOT NULL, PRIMARY KEY (session_id, version)
);
CREATE TABLE item (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, priority BIGINT NOT NULL, input TEXT NOT NULL,
    output TEXT, holder TEXT, fence BIGINT NOT NULL, lease_until BIGINT, created_at BIGINT NOT NULL
);
CREATE INDEX item_ready ON item (priority DESC, created_at) WHERE state = 'pending';
INSERT INTO thread VALUES ('root', 0, 1000000000);
"""
READ_THREAD = "SELECT version, position FROM thread WHERE id = 'root'"
ADD_CHECKPOINT = "INSERT INTO checkpoint VALUES ('root', $1, $2, $3, $4)"
MOVE_THREAD = "UPDATE thread SET version = $1, position = $2 WHERE id = 'root'"
ADD_ITEM = "INSERT INTO item VALUES ($1, 'pending', 0, $2, NULL, NULL, 0, NULL, $3)"
CLAIM = """
UPDATE item SET state = 'in_progress', holder = $1, fence = fence + 1, lease_until = $2
WHERE id = (
    SELECT id FROM item WHERE state = 'pending' ORDER BY priority DESC, created_at LIMIT 1 {skip}
) RETURNING id, fence
"""
COMPLETE = """
UPDATE item SET state = 'completed', output = $1 WHERE id = $2 AND fence = $3
    AND state = 'in_progress'
"""
LEASE_MS = 30_000
# So many messages of a thread are kept, so that the last turn costs what the first did.
TRANSCRIPT_MESSAGES = 100


def application(place: Place) -> Any:
    """Return the application over a new SQLite file, or a PostgreSQL schema."""
    from fastapi import Body, FastAPI

    place.create()
    register: SqlRegister
    register = PsycopgRegister(place) if place.path is None else ApswRegister(place)
    register.works()
    for text in TABLES.split(";\n"):
        register.exchange([], lambda _, text=text: [(text, ())] if text.strip() else [])  # type: ignore[misc]
    app, lock, numbers = FastAPI(), threading.Lock(), itertools.count()
    claim_text = CLAIM.format(skip="FOR UPDATE SKIP LOCKED" if place.path is None else "")
    read_text = READ_THREAD + (" FOR NO KEY UPDATE" if place.path is None else "")

    @app.get("/get")
    def get() -> Any:
        with lock:
            return {"key": "swapped", "value": register.get(), "version": register.version}

    @app.put("/swap")
    def swap(body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        with lock:
            register.swap()
            return {"key": "swapped", "value": body["value"], "version": register.version}

    @app.post("/increment")
    def increment(body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        with lock:
            register.increment(["count"])
            return {"key": "count", "operation": body["operation"]}

    @app.post("/save")
    def save(body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        part, now = body["append"], _now()

        def write(found: list[Any]) -> Any:
            version, position = found[0][0] + 1, found[0][1] + 1
            yield ADD_CHECKPOINT, (version, part["channel"], json.dumps(part["items"]), now)
            yield ADD_EVENT, (position, json.dumps({"version": version}), now)
            yield MOVE_THREAD, (version, position)

        with lock:
            [(version, _)] = register.exchange([(read_text, ())], write)
            return {"version": version + 1}

    @app.post("/submit")
    def submit(body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        id = str(next(numbers))
        with lock:
            register.exchange([], lambda _: [(ADD_ITEM, (id, json.dumps(body["input"]), _now()))])
            return {"id": id}

    @app.post("/claim")
    def claim(body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        claimed = (claim_text, (body["holder"], _now() + LEASE_MS))
        with lock:
            [(id, fence)] = register.exchange([claimed], lambda _: [])
            return {"items": [{"id": id, "fence": fence}]}

    @app.post("/complete/{id}")
    def complete(id: str, body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        ended = (COMPLETE, (json.dumps(body["output"]), id, body["fence"]))
        with lock:
            register.exchange([], lambda _: [ended])
            return {"id": id}

    return app


def langgraph_application(place: Place) -> Any:
    """Return the application over a saver, on a thread of bounded length."""
    from fastapi import Body, FastAPI

    from .callers_peers import LangGraphCalls
    from .keepers_langgraph import SaverKeeper

    place.create()
    keeper = SaverKeeper("LangGraph", place)
    keeper.open()
    kept: deque[Message] = deque(maxlen=TRANSCRIPT_MESSAGES)
    calls = LangGraphCalls(keeper.saver)
    app, lock = FastAPI(), threading.Lock()

    @app.post("/append")
    def append(body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        with lock:
            kept.clear()
            kept.extend(keeper.load() if keeper.history else [])
            kept.append(body["message"])
            keeper.history = list(kept)
            keeper.save()
            return {"messages": len(kept)}

    @app.post("/call")
    def call() -> Any:
        with lock:
            calls.both()
            return {}

    return app


def _now() -> int:
    return time.time_ns() // 1_000_000


def main() -> None:
    """Serve it at a port until it is ended."""
    import uvicorn

    kind, port, *where = sys.argv[1:]
    place = Place(path=Path(where[0])) if len(where) == 1 else Place(dsn=where[0], schema=where[1])
    made = langgraph_application if kind == "langgraph" else application
    uvicorn.run(made(place), port=int(port), log_level="error", access_log=False)


if __name__ == "__main__":
    main()
