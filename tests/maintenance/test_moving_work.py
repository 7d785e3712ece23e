"""Work items and spend travel with their session; what a tree leaves behind is cancelled."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.cli.app import run
from holdfast.effects.portable import EffectRecord
from holdfast.kernel.operation import rows
from holdfast.portable import file as format
from holdfast.sessions.portable import SessionRecord
from holdfast.spend.portable import SpendRecord
from holdfast.store import NOUNS
from holdfast.testing.crashes import CrashPoints
from holdfast.work.portable import AttemptRecord, ItemRecord


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sessions.export"


def open_at(place: dict[str, Any], **arguments: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal", **arguments)


def fill(store: holdfast.Store) -> dict[str, str]:
    """Items in every state, and spend in every state; returns the ids of the items by state."""
    session = store.session("s")
    child = store.session("c", parent=session)
    ids = {}
    for name in ("completed", "failed", "cancelled", "in_progress", "pending"):
        ids[name] = store.work.submit(name, {"name": name}, session=child).id
    later = store.work.submit("later", 1, session=session, delay_seconds=3600)
    ids["scheduled"] = later.id
    for name in ("completed", "failed", "in_progress"):
        (item,) = store.work.claim("w", queues=[name])
        if name == "completed":
            item.complete({"out": 1})
        elif name == "failed":
            item.fail("broken", retry=False)
    store.work.cancel(ids["cancelled"])
    session.spend("m", usd="1.5", input_tokens=10, output_tokens=5, details={"why": "x"})
    child.spend("m", usd="0.25", state="open")
    child.spend("n", source="tool", usd=None, state="uncertain")
    return ids


def spent(store: holdfast.Store) -> list[Any]:
    found: list[Any] = []
    for id in ("s", "c"):
        session = store.find_session(id)
        found += [session.spent(), session.spent(tree=True)]
        found += [(each.id, each.state, each.details, each.usd) for each in session.spends()]
    return found


def test_a_moved_session_has_its_spend_and_its_work(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        ids = fill(store)
        exported = store.export(file)
        assert (exported.items, exported.spends) == (6, 3)
        imported = target.import_sessions(file)
        assert (imported.items, imported.spends) == (6, 3)
        assert spent(target) == spent(store)
        assert target.find_session("s").spent(tree=True).usd == Decimal("1.75")
        for name in ("completed", "failed", "cancelled"):
            there, here = store.work.get(ids[name]), target.work.get(ids[name])
            names = ("fence", "number", "heartbeat_at", "lease_acquired_at", "last_holder")
            left = dict.fromkeys(names)
            assert {**here.to_dict(), **left} == {**there.to_dict(), **left}
        for name in ("in_progress", "pending", "scheduled"):
            item = target.work.get(ids[name])
            assert (item.status, item.waits_for, item.holder) == ("pending", "review", None)
            assert item.session_id == store.work.get(ids[name]).session_id
            assert item.fence > store.work.get(ids[name]).fence
            assert "imported unfinished" in target.work.why(item.id)
        assert target.work.claim("w") == []
        assert target.work.retry(ids["in_progress"]).waits_for is None
        (claimed,) = target.work.claim("w")
        assert claimed.input == {"name": "in_progress"}
        claimed.complete()


def test_moving_cancels_what_stays_behind(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        ids = fill(store)
        (running,) = store.work.list(status="in_progress")
        store.session("elsewhere").save(a=1)
        assert store.export(file, ["c"], move=True).moved == ("s",)
        for name in ("in_progress", "pending", "scheduled"):
            assert store.work.get(ids[name]).status == "cancelled"
        assert running.status == "in_progress"
        assert {info.id: info.status for info in store.sessions()} == {
            "s": "cancelled", "c": "cancelled", "elsewhere": "active",
        }  # fmt: skip
        target.import_sessions(file)
        assert {info.status for info in target.sessions()} == {"active"}
        assert target.work.get(ids["pending"]).waits_for == "review"


@pytest.fixture
def written(place: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that names sessions to be written to once, when an export is whole."""
    ended = format.ExportWriter.end
    waiting: list[str] = []

    def end(self: format.ExportWriter) -> None:
        ended(self)
        with open_at(place) as store:
            while waiting:
                store.find_session(waiting.pop()).save(late=True)

    monkeypatch.setattr(format.ExportWriter, "end", end)
    return waiting.extend


def move_all(place: Any, file: Path) -> None:
    with open_at(place) as store:
        store.export(file, move=True)


def move_all_async(place: Any, file: Path) -> None:
    async def move() -> None:
        async with await holdfast.aopen(**place) as store:
            await store.export(file, move=True)

    asyncio.run(move())


@pytest.mark.parametrize("move", [move_all, move_all_async])
def test_no_tree_is_moved_if_one_was_written_to_meanwhile(
    place: Any, file: Path, written: Any, move: Any
) -> None:
    with open_at(place) as store:
        ids = fill(store)
        for name in ("a", "t", "z"):
            store.session(name).save(a=1)
        written(["c", "t"])
        with pytest.raises(holdfast.SessionBusy) as raised:
            move(place, file)
        assert str(raised.value) == (
            "2 trees were written to during the export: 's', 't'. Nothing was moved, and no file "
            "was left: every tree continues here. Stop what drives them and export again"
        )
        assert {info.status for info in store.sessions()} == {"active"}
        assert store.work.get(ids["pending"]).status == "pending"
        assert list(file.parent.glob("sessions*")) == []
        assert store.export(file, move=True).moved == ("a", "s", "t", "z")
        assert {info.status for info in store.sessions()} == {"cancelled"}


@pytest.mark.parametrize(
    ("error", "step"),
    [(KeyboardInterrupt, 1), (SystemExit, 5), pytest.param(SystemExit, 1, marks=pytest.mark.slow)],
)
def test_a_move_that_is_interrupted_leaves_no_file(
    place: Any, file: Path, error: type[BaseException], step: int
) -> None:
    with open_at(place) as store:
        store.session("s").save(a=1)
        store.work.submit("step", session=store.session("c", parent="s"))

    def is_moved(die_at: int) -> bool:
        points = CrashPoints(die_at, "raise", lambda point: error())
        points.is_armed = False
        with open_at(place, hooks=points.hooks) as store:
            points.is_armed = True
            try:
                assert store.export(file, move=True).moved == ("s",)
            except error:
                assert list(file.parent.glob("*sessions*")) == []
            points.is_armed = False
            statuses = {info.status for info in store.sessions()}
            assert len(statuses) == 1
            if "cancelled" in statuses:
                for id in ("s", "c"):
                    store.session(id, reopen=True)
        return file.exists()

    assert next(die_at for die_at in count(1, step) if is_moved(die_at)) > 20


def test_the_command_line_names_the_trees_that_were_written_to(
    place: Any, file: Path, written: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for name, value in place.items() for option in (f"--{name}", value)]
    with open_at(place) as store:
        store.session("a").save(a=1)
        store.session("b").save(a=1)
    written(["b"])
    command = ["export", str(file), "--move", *options]
    assert run(command) == holdfast.SessionBusy.exit_code
    said = capsys.readouterr().err
    assert "1 tree was written to during the export: 'b'. Nothing was moved" in said
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["moved"] == ["a", "b"]


def test_the_async_store_moves_too(place: Any, other: Any, file: Path) -> None:
    async def move() -> None:
        async with await holdfast.aopen(**place) as store:
            assert (await store.export(file, move=True)).moved == ("s",)
        async with await holdfast.aopen(**other) as target:
            assert (await target.import_sessions(file)).items == 6

    with open_at(place) as store:
        fill(store)
    asyncio.run(move())


def test_a_move_cancels_the_items_of_sessions_that_have_ended_too(place: Any, file: Path) -> None:
    with open_at(place) as store:
        store.session("s")
        child = store.session("child", parent="s")
        item = store.work.submit("step", session=child)
        child.end()
        store.export(file, move=True)
        assert store.work.get(item.id).status == "cancelled"
        assert store.work.claim("w") == []


def test_what_deleted_sessions_of_a_tree_spent_moves_with_it(
    place: Any, other: Any, file: Path, tmp_path: Path
) -> None:
    with open_at(place) as store, open_at(other) as target:
        root = store.session("p")
        child = store.session("c", parent=root)
        child.spend("m", usd=1, id="first", details={"why": "x"})
        child.delete()
        store.session("c", parent=root).spend("m", usd=4, id="second")
        store.session("d", parent=root).spend("n", state="uncertain", id="third")
        store.find_session("d").delete()
        root.spend("m", usd=2, id="fourth")
        store.session("elsewhere").spend("m", usd=8)
        told = [(spend.id, spend.session_id, spend.usd, spend.state) for spend in store.spends()]
        before = root.spent(tree=True)
        assert before.usd == 7
        assert before.uncertain_attempts == 1
        assert store.export(file, ["p"], move=True).spends == 4
        assert target.import_sessions(file).spends == 4
        moved = target.find_session("p")
        assert moved.spent(tree=True) == before
        assert moved.spent().usd == 2
        assert target.find_session("c").spent().usd == 4
        here = [(spend.id, spend.session_id, spend.usd, spend.state) for spend in target.spends()]
        assert sorted(here) == sorted(each for each in told if each[1] != "elsewhere")
        target.correct_spend("third", usd="0.5")
        assert moved.spent(tree=True).usd == Decimal("7.5")
        # Back and forth, nothing is counted twice.
        again = tmp_path / "again.export"
        target.export(again, move=True)
        for id in ("c", "p"):
            store.find_session(id).delete(force=True)
        store.import_sessions(again)
        assert store.find_session("p").spent(tree=True).usd == 7


def test_spend_of_a_deleted_session_is_not_listed_as_that_of_another(
    place: Any, other: Any, file: Path
) -> None:
    with open_at(place) as store, open_at(other) as target:
        root = store.session("p")
        child = store.session("c", parent=root)
        child.spend("m", usd=1)
        child.delete()
        store.export(file)
        target.session("c").spend("m", usd=2)
        with pytest.raises(holdfast.InvalidArgument, match="spend of a deleted session 'c'"):
            target.import_sessions(file)
        assert [spend.usd for spend in target.spends()] == [2]
        target.import_sessions(file, store_keys=True)
        assert target.find_session("p").spent(tree=True).usd == 1
        assert target.find_session("c").spent(tree=True).usd == 2


def test_an_import_takes_no_spend_out_of_another_tree(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        for each, root in ((store, "p"), (target, "q")):
            child = each.session("c", parent=each.session(root))
            child.spend("m", usd=1, id="same")
            child.delete()
        store.export(file)
        with pytest.raises(holdfast.InvalidArgument, match="belongs to another session here"):
            target.import_sessions(file, store_keys=True)
        target.find_session("q").spend("m", usd=2)
        (spending,) = target.spending()
        assert target.find_session("q").spent(tree=True).usd == spending.usd == 3


def test_what_a_deleted_session_spent_is_its_own_when_it_comes_back(place: Any, file: Path) -> None:
    with open_at(place) as store:
        store.session("s").spend("m", usd=2, id="paid")
        store.export(file)
        store.find_session("s").delete(force=True)
        store.import_sessions(file)
        assert store.find_session("s").spent().usd == 2
        store.find_session("s").delete(force=True)
        # The same id is another session's by now.
        store.session("t").spend("m", usd=3, id="other")
        records = format.Format(NOUNS)
        found = list(format.ExportFile(file, store.runtime.codec, records).records())
        with file.open("wb") as opened:
            writer = format.ExportWriter(opened, store.runtime.codec, records, "crafted")
            writer.begin("nowhere")
            for each in found:
                is_spend = isinstance(each, SpendRecord)
                writer.write(msgspec.structs.replace(each, id="other") if is_spend else each)
            writer.end()
        with pytest.raises(holdfast.InvalidArgument, match="belongs to another session here"):
            store.import_sessions(file)
        assert store.find_session("t").spent().usd == 3


def test_many_items_of_a_session_keep_their_order_in_whatever_states(
    place: Any, other: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.kernel.owned_rows.ROWS_PER_PAGE", 2)
    with open_at(place) as store, open_at(other) as target:
        session = store.session("s")
        for number in range(11):
            item = store.work.submit("job", number, session=session, queue=f"queue {number % 3}")
            if number % 3 == 1:
                store.work.claim("w", queues=["queue 1"])[0].complete()
            elif number % 3 == 2:
                item.cancel()
        store.export(file)
        target.import_sessions(file)
        ids = [item.id for item in store.work.list(session=session)]
        assert [item.id for item in target.work.list(session=session)] == ids
        assert [item.id for item in target.work.list()] == ids


def test_the_attempts_of_an_item_travel_with_it(place: Any, other: Any, file: Path) -> None:
    with open_at(place) as store, open_at(other) as target:
        session = store.session("s")
        for number in range(2):
            store.work.submit("job", number, session=session, id=f"item {number}", max_retries=9)
        for number in range(3):
            for item in store.work.claim("w", limit=2):
                item.fail(f"error {number} of {item.id}", retry=True, delay_seconds=0)
        store.export(file)
        target.import_sessions(file)
        for id in ("item 0", "item 1"):
            assert [each.error for each in target.work.errors(id)] == [
                f"error {number} of {id}" for number in (2, 1, 0)
            ]
            assert target.work.errors(id) == store.work.errors(id)
        # It goes on counting behind them.
        target.work.retry("item 0")
        target.work.claim("w")[0].fail("once more")
        assert [each.attempt for each in target.work.errors("item 0")] == [4, 3, 2, 1]


LEFT_BEHIND = {
    "hf_work": {"number", "holder", "lease_acquired_at", "lease_expires_at", "heartbeat_at",
                "sweep_at", "cancel_requested", "claim_id", "last_holder", "driving_fence",
                "waits_for_effect"},
    "hf_attempts": {"work_number"},
    "hf_spend": {"number"},
    "hf_effects": {"number", "lease_expires_at", "unlinked_at", "root_above"},
    # The first turn after an import looks for a pause to close, whatever the row said.
    "hf_sessions": {"head", "holder", "lease_expires_at", "awaits_turn"},
}  # fmt: skip
NO_COLUMNS = {"hf_attempts": {"item_id"}}
RECORDS: dict[str, Any] = {
    "hf_work": ItemRecord,
    "hf_attempts": AttemptRecord,
    "hf_spend": SpendRecord,
    "hf_effects": EffectRecord,
    "hf_sessions": SessionRecord,
}


@pytest.mark.parametrize("table", RECORDS)
def test_every_column_is_moved_or_left_behind_on_purpose(table: str) -> None:
    def columns(tx: holdfast.Transaction) -> holdfast.Op[set[str]]:
        found = yield from rows(f"SELECT name FROM pragma_table_info('{table}')")
        return {row["name"] for row in found}

    moved = set(RECORDS[table].__struct_fields__) - NO_COLUMNS.get(table, set())
    with open_at({"url": "sqlite://"}) as store:
        assert store.run(columns) == moved | LEFT_BEHIND[table]


def test_a_session_that_comes_back_leaves_no_totals_under_its_old_number(
    place: Any, file: Path
) -> None:
    def totals(tx: holdfast.Transaction) -> holdfast.Op[set[str]]:
        found = yield from rows("SELECT scope FROM hf_spend_totals")
        return {row["scope"] for row in found}

    with open_at(place) as store:
        session = store.session("s")
        session.spend("m", usd="1")
        store.export(file)
        session.delete()
        store.import_sessions(file)
        back = store.find_session("s")
        assert back.spent().usd == 1
        assert store.run(totals) == {f"session {back.info().number}", "tree s"}
