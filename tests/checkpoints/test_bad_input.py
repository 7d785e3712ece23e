"""Bad input: the exact error with its exact sentence, in both colours, and nothing written."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast import (
    CheckpointNotFound,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    LimitExceeded,
    SessionBusy,
    SessionEnded,
    SessionNotFound,
    TooDeep,
    TypeConflict,
    VersionConflict,
)
from holdfast.arguments import shown
from holdfast.clock import iso
from holdfast.records import KINDS
from holdfast.testing.subject import Subject, done
from tests.checkpoints import tables
from tests.checkpoints.colours import both_colours

LONG = "x" * 257
ALL_KINDS = f"kind must be one of {', '.join(KINDS)}, not "
MANY = "\U0001f419" * 256


def these(*values: Any) -> tuple[Any, ...]:
    return values


def text_of(what: str, value: object) -> str:
    return f"{what} must be text of 1 to 256 printable characters, not {shown(value)}"


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


def deep(path: str) -> str:
    return f"{path} is more than 64 levels deep (Limits.depth), or contains itself."


def endless() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["me"] = loop
    return loop


def not_plain(path: str, kind: str, hint: str = "") -> str:
    return f"{path} is of type {kind}, which is not plain JSON data{hint}."


def too_large(path: str, size: int) -> str:
    return f"{path} takes {size:,} bytes or more; the limit is 1,048,576 (Limits.value_bytes)."


class Colour(enum.Enum):
    RED = "red"


class Text(str):
    """Text of its own kind."""


@dataclasses.dataclass
class Point:
    x: int = 1


VERSION = "version must be 1 to 268435455, not "
ITERATION = 'needs data {"iteration": N} with N from 1 up'
LEASE = "lease_seconds must be above 0 and at most 604800, not "
ENDED = "session ended is completed; open it with reopen=True to continue"
BUSY = (
    "session busy is driven by 'driver'; only the driver may write, until its lease expires (at "
    f"{iso(holdfast.VirtualClock().now_ms() + 60_000)} unless renewed)"
)
GONE = "there is no session 'gone'"
NONE = "session s has no version 9: never written, or pruned"
FINITE = "JSON has only finite numbers within the range of a float."


class Scene:
    """Sessions of every sort; the handles are of the colour of the store."""

    store: Any
    s: Any
    ended: Any
    busy: Any
    gone: Any
    zombie: Any
    fork: Any


Case = tuple[Callable[[Scene], Any], type[holdfast.HoldfastError], str]

SESSIONS: list[Case] = [
    *[
        (lambda here, id=id: here.store.session(id), InvalidArgument, text_of("id", id))
        for id in ("", LONG, "a\nb", "a\0b", "\x7f", "\ud800", "\u2028", 7, 1.5, b"id", ["id"])
    ],
    *[
        (
            lambda here, what=what, value=value: here.store.session("new", **{what: value}),
            InvalidArgument,
            text_of(what, value),
        )
        for what in ("name", "agent", "user")
        for value in ("", LONG, "tab\t", 7, Text)
    ],
    (lambda here: here.store.session("new", parent=""), InvalidArgument, text_of("parent", "")),
    (lambda here: here.store.session("new", parent=7), InvalidArgument, text_of("parent", 7)),
    *[
        (
            lambda here, parent=parent: here.store.session("new", parent=parent),
            SessionNotFound,
            f"there is no parent session {getattr(parent, 'id', parent)!r}",
        )
        for parent in ("new", "nobody", "S", "s ", "s%", "'; DROP TABLE hf_sessions; --")
    ],
    (
        lambda here: here.store.session("new", parent=here.gone),
        SessionNotFound,
        "there is no parent session 'gone'",
    ),
    *[
        (
            lambda here, value=value: here.store.session("new", metadata=value),
            InvalidArgument,
            f"metadata must be a dict, not {type(value).__name__}",
        )
        for value in these([], "x", 1, collections.OrderedDict(), collections.Counter())
    ],
    (
        lambda here: here.store.session("new", metadata={1: 2}),
        InvalidValue,
        "metadata has a key of type int; keys must be of type str.",
    ),
    (
        lambda here: here.store.session("new", metadata={"big": "x" * 2**20}),
        LimitExceeded,
        too_large("metadata", 2**20 + 10),
    ),
    (lambda here: here.store.session("ended"), SessionEnded, ENDED),
    (lambda here: here.store.find_session("gone"), SessionNotFound, GONE),
    *[
        (
            lambda here, status=status: here.store.sessions(status=status),
            InvalidArgument,
            "status must be one of active, waiting, completed, failed, cancelled, cancelling, "
            f"deleting, not {status!r}",
        )
        for status in ("", "running", "ACTIVE", 7, ["active"])
    ],
    *[
        (
            lambda here, limit=limit: here.store.sessions(limit=limit),
            InvalidArgument,
            f"limit must be 1 to 1000, not {limit!r}",
        )
        for limit in (0, -1, 1001, 2**63, "10", 1.0, None, True)
    ],
    *[
        (
            lambda here, after=after: here.store.sessions(after=after),
            InvalidArgument,
            f"after must be a whole number from 0 up, not {after!r}",
        )
        for after in (-1, "s", None, 1.0, True)
    ],
    (
        lambda here: here.store.sessions(after=2**63),
        InvalidArgument,
        f"after must be 0 to {2**63 - 1}, not {2**63}",
    ),
    *[
        (
            lambda here, given=given: here.store.sessions(**given),
            InvalidArgument,
            "sessions are listed after one, or newest first before one",
        )
        for given in ({"before": 5}, {"after": 5, "newest_first": True})
    ],
    (lambda here: here.store.sessions(agent=7), InvalidArgument, text_of("agent", 7)),
    (lambda here: here.store.sessions(root=7), InvalidArgument, text_of("root", 7)),
    *[
        (
            lambda here, status=status: here.s.end(status),
            InvalidArgument,
            f"a session ends as completed, failed or cancelled, not {status!r}",
        )
        for status in ("active", "waiting", "", None, 1)
    ],
    (
        lambda here: here.busy.delete(),
        SessionBusy,
        "session busy is driven now; end it first, or delete with force=True",
    ),
    *[
        (lambda here, name=name: getattr(here.gone, name)(), SessionNotFound, GONE)
        for name in ("info", "end", "cancel", "delete", "drive")
    ],
]

LEASES: list[Case] = [
    *[
        (lambda here, t=t: here.s.lease("me", t), InvalidArgument, f"{LEASE}{t!r}")
        for t in (0, -1, math.nan, math.inf, -math.inf, 604801, "60", None, True, [60])
    ],
    *[
        (lambda here, who=who: here.s.lease(who, 60), InvalidArgument, text_of("holder", who))
        for who in ("", LONG, "a\0b", "\ud800", 7, None, b"me")
    ],
    (lambda here: here.s.drive(""), InvalidArgument, text_of("holder", "")),
    (lambda here: here.s.drive("me", lease_seconds=0), InvalidArgument, f"{LEASE}0"),
    (lambda here: here.ended.drive(), SessionEnded, ENDED),
    (lambda here: here.busy.drive(), SessionBusy, BUSY),
    (
        lambda here: here.zombie.save(x=1),
        LeaseLost,
        "session busy: this driver's fence 1 is old, the current one is 2; stop, nothing was "
        "written",
    ),
]

CHANNELS: list[Case] = [
    *[
        (
            lambda here, value=value: here.s.save(value),
            InvalidArgument,
            f"channels must be a dict, not {type(value).__name__}",
        )
        for value in ([], [1], "x", 0, False, {1})
    ],
    *[
        (lambda here, name=name: here.s.save({name: 1}), InvalidArgument, text_of("channel", name))
        for name in ("", LONG, 7, None, (1,))
    ],
    *[
        (
            lambda here, name=name: here.s.append(name, [1]),
            InvalidArgument,
            text_of("channel", name),
        )
        for name in ("a\nb", "\0", "\ud800")
    ],
    *[
        (
            lambda here, items=items: here.s.append("log", items),
            InvalidArgument,
            f"append takes a list of items, not {type(items).__name__}; wrap a single one: "
            "append('log', [item])",
        )
        for items in these({"role": "user"}, "text", (1, 2), None, 7, range(3), iter([]))
    ],
    *[
        (
            lambda here, name=name: here.s.append(name, []),
            TypeConflict,
            f"channel {name!r} is not a list; save() replaces it",
        )
        for name in ("plan", "memo", "none")
    ],
    (lambda here: here.s.save(x=math.nan), InvalidValue, f"x is nan: {FINITE}"),
    (lambda here: here.s.save(x=[1, -math.inf]), InvalidValue, f"x[1] is -inf: {FINITE}"),
    (lambda here: here.s.append("log", [{"a": math.inf}]), InvalidValue,
     f"log[0].a is inf: {FINITE}"),
    *[
        (
            lambda here, value=value: here.s.save(x={"a": value}),
            InvalidValue,
            not_plain("x.a", kind, hint),
        )
        for value, kind, hint in (
            ((1,), "tuple", "; use list() of it"),
            ({1}, "set", "; use a sorted list"),
            (b"x", "bytes", "; use text, for example base64"),
            (datetime.date(2026, 1, 1), "date", "; use its isoformat()"),
            (decimal.Decimal(1), "Decimal", "; use str() of it"),
            (uuid.UUID(int=1), "UUID", "; use str() of it"),
            (pathlib.PurePosixPath("x"), "PurePosixPath", "; use str() of it"),
            (Colour.RED, "Colour", "; use its .value"),
            (Text("x"), "Text", "; use str() of it"),
            (Point(), "Point", "; use dataclasses.asdict() of it"),
            (1j, "complex", ""),
            (Ellipsis, "ellipsis", ""),
            (collections.OrderedDict(), "OrderedDict", "; use dict() of it"),
            (int, "type", ""),
        )
    ],
    (
        lambda here: here.s.save(x={"a": {None: 1}}),
        InvalidValue,
        "x.a has a key of type NoneType; keys must be of type str.",
    ),
    (
        lambda here: here.s.save(x={"a": "\ud800"}),
        InvalidValue,
        "x.a has a lone surrogate: it is not Unicode text.",
    ),
    (lambda here: here.s.save(x={"a": nested(64, 1)}), TooDeep, deep("x.a" + "[0]" * 63)),
    (lambda here: here.s.save(x=endless()), TooDeep, deep("x" + ".me" * 64)),
    (lambda here: here.s.append("log", [nested(65, 1)]), TooDeep,
     deep("log[0]" + "[0]" * 64)),
    (lambda here: here.s.save(x="x" * 2**20), LimitExceeded, too_large("x", 2**20 + 5)),
    (lambda here: here.s.save(log=["a", "b" * 2**20]), LimitExceeded,
     too_large("log[1]", 2**20 + 5)),
    (
        lambda here: here.s.save(x={"n": 10**4096}),
        LimitExceeded,
        "x.n is an integer of more than 4,096 digits (Limits.digits).",
    ),
    (
        lambda here: here.s.save({f"{n:04}{MANY[:250]}": None for n in range(1_100)}),
        LimitExceeded,
        too_large("channels", 1_111_047),
    ),
]  # fmt: skip

VERSIONS: list[Case] = [
    *[
        (
            lambda here, kind=kind: here.s.record(kind),
            InvalidArgument,
            f"{ALL_KINDS}{kind!r}",
        )
        for kind in ("", "note", "Turn", "turn ", None, 7, ["turn"])
    ],
    *[
        (
            lambda here, data=data, kind=kind: here.s.record(kind, data),
            InvalidArgument,
            f"{kind} {ITERATION}",
        )
        for kind in ("iteration_start", "iteration_end")
        for data in (None, {}, [1], 1, {"iteration": 0}, {"iteration": "1"}, {"iteration": 1.0})
    ],
    (
        lambda here: here.s.record("iteration_end", {"iteration": 2**32}),
        InvalidArgument,
        f"iteration_end {ITERATION}",
    ),
    (lambda here: here.s.record("turn", {1}), InvalidValue,
     not_plain("data", "set", "; use a sorted list")),
    *[
        (
            lambda here, value=value: here.s.save(x=1, metadata=value),
            InvalidArgument,
            f"metadata must be a dict, not {type(value).__name__}",
        )
        for value in these([], "x", 0, False)
    ],
    *[
        (
            lambda here, item=item: here.s.record("turn", item=item),
            InvalidArgument,
            text_of("item", item),
        )
        for item in (7, "", LONG, "a\0b", "\ud800", ["i"])
    ],
    *[
        (
            lambda here, v=v: here.s.save(x=1, expected_version=v),
            InvalidArgument,
            f"expected_version must be a version, not {v!r}",
        )
        for v in (-1, "1", 1.0, True, 2**32)
    ],
    (
        lambda here: here.s.append("log", [1], expected_version=0),
        VersionConflict,
        "session s is at version 2, not 0; load it and decide again",
    ),
    *[
        (lambda here, name=name, v=v: getattr(here.s, name)(v), InvalidArgument, f"{VERSION}{v!r}")
        for name in ("at", "fork", "rewind", "unpin")
        for v in (0, -1, 2**32, "1", 1.0, None, True)
    ],
    *[
        (lambda here, name=name: getattr(here.s, name)(9), CheckpointNotFound, NONE)
        for name in ("at", "fork", "rewind", "unpin")
    ],
    (lambda here: here.s.pin(9, "x"), CheckpointNotFound, NONE),
    (lambda here: here.s.attest(9, "x"), CheckpointNotFound, NONE),
    (
        lambda here: here.fork.pin(1, "x"),
        InvalidArgument,
        "version 1 belongs to the session that this one was forked from",
    ),
    *[
        (
            lambda here, name=name, last=last: getattr(here.s, name)(
                *([1] if name == "at" else []), last=last
            ),
            InvalidArgument,
            f"last must be a whole number from 1 up, not {last!r}",
        )
        for name in ("at", "latest")
        for last in (0, -1, "5", 1.0, True)
    ],
    *[
        (
            lambda here, name=name: getattr(here.s, name)(kind="note"),
            InvalidArgument,
            f"{ALL_KINDS}'note'",
        )
        for name in ("latest", "history")
    ],
    *[
        (
            lambda here, limit=limit: here.s.history(limit=limit),
            InvalidArgument,
            f"limit must be 1 to 10000, not {limit!r}",
        )
        for limit in (0, -1, 10_001, "5", None, True)
    ],
    *[
        (lambda here, v=v: here.s.history(before=v), InvalidArgument, f"{VERSION}{v!r}")
        for v in (0, "2", 1.5)
    ],
    (lambda here: here.s.history(item=7), InvalidArgument,
     text_of("item", 7)),
    (
        lambda here: here.s.fork(1, id="ended"),
        InvalidArgument,
        "session 'ended' exists already; choose another id",
    ),
    (
        lambda here: here.s.fork(1, id="s"),
        InvalidArgument,
        "session 's' exists already; choose another id",
    ),
    (lambda here: here.s.fork(1, id=7), InvalidArgument, text_of("id", 7)),
    (lambda here: here.s.fork(1, name="\n"), InvalidArgument, text_of("name", "\n")),
    *[
        (lambda here, why=why: here.s.pin(1, why), InvalidArgument, "a pin needs a reason")
        for why in ("", " \t", None, 7)
    ],
    *[
        (
            lambda here, why=why: here.s.pin(1, why),
            InvalidArgument,
            "a pin's reason is at most 1000 printable characters",
        )
        for why in ("x" * 1001, "a\0b", "\ud800", "two\nlines")
    ],
    *[
        (
            lambda here, evidence=evidence: here.s.attest(1, evidence),
            InvalidArgument,
            "evidence is empty, so it attests nothing",
        )
        for evidence in these({}, [], "", None, 0, False)
    ],
    (lambda here: here.s.attest(1, object()), InvalidValue, not_plain("evidence", "object")),
    *[
        (call, error, message)
        for call in (
            lambda here, of: of(here).save(x=1),
            lambda here, of: of(here).append("log", [1]),
            lambda here, of: of(here).record("turn"),
            lambda here, of: of(here).rewind(1),
        )
        for call, error, message in (
            (lambda here, call=call: call(here, lambda here: here.ended), SessionEnded, ENDED),
            (lambda here, call=call: call(here, lambda here: here.busy), SessionBusy, BUSY),
            (lambda here, call=call: call(here, lambda here: here.gone), SessionNotFound, GONE),
        )
    ],
]  # fmt: skip


async def scene(store: Any) -> Scene:
    here = Scene()
    here.store = store
    for name in ("s", "ended", "busy", "gone"):
        session = await done(store.session(name))
        await done(session.save(log=["a"], plan={"n": 1}, memo="m" * 200, none=None, empty={}))
        await done(session.append("log", ["b"]))
        setattr(here, name, session)
    here.fork = await done(here.s.fork(2))
    await done(here.ended.end())
    await done(here.gone.delete())
    here.zombie = await done(store.find_session("busy"))
    lease = await done(here.busy.lease("driver", 60))
    here.zombie.fence = lease.fence
    await done(here.busy.release(lease))
    await done(here.busy.lease("driver", 60))
    return here


async def refuse(subject: Subject, cases: list[Case]) -> None:
    """Make sure that each case gets its error and changes nothing."""
    store = await subject.open(clock=holdfast.VirtualClock(), durability="normal")
    here = await scene(store)
    before = await done(tables.dump(store))
    for call, error, message in cases:
        with pytest.raises(holdfast.HoldfastError) as caught:
            await done(call(here))
        assert (type(caught.value), str(caught.value)) == (error, message)
        assert await done(tables.dump(store)) == before, message
    # Nor has anything changed that the process remembers.
    await done(here.s.append("log", ["c"]))
    assert (await done(here.s.latest()))["log"] == ["a", "b", "c"]


@both_colours
async def test_bad_input_to_sessions_is_refused(subject: Subject) -> None:
    await refuse(subject, SESSIONS)


@both_colours
async def test_bad_input_to_leases_is_refused(subject: Subject) -> None:
    await refuse(subject, LEASES)


@both_colours
async def test_bad_input_to_channels_is_refused(subject: Subject) -> None:
    await refuse(subject, CHANNELS)


@both_colours
async def test_bad_input_to_versions_is_refused(subject: Subject) -> None:
    await refuse(subject, VERSIONS)


@both_colours
async def test_hostile_names_are_only_names(subject: Subject) -> None:
    """What looks like SQL, a pattern, a path or markup is kept as it is."""
    store = await subject.open(durability="normal")
    names = [
        *("'; DROP TABLE hf_sessions; --", '"', "%", "_", "a%b", "\\", "../../etc/passwd", ":id"),
        *(
            "$1",
            "?",
            "<script>alert(1)</script>",
            "${AGENT_SESSION_ID}",
            "NULL",
            "0",
            " ",
            "é",
            MANY,
        ),
        *("e\u0301", "İ", "ﬀ", "{}", "/*pg */", "hf_sessions", "None", "a b"),
    ]
    for name in names:
        session = await done(store.session(name, name=name, agent=name, user=name))
        await done(session.save({name: name, f"{name[:200]} list": [name]}, item=name))
        await done(session.pin(1, name.strip() or "blank"))
    for name in names:
        session = await done(store.find_session(name))
        info = await done(session.info())
        assert (info.id, info.name, info.agent, info.user) == (name, name, name, name)
        assert [found.id for found in await done(store.sessions(agent=name))] == [name]
        assert [found.id for found in await done(store.sessions(root=name))] == [name]
        loaded = await done(session.latest())
        assert loaded.channels == {name: name, f"{name[:200]} list": [name]}
        found = await done(session.history(item=name))
        assert [checkpoint.item_id for checkpoint in found] == [name]
    assert len(await done(store.sessions(limit=1000))) == len(names)


class Role(enum.Enum):
    USER = "user"


@pytest.mark.parametrize("odd", [("a", 1), {"deep": [("a", 1)]}, Role.USER, {"r": Role.USER}])
def test_what_is_no_plain_data_is_refused_in_an_unchanged_prefix_too(
    place: dict[str, Any], odd: Any
) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(odd))
    with holdfast.open(**place) as store:
        session = store.session("s")
        session.save(transcript=[1, plain])
        with pytest.raises(holdfast.InvalidValue, match=r"^transcript\[1\]"):
            session.save(transcript=[1, odd, 2])
        with pytest.raises(holdfast.InvalidValue, match=r"^transcript\[2\]"):
            session.save(transcript=[1, plain, odd])
        assert session.save(transcript=[1, plain, 2]).version == 2


@pytest.mark.parametrize("odd", [("a", 1), Role.USER, Text("x")])
def test_what_was_plain_is_refused_if_it_no_longer_is(place: dict[str, Any], odd: Any) -> None:
    plain = "x" if isinstance(odd, Text) else msgspec.msgpack.decode(msgspec.msgpack.encode(odd))
    with holdfast.open(**place) as store:
        session = store.session("s")
        log: list[Any] = [{"n": number, "value": plain} for number in range(200)]
        for number in range(3):
            log.append(number)
            session.save(transcript=log)
        # The object itself is changed, not replaced.
        log[7]["value"] = odd
        with pytest.raises(holdfast.InvalidValue, match=r"^transcript\[7\]\.value "):
            session.save(transcript=log)
        log[7]["value"] = plain
        assert session.save(transcript=log).version == 4


def test_a_changed_object_in_a_checked_prefix_is_saved(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        log: list[Any] = [{"n": number, "value": 1} for number in range(200)]
        for value in (1, 1, 1.0, True, 1):
            log[7]["value"] = value
            log.append(value)
            saved = session.save(transcript=log).version
            found = session.at(saved)["transcript"]
            assert (type(found[7]["value"]), found) == (type(value), log)
