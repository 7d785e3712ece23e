"""SIGKILL before and after every statement and COMMIT of every operation on sessions and
checkpoints, on both databases: each is whole or has left nothing, and the next process goes on.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each of a thousand children.
from holdfast.checkpoints import Heads
from holdfast.checkpoints.changes import Head, fingerprint_of
from holdfast.checkpoints.keys import ITEMS, VERSIONS
from holdfast.checkpoints.lines import Ref
from holdfast.checkpoints.removal import read_plan, remove_planned
from holdfast.kernel.nouns import Retention
from holdfast.kernel.operation import Call
from holdfast.testing.crashes import CrashPoints
from tests.checkpoints import tables
from tests.checkpoints.looking import Look
from tests.crash.children import boundaries, run

Say = Callable[[str], None]


class Family:
    """A root session and those that belong to it by their names."""

    def __init__(self, store: holdfast.Store, root: str) -> None:
        self.store = store
        self.root = root
        self._handles: dict[str, holdfast.Session] = {}
        self._leases: dict[str, holdfast.Lease] = {}

    def id(self, name: str = "") -> str:
        """Return the id of a member."""
        return f"{self.root}.{name}" if name else self.root

    def session(self, name: str = "") -> holdfast.Session:
        """Return the handle of a member."""
        if name not in self._handles:
            self.look()
        return self._handles[name]

    def lease(self) -> holdfast.Lease:
        """Return the lease that the root is under."""
        return self._leases[""]

    def driver(self) -> holdfast.Session:
        """Return the handle of whoever drives the root."""
        self.session().fence = self.lease().fence
        return self.session()

    def look(self) -> None:
        """Find all members and their leases, so that the operation itself need not."""
        sql = "SELECT * FROM hf_sessions WHERE id = :root OR id LIKE :below"
        for row in Look(self.store).rows(sql, root=self.root, below=f"{self.root}.%"):
            place = (row["id"], row["number"], row["root_id"], row["name"])
            name = row["id"].removeprefix(self.root).removeprefix(".")
            self._handles[name] = holdfast.Session(self.store.runtime, *place)
            self._leases[name] = holdfast.Lease(
                id=row["id"],
                holder=row["holder"],
                fence=row["fence"],
                expires_at=row["lease_expires_at"],
            )

    def remembered(self) -> dict[int, Head | None]:
        """Return what this process remembers of the members."""
        self.look()
        found = {
            handle.number: Heads.of(self.store.runtime).get(handle.number)
            for handle in self._handles.values()
        }
        for head in found.values():
            for known in head.lists.values() if head else ():
                # It cannot be pickled; `remember` takes it again.
                known.fingerprint = None
        return found

    def remember(self, number: int, head: Head) -> None:
        """Remember what another process did."""
        codec = self.store.runtime.codec
        for channel, known in head.lists.items():
            entry = head.manifest[channel]
            if isinstance(entry, Ref) and (bodies := known.bodies(codec, entry)) is not None:
                known.fingerprint = fingerprint_of([codec.decode(body) for body in bodies])
        Heads.of(self.store.runtime).put(number, head)


Act = Callable[[Family], Any]


class Step(NamedTuple):
    """One operation: what is there before it, and the operation itself."""

    setup: Act
    act: Act


def nothing(family: Family) -> None:
    pass


def created(family: Family) -> None:
    family.store.session(family.root, metadata={"title": "x"})


def talked(family: Family) -> None:
    """A list of 62 items, a small value, a large one, and five versions."""
    created(family)
    session = family.session()
    session.save(transcript=list(range(60)), plan={"steps": 1}, memo="m" * 300)
    session.append("transcript", [60, 61])
    session.record("iteration_start", {"iteration": 1})
    session.save(plan={"steps": 2})
    session.record("iteration_end", {"iteration": 1})


def talked_elsewhere(family: Family) -> None:
    talked(family)
    Heads.of(family.store.runtime).forget(family.session().number)


def ended(family: Family) -> None:
    talked(family)
    family.session().end("failed")


def forked(family: Family) -> None:
    """A fork of a root, which is a tree of its own."""
    talked(family)
    family.session().fork(4, id=family.id("fork"))
    family.session("fork").append("transcript", ["f"])


def rewound(family: Family) -> None:
    talked(family)
    family.session().rewind(2)


def pinned(family: Family) -> None:
    talked(family)
    family.session().pin(2, "good")


def leased(family: Family) -> None:
    talked(family)
    family.session().lease("driver", 600)


def expired(family: Family) -> None:
    talked(family)
    family.session().lease("dead driver", 0.001)
    time.sleep(0.01)


def grown(family: Family) -> None:
    """A tree of four, two of them driven, one ended, with a fork in the tree."""
    talked(family)
    family.store.session(family.id("child"), parent=family.root)
    family.session("child").save(transcript=list(range(10)))
    family.store.session(family.id("grandchild"), parent=family.id("child"))
    family.session("child").fork(1, id=family.id("twin"))
    family.session("twin").end("completed")
    family.session("child").lease("driver", 600)
    family.session("grandchild").lease("driver", 600)


def pruned(family: Family) -> None:
    """The last pass of a prune, which also releases lines."""
    session, runtime = family.session(), family.store.runtime
    row = {"number": session.number, "id": session.id, "root_id": session.root_id}
    given = (Retention(keep=2, work_ms=0, key_ms=0, effect_ms=0), row)
    plan = runtime.run(Call(read_plan, runtime, (*given, None)))
    runtime.run(Call(remove_planned, runtime, (*given, plan)))


def composed(family: Family) -> None:
    session = family.session()

    def several(tx: holdfast.Transaction) -> holdfast.Op[None]:
        inside = tx.within(session)
        yield from inside.append("transcript", [62, 63])
        yield from inside.save(transcript=[*range(64), 64], memo="n" * 300)
        fork = yield from inside.fork(2, id=family.id("fork"))
        yield from fork.append("transcript", ["f"])
        yield from tx.session(family.id("child"), parent=session)

    family.store.run(several)


EDITED = [*range(30), "edited", *range(31, 62)]
STEPS: dict[str, Step] = {
    "create a root": Step(
        nothing, lambda f: f.store.session(f.root, name="n", metadata={"title": "x"})
    ),
    "create a child": Step(talked, lambda f: f.store.session(f.id("child"), parent=f.root)),
    "resume": Step(talked, lambda f: f.store.session(f.root, name="m", metadata={"title": "y"})),
    "reopen": Step(ended, lambda f: f.store.session(f.root, reopen=True)),
    "save a new list": Step(
        created, lambda f: f.session().save(transcript=list(range(70)), plan={}, memo="m" * 300)
    ),
    "save small values": Step(talked, lambda f: f.session().save(plan={"steps": 3}, budget=0)),
    "save a large value": Step(talked, lambda f: f.session().save(memo="n" * 300)),
    "append": Step(talked, lambda f: f.session().append("transcript", [62])),
    "append in a new process": Step(
        talked_elsewhere, lambda f: f.session().append("transcript", [62])
    ),
    "append that packs a run": Step(
        talked, lambda f: f.session().append("transcript", list(range(62, 66)))
    ),
    "append that packs a run in a new process": Step(
        talked_elsewhere, lambda f: f.session().append("transcript", list(range(62, 66)))
    ),
    "append that packs two runs": Step(
        talked, lambda f: f.session().append("transcript", list(range(62, 130)))
    ),
    "save a grown list": Step(talked, lambda f: f.session().save(transcript=list(range(66)))),
    "save a grown list in a new process": Step(
        talked_elsewhere, lambda f: f.session().save(transcript=list(range(66)))
    ),
    "save an edited list": Step(talked, lambda f: f.session().save(transcript=EDITED)),
    "save a compacted list": Step(
        talked, lambda f: f.session().save(transcript=["summary", *range(50, 62)])
    ),
    "save a shortened list": Step(talked, lambda f: f.session().save(transcript=list(range(20)))),
    "record": Step(talked, lambda f: f.session().record("tool_executed", {"exit_code": 0})),
    "fork a root": Step(talked, lambda f: f.session().fork(3, id=f.id("fork"))),
    "fork a child": Step(grown, lambda f: f.session("child").fork(1, id=f.id("other"))),
    "fork a version of the origin": Step(
        forked, lambda f: f.session("fork").fork(2, id=f.id("below"))
    ),
    "append to a fork": Step(forked, lambda f: f.session("fork").append("transcript", ["g"])),
    "rewind": Step(talked, lambda f: f.session().rewind(2)),
    "rewind below the fork point": Step(forked, lambda f: f.session("fork").rewind(1)),
    "append after a rewind": Step(rewound, lambda f: f.session().append("transcript", ["r"])),
    "pin": Step(talked, lambda f: f.session().pin(2, "good")),
    "unpin": Step(pinned, lambda f: f.session().unpin(2)),
    "attest": Step(talked, lambda f: f.session().attest(3, {"test": "green"})),
    "lease": Step(talked, lambda f: f.session().lease("driver", 600)),
    "take over a dead lease": Step(expired, lambda f: f.session().lease("driver", 600)),
    "renew": Step(leased, lambda f: f.session().renew(f.lease(), 6000)),
    "save as the driver": Step(leased, lambda f: f.driver().save(plan={"steps": 3})),
    "release": Step(leased, lambda f: f.session().release(f.lease())),
    "end": Step(leased, lambda f: f.driver().end("completed")),
    "cancel with descendants": Step(grown, lambda f: f.session().cancel()),
    "prune": Step(forked, pruned),
    "delete a fork": Step(forked, lambda f: f.session("fork").delete()),
    "delete the origin of a fork": Step(forked, lambda f: f.session().delete()),
    "delete a tree": Step(grown, lambda f: f.session().delete(force=True)),
    "several in one commit": Step(talked, composed),
}


def shape(store: holdfast.Store, root: str) -> dict[str, Any]:
    """Everything that the store knows of a family, without numbers and times."""
    look = Look(store)
    members = look.rows(
        "SELECT id, number, parent_id, root_id, name, status, version, epoch, origin_version, "
        "holder, fence, lease_expires_at - created_at > 3000000 AS is_renewed "
        "FROM hf_sessions WHERE id = :root OR id LIKE :below ORDER BY id",
        root=root,
        below=f"{root}.%",
    )
    found: dict[str, Any] = {"events": {}}
    for root_id in (root, f"{root}.fork", f"{root}.below"):
        events = store.events(root_id)
        assert [event.position for event in events] == list(range(1, len(events) + 1))
        found["events"][root_id.removeprefix(root)] = [event.kind for event in events]
    for member in members:
        named = {
            name: value.removeprefix(root) if name.endswith("id") and value else value
            for name, value in member.items()
            if name != "number"
        }
        found[named["id"]] = named | _contents(store, look, member["id"], member["number"])
    return found


def _contents(store: holdfast.Store, look: Look, id: str, number: int) -> dict[str, Any]:
    """Return every version of a session as it loads, and how its lines lie in the tables."""
    handle = store.find_session(id)
    versions = {}
    for checkpoint in handle.history():
        loaded = handle.at(checkpoint.version)
        versions[loaded.version] = (
            *(loaded.kind, loaded.epoch, loaded.data, loaded.metadata, loaded.channels),
        )
    latest = handle.latest()
    low, high = number * VERSIONS, (number + 1) * VERSIONS
    own = look.rows(
        "SELECT key FROM hf_checkpoints WHERE key > :low AND key < :high ORDER BY key",
        low=low,
        high=high,
    )
    info = handle.info()
    if own:
        assert own[-1]["key"] - low == info.version
        assert latest is not None
        assert latest.version == info.version
    layout = look.rows(
        "SELECT l.id, l.base, i.count, count(*) AS rows_alike "
        "FROM hf_uses u JOIN hf_lines l ON l.id = u.line_id "
        f"LEFT JOIN hf_items i ON i.key / {ITEMS} = l.id "
        "WHERE u.session_number = :number GROUP BY l.id, l.base, i.count ORDER BY l.id, i.count",
        number=number,
    )
    pins = look.rows("SELECT key FROM hf_pins WHERE key > :low AND key < :high", low=low, high=high)
    attested = look.rows(
        "SELECT key FROM hf_attestations WHERE key > :low AND key < :high", low=low, high=high
    )
    return {
        "versions": versions,
        "own": [row["key"] - low for row in own],
        "metadata": info.metadata,
        "resume": handle.resume_point().iteration,
        "layout": [(row["base"], row["count"], row["rows_alike"]) for row in layout],
        "pins": [row["key"] - low for row in pins],
        "attested": [row["key"] - low for row in attested],
    }


def opened(place: dict[str, str], points: CrashPoints) -> holdfast.Store:
    # Only power loss tells the durabilities apart.
    return holdfast.open(**place, hooks=points.hooks, durability="normal")  # type: ignore[arg-type]


def reference(place: dict[str, str], seen: set[str] | None, say: Say) -> None:
    """Say what every operation begins from and leads to, and at which places to die."""
    for number, step in enumerate(STEPS.values()):
        points = CrashPoints()
        # What a connection has learnt from earlier operations saves it statements.
        with opened(place, points) as store:
            store.settle("nobody:1")
            family = Family(store, f"r{number}")
            step.setup(family)
            family.look()
            before = shape(store, family.root)
            points.points.clear()
            step.act(family)
            points.is_armed = False
            after = shape(store, family.root)
            assert before != after, "the shape must tell whether the step was taken"
            say(repr((boundaries(points, seen), repr(before), repr(after))))


def set_up(place: dict[str, str], name: str, roots: list[str], say: Say) -> None:
    """Set one operation up for many roots, and say what this process remembers of each."""
    with opened(place, CrashPoints()) as store:
        for root in roots:
            family = Family(store, root)
            STEPS[name].setup(family)
            say(pickle.dumps(family.remembered()).hex())


def die(place: dict[str, str], name: str, root: str, remembered: str, die_at: int) -> None:
    """Do one operation with what was remembered, and die at one of its places."""
    points = CrashPoints(die_at)
    points.is_armed = False
    with opened(place, points) as store:
        family = Family(store, root)
        family.look()
        for number, head in pickle.loads(bytes.fromhex(remembered)).items():  # noqa: S301
            if head is not None:
                family.remember(number, head)
        # The first write of a connection has statements of its own.
        store.settle("nobody:1")
        points.is_armed = True
        STEPS[name].act(family)


@pytest.mark.parametrize("in_each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_at_every_point_all_or_nothing(
    place: dict[str, str], in_each: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each statement is killed at in the operation that makes it first, or in all of them."""
    status, lines = run(lambda say: reference(place, None if in_each else set(), say))
    assert status == 0
    expected = dict(zip(STEPS, map(eval, lines), strict=True))
    killed: list[tuple[str, str, int]] = []
    for number, (name, (places, _, _)) in enumerate(expected.items()):
        roots = [f"k{number}-{die_at}" for die_at in places]
        status, heads = run(lambda say: set_up(place, name, roots, say))  # noqa: B023
        assert status == 0
        for die_at, root, remembered in zip(places, roots, heads, strict=True):
            status, _ = run(lambda _: die(place, name, root, remembered, die_at))  # noqa: B023
            assert status == -signal.SIGKILL, f"{name}: {die_at} of {places[-1]}"
            killed.append((name, root, places[-1] - die_at))
    with holdfast.open(**place, durability="normal") as store:  # type: ignore[arg-type]
        for name, root, places_left in killed:
            _, before, after = expected[name]
            # The last place lies after COMMIT: only there the operation may be whole.
            found = repr(shape(store, root))
            assert found == (before if places_left else after), f"{name}, killed as {root}"
            if places_left == 1:
                STEPS[name].act(looking(store, root))
                assert repr(shape(store, root)) == after, f"{name}, done again as {root}"
        tables.check(store)
    with capsys.disabled():
        database = place["url"].partition(":")[0]
        print(f"\n{database}: killed at {len(killed)} points of {len(STEPS)} operations")


def looking(store: holdfast.Store, root: str) -> Family:
    family = Family(store, root)
    family.look()
    return family
