"""A tool run with full recovery, step by step, and what the next process finds after a crash."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.kernel.postgres  # Imported once, not in each child.
from holdfast import LeaseLost, VirtualClock
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.crash.children import Child, run

Say = Callable[[str], None]
INPUT = {"tool": "pdf_parser", "file": "document.pdf"}
RESULT = {"pages": 42, "text_length": 12345}


@both_colours
async def test_the_eleven_steps_of_a_tool_with_full_recovery(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock, durability="normal")
    work = store.work
    # 1. Create the task.
    task = await done(store.session("task-001", name="Process documents"))
    # 2. Create the work item.
    made = await done(work.submit("tool_execution", INPUT, session=task, priority=10))
    # 3. A worker claims it.
    [item] = await done(work.claim("worker-abc", lease_seconds=300))
    assert (item.id, item.input, item.holder) == (made.id, INPUT, "worker-abc")
    assert item.lease_expires_at == clock.now_ms() + 300_000
    # 4. A checkpoint before execution.
    first = await done(item.session.record("iteration_start", {"iteration": 1}, item=item))
    assert (first.version, first.item_id) == (1, item.id)
    # 5. and 6. Nobody has done it: the key is this worker's, durably.
    begun = await done(item.session.begin("pdf_parser", {"file": "document.pdf"}, item=item))
    assert isinstance(begun, holdfast.Issued)
    # 7. A heartbeat, a minute later.
    clock.advance(60)
    assert (await done(item.heartbeat())).lease_expires_at == clock.now_ms() + 300_000
    # 8., 9. and 10. The evidence, the key's result and the item's completion are one commit.
    evidence = {"kind": "tool_executed", "data": {"result": "success", **RESULT}}
    await done(item.complete(RESULT, checkpoint=evidence, effect=(begun, RESULT)))
    # 11. The task has succeeded.
    await done(task.end("completed"))
    history = await done(task.history())
    assert [each.kind for each in history] == [
        *("state_transition", "tool_executed", "iteration_start"),
    ]
    assert [each.item_id for each in history] == [None, item.id, item.id]
    read = await done(work.get(item.id))
    assert (read.status, read.output, read.holder) == ("completed", RESULT, None)
    [effect] = await done(store.effects(item=item.id))
    assert (effect.status, effect.result) == ("completed", RESULT)
    assert (await done(task.info())).status == "completed"


def parse(place: dict[str, Any], files: Path, say: Say, die: str | None) -> None:
    """Do the work of one item as a worker does, and stop breathing at the named place."""

    @holdfast.tool(effect="write", name="pdf_parser")
    def pdf_parser(file: str) -> dict[str, int]:
        with (files / "runs").open("a") as runs:
            runs.write(f"{file}\n")
        return RESULT

    def hold(where: str) -> None:
        if where == die:
            say(where)
            time.sleep(60)

    with holdfast.open(**place, durability="normal") as store:
        while not (claimed := store.work.claim("worker", lease_seconds=2 if die else 60)):
            store.work.sweep()
            time.sleep(0.02)
        [item] = claimed
        session = item.session
        assert session is not None
        assert session.resume_point().iteration == 1
        session.record("iteration_start", {"iteration": 1}, item=item)
        hold("before the tool")
        result = item.call(pdf_parser, file="document.pdf")
        say(f"replayed {result.replayed}")
        hold("after the tool")
        session.record("tool_executed", result.value, item=item)
        hold("before completing")
        item.complete(result.value)
        say("completed")


@pytest.mark.parametrize("die", ["before the tool", "after the tool", "before completing"])
def test_recovery_after_a_crash(place: dict[str, Any], tmp_path: Path, die: str) -> None:
    def make(_: Say) -> None:
        with holdfast.open(**place, durability="normal") as store:
            task = store.session("task-001")
            store.work.submit("tool_execution", INPUT, session=task, max_retries=1)

    assert run(make)[0] == 0
    first = Child(lambda say: parse(place, tmp_path, say, die))
    while first.lines.readline().strip() != die:
        pass
    first.kill()
    assert first.wait()[0] == -signal.SIGKILL
    with holdfast.open(**place, durability="normal") as store:
        # 1. The item is found, though its worker is dead: in progress, under a lease that ends.
        [item] = store.work.list(session="task-001", status="in_progress")
        # 2. So is the last checkpoint.
        latest = store.find_session("task-001").latest()
        assert latest is not None
        assert latest.kind == ("tool_executed" if die == "before completing" else "iteration_start")
        # 3. And what was already done: the stored result is used, not made again.
        found = [effect.status for effect in store.effects(item=item.id)]
        assert found == ([] if die == "before the tool" else ["completed"])
    status, said = run(lambda say: parse(place, tmp_path, say, None))
    assert status == 0
    assert said == [f"replayed {die != 'before the tool'}", "completed"]
    assert (tmp_path / "runs").read_text() == "document.pdf\n"
    with holdfast.open(**place, durability="normal") as store:
        read = store.work.get(item.id)
        assert (read.status, read.output) == ("completed", RESULT)
        assert (read.attempts, read.rescues, read.retry_count) == (2, 1, 1)
        kinds = [each.kind for each in store.find_session("task-001").history(item=read)]
        assert kinds.count("error_boundary") == 1


@both_colours
async def test_the_pattern_of_recovering_a_task(subject: Subject) -> None:
    """The newest iteration that was begun or ended says where to go on."""
    store = await subject.open(durability="normal")
    task = await done(store.session("task"))
    assert (await done(task.resume_point())).iteration == 1
    await done(task.record("iteration_start", {"iteration": 1}))
    await done(task.save(kind="iteration_end", data={"iteration": 1}, state={"step": "planned"}))
    point = await done(task.resume_point())
    assert point.iteration == 2
    assert (await done(task.at(point.checkpoint.version)))["state"] == {"step": "planned"}


@both_colours
async def test_the_pattern_of_the_watchdog(subject: Subject) -> None:
    clock = VirtualClock()
    store = await subject.open(clock=clock, durability="normal")
    task = await done(store.session("task"))
    await done(store.work.submit("t", "retried", session=task))
    await done(store.work.submit("t", "used up", session=task, max_retries=0))
    zombies = await done(store.work.claim("worker", limit=2, lease_seconds=300))
    clock.advance(300)
    swept = await done(store.work.sweep())
    assert (swept.requeued, swept.failed) == (1, 1)
    said = [each.data["error"] for each in await done(task.history(kind="error_boundary"))]
    assert said == ["lease expired: worker sent no heartbeat"] * 2
    for zombie in zombies:
        await raises(LeaseLost, zombie.complete)
    [dead] = await done(store.work.dead())
    assert dead.input == "used up"
