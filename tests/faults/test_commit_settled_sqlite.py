"""A COMMIT that meets a failing disk is settled: never lost, never doubled, never guessed."""

from __future__ import annotations

import errno
import itertools
import shutil
import subprocess
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.testing.faults import Fault, FaultyDisk, FileOperation, FileRole
from holdfast.testing.nouns import Counter
from holdfast.testing.power import PowerLog
from tests.faults.workload import Clients, moving_the_log_every, read_file, together
from tests.internals import engine_of

Report = Callable[[str], None]

OTHERS = ("nobody", "reader", "pinned", "store")
# Who else is there, whether the writer is in a group, and whether the disk itself is in doubt.
COMPANIES = list(itertools.product(OTHERS, (False, True), (False, True)))
# Half of them, in which any two of the three still meet in every way.
HALF = [each for each in COMPANIES if (OTHERS.index(each[0]) + each[1] + each[2]) % 2]
GROUP = 4


@dataclass(frozen=True)
class Failure:
    """What the disk does to a COMMIT: the nth such operation on the WAL goes wrong."""

    operation: FileOperation
    nth: int
    error: int
    after_effect: bool

    def arm(self, disk: FaultyDisk) -> Fault:
        """Make it happen at the next COMMIT."""
        return disk.fail_on(
            self.operation,
            nth=self.nth,
            file="wal",
            error=self.error,
            after_effect=self.after_effect,
        )

    @property
    def is_full(self) -> bool:
        """Whether it is the room that is missing."""
        return self.error == errno.ENOSPC

    def __str__(self) -> str:
        moment = "after" if self.after_effect else "before"
        return f"{self.operation}-{self.nth}-{errno.errorcode[self.error]}-{moment}"


STRIKES: list[tuple[FileOperation, int, int]] = [
    ("sync", 1, errno.EIO),
    ("write", 1, errno.EIO),
    ("write", 2, errno.EIO),
    ("write", 7, errno.EIO),
    ("write", 1, errno.ENOSPC),
    ("write", 8, errno.ENOSPC),
]
FAILURES = [
    Failure(operation, nth, error, after_effect)
    for operation, nth, error in STRIKES
    for after_effect in (False, True)
]


class Scene:
    """A store on a disk that can fail, under a log from which every crash can be replayed."""

    def __init__(
        self, stack: ExitStack, directory: Path, template: Path, *, doubtful: bool, **options: Any
    ) -> None:
        if doubtful:
            self.disk = stack.enter_context(FaultyDisk())
            self.log = stack.enter_context(PowerLog(base=self.disk.vfs_name))
            self.vfs = self.log.vfs_name
        else:
            self.log = stack.enter_context(PowerLog())
            self.disk = stack.enter_context(FaultyDisk(base=self.log.vfs_name))
            self.vfs = self.disk.vfs_name
        self.directory = directory
        self.path = Path(shutil.copy(template, directory))
        self.url = f"sqlite:///{self.path}?vfs={self.vfs}"
        self.clients = Clients(directory / "history")
        self.clients.on_outcome = self.log.mark
        self.store = stack.enter_context(holdfast.open(self.url, **options))
        stack.callback(self.disk.reset)
        self.clients.add(self.store)

    def judge_after_a_kill(self) -> None:
        """Open a copy of the files as they are: what is found if all processes die now."""
        copy = self.directory / "copy"
        copy.mkdir(exist_ok=True)
        for suffix in ("", "-wal"):
            (copy / f"live.db{suffix}").unlink(missing_ok=True)
        # Another process must read the file: closing it here would drop SQLite's locks.
        files = f"{self.path} {self.path}-wal"
        subprocess.run(f"cp {files} {copy}/ 2>/dev/null", shell=True, check=False)
        with holdfast.open(f"sqlite:///{copy}/live.db") as store:
            self.clients.judge(store)

    def judge_crashes(self, per_cut: int) -> int:
        """Return in how many images of a kill or power cut an answer turned out to be wrong."""
        images = self.directory / "images"
        images.mkdir()
        wrong = 0
        for image in self.log.images(per_cut=per_cut, wanted=lambda marks: len(marks) > 1):
            found = set(read_file(image.write_to(images)) or [])
            for outcome, id in image.marks:
                wrong += contradicts(outcome, id, found)
        return wrong


def contradicts(outcome: str, id: object, found: set[str]) -> bool:
    """Tell whether the state after a crash is not what the caller was told before it."""
    if outcome in {"returned", "settled as made"}:
        return id not in found
    if outcome == "CommitUnknown":
        return False
    return id in found


@contextmanager
def company(scene: Scene, others: str) -> Iterator[None]:
    """Have nobody else, an idle reader, one in the middle of a read, or another store beside."""
    if others == "reader":
        Counter(scene.store).value()
        yield
    elif others == "pinned":
        reader = apsw.Connection(str(scene.path), vfs=scene.vfs)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM hf_trees").fetchall()
        try:
            yield
        finally:
            reader.close()
    elif others == "store":
        with holdfast.open(scene.url) as store:
            Counter(store).value()
            yield
    else:
        # The one that opening has left behind.
        idle: list[apsw.Connection] = engine_of(scene.store)._idle_readers
        while idle:
            idle.pop().close()
        yield


def settle_unknown(scene: Scene) -> None:
    """Ask for every unknown commit: here, elsewhere and again, always with one answer."""
    for id, commit_id in scene.clients.unknown.items():
        answers = {scene.store.settle(commit_id)}
        scene.log.mark("settled as made" if answers == {True} else "settled as not made", id)
        with holdfast.open(scene.url) as other:
            answers |= {other.settle(commit_id), scene.store.settle(commit_id)}
        assert len(answers) == 1, f"the answers differ: {answers}"


def write(scene: Scene, *, grouped: bool) -> None:
    """Write alone, or in a group with a composed call and one that fails by itself."""
    clients, store = scene.clients, scene.store
    if not grouped:
        clients.add(store)
        return
    adds = GROUP * [partial(clients.add, store)]
    together(store, [*adds, partial(clients.add_twice, store), partial(refused, scene)])


def refused(scene: Scene) -> None:
    """A call that fails by itself: whatever becomes of the group, it has written nothing."""
    with pytest.raises((holdfast.InvalidArgument, holdfast.StoreError)) as caught:
        Counter(scene.store).add_below(-1)
    assert not isinstance(caught.value, holdfast.CommitUnknown)


def go_on(scene: Scene) -> None:
    """Make sure that every answer is right, after a kill too, and that the store works."""
    settle_unknown(scene)
    scene.clients.judge(scene.store)
    scene.judge_after_a_kill()
    scene.clients.outcomes.clear()
    scene.clients.add(scene.store)
    assert scene.clients.outcomes == {"returned": 1}, "the store must go on working"


def check_afterwards(scene: Scene) -> None:
    """Make sure that every answer is still right once the store was closed, or crashed."""
    with holdfast.open(scene.url.partition("?")[0]) as store:
        scene.clients.judge(store)
    assert scene.judge_crashes(per_cut=2) == 0


Arrange = Callable[[Scene], list[Fault]]
Companies = Sequence[tuple[str, bool, bool]]
in_company = pytest.mark.parametrize(
    "companies", [HALF, pytest.param(COMPANIES, marks=pytest.mark.slow)], ids=["half", "all"]
)


def fail_commits(
    directory: Path, template: Path, companies: Companies, arrange: Arrange, **options: Any
) -> Tally[str]:
    """Let a COMMIT fail in every company; return what the callers saw."""
    outcomes: Tally[str] = Tally()
    for others, grouped, doubtful in companies:
        place = directory / f"{others}-{grouped}-{doubtful}"
        place.mkdir()
        with ExitStack() as stack:
            scene = Scene(stack, place, template, doubtful=doubtful, **options)
            with company(scene, others):
                scene.clients.outcomes.clear()
                faults = arrange(scene)
                write(scene, grouped=grouped)
                assert faults[0].fired > 0
                outcomes += scene.clients.outcomes
                scene.disk.reset()
                go_on(scene)
        check_afterwards(scene)
    return outcomes


@in_company
@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_a_commit_that_fails_once_is_settled_rightly(
    tmp_path: Path, template: Path, companies: Companies, failure: Failure, report: Report
) -> None:
    outcomes = fail_commits(tmp_path, template, companies, lambda scene: [failure.arm(scene.disk)])
    report(f"{failure}: {len(companies)} failed commits, {dict(outcomes)}")
    assert set(outcomes) == {"returned", "StoreFull" if failure.is_full else "StoreUnavailable"}


@in_company
@pytest.mark.parametrize("long_seconds", [0.0, 60.0], ids=["long", "short"])
def test_a_commit_that_comes_back_from_the_log_was_made(
    tmp_path: Path,
    template: Path,
    companies: Companies,
    report: Report,
    long_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sync fails, and so does the closing: the next connection finds it in the WAL."""
    monkeypatch.setattr("holdfast.kernel.sqlite.transactions.LONG_SECONDS", long_seconds)

    def arrange(scene: Scene) -> list[Fault]:
        disk = scene.disk
        return [disk.fail_on("sync", file="wal"), disk.fail_on("sync", file="db")]

    outcomes = fail_commits(tmp_path, template, companies, arrange)
    report(f"sync of the WAL, then of the database: {dict(outcomes)}")


def test_a_commit_whose_checkpoint_fails_was_made(tmp_path: Path, template: Path) -> None:
    outcomes: Tally[str] = Tally()
    for doubtful in (False, True):
        place = tmp_path / str(doubtful)
        place.mkdir()
        with moving_the_log_every(1), ExitStack() as stack:
            scene = Scene(stack, place, template, doubtful=doubtful)
            for _ in range(8):
                fault = scene.disk.fail_on("sync", file="db")
                scene.clients.add(scene.store)
                assert fault.fired == 1
            scene.disk.reset()
            go_on(scene)
            outcomes += scene.clients.outcomes
        check_afterwards(scene)
    assert set(outcomes) == {"returned"}


PERSISTENT: list[tuple[FileOperation, FileRole | None, int]] = [
    ("sync", "wal", errno.EIO),
    ("sync", None, errno.EIO),
    ("write", "wal", errno.EIO),
    ("write", None, errno.ENOSPC),
]


@in_company
@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("operation", "file", "error"), PERSISTENT)
def test_while_the_disk_keeps_failing_a_commit_is_unknown_and_settled_later(
    tmp_path: Path,
    template: Path,
    companies: Companies,
    operation: FileOperation,
    file: FileRole | None,
    error: int,
    after_effect: bool,
    report: Report,
) -> None:
    def arrange(scene: Scene) -> list[Fault]:
        started = time.monotonic()

        def mark(outcome: str, id: str) -> None:
            scene.log.mark(outcome, id)
            times.append(time.monotonic() - started)

        scene.clients.on_outcome = mark
        return [
            scene.disk.fail_on(
                operation, file=file, error=error, after_effect=after_effect, persistent=True
            )
        ]

    times: list[float] = []
    outcomes = fail_commits(tmp_path, template, companies, arrange, busy_timeout_seconds=60)
    report(f"{operation} {file} persistently: {dict(outcomes)}")
    assert set(outcomes) == {"CommitUnknown" if error == errno.EIO else "StoreFull"}
    assert max(times) < 60, "a call waited for what cannot come"


def test_a_writer_whose_row_was_closed_goes_on_under_another_name(path: Path) -> None:
    """Somebody asked for a commit that it has not made yet."""
    with holdfast.open(f"sqlite:///{path}") as store:
        assert Counter(store).add() == 1
        with apsw.Connection(str(path)) as reader:
            [(writer_id, found)] = reader.execute(
                "SELECT id, batch FROM hf_writers ORDER BY updated_at DESC LIMIT 1"
            ).fetchall()
        batch = int(str(found))
        assert store.settle(f"{writer_id}:{batch + 5}") is False
        assert store.settle(f"{writer_id}:{batch}") is True
        assert [Counter(store).add(), Counter(store).add()] == [2, 3]
        assert store.settle(f"{writer_id}:{batch + 5}") is False
