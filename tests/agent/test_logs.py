"""What runs of agents log is one line, and has no secrets at any level."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import holdfast
from holdfast.agent import Agent, AttemptFailed, ModelError, ScriptedModel, Usage
from holdfast.errors import ModelFailed, StoreBusy
from holdfast.kernel.driver import Hooks, Point
from holdfast.testing.subject import Subject, done, raises
from tests.agent.helpers import run
from tests.checkpoints.colours import both_colours

SECRET = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" + "k1L2m3N4o5P6q7R8"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record)


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Take what is logged at all levels."""
    handler, log = Lines(), logging.getLogger("holdfast.agent")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield handler.lines
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


def told(lines: list[logging.LogRecord]) -> list[str]:
    """Return the lines that are no tracebacks; none has a secret or commands a terminal."""
    for line in lines:
        text = logging.Formatter().format(line)
        assert SECRET not in text
        if line.levelno > logging.DEBUG:
            assert text.isprintable()
    assert any("Traceback" in line.getMessage() for line in lines)
    return [line.getMessage() for line in lines if line.levelno > logging.DEBUG]


@both_colours
async def test_a_listener_that_fails_is_logged_without_its_secrets(subject: Subject) -> None:
    def listen(event: Any) -> None:
        raise ValueError(f"the key {SECRET}\nis \x1b[31mwrong")

    store = await subject.open()
    agent = Agent(await done(store.session()), ScriptedModel(["ok"]), on_progress=listen)
    with logged() as lines:
        await run(agent, "go")
    for line in told(lines):
        assert line.startswith("on_progress failed: ValueError: the key [redacted:")


@both_colours
async def test_a_run_whose_end_cannot_be_recorded_is_logged_without_secrets(
    subject: Subject,
) -> None:
    is_busy = False

    def probe(point: Point) -> None:
        nonlocal is_busy
        if is_busy:
            is_busy = False
            raise StoreBusy("somebody else writes")

    def listen(event: Any) -> None:
        nonlocal is_busy
        is_busy = isinstance(event, AttemptFailed)

    def refuse(request: Any) -> Any:
        raise ModelError(f"the key {SECRET} is wrong", usage=Usage())

    store = await subject.open(hooks=Hooks(probe=probe))
    session: holdfast.Session[Any] = await done(store.session())
    agent = Agent(session, refuse, retries=0, on_progress=listen)
    with logged() as lines:
        await raises(ModelFailed, lambda: run(agent, "go"))
    expected = "the end of a run could not be recorded: StoreBusy: somebody else writes"
    assert told(lines) == [expected]
    await done(store.close())
