"""Workers and agents on a client: they are killed, their server is killed, nothing is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.agent import Agent, call
from holdfast.kernel.driver import Hooks, Point
from tests.agent.helpers import World
from tests.agent.test_resume import (
    THREE,
    check_outcome,
)
from tests.agent.test_resume import (
    test_dying_at_every_place_repeats_nothing_and_forgets_no_money as kill_the_agent,
)
from tests.server.processes import KilledServer
from tests.work.fleet import read_lines
from tests.work.test_fleet import check_fleet

SECONDS_MAX = 120.0
DONE_BETWEEN_KILLS = 12


@pytest.fixture
def server(new_place: dict[str, Any]) -> Iterator[KilledServer]:
    with ExitStack() as stack:
        yield KilledServer(new_place, stack)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[KilledServer]:
    """A server on SQLite."""
    with ExitStack() as stack:
        yield KilledServer({"url": f"sqlite:///{tmp_path}/store.db"}, stack)


@contextmanager
def killed_meanwhile(
    server: KilledServer, times: int, progress: Callable[[], int]
) -> Iterator[threading.Event]:
    """Kill a server whenever something was done since; the event tells of the last kill."""
    enough, stop = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            for _ in range(times):
                before = progress()
                while progress() < before + DONE_BETWEEN_KILLS:
                    if stop.wait(0.01):
                        return
                server.restart()
        except BaseException as error:
            failed.append(error)
        finally:
            enough.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield enough
    finally:
        stop.set()
        thread.join(SECONDS_MAX)
    assert failed == []


def test_a_killed_agent_goes_on_through_the_server(local: KilledServer, tmp_path: Path) -> None:
    kill_the_agent(local.place, tmp_path, 23)


def check_killed_fleet(
    server: KilledServer, tmp_path: Path, items: int, kills: int, restarts: int
) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))
    runs = str(tmp_path / "runs")
    with killed_meanwhile(server, restarts, lambda: len(read_lines(runs))):
        check_fleet(server.place, tmp_path, items=items, kills=kills, seed=seed)


def test_a_fleet_ends_every_item_once_while_it_and_the_server_are_killed(
    local: KilledServer, tmp_path: Path
) -> None:
    check_killed_fleet(local, tmp_path, items=40, kills=3, restarts=1)


@pytest.mark.slow
def test_a_thousand_items_sixty_kills_and_ten_of_the_server(
    server: KilledServer, tmp_path: Path
) -> None:
    check_killed_fleet(server, tmp_path, items=1_000, kills=60, restarts=10)


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_an_agent_notices_nothing_of_a_server_that_is_killed_around_its_requests(
    local: KilledServer, tmp_path: Path, step: int
) -> None:
    """Before a request is sent and after it was answered, one kill in each run."""
    script = [THREE[0], call("mail", to="ann"), "Booked."]
    world, number, is_killed = World(tmp_path), 1, True
    while is_killed:
        world.path.write_text("")
        points: list[Point] = []

        def visit(point: Point) -> None:
            points.append(point)  # noqa: B023
            if len(points) == number:  # noqa: B023
                local.restart()

        with holdfast.open(**local.place, hooks=Hooks(probe=visit)) as store:
            session = store.session(f"s{number}")
            agent = Agent(session, world.model(script), tools=world.tools(), instance="a")
            check_outcome(world, agent.run("go", message_id="m"), session.latest(), f"{number}")
        assert world.count("asked") == 3
        is_killed = len(points) >= number
        number += step
    assert number > 30


@pytest.mark.parametrize("restarts", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_what_clients_have_written_is_there_exactly_once(
    server: KilledServer, restarts: int
) -> None:
    """The server dies in the middle of writes; each was made once, whoever was told so."""
    made = {"state": 0, "log": 0, "tools": 0}
    ran: list[int] = []

    def increment(store: holdfast.Store) -> None:
        store.find_session("one").state.increment("n")

    def append(store: holdfast.Store) -> None:
        store.find_session("one").append("log", [made["log"]])

    @holdfast.tool(effect="mutate")
    def note(number: int) -> None:
        ran.append(number)

    def run_tool(store: holdfast.Store) -> None:
        store.find_session("tools").call(note, number=made["tools"])

    with holdfast.open(**server.place) as store:
        store.session("one")
        store.session("tools")
        with killed_meanwhile(server, restarts, lambda: sum(made.values())) as enough:

            def repeat(name: str, function: Callable[[holdfast.Store], None]) -> None:
                while not enough.is_set():
                    function(store)
                    made[name] += 1

            threads = [
                threading.Thread(target=repeat, args=each)
                for each in (("state", increment), ("log", append), ("tools", run_tool))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS_MAX * restarts)
        session = store.find_session("one")
        latest = session.latest()
        assert latest is not None
        assert session.state.get("n") == made["state"]
        assert latest["log"] == list(range(made["log"]))
        assert ran == list(range(made["tools"]))
        assert len(store.effects(session="tools", limit=1_000)) == made["tools"]
