"""Power cut at any file operation of a working store: what was acknowledged is still there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.kernel.driver import Durability, Hooks, Point
from holdfast.store import check
from holdfast.testing.nouns import Counter
from holdfast.testing.power import Image, PowerLog
from tests.faults.workload import (
    Clients,
    found_in,
    moving_the_log_every,
    prepare,
    read_file,
    together,
)

Report = Callable[[str], None]

THREADS = 5
# So that the WAL is moved into the database, and begun anew, many times within a short life.
PAGES_PER_CHECKPOINT = 24
OPENED_EVERY = 10


@dataclass
class Verdict:
    """What the images of one life showed."""

    images: int = 0
    corrupt: int = 0
    lost: int = 0
    opened: int = 0
    states: int = 0


def live(path: Path, durability: Durability, rounds: int) -> PowerLog:
    """Write from one thread and from several, and mark every call that has returned."""
    commits: list[str] = []

    def count(point: Point) -> None:
        if point.boundary == "commit" and point.moment == "after":
            commits.append(point.call)

    with moving_the_log_every(PAGES_PER_CHECKPOINT), PowerLog() as log:
        clients = Clients(path.parent / "history")
        clients.on_outcome = lambda outcome, id: log.mark("acknowledged", id)
        url = f"sqlite:///{path}?vfs={log.vfs_name}"
        with holdfast.open(url, durability=durability, hooks=Hooks(probe=count)) as store:
            for _ in range(rounds):
                clients.add(store)
                clients.add_twice(store)
                together(store, THREADS * [partial(clients.add, store)])
        assert set(clients.outcomes) == {"returned"}
        assert len(commits) == 3 * rounds, "each group must share one commit"
    kinds = {o.kind for o in log.operations if o.path.endswith("live.db")}
    assert {"write", "sync"} <= kinds, "the WAL must have been moved into the database"
    return log


def judge(log: PowerLog, directory: Path, *, seeds: range, per_cut: int) -> Verdict:
    """Look at every image that differs from those before it, and open some as a store."""
    directory.mkdir(exist_ok=True)
    verdict = Verdict()
    seen: set[int] = set()
    states: set[int] = set()
    for seed in seeds:
        for image in log.images(seed=seed, per_cut=per_cut):
            key = hash((len(image.marks), *image.files.items()))
            if key in seen or not image.files:
                continue
            seen.add(key)
            verdict.images += 1
            try:
                found = read_file(image.write_to(directory)) or []
            except (AssertionError, apsw.Error):
                verdict.corrupt += 1
                continue
            verdict.lost += not set(map(str, image.acknowledged)) <= set(found)
            states.add(len(found))
            if verdict.images % OPENED_EVERY == 0:
                reopen(image, directory)
                verdict.opened += 1
    verdict.states = len(states)
    return verdict


def reopen(image: Image, directory: Path) -> None:
    """Make sure that the store opens after the cut and goes on where it was."""
    url = f"sqlite:///{image.write_to(directory)}"
    for name in image.files:
        (directory / name).chmod(0o600)
    with holdfast.open(url) as store:
        prepare(store)
        before = found_in(store)
        assert Counter(store).add(1, note="after") >= len(before) + 1, image.name
        assert found_in(store) == [*before, "after"], image.name
    problems = [finding for finding in check(url, full=True) if finding.level == "problem"]
    assert problems == [], image.name


def test_at_full_durability_a_power_cut_loses_no_acknowledged_commit_and_corrupts_nothing(
    path: Path, report: Report
) -> None:
    log = live(path, "full", rounds=28)
    verdict = judge(log, path.parent / "images", seeds=range(1), per_cut=7)
    report(f"full: {verdict}")
    assert verdict.images >= 2_000
    assert (verdict.corrupt, verdict.lost) == (0, 0)
    assert verdict.states > 28 * 3, "every state on the way must have been seen"


def test_at_normal_durability_a_power_cut_is_seen_to_lose_commits_but_not_to_corrupt(
    path: Path, report: Report
) -> None:
    log = live(path, "normal", rounds=12)
    verdict = judge(log, path.parent / "images", seeds=range(1), per_cut=3)
    report(f"normal: {verdict}")
    assert verdict.corrupt == 0
    assert verdict.lost > verdict.images // 10


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_power_cut_while_a_store_is_made_leaves_one_that_opens(
    tmp_path: Path, stride: int, report: Report
) -> None:
    with PowerLog() as log, holdfast.open(f"sqlite:///{tmp_path}/live.db?vfs={log.vfs_name}"):
        log.mark("made")
    (tmp_path / "images").mkdir()
    images = list(log.images(per_cut=2))[::stride]
    for image in images:
        reopen(image, tmp_path / "images")
    report(f"{len(images)} cuts while a store was made, all of them opened again")
    assert len(images) > 100


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["full", "normal"])
def test_over_twenty_thousand_power_cuts_keep_the_promise(
    path: Path, durability: Durability, report: Report
) -> None:
    log = live(path, durability, rounds=50)
    verdict = judge(log, path.parent / "images", seeds=range(10), per_cut=9)
    report(f"{durability}: {verdict}")
    assert verdict.images >= 20_000
    assert verdict.corrupt == 0
    assert (verdict.lost > 0) is (durability == "normal")
