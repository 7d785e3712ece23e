"""A grid to explore, in memory or in systems that outlive the process; a module to be killed.

Its size and its place are in the environment, so that worker processes have the same.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import apsw

import holdfast
from holdfast.worlds import (
    Exploration,
    FileSystem,
    MemorySystem,
    Progress,
    SqliteSystem,
    System,
    World,
    action,
    explore,
    invariant,
)

SIDE, FOLDER = "HOLDFAST_TEST_SIDE", "HOLDFAST_TEST_FOLDER"
DSN, REDIS_URL = "HOLDFAST_TEST_GRID_DSN", "HOLDFAST_TEST_GRID_REDIS"


def side() -> int:
    return int(os.environ[SIDE])


def make_memory_world() -> World:
    return World({"grid": MemorySystem({"x": 0, "y": 0})})


def make_folder(folder: Path) -> None:
    """Make what `make_real_world` works on."""
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "y").write_text("0")
    connection = apsw.Connection(str(folder / "x.db"))
    connection.pragma("journal_mode", "wal")
    connection.execute("CREATE TABLE place (x); INSERT INTO place VALUES (0)")
    connection.close()


def make_real_world() -> World:
    """x is in a database, y in a file; both are what the killed process left."""
    folder = Path(os.environ[FOLDER])
    systems: dict[str, System] = {
        "db": SqliteSystem(folder / "x.db"),
        "files": FileSystem(folder / "files"),
    }
    user = apsw.Connection(str(folder / "x.db"))
    world = World(systems, clients={"user": user, "y": folder / "files" / "y"})
    world.on_close(user.close)
    return world


def make_own_world() -> World:
    """A real world in a folder of its own, which is removed with it."""
    own = tempfile.TemporaryDirectory(prefix="world-")
    make_folder(Path(own.name) / "systems")
    os.environ[FOLDER] = str(Path(own.name) / "systems")
    world = make_real_world()
    world.on_close(own.cleanup)
    return world


def make_servers_world() -> World:
    """x is in PostgreSQL, y in Redis; both are what the killed process left."""
    import psycopg
    import redis

    from holdfast.worlds.systems.postgres import PostgresSystem
    from holdfast.worlds.systems.redis import RedisSystem

    dsn, url = os.environ[DSN], os.environ[REDIS_URL]
    systems: dict[str, System] = {
        "db": PostgresSystem(dsn),
        "keys": RedisSystem(url, prefix="grid:"),
    }
    users: dict[str, Any] = {
        "x": psycopg.connect(dsn, autocommit=True),
        "y": redis.Redis.from_url(url),
    }
    world = World(systems, clients=users)
    for user in users.values():
        world.on_close(user.close)
    return world


def place(world: World) -> tuple[int, int]:
    grid = world.systems.get("grid")
    if isinstance(grid, MemorySystem):
        return grid.data["x"], grid.data["y"]
    if "x" in world.clients:
        [[x]] = world.clients["x"].execute("SELECT x FROM place").fetchall()
        return x, int(world.clients["y"].get("grid:y"))
    [[x]] = world.clients["user"].execute("SELECT x FROM place").fetchall()
    return x, int(world.clients["y"].read_text())


def put(world: World, x: int, y: int) -> None:
    grid = world.systems.get("grid")
    if isinstance(grid, MemorySystem):
        grid.data.update(x=x, y=y)
    elif "x" in world.clients:
        world.clients["x"].execute("UPDATE place SET x = %s", (x,))
        world.clients["y"].set("grid:y", y)
    else:
        world.clients["user"].execute("UPDATE place SET x = ?", (x,))
        world.clients["y"].write_text(str(y))


@action(parameters={"by": [-1, 1]})
def walk(world: World, by: int) -> None:
    x, y = place(world)
    put(world, min(max(x + by, 0), side() - 1), y)


@action(parameters={"by": [1, 2]}, requires=lambda world, by: place(world)[1] + by < side())
def climb(world: World, by: int) -> None:
    x, y = place(world)
    if (x, by) == (3, 2):
        raise OSError("the ladder broke")
    put(world, x, y + by)


@action
def reset(world: World) -> None:
    put(world, 0, 0)


@invariant
def never_on_the_diagonal(world: World) -> bool:
    x, y = place(world)
    return x != y or x == 0 or x % 5 > 0


ACTIONS = [walk, climb, reset]
INVARIANTS = [never_on_the_diagonal]
WORLDS = {
    "memory": make_memory_world,
    "real": make_real_world,
    "own": make_own_world,
    "servers": make_servers_world,
}


def explored(kind: str, **options: Any) -> Exploration:
    return explore(WORLDS[kind], ACTIONS, INVARIANTS, max_steps=10**9, **options)


def facts(result: Exploration) -> dict[str, Any]:
    """What must not depend on kills and workers: no parents, labels or step numbers."""
    graph = result.graph
    return {
        "states": {id: state.depth for id, state in graph.states.items()},
        "edges": sorted(
            (edge.from_id, edge.step.action, str(edge.step.arguments), edge.to_id)
            for edge in graph.transitions
        ),
        "violations": sorted(
            (found.invariant, found.state_id if found.check else "", len(found.path))
            for found in result.violations
        ),
        "complete": result.is_complete,
    }


def main(kind: str, url: str, workers: str, commit_every: str) -> None:
    """Explore, or go on with it; after each step say how many there were, and wait for a line."""

    def say(now: Progress) -> None:
        print(now.steps, flush=True)
        sys.stdin.readline()

    with holdfast.open(url) as store:
        explored(
            kind,
            store=store,
            id="grid",
            resume=True,
            commit_every=int(commit_every),
            on_progress=say,
            workers=int(workers),
        )


if __name__ == "__main__":
    from tests.worlds.grid import main as run

    run(*sys.argv[1:])
