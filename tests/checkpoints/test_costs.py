"""What things cost: statements on every call, rows and bytes for every change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.checkpoints import Heads
from holdfast.checkpoints.lines import PIECES_MAX, RUN_BYTES_MAX
from holdfast.kernel.driver import Hooks, Point, Trace
from holdfast.testing.subject import Subject, done
from tests.checkpoints import tables
from tests.checkpoints.colours import both_colours

# A change in one of these is a change of cost on every call: look before you update the number.
STATEMENTS = {
    "StoreSessions.session": 6,
    "CheckpointOps.save": 4,
    "CheckpointOps.append": 5,
    "CheckpointOps.record": 4,
    "Session.move_back": 20,
    "Session._require_rewindable": 2,
    "Session.fork": 15,
    "CheckpointOps.pin": 5,
    "CheckpointOps.attest": 5,
    "Session.lease": 2,
    "Session.renew": 1,
    "Session.release": 1,
    "Session.end": 6,
}
# On PostgreSQL events are part of the statement that decides, or that advances the feed.
POSTGRES = {
    "CheckpointOps.save": 3,
    "CheckpointOps.append": 4,
    "CheckpointOps.record": 3,
    "StoreSessions.session": 5,
    "Session._require_rewindable": 2,
    "Session.fork": 14,
    "CheckpointOps.pin": 4,
    "CheckpointOps.attest": 4,
    "Session.end": 6,
}
READS = {
    "CheckpointReads.latest": 2,
    "CheckpointReads.at": 2,
    "CheckpointReads.history": 2,
    "CheckpointReads.counts": 1,
    "CheckpointReads.resume_point": 3,
    "Session.info": 1,
    "StoreSessions.sessions": 1,
    "Ledger.standing": 6,
}


@both_colours
async def test_every_operation_costs_the_statements_it_should(subject: Subject) -> None:
    """With a short history and with a long one."""
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append), durability="normal")
    session = await done(store.session("s"))
    await done(session.save(log=["a"], plan={"n": 0}))
    await done(session.record("iteration_start", {"iteration": 1}))
    for length in (1, 300):
        await done(session.append("log", ["x"] * length))
        await done(session.append("log", ["y"]))
        traces.clear()
        await done(store.session(f"t{length}"))
        await done(session.append("log", ["b"]))
        await done(session.save(plan={"n": length}))
        await done(session.save(log=(await done(session.latest()))["log"], plan={"n": 1}))
        await done(session.record("error_boundary", {"n": 1}))
        await done(session.at((await done(session.info())).version))
        await done(session.history(limit=5))
        await done(session.counts())
        await done(session.resume_point())
        await done(store.sessions())
        fork = await done(session.fork(2))
        await done(session.pin(1, "x"))
        await done(session.attest(1, "x"))
        lease = await done(session.lease("me", 60))
        await done(session.renew(lease, 60))
        await done(session.release(lease))
        await done(fork.rewind(2))
        await done(fork.end())
        is_postgres = "namespace" in subject.place
        wanted = STATEMENTS | READS | (POSTGRES if is_postgres else {})
        costs: dict[str, set[int]] = {}
        for trace in traces:
            costs.setdefault(trace.call, set()).add(trace.statements)
        assert costs == {call: {count} for call, count in wanted.items()}, length
        assert {trace.attempts for trace in traces} == {1}


@pytest.fixture
def store(place: dict[str, Any]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place, durability="normal") as opened:
        yield opened


class Meter:
    """Tells what a change added to the tables."""

    def __init__(self, store: holdfast.Store) -> None:
        self._store = store
        self._seen = self._count()

    def _count(self) -> dict[str, int]:
        found = tables.check(self._store)
        return {
            "items": sum(row["count"] for row in found["hf_items"]),
            "rows": len(found["hf_items"]),
            "lines": len(found["hf_lines"]),
            "bytes": sum(len(row["data"]) for row in found["hf_items"])
            + sum(len(row["manifest"]) for row in found["hf_checkpoints"])
            + sum(len(row["pieces"] or b"") for row in found["hf_lines"]),
        }

    def added(self) -> dict[str, int]:
        """Return what was added since the last time."""
        before, self._seen = self._seen, self._count()
        return {name: self._seen[name] - before[name] for name in self._seen}


def test_a_change_costs_what_it_changes(store: holdfast.Store) -> None:
    session = store.session("s")
    log = [{"role": "user", "content": f"message {number}"} for number in range(200)]
    meter = Meter(store)
    session.save(log=log)
    added = meter.added()
    assert (added["items"], added["rows"], added["lines"]) == (200, 3 + 8, 1), "three full runs"

    def costs(**wanted: int) -> None:
        added = meter.added()
        assert added["bytes"] < 600, added
        assert {name: added[name] for name in ("items", "rows", "lines")} == wanted

    session.save(log=log)
    costs(items=0, rows=0, lines=0)
    session.save(plan={"n": 1})
    costs(items=0, rows=0, lines=0)
    session.record("turn")
    costs(items=0, rows=0, lines=0)
    session.fork(1)
    costs(items=0, rows=0, lines=0)
    session.save(log=[*log, "one"])
    costs(items=1, rows=1, lines=0)
    edited = [*log[:100], "edited", *log[101:], "one"]
    session.save(log=edited)
    costs(items=1, rows=1, lines=1)
    compacted = ["summary", *edited[150:]]
    session.save(log=compacted)
    costs(items=1, rows=1, lines=1)
    session.save(log=compacted[:10])
    costs(items=0, rows=0, lines=1)
    session.save(log=[])
    costs(items=0, rows=0, lines=0)
    session.rewind(6)
    costs(items=0, rows=0, lines=0)
    session.append("log", ["after"])
    costs(items=1, rows=1, lines=1)
    fork = session.fork(4)
    fork.append("log", ["fork"])
    costs(items=1, rows=1, lines=1)
    # A process that remembers nothing finds the common beginning just the same.
    Heads.of(store.runtime).forget(session.number)
    session.save(log=[*edited, "after", "more"])
    costs(items=1, rows=1, lines=0)


def test_turns_cost_the_same_however_long_the_history_is(store: holdfast.Store) -> None:
    session = store.session("s")
    meter = Meter(store)
    sizes = []
    log: list[Any] = []
    for turn in range(4):
        for number in range(64):
            log.append(f"message {turn * 64 + number:4}")
            if number % 2:
                session.save(log=log)
            else:
                session.append("log", log[-1:])
        added = meter.added()
        assert (added["items"], added["rows"], added["lines"]) == (64, 1, int(turn == 0))
        sizes.append(added["bytes"])
    assert max(sizes) < min(sizes) * 1.1, sizes


def test_items_too_large_for_a_run_stay_single_rows(store: holdfast.Store) -> None:
    session = store.session("s")
    large = "x" * (RUN_BYTES_MAX // 60)
    log: list[Any] = [large] * 62
    session.save(log=log)
    session.append("log", [large, large, "small"])
    session.append("log", ["small"] * 63)
    log += [large, large, *["small"] * 64]
    Heads.of(store.runtime).forget(session.number)
    session.append("log", ["end"])
    latest = session.latest()
    assert latest is not None
    assert latest["log"] == [*log, "end"]
    found = tables.check(store)
    counts = [row["count"] for row in found["hf_items"]]
    assert counts == [1] * 64 + [64, 1]


def test_a_list_in_too_many_pieces_is_written_out_anew(store: holdfast.Store) -> None:
    session = store.session("s")
    log: list[Any] = list(range(400))
    session.save(log=log)
    meter = Meter(store)
    rewritten = []
    versions = {1: list(log)}
    for edit in range(100):
        log[edit * 4] = f"edited {edit}"
        versions[session.save(log=log).version] = list(log)
        rewritten.append(meter.added()["items"])
    assert set(rewritten) == {1, 400}, "either the item alone, or the whole list"
    assert rewritten.count(400) <= 1 + 100 // (PIECES_MAX // 2 - 2)
    for version, wanted in versions.items():
        assert session.at(version)["log"] == wanted
    longest = max(len(row["pieces"] or b"") for row in tables.dump(store)["hf_lines"])
    assert longest < PIECES_MAX * 12
    # A fork of a list in many pieces writes it out once, when it goes on.
    fork = session.fork(session.info().version)
    meter.added()
    fork.append("log", ["on"])
    fork.append("log", ["and on"])
    assert meter.added()["items"] in {2, 402}
    loaded = fork.latest()
    assert loaded is not None
    assert loaded["log"] == [*log, "on", "and on"]


def test_a_window_loads_the_end_of_a_list_wherever_it_lies(store: holdfast.Store) -> None:
    session = store.session("s")
    log: list[Any] = list(range(130))
    session.save(log=log)
    log = [*log[:63], "a", *log[64:]]
    session.save(log=log)
    log = [*log[:10], "b", "c", *log[12:128]]
    session.save(log=log)
    session.append("log", list(range(70)))
    log = [*log, *range(70)]
    fork = session.fork(4)
    fork.append("log", ["end"])
    for handle, version, wanted in ((session, 4, log), (fork, 5, [*log, "end"])):
        for last in range(1, len(wanted) + 3):
            loaded = handle.at(version, last=last)
            assert loaded["log"] == wanted[-last:]
            left_out = max(0, len(wanted) - last)
            assert loaded.left_out == ({"log": left_out} if left_out else {})
    latest = session.latest(last=5)
    assert latest is not None
    assert latest["log"] == log[-5:]


def test_an_equal_large_value_is_stored_once(store: holdfast.Store) -> None:
    session = store.session("s")
    meter = Meter(store)
    large = {"text": "x" * 5_000}
    session.save(memo=large)
    assert meter.added()["items"] == 1
    for _ in range(2):
        session.save(memo={"text": "x" * 5_000}, plan=1)
        assert meter.added()["items"] == 0
        Heads.of(store.runtime).forget(session.number)
    session.save(memo=[large])
    session.save(memo=large)
    added = meter.added()
    assert (added["items"], added["lines"]) == (2, 2)
    assert [session.at(version)["memo"] for version in (1, 2, 3, 4, 5)] == [
        *(large, large, large, [large], large)
    ]
    small = "y" * 100
    session.save(memo=small)
    assert meter.added()["items"] == 0


def test_a_list_of_any_size_that_only_grew_is_not_read_again(place: dict[str, Any]) -> None:
    traces: list[Trace] = []
    with holdfast.open(**place, hooks=Hooks(trace=traces.append), durability="normal") as store:
        found: dict[str, list[int]] = {}
        for name, item in (("small", "x"), ("large", "x" * 1_000_000)):
            session, log = store.session(name), [item] * 20
            session.save(log=log)
            traces.clear()
            for number in range(3):
                log.append(str(number))
                session.save(log=log)
            found[name] = [trace.statements for trace in traces]
            log[0] = "edited"
            session.save(log=log)
            loaded = session.latest()
            assert loaded is not None
            assert loaded.channels["log"] == log
        assert found["large"] == found["small"]


def test_a_large_list_that_grew_behind_an_old_head_is_whole(place: dict[str, Any]) -> None:
    log = ["x" * 1_000_000] * 20
    with (
        holdfast.open(**place, durability="normal") as store,
        holdfast.open(**place, durability="normal") as other,
    ):
        session = store.session("s")
        session.save(log=log)
        other.find_session("s").append("log", ["of another process"])
        session.save(log=[*log, "mine"])
        loaded = session.latest()
        assert loaded is not None
        assert loaded.channels["log"] == [*log, "mine"]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_large_list_that_grew_is_whole_if_the_old_one_is_gone_or_an_item_changes_meanwhile(
    place: dict[str, Any], is_gone: bool
) -> None:
    def change(_: Point) -> None:
        item.update(changed)

    item, changed = {"n": 1}, dict[str, int]()
    log: list[Any] = [item, *["x" * 1_000_000] * 20]
    with (
        holdfast.open(**place, hooks=Hooks(probe=change), durability="normal") as store,
        holdfast.open(**place, durability="normal") as other,
    ):
        session = store.session("s")
        session.save(log=log)
        theirs = other.find_session("s")
        theirs.save(log=["of another process"])
        if is_gone:
            other.prune(keep=1)
        else:
            changed["n"] = 2
        for _ in range(2):
            session.save(log=[*log, "mine"])
            changed["n"] = item["n"] = 1
        loaded = session.latest()
        assert loaded is not None
        assert loaded.channels["log"] == [*log, "mine"]
