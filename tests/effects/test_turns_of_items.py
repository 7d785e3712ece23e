"""Any turn of a work item, killed anywhere, and run again by a retry or a redrive of the item.

The plans, the tools and what is compared are those of `test_turns`; the calls are the item's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import holdfast
from holdfast import Unresolved
from tests.crash.children import run
from tests.effects.test_turns import TURN, TURNS, Life, Plan, Trial, rules

STEPS = st.tuples(
    st.sampled_from(["turn", "release", "redrive", "save", "rewind"]), st.integers(0, 5)
)


@dataclass(frozen=True)
class ItemPlan(Plan):
    """A plan of an item."""

    in_session: bool = False


PLANS = st.builds(
    ItemPlan,
    turns=st.lists(TURNS, min_size=1, max_size=3),
    before=st.lists(STEPS, max_size=5),
    last=st.integers(0, 5),
    death=st.integers(0, 10_000),
    in_session=st.booleans(),
)


@dataclass
class ItemLife(Life):
    """One process that holds an item, or the one that was redriven for it."""

    plan: ItemPlan
    redrives: bool = False

    def begin(self, store: holdfast.Store) -> Any:
        """Do what comes before the last turn; return the held item."""
        session = store.session(self.name) if self.plan.in_session else None
        version = session.save(n=0).version if session is not None else 0
        store.work.submit(self.name, session=session, max_retries=100)
        item = self.claimed(store)
        for number, (what, choice) in enumerate(self.plan.before, 1):
            match what:
                case "turn":
                    self.turn(store, item, choice)
                case "release":
                    item.release()
                    item = self.claimed(store)
                case "redrive":
                    item = self.redriven(store, item)
                case "save" if session is not None:
                    version = session.save(n=number).version
                case "rewind" if session is not None:
                    version = session.rewind(1 + choice % version).version
                    item = self.claimed(store)
        return item

    def claimed(self, store: holdfast.Store) -> Any:
        """Claim the item that is ready."""
        store.work.sweep()
        self.clock.advance(600)
        store.work.promote()
        [item] = store.work.claim(self.name, queues=self.name)
        return item

    def redriven(self, store: holdfast.Store, item: Any) -> Any:
        """Let an item fail for good, and claim the one that is submitted for it."""
        item.fail("no", retry=False)
        store.work.redrive(item.id)
        return self.claimed(store)

    def turn(self, store: holdfast.Store, item: Any, choice: int) -> list[str]:
        """Call the tools of a turn for the item; every second one by a key of its own."""
        turn, tools = choice % len(self.plan.turns), self.tools()
        return [
            self.called(store, item, f"t{turn} c{number}", tools[name], f"{text} of {self.name}")
            for number, (name, text) in enumerate(self.plan.turns[turn])
        ]

    def called(self, store: holdfast.Store, item: Any, id: str, tool: Any, what: str) -> str:
        """Make a call; what is in doubt is looked up in the world, and called again."""
        for _ in range(2):
            try:
                if tool.name == "note":
                    return str(item.once(id, tool, request={"what": what}).value)
                return str(item.call(tool, what=what, call_id=id).value)
            except Unresolved as doubt:
                found = store.effect(str(doubt.effect_id))
                verdict = self.verify({}, found.idempotency_key)
                store.resolve(found.id, verdict, by="somebody who looked")
        raise AssertionError("what was resolved is in doubt no more")

    def go_on(self, id: str, say: Callable[[str], None]) -> None:
        """Let another process hold the item, or redrive it, and run its last turn twice."""
        self.points.is_armed = False
        with self.open() as store:
            item = self.claimed(store)
            if self.redrives:
                item = self.redriven(store, item)
            said = self.turn(store, item, self.plan.last)
            known = [self.known(store, id)]
            assert self.turn(store, item, self.plan.last) == said
            known.append(self.known(store, id))
        say(json.dumps([said, known[0] == known[1]]))

    def known(self, store: holdfast.Store, id: str) -> list[Any]:
        """Return all that may not change when a turn is run again that was completed."""
        events = store.events(self.name) if self.plan.in_session else []
        return [self.path.read_text(), store.effects(limit=1000), events]


class ItemTrial(Trial):
    """Both ways through plans, by items of one store."""

    redrives = False

    def life(self, *given: Any, **more: Any) -> ItemLife:
        """Return a process of this trial."""
        plain: Any = super().life(*given, **more)
        fields = (plain.place, plain.name, plain.path, plain.plan, plain.clock)
        return ItemLife(*fields, redrives=self.redrives)


@pytest.fixture(params=["retried", "redriven"])
def trial(place: dict[str, Any], tmp_path: Any, request: pytest.FixtureRequest) -> ItemTrial:
    """A store of its own, made by a child: nobody forks with a store open."""
    assert run(lambda say: holdfast.open(**place).close())[0] == 0
    made = ItemTrial(place, tmp_path)
    made.redrives = request.param == "redriven"
    return made


@given(plan=PLANS)
@example(ItemPlan([TURN], [], 0, death=10_000))
@example(ItemPlan([TURN, [("mail", "v1")]], [("turn", 0), ("redrive", 0)], 1, death=3))
@example(ItemPlan([TURN], [("turn", 0), ("save", 0), ("rewind", 0)], 0, death=5, in_session=True))
@rules(8, derandomize=True)
def test_any_turn_of_an_item_killed_anywhere_and_run_again(
    trial: ItemTrial, plan: ItemPlan
) -> None:
    trial.check(plan)


@pytest.mark.slow
@given(plan=PLANS)
@rules(500, derandomize=False)
def test_any_turn_of_an_item_killed_anywhere_and_run_again_for_long(
    trial: ItemTrial, plan: ItemPlan
) -> None:
    trial.check(plan)
