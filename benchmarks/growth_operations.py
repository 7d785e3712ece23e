"""The operations whose cost is measured in stores of several sizes: all that are documented.

Those of handles are measured on the big session, which has nearly all versions, effects and items,
and on the wide tree, which has many sessions, calls and pauses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import holdfast
from holdfast.store import check

from . import bulk
from .bulk import BIG, RARE

PAGE = 100
# Pages so small that the smallest store fills them too: the time is that of the search.
FULL_PAGE, SHORT_PAGE = 10, 2
WIDE = bulk.session_id(bulk.WIDE_NUMBER)


@holdfast.tool(effect="mutate")
def send(text: str) -> str:
    """Do nothing, once."""
    return text


@dataclass(slots=True)
class Filled:
    """A store of one size, and what the operations are done with."""

    url: str
    namespace: str | None
    size: int
    store: holdfast.Store
    big: holdfast.Session = field(init=False)
    waiting: holdfast.WorkItem = field(init=False)
    running: holdfast.WorkItem = field(init=False)
    queue: str = field(init=False)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.big = self.store.find_session(BIG)
        [self.running] = self.store.work.list(status="in_progress", limit=1)
        self.queue = next(self._queues())
        [self.waiting] = self.store.work.list(queue=self.queue, status="pending", limit=1)

    def _queues(self) -> Iterator[str]:
        for item in self.store.work.list(status="pending", limit=1_000):
            if item.waits_for is None:
                yield item.queue

    def some(self) -> int:
        """Return the number of a session, another one each time."""
        return next(self.numbers) * 7_919 % self.size + 1

    def session(self) -> holdfast.Session:
        """Return one of the many sessions."""
        return self.store.find_session(bulk.session_id(self.some()))

    def fresh(self, parent: str | None = BIG) -> holdfast.Session:
        """Return a new session, of the tree with nearly all events or another."""
        return self.store.session(self.new_id(), parent=parent, agent="bench")

    def asked(self) -> holdfast.PeerCall:
        """Return a call of a new session."""
        return self.fresh().ask("writer", timeout_seconds="never")

    def waiting_for_approval(self) -> str:
        """Return the pause of a new session."""
        return self.fresh().wait_for_approval("may I?").pause_id

    def submitted(self, **given: Any) -> holdfast.WorkItem:
        """Return a new item of the big session, in a queue of its own."""
        return self.store.work.submit("bench", session=BIG, queue=f"q {self.new_id()}", **given)

    def claimed(self, **given: Any) -> holdfast.WorkItem:
        """Return such an item, running."""
        [item] = self.store.work.claim("bench", queues=[self.submitted(**given).queue])
        return item

    def begun(self) -> holdfast.Issued:
        """Return an effect of the big session that has no outcome yet."""
        issued = self.big.begin(send, {"text": self.new_id()}, self.new_id())
        assert isinstance(issued, holdfast.Issued)
        return issued

    def in_doubt(self) -> str:
        """Return an effect whose outcome is unknown."""
        issued = self.begun()
        issued.fail("who knows")
        return issued.effect_id

    def drive(self) -> None:
        """Take the lease of a new session, and give it back."""
        with self.fresh().drive():
            pass

    def lease(self) -> None:
        """Take, renew and release a lease by hand."""
        session = self.fresh()
        lease = session.lease("bench", 60)
        session.renew(lease, 60)
        session.release(lease)

    def pin(self) -> None:
        """Protect a version, and stop that."""
        self.big.pin(self.size, "good")
        self.big.unpin(self.size)

    def follow_last(self) -> None:
        """Read the next event behind what is there."""
        cursor = self.store.last_cursor()
        self.big.record("manual_checkpoint")
        next(iter(self.store.follow_all(after=cursor, wait=False)))

    def redrive(self) -> None:
        """Submit a failed item again."""
        item = self.claimed()
        item.fail("broken", retry=False)
        self.store.work.redrive(item.id)

    def rewind(self) -> None:
        """Continue a session from an older version."""
        session = self.fresh()
        session.save(value=1)
        session.save(value=2)
        session.rewind(1)

    def tokens(self) -> None:
        """Create, find, list and revoke a token."""
        made = self.store.tokens.create(self.new_id())
        self.store.tokens.find(made.secret)
        self.store.tokens.list(limit=SHORT_PAGE)
        self.store.tokens.revoke(made.id)

    def new_id(self) -> str:
        """Return a name that nobody has used."""
        return f"new {self.size} {next(self.numbers)}"

    def work_one(self) -> None:
        """Submit, claim and complete one item of a queue of its own."""
        work = self.store.work
        work.submit("bench")
        [item] = work.claim("bench", queues="bench")
        item.heartbeat()
        item.complete()

    def claim_any(self) -> None:
        """Claim the best item of all queues, and give it back."""
        [item] = self.store.work.claim("bench")
        item.release()

    def first_write(self) -> None:
        """Open the store again and write once, as a new process does."""
        with holdfast.open(self.url, namespace=self.namespace) as store:
            store.find_session(BIG).append("notes", ["x"])

    def doctor(self) -> None:
        """Examine the store; it must be well."""
        problems = [
            each for each in check(self.url, namespace=self.namespace) if each.level == "problem"
        ]
        assert not problems, problems


Operation: TypeAlias = Callable[[Filled], object]


def _spends(whose: str, given: str, state: Any, f: Filled) -> object:
    if whose == "session.":
        return f.big.spends(state=state, limit=FULL_PAGE)
    return f.store.spends(session=BIG if given else None, state=state, limit=FULL_PAGE)


def _of_wide(listing: str, given: dict[str, Any], f: Filled) -> object:
    return getattr(f.store, listing)(root=WIDE, **given, limit=SHORT_PAGE)


def _effects_of_wide(status: Any, f: Filled) -> object:
    return f.store.effects(root=WIDE, status=status, limit=FULL_PAGE)


def _items(given: dict[str, Any], f: Filled) -> object:
    return f.store.work.list(**given, limit=FULL_PAGE)


SESSIONS: dict[str, Operation] = {
    "start a session": lambda f: f.store.session(f.new_id()),
    "resume a session": lambda f: f.store.session(f.session().id, reopen=True),
    "find_session(id)": lambda f: f.store.find_session(bulk.session_id(f.some())),
    "find_session(8 characters)": lambda f: f.store.find_session(bulk.session_id(f.some())[:8]),
    "sessions(), last page": lambda f: f.store.sessions(after=f.size - PAGE),
    "sessions(status=), last page": lambda f: f.store.sessions(
        status="active", after=f.size - 4 * PAGE
    ),
    "sessions(agent=), rare": lambda f: f.store.sessions(agent=RARE),
    "sessions(status=), rare": lambda f: f.store.sessions(status="failed"),
    "sessions(agent=, status=), rare": lambda f: f.store.sessions(agent="writer", status="failed"),
    "sessions(newest_first=)": lambda f: f.store.sessions(newest_first=True, limit=FULL_PAGE),
    "sessions(root=)": lambda f: f.store.sessions(root=WIDE, limit=FULL_PAGE),
    **{
        f"sessions(root=, status={status})": functools.partial(
            lambda status, f: f.store.sessions(root=WIDE, status=status, limit=FULL_PAGE), status
        )
        for status in ("active", "completed", "failed", "cancelled")
    },
    "sessions(root=, agent=)": lambda f: f.store.sessions(root=WIDE, agent=RARE),
    "sessions(root=, agent=, status=)": lambda f: f.store.sessions(
        root=WIDE, agent="writer", status="failed"
    ),
    "start a child": lambda f: f.fresh(WIDE),
    "end": lambda f: f.fresh(WIDE).end(),
    "end and reopen the big session": lambda f: (f.big.end(), f.store.session(BIG, reopen=True)),
    "cancel": lambda f: f.fresh(WIDE).cancel(),
    "delete": lambda f: f.fresh(None).delete(),
    "delete in a large tree": lambda f: f.fresh().delete(),
    "drive": Filled.drive,
    "lease, renew, release": Filled.lease,
    "session.children(), none": lambda f: f.big.children(),
    "child_counts()": lambda f: f.store.child_counts(f.store.sessions(limit=FULL_PAGE)),
    "session.environment()": lambda f: f.session().environment(),
    "last_cursor()": lambda f: f.store.last_cursor(),
    "follow_all(), first page": lambda f: next(iter(f.store.follow_all(wait=False))),
    "follow_all(), last page": Filled.follow_last,
    "follow, last event": lambda f: next(iter(f.store.follow(BIG, after=f.size))),
    "latest_events(before=)": lambda f: f.store.latest_events(before=(BIG, f.size // 2)),
    "store.size()": lambda f: f.store.size(),
    "store.store_id(), now_ms()": lambda f: (f.store.store_id(), f.store.now_ms()),
    "tokens": Filled.tokens,
    "audit.refused(), list(), head()": lambda f: (
        f.store.audit.refused("wrong token"),
        f.store.audit.list(limit=SHORT_PAGE),
        f.store.audit.head(),
    ),
    "conflicts()": lambda f: f.store.conflicts(limit=FULL_PAGE),
    "session.info()": lambda f: f.session().info(),
    "session.tree()": lambda f: f.session().tree(),
    "events(), last page": lambda f: f.store.events(BIG, after=f.size - PAGE),
    "latest_events()": lambda f: f.store.latest_events(),
    "search_sessions()": lambda f: f.store.search_sessions(
        bulk.session_id(f.some())[:2], limit=SHORT_PAGE
    ),
    "first write of a new process": Filled.first_write,
}
CHECKPOINTS: dict[str, Operation] = {
    "append": lambda f: f.big.append("messages", ["one more"]),
    "save one value": lambda f: f.big.save(value="x" * 500),
    "record": lambda f: f.big.record("manual_checkpoint", {"a": 1}),
    "latest(last=50)": lambda f: f.big.latest(last=50),
    "at(version, last=50)": lambda f: f.big.at(f.size // 2, last=50),
    "history()": lambda f: f.big.history(),
    "history(before=middle)": lambda f: f.big.history(before=f.size // 2),
    "resume_point()": lambda f: f.big.resume_point(),
    "checkpoints()": lambda f: f.store.checkpoints(),
    "checkpoints(kind=), rare": lambda f: f.store.checkpoints(kind="manual_checkpoint", limit=5),
    "history(oldest_first=)": lambda f: f.big.history(oldest_first=True, limit=FULL_PAGE),
    "history(item=)": lambda f: f.big.history(item="nobody"),
    "checkpoints(kind=), of which there is none": lambda f: f.store.checkpoints(
        kind="error_boundary"
    ),
    "save(key=)": lambda f: f.big.save(value="x", key=f.new_id()),
    "diff": lambda f: f.big.diff(f.size - 1, f.size),
    "fork": lambda f: f.big.fork(f.size // 2),
    "rewind": Filled.rewind,
    "pin, unpin": Filled.pin,
    "attest": lambda f: f.big.attest(f.size, {"tests": "passed"}),
    "session.counts(at_most=)": lambda f: f.big.counts(at_most=1_000),
}
EFFECTS: dict[str, Operation] = {
    "call": lambda f: f.big.call(send, text=f.new_id()),
    "call again": lambda f: f.big.call(send, text="the same"),
    "effects(), last page": lambda f: f.store.effects(after=f.size - PAGE),
    "effects(status=failed)": lambda f: f.store.effects(status="failed"),
    "effects(status=unknown)": lambda f: f.store.effects(status="unknown"),
    "effects(tool=), rare": lambda f: f.store.effects(tool=RARE),
    "effects(tool=, status=), rare": lambda f: f.store.effects(tool="search", status="failed"),
    "effects(session=)": lambda f: f.store.effects(session=f.session()),
    "effects(session=, status=), rare": lambda f: f.store.effects(session=BIG, status="failed"),
    "effects(key=)": lambda f: f.store.effects(key=f"key {f.some()}"),
    "effects(key=), idempotency key": lambda f: f.store.effects(key=f"idempotency {f.some()}"),
    **{
        f"effects(root=, status={status})": functools.partial(_effects_of_wide, status)
        for status in (None, "issued", "completed", "failed", "unknown")
    },
    "effects(session=, tool=, status=)": lambda f: f.store.effects(
        session=BIG, tool=RARE, status="failed"
    ),
    "effects(key=, tool=)": lambda f: f.store.effects(key=f"key {f.some()}", tool="search"),
    "effects(key=, session=)": lambda f: f.store.effects(key=f"key {f.some()}", session=BIG),
    "effects(item=)": lambda f: f.store.effects(item="nobody"),
    "effects(item=, tool=)": lambda f: f.store.effects(item="nobody", tool="search"),
    "effect, find_effect, attempts": lambda f: (
        f.store.effect(bulk.effect_id(f.some())),
        f.store.find_effect(bulk.effect_id(f.some())[:8]),
        f.store.attempts(bulk.effect_id(f.some())),
    ),
    "call_with": lambda f: f.big.call_with(send, {"text": f.new_id()}),
    "call_all": lambda f: f.big.call_all([holdfast.ToolUse(send, {"text": f.new_id()})]),
    "begin, complete": lambda f: f.begun().complete("done"),
    "once": lambda f: f.store.once(f.new_id(), lambda: 1),
    "compare": lambda f: f.store.compare("nobody's"),
    "resolve": lambda f: f.store.resolve(f.in_doubt(), holdfast.Landed(1), by="me"),
    "unresolved()": lambda f: f.big.unresolved(),
    "pending()": lambda f: f.big.pending(),
    "recent_calls()": lambda f: f.big.recent_calls(),
    "spend": lambda f: f.big.spend("small", usd="0.01"),
    "close_spend": lambda f: f.big.close_spend(),
    "correct_spend": lambda f: f.store.correct_spend(
        f.big.spend("small", usd="1", state="uncertain").id, usd="0.5", by="me"
    ),
    "costs()": lambda f: f.store.costs(f.store.sessions(limit=FULL_PAGE)),
    **{
        f"{whose}spends({given}state={state})": functools.partial(_spends, whose, given, state)
        for whose, given in (("session.", ""), ("store.", "session="), ("store.", ""))
        for state in ("open", "failed", "settled")
    },
    "spent(tree=True)": lambda f: f.big.spent(tree=True),
    "spends(state=uncertain)": lambda f: f.big.spends(state="uncertain"),
    "store.spends(state=uncertain)": lambda f: f.store.spends(state="uncertain"),
    "spends(), last page": lambda f: f.store.spends(session=BIG, after=f.size - PAGE),
}
WORK: dict[str, Operation] = {
    "submit, claim, heartbeat, complete": Filled.work_one,
    "claim of all queues": Filled.claim_any,
    "work.get": lambda f: f.store.work.get(f.running.id),
    "work.find(8 characters)": lambda f: f.store.work.find(f.running.id[:8]),
    "work.list()": lambda f: f.store.work.list(),
    **{
        f"work.list(status={status})": functools.partial(
            lambda status, f: f.store.work.list(status=status, limit=FULL_PAGE), status
        )
        for status in ("pending", "in_progress", "completed", "failed", "cancelled")
    },
    "work.list(type=), rare": lambda f: f.store.work.list(type=RARE),
    "work.list(type=, status=), rare": lambda f: f.store.work.list(type=RARE, status="pending"),
    "work.list(queue=)": lambda f: f.store.work.list(queue=f.queue, limit=FULL_PAGE),
    "work.list(queue=), rare": lambda f: f.store.work.list(queue=RARE),
    "work.list(queue=, status=pending)": lambda f: f.store.work.list(
        queue=f.queue, status="pending", limit=SHORT_PAGE
    ),
    "work.list(queue=, status=cancelled), rare": lambda f: f.store.work.list(
        queue=RARE, status="cancelled"
    ),
    "work.list(holder=)": lambda f: f.store.work.list(holder=f.running.holder, limit=FULL_PAGE),
    **{
        f"work.list({owner}=, status={status})": functools.partial(
            _items, {owner: BIG} | ({} if status is None else {"status": status})
        )
        for owner in ("session", "root")
        for status in (None, "pending", "in_progress", "completed", "failed", "cancelled")
    },
    "submit": Filled.submitted,
    "submit(delay_seconds=), retry": lambda f: f.store.work.retry(f.submitted(delay_seconds=60).id),
    "submit_many": lambda f: f.store.work.submit_many(
        [holdfast.Submission("bench", queue=f.new_id()) for _ in range(SHORT_PAGE)]
    ),
    "claim and complete of a session": lambda f: f.claimed().complete(),
    "complete(checkpoint=)": lambda f: f.claimed().complete(checkpoint={"value": 1}),
    "complete_many": lambda f: f.store.work.complete_many([(f.claimed(), None)]),
    "fail": lambda f: f.claimed().fail("broken"),
    "fail(retry=False), redrive": Filled.redrive,
    "progress": lambda f: f.claimed().progress("half"),
    "item.drive()": lambda f: f.store.work.claim(
        "bench", queues=[f.store.work.submit("bench", session=f.fresh(), queue=f.new_id()).queue]
    )[0].drive(),
    "work.heartbeat": lambda f: f.store.work.heartbeat([f.claimed()]),
    "work.release": lambda f: f.store.work.release(f.claimed().id, reason="stuck"),
    "work.cancel": lambda f: f.store.work.cancel(f.submitted().id),
    "work.promote()": lambda f: f.store.work.promote(),
    "work.errors": lambda f: f.store.work.errors(f.waiting.id),
    "work.dead()": lambda f: f.store.work.dead(),
    "work.why(waiting)": lambda f: f.store.work.why(f.waiting.id),
    "work.why(running)": lambda f: f.store.work.why(f.running.id),
    "work.sweep(), nothing expired": lambda f: f.store.work.sweep(),
    "work.health()": lambda f: f.store.work.health(at_most=FULL_PAGE),
    "work.counts(at_most=)": lambda f: f.store.work.counts(finished=False, at_most=FULL_PAGE),
}
PEERS: dict[str, Operation] = {
    "ask": Filled.asked,
    "ask, answer": lambda f: f.store.answer(f.asked().id, 1),
    "ask, progress": lambda f: f.store.progress(f.asked().id, "half"),
    "ask, cancel_ask": lambda f: f.store.cancel_ask(f.asked().id),
    "request": lambda f: f.store.request("writer"),
    "ask, pause": lambda f: f.fresh().pause(asks=[holdfast.Ask("writer")]),
    "sleep": lambda f: f.fresh().sleep(2**40),
    "wait_for_approval, approve": lambda f: f.store.approve(f.waiting_for_approval(), by="me"),
    "wait_for_approval, reject": lambda f: f.store.reject(f.waiting_for_approval(), by="me"),
    "resumption(), none": lambda f: f.big.resumption(),
    "add_artifact, artifacts": lambda f: (f.big.add_artifact("plan", data=1), f.big.artifacts()),
    "session.asks(last=)": lambda f: f.big.asks(last=FULL_PAGE),
    "session.pauses(last=)": lambda f: f.big.pauses(last=FULL_PAGE),
    "peer_call, find_ask": lambda f: (
        f.store.peer_call(bulk.session_id(f.some())),
        f.store.find_ask(bulk.session_id(f.some())[:8]),
    ),
    "get_pause, find_pause": lambda f: (
        f.store.get_pause(bulk.session_id(f.some())),
        f.store.find_pause(bulk.session_id(f.some())[:8]),
    ),
    "asks()": lambda f: f.store.asks(limit=FULL_PAGE),
    "asks(state=), rare": lambda f: f.store.asks(state="error"),
    "asks(agent=), rare": lambda f: f.store.asks(agent=RARE),
    "asks(agent=, state=), rare": lambda f: f.store.asks(agent="writer", state="error"),
    "pauses()": lambda f: f.store.pauses(limit=FULL_PAGE),
    "pauses(state=), rare": lambda f: f.store.pauses(state="ready"),
    "pauses(agent=), rare": lambda f: f.store.pauses(agent=RARE),
    "pauses(reason=), rare": lambda f: f.store.pauses(reason="approval"),
    "pauses(reason=, state=), rare": lambda f: f.store.pauses(reason="peers", state="ready"),
    "pauses(agent=, reason=)": lambda f: f.store.pauses(agent="writer", reason="time"),
    "asks(root=, agent=)": lambda f: f.store.asks(root=WIDE, agent=RARE),
    "pauses(root=, agent=)": lambda f: f.store.pauses(root=WIDE, agent=RARE),
    "pauses(root=, reason=)": lambda f: f.store.pauses(root=WIDE, reason="time"),
    "pauses(root=, agent=, reason=)": lambda f: f.store.pauses(
        root=WIDE, agent="writer", reason="time"
    ),
    **{
        f"{listing}(root=, state={state})": functools.partial(
            _of_wide, listing, {} if state is None else {"state": state}
        )
        for listing, states in (
            ("asks", (None, "open", "ok", "error", "timeout")),
            ("pauses", (None, "waiting", "ready", "closed", "cancelled")),
        )
        for state in states
    },
}
STATE: dict[str, Operation] = {
    "state.set": lambda f: f.big.state.set("key", f.new_id()),
    "state.set, a new key": lambda f: f.fresh(None).state.set(f.new_id(), 1),
    "state.delete": lambda f: (f.big.state.set("gone", 1), f.big.state.delete("gone")),
    "state.increment": lambda f: f.big.state.increment("number"),
    "state.append": lambda f: f.fresh(None).state.append("list", [1]),
    "state.merge": lambda f: f.big.state.merge("object", {"a": 1}),
    "state.add, remove": lambda f: (f.big.state.add("set", 1), f.big.state.remove("set", 1)),
    "state.batch": lambda f: f.big.state.batch([{"op": "set", "key": "b", "value": 1}]),
    "state.patch": lambda f: f.big.state.patch({"b": 2}),
    "state.update": lambda f: f.big.state.update("number", lambda value: (value or 0) + 1),
    "state.set_rule, reduce, rules": lambda f: (
        f.big.state.set_rule("sum", reducer="sum"),
        f.big.state.reduce("sum", 1),
        f.big.state.rules(),
    ),
    "state.get, entry, version": lambda f: (
        f.big.state.get("key"),
        f.big.state.entry("key"),
        f.big.state.version(),
    ),
    "state.entries(), keys()": lambda f: (f.big.state.entries(), f.big.state.keys()),
    "state.snapshot()": lambda f: f.big.state.snapshot(),
    "state.summary()": lambda f: f.big.state.summary(),
    "state.history()": lambda f: f.big.state.history("key", limit=SHORT_PAGE),
    "state.events(), changes()": lambda f: (
        f.big.state.events(limit=SHORT_PAGE),
        f.big.state.changes(limit=SHORT_PAGE),
    ),
    "state.conflicts()": lambda f: f.big.state.conflicts(),
}
GROUPS = {
    "sessions and events": SESSIONS,
    "checkpoints": CHECKPOINTS,
    "effects and spend": EFFECTS,
    "work": WORK,
    "peers": PEERS,
    "shared state": STATE,
}
# What reads all there is, and says so in its documentation; the last ones have an index for the
# first of their filters only (docs/scale.md).
WHOLE: dict[str, Operation] = {
    "doctor": Filled.doctor,
    "spending()": lambda f: f.store.spending(),
    "session.counts()": lambda f: f.big.counts(),
    "session.standing(newest)": lambda f: f.big.standing(f.size),
    "work.counts()": lambda f: f.store.work.counts(),
    "work.growth()": lambda f: f.store.work.growth(),
    "latest(kind=), of which there is none": lambda f: f.big.latest(kind="error_boundary"),
    "conflicts_per_hour()": lambda f: f.store.conflicts_per_hour(),
    "recover": lambda f: f.store.recover("bench"),
    "effects(root=, tool=)": lambda f: f.store.effects(root=WIDE, tool=RARE),
    "effects(session=, tool=)": lambda f: f.store.effects(session=BIG, tool=RARE),
    "work.list(session=, type=)": lambda f: f.store.work.list(session=BIG, type=RARE),
    "work.list(queue=, type=)": lambda f: f.store.work.list(queue=f.queue, type=RARE),
    "a prune that finds nothing": lambda f: f.store.prune(keep=10 * f.size),
}
