"""How long the pages of the dashboard take in a store that holds very much.

Every page is asked for in the process that serves it, so a figure is what the server needs for it:
reading, and making the page. Requests of one round come one after the other.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console

import holdfast
from holdfast import worlds
from holdfast.server.app import Api
from holdfast.server.endpoints import Router
from holdfast.server.routes import ENDPOINTS

from . import bulk, servers
from .bulk import BIG, RARE
from .measure import Contestant, Figures, Report, Target, compare, environment

MILLISECONDS = "ms"
MILLISECONDS_MAX = 300.0
REQUESTS = 5
EXPLORED, EXPLORATIONS, STATES_WIDE = "field", 60, 50
KEY, STATE_KEYS, CHANGES, CHILDREN = "plan", 9_000, 200, 150
# Signing in, what pages are told by, their files, and a download.
NO_PAGES = {
    "/ui", "/ui/login", "/ui/live", "/ui/sessions/{id}/live", "/ui/events/export",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """How many sessions and events the store has, and how many rounds there are."""

    sessions: int
    events: int
    rounds: int


FULL = Plan(100_000, 1_000_000, 5)
QUICK = Plan(5_000, 50_000, 2)


class Pages:
    """A filled store, served in this process."""

    def __init__(self, runner: asyncio.Runner, place: dict[str, Any]) -> None:
        self._runner = runner
        with holdfast.open(**place) as store:
            secret = store.tokens.create("bench", permission="admin").secret
            self.paths = _paths(store)
        self._store = runner.run(_opened(place))
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(Api(self._store)),
            base_url="http://localhost",
            headers={"authorization": f"Bearer {secret}", "accept": "text/html"},
        )

    def get(self, path: str) -> str:
        """Return a page."""
        answer = self._runner.run(self._client.get(path))
        assert answer.status_code == 200, (path, answer.text)
        return answer.text

    def round(self, path: str) -> Figures:
        """Return the median time of some requests, what they use here, and a page's size."""
        times, text, used = [], "", time.process_time()
        for _ in range(REQUESTS):
            started = time.perf_counter()
            text = self.get(path)
            times.append(1000 * (time.perf_counter() - started))
        used = 1000 * (time.process_time() - used) / REQUESTS
        return {MILLISECONDS: statistics.median(times), "CPU ms": used, "kB": len(text) / 1000}

    def close(self) -> None:
        """Close the store."""
        self._runner.run(self._client.aclose())
        self._runner.run(self._store.close())


def _paths(store: holdfast.Store) -> dict[str, str]:
    """Return the address of each page, by its name."""
    version, keys = store.find_session(BIG).info().version, f"/state/{KEY}"
    newest = max(each.position for each in store.latest_events(limit=1_000) if each.root_id == BIG)
    [effect] = store.effects(status="unknown", limit=1)
    [item] = store.work.list(status="in_progress", limit=1)
    [pause] = store.pauses(state="waiting", limit=1)
    tabs = {
        "summary": "", "transcript": "/transcript", "checkpoints": "/checkpoints",
        "one checkpoint": f"/checkpoints/{version}",
        "two compared": f"/diff?a={version - 1}&b={version}", "effects": "/effects",
        "spend": "/spend", "state": "/state", "state, the past": "/state?at=2",
        "keys that begin with": f"/state?prefix={KEY[0]}", "key with blame": keys,
        "key, older": f"{keys}?cursor={_cursor(CHANGES // 2)}",
        "key compared": f"{keys}/diff?a=3", "timeline": "/timeline",
        "timeline, middle": f"/timeline?until={version // 2}",
        "two moments": f"/moments?a={version // 2}&b={version}",
        "two states": f"/moments?a={newest - CHANGES // 2}&b={newest}", "peers": "/peers",
    }  # fmt: skip
    return {
        "overview": "/ui/",
        "sessions": "/ui/sessions",
        "sessions, rare": f"/ui/sessions?agent={RARE}",
        **{f"session: {name}": f"/ui/sessions/{BIG}{path}" for name, path in tabs.items()},
        "in doubt": "/ui/in-doubt",
        "effect": f"/ui/effects/{effect.id}",
        "pauses": "/ui/pauses",
        "pause": f"/ui/pauses/{pause.id}",
        "work": "/ui/work",
        "work, rare": f"/ui/work?type={RARE}",
        "work item": f"/ui/work/{item.id}",
        "spend": "/ui/spend",
        "spend by session": "/ui/spend?by=session",
        "spend by day": "/ui/spend?by=day",
        "events": "/ui/events",
        "events of a session": f"/ui/events?session={BIG}",
        "events, none matches": "/ui/events?kind=none",
        "conflicts": "/ui/conflicts",
        "explorations": "/ui/explorations",
        "exploration": f"/ui/explorations/{EXPLORED}",
        "storage": "/ui/storage",
        "search": "/ui/search?q=0",
    }


def _cursor(number: int) -> str:
    return base64.urlsafe_b64encode(str(number).encode()).decode()


def unmeasured(paths: Iterable[str]) -> set[str]:
    """Return the routes of pages that none of some addresses leads to."""
    router = Router(ENDPOINTS)
    measured = {router.find("GET", urlsplit(path).path.encode())[0].path for path in paths}
    pages = {each.path for each in ENDPOINTS if each.is_page and each.method == "GET"}
    return {each for each in pages - measured - NO_PAGES if not each.startswith("/ui/static/")}


def fill_more(store: holdfast.Store) -> None:
    """Add what pages show and bulk rows lack: children, shared state with a history, a graph."""
    big = store.find_session(BIG)
    for number in range(CHILDREN):
        store.session(f"child-{number}", parent=big)
    big.state.initialize({f"key-{number:05}": {"n": number} for number in range(STATE_KEYS)})
    for number in range(CHANGES):
        big.state.merge(KEY, {f"part-{number % 20}": {"n": number, "text": "x" * 100}})
    for number in range(EXPLORATIONS):
        _explore(store, f"place-{number}", 1)
    _explore(store, EXPLORED, STATES_WIDE)


def _explore(store: holdfast.Store, id: str, wide: int) -> None:
    """Explore a field of so many places in each direction; one of them is wrong."""
    field = worlds.MemorySystem({"x": 0, "y": 0})

    @worlds.action(parameters={"along": ["x", "y"]}, requires=lambda _, along: _is_in(along))
    def go(_: worlds.World, along: str) -> None:
        field.data[along] += 1

    def _is_in(along: str) -> bool:
        return bool(field.data[along] < wide)

    @worlds.invariant
    def never_far(_: worlds.World) -> bool:
        return bool(field.data != {"x": wide, "y": wide})

    world = worlds.World({"field": field})
    worlds.explore(
        world,
        [go],
        [never_far],
        max_steps=100_000,
        shrinks=False,
        store=store,
        id=id,
        commit_every=500,
    )


async def _opened(place: dict[str, Any]) -> holdfast.AsyncStore:
    return await holdfast.aopen(**place, mode="read")


@contextlib.contextmanager
def serving(place: dict[str, Any], plan: Plan) -> Iterator[Pages]:
    """Fill a new store, and serve its pages until the end of the block."""
    with holdfast.open(**place) as store:
        bulk.fill(store, plan.sessions, plan.events)
        fill_more(store)
    with asyncio.Runner() as runner:
        pages = Pages(runner, place)
        try:
            yield pages
        finally:
            pages.close()


def run(console: Console, *, quick: bool) -> Report:
    """Measure every page on both databases."""
    plan = QUICK if quick else FULL
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        servers.postgres() as dsn,
        servers.schemas(dsn, 1) as [schema],
    ):
        report = Report("pages", environment() | servers.settings(dsn))
        places: dict[str, dict[str, Any]] = {
            "SQLite": {"url": f"sqlite:///{Path(directory) / 'pages.db'}"},
            "PostgreSQL": {"url": dsn, "namespace": schema},
        }
        held = f"{plan.sessions:,} sessions, {plan.events:,} events"
        for database, place in places.items():
            with serving(place, plan) as pages:
                contestants = [
                    Contestant(name, functools.partial(pages.round, path))
                    for name, path in pages.paths.items()
                ]
                title = f"{database}: pages of the dashboard, {held}"
                table = compare(title, contestants, rounds=plan.rounds, key=MILLISECONDS)
            report.tables.append(table)
            table.show(console)
            for name in pages.paths:
                text, median = f"{database}: {name}", table.median(name)
                target = Target(text, median, at_most=MILLISECONDS_MAX, unit=MILLISECONDS)
                report.targets.append(target)
        report.environment["load after"] = f"{os.getloadavg()[0]:.2f}"
    return report
