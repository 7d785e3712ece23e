"""Reads of the past look at the steps of their keys, not at the whole history."""

from __future__ import annotations

import random
from typing import Any

import pytest

import holdfast
from holdfast.kernel.operation import rows
from holdfast.state import read
from holdfast.testing.subject import Subject, done
from tests.conftest import InColour


@pytest.mark.parametrize("sql", [read.READ_KEY_AT, read.READ_CHANGED_SINCE])
def test_the_history_is_read_along_its_keys(sql: str) -> None:
    def plan(tx: holdfast.Transaction) -> holdfast.Op[list[dict[str, Any]]]:
        return (yield from rows(f"EXPLAIN QUERY PLAN {sql}", root_id="r", key="k", at=5))

    with holdfast.open("sqlite://") as store:
        steps = [row["detail"] for row in store.run(plan)]
    history = [step for step in steps if step.split()[1] in {"last", "at_last", "m", "step", "h"}]
    assert len(history) == 4
    assert all("key=?" in step and "sequence" in step for step in history)


def test_pages_of_the_past_are_what_a_snapshot_was(place: dict[str, Any]) -> None:
    chance = random.Random(7)
    with holdfast.open(**place) as store:
        state = store.session("root").state
        for _ in range(120):
            key = f"{chance.choice('ab')}{chance.randrange(12):02}"
            if state.get(key) is not None and chance.random() < 0.3:
                state.delete(key)
            elif chance.random() < 0.5:
                state.set(key, chance.randrange(100))
            else:
                state.increment(key, 1)
        for at in range(state.version() + 1):
            past = state.snapshot(at)
            for prefix in ("", "b"):
                found: list[holdfast.Entry] = []
                span: dict[str, Any] = {"prefix": prefix, "limit": 5, "at_sequence": at}
                while page := state.entries(
                    **span, after=found[-1].key if found else None, values=True
                ):
                    found += page
                wanted = {key: value for key, value in past.document.items() if key >= prefix}
                assert {each.key: each.value for each in found} == wanted
                for each in found:
                    told = (each.version, each.updated_by, each.updated_at)
                    assert told == tuple(
                        known[each.key] for known in (past.versions, past.writers, past.times)
                    )
        with pytest.raises(holdfast.InvalidArgument):
            state.entries(at_sequence=-1)
        with pytest.raises(holdfast.HoldfastError):
            state.entries(at_sequence=1_000)
        state.compact(50)
        with pytest.raises(holdfast.Compacted):
            state.entries(at_sequence=49)
        assert {each.key for each in state.entries(at_sequence=50)} == set(
            state.snapshot(50).document
        )


def test_a_compaction_is_an_event_if_it_removes_anything(in_colour: InColour) -> None:
    async def case(subject: Subject) -> None:
        store = await subject.open()
        child = await done(store.session("child", parent=await done(store.session("root"))))
        for number in range(3):
            await done(child.state.set("k", number))
        for before in (2, 2, 1, 3):
            await done(child.state.compact(before))
        *_, second, third = await done(store.events("root"))
        assert [(each.kind, each.session_id, each.data) for each in (second, third)] == [
            ("state_compacted", "root", {"before": 2}),
            ("state_compacted", "root", {"before": 3}),
        ]
        assert second.position == 6

    in_colour(case)


def test_a_reason_is_told_by_the_feed_and_the_audit_trail(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        state = store.session("root").state
        state.set("k", 1)
        for wrong in ("", " " * 2_000, 5):
            with pytest.raises(holdfast.InvalidArgument):
                state.set("k", 2, reason=wrong)  # type: ignore[arg-type]
        with pytest.raises(holdfast.VersionConflict):
            state.set("k", 2, if_version=7, reason="a typing error")
        assert (state.get("k"), store.audit.list()) == (1, [])
        state.set("k", 2, if_version=1, reason="a typing error")
        first, second = store.events("root")[-2:]
        assert ("reason" in first.data, second.data["reason"]) == (False, "a typing error")
        [told] = store.audit.list()
        assert (told.action, told.subject, told.reason) == ("state_set", "root k", "version 2")
