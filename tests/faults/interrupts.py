"""Interrupts the operations of a store at random instants, and looks for what that has cost.

It runs as a process of its own, on either database, for a store that hangs must not hang the test:

    python -m tests.faults.interrupts '{"place": {"url": "sqlite:////tmp/a.db"}, "hits": 20}'
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, TypeAlias

import holdfast
from holdfast.kernel.operation import Handle, Op, Sync, query, rows
from holdfast.testing.nouns import Counter
from tests.faults.workload import found_in, prepare, twice
from tests.replies.requests import keyed, numbered

PROJECT = Path(__file__).parents[2]
WAIT_SECONDS = 60.0
CALLS_AT_ONCE = 16
HITS_BETWEEN_LONG_CHECKS = 100
# What an interrupt has cost shows in the next calls too: in a long run not every hit is looked at.
CHECKS_AT_MOST = 500

Prepared: TypeAlias = Callable[[], object]


class Subject:
    """A store, with what the operations need to be asked again and again."""

    def __init__(self, place: dict[str, str], directory: Path) -> None:
        self.place = place
        self.directory = directory
        self.store = holdfast.open(**place, busy_timeout_seconds=WAIT_SECONDS)  # type: ignore[arg-type]
        prepare(self.store, "root", "neighbour")
        self.session = self.store.session("s")
        self.session.save(transcript=[{"n": n} for n in range(100)])
        self.driven: holdfast.Session | None = None
        # The store may have been interrupted by another process before.
        self._prefix, self._numbers = os.urandom(3).hex(), itertools.count()

    def name(self) -> str:
        """Return a name that was not used before."""
        return f"{self._prefix}-{next(self._numbers)}"

    def other(self, versions: int = 0) -> holdfast.Session:
        """Return a new session, with checkpoints."""
        session = self.store.session(self.name())
        for n in range(versions):
            session.append("transcript", [n])
        return session

    def item(self) -> Any:
        """Return a claimed work item of a queue of its own."""
        queue = self.name()
        self.store.work.submit("step", {"n": 1}, queue=queue)
        return self.store.work.claim("me", queues=queue)[0]


@holdfast.tool(effect="mutate")
def pay(to: str, *, idempotency_key: str) -> str:
    """Do what must happen once."""
    return idempotency_key


@holdfast.tool(effect="mutate", undo=lambda arguments, result, key: None)
def book(room: str) -> str:
    """Do what can be undone."""
    return room


@holdfast.tool(effect="mutate", verify=lambda arguments, key: holdfast.Landed("charged"))
def charge(to: str) -> str:
    """Do what can be verified."""
    return to


def _in_doubt(subject: Subject) -> str:
    begun = subject.other(1).begin(charge, {"to": "ann"})
    assert isinstance(begun, holdfast.Issued)
    begun.fail("no answer")
    return begun.effect_id


def _resolve(subject: Subject) -> Prepared:
    return partial(subject.store.resolve, _in_doubt(subject), holdfast.NotLanded(), by="ann")


def _compensate(subject: Subject) -> Prepared:
    session = subject.other(1)
    session.call(book, room="12")
    return partial(session.compensate, to=1)


def _correct_spend(subject: Subject) -> Prepared:
    spend = subject.other().spend("model", usd=1, state="uncertain")
    return partial(subject.store.correct_spend, spend.id, usd=2)


def _agents(subject: Subject) -> holdfast.Session:
    return subject.store.session(subject.name(), agent="planner")


def _decision(subject: Subject) -> str:
    return _agents(subject).wait_for_approval("May I?").pause_id


def _import(subject: Subject) -> Prepared:
    session, path = subject.other(2), subject.directory / subject.name()
    subject.store.export(path, [session])
    session.delete()
    return partial(subject.store.import_sessions, path)


def _lease(subject: Subject) -> Prepared:
    session = subject.other()
    return lambda: session.release(session.renew(session.lease("me", 60), 90))


def _redrive(subject: Subject) -> Prepared:
    item = subject.item()
    item.fail("no", retry=False)
    return partial(subject.store.work.redrive, item.id)


def _retry(subject: Subject) -> Prepared:
    item = subject.store.work.submit("step", queue=subject.name(), delay_seconds=600)
    return partial(subject.store.work.retry, item.id)


def _request(subject: Subject) -> tuple[str, Any]:
    agent = subject.name()
    subject.store.request(agent)
    return agent, subject.store.work.claim("me", queues=f"agent:{agent}")[0]


def _resume(subject: Subject) -> Prepared:
    session = subject.store.session(subject.name(), agent=subject.name())
    parked = session.pause(asks=[holdfast.Ask("peer")])
    assert isinstance(parked, holdfast.Parked)
    subject.store.answer(session.asks()[0].id, "done")
    [item] = subject.store.work.claim("me", queues=f"agent:{session.info().agent}")
    return item.resume


def _submit_many(subject: Subject) -> Prepared:
    items = [holdfast.Submission("step", queue=subject.name()) for _ in range(3)]
    return partial(subject.store.work.submit_many, items)


def _unpin(subject: Subject) -> Prepared:
    session = subject.other(1)
    session.pin(1, "kept")
    return partial(session.unpin, 1)


def _begin_and_complete(subject: Subject) -> Prepared:
    def run() -> None:
        begun = subject.session.begin(pay, {"to": name})
        assert isinstance(begun, holdfast.Issued)
        begun.complete("paid")

    name = subject.name()
    return run


def _drive(subject: Subject) -> Prepared:
    def run() -> None:
        with session.drive(lease_seconds=600) as driven:
            driven.append("transcript", [1])

    session = subject.driven = subject.other()
    return run


def _open_and_close(subject: Subject) -> Prepared:
    def run() -> None:
        with holdfast.open(**subject.place) as store:  # type: ignore[arg-type]
            store.store_id()

    return run


def _export(subject: Subject) -> Prepared:
    session, path = subject.other(2), subject.directory / subject.name()

    def run() -> None:
        subject.store.export(path, [session])

    return run


def _move_back(subject: Subject) -> Prepared:
    session = subject.other(3)
    return lambda: session.rewind(1)


def _fork(subject: Subject) -> Prepared:
    version = subject.session.info().version
    return lambda: subject.session.fork(version)


def _claim(subject: Subject) -> Prepared:
    queue = subject.name()
    subject.store.work.submit("step", queue=queue)
    return lambda: subject.store.work.claim("me", queues=queue)


STATE_CHANGES: list[dict[str, Any]] = [
    {"op": "set", "key": "k", "value": 1},
    {"op": "append", "key": "xs", "items": ["x" * 30]},
    {"op": "delete", "key": "k"},
]


def _asking(subject: Subject) -> holdfast.Session:
    session = _agents(subject)
    session.ask("peer")
    return session


def _state_reduce(subject: Subject) -> Prepared:
    def run() -> None:
        state.set_rule("total", schema={"type": "integer"}, reducer="sum")
        state.reduce("total", 1)
        state.delete_rule("total")

    state = subject.other().state
    return run


def _state_remove(subject: Subject) -> Prepared:
    state = subject.other().state
    state.append("xs", ["x", "y"])
    return partial(state.remove, "xs", "x")


def _state_restore(subject: Subject) -> Prepared:
    state = subject.session.state
    last = state.increment("n").sequence
    return lambda: state.restore(last)


def _state_watch(subject: Subject) -> Prepared:
    state = subject.session.state
    last = state.increment("n").sequence
    return lambda: next(iter(state.watch(after=last - 1)))


OPERATIONS: dict[str, Callable[[Subject], Prepared]] = {
    "add": lambda s: lambda: Counter(s.store).add(1, note="asked"),
    "add_at_once": lambda s: lambda: Counter(s.store).add_at_once(1, note="asked"),
    "append": lambda s: lambda: s.session.append("transcript", [{"role": "user"}]),
    "approve": lambda s: partial(s.store.approve, _decision(s), by="ann"),
    "answer": lambda s: partial(s.store.answer, s.session.ask("peer").id, "done"),
    "answers": lambda s: partial(_asking(s).answers, grace_seconds=0),
    "artifact": lambda s: partial(s.other().add_artifact, "plan", data={"n": 1}),
    "ask": lambda s: lambda: s.session.ask("peer", {"n": 1}),
    "attest": lambda s: lambda: s.session.attest(1, {"by": "test"}),
    "audit": lambda s: lambda: s.store.audit.refused("wrong token"),
    "backup": lambda s: lambda: s.store.backup(s.directory / s.name()),
    "begin_and_complete": _begin_and_complete,
    "call": lambda s: lambda: s.session.call(pay, to=s.name()),
    "call_all": lambda s: (
        lambda: s.session.call_all([holdfast.ToolUse(pay, {"to": s.name()}) for _ in range(3)])
    ),
    "cancel": lambda s: s.other(1).cancel,
    "cancel_ask": lambda s: partial(s.store.cancel_ask, s.session.ask("peer").id),
    "claim": _claim,
    "close_spend": lambda s: s.other().close_spend,
    "compensate": _compensate,
    "complete": lambda s: s.item().complete,
    "complete_many": lambda s: partial(s.store.work.complete_many, [(s.item(), 1), (s.item(), 2)]),
    "compose": lambda s: lambda: s.store.run(twice, "asked"),
    "correct_spend": _correct_spend,
    "delete": lambda s: s.other(1).delete,
    "diff": lambda s: lambda: s.session.diff(1, 1),
    "drive": _drive,
    "effects": lambda s: lambda: s.store.effects(session=s.session, limit=5),
    "end": lambda s: s.other(1).end,
    "events": lambda s: lambda: s.store.events("s", limit=5),
    "export": _export,
    "fail": lambda s: partial(s.item().fail, "no", retry=False),
    "fork": _fork,
    "heartbeat": lambda s: s.item().heartbeat,
    "history": lambda s: lambda: s.session.history(limit=5),
    "import": _import,
    "item_progress": lambda s: partial(s.item().progress, "half"),
    "item_release": lambda s: s.item().release,
    "item_taken_away": lambda s: partial(s.store.work.release, s.item().id, reason="stuck"),
    "latest": lambda s: lambda: s.session.latest(last=5),
    "lease": _lease,
    "once": lambda s: lambda: s.store.once(s.name(), lambda: 1),
    "open": _open_and_close,
    "pause": lambda s: partial(_asking(s).pause, {"n": 1}),
    "pin": lambda s: lambda: s.session.pin(1, "kept"),
    "progress": lambda s: partial(s.store.progress, s.session.ask("peer").id, "half"),
    "promote": lambda s: s.store.work.promote,
    "prune": lambda s: lambda: s.store.prune(keep=100_000),
    "record": lambda s: lambda: s.session.record("manual_checkpoint", {"n": 1}),
    "receive": lambda s: _request(s)[1].receive,
    "recover": lambda s: s.store.recover,
    "redrive": _redrive,
    "reject": lambda s: partial(s.store.reject, _decision(s), by="ann"),
    "request": lambda s: lambda: s.store.run(keyed, s.session, s.name()),
    "request_of_a_lane": lambda s: lambda: s.store.run(numbered, s.session, 1, lane=s.name()),
    "request_of_a_caller": lambda s: partial(s.store.request, "planner"),
    "resolve": _resolve,
    "resume": _resume,
    "resume_point": lambda s: s.session.resume_point,
    "resumption": lambda s: s.other().resumption,
    "retry": _retry,
    "rewind": _move_back,
    "save": lambda s: lambda: s.session.save(plan={"n": 1}),
    "session": lambda s: lambda: s.store.session(s.name()),
    "sessions": lambda s: lambda: s.store.sessions(limit=5),
    "settle": lambda s: partial(s.store.settle, "nobody:1"),
    "sleep": lambda s: partial(_agents(s).sleep, 4_000_000_000_000),
    "spend": lambda s: lambda: s.session.spend("model", input_tokens=1),
    "state_batch": lambda s: partial(s.session.state.batch, STATE_CHANGES),
    "state_compact": lambda s: partial(s.session.state.compact, s.session.state.version()),
    "state_increment": lambda s: partial(s.session.state.increment, "n", idempotency_key=s.name()),
    "state_initialize": lambda s: partial(s.other().state.initialize, {"n": 1, "xs": []}),
    "state_merge": lambda s: partial(s.session.state.merge, "doc", {"a": 1, "b": None}),
    "state_patch": lambda s: partial(s.session.state.patch, {"n": 1, "doc": {"a": None}}),
    "state_reduce": _state_reduce,
    "state_remove": _state_remove,
    "state_replace": lambda s: partial(s.session.state.replace, {"n": 1, "k": "y"}),
    "state_restore": _state_restore,
    "state_set": lambda s: partial(s.session.state.set, "k", "x" * 300),
    "state_update": lambda s: partial(s.session.state.update, "k", lambda value: 1),
    "state_watch": _state_watch,
    "submit": lambda s: lambda: s.store.work.submit("step", queue=s.name()),
    "submit_many": _submit_many,
    "sweep": lambda s: s.store.work.sweep,
    "token": lambda s: partial(s.store.tokens.create, s.name(), session=s.session),
    "token_revoke": lambda s: partial(s.store.tokens.revoke, s.store.tokens.create(s.name()).id),
    "unpin": _unpin,
    "verify": lambda s: partial(s.store.verify, _in_doubt(s), [charge]),
    "wait_for_approval": lambda s: partial(_agents(s).wait_for_approval, "May I?"),
    "work_cancel": lambda s: partial(s.store.work.cancel, s.item().id),
    "work_list": lambda s: lambda: s.store.work.list(limit=5),
}


def driven_soon(session: holdfast.Session) -> None:
    """Drive a session as another would, as soon as an interrupted driver has let go of it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            with session.drive("other"):
                return
        except holdfast.SessionBusy:
            assert time.monotonic() < deadline, f"{session} is still held"
            time.sleep(0.005)


class Alarm:
    """Raises KeyboardInterrupt in the main thread after a while, once, unless it is put off."""

    def __init__(self) -> None:
        self._is_set = False
        signal.signal(signal.SIGALRM, self._ring)

    @contextlib.contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        self._is_set = True
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        try:
            yield
        finally:
            self._is_set = False

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            self._is_set = False
            raise KeyboardInterrupt


class Holding(Handle[Sync]):
    """Calls that hold what they need until all of them have it."""

    @query
    def hold(self, all_there: threading.Barrier) -> Op[None]:
        """Read, and wait for the others."""
        yield from rows("SELECT 1 AS one")
        all_there.wait(WAIT_SECONDS)


class Checks:
    """Looks for what an interrupt has left behind."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, "other")
        self._added = found_in(subject.store).count("after")
        self.long_check()
        self._thread_count = self._own_threads()

    def check(self) -> None:
        """Read and write, on this thread and on another one."""
        store = self._subject.store
        assert store.store_id()
        assert Counter(store).value() >= 0
        Counter(store).add(1, note="after")
        self._threads.submit(lambda: Counter(store).add(1, note="after")).result(WAIT_SECONDS)
        self._added += 2
        if self._subject.driven is not None:
            driven_soon(self._subject.driven)

    def long_check(self) -> None:
        """Make as many calls at once as the store has connections for."""
        holding, all_there = Holding(self._subject.store.runtime), threading.Barrier(CALLS_AT_ONCE)
        held = [self._threads.submit(holding.hold, all_there) for _ in range(CALLS_AT_ONCE)]
        for one in held:
            one.result(WAIT_SECONDS)

    def check_threads(self) -> None:
        """Make sure that every thread that was started for a call has ended with it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._own_threads() > self._thread_count:
            assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
            time.sleep(0.01)

    def end(self) -> None:
        """Close the store, and make sure that nothing is there twice or half."""
        self._threads.shutdown()
        self._subject.store.close()
        with holdfast.open(**self._subject.place) as store:  # type: ignore[arg-type]
            notes = found_in(store)
            assert notes.count("after") == self._added
            assert set(notes) <= {"after", "asked"}
            check_state(store)
        url, namespace = self._subject.place["url"], self._subject.place.get("namespace")
        found = holdfast.store.check(url, namespace=namespace)
        assert [each for each in found if each.level == "problem"] == []

    def _own_threads(self) -> int:
        # These begin with the first call that needs them, and end with the store.
        kept = ("keeper", "listener", "poller", "recorder", "writer")
        lasting = tuple(f"holdfast-{name}" for name in kept)
        names = [thread.name for thread in threading.enumerate() if thread.is_alive()]
        return sum(name.startswith("holdfast") and not name.startswith(lasting) for name in names)


def check_state(store: holdfast.Store) -> None:
    """Make sure that the state is what its history says, without a hole."""
    state = store.find_session("s").state
    now = state.snapshot()
    assert state.snapshot(at_sequence=now.version) == now
    after = max(0, now.version - 100)
    try:
        events = state.events(after=after)
    except holdfast.Compacted as compacted:
        after = compacted.oldest_sequence
        events = state.events(after=after)
    assert [each.sequence for each in events] == list(range(after + 1, now.version + 1))


def interrupt(
    subject: Subject, operation: str, hits: int, alarm: Alarm, checks: Checks, chance: random.Random
) -> int:
    """Interrupt one operation so many times; return how often it was asked for."""
    make = OPERATIONS[operation]
    lasted = []
    for _ in range(5):
        prepared = make(subject)
        began = time.perf_counter()
        prepared()
        lasted.append(time.perf_counter() - began)
    seconds, hit = statistics.median(lasted) * 1.1, 0
    hits_between_checks = max(1, hits // CHECKS_AT_MOST)
    for asked in itertools.count(1):
        prepared, is_hit = make(subject), False
        try:
            with alarm.after(chance.uniform(0, seconds)):
                prepared()
        except KeyboardInterrupt:
            is_hit = True
        # Not while the error is handled: it keeps the frames, and a driver that was interrupted
        # before `with` had it, alive.
        if is_hit:
            hit += 1
            if hit % hits_between_checks == 0:
                checks.check()
            if hit % HITS_BETWEEN_LONG_CHECKS == 0:
                checks.long_check()
        if hit == hits:
            return asked
    raise AssertionError("unreachable")


@contextlib.contextmanager
def neighbour(store: holdfast.Store) -> Iterator[None]:
    """Another thread that writes all the time, so that calls meet somebody."""
    is_over = threading.Event()

    def write() -> None:
        while not is_over.wait(0.0005):
            Counter(store, "neighbour").add(1, note="neighbour")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def main(asked: dict[str, Any]) -> dict[str, int]:
    """Interrupt operations, alone and beside another thread; return how often each was asked."""
    faulthandler.register(signal.SIGUSR1)
    done: dict[str, int] = {}
    with TemporaryDirectory() as directory:
        subject = Subject(asked["place"], Path(directory))
        alarm, checks = Alarm(), Checks(subject)
        chance = random.Random(asked.get("seed", 1))
        for operation in asked.get("operations") or OPERATIONS:
            print(f"{operation} …", file=sys.stderr, flush=True)
            with neighbour(subject.store) if asked.get("beside") else contextlib.nullcontext():
                done[operation] = interrupt(
                    subject, operation, asked["hits"], alarm, checks, chance
                )
            checks.long_check()
            checks.check_threads()
        checks.end()
    return done


def run(**asked: Any) -> dict[str, int]:
    """Do so in a process of its own; raise with what it said if anything was lost."""
    command = [sys.executable, "-m", "tests.faults.interrupts", json.dumps(asked)]
    child = subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, said = child.communicate(timeout=asked.get("limit_seconds", 600))
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGUSR1)
        time.sleep(1)
        child.kill()
        out, said = child.communicate()
        raise AssertionError(f"it hangs:\n{said[-20_000:]}") from None
    assert child.returncode == 0, said[-20_000:]
    done: dict[str, int] = json.loads(out)
    return done


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
