"""Nouns: only a noun's package names its tables, and a noun in the list is looked after."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import store as store_module
from holdfast.clock import VirtualClock
from holdfast.errors import LeaseLost
from holdfast.kernel.operation import rows
from holdfast.store import NOUNS
from holdfast.testing.nouns import NOUNS as EXAMPLES
from holdfast.testing.nouns import Counter, Queue
from holdfast.worker.upkeep import Upkeep

PACKAGE = Path(holdfast.__file__).parent
TABLE = re.compile(r"\bhf_[a-z0-9_]+\b")
SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|FROM|JOIN|CREATE|ALTER|EXISTS|RETURNING)\b")
CREATED = re.compile(r"CREATE (?:TABLE|VIEW)(?: IF NOT EXISTS)? (hf_\w+)")

# Where a table is still named outside its package. The list only shrinks: what stands here without
# need fails the test too.
STANDING = {
    # People who look at the view want to see the session's id.
    "checkpoints/schema.sql": {"hf_sessions"},
    "testing/conformance.py": {"hf_events"},
}  # fmt: skip


def owners() -> dict[str, str]:
    """Every table and view, with the package that owns it."""
    own = (PACKAGE / "kernel" / "schema.sql").read_text()
    found = dict.fromkeys(CREATED.findall(own), "kernel")
    for noun in (*NOUNS, *EXAMPLES):
        package = type(noun).__module__.split(".")[1]
        found |= dict.fromkeys(CREATED.findall(noun.schema()), package)
    return found


def texts(tree: ast.Module) -> Iterator[str]:
    """Every text of a module but its docstrings; an f-string as one, without what it puts in."""
    nodes = list(ast.walk(tree))
    parts = {id(part) for each in nodes if isinstance(each, ast.JoinedStr) for part in each.values}
    parts |= {id(each.value) for each in nodes if isinstance(each, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            constants = (part.value for part in node.values if isinstance(part, ast.Constant))
            yield " ? ".join(map(str, constants))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in parts:
                yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LeasedTable":
            yield f"UPDATE {getattr(node.args[0], 'value', '')}"


def named() -> dict[str, set[str]]:
    """Which tables each file names in SQL that are not its package's own."""
    owner = owners()
    found: dict[str, set[str]] = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.sql")]):
        name = path.relative_to(PACKAGE)
        given = path.read_text()
        sql = [re.sub(r"--.*", "", given)] if path.suffix == ".sql" else texts(ast.parse(given))
        tables = {table for text in sql if SQL.search(text) for table in TABLE.findall(text)}
        others = {table for table in tables if owner.get(table, name.parts[0]) != name.parts[0]}
        if others:
            found[name.as_posix()] = others
    return found


def test_only_its_own_package_names_a_table_in_sql() -> None:
    found = named()
    new = {file: tables - STANDING.get(file, set()) for file, tables in found.items()}
    assert not {file: tables for file, tables in new.items() if tables}
    gone = {file: tables - found.get(file, set()) for file, tables in STANDING.items()}
    assert not {file: tables for file, tables in gone.items() if tables}, "take these off the list"


@pytest.fixture
def clock() -> VirtualClock:
    """Behind that of the machine, with which a doctor looks."""
    return VirtualClock(1_700_000_000_000)


@pytest.fixture
def store(
    place: dict[str, Any], clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[holdfast.Store]:
    """A store whose list of nouns has the two examples; nothing else is done for them."""
    monkeypatch.setattr(store_module, "NOUNS", (*NOUNS, *EXAMPLES))
    with holdfast.open(**place, clock=clock) as opened:
        Counter(opened).plant()
        yield opened


def doctor(place: dict[str, Any]) -> list[str]:
    found = store_module.check(place["url"], namespace=place.get("namespace"))
    return [finding.message for finding in found if finding.check in {"counters", "leases"}]


def test_a_noun_in_the_list_is_fenced(store: holdfast.Store) -> None:
    queue = Queue(store)
    ours, other = (queue.submit(payload) for payload in ("ours", "other's"))
    held = queue.acquire(ours, "desk @ first boot")
    kept = queue.acquire(other, "another @ first boot")
    assert store.recover("second boot", instance="desk").fenced == 1
    with pytest.raises(LeaseLost):
        queue.complete(held)
    queue.complete(kept)


def test_a_noun_in_the_list_is_swept(store: holdfast.Store, clock: VirtualClock) -> None:
    queue = Queue(store)
    queue.submit("work")
    assert queue.claim("dead", lease_seconds=30) is not None
    assert store.recover().swept.requeued == 0
    clock.advance(31)
    assert store.recover().swept.requeued == 1
    assert queue.claim("alive") is not None


def test_a_noun_in_the_list_is_swept_and_pruned_by_workers(
    store: holdfast.Store, clock: VirtualClock
) -> None:
    queue = Queue(store)
    for holder in ("alive", "dead"):
        queue.submit("work")
        lease = queue.claim(holder, lease_seconds=30)
        assert lease is not None
        if holder == "alive":
            queue.complete(lease)
    clock.advance(31 * 24 * 3600)
    upkeep = Upkeep(store, 1.0, 30, lambda: None)
    upkeep._sweep()
    assert queue.claim("next") is not None
    upkeep._prune(30 * 24 * 3_600_000)
    assert queue.counts() == {"pending": 1}


def test_a_noun_in_the_list_is_pruned(store: holdfast.Store, clock: VirtualClock) -> None:
    queue = Queue(store)
    for _ in range(2):
        queue.submit("work")
    lease = queue.claim("worker")
    assert lease is not None
    queue.complete(lease)
    clock.advance(29 * 24 * 3600)
    assert store.prune().others == {}
    clock.advance(2 * 24 * 3600)
    assert store.prune(session=store.session("s")).others == {}
    assert store.prune().others == {"example item": 1}
    assert queue.counts() == {"pending": 1}


def test_a_noun_in_the_list_is_checked(store: holdfast.Store, place: dict[str, Any]) -> None:
    assert doctor(place) == [
        "None is below zero.",
        "None has expired: 0 example items, 0 work items, 0 sessions.",
    ]
    Counter(store).add(-1)
    Queue(store).submit("work")
    Queue(store).claim("dead")
    assert doctor(place) == [
        "The counter of 'root' is below zero.",
        "1 example item with an expired lease: the holder died.",
    ]


def test_views_take_the_composite_keys_apart(store: holdfast.Store) -> None:
    session = store.session("s")
    session.append("log", ["first"])
    session.append("log", ["second"], key="k")
    session.pin(2, "kept")

    def read(tx: holdfast.Transaction) -> holdfast.Op[tuple[list[Any], list[Any]]]:
        checkpoints = yield from rows("SELECT * FROM hf_checkpoints_view ORDER BY version")
        items = yield from rows("SELECT * FROM hf_items_view ORDER BY line_id, first_index")
        return checkpoints, items

    checkpoints, items = store.run(read)
    seen = [
        (row["session_id"], row["session_number"], row["version"], row["idempotency_key"])
        for row in checkpoints
    ]
    assert seen == [("s", session.number, 1, None), ("s", session.number, 2, "k")]
    assert [bool(row["is_pinned"]) for row in checkpoints] == [False, True]
    assert [(row["first_index"], row["count"]) for row in items] == [(0, 1), (1, 1)]
    assert all(row["bytes"] > 0 for row in items)
