"""What callers bring along and ask for: own ids, moments, several statuses, the last errors."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any
from unittest import mock

from holdfast import (
    FailedAttempt,
    InvalidArgument,
    LeaseLost,
    Refused,
    RequestMismatch,
    Submission,
    Unresolved,
    WorkFailed,
)
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours, sql
from tests.work.items import claimed, kinds, opened
from tests.work.working import opened as opened_now
from tests.work.working import work

SECRET = "sk-ant-api03-" + "a1B2" * 12


# Own ids


@both_colours
async def test_an_own_id_is_one_item_for_ever(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    given: dict[str, Any] = {"session": session, "id": "order-7"}
    first = await done(store.work.submit("mail", {"n": 1}, **given))
    assert first.id == "order-7"
    again = await done(store.work.submit("mail", {"n": 1}, **given))
    assert (again.id, again.number) == ("order-7", first.number)
    [held] = await done(store.work.claim("w"))
    await done(held.complete("sent"))
    again = await done(store.work.submit("mail", {"n": 1}, **given))
    assert (again.status, again.output) == ("completed", "sent")
    [listed] = await done(store.work.submit_many([Submission("mail", {"n": 1}, **given)]))
    assert listed.number == first.number
    assert (await kinds(store, "s")).count("work_submitted") == 1
    for other in (
        partial(store.work.submit, "mail", {"n": 2}, **given),
        partial(store.work.submit, "post", {"n": 1}, **given),
        partial(store.work.submit, "mail", {"n": 1}, queue="q", **given),
        partial(store.work.submit, "mail", {"n": 1}, id="order-7"),
    ):
        await raises(RequestMismatch, other)
    for wrong in ("", "a\nb", 7, "x" * 257):
        await raises(InvalidArgument, partial(store.work.submit, "mail", id=wrong))


# Moments


@both_colours
async def test_moments_are_datetimes_or_milliseconds(subject: Subject) -> None:
    store, clock = await opened(subject)
    now = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    at = (now + timedelta(hours=1)).astimezone(timezone(timedelta(hours=5)))
    item = await done(store.work.submit("t", available_at=at))
    assert (item.available_at, item.waits_for) == (clock.now_ms() + 3_600_000, "time")
    [many] = await done(store.work.submit_many([Submission("t", available_at=at)]))
    assert many.available_at == item.available_at
    for wrong in (datetime(2030, 1, 1), datetime(1960, 1, 1, tzinfo=UTC), "soon", -1, 1.5, True):  # noqa: DTZ001
        await raises(InvalidArgument, partial(store.work.submit, "t", available_at=wrong))
        await raises(InvalidArgument, partial(store.checkpoints, since=wrong))
    session = await done(store.session("s"))
    await done(session.save(x=1))
    clock.advance(60)
    await done(session.save(x=2))
    for since in (now + timedelta(seconds=30), clock.now_ms() - 30_000):
        found = await done(store.checkpoints(since=since))
        assert [each.version for each in found] == [2]
    assert len(await done(store.checkpoints(since=now))) == 2


# Listing


@both_colours
async def test_what_is_incomplete_is_one_query(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    made = []
    for end in ("complete", "run", "wait", "review"):
        item = await claimed(store, session=session)
        made.append(item.number)
        if end == "complete":
            await done(item.complete())
        elif end == "wait":
            await done(item.fail("no"))
        elif end == "review":
            await done(item.fail(Unresolved("in doubt")))
    found = await done(store.work.list(session=session, status=["in_progress", "pending"]))
    assert [item.number for item in found] == sorted(made[1:], reverse=True)
    found = await done(store.work.list(status=("completed", "in_progress"), limit=1))
    assert [item.number for item in found] == [made[1]]


# Who, when and why


@both_colours
async def test_who_last_held_an_item_is_known_after_its_end(subject: Subject) -> None:
    store, clock = await opened(subject)
    item = await claimed(store)
    clock.advance(31)
    await done(store.work.sweep())
    clock.advance(31)
    await done(store.work.promote())
    assert (await done(store.work.get(item.id))).last_holder == "worker"
    [held] = await done(store.work.claim("another"))
    await done(held.complete())
    ended = await done(store.work.get(item.id))
    assert (ended.holder, ended.last_holder) == (None, "another")
    assert ended.to_dict()["last_holder"] == "another"


@both_colours
async def test_the_last_errors_of_an_item_are_kept(subject: Subject) -> None:
    store, clock = await opened(subject)
    session = await done(store.session("s"))
    item = await done(store.work.submit("t", max_retries=100, session=session))
    wanted = []
    for number in range(1, 31):
        [item] = await done(store.work.claim(f"w{number}", lease_seconds=30))
        if number % 10 == 0:
            clock.advance(31)
            await done(store.work.sweep())
            why = ("lease expired", f"lease expired: w{number} sent no heartbeat")
        elif number % 10 == 1:
            await done(item.fail(Unresolved(f"in doubt {number}")))
            await done(store.work.retry(item.id))
            why = ("unresolved", f"Unresolved: in doubt {number}")
        else:
            await done(item.fail(ValueError(f"no {number}"), delay_seconds=0))
            why = ("failed", f"ValueError: no {number}")
        wanted.append((number, f"w{number}", *why, clock.now_ms()))
        clock.advance(400)
        await done(store.work.promote())
    found = await done(store.work.errors(item.id))
    assert isinstance(found[0], FailedAttempt)
    shown = [(e.attempt, e.holder, e.reason, e.error, e.ended_at) for e in found]
    assert 10 <= len(shown) < 30
    assert shown == wanted[::-1][: len(shown)]
    [item] = await done(store.work.claim("w", lease_seconds=30))
    await done(item.complete())
    assert len(await done(store.work.errors(item.id))) == len(shown)
    await done(session.delete())
    assert await done(sql(store, "SELECT * FROM hf_attempts")) == []


@both_colours
async def test_a_very_long_error_is_shortened_among_the_last_ones(subject: Subject) -> None:
    store, _ = await opened(subject)
    item = await claimed(store)
    await done(item.fail("x" * 5_000))
    [found] = await done(store.work.errors(item.id))
    assert 400 < len(found.error) < 600
    assert len((await done(store.work.get(item.id))).error) == 5_000


# Ending again, and redriving


@both_colours
async def test_completing_again_with_the_same_output_changes_nothing(subject: Subject) -> None:
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session)
    given = {"checkpoint": {"channels": {"x": 1}}, "then": [Submission("next")]}
    await done(item.complete({"n": 1}, **given))
    events = await kinds(store, "s")
    await done(item.complete({"n": 1}))
    await done(item.complete({"n": 1}, **given))
    await raises(LeaseLost, partial(item.complete, {"n": 2}))
    await raises(LeaseLost, partial(item.complete, {"n": True}))
    assert await kinds(store, "s") == events
    other = await claimed(store)
    await done(other.fail("no", retry=False))
    await raises(LeaseLost, partial(other.complete, None))


@both_colours
async def test_a_dead_item_is_not_redriven_while_its_key_lives_elsewhere(subject: Subject) -> None:
    store, _ = await opened(subject)
    dead = await claimed(store, key="k")
    await done(dead.fail("no", retry=False))
    living = await claimed(store, key="k", input="another")
    error = await raises(Refused, partial(store.work.redrive, dead.id))
    assert living.id in str(error)
    assert dead.id in str(error)
    assert [item.id for item in await done(store.work.dead())] == [dead.id]
    await done(living.complete())
    again = await done(store.work.redrive(dead.id))
    assert (again.redriven_from, again.key) == (dead.id, "k")
    assert (await done(store.work.redrive(dead.id))).id == again.id


# Secrets and the log


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, lines: list[logging.LogRecord]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record)


@both_colours
async def test_a_worker_logs_one_line_per_failed_attempt_without_secrets(
    subject: Subject,
) -> None:
    store = await opened_now(subject)
    lines: list[logging.LogRecord] = []
    handler = _Lines(lines)
    log = logging.getLogger("holdfast.worker")
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.DEBUG)

    def fail(item: Any) -> None:
        if item.input == "for good":
            raise WorkFailed(f"no, {SECRET}")
        raise ValueError(f"token {SECRET}\nand \x1b[31mmore")

    try:
        again = await done(store.work.submit("t", "again", max_retries=1))
        good = await done(store.work.submit("t", "for good"))
        # The worker ends before the next attempt, however slow it is.
        with mock.patch("holdfast.work.transitions.RETRY_SECONDS", 300.0):
            await work(store, {"t": fail})
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
    assert any("Traceback" in line.getMessage() for line in lines)
    said = [line for line in lines if line.levelno >= logging.INFO]
    told = {id: [line for line in said if id in line.getMessage()] for id in (again.id, good.id)}
    [first] = told[again.id]
    at = (await done(store.work.get(again.id))).available_at
    moment = datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds")
    assert moment.replace("+00:00", "Z") in first.getMessage()
    assert "ValueError: token" in first.getMessage()
    assert " and \ufffd[31mmore; " in first.getMessage()
    assert "1 of 1 retries" in first.getMessage()
    [second] = told[good.id]
    assert "failed permanently" in second.getMessage()
    for line in lines:
        text = logging.Formatter().format(line)
        if line.levelno >= logging.INFO:
            assert line.exc_info is None
            assert "\n" not in text
            assert "\x1b" not in text
        assert SECRET not in text


@both_colours
async def test_notes_about_work_and_spend_are_stored_without_secrets(subject: Subject) -> None:
    """What is submitted and returned is stored as it is: handlers need it."""
    store, _ = await opened(subject)
    session = await done(store.session("s"))
    item = await claimed(store, session=session, input={"token": SECRET})
    await done(item.progress({"token": SECRET}))
    await done(session.spend("m", details={"request": SECRET}))
    assert SECRET not in str((await done(store.work.get(item.id))).last_progress)
    [record] = await done(session.history(kind="manual_checkpoint"))
    assert SECRET not in str(record.data)
    assert SECRET not in str((await done(session.spends()))[0].details)
    await done(item.complete({"token": SECRET}))
    kept = await done(store.work.get(item.id))
    assert (kept.input, kept.output) == ({"token": SECRET}, {"token": SECRET})
