"""Remote calls of clients: one of a fixed set of operations, run by its name and arguments.

The sessions, items and effects that a client names are looked up by their ids in the transaction
of the call; the numbers and roots that it sends are never trusted. A token that is limited to a
tree reaches only what this lookup finds in that tree.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Final

from ..access import Permission, Token, Tokens
from ..agent.commits import CommitOps
from ..arguments import require_text, shown
from ..effects import Issued
from ..effects.ledger import Ledger
from ..effects.noun import _Recovery
from ..effects.requests import EffectRequest
from ..effects.statements import EFFECT_BY_ID, Ticket
from ..errors import (
    Forbidden,
    HoldfastError,
    InvalidArgument,
    SessionNotFound,
    StoreReadOnly,
)
from ..feed.follow import TreeReader
from ..feed.follow_all import AllTreesReader
from ..items import Work, WorkItem
from ..kernel.commit_settlement import MarkOps
from ..kernel.flow import served
from ..kernel.operation import (
    Call,
    Handle,
    Op,
    Row,
    Runtime,
    large_query,
    one,
    operation,
    query,
)
from ..leases import Guard, Keeper
from ..maintenance.recovery import _Instance
from ..peers.asks import READ_ASK, unknown_call
from ..portable import PortableOps
from ..records import SessionRef
from ..replies import lane_reply, settle_lane
from ..session import Session
from ..sessions import Identity, IdentityOps
from ..sessions.access import Place
from ..sessions.handle import SessionHandle
from ..sessions.rows import READ_SESSION
from ..state import State
from ..state.conflicts import ConflictLog
from ..state.prompt import ResumePrompt
from ..store import AsyncStore, StoreHandle
from ..wire import Wire
from ..work.claims import find_ready, not_ended
from ..work.items import COLUMNS, READ_ITEM, Item, Submission, readable
from ..work.transitions import Transition, turn
from .access import APPROVAL, RANKS, require_decider

HOLDERS: Final = (
    StoreHandle, Session, State, Work, WorkItem, Ledger, Keeper, CommitOps, ConflictLog,
    ResumePrompt, TreeReader, AllTreesReader, MarkOps, IdentityOps, _Recovery, _Instance, Tokens,
)  # fmt: skip
FUNCTIONS: Final = (turn, find_ready, not_ended)
NOT_SERVED: Final = frozenset({"Tokens.find"})
# What a token limited to a tree may call besides methods of that tree's sessions and items.
IN_A_TREE: Final = frozenset(
    {
        "StoreHandle.store_id", "StoreHandle.now_ms", "StoreHandle.events", "StoreHandle.settle",
        "StoreSessions.session", "StoreSessions.find_session", "IdentityOps.find",
        "TreeReader.begin", "TreeReader.read", "Work.submit", "Work.submit_many", "Keeper.renew",
        "Ledger.take", "Ledger.take_all", "Ledger.find_completed", "Ledger.finish",
        "Ledger.finish_all", "Ledger.run_again", "Ledger.withdraw", "Ledger.keep_late",
        "Ledger.standing", "Ledger.may_begin", "MarkOps.is_committed", "Tokens.create",
    }
)  # fmt: skip
# What it may call with `session=` a session of that tree.
OF_A_SESSION: Final = frozenset({"StoreEffects.effects"})
# What lists everything by default; for a token limited to a tree, only that tree.
LISTINGS: Final = frozenset(
    {
        "StoreEffects.effects",
        "StorePeers.asks",
        "StorePeers.pauses",
        "StoreSessions.sessions",
        "StoreSpend.spending",
        "Work.list",
    }
)
# What it may call for a peer call of that tree.
OF_AN_ASK: Final = frozenset(
    {
        "StorePeers.answer",
        "StorePeers.cancel_ask",
        "StorePeers.peer_call",
        "StorePeers.progress",
        "StorePeers._followed",
    }
)
# What needs a higher permission than write.
NEEDED: Final[Mapping[str, Permission]] = {
    "MaintenanceOps.prune": "admin",
    "Session.delete": "admin",
    "StorePeers.approve": "approve",
    "StorePeers.reject": "approve",
    "Tokens.list": "admin",
    "Tokens.revoke": "admin",
}
IDS_MAX = 10_000
# Each part takes a few microseconds to decode; 10,000 submissions in one call need half of this.
PARTS_MAX = 200_000
# Larger bodies are decoded in a thread, so that the event loop keeps serving other requests.
LARGE_BYTES = 64 * 1024
MALFORMED = (TypeError, AttributeError, LookupError, ValueError, AssertionError)
log = logging.getLogger("holdfast.server")
LANE_PREFIX: Final = "lane-"
WHOLE_STORE: Final = "needs a token for the whole store"
_DATA: Final = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class Sent:
    """A call as a client sent it."""

    name: str
    body: bytes
    lane: str | None = None
    number: int = 0


def _require(token: Token, permission: Permission) -> None:
    if RANKS[token.permission] < RANKS[permission]:
        raise Forbidden(f"this token is for {token.permission}; nothing was done")


def _require_root(token: Token, root_id: str) -> None:
    if token.root_id not in {None, root_id}:
        raise Forbidden("this token is for another session tree; nothing was done")


def _unknown() -> SessionNotFound:
    """Return the error for a session that does not exist or is outside the token's tree."""
    return SessionNotFound("there is no such session in the tree of this token")


def operations() -> dict[str, Any]:
    """Return everything that a client can call, by name."""
    found = {each.__qualname__: each for each in _defined()}
    return {name: each for name, each in found.items() if name not in NOT_SERVED}


def _defined() -> Iterator[Any]:
    kept_here = set(vars(PortableOps))
    for holder in HOLDERS:
        for name, member in inspect.getmembers_static(holder):
            if isinstance(member, operation | served) and name not in kept_here:
                yield member
    yield from FUNCTIONS


class Calls:
    """Runs clients' calls on one store."""

    def __init__(self, store: AsyncStore, *, is_read_only: bool = False) -> None:
        self._store = store
        self._is_read_only = is_read_only
        self._operations = operations()

    async def answer(self, token: Token, sent: Sent) -> tuple[int, bytes]:
        """Run a call and return the HTTP status and the body of the response."""
        runtime = self._store.on_behalf_of(token).runtime
        wire = Wire(runtime, extensions_max=PARTS_MAX)
        try:
            return 200, await self._run(token, sent, runtime, wire)
        except HoldfastError as error:
            return error.http_status, wire.encode(error)
        except MALFORMED:
            # Operations rely on what our own client sends; other clients may send anything.
            log.warning("a call of %s failed", sent.name, exc_info=True)
            wrong = InvalidArgument(f"this call of {sent.name} is malformed")
            return wrong.http_status, wire.encode(wrong)

    async def _run(self, token: Token, sent: Sent, runtime: Runtime, wire: Wire) -> bytes:
        definition = self._operations.get(sent.name)
        if definition is None:
            raise InvalidArgument(f"this server has no operation {shown(sent.name)}")
        writes = definition.mode == "write" or isinstance(definition, served)
        if writes and self._is_read_only:
            raise StoreReadOnly("this server was started with --read-only; nothing was written")
        _require(token, NEEDED.get(sent.name, "write" if writes else "read"))
        decode = partial(_given, wire, sent)
        is_large = len(sent.body) > LARGE_BYTES
        instance, arguments, keywords, ids = (
            await asyncio.to_thread(decode) if is_large else decode()
        )
        asked = Asked(token, definition, instance, arguments, keywords)
        asked.require_reachable()
        run, served_call = runtime.driver.run, ServedCall(runtime, asked)
        if isinstance(definition, served):
            await run(Call(ServedCall.look, served_call))
            flow = definition.function(instance, *arguments, **keywords)
            return wire.encode([await runtime.run_flow(flow), None])
        if definition.mode == "write":
            if sent.lane is None:
                raise InvalidArgument("a call that writes must name its lane and its number")
            scope = asked.lane_scope(sent.lane)
            digest = hashlib.sha256(sent.name.encode() + b"\0" + sent.body).hexdigest()
            call = Call(ServedCall.write, served_call, (scope, sent.number, digest), ids=ids)
            answer: bytes = await run(call)
            return answer
        read = ServedCall.read if definition.mode == "read" else ServedCall.read_large
        found: bytes = await run(Call(read, served_call))
        return found


def _given(wire: Wire, sent: Sent) -> tuple[Any, list[Any], dict[str, Any], list[str]]:
    match wire.decode(sent.body):
        case [instance, list(arguments), dict(keywords), list(ids)] if all(
            type(each) is str and len(each) == 36 and each.isascii() for each in ids
        ):
            return instance, arguments, keywords, ids[:IDS_MAX]
    raise InvalidArgument("a call must be a list of an instance, arguments, keywords and ids")


@dataclass(frozen=True, slots=True)
class Asked:
    """A decoded call, and the token that it was sent with."""

    token: Token
    definition: Any
    """An operation, or a flow that is run on the server."""
    instance: Any
    arguments: list[Any]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the operation."""
        name: str = self.definition.__qualname__
        return name

    @property
    def is_limited(self) -> bool:
        """Whether the token is limited to a tree."""
        return self.token.root_id is not None

    def lane_scope(self, lane: str) -> str:
        """Return the scope in which the replies to a lane of this token are stored."""
        return f"{LANE_PREFIX}{self.token.id} {lane}"

    def require_reachable(self) -> None:
        """Refuse a handle of the wrong type, and anything outside the reach of a limited token."""
        holder = self.name.partition(".")[0]
        kinds = {each.__name__ for each in type(self.instance).__mro__}
        if self.definition in FUNCTIONS:
            is_free = self.instance is None or isinstance(self.instance, Runtime)
            kinds = {holder} if is_free else set()
        if "by" in self.keywords and holder == "Tokens":
            raise InvalidArgument(
                "`by` is not accepted: a token is created by the caller's own token"
            )
        if holder not in kinds:
            kind = type(self.instance).__name__
            raise InvalidArgument(f"{self.name} is not an operation of {kind}")
        if APPROVAL in (*self.arguments, *self.keywords.values()):
            require_decider(self.token, APPROVAL, self.by_name().get("data"))
        if not self.is_limited:
            return
        given = self.by_name()
        is_bound = isinstance(
            self.instance, SessionHandle | State | Item | CommitOps | ConflictLog | ResumePrompt
        )
        is_of_a_session = self.name in OF_A_SESSION and self.session_id() is not None
        allowed = IN_A_TREE | OF_AN_ASK | LISTINGS
        if not is_bound and not is_of_a_session and self.name not in allowed:
            raise Forbidden(f"{self._refused()}; nothing was done")
        if self.name in LISTINGS and not is_of_a_session:
            root: Any = given.get("root")
            if root is not None:
                _require_root(self.token, getattr(root, "root_id", root))
            self.keywords["root"] = self.token.root_id
        if holder == "TreeReader" or self.name == "StoreHandle.events":
            _require_root(self.token, given["root_id"])
        for each in _named(given.values()):
            if isinstance(each, EffectRequest) and (
                each.place is None or each.policy in {"global", "once"}
            ):
                raise Forbidden(f"a store-wide key {WHOLE_STORE}; nothing was done")

    def _refused(self) -> str:
        _, _, method = self.name.rpartition(".")
        shown_name = f"store.{method}" if isinstance(self.instance, StoreHandle) else self.name
        return f"{shown_name} {WHOLE_STORE}"

    def session_id(self) -> str | None:
        """Return the id of the session that the arguments name, if it is a string."""
        named = self.by_name().get("session")
        id = getattr(named, "id", named)
        return id if isinstance(id, str) else None

    def by_name(self) -> dict[str, Any]:
        """Return the arguments by name, whether they were passed by position or by name."""
        signature = inspect.signature(self.definition.function)
        return signature.bind(self.instance, *self.arguments, **self.keywords).arguments


class ServedCall:
    """A client's call as an operation of the store."""

    def __init__(self, runtime: Runtime, asked: Asked) -> None:
        self.runtime = runtime
        self._asked = asked

    @operation
    def write(self, lane: str, number: int, digest: str) -> Op[bytes]:
        """Run the call once; a repetition returns the first response."""
        reply = yield from lane_reply(self.runtime.codec, lane, number, digest, self._as_text())
        answer: str = reply.outcome
        return answer.encode("latin-1")

    def _as_text(self) -> Op[str]:
        """Return the response as text, because a stored reply cannot hold bytes."""
        return (yield from self._answered()).decode("latin-1")

    @query
    def read(self) -> Op[bytes]:
        """Run the call in one snapshot."""
        return (yield from self._answered())

    @large_query
    def read_large(self) -> Op[bytes]:
        """Run the call in one snapshot, for operations that may read much."""
        return (yield from self._answered())

    @query
    def look(self) -> Op[None]:
        """Look up everything that a flow's arguments name, before it runs."""
        yield from self._known()

    def _result(self) -> Op[Any]:
        asked = self._asked
        if asked.name == "StoreHandle.settle":
            id = str(asked.by_name()["id"])
            if id.startswith(LANE_PREFIX):
                # A write by a client, whose outcome its lane has recorded.
                lane, _, number = id.removeprefix(LANE_PREFIX).rpartition(":")
                return (yield from settle_lane(asked.lane_scope(lane), int(number)))
        if asked.is_limited and asked.name in OF_A_SESSION and asked.session_id() is not None:
            row = yield from one(READ_SESSION, id=asked.session_id())
            if row is None or row["root_id"] != asked.token.root_id:
                return []
        given = (asked.instance, *asked.arguments)
        return (yield from asked.definition.function(*given, **asked.keywords))

    def _answered(self) -> Op[bytes]:
        asked = self._asked
        try:
            yield from self._known()
            result = yield from self._result()
        except SessionNotFound:
            if asked.is_limited:
                raise _unknown() from None
            raise
        self._require_own(result)
        row: Row | None = None
        if isinstance(asked.instance, Item) and asked.definition.mode == "write":
            row = yield from one(READ_ITEM, id=asked.instance.id)
        codec = self.runtime.codec
        if asked.definition is turn:
            ended, claimed = result
            result = ended, [readable(codec, each) for each in claimed]
        answer = [result, None if row is None else readable(codec, row)]
        return Wire(self.runtime).encode(answer)

    def _require_own(self, result: Any) -> None:
        """Refuse a result from outside the token's tree."""
        for each in result if isinstance(result, list) else [result]:
            if isinstance(each, SessionHandle | Item | Identity):
                _require_root(self._asked.token, each.root_id or "")

    def _known(self) -> Op[None]:
        """Look up everything that the call names."""
        asked = self._asked
        for each in _named([asked.instance, asked.arguments, asked.keywords]):
            yield from self._look_up(each)
        if asked.is_limited:
            yield from self._named_by_id(asked.by_name())

    def _named_by_id(self, given: dict[str, Any]) -> Op[None]:
        """Report anything outside the token's tree as not found."""
        name = self._asked.name
        if name in OF_AN_ASK:
            yield from self._ask(given["ask_id"])
        elif name == "StoreSessions.session":
            yield from self._started(given.get("id"), given.get("parent"))
        elif name in {"StoreSessions.find_session", "IdentityOps.find"}:
            yield from self._require_inside("id", given["id"])
        elif name in {"Work.submit", "Tokens.create"}:
            yield from self._require_inside("session", given.get("session"))
        elif name == "Ledger.withdraw":
            for id in list(given["ids"]):
                if not (yield from self._reaches_effect(id)):
                    given["ids"].remove(id)

    def _started(self, id: object, parent: object) -> Op[None]:
        """Refuse a session of another tree; a new session needs a parent in the token's tree."""
        row = None
        if isinstance(id, str):
            row = yield from one(READ_SESSION, id=require_text("id", id))
        if row is not None:
            _require_root(self._asked.token, row["root_id"])
        else:
            yield from self._require_inside("parent", parent)

    def _require_inside(self, name: str, id: object) -> Op[None]:
        """Refuse the id of a session outside the token's tree; handles were looked up already."""
        if isinstance(id, str):
            row = yield from one(READ_SESSION, id=require_text(name, id))
            if row is None or row["root_id"] != self._asked.token.root_id:
                raise _unknown()

    def _look_up(self, named: Any) -> Op[None]:
        match named:
            case SessionHandle():
                yield from self._session(named.id, named.number, named.root_id)
            case Place():
                yield from self._session(named.session_id, named.number, named.root_id)
            case SessionRef():
                yield from self._session(named.id, named.number, named.root_id)
            case Item():
                yield from self._item(named)
            case Guard():
                yield from self._guard(named)
            case Ticket():
                yield from self._ticket(named)
            case Transition(output=bytes(body)):
                self.runtime.codec.admit(body, name="output")
            case Submission() if self._asked.is_limited:
                yield from self._require_inside("session", named.session)

    def _session(self, id: str, number: int, root_id: str) -> Op[None]:
        row = yield from one(READ_SESSION, id=id)
        if self._asked.token.root_id not in {None, root_id}:
            raise _unknown()
        if row is None or (row["number"], row["root_id"]) != (number, root_id):
            raise SessionNotFound(f"there is no session {id!r}", id=id)

    def _ask(self, id: str) -> Op[None]:
        """Report a peer call outside the token's tree as not found."""
        row = yield from one(READ_ASK, id=id)
        if row is not None and row["root_id"] != self._asked.token.root_id:
            raise unknown_call(id)

    def _item(self, item: Item[Any]) -> Op[None]:
        row = yield from one(READ_ITEM, id=item.id)
        if row is None:
            # Deleted; the operation itself reports that to the holder.
            row = {**dict.fromkeys(COLUMNS), "id": item.id, "number": -1, "state": "cancelled"}
        item._take({**row, "fence": item.fence})
        _require_root(self._asked.token, row["root_id"] or "")

    def _guard(self, guard: Guard) -> Op[None]:
        texts = {"session": READ_SESSION, "work item": READ_ITEM, "effect": EFFECT_BY_ID}
        if guard.noun not in texts:
            raise InvalidArgument(f"there are no leases on {shown(guard.noun)}")
        row = yield from one(texts[guard.noun], id=guard.id)
        if row is None or row["number"] != guard.number:
            raise guard.lost()
        if guard.noun == "effect":
            is_reached = yield from self._reaches_effect(guard.id)
        else:
            is_reached = self._asked.token.root_id in {None, row["root_id"]}
        if not is_reached:
            raise guard.lost()

    def _reaches_effect(self, id: str) -> Op[bool]:
        """Whether the token reaches an effect; an effect of a deleted session is in no tree."""
        if not self._asked.is_limited:
            return True
        row = yield from one(EFFECT_BY_ID, id=id)
        session = None
        if row is not None:
            session = yield from one(READ_SESSION, id=row["session_id"])
        return session is not None and session["root_id"] == self._asked.token.root_id

    def _ticket(self, ticket: Ticket) -> Op[None]:
        row = yield from one(EFFECT_BY_ID, id=ticket.id)
        if row is None or row["number"] != ticket.number:
            raise ticket.lost()
        if not (yield from self._reaches_effect(ticket.id)):
            raise ticket.lost()
        if ticket.owner_number is not None:
            ticket.owner_number = row["session_number"]
        if ticket.guard is not None:
            yield from self._guard(ticket.guard)
        if (place := ticket.place) is not None:
            try:
                yield from self._session(place.session_id, place.number, place.root_id)
            except SessionNotFound:
                # Deleted, or of another tree. What the client says of its tree proves nothing.
                ticket.place = replace(place, root_id="")
                if row["session_number"] == place.number:
                    id = row["session_id"]
                    ticket.place = replace(place, session_id=id, root_id=row["root_above"] or id)


def _named(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the handles and records among values and inside records, but not inside plain data."""
    for value in values:
        kind = type(value)
        if kind in _DATA:
            continue
        if isinstance(value, list | tuple | set):
            yield from _named(value)
        elif kind is dict:
            yield from _named(value.values())
        elif isinstance(value, State | ConflictLog | ResumePrompt | CommitOps):
            yield value._session
        elif isinstance(value, SessionHandle):
            # A lost lease is reported before anything else.
            yield from _named([value.guard])
            yield value
        elif isinstance(value, Issued):
            yield value.ticket
        elif isinstance(value, Handle | Ticket):
            yield value
        elif is_dataclass(value):
            yield from _named(getattr(value, each.name) for each in fields(value) if each.init)
            yield value
