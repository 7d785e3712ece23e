"""Any sequence of mutations reads back equal to a plain dictionary with versions, at any moment."""

from __future__ import annotations

import uuid
from operator import add
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import holdfast
from holdfast.state.values import merge_patch

VALUES: tuple[Any, ...] = (
    *(None, 0, 1, True, 1.5, "", "x", [], [1, 1], [1, "a"], {}, {"a": 1}, {"a": {"b": None}}),
    *("long" * 100, ["y" * 90] * 4, {"k": "z" * 300}),
)
keys = st.sampled_from(["a", "b", "c", "d"])
values = st.sampled_from(VALUES)


class Plain:
    """Shared state as a dictionary: value and version of each key, and all documents so far."""

    def __init__(self) -> None:
        self.live: dict[str, Any] = {}
        self.versions: dict[str, int] = {}
        self.changed_at: dict[str, int] = {}
        self.documents: list[dict[str, Any]] = [{}]
        self.floor = 0
        self.forgotten = 0

    def put(self, changes: dict[str, Any], gone: tuple[str, ...] = ()) -> None:
        for key in (*changes, *gone):
            least = 0 if key in self.live else self.forgotten
            self.versions[key] = max(self.versions.get(key, 0), least) + 1
            self.changed_at[key] = len(self.documents)
        self.live = {k: v for k, v in {**self.live, **changes}.items() if k not in gone}
        self.documents.append(self.live)


def kept(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)


class Machine(RuleBasedStateMachine):
    store: ClassVar[holdfast.Store]

    def __init__(self) -> None:
        super().__init__()
        self.state = self.store.session(uuid.uuid4().hex).state
        self.plain = Plain()

    @rule(key=keys, value=values, how=st.sampled_from(["any", "right", "wrong"]))
    def set(self, key: str, value: Any, how: str) -> None:
        current = self.plain.versions.get(key, 0) if key in self.plain.live else 0
        if how == "wrong":
            with pytest.raises(holdfast.VersionConflict):
                self.state.set(key, value, if_version=current + 1)
            return
        entry = self.state.set(key, value, if_version=current if how == "right" else None)
        self.plain.put({key: value})
        assert entry.version == self.plain.versions[key]

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if key not in self.plain.live:
            with pytest.raises(holdfast.NotFound):
                self.state.delete(key)
            return
        self.state.delete(key)
        self.plain.put({}, (key,))

    @rule(key=keys, operation=st.sampled_from(["increment", "append", "merge", "add", "remove"]),
          value=values)  # fmt: skip
    def operate(self, key: str, operation: str, value: Any) -> None:
        old: Any = self.plain.live.get(key)
        is_new = key not in self.plain.live
        fits, new = False, None
        match operation:
            case "increment":
                value, fits = 3, is_new or type(old) in (int, float)
                new = 3 if is_new else fits and old + 3
            case "append":
                value, fits = [value], is_new or type(old) is list
                new = [*(old if fits and not is_new else []), *value]
            case "merge":
                value, fits = {"m": value, "a": None}, is_new or type(old) is dict
                new = merge_patch({} if is_new else old, value)
            case "add" | "remove":
                members = [] if is_new else old
                forms = list(map(repr, members)) if type(members) is list else []
                fits = type(members) is list and len(set(forms)) == len(forms)
                if operation == "add":
                    new = members if not fits or repr(value) in forms else [*members, value]
                else:
                    new = [each for each in members if repr(each) != repr(value)] if fits else 0
        change = getattr(self.state, operation)
        if not fits:
            with pytest.raises(holdfast.TypeConflict):
                change(key, value)
            return
        assert kept(change(key, value).value, new)
        self.plain.put({key: new})

    @rule(key=keys, name=st.sampled_from(["last", "sum", "min", "max"]),
          number=st.sampled_from([-1, 0, 2.5, 10**700]))  # fmt: skip
    def reduce(self, key: str, name: Any, number: Any) -> None:
        self.state.set_rule(key, reducer=name)
        old: Any = self.plain.live.get(key, 0 if name == "sum" else number)
        if name != "last" and type(old) not in (int, float):
            with pytest.raises(holdfast.TypeConflict):
                self.state.reduce(key, number)
            return
        if name == "sum":
            number = int(number)
            if type(old) is float and number > 2**60:
                return
        reducers: dict[str, Any] = {"min": min, "max": max, "sum": add}
        made = number if name == "last" else reducers[name](old, number)
        assert kept(self.state.reduce(key, number).value, made)
        self.plain.put({key: made})

    @rule(document=st.dictionaries(keys, values), is_patch=st.booleans())
    def write_document(self, document: dict[str, Any], is_patch: bool) -> None:
        wanted = merge_patch(self.plain.live, document) if is_patch else document
        (self.state.patch if is_patch else self.state.replace)(document)
        self._make(wanted)

    @rule(back=st.integers(0, 12))
    def restore(self, back: int) -> None:
        at = max(self.plain.floor, len(self.plain.documents) - 1 - back)
        self.state.restore(at)
        self._make(self.plain.documents[at])

    def _make(self, wanted: dict[str, Any]) -> None:
        live = self.plain.live
        changed = {k: v for k, v in wanted.items() if k not in live or not kept(live[k], v)}
        self.plain.put(changed, tuple(live.keys() - wanted.keys()))

    @rule(back=st.integers(0, 8))
    def compact(self, back: int) -> None:
        at = max(self.plain.floor, len(self.plain.documents) - 1 - back)
        self.state.compact(at)
        self.plain.floor = at
        # Of forgotten tombstones one number stays, above which new keys start.
        for key in self.plain.versions.keys() - self.plain.live.keys():
            if self.plain.changed_at[key] <= at:
                version = self.plain.versions.pop(key)
                self.plain.forgotten = max(self.plain.forgotten, version)

    @invariant()
    def reads_back(self) -> None:
        plain = self.plain
        now = self.state.snapshot()
        assert kept(dict(sorted(now.document.items())), dict(sorted(plain.live.items())))
        assert now.version == len(plain.documents) - 1
        assert now.versions == {key: plain.versions[key] for key in plain.live}
        at = max(plain.floor, now.version - 5)
        then = self.state.snapshot(at_sequence=at).document
        assert kept(dict(sorted(then.items())), dict(sorted(plain.documents[at].items())))
        for key in plain.live:
            entries = self.state.history(key, limit=4)
            assert kept(entries[0].value, plain.live[key])


def run(store: holdfast.Store, examples: int, *, derandomize: bool = True) -> None:
    Machine.store = store
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    wanted = settings(
        max_examples=examples,
        derandomize=derandomize,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(Machine, settings=wanted)


def test_any_mutations_on_sqlite(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        run(store, 30)
        assert [f for f in holdfast.store.check(store.url) if f.level == "problem"] == []


def test_any_mutations_on_postgres(postgres_dsn: str, namespace: str) -> None:
    with holdfast.open(postgres_dsn, namespace=namespace) as store:
        run(store, 5)


@pytest.mark.slow
def test_many_mutations_on_sqlite(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        run(store, 2_000, derandomize=False)
