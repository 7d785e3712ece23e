"""Zombies: a process that was stopped beyond its lease can write nothing when it goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Worker
from tests.checkpoints.colours import sql
from tests.work.fleet import Fleet, read_lines, wait_until, write_line

LEASE_SECONDS = 600.0
EXPIRE = "UPDATE hf_work SET lease_expires_at = 1, sweep_at = 1 WHERE id = :id"
NAME = "the same name for all"


def ran(said: str) -> Any:
    """Return a tool that tells when it runs; a zombie's must not."""

    @holdfast.tool(effect="mutate")
    def charge(cents: int) -> str:
        write_line(said, json.dumps({"charged": cents}))
        return "charged"

    return charge


def attempts_to_write(item: Any, begun: Any, store: holdfast.Store, said: str) -> None:
    """Try every way in which an attempt could write, and say how each ended."""
    session, charge = item.session, ran(said)

    def composed(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from tx.work.within(item).complete("composed")

    def composed_save(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from tx.within(session).save(late="composed")

    ways: dict[str, Callable[[], object]] = {
        "heartbeat": item.heartbeat,
        "progress": lambda: item.progress("late"),
        "save": lambda: session.save(late=True),
        "append": lambda: session.append("transcript", ["late"]),
        "record": lambda: session.record("manual_checkpoint", {"late": True}, item=item),
        "end": lambda: session.end("failed"),
        "call": lambda: item.call(charge, cents=2),
        "session.call": lambda: session.call(charge, cents=3),
        "once": lambda: item.once("late", lambda: write_line(said, '{"charged": 4}')),
        "begin": lambda: session.begin(charge, {"cents": 5}),
        "store the effect": lambda: begun.complete("late"),
        "submit": lambda: store.work.submit("t", "late", session=session),
        "complete with all": lambda: item.complete("late", checkpoint={"late": 1}),
        "complete in a transaction": lambda: store.run(composed),
        "save in a transaction": lambda: store.run(composed_save),
        "complete many": lambda: store.work.complete_many([(item, "late")]),
        "fail": lambda: item.fail("late"),
        "release": item.release,
        "cancel": item.cancel,
        "complete": lambda: item.complete("late"),
    }
    for name, way in ways.items():
        try:
            result = f"returned {way()!r}"
        except holdfast.HoldfastError as error:
            result = type(error).__name__
        write_line(said, json.dumps({"way": name, "result": result}))
    write_line(said, json.dumps({"done": True}))


def bare(place: dict[str, Any], said: str, go_on: str) -> None:
    """A zombie with nothing but a handle: only the database can refuse it."""
    with holdfast.open(**place, durability="normal") as store:
        item = store.work.claim(NAME, lease_seconds=LEASE_SECONDS)[0]
        assert item.session is not None
        begun = item.session.begin(ran(said), {"cents": 1})
        write_line(said, json.dumps({"started": item.fence}))
        wait_until(lambda: os.path.exists(go_on))
        attempts_to_write(item, begun, store, said)


def worker(place: dict[str, Any], said: str, go_on: str) -> None:
    """A zombie in a worker, whose handler goes on."""
    with holdfast.open(**place, durability="normal") as store:

        def handler(item: Any) -> str:
            begun = item.session.begin(ran(said), {"cents": 1})
            write_line(said, json.dumps({"started": item.fence}))
            wait_until(lambda: os.path.exists(go_on))
            attempts_to_write(item, begun, store, said)
            return "late"

        Worker(store, {"t": handler}, holder=NAME, lease_seconds=LEASE_SECONDS, concurrency=1).run()


def successor(place: dict[str, Any], said: str) -> None:
    """Takes over what the zombie had, under the same name."""

    def handler(item: Any) -> str:
        assert item.session is not None
        item.session.save(by="successor")
        return "by the successor"

    with holdfast.open(**place, durability="normal") as store:
        Worker(
            store,
            {"t": handler},
            holder=NAME,
            lease_seconds=30,
            poll_seconds=0.05,
            sweep_interval_seconds=0.1,
        ).run()


def stop(pid: int, is_usable: Callable[[], bool]) -> None:
    """Stop a process, but not while it holds the lock of the file."""
    for _ in range(100):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.05)
        if is_usable():
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("the process could not be stopped between two transactions")


@pytest.mark.parametrize("kind", ["bare", "worker"])
def test_a_zombie_writes_nothing(
    place: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as a worker nor with a bare handle, also when its successor has its name."""
    monkeypatch.setattr("holdfast.work.transitions.RETRY_SECONDS", 0.01)
    said, go_on = str(tmp_path / "said"), str(tmp_path / "go")
    with Fleet(bare=bare, worker=worker, successor=successor) as fleet:
        with holdfast.open(**place, durability="normal") as store:
            id = store.work.submit("t", session=store.session("s")).id
        zombie = fleet.start(kind, place, said, go_on)
        wait_until(lambda: read_lines(said))

        with holdfast.open(**place, durability="normal", busy_timeout_seconds=1) as store:

            def is_usable() -> bool:
                try:
                    store.work.submit("probe")
                except holdfast.StoreBusy:
                    return False
                return True

            stop(zombie, is_usable)
            sql(store, EXPIRE, id=id)
            fleet.start("successor", place, said)
            wait_until(lambda: store.work.get(id).status == "completed")
            before = (store.work.get(id).to_dict(), versions(store), effects(store))
            os.kill(zombie, signal.SIGCONT)
            write_line(go_on, "go")
            wait_until(lambda: {"done": True} in map(json.loads, read_lines(said)))
            after = (store.work.get(id).to_dict(), versions(store), effects(store))
    assert after == before
    results = {
        line["way"]: line["result"] for line in map(json.loads, read_lines(said)) if "way" in line
    }
    assert results.pop("complete many") in {"returned [False]", "LeaseLost"}
    assert results == dict.fromkeys(results, "LeaseLost")
    assert len(results) == 19
    assert not [line for line in read_lines(said) if "charged" in line]
    item = after[0]
    assert (item["output"], item["fence"], item["rescues"]) == ("by the successor", 2, 1)


def versions(store: holdfast.Store) -> list[tuple[int, str]]:
    history = store.session("s").history(limit=100)
    return [(checkpoint.version, checkpoint.kind) for checkpoint in history]


def effects(store: holdfast.Store) -> list[tuple[str, str]]:
    return [(effect.tool, effect.status) for effect in store.effects(limit=100)]
