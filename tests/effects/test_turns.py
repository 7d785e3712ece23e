"""Any turn, killed anywhere and run again: nothing that was completed runs, and the world is as if
it had run once.

A history (turns, saves, rewinds, forks) and a last turn are made up and run twice, in two sessions:
once without a kill, once with one. What both did to the world is compared.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Landed, NotLanded, ToolUse, Unresolved, VirtualClock
from holdfast.kernel.driver import Point
from tests.crash.children import run
from tests.effects.cases import Places

Step = tuple[str, int]
"""What to do, and with which turn or version."""
RULES: dict[str, dict[str, Any]] = {
    "read": {"effect": "read"},
    "search": {"effect": "read", "dedupe": "session"},
    "look": {"effect": "read", "dedupe": "latest"},
    "write": {"effect": "write"},
    "note": {"effect": "write", "dedupe": "session"},
    "mail": {"effect": "mutate"},
    "charge": {"effect": "mutate", "verify": True},
    "hail": {"effect": "mutate", "dedupe": "call", "verify": True},
    "publish": {"effect": "mutate", "dedupe": "global", "verify": True},
    "sign": {"effect": "mutate", "dedupe": "latest", "verify": True},
    "book": {"effect": "mutate", "verify": True, "undo": True},
}
CALLS = st.tuples(st.sampled_from(list(RULES)), st.sampled_from(["v1", "v2"]))
TURNS = st.lists(CALLS, min_size=1, max_size=6)
STEPS = st.tuples(st.sampled_from(["turn", "turn", "save", "rewind", "fork"]), st.integers(0, 5))


@dataclass(frozen=True)
class Plan:
    """What is done before the last turn, and where its process dies."""

    turns: list[list[tuple[str, str]]]
    before: list[Step]
    last: int
    death: int
    together: bool = False
    """Whether the calls of a turn are made by one `call_all`."""


PLANS = st.builds(
    Plan,
    turns=st.lists(TURNS, min_size=1, max_size=3),
    before=st.lists(STEPS, max_size=5),
    last=st.integers(0, 5),
    death=st.integers(0, 10_000),
    together=st.booleans(),
)


@dataclass
class Life:
    """One process that goes through a plan; the world is a file that outlives it."""

    place: dict[str, Any]
    name: str
    path: Path
    plan: Plan
    clock: VirtualClock
    points: Places = field(default_factory=Places)

    def act(self, tool: str, what: str, key: str) -> str:
        """Do something to the world, which can be seen from then on."""
        self.visit("before")
        with self.path.open("a") as file:
            file.write(json.dumps([tool, what, key]) + "\n")
        self.visit("after")
        return f"{tool} {what}"

    def visit(self, moment: Any) -> None:
        """Pass a place inside a tool, or die there."""
        self.points.visit(Point("statement", moment, "tool", ""))

    def verify(self, arguments: dict[str, Any], idempotency_key: str) -> Any:
        """Tell from the world whether something was done."""
        for tool, what, key in seen(self.path):
            if key == idempotency_key:
                return Landed(f"{tool} {what}")
        return NotLanded()

    def tools(self) -> dict[str, holdfast.Tool[..., Any]]:
        """Return the tools, with the rules of each."""
        return {name: self.tool(name, dict(rules)) for name, rules in RULES.items()}

    def tool(self, name: str, rules: dict[str, Any]) -> holdfast.Tool[..., Any]:
        def undo(arguments: dict[str, Any], result: Any, idempotency_key: str) -> str:
            return self.act(f"undo {name}", arguments["what"], idempotency_key)

        def function(what: str, *, idempotency_key: str) -> str:
            return self.act(name, what, idempotency_key)

        hooks = {"verify": self.verify, "undo": undo}
        rules |= {hook: made for hook, made in hooks.items() if rules.get(hook)}
        return holdfast.tool(name=name, **rules)(function)

    def open(self) -> holdfast.Store:
        given: Any = {**self.place, "clock": self.clock, "hooks": self.points.hooks}
        return holdfast.open(**given, durability="normal")

    def begin(self, store: holdfast.Store) -> Any:
        """Do what comes before the last turn; return the session that it is for."""
        session = store.session(f"{self.name}.0")
        versions = session.save(n=0).version
        for number, (what, choice) in enumerate(self.plan.before, 1):
            version = 1 + choice % versions
            match what:
                case "turn":
                    self.turn(store, session, choice)
                case "save":
                    versions = session.save(n=number).version
                case "rewind":
                    versions = session.rewind(version).version
                case "fork":
                    session = session.fork(version, id=f"{self.name}.{number}")
                    versions = version
        return session

    def turn(self, store: holdfast.Store, session: Any, choice: int) -> list[str]:
        """Call the tools of a turn; what is in doubt is looked up in the world."""
        turn, tools = choice % len(self.plan.turns), self.tools()
        uses = [
            ToolUse(tools[name], {"what": f"{text} of {self.name}"}, f"t{turn} c{number}")
            for number, (name, text) in enumerate(self.plan.turns[turn])
        ]
        if self.plan.together:
            answers = zip(uses, session.call_all(uses), strict=True)
            return [self.settled(store, session, use, answer) for use, answer in answers]
        said = []
        for use in uses:
            try:
                answer = session.call_with(use.tool, use.arguments, call_id=use.call_id)
            except Unresolved as doubt:
                answer = doubt
            said.append(self.settled(store, session, use, answer))
        return said

    def settled(self, store: holdfast.Store, session: Any, use: ToolUse, answer: Any) -> str:
        """Return what a call said; one in doubt is looked up in the world, and made again."""
        if isinstance(answer, Unresolved):
            found = store.effect(answer.effect_id)
            # Equal calls of one turn are one effect, which is resolved once.
            if found.status == "unknown":
                verdict = self.verify({}, found.idempotency_key)
                store.resolve(found.id, verdict, by="somebody who looked")
            answer = session.call_with(use.tool, use.arguments, call_id=use.call_id)
        if isinstance(answer, Exception):
            raise answer
        return str(answer.value)

    def live(self, say: Callable[[str], None]) -> None:
        """Go through the plan, and tell how many places the last turn has."""
        self.points.is_armed = False
        with self.open() as store:
            session = self.begin(store)
            say(session.id)
            self.points.is_armed = True
            self.turn(store, session, self.plan.last)
            self.points.is_armed = False
            say(str(len(self.points.points)))

    def go_on(self, id: str, say: Callable[[str], None]) -> None:
        """Run the last turn again, whole, and once more; tell what was said and what changed."""
        self.points.is_armed = False
        with self.open() as store:
            session = store.find_session(id)
            said = self.turn(store, session, self.plan.last)
            known = [self.known(store, id)]
            assert self.turn(store, session, self.plan.last) == said
            known.append(self.known(store, id))
        say(json.dumps([said, known[0] == known[1]]))

    def known(self, store: holdfast.Store, id: str) -> list[Any]:
        """Return all that may not change when a turn is run again that was completed."""
        root_id = store.find_session(id).root_id
        return [seen(self.path), store.effects(session=id, limit=1000), store.events(root_id)]


def seen(path: Path) -> list[list[str]]:
    """Return what was done to the world."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def done_by(path: Path, name: str, effect: str) -> list[tuple[str, str]]:
    """Return what tools of a kind did, without the name of who did it."""
    return [
        (tool, what.removesuffix(f" of {name}"))
        for tool, what, _ in seen(path)
        if RULES[tool.removeprefix("undo ")]["effect"] == effect
    ]


@dataclass
class Trial:
    """Both ways through plans, in one store."""

    place: dict[str, Any]
    folder: Path
    count: int = 0

    def check(self, plan: Plan) -> None:
        """Run a plan without a kill and with one, and compare."""
        self.count += 1
        names = [f"{self.count}{way}" for way in "ab"]
        whole, torn = [self.folder / name for name in names]
        plain = self.life(names[0], whole, plan, hours=0)
        status, (id, places) = run(plain.live)
        assert status == 0
        expected = self.rest(names[0], whole, plan, id, hours=1)
        dying = self.life(names[1], torn, plan, hours=2)
        dying.points = Places(1 + plan.death % max(1, int(places)))
        status, lines = run(dying.live)
        assert status in {0, -signal.SIGKILL}
        event("killed" if status else "not killed")
        found = self.rest(names[1], torn, plan, lines[0], hours=3)
        assert [text.replace(names[1], names[0]) for text in found] == expected
        mutations, writes = (
            [done_by(path, name, effect) for path, name in zip((whole, torn), names, strict=True)]
            for effect in ("mutate", "write")
        )
        assert Counter(mutations[1]) == Counter(mutations[0]), "a mutation was repeated or lost"
        extra = Counter(writes[1]) - Counter(writes[0])
        # Together, all that have returned may be recorded by one commit.
        under_way = len(plan.turns[plan.last % len(plan.turns)]) if plan.together else 1
        assert extra.total() <= under_way, "a write was repeated that was not under way"
        assert not Counter(writes[0]) - Counter(writes[1])
        assert [what for _, what in writes[1][-1:]] == [what for _, what in writes[0][-1:]]

    def life(self, name: str, path: Path, plan: Plan, hours: int) -> Life:
        start = VirtualClock().now_ms() + self.count * 10 * 3_600_000
        return Life(self.place, name, path, plan, VirtualClock(start + hours * 3_600_000))

    def rest(self, name: str, path: Path, plan: Plan, id: str, hours: int) -> list[str]:
        """Let another process go on, after every lease is over."""
        other = self.life(name, path, plan, hours)
        status, lines = run(lambda say: other.go_on(id, say))
        assert status == 0
        said, is_unchanged = json.loads(lines[0])
        assert is_unchanged, "a turn that was run again changed something"
        found: list[str] = said
        return found


@pytest.fixture
def trial(place: dict[str, Any], tmp_path: Path) -> Trial:
    """A store of its own, made by a child: nobody forks with a store open."""
    assert run(lambda say: holdfast.open(**place).close())[0] == 0
    return Trial(place, tmp_path)


def rules(
    examples: int, *, derandomize: bool
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )


TURN = [("write", "v1"), ("write", "v1"), ("write", "v2")]
REWOUND = [("turn", 0), ("save", 0), ("turn", 1), ("rewind", 1)]


@given(plan=PLANS)
@example(Plan([TURN], [], 0, death=10_000))
@example(Plan([TURN, [("read", "v1")]], REWOUND, 1, death=3))
@example(Plan([TURN], [("turn", 0), ("save", 0), ("fork", 1)], 0, death=5))
@example(Plan([TURN], [], 0, death=9, together=True))
@example(Plan([[("mail", "v1"), ("charge", "v1"), ("mail", "v2")]], [], 0, death=12, together=True))
@rules(15, derandomize=True)
def test_any_turn_killed_anywhere_and_run_again(trial: Trial, plan: Plan) -> None:
    trial.check(plan)


@pytest.mark.slow
@given(plan=PLANS)
@rules(1_000, derandomize=False)
def test_any_turn_killed_anywhere_and_run_again_for_long(trial: Trial, plan: Plan) -> None:
    trial.check(plan)
