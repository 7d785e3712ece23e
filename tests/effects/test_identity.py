"""Which calls are one effect, on both databases and in both colours."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast import (
    InvalidArgument,
    InvalidValue,
    Landed,
    RequestMismatch,
    VirtualClock,
)
from holdfast.kernel.operation import rows
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World


@both_colours
async def test_the_same_mail_in_one_session_is_sent_once_and_in_two_twice(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    first, second = [await done(store.session(name)) for name in ("a", "b")]
    sent = await done(first.call(mail, to="ann"))
    again = await done(first.call(mail, to="ann"))
    assert (sent.value, sent.replayed, sent.replay_of) == (1, False, None)
    assert (again.value, again.replayed, again.replay_of) == (1, True, sent.effect_id)
    assert (await done(second.call(mail, to="ann"))).value == 2
    assert (await done(first.call(mail, to="bob"))).value == 3
    assert len(set(world.keys)) == 3


@both_colours
async def test_write_v1_v2_v1_leaves_v1_and_v1_v1_runs_once(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    for text in ("v1", "v2", "v1", "v1"):
        await done(session.call(write, to="file", text=text))
    assert [text for _, text in world.done] == ["v1", "v2", "v1"]


@both_colours
async def test_a_write_that_is_run_again_counts_as_the_newest(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    world.fails_with = OSError("full")
    await raises(OSError, lambda: session.call(write, to="file", text="v1", call_id="c1"))
    world.fails_with = None
    await done(session.call(write, to="file", text="v2"))
    await done(session.call(write, to="file", text="v1", call_id="c1"))
    await done(session.call(write, to="file", text="v2"))
    assert [text for _, text in world.done] == ["v1", "v2", "v1", "v2"]


@both_colours
async def test_a_write_is_run_again_in_a_new_session_of_the_same_id(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    await done(session.call(write, to="file"))
    await done(session.delete())
    session = await done(store.session("s"))
    assert [(await done(session.call(write, to="file"))).replayed for _ in range(2)] == [
        False,
        True,
    ]


@both_colours
async def test_a_call_id_finds_its_own_row_first_whatever_came_in_between(subject: Subject) -> None:
    world, store = World(), await subject.open()
    write = world.tool(effect="write")
    session = await done(store.session("s"))
    first = await done(session.call(write, to="f", text="v1", call_id="c1"))
    await done(session.call(write, to="f", text="v2", call_id="c2"))
    again = await done(session.call(write, to="f", text="v1", call_id="c1"))
    assert again.replay_of == first.effect_id
    assert len(world.done) == 2
    error = await raises(
        RequestMismatch, lambda: session.call(write, to="f", text="v3", call_id="c1")
    )
    assert "call id 'c1' belongs to another request" in str(error)
    assert len(world.done) == 2


@both_colours
async def test_dedupe_policies(subject: Subject) -> None:
    world, store = World(), await subject.open()
    a, b = [await done(store.session(name)) for name in ("a", "b")]
    by_call = world.tool(dedupe="call", name="by_call")
    await raises(InvalidArgument, lambda: a.call(by_call, to="x"))
    for call_id in ("c1", "c2", "c1"):
        await done(a.call(by_call, to="x", call_id=call_id))
    assert len(world.done) == 2
    everywhere = world.tool(dedupe="global", name="everywhere")
    one, two = [await done(session.call(everywhere, to="x")) for session in (a, b)]
    assert two.replay_of == one.effect_id
    chosen = world.tool(dedupe=lambda arguments: arguments["to"].lower(), name="chosen")
    await done(a.call(chosen, to="X"))
    error = await raises(RequestMismatch, lambda: a.call(chosen, to="x"))
    assert error.status == "completed"
    assert len(world.done) == 4


@both_colours
async def test_arguments_are_compared_by_what_they_mean(subject: Subject) -> None:
    world, store = World(), await subject.open()
    session = await done(store.session("s"))

    @holdfast.tool
    def act(value: Any) -> int:
        return world.act(value)

    same = [{"a": 1, "b": [None]}, {"b": [None], "a": 1}]
    values: list[Any] = [*same, "\u00e9", "e\u0301", 1, 1.0, True, 1]
    for value in values:
        await done(session.call(act, value=value))
    assert len(world.done) == 5
    for bad in (float("nan"), (1, 2), {1: 2}, {"x"}, b"x", object()):
        await raises(InvalidValue, lambda: session.call(act, value=bad))  # noqa: B023
    await raises(holdfast.LimitExceeded, lambda: session.call(act, value="x" * 2_000_000))
    assert len(world.done) == 5


@both_colours
async def test_none_false_and_zero_are_results(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    runs: list[Any] = []

    @holdfast.tool
    def answer(value: Any) -> Any:
        runs.append(value)
        return value

    values: list[Any] = [None, False, 0, "", [], {}]
    for value in values:
        for _ in range(2):
            found = await done(session.call(answer, value=value))
            assert found.value == value
            assert type(found.value) is type(value)
    assert len(runs) == 6
    assert (await done(store.once("k", lambda: runs.append("once")))).value is None
    assert (await done(store.once("k", lambda: runs.append("once")))).replayed
    assert len(runs) == 7


@both_colours
async def test_reads_are_logged_and_replayed_by_their_call_id_only(subject: Subject) -> None:
    world, store = World(), await subject.open()
    read = world.tool(effect="read")
    session = await done(store.session("s"))
    for call_id in (None, None, "c1", "c1"):
        await done(session.call(read, to="x", call_id=call_id))
    assert len(world.done) == 3
    await raises(RequestMismatch, lambda: session.call(read, to="y", call_id="c1"))
    world.fails_with = ValueError("no")
    await raises(ValueError, lambda: session.call(read, to="z", call_id="c2"))
    world.fails_with = None
    assert (await done(session.call(read, to="z", call_id="c2"))).value == 5
    found = await done(store.effects(session=session))
    assert [effect.status for effect in found] == ["completed"] * 3 + ["failed", "completed"]


@both_colours
async def test_once_is_once_in_the_whole_store(subject: Subject) -> None:
    clock, runs = VirtualClock(), []
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))

    def invoice(*, idempotency_key: str) -> str:
        runs.append(idempotency_key)
        return f"invoice {len(runs)}"

    request = {"month": "2026-11"}
    first = await done(store.once("november", invoice, request=request, session=session))
    again = await done(store.once("november", invoice, request=request))
    assert (first.value, again.value, again.replay_of) == ("invoice 1",) * 2 + (first.effect_id,)
    await raises(RequestMismatch, lambda: store.once("november", invoice, request={"month": "x"}))
    (found,) = await done(store.effects(key="november"))
    assert (found.session_id, found.key, found.tool) == ("s", "once:november", "invoice")
    assert await done(store.effects(key=found.idempotency_key)) == [found]
    clock.advance(24 * 3600)
    assert (
        await done(store.once("november", invoice, request={"month": "x"}))
    ).value == "invoice 2"
    assert runs[0] != runs[1]


@both_colours
async def test_once_takes_a_tool_with_its_rules(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool(verify=world.verify)
    world.fails_with, world.verdict = ConnectionError(), Landed("sent")
    found = await done(store.once("k", mail, request={"to": "ann"}))
    assert (found.value, world.done) == ("sent", [("ann", "")])


SECRETS = {"to": "card 4111 1111 1111 1111", "text": "EMP-123456 of ann@example.com"}
KEY = b"a key beside the database"


@both_colours
async def test_what_counts_as_a_secret_does_not_change_which_calls_are_one(
    subject: Subject,
) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    read = world.tool(effect="read", name="read")
    session = await done(store.session("s"))
    first = await done(session.call(mail, **SECRETS))
    named = await done(session.call(mail, **{**SECRETS, "text": "other"}, call_id="c1"))
    await done(session.call(read, **SECRETS, call_id="c2"))
    await done(store.once("k", mail, request=SECRETS))
    assert len(world.done) == 4
    for redaction in (
        holdfast.Redactor(extra={"badge": r"EMP-[0-9]{6}"}, emails=True),
        holdfast.NoRedaction(),
    ):
        later = await subject.open(redaction=redaction)
        session = await done(later.session("s"))
        again = await done(session.call(mail, **SECRETS))
        assert again.replay_of == first.effect_id
        again = await done(session.call(mail, **{**SECRETS, "text": "other"}, call_id="c1"))
        assert again.replay_of == named.effect_id
        assert (await done(session.call(read, **SECRETS, call_id="c2"))).replayed
        assert (await done(later.once("k", mail, request=SECRETS))).replayed
    assert len(world.done) == 4
    # A secret that differs makes another call, though nothing of it is stored.
    changed = {**SECRETS, "to": "card 4012 8888 8888 1881"}
    await raises(RequestMismatch, lambda: session.call(mail, **changed, call_id="c1"))
    assert not (await done(session.call(mail, **changed))).replayed


@both_colours
async def test_a_key_beside_the_database_takes_the_place_of_its_salt(subject: Subject) -> None:
    world, store = World(), await subject.open(redaction=holdfast.Redactor(key=KEY))
    mail = world.tool()
    session = await done(store.session("s"))
    sent = await done(session.call(mail, **SECRETS))
    other = await subject.open(redaction=holdfast.Redactor(key=KEY, emails=True))
    session = await done(other.session("s"))
    assert (await done(session.call(mail, **SECRETS))).replay_of == sent.effect_id
    (first,) = await done(store.effects())
    await done(store.run(forget))
    plain = await subject.open()
    session = await done(plain.session("s"))
    await done(session.call(mail, **SECRETS))
    (second,) = await done(plain.effects())
    assert first.key != second.key
    assert len(set(world.keys)) == 2


def forget(tx: holdfast.Transaction) -> holdfast.Op[None]:
    yield from rows("DELETE FROM hf_effects")


@both_colours
async def test_a_redaction_of_ones_own_needs_one_method(subject: Subject) -> None:
    class Stars:
        key: bytes | None = None

        def redact(self, value: Any) -> Any:
            return dict.fromkeys(value, "***") if type(value) is dict else value

    world, redaction = World(), Stars()
    store = await subject.open(redaction=redaction)
    session = await done(store.session("s"))
    mail = world.tool()
    await done(session.call(mail, to="ann"))
    assert (await done(session.call(mail, to="ann"))).replayed
    assert not (await done(session.call(mail, to="bob"))).replayed
    (first, _) = await done(store.effects())
    assert first.arguments == {"to": "***"}
    redaction.key = b"short"
    await raises(InvalidArgument, lambda: subject.open(redaction=redaction))
    await raises(InvalidArgument, lambda: subject.open(redaction=object()))
