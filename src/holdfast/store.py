"""The store: an open database, in both colours, with every noun reachable from it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_args

from .arguments import require_one_of, require_seconds
from .checkpoints import Heads
from .ciphers import keys_of_environment
from .clock import Clock, SystemClock
from .codec import Cipher, Codec, Compression, Limits
from .effects import AsyncIssued, Issued, Ledger, StoreEffects, Ticket
from .errors import InvalidArgument, LimitExceeded
from .feed import event_statements, events_if_done, lock_statement, read_events
from .kernel import health
from .kernel.attempt import Hooks, Services
from .kernel.awaiting import Opening
from .kernel.backup import back_up
from .kernel.fingerprints import CipherKeys
from .kernel.flow import finish
from .kernel.marks import MarkOps, parse_commit_id
from .kernel.opening import join, open_async_driver, open_driver
from .kernel.operation import (
    AsyncBound,
    Call,
    Command,
    Composition,
    Op,
    SyncBound,
    TxBound,
    operation,
    query,
)
from .kernel.schema import read_now_ms, read_store_id
from .kernel.settings import Durability, Settings
from .kernel.url import Target, parse
from .leases import Kept, default_holder
from .maintenance import MaintenanceOps, RecoveryOps
from .portable import PortableOps
from .records import Event, Finding, IdSource, StoreInfo
from .redaction import Redaction, Redactor, require_key
from .sessions import AsyncSession, FindOps, Identity, IdentityOps, Session, SessionsOps, TxSession
from .spend import StoreSpend
from .work import AsyncWork, AttachedItems, TxWork, Work

P = ParamSpec("P")
R = TypeVar("R")

COMPOSED_SECONDS_MAX = 1.0
BUSY_SECONDS = 10.0
BUSY_SECONDS_MAX = 3600.0


class StoreOps:
    """What a store does, in every colour."""

    codec: Codec
    _target: Target

    @property
    def url(self) -> str:
        """The URL that opens this store again, with its password; a temporary store has none."""
        return self._target.url

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
        return (yield from read_events(self.codec, root_id, after, limit))


class Transaction(
    StoreOps, SessionsOps[TxSession], FindOps[TxSession], StoreEffects[Any], StoreSpend, TxBound
):
    """A store inside `store.run`: every operation is a generator to `yield from`."""

    def __init__(self, store: _Handle) -> None:
        self.codec = store.codec
        self.heads = store.heads
        self._target = store._target
        self.signals = store.signals
        self.ledger = store.ledger
        self.attached = store.attached
        self.composition = Composition()

    @property
    def work(self) -> TxWork[TxSession]:
        """Work items, inside this transaction."""
        return TxWork(self)

    def within(self, session: Session | AsyncSession) -> TxSession:
        """Return a session's handle for this transaction, with the session's fence."""
        inside = TxSession(self, session.id, session.number, session.root_id, session.name)
        inside.fence = session.fence
        inside.guard = session.guard
        return inside

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> TxSession:
        return TxSession(self, id, number, root_id, name)


class _Compose:
    """Runs a function of operations as one operation."""

    def __init__(self, store: _Handle) -> None:
        self._store = store

    @operation
    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Op[Any]:
        """Run `function(tx, …)` to its end in one transaction."""
        transaction = Transaction(self._store)
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


class _Handle:
    """What both colours of a store keep."""

    def __init__(
        self,
        driver: Any,
        target: Target,
        settings: Settings,
        codec: Codec,
        redaction: Redaction,
        *,
        is_joined: bool = False,
    ) -> None:
        self.driver = driver
        self.codec = codec
        self.heads = Heads()
        items = AttachedItems(codec, self.heads, driver.signals)
        self.ledger = Ledger(
            codec=codec,
            redactor=redaction,
            signals=driver.signals,
            holder=default_holder(),
            run=lambda call: driver.twin().run(call),
            settled=items.settled,
            is_joined=is_joined,
            is_async=isinstance(self, AsyncBound),
        )
        self._target = target
        self.signals = driver.signals
        self.attached = (items,)
        self._settings = settings

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._target.shown}>"

    def _compose(self, function: Any, args: Any, kwargs: Any) -> Call[Any]:
        if not callable(function):
            raise InvalidArgument(
                "store.run takes a generator function: def f(tx): yield from tx.…; "
                f"{type(function).__name__} is none"
            )
        return Call(_Compose.run, _Compose(self), (function, args, kwargs))

    def _joined(self, driver: Any) -> tuple[Any, Target, Settings, Codec, Redaction]:
        return driver, self._target, self._settings, self.codec, self.ledger.redactor

    def _settle(self, id: str) -> Call[bool]:
        return Call(MarkOps.is_committed, MarkOps(), parse_commit_id(id))


class Store(
    StoreOps,
    SessionsOps[Session],
    FindOps[Session],
    StoreEffects[Issued],
    StoreSpend,
    SyncBound,
    MaintenanceOps,
    RecoveryOps,
    PortableOps,
    _Handle,
):
    """An open database. Thread-safe; every method returns once its change is durable."""

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> Session:
        return Session(self, id, number, root_id, name)

    def _issued(self, ticket: Ticket, kept: Kept | None) -> Issued:
        return Issued(self.ledger, ticket, kept, self.driver)

    @property
    def work(self) -> Work[Session]:
        """Work items."""
        return Work(self)

    def run(
        self,
        function: Callable[Concatenate[Transaction, P], Op[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run several operations in one commit. The function may run more than once."""
        result: R = self.driver.run(self._compose(function, args, kwargs))
        return result

    def within(self, connection: object) -> Store:
        """Return a store whose operations join the caller's own PostgreSQL transaction."""
        driver = join(self._target, self._settings, connection, is_async=False)
        return Store(*self._joined(driver), is_joined=True)

    def settle(self, id: str) -> bool:
        """Tell whether the commit that CommitUnknown named was made; the answer is final."""
        return self.driver.run(self._settle(id))

    def backup(self, path: str | Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Copy the live database into a new SQLite file, one consistent moment of it."""
        back_up(self.driver, self._target, self._settings, path, progress)

    def close(self) -> None:
        """Finish what is under way and close; a second time does nothing."""
        self.driver.entrance.require_outside()
        self.ledger.keeper.close()
        self.driver.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStore(
    StoreOps,
    SessionsOps[AsyncSession],
    FindOps[AsyncSession],
    StoreEffects[AsyncIssued],
    StoreSpend,
    AsyncBound,
    MaintenanceOps,
    RecoveryOps,
    PortableOps,
    _Handle,
):
    """An open database in one event loop; every awaited call is durable when it returns."""

    def _session(self, id: str, number: int, root_id: str, name: str | None) -> AsyncSession:
        return AsyncSession(self, id, number, root_id, name)

    def _issued(self, ticket: Ticket, kept: Kept | None) -> AsyncIssued:
        return AsyncIssued(self.ledger, ticket, kept, self.driver)

    @property
    def work(self) -> AsyncWork[AsyncSession]:
        """Work items."""
        return AsyncWork(self)

    async def run(
        self,
        function: Callable[Concatenate[Transaction, P], Op[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run several operations in one commit. The function may run more than once."""
        result: R = await self.driver.run(self._compose(function, args, kwargs))
        return result

    def within(self, connection: object) -> AsyncStore:
        """Return a store whose operations join the caller's own PostgreSQL transaction."""
        driver = join(self._target, self._settings, connection, is_async=True)
        return AsyncStore(*self._joined(driver), is_joined=True)

    async def settle(self, id: str) -> bool:
        """Tell whether the commit that CommitUnknown named was made; the answer is final."""
        return await self.driver.run(self._settle(id))

    async def backup(
        self, path: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Copy the live database into a new SQLite file, one consistent moment of it."""
        arguments = (self.driver, self._target, self._settings, path, progress)
        await asyncio.to_thread(back_up, *arguments)

    async def close(self) -> None:
        """Finish what is under way and close; a second time does nothing."""
        await finish(asyncio.to_thread(self.ledger.keeper.close))
        await self.driver.close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def open(
    url: str | None = None,
    *,
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
    """
    target = parse(url, namespace)
    settings = _settings(durability, clock, busy_timeout_seconds, hooks)
    cipher, redaction = _keys(cipher, redaction)
    codec, redaction = _codec(limits, cipher, compression), _redaction(redaction)
    driver = open_driver(target, settings, migrate=migrate)
    store = Store(driver, target, settings, codec, redaction)
    try:
        _require_keys(driver.run, store.ledger, cipher)
    except BaseException:
        store.close()
        raise
    return store


def aopen(
    url: str | None = None,
    *,
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
        settings = _settings(durability, clock, busy_timeout_seconds, hooks)
        used, hider = _keys(cipher, redaction)
        codec, chosen = _codec(limits, used, compression), _redaction(hider)
        driver = await open_async_driver(target, settings, migrate=migrate)
        store = AsyncStore(driver, target, settings, codec, chosen)
        try:
            await asyncio.to_thread(_require_keys, driver.twin().run, store.ledger, used)
        except BaseException:
            await store.close()
            raise
        return store

    return Opening(opening())


def inspect(url: str | None = None, *, namespace: str | None = None) -> StoreInfo:
    """Tell what a store is, without creating or migrating it. Raises NotFound if there is none."""
    return health.inspect(parse(url, namespace), _settings("full", None, BUSY_SECONDS, None))


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
    settings = _settings("full", None, BUSY_SECONDS, None)
    with health.looking(parse(url, None), settings) as driver:
        asked = (id, found.get("AGENT_ROOT_SESSION_ID"), url)
        return driver.run(Call(IdentityOps.find, IdentityOps(), asked))


def check(
    url: str | None = None, *, namespace: str | None = None, full: bool = False
) -> list[Finding]:
    """Examine a store and what it stands on, without changing it; `full` reads every index."""
    settings = _settings("full", None, BUSY_SECONDS, None)
    return health.check(parse(url, namespace), settings, full=full)


def _settings(
    durability: Durability, clock: Clock | None, busy_timeout_seconds: float, hooks: Hooks | None
) -> Settings:
    """Check what a store is opened with, before anything is touched."""
    require_one_of("durability", durability, get_args(Durability))
    name, most = "busy_timeout_seconds", BUSY_SECONDS_MAX
    require_seconds(name, busy_timeout_seconds, most, may_be_least=False)
    clock = SystemClock() if clock is None else clock
    if not callable(getattr(clock, "now_ms", None)):
        raise InvalidArgument(f"clock must have now_ms(), {type(clock).__name__} has not")
    if hooks is not None and not isinstance(hooks, Hooks):
        raise InvalidArgument(f"hooks must be Hooks, not {type(hooks).__name__}")
    return Settings(
        services=Services(lock_statement, event_statements, events_if_done, IdSource(clock)),
        clock=clock,
        is_clock_virtual=not isinstance(clock, SystemClock),
        durability=durability,
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
    keys = CipherKeys(fingerprints())
    if not run(Call(CipherKeys.are_noted, keys)):
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
