"""How PostgreSQL finds a call in a new database, before any table was analyzed."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.kernel.operation import Handle, Op, Sync, one, operation
from holdfast.peers import answers, asks, pauses, settlement
from tests.checkpoints.looking import plan_for_any

STATEMENTS = {
    "settle": settlement.SETTLE_OPEN,
    "settle what is due": settlement.SETTLE_DUE,
    "count": pauses.COUNT_ANSWER,
    "progress": asks.SET_PROGRESS,
    "late": answers.KEEP_LATE,
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_call_is_found_by_its_id(postgres_dsn: str, namespace: str, name: str) -> None:
    """Not among all calls of its state, of which there may be many."""
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        store.session("s").ask("peer")
        plan = "\n".join(plan_for_any(postgres_dsn, namespace, STATEMENTS[name]))
    assert "hf_asks_id_key" in plan, plan
    assert "ix_asks" not in plan, plan


class Probe(Handle[Sync]):
    """Looks at a write from inside."""

    @operation
    def seqscan(self) -> Op[str]:
        """Return the planner's setting."""
        row = yield from one("SELECT current_setting('enable_seqscan') AS it")
        assert row is not None
        return str(row["it"])


def test_a_write_scans_no_table_that_has_an_index(postgres_dsn: str, namespace: str) -> None:
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        assert Probe(store.runtime).seqscan() == "off"
