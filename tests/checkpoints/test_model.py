"""Any sequence of changes loads back equal to a plain model in memory, at every version."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import holdfast
from holdfast.checkpoints import Heads, lines
from holdfast.checkpoints import changes as planned
from holdfast.records import KINDS
from tests.checkpoints import tables
from tests.checkpoints.model import Node, Twin, same

ATOMS: tuple[Any, ...] = (
    *(None, {}, [], 0, False, "", 1, 1.0, True, 0.0, -0.0, 2**64, -(2**70), 1e308),
    *("ünïcødé 🐙", "a\0b", "x" * 200, {"b": [1, {"a": None}], "a": {}}, {"long": ["y"] * 150}),
)
SESSIONS_MAX = 8
LENGTH_MAX = 260

# Half of the time the session that was used last is used again.
picks = st.sampled_from([None, None, None, None, None, None, 0, 1, 2, 3, 4, 5])
wheres = st.sampled_from([0, 0, 1])
channels = st.sampled_from(["transcript", "transcript", "transcript", "plan", "budget"])
cuts = st.sampled_from([0, 1, 2, 31, 62, 63, 64, 65, 127, 128, -1, -2, -5, -63, -64, -65])
sizes = st.sampled_from([0, 1, 2, 3, 5, 30, 62, 63, 64, 65, 126, 127, 128, 129])
backs = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 0, -1])
flavours = st.sampled_from(["atoms", "same", "count", "strings"])


class Bulk:
    """Makes lists of items without drawing each of them."""

    count = 0

    @classmethod
    def make(cls, size: int, flavour: str) -> list[Any]:
        cls.count += size
        match flavour:
            case "atoms":
                return [ATOMS[(cls.count + index) % len(ATOMS)] for index in range(size)]
            case "same":
                return [7] * size
            case "count":
                return list(range(cls.count, cls.count + size))
        return [f"message {cls.count + index}" for index in range(size)]


changes = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(ATOMS)),
    st.tuples(st.sampled_from(["replace", "nest"]), sizes, flavours),
    # Replaces the items between two places: growth, edit, compaction, truncation and all others.
    st.tuples(st.just("splice"), cuts, cuts, sizes, flavours),
    st.tuples(st.just("edit"), cuts, st.integers(0, 3), flavours),
    st.tuples(st.just("grow"), sizes, flavours),
    # As a process does whose own copy is old: its list, and more.
    st.tuples(st.just("grow old"), backs, sizes, flavours),
    st.tuples(st.just("compact"), cuts),
    st.tuples(st.just("truncate"), cuts),
    st.tuples(st.just("empty")),
    st.tuples(st.just("again")),
)
saves = st.dictionaries(channels, changes, min_size=1, max_size=2)
plain_kinds = st.sampled_from([kind for kind in KINDS if not kind.startswith("iteration_")])
own = st.one_of(st.none(), st.sampled_from(ATOMS))
metadata = st.sampled_from([None, {}, {"title": "é"}])


def place_in(cut: int, length: int) -> int:
    """Return where in a list a cut lies; beyond its end is its end."""
    return min(cut, length) if cut >= 0 else max(0, length + cut)


def changed(twin: Twin, channel: str, change: tuple[Any, ...], held: Any = None) -> Any:
    """Return what a channel becomes; `held` are the channels, if not those of the newest."""
    match change:
        case ("set", value):
            return value
        case ("replace", size, flavour):
            return Bulk.make(size, flavour)
        case ("nest", size, flavour):
            return {"nested": Bulk.make(size, flavour)}
    old = (twin.channels if held is None else held).get(channel)
    if change[0] == "grow old":
        node = twin.seen(twin.version - change[1])
        old = node.channels.get(channel) if node is not None else old
        change = ("grow", *change[2:])
    if not isinstance(old, list):
        return old if change[0] == "again" else Bulk.make(3, "strings")
    match change:
        case ("splice", low, high, size, flavour):
            low, high = sorted((place_in(low, len(old)), place_in(high, len(old))))
            new = [*old[:low], *Bulk.make(size, flavour), *old[high:]]
        case ("edit", cut, size, flavour):
            low = place_in(cut, len(old))
            new = [*old[:low], *Bulk.make(size, flavour), *old[low + 1 :]]
        case ("grow", size, flavour):
            new = [*old, *Bulk.make(size, flavour)]
        case ("compact", cut):
            new = [{"summary": len(old)}, *old[place_in(cut, len(old)) :]]
        case ("truncate", cut):
            new = old[: place_in(cut, len(old))]
        case ("empty",):
            new = []
        case _:
            new = list(old)
    return new[:LENGTH_MAX]


class Machine(RuleBasedStateMachine):
    """Two stores on one database, a model, and everything that may happen between them."""

    run_items: ClassVar[int]
    stores: ClassVar[list[holdfast.Store]]
    elsewhere: ClassVar[holdfast.Store]
    directory: ClassVar[Path]

    @initialize()
    def begin(self) -> None:
        tables.wipe(self.stores[0])
        Bulk.count = 0
        self.living: list[Twin] = []
        self.handles: dict[tuple[int, str], holdfast.Session] = {}
        self.touched: Twin | None = None
        self.start_root(0)
        twin = self.living[0]
        for size, plan in ((70, "p" * 200), (60, {"long": ["q"] * 150}), (9, 1)):
            old = twin.channels.get("transcript", [])
            channels = {"transcript": [*old[40:], *range(size)], "plan": plan}
            self.handle(0, twin).save(channels)
            twin.write("turn", channels)
            data = {"iteration": size}
            self.handle(0, twin).record("iteration_start", data)
            twin.write("iteration_start", data=data)

    # Sessions: one rule, so that most steps are about checkpoints.

    @rule(
        where=wheres, pick=picks, other=picks,
        what=st.sampled_from(
            ["start_child", "delete", "resume", "end", "cancel", "start_root", "delete", "resume"]
        ),
        status=st.sampled_from(["completed", "failed", "cancelled"]),
    )  # fmt: skip
    def change_sessions(self, where: int, pick: Any, other: Any, what: str, status: Any) -> None:
        twin = self.pick(pick)
        match what:
            case "start_root":
                self.start_root(where)
            case "start_child":
                self.start_child(where, twin)
            case "resume":
                self.resume(where, twin, self.living[(other or 0) % len(self.living)])
            case "end":
                self.try_writing(twin, lambda: self.handle(where, twin).end(status))
                if not twin.is_ended:
                    twin.change_status(status)
            case "cancel":
                self.cancel(where, twin)
            case "delete" if len(self.living) > 2:
                self.delete(where, twin)

    def start_root(self, where: int) -> None:
        if len(self.living) < SESSIONS_MAX:
            self.adopt(where, self.stores[where].session(agent="root"))

    def start_child(self, where: int, parent: Twin) -> None:
        if len(self.living) < SESSIONS_MAX:
            handle = self.stores[where].session(parent=parent.id, name="child")
            twin = self.adopt(where, handle)
            twin.root_id, twin.parent = parent.root_id, parent
            assert handle.root_id == parent.root_id

    def resume(self, where: int, twin: Twin, parent: Twin) -> None:
        """Resuming an existing session changes neither its root nor its versions."""
        if twin.is_ended:
            with pytest.raises(holdfast.SessionEnded):
                self.stores[where].session(twin.id)
            self.stores[where].session(twin.id, parent=parent.id, reopen=True)
            twin.change_status("active")
        else:
            handle = self.stores[where].session(twin.id, parent=parent.id)
            assert (handle.number, handle.root_id) == (twin.number, twin.root_id)

    def cancel(self, where: int, twin: Twin) -> None:
        doomed = [below for below in self.below(twin) if not below.is_ended]
        assert self.handle(where, twin).cancel() == [below.id for below in doomed]
        for below in doomed:
            below.change_status("cancelled")

    def delete(self, where: int, twin: Twin) -> None:
        doomed = self.below(twin)
        assert self.handle(where, twin).delete(force=True) == [below.id for below in doomed]
        for below in doomed:
            below.is_deleted = True
            self.living.remove(below)
        self.touched = None
        with pytest.raises(holdfast.SessionNotFound):
            self.handle(where, twin).save(plan=1)
        if not self.living:
            self.start_root(where)
        tables.check(self.stores[where], self.run_items)

    # Checkpoints

    @rule(
        where=wheres, pick=picks, named=saves, kind=plain_kinds, data=own, metadata=metadata,
        expected=st.sampled_from([None, None, None, 0, 1]),
    )  # fmt: skip
    def save(
        self, where: int, pick: Any, named: Any, kind: Any, data: Any, metadata: Any, expected: Any
    ) -> None:
        twin = self.pick(pick)
        wanted = {name: changed(twin, name, how) for name, how in named.items()}
        version = None if expected is None else twin.version + expected
        if expected and not twin.is_ended:
            with pytest.raises(holdfast.VersionConflict):
                self.handle(where, twin).save(wanted, expected_version=version)
            return
        parts: dict[str, Any] = {"kind": kind, "data": data, "metadata": metadata}
        self.try_writing(
            twin, lambda: self.handle(where, twin).save(wanted, expected_version=version, **parts)
        )
        if not twin.is_ended:
            twin.write(kind, wanted, data=data, metadata=metadata)

    @rule(where=wheres, pick=picks, channel=channels, size=sizes, flavour=flavours)
    def append(self, where: int, pick: Any, channel: str, size: int, flavour: str) -> None:
        twin = self.pick(pick)
        old = twin.channels.get(channel, [])
        items = Bulk.make(size, flavour)
        if isinstance(old, list) and len(old) > LENGTH_MAX:
            return
        if not isinstance(old, list) and not twin.is_ended:
            with pytest.raises(holdfast.TypeConflict):
                self.handle(where, twin).append(channel, items)
            return
        self.try_writing(
            twin, lambda: self.handle(where, twin).append(channel, items, item="work 1")
        )
        if not twin.is_ended:
            twin.write("turn", {channel: [*old, *items]}, item_id="work 1")

    @rule(
        where=wheres, pick=picks, number=st.integers(1, 5),
        kind=st.sampled_from(["iteration_start", "iteration_end", "error_boundary"]),
    )  # fmt: skip
    def record(self, where: int, pick: Any, number: int, kind: Any) -> None:
        twin, data = self.pick(pick), {"iteration": number}
        self.try_writing(twin, lambda: self.handle(where, twin).record(kind, data))
        if not twin.is_ended:
            twin.write(kind, data=data)

    @rule(where=wheres, pick=picks, named=saves, more=saves, fails=st.booleans())
    def save_twice_in_one_commit(
        self, where: int, pick: Any, named: Any, more: Any, fails: bool
    ) -> None:
        twin = self.pick(pick)
        if twin.is_ended:
            return
        first = {name: changed(twin, name, how) for name, how in named.items()}
        held = twin.channels | first
        second = {name: changed(twin, name, how, held) for name, how in more.items()}

        def both(tx: holdfast.Transaction) -> holdfast.Op[None]:
            inside = tx.within(self.handle(where, twin))
            yield from inside.save(first)
            yield from inside.save(second)
            if fails:
                raise KeyError("on purpose")

        if fails:
            with pytest.raises(KeyError):
                self.stores[where].run(both)
        else:
            self.stores[where].run(both)
            twin.write("turn", first)
            twin.write("turn", second)

    @rule(where=wheres, pick=picks, back=backs)
    def fork(self, where: int, pick: Any, back: int) -> None:
        twin = self.pick(pick)
        version = twin.version - back
        if version < 1 or len(self.living) >= SESSIONS_MAX:
            return
        node = twin.seen(version)
        if node is None:
            with pytest.raises(holdfast.CheckpointNotFound):
                self.handle(where, twin).fork(version)
            return
        handle = self.handle(where, twin).fork(version)
        assert (handle.root_id == twin.root_id) == (twin.parent is not None)
        copy = twin.fork(node, handle.id, handle.number, handle.root_id)
        self.touched = self.know(where, handle, copy)

    @rule(where=wheres, pick=picks, back=backs)
    def rewind(self, where: int, pick: Any, back: int) -> None:
        twin = self.pick(pick)
        version = twin.version - back
        if version < 1:
            return
        node = twin.seen(version)
        if node is None and not twin.is_ended:
            with pytest.raises(holdfast.CheckpointNotFound):
                self.handle(where, twin).rewind(version)
            return
        self.try_writing(twin, lambda: self.handle(where, twin).rewind(version))
        if not twin.is_ended and node is not None:
            twin.rewind(node)

    @rule(
        where=wheres, pick=picks, number=st.integers(1, 4),
        what=st.sampled_from(["prune", "pin", "attest", "prune", "move", "forget", "check"]),
    )  # fmt: skip
    def take_care(self, where: int, pick: Any, number: int, what: str) -> None:
        twin = self.pick(pick)
        node = twin.nodes.get(twin.version - number)
        match what:
            case "pin" if node is not None:
                self.handle(where, twin).pin(node.version, "good")
                node.is_pinned = True
            case "attest" if node is not None:
                self.handle(where, twin).attest(node.version, ["seen"])
                node.is_attested = True
            case "prune":
                self.prune(where, number)
            case "move":
                self.move(where)
            case "forget":
                # A cold cache, as after a restart.
                Heads.of(self.stores[where].runtime).forget(*(twin.number for twin in self.living))
            case "check":
                self.check_all(where, twin)

    def prune(self, where: int, keep: int) -> None:
        doomed = {twin: twin.prunable(keep, self.living) for twin in self.living}
        for twin, versions in doomed.items():
            for version in versions:
                del twin.nodes[version]
        pruned = self.stores[where].prune(keep=keep)
        assert pruned.checkpoints == sum(map(len, doomed.values()))
        assert pruned.lines == 0, "no save leaves a line behind that nothing uses"
        tables.check(self.stores[where], self.run_items)

    def move(self, where: int) -> None:
        """Export everything and import it into the other kind of database."""
        path = self.directory / f"{uuid.uuid4()}.holdfast"
        exported = self.stores[where].export(path)
        assert exported.sessions == len(self.living)
        self.elsewhere.import_sessions(path)
        path.unlink()
        tables.check(self.elsewhere, self.run_items)
        for twin in self.living:
            moved = self.elsewhere.find_session(twin.id)
            self.check_session(moved, twin)
            if not twin.is_ended:
                new = [*twin.channels.get("plan", []), 1] if self.has_list(twin, "plan") else [1]
                assert moved.save(plan=new).version == twin.version + 1
                assert same(moved.at(twin.version + 1)["plan"], new)
        tables.check(self.elsewhere, self.run_items)
        tables.wipe(self.elsewhere)

    @staticmethod
    def has_list(twin: Twin, channel: str) -> bool:
        return isinstance(twin.channels.get(channel), list)

    # What must be true

    @invariant()
    def what_was_touched_loads_back(self) -> None:
        if self.touched is not None:
            self.check_head(0, self.touched)
            self.check_head(1, self.touched)

    def teardown(self) -> None:
        if not hasattr(self, "living"):
            return
        for twin in self.living:
            self.check_all(0, twin)
        tables.check(self.stores[0], self.run_items)
        roots = [twin for twin in self.living if twin.parent is None]
        for twin in roots:
            self.handle(1, twin).delete(force=True)
        left = tables.check(self.stores[0], self.run_items)
        for table in ("sessions", "checkpoints", "epochs", "lines", "items", "uses", "pins"):
            assert left[f"hf_{table}"] == [], f"hf_{table} outlived every session"

    def check_head(self, where: int, twin: Twin) -> None:
        latest = self.handle(where, twin).latest()
        if twin.head is None:
            assert latest is None
        else:
            self.check_node(twin, twin.head, latest)

    def check_all(self, where: int, twin: Twin) -> None:
        self.check_head(where, twin)
        handle = self.handle(where, twin)
        self.check_session(handle, twin)
        assert handle.number == handle.info().number == twin.number

    def check_session(self, handle: holdfast.Session, twin: Twin) -> None:
        """Compare every version that a session sees, and everything it says of itself."""
        seen = twin.all_seen()
        found = handle.history(limit=1000)
        assert [checkpoint.version for checkpoint in found] == [node.version for node in seen]
        for node, checkpoint in zip(seen, found, strict=True):
            assert (checkpoint.kind, checkpoint.epoch) == (node.kind, node.epoch)
            self.check_node(twin, node, handle.at(node.version))
        for version in range(1, twin.version + 2):
            if twin.seen(version) is None:
                with pytest.raises(holdfast.CheckpointNotFound):
                    handle.at(version)
        iteration, resumed = twin.resume_point()
        point = handle.resume_point()
        assert point.iteration == iteration
        assert version_of(point.checkpoint) == version_of(resumed)
        newest_turn = next((node for node in twin.path() if node.kind == "turn"), None)
        turn = handle.latest(kind="turn", last=3)
        assert version_of(turn) == version_of(newest_turn)
        if turn is not None and newest_turn is not None:
            for name, value in newest_turn.channels.items():
                assert same(turn[name], value[-3:] if isinstance(value, list) else value)
                left_out = max(0, len(value) - 3) if isinstance(value, list) else 0
                assert turn.left_out.get(name, 0) == left_out
        info = handle.info()
        assert (info.version, info.epoch, info.status) == (twin.version, twin.epoch, twin.status)
        assert info.root_id == twin.root_id
        assert sum(handle.counts().values()) == len(twin.nodes)

    def check_node(self, twin: Twin, node: Node, loaded: Any) -> None:
        assert loaded is not None
        assert (loaded.session_id, loaded.version) == (twin.id, node.version)
        assert (loaded.kind, loaded.epoch, loaded.item_id) == (node.kind, node.epoch, node.item_id)
        assert same(loaded.data, node.data)
        assert same(loaded.metadata, node.metadata)
        assert sorted(loaded.channels) == sorted(node.channels)
        for name, value in node.channels.items():
            assert same(loaded[name], value), f"{name} of {twin.id} at version {node.version}"

    # Small helpers

    def pick(self, number: int | None) -> Twin:
        if number is not None or self.touched is None:
            self.touched = self.living[(number or 0) % len(self.living)]
        return self.touched

    def below(self, twin: Twin) -> list[Twin]:
        """Return a session and everything below it, in the order of creation."""
        found = [twin]
        for other in sorted(self.living, key=lambda other: other.number):
            if other.parent in found:
                found.append(other)
        return found

    def adopt(self, where: int, handle: holdfast.Session) -> Twin:
        return self.know(where, handle, Twin(handle.id, handle.number, handle.root_id))

    def know(self, where: int, handle: holdfast.Session, twin: Twin) -> Twin:
        self.living.append(twin)
        self.handles[where, twin.id] = handle
        return twin

    def handle(self, where: int, twin: Twin) -> holdfast.Session:
        """Return a handle of one of the stores; the other store may have made the session."""
        key = (where, twin.id)
        if key not in self.handles:
            store = self.stores[where]
            self.handles[key] = holdfast.Session(store.runtime, twin.id, twin.number, twin.root_id)
        return self.handles[key]

    def try_writing(self, twin: Twin, call: Callable[[], Any]) -> None:
        """Write; an ended session must refuse, and the version must be the next one."""
        if twin.is_ended:
            with pytest.raises(holdfast.SessionEnded):
                call()
            return
        written = call()
        if written is not None:
            assert written.version == twin.version + 1


def version_of(found: Any) -> int | None:
    return None if found is None else int(found.version)


@pytest.fixture
def other_place(place: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A new store of the other kind."""
    if "namespace" in place:
        return {"url": f"sqlite:///{tmp_path}/other.db"}
    return {
        "url": request.getfixturevalue("postgres_dsn"),
        "namespace": request.getfixturevalue("namespace"),
    }


@pytest.fixture(params=[64, 4], ids=["runs of 64", "runs of 4"])
def run_items(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With short runs, packing and re-basing happen in every example."""
    if request.param != lines.RUN_ITEMS:
        for name, module in sys.modules.items():
            if name.startswith("holdfast.") and hasattr(module, "RUN_ITEMS"):
                monkeypatch.setattr(module, "RUN_ITEMS", request.param)
        monkeypatch.setattr(planned, "PIECES_MAX", 3)
        monkeypatch.setattr(planned, "LIST_BYTES_MAX", 400)
    return int(request.param)


def run(
    place: dict[str, Any], other: dict[str, Any], directory: Path, run_items: int, **named: Any
) -> None:
    """Run the machine on two stores of one place, and a third of another."""
    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(holdfast.open(**where, durability="normal"))
            for where in (place, place, other)
        )
        bound = {"stores": [first, second], "elsewhere": third, "directory": directory}
        run_state_machine_as_test(
            type("Bound", (Machine,), {**bound, "run_items": run_items}),
            settings=settings(
                stateful_step_count=30,
                deadline=None,
                database=None,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                **named,
            ),
        )


def test_any_sequence_loads_back_equal_to_a_plain_model(
    place: dict[str, Any], other_place: dict[str, Any], tmp_path: Path, run_items: int
) -> None:
    examples = {"sqlite": 35, "postgresql": 15}[place["url"].partition(":")[0]]
    run(place, other_place, tmp_path, run_items, max_examples=examples, derandomize=True)


@pytest.mark.slow
def test_very_many_sequences_load_back_equal_to_a_plain_model(
    place: dict[str, Any], other_place: dict[str, Any], tmp_path: Path, run_items: int
) -> None:
    examples = {"sqlite": 2500, "postgresql": 1000}[place["url"].partition(":")[0]]
    run(place, other_place, tmp_path, run_items, max_examples=examples)
