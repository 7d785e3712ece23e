"""Effects travel with their session, so that a moved session repeats nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.ciphers import AesGcm
from holdfast.effects.portable import EffectRecord
from holdfast.errors import CorruptRecord
from holdfast.kernel.operation import rows
from holdfast.kernel.portable import Record
from holdfast.portable.transfer import check
from holdfast.store import NOUNS

calls: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sessions.export"


def open_at(place: dict[str, Any], **arguments: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal", **arguments)


@holdfast.tool(effect="mutate", undo=lambda args, result, key: calls.append(("undo", result)))
def charge(cents: int) -> dict[str, int]:
    calls.append(cents)
    return {"cents": cents}


@holdfast.tool(effect="mutate")
def lose(cents: int) -> None:
    calls.append(cents)
    raise ConnectionError("no answer")


@holdfast.tool(effect="mutate", on_unknown="retry")
def stumble(cents: int) -> None:
    calls.append(cents)
    raise ConnectionError("no answer")


def fill(store: holdfast.Store) -> None:
    session = store.session("trip")
    session.save(a=1)
    session.call(charge, cents=1, call_id="call 1")
    assert session.call(charge, cents=0).value == {"cents": 0}
    with pytest.raises(holdfast.Unresolved):
        session.call(lose, cents=2)
    with pytest.raises(ConnectionError):
        session.call(stumble, cents=3)
    with pytest.raises(ConnectionError):
        session.call(stumble, cents=3)
    begun = session.begin(charge, {"cents": 4})
    assert isinstance(begun, holdfast.Issued)
    session.save(a=2)


def seen(store: holdfast.Store) -> list[dict[str, Any]]:
    """What can be seen of effects, without what belongs to one database alone."""
    found = [asdict(effect) for effect in store.effects()]
    for effect in found:
        for name in ("number", "lease_expires_at", "takeover_at"):
            del effect[name]
    return found


def test_effects_and_attempts_arrive_as_they_were(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        fill(store)
        assert store.export(file, ["trip"]).effects == 6
        imported = target.import_sessions(file)
        assert (imported.effects, imported.notes) == (6, ())
        assert seen(target) == seen(store)
        session = target.session("trip")
        assert len(target.effects(session=session)) == 6


def test_a_moved_session_repeats_nothing(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        fill(store)
        store.export(file)
        target.import_sessions(file)
        calls.clear()
        session = target.session("trip")
        assert session.call(charge, cents=1, call_id="call 1").replayed
        assert session.call(charge, cents=0).value == {"cents": 0}
        with pytest.raises(holdfast.Unresolved):
            session.call(lose, cents=2)
        # The attempt under way arrives without an owner, so it is in doubt at once.
        with pytest.raises(holdfast.Unresolved):
            session.call(charge, cents=4, wait_seconds=0)
        assert [effect.tool for effect in session.unresolved()] == ["lose", "charge"]
        assert calls == []
        undone = session.compensate(to=1)
        assert [effect.result for effect in undone.undone] == [{"cents": 0}, {"cents": 1}]


def test_a_receiver_is_given_the_same_key_wherever_a_session_was_moved_to(
    place: Any, other: Any, file: Path
) -> None:
    """A store that was lost may have made the call already: its receiver knows it by that key."""

    def act(store: holdfast.Store) -> list[str]:
        session = store.session("s")
        made = [session.fork(1, id="f").call(charge, cents=2), session.call(charge, cents=2)]
        return [store.effect(each.effect_id).idempotency_key for each in made]

    with open_at(place) as source:
        session = source.session("s")
        session.append("log", [1])
        session.call(charge, cents=1)
        source.export(file)
        keys = act(source)
    with open_at(other) as target:
        target.import_sessions(file)
    with open_at(other) as target:
        assert act(target) == keys


def test_a_fork_still_knows_what_its_origin_did(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        fill(store)
        store.session("trip").fork(2, id="fork")
        store.export(file, ["fork"])
        target.import_sessions(file)
        calls.clear()
        assert target.session("fork").call(charge, cents=1).replayed
        assert calls == []


def test_a_fork_of_one_that_was_rewound_below_its_beginning_moves(
    place: Any, other: Any, file: Path
) -> None:
    with open_at(place) as store, open_at(other) as target:
        session = store.session("trip")
        for n in range(3):
            session.save(n=n)
        session.rewind(2)
        session.save(n=3)
        session.call(charge, cents=1)
        session.save(n=4)
        fork = session.fork(6, id="fork")
        fork.rewind(1)
        fork.fork(7, id="deeper")
        store.export(file, ["deeper"])
        target.import_sessions(file)
        assert target.session("deeper").call(charge, cents=1).replayed
        assert calls == [1]


def test_a_fork_knows_it_also_when_the_origin_is_gone(
    place: Any, other: Any, file: Path, tmp_path: Path
) -> None:
    with open_at(place) as store, open_at(other) as target:
        fill(store)
        fork = store.session("trip").fork(2, id="fork")
        fork.save(b=1)
        fork.fork(3, id="fork of fork")
        store.session("trip").delete(force=True)
        store.export(file, ["fork"])
        store.export(tmp_path / "both", ["fork of fork"])
        with pytest.raises(holdfast.InvalidArgument, match="applies beyond its own sessions"):
            target.import_sessions(tmp_path / "both")
        target.import_sessions(tmp_path / "both", store_keys=True)
        calls.clear()
        for id in ("fork", "fork of fork"):
            assert target.session(id).call(charge, cents=1).replayed
        # Once more, from where it came to: numbers of sessions that are gone are no session's.
        target.export(tmp_path / "again")
        for id in ("fork of fork", "fork"):
            store.session(id).delete()
            target.session(id).delete()
        # The six that were made, and what answered each fork.
        assert store.import_sessions(tmp_path / "again", store_keys=True).effects == 8
        assert target.import_sessions(file, store_keys=True).effects == 6
        assert store.session("fork of fork").call(charge, cents=1).replayed
        assert target.session("fork").call(charge, cents=1).replayed
        assert calls == []
        for each in (store, target):
            assert len([effect for effect in each.effects() if effect.replay_of is None]) == 6


def test_a_session_that_was_deleted_comes_back_to_its_own_effects(place: Any, file: Path) -> None:
    with open_at(place) as store:
        fill(store)
        store.export(file)
        store.session("trip").delete(force=True)
        before = seen(store)
        store.import_sessions(file)
        assert seen(store) == before
        calls.clear()
        session = store.session("trip")
        assert session.call(charge, cents=1, call_id="call 1").replayed
        session.rewind(2)
        assert session.call(charge, cents=0).replayed
        assert calls == []


def test_a_key_that_is_known_here_goes_on_counting(
    place: Any, other: Any, file: Path, tmp_path: Path
) -> None:
    with open_at(place) as store, open_at(other) as target:
        fill(store)
        store.export(file)
        target.import_sessions(file)
        for each in (store, target):
            with pytest.raises(ConnectionError):
                each.session("trip").call(stumble, cents=3)
        target.session("trip").delete(force=True)
        store.export(tmp_path / "newer")
        target.import_sessions(tmp_path / "newer")
        assert target.run(read_generations) == [1, 2, 3, 4]


def test_a_replay_arrives_as_one_that_only_its_call_id_finds(
    place: Any, other: Any, file: Path
) -> None:
    with open_at(place) as store, open_at(other) as target:
        session = store.session("trip")
        session.call(charge, cents=1, call_id="call 1")
        assert session.call(charge, cents=1, call_id="call 2").replayed
        store.export(file)
        target.import_sessions(file)
        found = target.run(lambda tx: rows("SELECT generation, replay_of FROM hf_effects"))
        assert [row["generation"] for row in found] == [1, 0]
        assert [row["replay_of"] is None for row in found] == [True, False]


def test_effects_of_a_session_that_is_gone_arrive_unlinked(
    place: Any, other: Any, file: Path, tmp_path: Path
) -> None:
    with open_at(place) as store, open_at(other) as target:
        session = store.session("trip")
        session.save(a=1)
        session.call(charge, cents=1)
        session.fork(1, id="fork")
        store.export(file)
        target.import_sessions(file)
        session.call(charge, cents=2)
        for each in (store, target):
            each.session("trip").delete()
        target.session("fork").delete()
        store.export(tmp_path / "newer")
        target.import_sessions(tmp_path / "newer", store_keys=True)
        assert len(target.effects()) == 2
        assert all(effect.unlinked_at is not None for effect in target.effects())


@pytest.mark.parametrize("id", ["global", "item:a", "session:a", "once:a", "a:b"])
def test_no_session_s_id_is_taken_for_another_scope(place: Any, id: str) -> None:
    @holdfast.tool(effect="mutate", dedupe="global")
    def everywhere(cents: int) -> int:
        calls.append(cents)
        return cents

    with open_at(place) as store:
        store.session("s").call(everywhere, cents=1)
        session = store.session(id)
        session.call(charge, cents=1, call_id="call 1")
        effect = store.effects(session=session)[0]
        assert effect.key.startswith(f"session:{id}:")
        assert session.call(charge, cents=1, call_id="call 1").replayed
        assert calls == [1, 1]


def read_generations(tx: holdfast.Transaction) -> holdfast.Op[list[int]]:
    found = yield from rows(
        "SELECT generation FROM hf_effects WHERE tool = 'stumble' ORDER BY number"
    )
    return [row["generation"] for row in found]


def test_effects_are_sealed_anew(place: Any, other: Any, file: Path) -> None:
    cipher = AesGcm({"k": bytes(range(32))}, current="k")
    newer = AesGcm({"k": bytes(range(32)), "n": bytes(range(1, 33))}, current="n")
    with open_at(place, cipher=cipher) as store, open_at(other, cipher=newer) as target:
        fill(store)
        store.export(file)
        assert b"no answer" not in file.read_bytes()
        target.import_sessions(file)
        assert seen(target) == seen(store)


def effect_frame(**changes: Any) -> EffectRecord:
    fields: dict[str, Any] = dict.fromkeys(EffectRecord.__struct_fields__)
    fields |= {"id": "e", "status": "completed", "ended_at": 1, "generation": 1}
    fields |= {"session_number": 1, "session_id": "s", "scope": "session:s", "key": "session:s:1"}
    return EffectRecord(**{**fields, **changes})


class Frames:
    """A source of a few frames."""

    label = "frames"

    def __init__(self, *frames: Record) -> None:
        self._frames = frames

    def notes(self) -> tuple[str, ...]:
        return ()

    def records(self) -> Iterator[Record]:
        yield from self._frames


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([effect_frame(), effect_frame()], "comes twice"),
        ([effect_frame(status="issued")], "an end that does not fit its status"),
        ([effect_frame(ended_at=None)], "an end that does not fit its status"),
        ([effect_frame(undoes="f", key="undo:g")], "does not undo the effect that its key names"),
        ([effect_frame(undoes="f")], "does not undo the effect that its key names"),
        ([effect_frame(undone_by="f")], "effect 'f' is referred to but is not in the file"),
        ([effect_frame(generation=0)], "has no generation"),
    ],
)
def test_effects_that_are_not_in_order_are_refused(frames: list[Record], problem: str) -> None:
    from holdfast.codec import Codec

    with pytest.raises(CorruptRecord, match=problem):
        list(check(NOUNS, Codec(), Frames(*frames)))


def test_effects_of_an_item_that_is_not_in_the_file_count_beyond_it() -> None:
    from holdfast.codec import Codec

    of_item = {
        "session_number": None,
        "session_id": None,
        "scope": "item:i",
        "key": "item:i:once:k",
    }
    with pytest.raises(holdfast.InvalidArgument, match="effect 'e' with the key 'item:i:once:k'"):
        list(check(NOUNS, Codec(), Frames(effect_frame(**of_item))))


def test_effects_of_a_tree_are_listed_where_it_arrives(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        for id, parent in (("trip", None), ("hotel", "trip"), ("room", "hotel")):
            store.session(id, parent=parent).call(charge, cents=len(id))
        store.export(file, ["trip"])
        # There, the numbers of the sessions are others.
        target.session("first")
        target.import_sessions(file)
        expected = [effect.id for effect in store.effects(root="trip")]
        assert len(expected) == 3
        assert sorted(effect.id for effect in target.effects(root="trip")) == sorted(expected)
        target.find_session("room").delete(force=True)
        assert len(target.effects(root="trip")) == 2
