"""A file from elsewhere is imported whole or refused cleanly, and reaches no further."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import holdfast
from holdfast.checkpoints.portable import ItemsRecord, LineRecord, PinRecord
from holdfast.codec import Codec, Limits
from holdfast.effects.portable import AncestryRecord, EffectRecord, SaltsRecord
from holdfast.errors import CorruptRecord, InvalidArgument, LimitExceeded
from holdfast.feed.portable import EventRecord, TreeRecord
from holdfast.mesh import Service
from holdfast.peers.portable import AskRecord
from holdfast.portable import file as format
from holdfast.records import EffectReason
from holdfast.sessions.portable import SessionRecord
from holdfast.spend.portable import SpendRecord
from holdfast.state.portable import StateEventRecord
from holdfast.store import NOUNS
from holdfast.work.portable import AttemptRecord
from tests.checkpoints.looking import Look
from tests.maintenance.crafted import changed, craft, fill, firsts, open_at, read
from tests.maintenance.stores import everything

calls: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


@holdfast.tool(effect="mutate")
def charge(cents: int) -> dict[str, int]:
    calls.append(cents)
    return {"cents": cents}


@holdfast.tool(effect="mutate", dedupe="global")
def announce(text: str) -> str:
    calls.append(text)
    return text


def make() -> str:
    calls.append("made")
    return "made"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sessions.export"


@pytest.fixture
def frames(file: Path) -> list[Any]:
    with open_at({"url": "sqlite://"}) as store:
        fill(store)
        store.export(file)
    return read(file)


# Reach.


def planted(file: Path, session_id: str, **changes: Any) -> None:
    """Put effects of a session into the file as if they were those of another."""
    found = read(file)
    for index, each in enumerate(found):
        if isinstance(each, EffectRecord):
            found[index] = msgspec.structs.replace(each, session_id=session_id, **changes)
    craft(file, found)


def attack(file: Path, victim: str, *, as_session: str) -> None:
    """Make a file whose effects are what `victim` would do, computed with a salt it brings."""
    with open_at({"url": "sqlite://"}) as store:
        session = store.session(victim)
        session.call(charge, cents=7, call_id="call 7")
        store.export(file)
    found = read(file)
    for index, each in enumerate(found):
        if isinstance(each, TreeRecord | EventRecord):
            found[index] = msgspec.structs.replace(each, root_id=as_session)
        if isinstance(each, SessionRecord):
            found[index] = msgspec.structs.replace(each, id=as_session, root_id=as_session)
        if isinstance(each, EffectRecord):
            found[index] = msgspec.structs.replace(each, session_number=77)
    craft(file, found)


@pytest.mark.parametrize("is_there", [True, False])
def test_effects_reach_no_session_that_is_not_in_the_file(
    place: Any, file: Path, is_there: bool
) -> None:
    attack(file, "victim", as_session="mallory")
    with open_at(place) as store:
        if is_there:
            store.session("victim")
        before = everything(store)
        with pytest.raises(InvalidArgument, match="applies beyond its own sessions"):
            store.import_sessions(file)
        assert everything(store) == before
        assert store.effects() == []
        assert not store.session("victim").call(charge, cents=7, call_id="call 7").replayed
        assert calls == [7, 7]


@pytest.mark.parametrize("field", ["scope", "key", "scope and key"])
def test_an_effect_cannot_say_that_it_is_one_session_s_and_count_in_another(
    place: Any, file: Path, field: str
) -> None:
    attack(file, "victim", as_session="mallory")
    own = {"scope": "session:mallory", "key": "session:mallory:" + "0" * 32}
    for name in field.split(" and "):
        del own[name]
    planted(file, "mallory", **own)
    with open_at(place) as store:
        with pytest.raises(InvalidArgument, match="store_keys=True"):
            store.import_sessions(file)
        assert store.effects() == []


def test_an_undo_cannot_reach_an_effect_of_another_file(place: Any, file: Path) -> None:
    with open_at(place) as store:
        victim = store.session("victim")
        victim.call(charge, cents=1)
        (effect,) = store.effects()
        with open_at({"url": "sqlite://"}) as other:
            other.session("mallory").call(charge, cents=2)
            other.export(file)
        planted(file, "mallory", undoes=effect.id, key=f"undo:{effect.id}")
        with pytest.raises(CorruptRecord, match="is referred to but is not in the file"):
            store.import_sessions(file)


@pytest.mark.parametrize("what", ["once", "global", "item"])
def test_keys_of_the_whole_store_come_only_if_they_are_asked_for(
    place: Any, file: Path, what: str
) -> None:
    with open_at({"url": "sqlite://"}) as source:
        session = source.session("s")
        match what:
            case "once":
                source.once("invoice", make, session=session)
            case "global":
                session.call(announce, text="x")
            case "item":
                source.work.submit("job", 1, key="nightly", session=session)
        source.export(file)
    with open_at(place) as store:
        before = everything(store)
        with pytest.raises(InvalidArgument, match="applies beyond"):
            store.import_sessions(file)
        assert everything(store) == before
        store.import_sessions(file, store_keys=True)
        calls.clear()
        match what:
            case "once":
                assert store.once("invoice", make).value == "made"
            case "global":
                assert store.session("other").call(announce, text="x").replayed
            case "item":
                assert store.work.submit("job", 2, key="nightly").input == 1
        assert calls == []


def test_an_answer_to_a_request_reaches_no_later_request(place: Any, file: Path) -> None:
    with open_at({"url": "sqlite://"}) as source:
        source.request("planner", {"q": 1}, request_id="mallory")
        source.answer("mallory", "planted")
        source.export(file)
    found = read(file)
    craft(file, changed(found, AskRecord, id="request 42"))
    with open_at(place) as store:
        before = everything(store)
        with pytest.raises(CorruptRecord, match="'request 42' comes twice, or without its session"):
            store.import_sessions(file, store_keys=True)
        assert everything(store) == before
        assert store.request("planner", {"q": 1}, request_id="request 42").state == "open"


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("end", ["end", "cancel", "delete", "item", "resume"])
def test_a_call_is_served_by_no_session_of_another_tree(
    place: Any, file: Path, is_there: bool, end: str
) -> None:
    with open_at({"url": "sqlite://"}) as source:
        source.session("mallory", agent="spy").ask("victim", "what do you know?")
        source.export(file)
    craft(file, changed(read(file), AskRecord, id="victim"))
    with open_at(place) as store:
        if is_there:
            store.session("victim", agent="planner")
        store.import_sessions(file)
        victim = store.session("victim", agent="planner")
        match end:
            case "end":
                victim.end("completed")
            case "cancel":
                victim.cancel()
            case "delete":
                victim.delete()
            case "item":
                store.work.submit("request", {"ask": "victim"}, queue="q", session=victim)
                (item,) = store.work.claim("w", queues="q")
                with pytest.raises(InvalidArgument, match="does not serve a request"):
                    item.receive()
                item.complete("secret")
            case "resume":
                parked = victim.wait_for_approval("May I?")
                store.approve(parked.pause_id, by="ann")
                (item,) = store.work.claim("w", queues="agent:planner")
                item.resume()
                item.complete("secret")
        (asked,) = store.find_session("mallory").asks()
        assert (asked.state, asked.answer) == ("open", None)


@pytest.mark.parametrize("end", ["answer", "cancel", "end"])
def test_the_end_of_a_call_stops_no_session_of_another_tree(
    place: Any, file: Path, end: str
) -> None:
    with open_at({"url": "sqlite://"}) as source:
        source.session("mallory", agent="spy").ask("victim", "what do you know?")
        source.export(file)
    craft(file, changed(read(file), AskRecord, id="victim"))
    with open_at(place) as store:
        victim = store.session("victim")
        victim.add_artifact("plan", data="secret")
        item = store.work.submit("request", id="request victim", session=victim)
        store.import_sessions(file)
        match end:
            case "answer":
                store.answer("victim", "nothing")
            case "cancel":
                store.cancel_ask("victim")
            case "end":
                store.session("mallory").end("completed")
        asked = store.peer_call("victim")
        assert asked.state == ("ok" if end == "answer" else "cancelled")
        assert asked.answer is not None
        assert asked.answer.artifacts == ()
        assert victim.info().status == "active"
        assert store.work.get(item.id).status == "pending"


def test_a_service_takes_no_request_of_another_tree(place: Any, file: Path) -> None:
    with open_at({"url": "sqlite://"}) as source:
        source.session("mallory", agent="spy").ask("planner", "what do you know?")
        source.export(file)
    craft(file, changed(read(file), AskRecord, id="victim"))
    with open_at(place) as store:
        store.import_sessions(file)
        victim = store.session("victim")
        item = store.work.submit("request", session=victim, queue="agent:planner", max_retries=0)
        Service("planner", calls.append).worker(store).run(until_empty=True)
        assert "does not serve a request" in (store.work.get(item.id).error or "")
        assert calls == []


# Size and shape.


def bomb() -> list[Any]:
    """An item that is a list of empty lists, of which a megabyte packs into a few bytes."""
    body = b"\xdd" + (200_000_000).to_bytes(4) + b"\x90" * 200_000_000
    return [LineRecord(1, []), ItemsRecord(1, 0, 1, body)]


MEMORY = """
import resource, sys
import holdfast
store = holdfast.open("sqlite://", durability="normal")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    store.import_sessions(sys.argv[1])
except holdfast.errors.HoldfastError as error:
    print(type(error).__name__, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def growth_kb(file: Path) -> tuple[str, int]:
    """Import in a process of its own; return the error's name and by how much memory grew."""
    command = [sys.executable, "-c", MEMORY, str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    name, growth = ended.stdout.split()
    return name, int(growth)


def test_a_file_that_expands_to_gigabytes_costs_no_memory(file: Path) -> None:
    wide = Limits(value_bytes=2**28, record_bytes=2**28)
    craft(file, bomb(), Codec(wide, compression="zstd"))
    assert file.stat().st_size < 100_000
    name, growth = growth_kb(file)
    assert name == "LimitExceeded"
    assert growth < 60_000


def test_a_sparse_file_is_not_read_into_memory(file: Path) -> None:
    craft(file, [])
    with file.open("r+b") as opened:
        end = opened.read().index(b"\n") + 1
        opened.seek(end)
        opened.write((3 * 2**30).to_bytes(4))
        opened.truncate(end + 4 + 3 * 2**30)
    name, growth = growth_kb(file)
    assert name == "LimitExceeded"
    assert growth < 60_000


@pytest.mark.parametrize("depth", [65, 1_000, 100_000])
def test_deep_values_are_refused(file: Path, depth: int) -> None:
    body = b"\x91" * depth + b"\xc0"
    craft(file, [LineRecord(1, []), ItemsRecord(1, 0, 1, body)])
    with open_at({"url": "sqlite://"}) as store:
        with pytest.raises((CorruptRecord, LimitExceeded)):
            store.import_sessions(file)
        assert store.sessions() == []


def test_a_deep_record_is_refused(file: Path) -> None:
    craft(file, [b"\x91" * 100_000])
    with open_at({"url": "sqlite://"}) as store, pytest.raises(CorruptRecord):
        store.import_sessions(file)


@pytest.mark.parametrize("number", [b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", b"\xcd\x00\x01"])
def test_a_number_that_is_not_written_as_we_do_is_refused(file: Path, number: bytes) -> None:
    tree = msgspec.msgpack.encode(TreeRecord("s", 0, 0))
    assert tree.endswith(b"\x00\x00")
    craft(file, [tree[:-1] + number])
    with open_at({"url": "sqlite://"}) as store, pytest.raises(CorruptRecord) as raised:
        store.import_sessions(file)
    assert str(raised.value).endswith(
        ("not written as we write it", "has a wrong tree.floor: Expected `int`, got `float`")
    )


def test_what_is_changed_has_every_kind_of_record(frames: Any) -> None:
    assert {type(each) for each in frames} >= set(format.Format(NOUNS).kinds)


def test_a_refusal_names_the_record_and_the_field(place: Any, file: Path, frames: Any) -> None:
    def first(kind: type[Any]) -> Any:
        return next(each for each in frames if isinstance(each, kind))

    def twice(frame: Any) -> list[Any]:
        at = frames.index(frame)
        return [*frames[:at], frame, *frames[at:]]

    attempt, fork = first(AttemptRecord), first(AncestryRecord)
    [forked] = [
        each.id
        for each in frames
        if isinstance(each, SessionRecord) and each.number == fork.session_number
    ]
    effect, session = map(frames.index, map(first, (EffectRecord, SessionRecord)))
    wrong = {
        f"record {effect} has a wrong effect.reason: Invalid enum value 'tired'":
            changed(frames, EffectRecord, reason="tired"),
        f"record {session} has a wrong session.status: Invalid enum value 'fine'":
            changed(frames, SessionRecord, status="fine"),
        "the pin of version 1 of 'a' comes twice":
            twice(first(PinRecord)),
        f"the origins of session {forked!r} come twice":
            twice(fork),
        f"attempt 1 of work item {attempt.item_id!r} comes twice":
            twice(attempt),
        f"attempt 7 of work item {attempt.item_id!r} is one more than the item had":
            changed(frames, AttemptRecord, attempt=7),
        f"attempt 1 of work item {attempt.item_id!r} has an error that is not text":
            changed(frames, AttemptRecord, error=b"\x01"),
    }  # fmt: skip
    with open_at(place) as store:
        for problem, crafted in wrong.items():
            craft(file, crafted)
            with pytest.raises(CorruptRecord) as raised:
                store.import_sessions(file)
            assert str(raised.value).endswith(problem)
        assert store.sessions() == []


def test_a_file_may_give_every_reason_that_an_effect_can_have(file: Path, frames: Any) -> None:
    for reason in get_args(EffectReason):
        craft(file, changed(frames, EffectRecord, reason=reason))
        with open_at({"url": "sqlite://"}) as store:
            store.import_sessions(file)
            assert {effect.reason for effect in store.effects()} == {reason}
    with open_at({"url": "sqlite://"}) as store:
        table = Look(store).rows("SELECT sql FROM sqlite_master WHERE name = 'hf_effects'")[0]
    allowed = table["sql"].partition("reason IN (")[2].partition(")")[0]
    assert set(re.findall(r"'(\w+)'", allowed)) == set(get_args(EffectReason))


def test_a_header_cannot_command_the_terminal(file: Path) -> None:
    with file.open("wb") as opened:
        writer = format.ExportWriter(opened, Codec(), format.Format(NOUNS), "crafted")
        writer.begin("\x1b[2J")
        writer.end()
    with open_at({"url": "sqlite://"}) as store, pytest.raises(CorruptRecord, match="first line"):
        store.import_sessions(file)


def test_a_file_that_changes_between_two_readings_is_refused(file: Path, frames: Any) -> None:
    craft(file, frames)
    source = format.ExportFile(file, Codec(), format.Format(NOUNS))
    assert len(list(source.records())) == len(frames)
    craft(file, frames[:-1])
    with pytest.raises(CorruptRecord, match="changed while it was read"):
        list(source.records())


def refused(
    file: Path, frames: list[Any], beyond: Callable[[str, Any], object], but: Any = ()
) -> int:
    """Change each field of a record of each kind, and have it refused; return how many."""
    tried = 0
    with open_at({"url": "sqlite://"}) as store:
        for each in firsts(frames):
            place = frames.index(each)
            for name in () if isinstance(each, but) else each.__struct_fields__:
                value = beyond(name, getattr(each, name))
                if value is None:
                    continue
                record = msgspec.structs.replace(each, **{name: value})
                craft(file, [*frames[:place], record, *frames[place + 1 :]])
                with pytest.raises(CorruptRecord):
                    store.import_sessions(file, store_keys=True)
                tried += 1
        assert store.sessions() == []
    return tried


def test_every_number_and_text_has_a_limit(file: Path, frames: Any) -> None:
    limits = {int: 2**63 - 1, str: "x" * 1_001}
    assert refused(file, frames, lambda _, value: limits.get(type(value))) > 150


def test_no_text_can_command_a_terminal(file: Path, frames: Any) -> None:
    def command(name: str, value: Any) -> str | None:
        return f"{value}\x1b[2J" if isinstance(value, str) else None

    assert refused(file, frames, command) > 50


def test_no_record_belongs_to_a_session_of_another_name(file: Path, frames: Any) -> None:
    def elsewhere(name: str, value: Any) -> str | None:
        return "elsewhere" if name in {"session_id", "root_id"} and value is not None else None

    # The feed and the history of the state also name sessions that were deleted.
    assert refused(file, frames, elsewhere, but=(EventRecord, StateEventRecord)) > 15


def test_spend_that_cannot_be_added_up_is_refused(file: Path, frames: Any) -> None:
    [spend] = [each for each in frames if isinstance(each, SpendRecord)]
    place = frames.index(spend)
    # Each of them is allowed; together they are more than a column can hold.
    spends = [
        msgspec.structs.replace(spend, id=f"spend {number}", nano_usd=2**53)
        for number in range(1_025)
    ]
    craft(file, [*frames[:place], *spends, *frames[place + 1 :]])
    with (
        open_at({"url": "sqlite://"}) as store,
        pytest.raises(CorruptRecord, match="the total of spend is too large"),
    ):
        store.import_sessions(file)


def test_salts_without_end_are_refused(file: Path, frames: Any) -> None:
    craft(file, changed(frames, SaltsRecord, salts=[f"{number:064x}" for number in range(65)]))
    with (
        open_at({"url": "sqlite://"}) as store,
        pytest.raises(CorruptRecord, match="too many salts"),
    ):
        store.import_sessions(file)


@pytest.mark.parametrize("body", [b"\xd9\x01a", b"\xcd\x00\x01", b"\xca\x3f\x80\x00\x00"])
def test_a_value_that_is_not_written_as_we_do_is_refused(file: Path, body: bytes) -> None:
    craft(file, [LineRecord(1, []), ItemsRecord(1, 0, 1, body)])
    with (
        open_at({"url": "sqlite://"}) as store,
        pytest.raises(CorruptRecord, match="item is not written as this Holdfast writes it"),
    ):
        store.import_sessions(file)


def test_a_value_that_is_too_large_for_the_store_is_refused(place: Any, file: Path) -> None:
    with open_at({"url": "sqlite://"}) as source:
        source.session("s").save(text="x" * 2_000)
        source.export(file)
    with open_at(place, limits=Limits(value_bytes=1_500)) as store:
        with pytest.raises(LimitExceeded, match="1,500"):
            store.import_sessions(file)
        assert store.sessions() == []


# More than fits.

LIMITED = """
import resource, sys
import holdfast
url, file = sys.argv[1:]
with holdfast.open(url, durability="normal") as store:
    store.session("warm").save(a=1)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    most = used + 32 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    imported = store.import_sessions(file)
print(imported.sessions, imported.checkpoints)
"""


def test_an_import_larger_than_memory_works(tmp_path: Path, file: Path) -> None:
    text = "x" * 500_000
    with open_at({"url": "sqlite://"}) as store:
        for session in range(3):
            handle = store.session(f"s{session}")
            for turn in range(50):
                handle.append("transcript", [f"{turn} {text}"])
        store.export(file)
    assert file.stat().st_size > 2 * 32 * 2**20
    command = [sys.executable, "-c", LIMITED, f"sqlite:///{tmp_path}/target.db", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout.split() == ["3", "150"], ended.stderr
