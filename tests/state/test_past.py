"""Reads of the past look at the steps of their keys, not at the whole history."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.kernel.operation import rows
from holdfast.state import read


@pytest.mark.parametrize("sql", [read.READ_KEY_AT, read.READ_CHANGED_SINCE])
def test_the_history_is_read_along_its_keys(sql: str) -> None:
    def plan(tx: holdfast.Transaction) -> holdfast.Op[list[dict[str, Any]]]:
        return (yield from rows(f"EXPLAIN QUERY PLAN {sql}", root_id="r", key="k", at=5))

    with holdfast.open("sqlite://") as store:
        steps = [row["detail"] for row in store.run(plan)]
    history = [step for step in steps if step.split()[1] in {"last", "at_last", "m", "step", "h"}]
    assert len(history) == 4
    assert all("key=?" in step and "sequence" in step for step in history)
