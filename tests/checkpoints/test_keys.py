"""Keys make save, append and record idempotent, along each line of history."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast import LeaseLost, SessionBusy, SessionEnded, VersionConflict
from holdfast.errors import InvalidArgument
from holdfast.kernel.driver import Hooks, Trace
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.crash.children import Child

DAY_SECONDS = 86_400


@both_colours
async def test_the_same_key_returns_the_first_checkpoint_and_adds_nothing(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    saved = await done(session.save(log=["a"], data={"n": 1}, metadata={"by": "me"}, key="k1"))
    appended = await done(session.append("log", ["b"], key="k2"))
    recorded = await done(session.record("tool_executed", {"exit_code": 0}, key="k3"))
    assert [each.idempotency_key for each in (saved, appended, recorded)] == ["k1", "k2", "k3"]
    other = await subject.open()
    for again in (session, await done(other.session("s"))):
        assert await done(again.save(log=["other"], key="k1")) == saved
        assert await done(again.append("log", ["b"], key="k2")) == appended
        assert await done(again.record("turn", key="k3")) == recorded
    assert (await done(session.latest())).channels == {"log": ["a", "b"]}
    assert (await done(session.info())).version == 3
    unrelated = await done(store.session("t"))
    assert (await done(unrelated.append("log", ["x"], key="k1"))).version == 1
    await done(session.append("log", ["c"]))
    await done(session.append("log", ["d"]))
    assert (await done(session.latest()))["log"] == ["a", "b", "c", "d"], "no key is no key"
    for wrong in ("", "x" * 257, "a\n", 7):
        await raises(InvalidArgument, partial(session.save, key=wrong))


@both_colours
async def test_a_repeated_key_answers_whatever_happened_since(subject: Subject) -> None:
    """The first call was done; its repetition does not fail for what it caused itself."""
    store = await subject.open()
    session = await done(store.session("s"))
    first = await done(session.save(x=1, expected_version=0, key="k"))
    assert await done(session.save(x=1, expected_version=0, key="k")) == first
    await raises(VersionConflict, lambda: session.save(x=1, expected_version=0, key="other"))
    driven = await done(session.drive("one"))
    assert await done(session.save(x=1, key="k")) == first
    assert await done(driven.save(x=1, key="k")) == first
    await done(driven.close())
    await raises(LeaseLost, lambda: driven.save(x=1, key="k"))
    await done(session.end())
    assert await done(session.save(x=1, key="k")) == first
    await raises(SessionEnded, lambda: session.save(x=1, key="new"))


@both_colours
async def test_a_rewind_forgets_keys_of_what_it_left_and_a_fork_knows_its_history(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    for number in range(1, 5):
        await done(session.append("log", [number], key=f"k{number}"))
    fork = await done(session.fork(3, id="f"))
    assert (await done(fork.append("log", [2], key="k2"))).version == 2
    assert (await done(fork.append("log", [3], key="k3"))).version == 3
    assert (await done(fork.append("log", ["own"], key="k4"))).version == 4
    assert (await done(fork.append("log", ["own"], key="k4"))).version == 4
    assert (await done(fork.append("log", [1], key="k1"))).version == 1
    assert (await done(fork.latest()))["log"] == [1, 2, 3, "own"]
    await done(session.rewind(2))
    assert (await done(session.append("log", [2], key="k2"))).version == 2
    again = await done(session.append("log", [3], key="k3"))
    assert again.version == 6
    assert (await done(session.append("log", [3], key="k3"))) == again
    assert (await done(session.latest()))["log"] == [1, 2, 3]


@both_colours
async def test_keys_count_inside_a_composed_transaction(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))

    def both(tx: holdfast.Transaction) -> holdfast.Op[list[int]]:
        inside = tx.within(session)
        first = yield from inside.append("log", ["a"], key="k")
        second = yield from inside.append("log", ["a"], key="k")
        third = yield from inside.append("log", ["b"], key="l")
        return [first.version, second.version, third.version]

    assert await done(store.run(both)) == [1, 1, 2]
    assert await done(store.run(both)) == [1, 1, 2]
    assert (await done(session.latest()))["log"] == ["a", "b"]


@both_colours
async def test_one_of_many_callers_at_once_writes(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    await done(session.append("log", ["first"]))
    calls: list[Any] = [partial(session.append, "log", [n], key="k") for n in range(8)]
    found = await subject.together(calls)
    assert len({each.version for each in found}) == 1
    assert len((await done(session.latest()))["log"]) == 2


def test_processes_at_once_write_each_key_once(place: dict[str, Any], tmp_path: Path) -> None:
    with holdfast.open(**place) as store:
        store.session("s").append("log", ["first"])

    def work(say: Any) -> None:
        with holdfast.open(**place) as store:
            session = store.find_session("s")
            for number in range(30):
                say(str(session.append("log", [number], key=f"k{number}").version))

    children = [Child(work) for _ in range(3)]
    said = [child.wait() for child in children]
    assert [status for status, _ in said] == [0, 0, 0]
    assert said[0][1] == said[1][1] == said[2][1]
    with holdfast.open(**place) as store:
        latest = store.find_session("s").latest()
    assert latest is not None
    assert latest["log"] == ["first", *range(30)]


@both_colours
async def test_a_key_is_remembered_for_a_week_and_until_its_checkpoint_is_pruned(
    subject: Subject,
) -> None:
    clock = holdfast.VirtualClock()
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))
    await done(session.append("log", ["a"], key="old"))
    for number in range(9):
        await done(session.append("log", [number]))
    clock.advance(6 * DAY_SECONDS)
    await done(store.prune(keep=2))
    assert (await done(session.append("log", ["a"], key="old"))).version == 1
    assert sorted((await done(session.counts())).items()) == [("turn", 3)]
    assert await done(session.counts(at_most=2)) == {"turn": 2}
    clock.advance(2 * DAY_SECONDS)
    await done(store.prune(keep=2))
    assert (await done(session.append("log", ["a"], key="old"))).version == 11


def test_keys_move_with_their_session(place: dict[str, Any], tmp_path: Path) -> None:
    with holdfast.open(**place) as store:
        first = store.session("s").append("log", ["a"], key="k")
        store.export(tmp_path / "export", ["s"])
    with holdfast.open(f"sqlite:///{tmp_path}/other.db") as other:
        other.import_sessions(tmp_path / "export")
        moved = other.find_session("s")
        assert moved.append("log", ["a"], key="k") == first
        assert moved.append("log", ["b"], key="l").version == 2


@both_colours
async def test_a_key_costs_no_statement(subject: Subject) -> None:
    traces: list[Trace] = []
    store = await subject.open(hooks=Hooks(trace=traces.append))
    session = await done(store.session("s"))
    for number in range(3):
        await done(session.append("log", [number]))
    traces.clear()
    await done(session.append("log", ["plain"]))
    await done(session.append("log", ["keyed"], key="k"))
    plain, keyed = traces
    assert (plain.statements, plain.attempts) == (keyed.statements, keyed.attempts)


@both_colours
async def test_a_handle_of_the_process_that_drives_is_told_which_handle_to_use(
    subject: Subject,
) -> None:
    store = await subject.open()
    other = await subject.open()
    session = await done(store.session("s"))
    driven = await done(session.drive("me"))
    for busy in (lambda: session.save(x=1), lambda: session.drive("me too"), session.end):
        error = await raises(SessionBusy, busy)
        assert "the handle that drive() returned" in str(error)
    theirs = await done(other.session("s"))
    error = await raises(SessionBusy, lambda: theirs.save(x=1))
    assert "driven by 'me'" in str(error)
    await done(driven.close())
    again = await done(theirs.drive("they"))
    error = await raises(SessionBusy, lambda: session.save(x=1))
    assert "driven by 'they'" in str(error)
    await done(again.close())


@both_colours
async def test_history_is_read_oldest_first_too(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session("s"))
    for number in range(6):
        kind = "turn" if number % 2 else "error_boundary"
        await done(session.record(kind, number, item="i" if number < 3 else None))
    fork = await done(session.fork(4))
    await done(fork.save(x=1))

    async def versions(**asked: Any) -> list[int]:
        return [each.version for each in await done(fork.history(**asked))]

    assert await versions() == [5, 4, 3, 2, 1]
    assert await versions(oldest_first=True) == [1, 2, 3, 4, 5]
    assert await versions(oldest_first=True, limit=2) == [1, 2]
    assert await versions(oldest_first=True, after=2, limit=3) == [3, 4, 5]
    assert await versions(oldest_first=True, after=3, before=5) == [4]
    assert await versions(oldest_first=True, kind="turn") == [2, 4, 5]
    assert await versions(oldest_first=True, item="i") == [1, 2, 3]
    assert await versions(after=3) == [5, 4]
    await raises(InvalidArgument, lambda: session.history(after=-1))
