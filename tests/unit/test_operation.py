"""Operations look like methods, can be driven by hand, and are re-run from the start."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import holdfast
from holdfast.kernel.driver import Execution, Services
from holdfast.kernel.operation import (
    Batch,
    Call,
    Deferred,
    Emit,
    Lock,
    Op,
    Query,
    TryLock,
    batch,
    decide,
    defer,
    fresh_id,
    one,
    operation,
    rows,
    together,
)
from holdfast.testing.nouns import Counter

ids = iter(f"id-{number}" for number in range(1000))
SERVICES = Services(
    lock=lambda root_id, may_wait: Query(f"LOCK {root_id} {may_wait}", {}),
    create=lambda root_id: Query(f"CREATE {root_id}", {}),
    lock_free=lambda root_ids: Query(f"LOCK FREE {' '.join(root_ids)}", {}),
    events=lambda emits, at_once=False: [Query("EVENT", {"kind": emit.kind}) for emit in emits],
    events_if_done=lambda emits: Query("EVENTS", {"count": len(emits)}),
    new_id=lambda: next(ids),
)


def begun(call: Call[Any], *given: Any, **options: Any) -> Execution[Any]:
    execution = Execution(call, *given, **options)
    execution.advance()
    return execution


class ThingOps:
    @operation
    def name(self, first: str) -> Op[tuple[str, str, object]]:
        """Name a thing."""
        one_id = yield from fresh_id()
        row = yield from one("SELECT :first", first=first)
        return one_id, (yield from fresh_id()), row

    @operation
    def lock(self, *root_ids: str) -> Op[None]:
        for root_id in root_ids:
            yield Lock(root_id)
            yield Emit(root_id, root_id, "locked", b"")

    @operation
    def emit_unlocked(self) -> Op[None]:
        yield Emit("root", "root", "kind", b"")


def test_a_bound_operation_keeps_name_docstring_and_signature() -> None:
    with holdfast.open("sqlite://") as store:
        add = Counter(store).add
        assert add.__doc__ == Counter.add.__doc__
        assert add.__name__ == "add"
        assert add.__qualname__ == "Counter.add"
        assert (
            str(inspect.signature(add)) == "(amount: 'int' = 1, *, note: 'str' = '') -> 'Op[int]'"
        )
        assert repr(add).startswith("<bound method Counter.add of <")
    assert Counter.add.__doc__ == Counter.add.__doc__


def test_a_call_is_named_and_runs_up_to_its_first_query_when_it_is_made() -> None:
    execution = begun(Call(ThingOps.name, ThingOps(), ("a",)), SERVICES)
    assert execution.call.name == "ThingOps.name"
    assert execution.queries == [Query("SELECT :first", {"first": "a"})]
    execution.advance([[{"x": 1}]])
    assert execution.queries == []
    assert execution.result[2] == {"x": 1}
    assert execution.statements == 1


def test_a_rerun_receives_the_same_ids() -> None:
    call = Call(ThingOps.name, ThingOps(), ("a",))
    results = []
    for _ in range(2):
        execution = begun(call, SERVICES)
        execution.advance([[]])
        results.append(execution.result)
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def test_wrong_arguments_fail_before_anything_is_asked() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'second'"):
        begun(Call(ThingOps.name, ThingOps(), ("a",), {"second": 1}), SERVICES)


def test_trees_wait_in_id_order_and_must_be_free_out_of_order() -> None:
    execution = begun(Call(ThingOps.lock, ThingOps(), ("b", "c", "b", "a")), SERVICES)
    asked = []
    while execution.queries:
        asked.append((execution.queries[0].sql, execution.is_lock_immediate))
        execution.advance([[{}]])
    assert asked == [("LOCK b True", False), ("LOCK c True", False), ("LOCK a False", True)]
    assert [query.parameters["kind"] for query in execution.closing()] == ["locked"] * 4
    again = begun(execution.call, SERVICES, lock_first=set(execution.locked))
    asked = []
    while again.queries:
        asked.append((again.queries[0].sql, again.is_lock_immediate))
        again.advance([[{}]])
    assert asked == [("LOCK a True", False), ("LOCK b True", False), ("LOCK c True", False)]


def test_a_new_tree_is_locked_by_being_created_also_when_the_call_is_run_again() -> None:
    class Creating:
        @operation
        def create(self) -> Op[None]:
            yield Lock("b", is_new=True)
            yield Emit("b", "b", "created", b"")
            yield Lock("b")
            yield Lock("a")

    execution = begun(Call(Creating.create, Creating()), SERVICES)
    assert [query.sql for query in execution.queries] == ["CREATE b"]
    execution.advance([[{}]])
    # Nobody else can wait for a tree that nobody sees, so others may be waited for.
    assert [query.sql for query in execution.queries] == ["LOCK a True"]
    again = begun(execution.call, SERVICES, lock_first={"b"})
    assert [query.sql for query in again.queries] == ["LOCK b True"]
    again.advance([[]])
    assert [query.sql for query in again.queries] == ["CREATE b"]


def test_a_batch_asks_at_once_and_is_answered_in_order() -> None:
    class BatchOps:
        @operation
        def ask(self) -> Op[list[object]]:
            first = yield from batch(Lock("a"), Query("ONE", {}), Query("TWO", {}))
            second = yield from batch(Query("THREE", {}), Lock("a"))
            third = yield from batch(Lock("a"))
            return [first, second, third]

    execution = begun(Call(BatchOps.ask, BatchOps()), SERVICES)
    assert [query.sql for query in execution.queries] == ["LOCK a True", "ONE", "TWO"]
    execution.advance([[{"r": 0}], [{"r": 1}], []])
    assert [query.sql for query in execution.queries] == ["THREE"]
    execution.advance([[{"r": 3}]])
    assert execution.result == [
        [[{"r": 0}], [{"r": 1}], []],
        [[{"r": 3}], [{}]],
        [[{}]],
    ]
    assert execution.statements == 4


class Deferring:
    @operation
    def write(self) -> Op[list[Any]]:
        yield from defer("FIRST")
        yield Lock("a")
        yield from defer("SECOND", n=2)
        yield Lock("a")
        guard = Query("GUARD", {}, must_find=True)
        told = Emit("a", "a", "told", b"")
        found = yield from decide(guard, Query("LAST", {}), emits=[told])
        yield from defer("THIRD")
        return found

    @operation
    def only(self) -> Op[None]:
        yield from defer("ALONE")

    @operation
    def tell(self) -> Op[None]:
        yield Lock("a")
        told = [Emit("a", "a", kind, b"") for kind in ("first", "second")]
        yield Deferred([Query("ONE", {}), Query("TWO", {})], told)

    @operation
    def decide_twice(self) -> Op[list[Any]]:
        first = yield from decide(Query("ONE", {}))
        second = yield from decide(Query("TWO", {}))
        return [first, second]

    @operation
    def lock_free(self) -> Op[list[Any]]:
        yield Lock("b")
        taken = yield TryLock(["a", "b", "c"], [Query("LOOK", {})])
        yield Emit("c", "c", "told", b"")
        again = yield TryLock(["b", "c"])
        yield Lock("a")
        return [taken, again]


def test_what_is_deferred_is_asked_with_the_next_query_or_at_the_end() -> None:
    execution = begun(Call(Deferring.write, Deferring()), SERVICES)
    assert [query.sql for query in execution.queries] == ["FIRST", "LOCK a True"]
    execution.advance([[{"not": "read"}], [{}]])
    # A tree that is locked already is no query, so that the statement waits for the next one.
    assert [query.sql for query in execution.queries] == ["SECOND", "GUARD"]
    assert execution.queries[0].parameters == {"n": 2}
    execution.advance([[{"not": "read"}], [{"r": 1}]])
    assert [query.sql for query in execution.queries] == ["LAST"]
    execution.advance([[{"r": 2}]])
    assert execution.result == [[{"r": 1}], [{"r": 2}]]
    assert [query.sql for query in execution.closing()] == ["THIRD", "EVENT"]
    assert execution.statements == 7


def test_statements_are_deferred_together_with_their_events() -> None:
    execution = begun(Call(Deferring.tell, Deferring()), SERVICES)
    execution.advance([[{}]])
    assert [event.kind for event in execution.emits] == ["first", "second"]
    assert [query.sql for query in execution.closing()] == ["ONE", "TWO", "EVENT", "EVENT"]


def test_only_the_first_command_of_a_call_is_refused() -> None:
    execution = begun(Call(Deferring.decide_twice, Deferring()), SERVICES, is_refused=True)
    assert [query.sql for query in execution.queries] == ["TWO"]
    execution.advance([[{"r": 1}]])
    assert execution.result == [[[]], [[{"r": 1}]]]


def test_a_call_that_only_defers_has_work_to_do() -> None:
    execution = begun(Call(Deferring.only, Deferring()), SERVICES)
    assert (execution.queries, execution.emits) == ([], [])
    assert [query.sql for query in execution.deferred] == ["ALONE"]
    assert [query.sql for query in execution.closing()] == ["ALONE"]
    assert execution.deferred == []


def test_a_decision_with_something_deferred_before_it_has_begun() -> None:
    class Begun:
        @operation
        def decide(self) -> Op[None]:
            yield from defer("BEFORE")
            yield from decide(Query("LAST", {}))

    execution = begun(Call(Begun.decide, Begun()), SERVICES)
    assert (execution.decide is not None, execution.is_begun) == (True, True)
    assert not begun(Call(Deciding.decide, Deciding()), SERVICES).is_begun


def test_trees_that_are_free_are_locked_and_the_others_are_not_waited_for() -> None:
    execution = begun(Call(Deferring.lock_free, Deferring()), SERVICES)
    execution.advance([[{}]])
    assert [query.sql for query in execution.queries] == ["LOCK FREE a c", "LOOK"]
    execution.advance([[{"root_id": "c"}], [{"r": 1}]])
    # Out of order from now on.
    assert [query.sql for query in execution.queries] == ["LOCK a False"]
    execution.advance([[{}]])
    assert execution.result == [(["b", "c"], [[{"r": 1}]]), (["b", "c"], [])]
    assert [query.parameters["kind"] for query in execution.closing()] == ["told"]


def test_a_tree_before_one_that_was_free_is_locked_only_if_it_is_free_too() -> None:
    class TryingOps:
        @operation
        def lock(self) -> Op[None]:
            yield TryLock(["b"])
            yield Lock("a")

    execution = begun(Call(TryingOps.lock, TryingOps()), SERVICES)
    execution.advance([[{"root_id": "b"}]])
    assert [query.sql for query in execution.queries] == ["LOCK a False"]
    assert execution.is_lock_immediate


class Deciding:
    @operation
    def decide(self) -> Op[list[Any]]:
        told = Emit("a", "a", "told", b"")
        guard = Query("GUARD", {}, must_find=True)
        found = yield from decide(Lock("a"), guard, Query("LAST", {}), emits=[told])
        if found[-1]:
            return found
        return [found, (yield Query("WHY", {}))]


def test_what_must_be_found_is_asked_before_the_statement_that_decides() -> None:
    execution = begun(Call(Deciding.decide, Deciding()), SERVICES)
    assert [query.sql for query in execution.queries] == ["LOCK a True", "GUARD"]
    execution.advance([[{}], [{"r": 1}]])
    assert [query.sql for query in execution.queries] == ["LAST"]
    execution.advance([[{"r": 2}]])
    assert execution.result == [[{}], [{"r": 1}], [{"r": 2}]]
    assert [query.parameters["kind"] for query in execution.closing()] == ["told"]
    assert execution.statements == 4


@pytest.mark.parametrize("guard", [[], [{"r": 1}]])
def test_without_a_row_of_the_last_the_call_goes_on_and_emits_nothing(guard: list[Any]) -> None:
    execution = begun(Call(Deciding.decide, Deciding()), SERVICES)
    execution.advance([[{}], guard])
    if guard:
        execution.advance([[]])
    assert [query.sql for query in execution.queries] == ["WHY"]
    execution.advance([[]])
    assert execution.result == [[[{}], guard, []], []]
    assert execution.closing() == []


def test_a_refused_decision_is_not_asked_again() -> None:
    execution = begun(Call(Deciding.decide, Deciding()), SERVICES)
    assert [query.sql for query in execution.whole()] == ["LOCK a True", "GUARD", "LAST"]
    execution = begun(execution.call, SERVICES, is_refused=True)
    assert [query.sql for query in execution.queries] == ["WHY"]
    execution.advance([[{"r": 3}]])
    assert execution.result == [[[], [], []], [{"r": 3}]]


def test_events_of_a_tree_that_is_gone_are_not_emitted() -> None:
    execution = begun(Call(Deciding.decide, Deciding()), SERVICES)
    execution.whole()
    execution.advance([[], [{"r": 1}], [{"r": 2}]])
    assert execution.result == [[], [{"r": 1}], [{"r": 2}]]
    assert execution.closing() == []


def test_an_event_of_a_tree_that_is_not_locked_is_an_error() -> None:
    with pytest.raises(holdfast.HoldfastError, match="without locking it"):
        begun(Call(ThingOps.emit_unlocked, ThingOps()), SERVICES)


def test_the_operations_own_line_is_in_the_traceback_of_a_failed_statement() -> None:
    class Broken:
        @operation
        def ask(self) -> Op[None]:
            yield Query("SELECT nonsense FROM nowhere", {})

    with holdfast.open("sqlite://") as store, pytest.raises(holdfast.StoreError) as caught:
        store.runtime.driver.run(Call(Broken.ask, Broken()))
    assert 'yield Query("SELECT nonsense FROM nowhere", {})' in str(caught.getrepr())


def test_parts_run_together_ask_in_one_batch_and_get_their_own_answers() -> None:
    def part(name: str, rounds: int) -> Op[list[str]]:
        found = []
        for number in range(rounds):
            [row] = yield from rows(f"{name} {number}")
            found.append(row["sql"])
        yield Emit("root", name, "ended", b"")
        if rounds == 2:
            answers = yield from decide(Query("no", {}), Query("yes", {}), emits=[TOLD])
            found.append(answers[1][0]["sql"])
        return found

    batches: list[list[str]] = []
    told: list[Any] = []
    result: list[list[str]] = []
    running = together([part("a", 1), part("b", 2), part("c", 0)])
    answer: Any = None
    while True:
        try:
            command = running.send(answer)
        except StopIteration as stop:
            result = stop.value
            break
        answer = None
        if isinstance(command, Batch):
            batches.append([each.sql for each in command.commands if isinstance(each, Query)])
            answer = [[{"sql": sql}] for sql in batches[-1]]
        else:
            told.append(command)
    assert result == [["a 0"], ["b 0", "b 1", "yes"], []]
    assert batches == [["a 0", "b 0"], ["b 1"], ["no", "yes"]]
    assert [each.session_id for each in told] == ["a", "b", "told", "c"]


TOLD = Emit("root", "told", "told", b"")


def test_a_part_whose_batch_is_empty_goes_on() -> None:
    def part() -> Op[str]:
        assert (yield from batch()) == []
        return "ended"

    with pytest.raises(StopIteration) as ended:
        next(together([part()]))
    assert ended.value.value == ["ended"]
