"""What no call takes is refused by its name, before a database sees it, and alike in all four."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument

SURROGATE = "\ud800"
DEEP: Any = []
for _ in range(10_000):
    DEEP = [DEEP]

Case = tuple[str, Callable[[Any, Any], Any], str]

CASES: list[Case] = [
    ("a root", lambda store, s: store.events("a\0b"), "root_id must be text of 1 to 256"),
    ("a root's text", lambda store, s: store.events(SURROGATE), "root_id must be text of 1 to"),
    ("a session's effects", lambda store, s: store.effects(session=SURROGATE), "session must be"),
    ("an item's effects", lambda store, s: store.effects(item=SURROGATE), "item must be text"),
    ("a key's effects", lambda store, s: store.effects(key=SURROGATE), "key must be text"),
    ("a tool's effects", lambda store, s: store.effects(tool=SURROGATE), "tool must be text"),
    ("effects of a status", lambda store, s: store.effects(status=["issued"]), "status must be"),
    ("a kind of effect", lambda store, s: store.once("k", int, effect="mutat"),
     "tool int: effect must be one of read, write, mutate, not 'mutat'"),
    ("a number for it", lambda store, s: store.once("k", print, effect=2**70),
     f"tool print: effect must be one of read, write, mutate, not {2**70}"),
    ("a list for it", lambda store, s: s.begin("t", {}, effect=["read"]), "effect must be one of"),
    ("a function", lambda store, s: store.once("k", int), "<class 'int'> has no readable signat"),
    ("a tool", lambda store, s: s.call(DEEP), "[[[[[[[...]]]]]]] is not a tool"),
    ("a backup", lambda store, s: store.backup(SURROGATE), "path must name a new file, not"),
    ("an export", lambda store, s: store.export(SURROGATE), "path must name a new file, not"),
    ("an import", lambda store, s: store.import_sessions(SURROGATE), "path must name a file, not"),
    ("a long one", lambda store, s: store.import_sessions("x" * 10**5), "path must name a file"),
    ("an old one", lambda store, s: store.import_legacy(SURROGATE), "path must name a file, not"),
    ("an archive", lambda store, s: store.prune(archive=SURROGATE), "path must name a file, not"),
    ("a lease", lambda store, s: s.renew(None, 5), "lease must be a Lease, not NoneType"),
    ("another", lambda store, s: s.release("x"), "lease must be a Lease, not str"),
    ("an environment", lambda store, s: holdfast.current_session("x"),  # type: ignore[arg-type]
     "environment must be a dict, not str"),
    ("details", lambda store, s: s.spend("m", details="text"), "details must be a dict, not str"),
    ("outputs", lambda store, s: store.work.complete_many([[1]]), "outputs must be pairs of a"),
    ("much money", lambda store, s: s.spend("m", usd=10**7), "usd must be 0 to 9,007,199, not 100"),
    ("no money", lambda store, s: s.spend("m", usd=DEEP), "usd must be an amount of money, not [["),
    ("more than all", lambda store, s: s.spend("m", usd="1e999999"), "usd must be an amount of"),
    ("a version", lambda store, s: s.at(10**20), f"version must be 1 to 268435455, not {10**20}"),
    ("a long version", lambda store, s: s.at(10**5_000),
     "version must be 1 to 268435455, not an integer of more than 40 digits"),
    ("a deep id", lambda store, s: store.session(DEEP), "id must be text of 1 to 256 printable"),
    ("a long id", lambda store, s: store.session("x" * 10**5), "id must be text of 1 to 256"),
]  # fmt: skip


@pytest.fixture
def call(place: dict[str, Any], colour: str) -> Iterator[Callable[[Any], Any]]:
    """Runs a function of a store and a session, in one of the colours."""

    async def run(function: Any) -> Any:
        async with await holdfast.aopen(**place) as store:
            made = function(store, await store.session("s"))
            return await made if inspect.isawaitable(made) else made

    if colour == "async":
        yield lambda function: asyncio.run(run(function))
        return
    with holdfast.open(**place) as store:
        yield lambda function: function(store, store.session("s"))


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize(("function", "message"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_what_no_call_takes_is_refused_by_name(call: Any, function: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        call(function)
    assert str(raised.value).startswith(message)
    assert len(str(raised.value)) < 400


def test_a_path_is_shown_without_its_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31m"
    path.write_text("taken")
    with holdfast.open("sqlite://") as store, pytest.raises(InvalidArgument) as raised:
        store.backup(path)
    assert str(raised.value).endswith(r"/\x1b[31m exists already; name a new file")
