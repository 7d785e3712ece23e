"""SIGKILL before and after every statement and COMMIT of every operation, on both databases."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each child.
from holdfast.testing.crashes import CrashPoints
from holdfast.testing.nouns import Counter, Queue, Setup
from tests.crash.children import boundaries, run

HELD = """
SELECT 'schema', 'is there' FROM pg_namespace WHERE nspname = %(name)s UNION ALL
SELECT c.relkind::text, c.relname FROM pg_class c WHERE relnamespace = to_regnamespace(%(name)s)
UNION ALL SELECT 'function', proname FROM pg_proc WHERE pronamespace = to_regnamespace(%(name)s)
UNION ALL SELECT 'trigger', tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE relnamespace = to_regnamespace(%(name)s) ORDER BY 1, 2
"""
# Nearly all places of opening lie in one transaction, so a few of them stand for the others.
STRIDE = 7
Step = Callable[[holdfast.Store, str, dict[str, Any]], Any]


def submit(store: holdfast.Store, root_id: str, memory: dict[str, Any]) -> None:
    memory["item"] = Queue(store, root_id).submit("work")


def claim(store: holdfast.Store, root_id: str, memory: dict[str, Any]) -> None:
    memory["lease"] = Queue(store, root_id).claim("worker")


def composed(tx: holdfast.Transaction, root_id: str) -> holdfast.Op[None]:
    yield from Counter(tx, root_id).add(2)
    yield from Queue(tx, root_id).submit("composed")
    yield from Counter(tx, root_id).add(3)


# One life of the example nouns: every kernel operation that writes is a step of it.
STEPS: dict[str, Step] = {
    "plant": lambda store, root_id, memory: Counter(store, root_id).plant(),
    "add": lambda store, root_id, memory: Counter(store, root_id).add(5),
    "submit": submit,
    "claim": claim,
    "heartbeat": lambda store, root_id, memory: Queue(store, root_id).heartbeat(memory["lease"]),
    "complete": lambda store, root_id, memory: Queue(store, root_id).complete(memory["lease"]),
    "submit again": submit,
    "claim again": claim,
    "release": lambda store, root_id, memory: Queue(store, root_id).release(memory["lease"]),
    "composed": lambda store, root_id, memory: store.run(composed, root_id),
    "settle": lambda store, root_id, memory: store.settle(f"{root_id}:1"),
}


def shape(store: holdfast.Store, root_id: str) -> dict[str, Any]:
    """Everything that the store knows of a root, without ids and times."""
    tables: dict[str, list[dict[str, Any]]] = store.run(read_tables, root_id)
    events = store.events(root_id)
    assert [event.position for event in events] == list(range(1, len(events) + 1))
    if tables["trees"]:
        assert tables["trees"] == [{"position": len(events)}]
    return {**tables, "events": [event.kind for event in events]}


def read_tables(tx: holdfast.Transaction, root_id: str) -> holdfast.Op[dict[str, Any]]:
    from holdfast.kernel.operation import rows

    trees = yield from rows("SELECT position FROM hf_trees WHERE root_id = :id", id=root_id)
    counters = yield from rows("SELECT value FROM hf_test_counters WHERE id = :id", id=root_id)
    items = yield from rows(
        "SELECT payload, status, holder, fence FROM hf_test_items "
        "WHERE root_id = :id ORDER BY number",
        id=root_id,
    )
    writers = yield from rows("SELECT batch FROM hf_writers WHERE id = :id", id=root_id)
    return {"trees": trees, "counters": counters, "items": items, "writers": writers}


def live(
    place: dict[str, str], root_id: str, points: CrashPoints, say: Callable[[str], None]
) -> None:
    """Live the whole life under a root, and say each step that returned."""
    points.is_armed = False
    with holdfast.open(**place, hooks=points.hooks) as store:  # type: ignore[arg-type]
        points.is_armed = True
        memory: dict[str, Any] = {}
        for name, step in STEPS.items():
            step(store, root_id, memory)
            say(f"{name}:{len(points.points)}")
        points.is_armed = False


def test_killed_at_every_point_all_or_nothing(
    place: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def install(say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:  # type: ignore[arg-type]
            Setup(store).install()

    def reference(say: Callable[[str], None]) -> None:
        with holdfast.open(**place) as store:  # type: ignore[arg-type]
            memory: dict[str, Any] = {}
            say(repr(shape(store, "reference")))
            for step in STEPS.values():
                step(store, "reference", memory)
                say(repr(shape(store, "reference")))

    assert run(install)[0] == 0
    status, shapes = run(reference)
    assert status == 0
    assert len(set(shapes)) > len(STEPS) - 3, "the reference must tell the steps apart"

    counting = CrashPoints()
    status, ends = run(lambda say: live(place, "counted", counting, say))
    assert status == 0
    point_counts = [int(end.rpartition(":")[2]) for end in ends]

    killed: list[tuple[str, int]] = []
    for die_at in range(1, point_counts[-1] + 1):
        root_id = f"k{die_at}"
        status, lines = run(
            lambda say, die_at=die_at, root_id=root_id: live(  # type: ignore[misc]
                place, root_id, CrashPoints(die_at), say
            )
        )
        assert status == -signal.SIGKILL
        killed.append((root_id, len(lines)))

    with holdfast.open(**place) as store:  # type: ignore[arg-type]
        for die_at, (root_id, acknowledged) in enumerate(killed, 1):
            # The last point of a step lies after its COMMIT: only there it may be whole.
            is_committed = die_at == point_counts[acknowledged]
            expected = shapes[acknowledged + is_committed]
            assert repr(shape(store, root_id)) == expected, f"killed at point {die_at}"
    with capsys.disabled():
        database = place["url"].partition(":")[0]
        print(f"\n{database}: killed at {len(killed)} points of {len(STEPS)} operations")


@pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_point_of_opening(
    place: dict[str, str], stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A migration that dies half-way leaves the old format, and the next opening completes it."""

    def open_store(arguments: dict[str, str], points: CrashPoints) -> Callable[..., None]:
        def opens(say: Callable[[str], None]) -> None:
            with holdfast.open(**arguments, hooks=points.hooks):  # type: ignore[arg-type]
                say(repr(boundaries(points)))

        return opens

    def at(number: int) -> dict[str, str]:
        if "namespace" in place:
            return {**place, "namespace": f"{place['namespace']}_{number}"}
        return {"url": f"sqlite:///{tmp_path}/{number}.db"}

    status, lines = run(open_store(at(0), CrashPoints()))
    assert status == 0
    places = eval(lines[0])
    assert len(places) > 20
    with holdfast.open(**at(0)) as store:  # type: ignore[arg-type]
        wanted = schema(store)
    drop(at(0))
    completed: set[Any] = set()
    chosen = sorted({*places[:STRIDE], *places[::stride], *places[-STRIDE:]})
    for die_at in chosen:
        status, _ = run(open_store(at(die_at), CrashPoints(die_at)))
        assert status == -signal.SIGKILL
        left = remains(at(die_at)) if "namespace" in place else die_at
        if left not in completed:
            completed.add(left)
            with holdfast.open(**at(die_at)) as store:  # type: ignore[arg-type]
                assert schema(store) == wanted
                Setup(store).install()
                Counter(store).plant()
                assert Counter(store).add() == 1
        drop(at(die_at))
    assert len(completed) > 1
    with capsys.disabled():
        print(f"\n{place['url'].partition(':')[0]}: killed at {len(chosen)} points of opening")


def schema(store: holdfast.Store) -> list[dict[str, Any]]:
    from tests.schemas import describe

    return describe(store)


def remains(arguments: dict[str, str]) -> tuple[Any, ...]:
    """Return what a schema holds: nothing, if it was never made."""
    with psycopg.connect(arguments["url"], autocommit=True) as connection:
        name = arguments["namespace"]
        found = connection.execute(HELD, {"name": name}).fetchall()
        if ("r", "hf_meta") in found:
            found += connection.execute(f'SELECT name FROM "{name}".hf_meta ORDER BY 1').fetchall()
        return tuple(found)


def drop(arguments: dict[str, str]) -> None:
    if "namespace" in arguments:
        with psycopg.connect(arguments["url"], autocommit=True) as connection:
            connection.execute(f'DROP SCHEMA IF EXISTS "{arguments["namespace"]}" CASCADE')
