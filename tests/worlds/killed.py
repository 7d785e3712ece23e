"""Worlds whose process is killed in the middle: run as a module, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import apsw

import holdfast
from holdfast.worlds import (
    FileSystem,
    HoldfastSystem,
    MemorySystem,
    SqliteSystem,
    System,
    World,
)
from holdfast.worlds.values import encode
from tests.worlds.systems import Fault

NAMES = ("a", "b", "c")


def killed(*arguments: object) -> None:
    """Run a function of this module in a process of its own, until it kills itself."""
    command = [sys.executable, "-m", "tests.worlds.killed", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trapped(System):
    """A number in a file; `traps` say at which calls of an operation it fails or dies."""

    def __init__(self, path: Path, traps: dict[str, Sequence[str]] | None = None) -> None:
        self.path = path
        self.traps = {name: list(trap) for name, trap in (traps or {}).items()}

    def checkpoint(self, name: str) -> str:
        self._step("checkpoint")
        return self.path.read_text()

    def keep(self, token: str) -> str:
        self._step("keep")
        return token

    def rollback(self, token: str) -> None:
        self._step("rollback")
        self.path.write_text(token)

    def restore(self, kept: str) -> None:
        self._step("restore")
        self.path.write_text(kept)

    def observe(self) -> object:
        return self.path.read_text()

    def _step(self, what: str) -> None:
        trap = self.traps.get(what) or [""]
        match trap.pop(0):
            case "die":
                die()
            case "fail":
                raise Fault(f"no {what} today")


def three(folder: Path, traps: dict[str, Any] | None = None) -> dict[str, Trapped]:
    """Three systems on files of a folder, with traps by their names."""
    return {name: Trapped(folder / name, (traps or {}).get(name)) for name in NAMES}


def numbers(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in NAMES]


def roll_back(url: str, folder: str, traps: str) -> None:
    """Keep a checkpoint at 1, go to 2, and roll back; or make a second checkpoint there."""
    place, given = Path(folder), json.loads(traps)
    with holdfast.open(url) as store:
        systems = three(place)
        world = World(systems, context={"n": 1}, store=store, id="three")
        world.checkpoint("one")
        for name in NAMES:
            (place / name).write_text("2")
        world.context["n"] = 2
        for name, system in systems.items():
            system.traps = {what: list(trap) for what, trap in given.get(name, {}).items()}
        if any({"checkpoint", "keep"} & trap.keys() for trap in given.values()):
            world.checkpoint("two")
        world.rollback("one")


def real_systems(folder: Path) -> dict[str, System]:
    """A directory, a database that others use, data in memory, and one that can die."""
    return {
        "files": FileSystem(folder / "files"),
        "db": SqliteSystem(folder / "db.sqlite"),
        "zz": Trapped(folder / "n"),
        "memory": MemorySystem({"n": 0}),
    }


def change(folder: Path, n: int) -> None:
    """Change all that `real_systems` keep outside of the process."""
    (folder / "files" / "sub").mkdir(exist_ok=True)
    (folder / "files" / "sub" / f"{n}.txt").write_text(f"file {n}")
    (folder / "files" / "same.txt").write_text(f"now {n}")
    connection = apsw.Connection(str(folder / "db.sqlite"))
    connection.execute("INSERT INTO t VALUES (?); UPDATE total SET n = ?", (n, n))
    connection.close()
    (folder / "n").write_text(str(n))


def roll_back_real_systems(url: str, folder: str) -> None:
    place = Path(folder)
    with holdfast.open(url) as store:
        systems = real_systems(place)
        world = World(systems, store=store, id="real")
        for n in (2, 3):
            change(place, n)
            world.context["n"] = n
            world.checkpoint(f"at {n}")
        change(place, 4)
        trapped = systems["zz"]
        assert isinstance(trapped, Trapped)
        trapped.traps["rollback"] = ["die"]
        world.rollback("at 2")


class DyingTrees:
    """The trees of a store, until so many of them were restored."""

    def __init__(self, trees: Any, left: int) -> None:
        self._trees = trees
        self._left = left

    def __getattr__(self, name: str) -> Any:
        if name in ("restore", "restore_effects"):
            if not self._left:
                die()
            self._left -= 1
        return getattr(self._trees, name)


@holdfast.tool
def pay(card: str) -> str:
    """Pay, as far as the ledger knows."""
    return f"paid with {card}"


def roll_back_a_store(url: str, place: str, after: str) -> None:
    """Keep a checkpoint of a store of agents, change it, and die in the middle of a rollback."""
    with holdfast.open(url) as keeper, holdfast.open(**json.loads(place)) as agents:
        system = HoldfastSystem(agents)
        world = World({"agents": system}, store=keeper, id="agents")
        world.checkpoint("one")
        for n in range(3):
            session = agents.session(f"agent {n}")
            session.call(pay, card="late")
            session.append("log", ["late"])
            session.state.set("k", "late")
            agents.once(f"late {n}", lambda: "late")
        agents.session("agent 1").end()
        agents.session("late")
        system._trees = cast("Any", DyingTrees(system._trees, int(after)))
        world.rollback("one")


def keep(kind: str, place: str, file: str) -> None:
    """Change a system, write what it keeps of a checkpoint to a file, change it more, and die."""
    made = system(kind, place)
    touch(kind, place, 1)
    made.keep(made.checkpoint("zero"))
    touch(kind, place, 2)
    token = made.checkpoint("one")
    Path(file).write_bytes(encode(made.keep(token), "kept"))
    touch(kind, place, 3)
    made.checkpoint("two")
    touch(kind, place, 4)
    die()


def system(kind: str, place: str) -> System:
    """Return a system of a kind at a directory, a database file, or the address of a server."""
    match kind:
        case "files":
            return FileSystem(place)
        case "sqlite" | "sqlite copies":
            return SqliteSystem(place)
        case "redis":
            from holdfast.worlds.systems.redis import RedisSystem

            return RedisSystem(place)
        case _:
            from holdfast.worlds.systems.postgres import PostgresSystem

            return PostgresSystem(place)


def touch(kind: str, place: str, n: int) -> None:
    """Change what a system covers, as another program would."""
    match kind:
        case "files":
            touch_files(Path(place), n)
        case "sqlite" | "sqlite copies":
            connection = apsw.Connection(place)
            connection.execute("INSERT INTO t VALUES (?); UPDATE total SET n = ?", (n, n))
            connection.execute(f"CREATE TABLE made_{n} (x); INSERT INTO made_{n} VALUES ({n})")
            connection.close()
        case "redis":
            import redis

            with redis.Redis.from_url(place) as client:
                client.set("same", n)
                client.set(f"only {n}", "x", pxat=4_000_000_000_000)
                client.delete(f"only {n - 2}")
                client.zadd("sorted", {str(n): n})
        case _:
            import psycopg

            with psycopg.connect(place, autocommit=True) as user:
                user.execute("INSERT INTO plain (name, n) VALUES (%s, %s)", (f"n{n}", n))
                user.execute("UPDATE plain SET n = %s", (n,))
                user.execute("INSERT INTO child (plain) SELECT max(id) FROM plain")
                user.execute("DELETE FROM plain WHERE name = %s", (f"n{n - 2}",))
                user.execute("INSERT INTO keyless VALUES (%s, 'x')", (n,))
                user.execute("SELECT nextval('tickets')")


def touch_files(folder: Path, n: int) -> None:
    (folder / "same").write_text(str(n))
    (folder / f"only {n}").mkdir()
    (folder / f"only {n}" / "file").write_bytes(bytes([n]))
    (folder / "link").unlink(missing_ok=True)
    (folder / "link").symlink_to(f"only {n}")
    (folder / "same").chmod(0o600 + n)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
