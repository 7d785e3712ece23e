"""The store: an open database, in both colours, with every noun reachable from it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_args

from .arguments import require_one_of, require_seconds, require_text, require_whole
from .checkpoints import CheckpointsNoun
from .ciphers import keys_of_environment
from .clock import Clock, IdSource, SystemClock
from .codec import Cipher, Codec, Compression, Limits
from .effects import EffectsNoun, Ledger, StoreEffects
from .errors import InvalidArgument, LimitExceeded
from .feed import FeedNoun, event_statements, events_if_done, lock_statement, read_events
from .feed.follow import POLL_SECONDS, POLL_SECONDS_MAX, follow_tree
from .feed.follow_all import follow_all
from .items import Work
from .kernel import health
from .kernel.commit_settlement import MarkOps, parse_commit_id
from .kernel.driver import Durability, Hooks, Services, Settings, StoreMode
from .kernel.files import back_up
from .kernel.flow import (
    Flow,
    Stream,
    finish,
    flow,
    invoke,
    refuse_steps,
    run_flow,
    run_flow_async,
    run_stream,
    run_stream_async,
    stream,
)
from .kernel.opening import Opening, join, open_async_driver, open_driver
from .kernel.operation import (
    Async,
    C,
    Call,
    Command,
    Composition,
    Op,
    Runtime,
    Sync,
    Tx,
    large_query,
    operation,
    query,
)
from .kernel.schema import CipherKeys, read_now_ms, read_store_id
from .kernel.url import Target, parse
from .leases import Keeper
from .maintenance import MaintenanceOps, RecoveryOps
from .portable import PortableOps
from .records import Event, Finding, FollowedEvent, StoreInfo
from .redaction import Redaction, Redactor, require_key
from .session import Session
from .sessions import Identity, IdentityOps, SessionsNoun
from .spend import SpendNoun, StoreSpend
from .state import StateNoun
from .store_sessions import StoreSessions
from .work import WorkNoun

P = ParamSpec("P")
R = TypeVar("R")

# Everything that a store keeps, each after what it stands on. A new noun is a package and a line.
NOUNS = (
    FeedNoun(),
    SessionsNoun(),
    CheckpointsNoun(),
    EffectsNoun(),
    SpendNoun(),
    StateNoun(),
    WorkNoun(),
)

COMPOSED_SECONDS_MAX = 1.0
BUSY_SECONDS = 10.0
BUSY_SECONDS_MAX = 3600.0


class StoreHandle(
    StoreSessions[C],
    StoreEffects[C],
    StoreSpend[C],
    MaintenanceOps[C],
    RecoveryOps[C],
    PortableOps[C],
):
    """What a store does, in every colour."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.runtime.target.shown}>"

    @property
    def url(self) -> str:
        """The URL that opens this store again, with its password; a temporary store has none."""
        return self.runtime.target.url

    @property
    def work(self) -> Work[C]:
        """Work items."""
        return Work(self.runtime)

    @query
    def store_id(self) -> Op[str]:
        """Return the id that this store was given when it was made."""
        return (yield from read_store_id())

    @query
    def now_ms(self) -> Op[int]:
        """Return the store's time in milliseconds UTC, which decides leases and deadlines."""
        return (yield from read_now_ms())

    @query
    def events(self, root_id: str, *, after: int = 0, limit: int = 100) -> Op[list[Event]]:
        """Return a session tree's events after a position, oldest first, without holes."""
        return (yield from read_events(self.runtime.codec, root_id, after, limit))

    @stream
    def follow(
        self, root: object, *, after: int = 0, poll_seconds: float = POLL_SECONDS
    ) -> Stream[Event]:
        """Give a session tree's events after a position as they come, each once and in order.

        It never ends by itself. `poll_seconds` is how long an event may go unnoticed where nobody
        tells of it; a slow reader slows no writer.
        """
        root_id = require_text("root", getattr(root, "root_id", root))
        require_whole("after", after, 0)
        require_seconds("poll_seconds", poll_seconds, POLL_SECONDS_MAX, may_be_least=False)
        yield from follow_tree(self.runtime, root_id, after, poll_seconds)

    @stream
    def follow_all(
        self,
        *,
        after: str | None = None,
        poll_seconds: float = POLL_SECONDS,
        wait: bool = True,
    ) -> Stream[FollowedEvent]:
        """Give the events of all trees as they come: each once, and each tree's in order.

        `after` is the `cursor` of the last event that was seen. With `wait=False` it ends where
        nothing more was committed. What retention has removed is not given.
        """
        require_seconds("poll_seconds", poll_seconds, POLL_SECONDS_MAX, may_be_least=False)
        yield from follow_all(self.runtime, after, poll_seconds, wait=wait)

    @operation
    def settle(self, id: str) -> Op[bool]:
        """Tell whether the commit that CommitUnknown named was made; the answer is final."""
        return (yield from MarkOps.is_committed(MarkOps(), *parse_commit_id(id)))

    @flow
    def backup(
        self, path: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> Flow[None]:
        """Copy the live database into a new SQLite file, one consistent moment of it.

        That moment is held while it is read: on PostgreSQL dead rows stay, on SQLite the log grows.
        """
        yield from invoke(back_up, self.runtime.driver, path, progress)


class Transaction(StoreHandle[Tx]):
    """A store inside `store.run`: every operation is a generator to `yield from`."""

    def __init__(self, runtime: Runtime) -> None:
        self.composition = Composition(is_read_only=runtime.settings.mode == "read")
        super().__init__(
            replace(
                runtime,
                start=self.composition.add,
                run_flow=refuse_steps,
                run_stream=refuse_steps,
            )
        )

    def within(self, session: Session[Any]) -> Session[Tx]:
        """Return a session's handle for this transaction, with the session's fence."""
        place = (session.id, session.number, session.root_id, session.name)
        return Session(self.runtime, *place, fence=session.fence, guard=session.guard)


class _Compose:
    """Runs a function of operations as one operation."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @operation
    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Op[Any]:
        """Run `function(tx, …)` to its end in one transaction."""
        return (yield from self._run(function, args, kwargs))

    @large_query
    def read(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Op[Any]:
        """Do so in one snapshot."""
        return (yield from self._run(function, args, kwargs))

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Op[Any]:
        transaction = Transaction(self._runtime)
        body = function(transaction, *args, **kwargs)
        if not isinstance(body, Generator):
            if isinstance(body, Coroutine):
                body.close()
            raise InvalidArgument(
                "store.run takes a generator function: def f(tx): yield from tx.…; "
                f"{_name(function)} returned {type(body).__name__}"
            )
        result = yield from _within_time(body, _name(function))
        transaction.composition.check()
        return result


def _within_time(body: Op[R], name: str) -> Op[R]:
    """Pass commands on, and stop a function that computes or waits while it holds the lock."""
    spent_seconds = 0.0
    answer: Any = None
    outcome: Any
    while True:
        started = time.monotonic()
        try:
            outcome, has_ended = body.send(answer), False
        except StopIteration as stop:
            outcome, has_ended = stop.value, True
        spent_seconds += time.monotonic() - started
        if spent_seconds > COMPOSED_SECONDS_MAX:
            body.close()
            raise LimitExceeded(
                f"{name} spent {spent_seconds:.1f} s of its own inside a transaction, at most "
                f"{COMPOSED_SECONDS_MAX:g} s is allowed; do I/O and waiting outside store.run"
            )
        if has_ended:
            return cast("R", outcome)
        if not isinstance(outcome, Command):
            body.close()
            raise InvalidArgument(
                f"{name} yielded {type(outcome).__name__}; inside store.run write `yield from tx.…`"
            )
        answer = yield outcome


def _compose(runtime: Runtime, function: Any, args: Any, kwargs: Any) -> Call[Any]:
    if not callable(function):
        raise InvalidArgument(
            "store.run takes a generator function: def f(tx): yield from tx.…; "
            f"{type(function).__name__} is none"
        )
    composed = _Compose.run if runtime.settings.mode == "write" else _Compose.read
    return Call(composed, _Compose(runtime), (function, args, kwargs))


class Store(StoreHandle[Sync]):
    """An open database. Thread-safe; every method returns once its change is durable."""

    def run(
        self,
        function: Callable[Concatenate[Transaction, P], Op[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run several operations in one commit. The function may run more than once."""
        result: R = self.runtime.start(_compose(self.runtime, function, args, kwargs))
        return result

    def within(self, connection: object) -> Store:
        """Return a store whose operations join the caller's own PostgreSQL transaction."""
        return Store(_joined(self.runtime, connection))

    def close(self) -> None:
        """Finish what is under way and close; a second time does nothing."""
        self.runtime.driver.require_outside()
        Keeper.of(self.runtime).close()
        self.runtime.driver.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStore(StoreHandle[Async]):
    """An open database in one event loop; every awaited call is durable when it returns."""

    async def run(
        self,
        function: Callable[Concatenate[Transaction, P], Op[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run several operations in one commit. The function may run more than once."""
        result: R = await self.runtime.start(_compose(self.runtime, function, args, kwargs))
        return result

    def within(self, connection: object) -> AsyncStore:
        """Return a store whose operations join the caller's own PostgreSQL transaction."""
        return AsyncStore(_joined(self.runtime, connection))

    async def close(self) -> None:
        """Finish what is under way and close; a second time does nothing."""
        await finish(asyncio.to_thread(Keeper.of(self.runtime).close))
        await self.runtime.driver.close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _runtime(
    driver: Any,
    target: Target,
    settings: Settings,
    codec: Codec,
    redactor: Redaction,
    *,
    is_async: bool,
    keeper: Keeper | None = None,
) -> Runtime:
    runtime = Runtime(
        driver=driver,
        codec=codec,
        redactor=redactor,
        target=target,
        settings=settings,
        start=driver.run,
        run_flow=partial(run_flow_async if is_async else run_flow, driver),
        run_stream=partial(run_stream_async if is_async else run_stream, driver),
        is_async=is_async,
        states={} if keeper is None else {Keeper: keeper},
    )
    # Made here, they know the store and not the first transaction that needs them.
    Ledger.of(runtime)
    return runtime


def sync_twin(store: AsyncStore) -> Store:
    """Return a sync store over the same connections, for threads of our own."""
    runtime = store.runtime
    parts = (runtime.target, runtime.settings, runtime.codec, runtime.redactor)
    keeper = Keeper.of(runtime)
    return Store(_runtime(runtime.driver.twin(), *parts, is_async=False, keeper=keeper))


def _joined(runtime: Runtime, connection: object) -> Runtime:
    given = (runtime.target, runtime.settings)
    driver = join(*given, connection, is_async=runtime.is_async)
    parts = (runtime.codec, runtime.redactor)
    return _runtime(driver, *given, *parts, is_async=runtime.is_async)


def open(
    url: str | None = None,
    *,
    mode: StoreMode = "write",
    durability: Durability = "full",
    namespace: str | None = None,
    clock: Clock | None = None,
    cipher: Cipher | None = None,
    limits: Limits | None = None,
    compression: Compression = "none",
    redaction: Redaction | None = None,
    migrate: bool = True,
    busy_timeout_seconds: float = BUSY_SECONDS,
    hooks: Hooks | None = None,
) -> Store:
    """Open a store, creating it if it does not exist.

    The URL is `sqlite:///file.db`, `sqlite://` for a temporary file, or `postgresql://…`; without
    one, `$HOLDFAST_URL` or `sqlite:///holdfast.db`. `durability="normal"` survives the death of
    the process, not a power loss. `compression="zstd"` needs `holdfast-agents[compress]`; records
    of both kinds can be read whatever it is. `redaction` takes secrets out of what tools are given
    and return before it is stored; common shapes are known by default. With `migrate=False` an
    older or missing store is refused. So is one whose keys are not given, by `cipher` and
    `redaction` or in the file that `$HOLDFAST_KEYS_FILE` names.

    With `mode="read"` nothing is created, migrated, locked or written, and no writer is waited for;
    a call that writes raises StoreReadOnly.
    """
    target = parse(url, namespace)
    settings = _settings(mode, durability, clock, busy_timeout_seconds, hooks)
    cipher, redaction = _keys(cipher, redaction)
    codec, redaction = _codec(limits, cipher, compression), _redaction(redaction)
    driver = open_driver(target, settings, migrate=migrate)
    store = Store(_runtime(driver, target, settings, codec, redaction, is_async=False))
    try:
        _require_keys(driver.run, store.ledger, cipher)
    except BaseException:
        store.close()
        raise
    return store


def aopen(
    url: str | None = None,
    *,
    mode: StoreMode = "write",
    durability: Durability = "full",
    namespace: str | None = None,
    clock: Clock | None = None,
    cipher: Cipher | None = None,
    limits: Limits | None = None,
    compression: Compression = "none",
    redaction: Redaction | None = None,
    migrate: bool = True,
    busy_timeout_seconds: float = BUSY_SECONDS,
    hooks: Hooks | None = None,
) -> Opening[AsyncStore]:
    """Open a store in this event loop, by `await` or `async with`; the arguments of `open`."""

    async def opening() -> AsyncStore:
        target = parse(url, namespace)
        settings = _settings(mode, durability, clock, busy_timeout_seconds, hooks)
        used, hider = _keys(cipher, redaction)
        codec, chosen = _codec(limits, used, compression), _redaction(hider)
        driver = await open_async_driver(target, settings, migrate=migrate)
        store = AsyncStore(_runtime(driver, target, settings, codec, chosen, is_async=True))
        try:
            await asyncio.to_thread(_require_keys, driver.twin().run, store.ledger, used)
        except BaseException:
            await store.close()
            raise
        return store

    return Opening(opening())


def inspect(url: str | None = None, *, namespace: str | None = None) -> StoreInfo:
    """Tell what a store is, without creating or migrating it. Raises NotFound if there is none."""
    return health.inspect(
        parse(url, namespace), _settings("read", "full", None, BUSY_SECONDS, None)
    )


def current_session(environment: Mapping[str, str] | None = None) -> Identity | None:
    """Return the session that started this process, as its store knows it, or None.

    The environment names the store (`HOLDFAST_URL`) and the session. One that names a root which
    is not the session's raises Forbidden; a session that the store does not have, SessionNotFound.
    """
    found = os.environ if environment is None else environment
    if not isinstance(found, Mapping):
        raise InvalidArgument(f"environment must be a dict, not {type(found).__name__}")
    id, url = found.get("AGENT_SESSION_ID"), found.get("HOLDFAST_URL")
    if not id or not url:
        return None
    with health.read_only_driver(parse(url, None), _looking()) as driver:
        asked = (id, found.get("AGENT_ROOT_SESSION_ID"), url)
        return driver.run(Call(IdentityOps.find, IdentityOps(), asked))


def check(
    url: str | None = None,
    *,
    namespace: str | None = None,
    full: bool = False,
    progress: health.Tell | None = None,
) -> list[Finding]:
    """Examine a store and what it stands on, without changing it; `full` reads every index.

    `progress` is told the name of each check as it begins, its place and how many there are.
    """
    return health.check(parse(url, namespace), _looking(), full=full, tell=progress)


def _looking() -> Settings:
    return _settings("read", "full", None, BUSY_SECONDS, None)


def _settings(
    mode: StoreMode,
    durability: Durability,
    clock: Clock | None,
    busy_timeout_seconds: float,
    hooks: Hooks | None,
) -> Settings:
    """Check what a store is opened with, before anything is touched."""
    require_one_of("mode", mode, get_args(StoreMode))
    require_one_of("durability", durability, get_args(Durability))
    name, most = "busy_timeout_seconds", BUSY_SECONDS_MAX
    require_seconds(name, busy_timeout_seconds, most, may_be_least=False)
    clock = SystemClock() if clock is None else clock
    if not callable(getattr(clock, "now_ms", None)):
        raise InvalidArgument(f"clock must have now_ms(), {type(clock).__name__} has not")
    if hooks is not None and not isinstance(hooks, Hooks):
        raise InvalidArgument(f"hooks must be Hooks, not {type(hooks).__name__}")
    return Settings(
        nouns=NOUNS,
        services=Services(lock_statement, event_statements, events_if_done, IdSource(clock)),
        clock=clock,
        is_clock_virtual=not isinstance(clock, SystemClock),
        durability=durability,
        mode=mode,
        busy_timeout_seconds=busy_timeout_seconds,
        hooks=hooks or Hooks(),
    )


def _codec(limits: Limits | None, cipher: Cipher | None, compression: Compression) -> Codec:
    """Check how values are stored, before anything is touched."""
    limits = Limits() if limits is None else limits
    if not isinstance(limits, Limits):
        raise InvalidArgument(f"limits must be holdfast.Limits, not {type(limits).__name__}")
    for method in ("encrypt", "decrypt"):
        if cipher is not None and not callable(getattr(cipher, method, None)):
            raise InvalidArgument(f"cipher must have {method}(), {type(cipher).__name__} has not")
    return Codec(limits, compression=compression, cipher=cipher)


def _keys(
    cipher: Cipher | None, redaction: Redaction | None
) -> tuple[Cipher | None, Redaction | None]:
    """Return what was given, or what the environment names instead."""
    known, key = keys_of_environment()
    return cipher or known, Redactor(key=key) if redaction is None and key else redaction


def _require_keys(run: Callable[[Call[Any]], Any], ledger: Ledger, cipher: Cipher | None) -> None:
    """Refuse a store whose keys this process does not have; note a new one."""
    fingerprints: Callable[[], list[str]] = getattr(cipher, "fingerprints", list)
    keys = CipherKeys(fingerprints(), NOUNS)
    is_noted = run(Call(CipherKeys.are_noted, keys))
    if not is_noted and ledger.runtime.settings.mode == "write":
        run(Call(CipherKeys.note, keys))
    run(Call(Ledger.require_key, ledger))


def _redaction(redaction: Redaction | None) -> Redaction:
    """Check what takes secrets out, before anything is touched."""
    if redaction is None:
        return Redactor()
    if not callable(getattr(redaction, "redact", None)):
        raise InvalidArgument(
            f"redaction must have redact(), {type(redaction).__name__} has not; "
            "holdfast.NoRedaction() stores secrets as they are"
        )
    require_key(getattr(redaction, "key", None))
    return redaction


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))
