"""The store: an open database, sync or async, from which every noun is reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_args

from .access import AccessNoun, Audit, Token, Tokens
from .arguments import require_one_of, require_seconds, require_text, require_whole
from .checkpoints import CheckpointsNoun
from .ciphers import keys_of_environment
from .clock import Clock, IdSource, SystemClock
from .codec import Cipher, Codec, Compression, Limits
from .effects import EffectsNoun, Ledger, StoreEffects
from .errors import InvalidArgument, LimitExceeded
from .explorations import ExplorationsNoun
from .feed import FeedNoun, read_events, services
from .feed.follow import POLL_SECONDS, POLL_SECONDS_MAX, follow_tree
from .feed.follow_all import follow_all
from .feed.latest import StoreEvents
from .items import Work
from .kernel import health
from .kernel.commit_settlement import MarkOps, parse_commit_id
from .kernel.composition import Composition
from .kernel.driver import Durability, Hooks, Settings, StoreMode
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
    start_async,
    stream,
)
from .kernel.opening import Opening, join, open_async_driver, open_driver
from .kernel.operation import (
    Async,
    C,
    Call,
    Command,
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
from .peers import PeersNoun, StorePeers
from .portable import PortableOps
from .records import Event, Finding, FollowedEvent, StoreInfo
from .redaction import Redaction, Redactor, checked_redaction
from .replies import RepliesNoun
from .session import Session
from .sessions import SessionsNoun
from .spend import SpendNoun, StoreSpend
from .state import State, StateNoun, StoreConflicts
from .store_sessions import StoreSessions
from .wire import travels
from .work import WorkNoun

P = ParamSpec("P")
R = TypeVar("R")

# Everything that a store keeps, in order of dependency. A new noun is a package and a line here.
NOUNS = (
    FeedNoun(),
    SessionsNoun(),
    RepliesNoun(),
    AccessNoun(),
    CheckpointsNoun(),
    EffectsNoun(),
    SpendNoun(),
    StateNoun(),
    WorkNoun(),
    PeersNoun(),
    ExplorationsNoun(),
)

COMPOSED_SECONDS_MAX = 1.0
BUSY_SECONDS = 10.0
BUSY_SECONDS_MAX = 3600.0


@travels
class StoreHandle(
    StoreSessions[C],
    StoreEffects[C],
    StoreSpend[C],
    StorePeers[C],
    StoreConflicts[C],
    StoreEvents[C],
    MaintenanceOps[C],
    RecoveryOps[C],
    PortableOps[C],
):
    """The operations of a store: sync, async, or within a transaction."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.runtime.target.shown}>"

    @property
    def url(self) -> str:
        """The URL that opens this store again, password included; a temporary store has none."""
        return self.runtime.target.url

    @property
    def work(self) -> Work[C]:
        """Work items."""
        return Work(self.runtime)

    @property
    def tokens(self) -> Tokens[C]:
        """The tokens with which a server of this store is used."""
        return Tokens(self.runtime)

    @property
    def audit(self) -> Audit[C]:
        """What people and administrators decided."""
        return Audit(self.runtime)

    @query
    def store_id(self) -> Op[str]:
        """Return the store's id, set when it was created."""
        return (yield from read_store_id())

    @query
    def now_ms(self) -> Op[int]:
        """Return the store's time in UTC milliseconds, by which leases and deadlines are judged."""
        return (yield from read_now_ms())

    @query
    def events(self, root_id: str, *, after: int = 0, limit: int = 100) -> Op[list[Event]]:
        """Return a session tree's events after a position, oldest first, without gaps."""
        return (yield from read_events(self.runtime.codec, root_id, after, limit))

    @stream
    def follow(
        self, root: object, *, after: int = 0, poll_seconds: float = POLL_SECONDS
    ) -> Stream[Event]:
        """Yield a session tree's events after a position as they are committed, once, in order.

        It never ends by itself. `poll_seconds` bounds the delay where change signals are not
        available. A slow reader does not slow down writers.
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
        """Yield the events of all trees as they are committed, once, in order within each tree.

        `after` is the `cursor` of the last event seen. With `wait=False` it ends after the last
        committed event. Events removed by retention are skipped.
        """
        require_seconds("poll_seconds", poll_seconds, POLL_SECONDS_MAX, may_be_least=False)
        yield from follow_all(self.runtime, after, poll_seconds, wait=wait)

    @operation
    def settle(self, id: str) -> Op[bool]:
        """Return whether the commit named by CommitUnknown was made; the answer is final."""
        return (yield from MarkOps.is_committed(MarkOps(), *parse_commit_id(id)))

    @flow
    def backup(
        self, path: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> Flow[None]:
        """Copy a snapshot of the live database into a new SQLite file.

        It is held while it is read: dead rows stay on PostgreSQL, and the log grows on SQLite.
        """
        yield from invoke(back_up, self.runtime.driver, path, progress)


class Transaction(StoreHandle[Tx]):
    """The store inside `store.run`: every operation is a generator to `yield from`."""

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

    def state(self, session: Session[Any]) -> State[Tx]:
        """Return the shared state of a session's tree for this transaction."""
        return self.within(session).state


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
        """Run `function(tx, …)` to its end in one snapshot."""
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
    """Pass on commands; raise LimitExceeded if the function itself takes too long."""
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
    if runtime.is_remote:
        raise InvalidArgument("store.run needs the database itself, not a server before it")
    if not callable(function):
        raise InvalidArgument(
            "store.run takes a generator function: def f(tx): yield from tx.…; "
            f"{type(function).__name__} is not one"
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

    def on_behalf_of(self, token: Token) -> Store:
        """Return this store in the name of a token, for the audit trail and what it may make."""
        return Store(_acting(self.runtime, token))

    def within(self, connection: object) -> Store:
        """Return a store whose operations join the caller's own PostgreSQL transaction."""
        return Store(_joined(self.runtime, connection))

    def close(self) -> None:
        """Finish running calls and close; a second call does nothing."""
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

    def on_behalf_of(self, token: Token) -> AsyncStore:
        """Return this store in the name of a token, for the audit trail and what it may make."""
        return AsyncStore(_acting(self.runtime, token))

    def within(self, connection: object) -> AsyncStore:
        """Return a store whose operations join the caller's own PostgreSQL transaction."""
        return AsyncStore(_joined(self.runtime, connection))

    async def close(self) -> None:
        """Finish running calls and close; a second call does nothing."""
        try:
            await finish(asyncio.to_thread(Keeper.of(self.runtime).close))
        finally:
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
        start=partial(start_async, driver) if is_async else driver.run,
        run_flow=partial(run_flow_async if is_async else run_flow, driver),
        run_stream=partial(run_stream_async if is_async else run_stream, driver),
        is_async=is_async,
        states={} if keeper is None else {Keeper: keeper},
    )
    # Made here, so that it belongs to the store and not to the first transaction that needs it.
    Ledger.of(runtime)
    return runtime


def sync_twin(store: AsyncStore) -> Store:
    """Return a sync store over the same connections, for background threads."""
    runtime = store.runtime
    parts = (runtime.target, runtime.settings, runtime.codec, runtime.redactor)
    twin = _runtime(runtime.driver.twin(), *parts, is_async=False, keeper=Keeper.of(runtime))
    return Store(replace(twin, actor=runtime.actor, transport=runtime.transport))


def _acting(runtime: Runtime, token: object) -> Runtime:
    if not isinstance(token, Token):
        raise InvalidArgument(f"token must be a token, not {type(token).__name__}")
    return replace(runtime, actor=token.actor)


def _joined(runtime: Runtime, connection: object) -> Runtime:
    given = (runtime.target, runtime.settings)
    driver = join(*given, connection, is_async=runtime.is_async)
    joined = _runtime(driver, *given, runtime.codec, runtime.redactor, is_async=runtime.is_async)
    return replace(joined, actor=runtime.actor, transport=runtime.transport)


def open(
    url: str | None = None,
    *,
    token: str | None = None,
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

    The URL is `sqlite:///file.db`, `sqlite://` for a temporary file, `postgresql://…`, or that of a
    server, `https://…`, whose `token` defaults to `$HOLDFAST_TOKEN`. The default URL is
    `$HOLDFAST_URL` or `sqlite:///holdfast.db`. `durability="normal"` survives a crash of the
    process, but not a power loss. `compression="zstd"` needs `holdfast-agents[compress]`; records
    are readable with either setting. `redaction` removes secrets from the arguments and results of
    tools before they are stored; common patterns are known by default. With `migrate=False`,
    opening an older or missing store raises. So does a store whose keys are not given by `cipher`
    and `redaction`, or in the file named by `$HOLDFAST_KEYS_FILE`.

    With `mode="read"` nothing is created, migrated, locked or written, and reads do not wait for
    writers; a call that writes raises StoreReadOnly.
    """
    target = parse(url, namespace, token)
    settings = _settings(mode, durability, clock, busy_timeout_seconds, hooks)
    cipher, redaction = _keys(cipher, redaction)
    codec, redaction = _codec(limits, cipher, compression), checked_redaction(redaction)
    driver = open_driver(target, settings, migrate=migrate)
    store = Store(_runtime(driver, target, settings, codec, redaction, is_async=False))
    try:
        _require_keys(driver.run, store, cipher)
    except BaseException:
        store.close()
        raise
    return store


def aopen(
    url: str | None = None,
    *,
    token: str | None = None,
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
    """Open a store in this event loop, with `await` or `async with`; the arguments of `open`."""

    async def opening() -> AsyncStore:
        target = parse(url, namespace, token)
        settings = _settings(mode, durability, clock, busy_timeout_seconds, hooks)
        used, redactor = _keys(cipher, redaction)
        codec, chosen = _codec(limits, used, compression), checked_redaction(redactor)
        driver = await open_async_driver(target, settings, migrate=migrate)
        store = AsyncStore(_runtime(driver, target, settings, codec, chosen, is_async=True))
        try:
            await asyncio.to_thread(_require_keys, driver.twin().run, store, used)
        except BaseException:
            await store.close()
            raise
        return store

    return Opening(opening(), "holdfast.aopen(…)")


def inspect(url: str | None = None, *, namespace: str | None = None) -> StoreInfo:
    """Describe a store without creating or migrating it. Raises NotFound if there is none."""
    return health.inspect(parse(url, namespace), read_settings())


def check(
    url: str | None = None,
    *,
    namespace: str | None = None,
    full: bool = False,
    progress: health.Tell | None = None,
) -> list[Finding]:
    """Check a store and its environment without changing it; `full` reads every index.

    `progress` is called with the name of each check as it starts, its position, and their number.
    """
    return health.check(parse(url, namespace), read_settings(), full=full, tell=progress)


def extent(url: str | None = None, *, namespace: str | None = None) -> health.Extent:
    """Return how much `check` would read and about how long that takes, without reading it."""
    return health.extent(parse(url, namespace), read_settings())


def read_settings() -> Settings:
    """Return what a store is opened with to be examined."""
    return _settings("read", "full", None, BUSY_SECONDS, None)


def _settings(
    mode: StoreMode,
    durability: Durability,
    clock: Clock | None,
    busy_timeout_seconds: float,
    hooks: Hooks | None,
) -> Settings:
    """Return checked settings, before anything is opened."""
    require_one_of("mode", mode, get_args(StoreMode))
    require_one_of("durability", durability, get_args(Durability))
    name, most = "busy_timeout_seconds", BUSY_SECONDS_MAX
    require_seconds(name, busy_timeout_seconds, most, may_be_least=False)
    clock = SystemClock() if clock is None else clock
    if not callable(getattr(clock, "now_ms", None)):
        raise InvalidArgument(f"clock must have now_ms(), which {type(clock).__name__} lacks")
    if hooks is not None and not isinstance(hooks, Hooks):
        raise InvalidArgument(f"hooks must be Hooks, not {type(hooks).__name__}")
    return Settings(
        nouns=NOUNS,
        services=services(IdSource(clock)),
        clock=clock,
        is_clock_virtual=not isinstance(clock, SystemClock),
        durability=durability,
        mode=mode,
        busy_timeout_seconds=busy_timeout_seconds,
        hooks=hooks or Hooks(),
    )


def _codec(limits: Limits | None, cipher: Cipher | None, compression: Compression) -> Codec:
    """Return the codec for checked options, before anything is opened."""
    limits = Limits() if limits is None else limits
    if not isinstance(limits, Limits):
        raise InvalidArgument(f"limits must be holdfast.Limits, not {type(limits).__name__}")
    for method in ("encrypt", "decrypt"):
        if cipher is not None and not callable(getattr(cipher, method, None)):
            kind = type(cipher).__name__
            raise InvalidArgument(f"cipher must have {method}(), which {kind} lacks")
    return Codec(limits, compression=compression, cipher=cipher)


def _keys(
    cipher: Cipher | None, redaction: Redaction | None
) -> tuple[Cipher | None, Redaction | None]:
    """Return the given keys, or else those that the environment names."""
    known, key = keys_of_environment()
    return cipher or known, Redactor(key=key) if redaction is None and key else redaction


def _require_keys(
    run: Callable[[Call[Any]], Any], store: StoreHandle[Any], cipher: Cipher | None
) -> None:
    """Raise if this process lacks the store's keys; record new ones."""
    ledger = store.ledger
    if store.runtime.is_remote:
        # The keys are at the server. A wrong address or token is reported here.
        run(Call(StoreHandle.store_id, store))
        return
    fingerprints: Callable[[], list[str]] = getattr(cipher, "fingerprints", list)
    keys = CipherKeys(fingerprints(), NOUNS)
    is_noted = run(Call(CipherKeys.are_noted, keys))
    if not is_noted and ledger.runtime.settings.mode == "write":
        run(Call(CipherKeys.note, keys))
    run(Call(Ledger.require_key, ledger))


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))
