"""The same transactions by hand behind FastAPI, without tokens, limits or problems."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from .keepers import Place
from .registers import ApswRegister, PsycopgRegister, SqlRegister


def application(place: Place) -> Any:
    """Return the application over a new SQLite file, or a PostgreSQL schema."""
    from fastapi import Body, FastAPI

    place.create()
    register: SqlRegister
    register = PsycopgRegister(place) if place.path is None else ApswRegister(place)
    register.works()
    app, lock = FastAPI(), threading.Lock()

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

    return app


def main() -> None:
    """Serve it at a port until it is ended."""
    import uvicorn

    port, *where = sys.argv[1:]
    place = Place(path=Path(where[0])) if len(where) == 1 else Place(dsn=where[0], schema=where[1])
    uvicorn.run(application(place), port=int(port), log_level="error", access_log=False)


if __name__ == "__main__":
    main()
