"""The sample shop: every planted bug is found, by a shortest path that a test file repeats."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.worlds import Exploration, Violation, explore, write_reproducer
from holdfast.worlds.marked import marked_in
from tests.docs.documents import ROOT, blocks_of

pytest.importorskip("redis")
from examples.shop import world as shop
from examples.shop.servers import redis_executable
from examples.shop.service import BUGS

pytestmark = pytest.mark.skipif(redis_executable() is None, reason="there is no redis-server")

STATES_MAX = 2_000
# The invariant that each bug violates, and the shortest path to it; who is ann unless it is said.
FOUND = {
    "lock_left": ("no_lock_is_left", "add checkout checkout"),
    "oversell": ("stock_is_never_negative", "add add:bob checkout checkout:bob"),
    "stale_stock": ("cached_stock_is_true", "add checkout stock cancel"),
    "paid_after_cancel": ("cancelled_orders_hold_no_money", "add checkout cancel pay"),
    "double_refund": ("nobody_is_refunded_twice", "add checkout pay pack cancel"),
    "label_left": ("labels_are_of_packed_orders", "add checkout pay pack cancel"),
    "stale_total": ("the_total_is_charged", "add checkout look coupon pay"),
    "full_refund": (
        "refunds_are_what_was_charged",
        "add checkout coupon pay pack ship give_back refund",
    ),
    "no_credit_note": (
        "refunded_orders_have_a_credit_note",
        "add checkout pay pack ship give_back look refund",
    ),
    "copy_twice": (
        "no_copy_appears_or_vanishes",
        "add add:bob checkout checkout:bob pay pack ship give_back refund",
    ),
}
# Of these the actions lead to the bug in one order only.
ONE_ORDER = ["stale_total", "full_refund", "no_credit_note"]
NEAR = ["lock_left", "stale_stock", "paid_after_cancel"]
TUTORIAL = ROOT / "docs" / "how-to" / "explore-the-shop.md"


def explored(**options: Any) -> Exploration:
    actions, invariants = marked_in(shop)
    result = explore(shop.make_world, actions, invariants, max_steps=100_000, **options)
    assert (result.warnings, result.leaks) == ([], ())
    return result


def nearest(result: Exploration, bug: str) -> Violation:
    [found] = [each for each in result.nearest() if each.invariant == FOUND[bug][0]]
    return found


def words(violation: Violation) -> list[str]:
    steps = [(step.action, step.arguments.get("customer", "ann")) for step in violation.path]
    return [name if who == "ann" else f"{name}:{who}" for name, who in steps]


def ways(result: Exploration, bug: str) -> int:
    """Count the paths, of the shortest length, to all states that violate the invariant."""
    violated = [each for each in result.violations if each.invariant == FOUND[bug][0]]
    length = len(nearest(result, bug).path)
    assert result.graph.initial is not None
    reached = {result.graph.initial.id: 1}
    for _ in range(length):
        further: dict[str, int] = {}
        for state, count in reached.items():
            for step in result.graph.transitions_from(state):
                further[step.to_id] = further.get(step.to_id, 0) + count
        reached = further
    return sum(reached.get(each.state_id, 0) for each in violated)


def run_pytest(folder: Path, mended: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SHOP_MENDED": mended, "PYTHONPATH": str(ROOT)},
        timeout=600,
        check=False,
    )


def write_reproducers(result: Exploration, bugs: list[str], folder: Path) -> None:
    """Write a file for each bug; all of them fail as long as all bugs are there."""
    for bug in bugs:
        file = folder / f"test_{bug}.py"
        write_reproducer(nearest(result, bug), result.graph, shop.make_world, file)
    broken = run_pytest(folder, "")
    assert f"{len(bugs)} failed" in broken.stdout, broken.stdout
    assert "passed" not in broken.stdout


def test_near_bugs_are_found_by_paths_that_a_test_file_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = ",".join(bug for bug in BUGS if bug not in NEAR)
    monkeypatch.setenv("SHOP_MENDED", far)
    result = explored(max_depth=4)
    assert {each.invariant for each in result.violations} == {FOUND[bug][0] for bug in NEAR}
    assert {bug: words(nearest(result, bug)) for bug in NEAR} == {
        bug: FOUND[bug][1].split() for bug in NEAR
    }
    write_reproducers(result, NEAR, tmp_path)
    mended = run_pytest(tmp_path, ",".join(NEAR))
    assert f"{len(NEAR)} passed" in mended.stdout, mended.stdout


def test_without_bugs_nothing_near_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_MENDED", "all")
    result = explored(max_depth=3)
    assert result.has_passed
    assert not result.unused_actions


@pytest.mark.slow
def test_without_bugs_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_MENDED", "all")
    result = explored()
    assert result.has_passed
    assert result.is_complete
    moves = [step.step.action for step in result.graph.transitions if step.from_id != step.to_id]
    assert set(moves) == {each.name for each in marked_in(shop)[0]}


@pytest.mark.slow
def test_all_bugs_are_found_by_shortest_paths(tmp_path: Path) -> None:
    result = explored()
    assert result.is_complete
    assert len(result.graph.states) <= STATES_MAX
    assert {each.invariant for each in result.violations} == {name for name, _ in FOUND.values()}
    found = {bug: words(nearest(result, bug)) for bug in BUGS}
    assert found == {bug: path.split() for bug, (_, path) in FOUND.items()}
    assert {bug: ways(result, bug) for bug in ONE_ORDER} == dict.fromkeys(ONE_ORDER, 1)
    assert max(len(found[bug]) for bug in ONE_ORDER) == 8
    write_reproducers(result, list(BUGS), tmp_path)
    for bug in BUGS:
        mended = run_pytest(tmp_path / f"test_{bug}.py", bug)
        assert mended.returncode == 0, mended.stdout


def test_the_commands_of_the_tutorial_find_the_first_bug(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    outputs = []
    for block in blocks_of(TUTORIAL.read_text()):
        if block.language == "bash":
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            done = subprocess.run(
                ["bash", "-c", block.text],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                timeout=600,
                check=False,
            )
            outputs.append((done.returncode, done.stdout + done.stderr))
    explored, failing, mended, sound = outputs
    assert explored[0] == 1, explored[1]
    assert "checkout(customer='ann') → checkout(customer='ann')" in explored[1]
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert (failing[0], "1 failed" in failing[1]) == (1, True), failing[1]
    assert (mended[0], "1 passed" in mended[1]) == (0, True), mended[1]
    assert (sound[0], "0 violations" in sound[1]) == (0, True), sound[1]
