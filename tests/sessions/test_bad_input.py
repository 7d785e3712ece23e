"""Bad input to sessions and checkpoints: each gets its exact error, and nothing is written."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast
from holdfast.kernel.operation import rows
from holdfast.records import KINDS

LONG = "x" * 257
ALL_KINDS = ", ".join(KINDS)
PATH = "[0]" * 65
TABLES = (
    "hf_trees", "hf_events", "hf_doors", "hf_sessions", "hf_epochs", "hf_checkpoints",
    "hf_lines", "hf_items", "hf_uses", "hf_pins", "hf_attestations",
)  # fmt: skip


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


DEEP = nested(70)
LOOP: list[Any] = []
LOOP.append(LOOP)


@dataclass
class Scene:
    """A store with a session of two versions, an ended, a deleted and a driven one."""

    store: holdfast.Store
    session: holdfast.Session
    ended: holdfast.Session
    deleted: holdfast.Session
    driven: holdfast.Session


@pytest.fixture
def scene(place: dict[str, Any]) -> Iterator[Scene]:
    with holdfast.open(**place, clock=holdfast.VirtualClock()) as store:
        made = {name: store.session(name) for name in ("s", "ended", "deleted", "driven")}
        made["s"].save(transcript=["a"], plan={"x": 1})
        made["s"].append("transcript", ["b"])
        for name in ("ended", "deleted", "driven"):
            made[name].save(x=1)
        made["ended"].end()
        made["deleted"].delete()
        made["driven"].lease("other", 60)
        yield Scene(store, made["s"], made["ended"], made["deleted"], made["driven"])


def dump(tx: holdfast.Transaction) -> holdfast.Op[dict[str, list[str]]]:
    found = {}
    for table in TABLES:
        found[table] = sorted(map(repr, (yield from rows(f"SELECT * FROM {table}"))))
    return found


Case = tuple[Callable[[Any], object], type[holdfast.HoldfastError], str]
CASES: dict[str, Case] = {
    "id empty": (
        lambda s: s.store.session(""),
        holdfast.InvalidArgument,
        "id must be text of 1 to 256 printable characters, not ''",
    ),
    "id of another type": (
        lambda s: s.store.session(7),
        holdfast.InvalidArgument,
        "id must be text of 1 to 256 printable characters, not 7",
    ),
    "id too long": (
        lambda s: s.store.session(LONG),
        holdfast.InvalidArgument,
        f"id must be text of 1 to 256 printable characters, not {LONG!r}",
    ),
    "id with a line break": (
        lambda s: s.store.session("a\nb"),
        holdfast.InvalidArgument,
        "id must be text of 1 to 256 printable characters, not 'a\\nb'",
    ),
    "id with a null": (
        lambda s: s.store.session("a\0b"),
        holdfast.InvalidArgument,
        "id must be text of 1 to 256 printable characters, not 'a\\x00b'",
    ),
    "name empty": (
        lambda s: s.store.session("n", name=""),
        holdfast.InvalidArgument,
        "name must be text of 1 to 256 printable characters, not ''",
    ),
    "name of another type": (
        lambda s: s.store.session("n", name=["x"]),
        holdfast.InvalidArgument,
        "name must be text of 1 to 256 printable characters, not ['x']",
    ),
    "agent too long": (
        lambda s: s.store.session("n", agent=LONG),
        holdfast.InvalidArgument,
        f"agent must be text of 1 to 256 printable characters, not {LONG!r}",
    ),
    "user with a control character": (
        lambda s: s.store.session("n", user="\x1b[31m"),
        holdfast.InvalidArgument,
        "user must be text of 1 to 256 printable characters, not '\\x1b[31m'",
    ),
    "metadata a list": (
        lambda s: s.store.session("n", metadata=[1]),
        holdfast.InvalidArgument,
        "metadata must be a dict, not list",
    ),
    "metadata with a set": (
        lambda s: s.store.session("n", metadata={"a": {1}}),
        holdfast.InvalidValue,
        "metadata.a is of type set, which is not plain JSON data; use a sorted list.",
    ),
    "unknown parent": (
        lambda s: s.store.session("n", parent="nobody"),
        holdfast.SessionNotFound,
        "there is no parent session 'nobody'",
    ),
    "itself as parent": (
        lambda s: s.store.session("n", parent="n"),
        holdfast.SessionNotFound,
        "there is no parent session 'n'",
    ),
    "parent of another type": (
        lambda s: s.store.session("n", parent=3),
        holdfast.InvalidArgument,
        "parent must be text of 1 to 256 printable characters, not 3",
    ),
    "ended session": (
        lambda s: s.store.session("ended"),
        holdfast.SessionEnded,
        "session ended is completed; open it with reopen=True to go on",
    ),
    "unknown status in a listing": (
        lambda s: s.store.sessions(status="running"),
        holdfast.InvalidArgument,
        "unknown status 'running'; it is one of active, waiting, completed, failed, cancelled",
    ),
    "limit zero in a listing": (
        lambda s: s.store.sessions(limit=0),
        holdfast.InvalidArgument,
        "limit must be 1 to 1000, not 0",
    ),
    "limit too large in a listing": (
        lambda s: s.store.sessions(limit=1001),
        holdfast.InvalidArgument,
        "limit must be 1 to 1000, not 1001",
    ),
    "limit of another type": (
        lambda s: s.store.sessions(limit="10"),
        holdfast.InvalidArgument,
        "limit must be 1 to 1000, not '10'",
    ),
    "cursor of another type": (
        lambda s: s.store.sessions(after="last"),
        holdfast.InvalidArgument,
        "after must be the number of a session, not 'last'",
    ),
    "negative cursor": (
        lambda s: s.store.sessions(after=-1),
        holdfast.InvalidArgument,
        "after must be the number of a session, not -1",
    ),
    "unknown kind in a listing": (
        lambda s: s.store.checkpoints(kind="step"),
        holdfast.InvalidArgument,
        f"unknown kind 'step'; it must be one of {ALL_KINDS}",
    ),
    "since of another type": (
        lambda s: s.store.checkpoints(since="today"),
        holdfast.InvalidArgument,
        "since must be a time in milliseconds, not 'today'",
    ),
    "unknown kind": (
        lambda s: s.session.record("step"),
        holdfast.InvalidArgument,
        f"unknown kind 'step'; it must be one of {ALL_KINDS}",
    ),
    "kind of another type": (
        lambda s: s.session.save(kind=3),
        holdfast.InvalidArgument,
        f"unknown kind 3; it must be one of {ALL_KINDS}",
    ),
    "iteration missing": (
        lambda s: s.session.record("iteration_start"),
        holdfast.InvalidArgument,
        'iteration_start needs data {"iteration": N} with N from 1 up',
    ),
    "iteration zero": (
        lambda s: s.session.record("iteration_start", {"iteration": 0}),
        holdfast.InvalidArgument,
        'iteration_start needs data {"iteration": N} with N from 1 up',
    ),
    "iteration true": (
        lambda s: s.session.record("iteration_end", {"iteration": True}),
        holdfast.InvalidArgument,
        'iteration_end needs data {"iteration": N} with N from 1 up',
    ),
    "iteration text": (
        lambda s: s.session.record("iteration_end", {"iteration": "1"}),
        holdfast.InvalidArgument,
        'iteration_end needs data {"iteration": N} with N from 1 up',
    ),
    "channel name empty": (
        lambda s: s.session.save({"": 1}),
        holdfast.InvalidArgument,
        "a channel's name is text of 1 to 256 characters, not ''",
    ),
    "channel name too long": (
        lambda s: s.session.save({LONG: 1}),
        holdfast.InvalidArgument,
        f"a channel's name is text of 1 to 256 characters, not {LONG!r}",
    ),
    "channel name with a tab": (
        lambda s: s.session.save({"a\tb": 1}),
        holdfast.InvalidArgument,
        "channel 'a\\tb' has characters that cannot be printed",
    ),
    "channel name of another type": (
        lambda s: s.session.append(3, [1]),
        holdfast.InvalidArgument,
        "a channel's name is text of 1 to 256 characters, not 3",
    ),
    "not a number": (
        lambda s: s.session.save(x=float("nan")),
        holdfast.InvalidValue,
        "x is nan: JSON has only finite numbers, no larger than a float can be.",
    ),
    "infinity inside": (
        lambda s: s.session.save(x={"a": [1, float("inf")]}),
        holdfast.InvalidValue,
        "x.a[1] is inf: JSON has only finite numbers, no larger than a float can be.",
    ),
    "tuple": (
        lambda s: s.session.save(x=(1, 2)),
        holdfast.InvalidValue,
        "x is of type tuple, which is not plain JSON data; use list() of it.",
    ),
    "tuple inside": (
        lambda s: s.session.append("transcript", [{"a": (1,)}]),
        holdfast.InvalidValue,
        "transcript[0].a is of type tuple, which is not plain JSON data; use list() of it.",
    ),
    "set": (
        lambda s: s.session.save(x={1}),
        holdfast.InvalidValue,
        "x is of type set, which is not plain JSON data; use a sorted list.",
    ),
    "bytes": (
        lambda s: s.session.save(x=b"raw"),
        holdfast.InvalidValue,
        "x is of type bytes, which is not plain JSON data; use text, for example base64.",
    ),
    "datetime": (
        lambda s: s.session.save(x={"at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}),
        holdfast.InvalidValue,
        "x.at is of type datetime, which is not plain JSON data; use its isoformat().",
    ),
    "decimal": (
        lambda s: s.session.save(x=decimal.Decimal("1.5")),
        holdfast.InvalidValue,
        "x is of type Decimal, which is not plain JSON data; use str() of it.",
    ),
    "uuid": (
        lambda s: s.session.append("transcript", [uuid.UUID(int=1)]),
        holdfast.InvalidValue,
        "transcript[0] is of type UUID, which is not plain JSON data; use str() of it.",
    ),
    "keys that are numbers": (
        lambda s: s.session.save(x={1: "a"}),
        holdfast.InvalidValue,
        "x has a key of type int; keys must be of type str.",
    ),
    "lone surrogate": (
        lambda s: s.session.save(x="\ud800"),
        holdfast.InvalidValue,
        "x has a lone surrogate: it is not Unicode text.",
    ),
    "too deep": (
        lambda s: s.session.save(x=DEEP),
        holdfast.LimitExceeded,
        f"x{PATH} is more than 64 levels deep (Limits.depth), or contains itself.",
    ),
    "endless": (
        lambda s: s.session.save(x=LOOP),
        holdfast.LimitExceeded,
        f"x{PATH} is more than 64 levels deep (Limits.depth), or contains itself.",
    ),
    "too large": (
        lambda s: s.session.save(x="x" * 2_000_000),
        holdfast.LimitExceeded,
        "x takes 2,000,005 bytes or more; the limit is 1,048,576 (Limits.value_bytes).",
    ),
    "item too large": (
        lambda s: s.session.append("transcript", ["x" * 2_000_000]),
        holdfast.LimitExceeded,
        "transcript[0] takes 2,000,005 bytes or more; the limit is 1,048,576 (Limits.value_bytes).",
    ),
    "an object": (
        lambda s: s.session.save(x=object()),
        holdfast.InvalidValue,
        "x is of type object, which is not plain JSON data.",
    ),
    "append a dict": (
        lambda s: s.session.append("transcript", {"role": "user"}),
        holdfast.InvalidArgument,
        "append takes a list of items, not dict; wrap a single one: append('transcript', [item])",
    ),
    "append text": (
        lambda s: s.session.append("transcript", "hello"),
        holdfast.InvalidArgument,
        "append takes a list of items, not str; wrap a single one: append('transcript', [item])",
    ),
    "append to what is no list": (
        lambda s: s.session.append("plan", [1]),
        holdfast.TypeConflict,
        "channel 'plan' is not a list; save() replaces it",
    ),
    "data not plain": (
        lambda s: s.session.record("turn", {"a": {1}}),
        holdfast.InvalidValue,
        "data.a is of type set, which is not plain JSON data; use a sorted list.",
    ),
    "metadata of a checkpoint a list": (
        lambda s: s.session.save(x=1, metadata=[1]),
        holdfast.InvalidArgument,
        "metadata must be a dict, not list",
    ),
    "item of another type": (
        lambda s: s.session.save(x=1, item=7),
        holdfast.InvalidArgument,
        "item must be a work item or its id, not 7",
    ),
    "expected version of another type": (
        lambda s: s.session.save(x=1, expected_version="2"),
        holdfast.InvalidArgument,
        "expected_version must be a version, not '2'",
    ),
    "expected version negative": (
        lambda s: s.session.save(x=1, expected_version=-1),
        holdfast.InvalidArgument,
        "expected_version must be a version, not -1",
    ),
    "expected version old": (
        lambda s: s.session.save(x=1, expected_version=1),
        holdfast.VersionConflict,
        "session s is at version 2, not 1; load it and decide again",
    ),
    "version zero": (
        lambda s: s.session.at(0),
        holdfast.InvalidArgument,
        "a version is a whole number from 1 up, not 0",
    ),
    "version true": (
        lambda s: s.session.at(True),
        holdfast.InvalidArgument,
        "a version is a whole number from 1 up, not True",
    ),
    "version text": (
        lambda s: s.session.at("1"),
        holdfast.InvalidArgument,
        "a version is a whole number from 1 up, not '1'",
    ),
    "version not there": (
        lambda s: s.session.at(99),
        holdfast.CheckpointNotFound,
        "session s has no version 99: never written, or pruned",
    ),
    "version huge": (
        lambda s: s.session.at(2**40),
        holdfast.InvalidArgument,
        "a version is a whole number from 1 up, not 1099511627776",
    ),
    "window zero": (
        lambda s: s.session.latest(last=0),
        holdfast.InvalidArgument,
        "last must be a whole number from 1 up, not 0",
    ),
    "window of another type": (
        lambda s: s.session.at(1, last="all"),
        holdfast.InvalidArgument,
        "last must be a whole number from 1 up, not 'all'",
    ),
    "history of an unknown kind": (
        lambda s: s.session.history(kind="step"),
        holdfast.InvalidArgument,
        f"unknown kind 'step'; it must be one of {ALL_KINDS}",
    ),
    "history without limit": (
        lambda s: s.session.history(limit=0),
        holdfast.InvalidArgument,
        "limit must be 1 to 10000, not 0",
    ),
    "diff with a version that is not there": (
        lambda s: s.session.diff(1, 99),
        holdfast.CheckpointNotFound,
        "session s has no version 99: never written, or pruned",
    ),
    "fork of a version that is not there": (
        lambda s: s.session.fork(99),
        holdfast.CheckpointNotFound,
        "session s has no version 99: never written, or pruned",
    ),
    "fork to an id in use": (
        lambda s: s.session.fork(1, id="ended"),
        holdfast.InvalidArgument,
        "there is a session 'ended' already; choose another id",
    ),
    "fork to a bad id": (
        lambda s: s.session.fork(1, id=""),
        holdfast.InvalidArgument,
        "id must be text of 1 to 256 printable characters, not ''",
    ),
    "rewind to a version that is not there": (
        lambda s: s.session.rewind(99),
        holdfast.CheckpointNotFound,
        "session s has no version 99: never written, or pruned",
    ),
    "rewind to zero": (
        lambda s: s.session.rewind(0),
        holdfast.InvalidArgument,
        "a version is a whole number from 1 up, not 0",
    ),
    "pin without a reason": (
        lambda s: s.session.pin(1, " "),
        holdfast.InvalidArgument,
        "a pin needs a reason",
    ),
    "pin of a version that is not there": (
        lambda s: s.session.pin(99, "why"),
        holdfast.CheckpointNotFound,
        "session s has no version 99: never written, or pruned",
    ),
    "attest without evidence": (
        lambda s: s.session.attest(1, {}),
        holdfast.InvalidArgument,
        "evidence is empty, so it attests nothing",
    ),
    "attest with what is not plain": (
        lambda s: s.session.attest(1, {"by": {1}}),
        holdfast.InvalidValue,
        "evidence.by is of type set, which is not plain JSON data; use a sorted list.",
    ),
    "end as something else": (
        lambda s: s.session.end("done"),
        holdfast.InvalidArgument,
        "a session ends as completed, failed or cancelled, not 'done'",
    ),
    "end as active": (
        lambda s: s.session.end("active"),
        holdfast.InvalidArgument,
        "a session ends as completed, failed or cancelled, not 'active'",
    ),
    "lease of no time": (
        lambda s: s.session.lease("h", 0),
        holdfast.InvalidArgument,
        "lease_seconds must be above 0 and at most 604800, not 0",
    ),
    "lease of another type": (
        lambda s: s.session.lease("h", "long"),
        holdfast.InvalidArgument,
        "lease_seconds must be above 0 and at most 604800, not 'long'",
    ),
    "lease for ever": (
        lambda s: s.session.lease("h", 10**9),
        holdfast.InvalidArgument,
        "lease_seconds must be above 0 and at most 604800, not 1000000000",
    ),
    "lease without a holder": (
        lambda s: s.session.lease("", 10),
        holdfast.InvalidArgument,
        "holder must be text of 1 to 256 printable characters, not ''",
    ),
    "drive an ended session": (
        lambda s: s.ended.drive("h"),
        holdfast.SessionEnded,
        "session ended is completed; open it with reopen=True to go on",
    ),
    "save in an ended session": (
        lambda s: s.ended.save(x=1),
        holdfast.SessionEnded,
        "session ended is completed; open it with reopen=True to go on",
    ),
    "save in a deleted session": (
        lambda s: s.deleted.save(x=1),
        holdfast.SessionNotFound,
        "there is no session 'deleted'",
    ),
    "append to a deleted session": (
        lambda s: s.deleted.append("x", [1]),
        holdfast.SessionNotFound,
        "there is no session 'deleted'",
    ),
    "cancel a deleted session": (
        lambda s: s.deleted.cancel(),
        holdfast.SessionNotFound,
        "there is no session 'deleted'",
    ),
    "fork a deleted session": (
        lambda s: s.deleted.fork(1),
        holdfast.SessionNotFound,
        "there is no session 'deleted'",
    ),
    "save while another drives": (
        lambda s: s.driven.save(x=1),
        holdfast.SessionBusy,
        "session driven is driven by 'other'; only its driver may write while the lease lives",
    ),
    "rewind while another drives": (
        lambda s: s.driven.rewind(1),
        holdfast.SessionBusy,
        "session driven is driven by 'other'; only its driver may write while the lease lives",
    ),
    "delete while another drives": (
        lambda s: s.driven.delete(),
        holdfast.SessionBusy,
        "session driven is driven now; end it first, or delete with force=True",
    ),
    "drive while another drives": (
        lambda s: s.driven.drive("me"),
        holdfast.SessionBusy,
        "session driven is driven by 'other'; only its driver may write while the lease lives",
    ),
    "prune nothing kept": (
        lambda s: s.store.prune(keep=0),
        holdfast.InvalidArgument,
        "keep must be a whole number from 1 up, not 0",
    ),
    "import of a missing file": (
        lambda s: s.store.import_sessions("/nonexistent.holdfast"),
        holdfast.InvalidArgument,
        "there is no file /nonexistent.holdfast",
    ),
}


def test_bad_input_gets_its_exact_error_and_nothing_is_written(scene: Scene) -> None:
    before = scene.store.run(dump)
    for name, (call, error, message) in CASES.items():
        with pytest.raises(error) as raised:
            call(scene)
        assert type(raised.value) is error, name
        assert str(raised.value) == message, name
        assert scene.store.run(dump) == before, name


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
