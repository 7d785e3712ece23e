"""The ledger of spend: exact, once per attempt, and never forgotten."""

from __future__ import annotations

import random
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.errors import (
    InvalidArgument,
    LeaseLost,
    NotFound,
    RequestMismatch,
    SessionBusy,
)
from holdfast.kernel.driver import Hooks, Trace
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours


@both_colours
async def test_an_attempt_costs_the_statements_it_should(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append), durability="normal")
    session = await done(store.session("s"))
    traces.clear()
    for given in ({"state": "open"}, {"state": "open", "id": "a"}, {"id": "a"}, {}):
        await done(session.spend("m", usd="1", details={"d": 1}, **given))
    # The tree, the attempt and its two totals; an id is looked up, and an estimate taken back.
    event = 1 if "namespace" in subject.place else 2
    assert [each.statements for each in traces] == [4 + event, 5 + event, 7 + event, 4 + event]


@both_colours
async def test_spend_is_summed_by_model_and_source(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    for _ in range(10):
        await done(session.spend("big", input_tokens=10, output_tokens=1, usd="0.1"))
    await done(session.spend("big", source="retry", state="failed", usd=0))
    await done(session.spend("small", source="tool", input_tokens=5, usd=0.000000001))
    await done(session.spend("free", output_tokens=7))
    spent = await done(session.spent())
    assert spent.usd == Decimal("1.000000001")
    assert (spent.input_tokens, spent.output_tokens, spent.tokens) == (105, 17, 122)
    assert (spent.attempts, spent.failed_attempts, spent.unpriced) == (13, 1, 1)
    found = {(each.model, each.source): (each.attempts, each.usd) for each in spent.by}
    assert found == {
        ("big", "agent"): (10, Decimal(1)),
        ("big", "retry"): (1, Decimal(0)),
        ("free", "agent"): (1, Decimal(0)),
        ("small", "tool"): (1, Decimal("0.000000001")),
    }


@both_colours
async def test_an_open_attempt_counts_by_its_estimate_until_its_outcome_takes_its_place(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session())
    opened = await done(session.spend("m", state="open", usd="0.5", details={"attempt": 1}))
    spent = await done(session.spent())
    assert (spent.usd, spent.uncertain_usd, spent.uncertain_attempts) == (
        Decimal("0.5"),
        Decimal("0.5"),
        1,
    )
    settled = await done(session.spend("m", id=opened.id, input_tokens=3, usd="0.25"))
    assert (settled.number, settled.details) == (opened.number, None)
    spent = await done(session.spent())
    assert (spent.usd, spent.uncertain_attempts, spent.attempts) == (Decimal("0.25"), 0, 1)
    same = await done(session.spend("m", id=opened.id, input_tokens=3, usd="0.25"))
    assert same == settled
    await raises(RequestMismatch, lambda: session.spend("m", id=opened.id, usd="0.3"))
    other = await done(store.session())
    await raises(RequestMismatch, lambda: other.spend("m", id=opened.id, usd="0.25"))
    assert (await done(session.spent())).usd == Decimal("0.25")
    assert (await done(other.spent())).attempts == 0


@both_colours
async def test_what_a_dead_process_left_open_is_uncertain_and_can_still_be_settled(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session())
    opened = await done(session.spend("m", state="open", usd=1))
    (closed,) = await done(session.close_spend())
    assert (closed.id, closed.state, closed.usd) == (opened.id, "uncertain", Decimal(1))
    assert await done(session.close_spend()) == []
    late = await done(session.spend("m", id=opened.id, usd="0.9"))
    assert late.state == "settled"
    assert (await done(session.spent())).usd == Decimal("0.9")


@both_colours
async def test_spend_outlives_rewinding_and_a_fork_starts_at_nothing(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    await done(session.save(x=1))
    await done(session.spend("m", usd=2))
    await done(session.rewind(1))
    assert (await done(session.spent())).usd == 2
    fork = await done(session.fork(1))
    assert (await done(fork.spent())).usd == 0


@both_colours
async def test_a_tree_is_summed_over_all_its_sessions(subject: Subject) -> None:
    store = await subject.open()
    root = await done(store.session("root"))
    child = await done(store.session("child", parent="root"))
    other = await done(store.session("other"))
    for session, usd in ((root, 1), (child, 2), (other, 4)):
        await done(session.spend("m", usd=usd))
    assert (await done(root.spent())).usd == 1
    assert (await done(root.spent(tree=True))).usd == 3
    assert (await done(child.spent(tree=True))).usd == 3


@both_colours
async def test_a_driver_without_its_lease_opens_nothing_but_may_say_what_was_paid(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session())
    driven = await done(session.drive("one"))
    opened = await done(driven.spend("m", state="open", usd=1))
    await done(driven.close())
    await raises(LeaseLost, lambda: driven.spend("m", state="open", usd=1))
    await done(driven.spend("m", id=opened.id, usd="0.7"))
    spent = await done(session.spent())
    assert (spent.usd, spent.attempts) == (Decimal("0.7"), 1)


@both_colours
async def test_spend_and_checkpoint_are_one_commit(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())

    def both(tx: holdfast.Transaction, is_doomed: bool) -> holdfast.Op[None]:
        inside = tx.within(session)
        yield from inside.append("transcript", [{"text": "hello"}], kind="llm_response")
        yield from inside.spend("m", usd=1)
        if is_doomed:
            raise RuntimeError("no")

    await raises(RuntimeError, lambda: store.run(both, True))
    assert (await done(session.spent())).attempts == 0
    assert await done(session.latest()) is None
    await done(store.run(both, False))
    assert (await done(session.spent())).usd == 1
    events = await done(store.events(session.root_id))
    assert [event.kind for event in events][-2:] == ["checkpoint_saved", "spend_recorded"]
    assert events[-1].data["nano_usd"] == 1_000_000_000


@both_colours
async def test_attempts_are_listed_in_order_with_their_details(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    for number in range(5):
        await done(session.spend("m", usd=number, details={"number": number}))
    first = await done(session.spends(limit=2))
    rest = await done(session.spends(after=first[-1].number))
    assert [each.details["number"] for each in first + rest] == [0, 1, 2, 3, 4]
    assert {each.session_id for each in first} == {session.id}


@both_colours
async def test_totals_are_what_the_attempts_add_up_to(subject: Subject) -> None:
    """Whatever happened to them: estimates, outcomes, corrections, flags, deleted sessions."""
    store = await subject.open()
    sessions = [await done(store.session("root"))]
    sessions += [await done(store.session(f"s{n}", parent="root")) for n in range(2)]
    chance = random.Random(7)
    opened: list[Any] = []
    for step in range(60):
        session = chance.choice(sessions)
        figures: dict[str, Any] = {
            "input_tokens": chance.randrange(9),
            "usd": chance.choice([None, "0.5", "0.000000003"]),
        }
        match step % 6:
            case 0 | 1:
                state = chance.choice(["open", "failed", "uncertain", "settled"])
                attempt = await done(session.spend(chance.choice("ab"), state=state, **figures))
                if state in {"open", "uncertain"}:
                    opened.append((session, attempt.id))
            case 2 if opened:
                owner, id = opened.pop()
                await done(owner.spend("c", id=id, source="retry", **figures))
            case 3 if opened:
                _, id = opened.pop(0)
                await done(store.correct_spend(id, **figures))
            case 4:
                await done(session.close_spend())
    await done(sessions[2].delete())
    for session in sessions[:2]:
        assert await done(session.spent()) == added_up(await done(session.spends()))
    everything = await done(store.spends())
    assert await done(sessions[0].spent(tree=True)) == added_up(everything)
    assert {each.session_id for each in everything} == {"root", "s0", "s1"}


def added_up(attempts: list[holdfast.Spend]) -> holdfast.Spent:
    """Return the sums of attempts, computed plainly."""
    in_doubt = [each for each in attempts if each.state in {"open", "uncertain"}]

    def usd(found: list[holdfast.Spend]) -> Decimal:
        return sum((each.usd or Decimal(0) for each in found), Decimal(0))

    names = sorted({(each.model, each.source) for each in attempts})
    groups = [[each for each in attempts if (each.model, each.source) == name] for name in names]
    return holdfast.Spent(
        usd=usd(attempts),
        input_tokens=sum(each.input_tokens for each in attempts),
        output_tokens=sum(each.output_tokens for each in attempts),
        attempts=len(attempts),
        failed_attempts=sum(each.state == "failed" for each in attempts),
        uncertain_attempts=len(in_doubt),
        uncertain_usd=usd(in_doubt),
        unpriced=sum(each.usd is None and each.state != "failed" for each in attempts),
        by=tuple(
            holdfast.SpendSum(
                model=found[0].model,
                source=found[0].source,
                attempts=len(found),
                input_tokens=sum(each.input_tokens for each in found),
                output_tokens=sum(each.output_tokens for each in found),
                usd=usd(found),
            )
            for found in groups
        ),
    )


@both_colours
async def test_a_person_corrects_an_attempt_whose_outcome_nobody_knows_once(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    driven = await done(session.drive("one"))
    opened = await done(driven.spend("m", state="open", usd=1, output_tokens=9))
    await raises(SessionBusy, lambda: store.correct_spend(opened.id, usd="0.1"))
    await done(driven.close())
    fixed = await done(store.correct_spend(opened.id, usd="0.1", by="jo", note="invoice 7"))
    assert (fixed.state, fixed.usd, fixed.output_tokens) == ("settled", Decimal("0.1"), 9)
    assert fixed.details == {"corrected_by": "jo", "note": "invoice 7", "estimate_usd": "1"}
    assert await done(store.correct_spend(opened.id, usd="0.1", by="jo")) == fixed
    await raises(RequestMismatch, lambda: store.correct_spend(opened.id, usd="0.2"))
    await raises(NotFound, lambda: store.correct_spend("nothing", usd=1))
    events = await done(store.events("s"))
    assert [event.data["state"] for event in events if event.kind == "spend_recorded"] == [
        "open", "settled",
    ]  # fmt: skip
    lost = await done(session.spend("m", state="uncertain", usd=3))
    await done(session.delete())
    await done(store.correct_spend(lost.id, usd=2, input_tokens=4))
    assert [(each.usd, each.input_tokens) for each in await done(store.spends())] == [
        (Decimal("0.1"), 0), (Decimal(2), 4),
    ]  # fmt: skip


@both_colours
async def test_spend_of_a_store_is_listed_and_summed_by_session_model_and_day(
    subject: Subject,
) -> None:
    clock = holdfast.VirtualClock(86_400_000 * 20_000)
    store = await subject.open(clock=clock)
    one, two = await done(store.session("one")), await done(store.session("two"))
    await done(one.spend("big", usd=1, input_tokens=2, output_tokens=3))
    await done(two.spend("small", state="uncertain", usd=2))
    clock.advance(86_400)
    await done(two.spend("small", state="failed"))
    await done(two.spend("big"))
    sums = {
        by: [
            (each.name, each.attempts, each.usd, each.uncertain_usd, each.unpriced)
            for each in await done(store.spending(by))
        ]
        for by in ("session", "model", "day")
    }
    assert sums == {
        "session": [("one", 1, 1, 0, 0), ("two", 3, 2, 2, 1)],
        "model": [("big", 2, 1, 0, 1), ("small", 2, 2, 2, 0)],
        "day": [("2024-10-04", 2, 3, 2, 0), ("2024-10-05", 2, 0, 0, 1)],
    }
    (own,) = await done(store.spending("model", session=one))
    assert (own.name, own.input_tokens, own.output_tokens) == ("big", 2, 3)
    assert [each.number for each in await done(store.spends(state="uncertain"))] == [2]
    assert [each.number for each in await done(store.spends(session="two", after=2, limit=1))] == [
        3
    ]
    assert [each.number for each in await done(two.spends(state="failed"))] == [3]
    for wrong in ({"state": "paid"}, {"limit": 0}, {"after": -1}, {"session": ""}):
        await raises(InvalidArgument, partial(store.spends, **wrong))
    await raises(InvalidArgument, lambda: store.spending("colour"))
    for by, groups in sums.items():
        names, last = [], None
        while found := await done(store.spending(by, after=last, limit=1)):
            names.append(last := found[-1].name)
        assert names == [name for name, *_ in groups], by
    for day in ("", "yesterday", "2024-13-01"):
        await raises(InvalidArgument, partial(store.spending, "day", after=day))


@both_colours
async def test_sessions_of_a_listing_have_their_costs_and_children(subject: Subject) -> None:
    store = await subject.open()
    root = await done(store.session("root"))
    for number in range(3):
        child = await done(store.session(f"child-{number}", parent=root))
        await done(child.spend("m", usd=number))
        await done(child.spend("m", usd="0.5", state="uncertain"))
    await done(root.spend("m", usd="0.25"))
    await done(store.session("other"))
    await done(store.session("deep", parent="child-0"))
    found = await done(store.sessions())
    costs = await done(store.costs(found))
    assert {id: (each.usd, each.tree_usd) for id, each in costs.items()} == {
        "root": (Decimal("0.25"), Decimal("4.75")),
        "child-0": (Decimal("0.5"), Decimal("4.75")),
        "child-1": (Decimal("1.5"), Decimal("4.75")),
        "child-2": (Decimal("2.5"), Decimal("4.75")),
        "other": (0, 0),
        "deep": (0, Decimal("4.75")),
    }
    children = {"root": 3, "child-0": 1, "child-1": 0, "child-2": 0, "other": 0, "deep": 0}
    assert await done(store.child_counts(found)) == children
    assert await done(store.child_counts(found, at_most=2)) == children
    assert (await done(store.child_counts(found, at_most=1)))["root"] == 2
    assert await done(store.costs([])) == await done(store.child_counts([])) == {}
    many = [found[0]] * 1_001
    await raises(InvalidArgument, partial(store.costs, many))
    await raises(InvalidArgument, partial(store.child_counts, many))
    await raises(InvalidArgument, partial(store.child_counts, found, at_most=0))


@pytest.mark.parametrize(
    "given",
    [
        {"usd": -1},
        {"usd": "much"},
        {"usd": float("nan")},
        {"usd": True},
        {"usd": 10**12},
        {"input_tokens": -1},
        {"output_tokens": 1.5},
        {"state": "paid"},
        {"source": ""},
        {"model": 7},
        {"id": ""},
        {"details": {"x": object()}},
    ],
)
def test_bad_figures_are_refused_before_anything_is_written(given: dict[str, Any]) -> None:
    with holdfast.open("sqlite://") as store:
        session = store.session()
        with pytest.raises(InvalidArgument):
            session.spend(**{"model": "m", **given})
        assert session.spends() == []


def test_the_database_refuses_an_unknown_state(place: dict[str, Any]) -> None:
    from tests.checkpoints.colours import sql

    with holdfast.open(**place) as store:
        store.session().spend("m")
        with pytest.raises(holdfast.Refused):
            sql(store, "UPDATE hf_spend SET state = 'gone'")
