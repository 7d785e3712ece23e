"""`holdfast explore`: try every action of a module in every state of its world."""

from __future__ import annotations

import functools
import pkgutil
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast

from .. import store
from ..arguments import shown
from ..checkpoints.diff import printable
from ..errors import HoldfastError, InvalidArgument, NotFound
from ..formatting import plural
from .command import Answer, Namespace, Url, argument, cause, flag, imported, option
from .output import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..worlds import Action, Exploration, Invariant, World

FOUND = 1
# What stands between the command and a module that it imports.
_IMPORTING = re.compile(
    rf"<frozen |{re.escape(pkgutil.__file__)}|.*[/\\]importlib[/\\]__init__\.py"
)


WorldName = Annotated[
    str,
    argument(
        "MODULE:WORLD",
        "A function that makes the world; its module has the actions and invariants.",
    ),
]
Strategy = Annotated[str, option("NAME", "bfs, dfs, random, coverage, weighted or novelty.")]
Seed = Annotated[int, option("N", "The seed of random choices.")]
MaxSteps = Annotated[int, option("N", "Try at most this many actions.")]
MaxStates = Annotated[int | None, option("N", "Visit at most this many states.")]
MaxDepth = Annotated[int | None, option("N", "Do not explore beyond this depth.")]
MaxSeconds = Annotated[float | None, option("SECONDS", "Stop after this time.")]
Stop = Annotated[bool, flag("--stop", "Stop at the first violation.")]
Reports = Annotated[
    list[str] | None,
    option("FILE", "Write a report: .json, .xml (JUnit), .html, .mmd (Mermaid) or .dot."),
]
Tests = Annotated[
    str | None, option("DIRECTORY", "Write a pytest file for each kind of violation.")
]
Resume = Annotated[bool, flag("--resume", "Continue an exploration that was killed or stopped.")]
Clean = Annotated[
    bool, flag("--clean", "Remove an exploration and what its killed processes left behind.")
]
Id = Annotated[
    str | None, option("ID", "The exploration's id in the store.", show_default="MODULE:WORLD")
]
CommitEvery = Annotated[
    int, option("N", "Commit to the store after this many steps; a kill repeats at most these.")
]
Join = Annotated[
    bool, flag("--join", "Explore as another worker of an exploration that runs elsewhere.")
]
Workers = Annotated[int, option("N", "Explore with this many processes, each with its own world.")]


def explore(
    world: WorldName,
    strategy: Strategy = "bfs",
    seed: Seed = 0,
    max_steps: MaxSteps = 10_000,
    max_states: MaxStates = None,
    max_depth: MaxDepth = None,
    max_seconds: MaxSeconds = None,
    stop: Stop = False,
    report: Reports = None,
    tests: Tests = None,
    resume: Resume = False,
    clean: Clean = False,
    join: Join = False,
    id: Id = None,
    commit_every: CommitEvery = 1,
    workers: Workers = 1,
    url: Url = None,
    namespace: Namespace = None,
) -> Answer:
    """Explore a world: every action in every state, with invariants checked after each.

    The actions and invariants are those in the module of the world. With --url, --id or --resume
    every step is written to a store, a killed exploration can be resumed, and with --workers any
    machine that uses the store can --join. The exit code is 1 if an invariant was violated.
    """
    from ..worlds import explore as run
    from ..worlds.journal import require_known

    if clean and resume:
        raise InvalidArgument("--clean removes what --resume would continue; give one of them")
    if join and (clean or resume):
        raise InvalidArgument("--join takes part in what is running; give no --clean or --resume")
    if join and (report or tests or workers != 1):
        raise InvalidArgument(
            "--join adds one worker, and the process that started the exploration has its result; "
            "give no --report, --tests or --workers"
        )
    files = _files(report or ())
    if tests is not None and not Path(tests).is_dir():
        raise InvalidArgument(f"--tests must name a directory, and {shown(tests)} is not one")
    make_world, actions, invariants = _loaded(world)
    name = world if id is None else id
    is_stored = bool(url or id is not None or resume)
    if clean:
        return _clean(_reported(make_world, world), name, url, namespace, is_stored=is_stored)
    if join:
        given = (_reported(make_world, world), actions, invariants)
        with _ended_by_sigterm():
            return _join(given, name, commit_every, url, namespace)
    with ExitStack() as closing:
        closing.enter_context(_ended_by_sigterm())
        kept: dict[str, Any] = {}
        if is_stored:
            place = store.open(url, namespace=namespace, migrate=not resume)
            kept = {"store": closing.enter_context(place)}
            kept |= {"id": name, "resume": resume, "commit_every": commit_every}
            if resume:
                require_known(kept["store"], kept["id"])
        move = closing.enter_context(progress("exploring"))
        result = run(
            _reported(make_world, world) if workers == 1 else make_world,
            actions,
            invariants,
            strategy=strategy,
            seed=seed,
            max_steps=max_steps,
            max_states=max_states,
            max_depth=max_depth,
            max_seconds=max_seconds,
            stop_on_violation=stop,
            on_progress=lambda now: move(now.steps, now.steps + now.waiting),
            workers=workers,
            **kept,
        )
    return _answer(result, files, make_world, tests)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, with which jobs are stopped, do what Ctrl-C does: systems are restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _interrupt(_: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        handler = signal.default_int_handler
    handler(signal.SIGINT, frame)


def _files(report: Sequence[str]) -> list[Path]:
    from ..worlds.reports import report_file

    files = [report_file(file) for file in report]
    for file in files:
        if not file.parent.is_dir():
            missing = shown(str(file.parent))
            raise InvalidArgument(f"--report needs a directory, and {missing} is none")
    return files


def _answer(
    result: Exploration, files: list[Path], make_world: Callable[[], World], tests: str | None
) -> Answer:
    """Write what was asked for, and tell what was found."""
    from ..worlds.reports import to_data, write_report

    written = [str(write_report(result, file)) for file in files]
    refused: list[str] = []
    if tests is not None:
        written += _tests(result, make_world, tests, refused)
    lines = [result.summary(), *(f"wrote {file}" for file in written), *refused]
    data = {**to_data(result), "written": written, "refused": refused}
    # What the explored code says must not command the terminal.
    text = "\n".join(printable(line) for line in "\n".join(lines).split("\n"))
    return Answer(data, text, 0 if result.has_passed else FOUND)


def _clean(
    make_world: Callable[[], World],
    id: str,
    url: str | None,
    namespace: str | None,
    *,
    is_stored: bool,
) -> Answer:
    from ..worlds import clean

    with ExitStack() as closing:
        opened = None
        try:
            opened = closing.enter_context(store.open(url, namespace=namespace, migrate=False))
        except NotFound:
            # One that was never to be stored may have left something all the same.
            if is_stored:
                raise
        cleaned = clean(make_world, opened, None if opened is None else id)
    lines = [f"Removed exploration {id}." if cleaned.is_found else f"There is no exploration {id}."]
    if cleaned.things:
        lines.append(f"Removed {plural(cleaned.things, 'leftover')} of killed processes.")
    if cleaned.problem is not None:
        lines.append(cleaned.problem)
    data = {"id": id, "removed": cleaned.is_found, "leftovers": cleaned.things}
    code = FOUND if cleaned.problem else 0
    return Answer({**data, "problem": cleaned.problem}, "\n".join(lines), code)


def _join(
    given: tuple[Callable[[], World], list[Action], list[Invariant]],
    id: str,
    commit_every: int,
    url: str | None,
    namespace: str | None,
) -> Answer:
    from ..worlds import take_part

    with store.open(url, namespace=namespace, migrate=False) as opened:
        steps = take_part(*given, store=opened, id=id, commit_every=commit_every)
    return Answer({"id": id, "steps": steps}, f"Tried {plural(steps, 'action')} for {id}.")


def _loaded(name: str) -> tuple[Callable[[], World], list[Action], list[Invariant]]:
    """Return the function that makes the world, and the actions and invariants beside it."""
    from ..worlds.marked import marked_in

    module = name.partition(":")[0]
    if ":" not in name:
        raise InvalidArgument(f"{shown(name)} must be MODULE:WORLD, like shop.world:make_world")
    try:
        make_world = imported(name)
    except (Exception, SystemExit) as error:
        problem = f"{shown(name)} cannot be loaded: {cause(error)}{_traceback(error)}"
        raise InvalidArgument(problem) from error
    if not callable(make_world):
        raise InvalidArgument(f"{shown(name)} must be a function that makes a world")
    actions, invariants = marked_in(sys.modules[module])
    if not actions:
        raise InvalidArgument(f"{module} has no action; @holdfast.worlds.action makes one")
    return cast("Callable[[], World]", make_world), actions, invariants


def _reported(make_world: Callable[[], World], name: str) -> Callable[[], World]:
    """Return a function that makes the world, and says what failed there and where."""

    @functools.wraps(make_world)
    def make() -> World:
        try:
            return make_world()
        except HoldfastError:
            raise
        except (Exception, SystemExit) as error:
            problem = f"{shown(name)} failed: {cause(error)}{_traceback(error)}"
            raise InvalidArgument(problem) from error

    return make


def _traceback(error: BaseException) -> str:
    """Return the lines of a traceback that stand in the user's code."""
    ours = Path(__file__).parent.parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if ours not in Path(frame.filename).parents and not _IMPORTING.match(frame.filename)
    ]
    return f"\n{''.join(traceback.format_list(frames)).rstrip()}" if frames else ""


def _tests(
    result: Exploration, make_world: Callable[[], World], directory: str, refused: list[str]
) -> list[str]:
    """Write a test for the nearest violation of each invariant; say which cannot be written."""
    from ..worlds import write_reproducer

    written: list[str] = []
    for violation in result.nearest():
        name = violation.invariant
        words = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() or "violation"
        file = Path(directory) / f"test_{words}.py"
        # Names that differ in other characters only.
        for number in count(2):
            if str(file.resolve()) not in written:
                break
            file = file.with_name(f"test_{words}_{number}.py")
        try:
            written.append(str(write_reproducer(violation, result.graph, make_world, file)))
        except HoldfastError as error:
            refused.append(f"no test for {name}: {error}")
    return written
