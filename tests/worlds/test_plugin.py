"""The pytest plugin: what an exploration finds fails the test, and says how to repeat it."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest_plugins = ["pytester"]

SHOP = Path(__file__).with_name("counter_shop.py")
HEAD = "import counter_shop, pytest\n"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A directory with the shop; the plugin is loaded as its entry point would."""
    shutil.copy(SHOP, pytester.path)
    pytester.syspathinsert()
    return pytester


def run(project: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    project.makepyfile(HEAD + test)
    plugin = ("-p", "holdfast_pytest", "-p", "no:cacheprovider", "--strict-markers")
    return project.runpytest_inprocess(*plugin, *options)


FAILING = """
@pytest.mark.explore(make_world=counter_shop.make_world, max_depth=3)
def test_shop(exploration):
    raise AssertionError("not reached")
"""


def test_counterexamples_are_failures_with_a_test_that_repeats_them(
    project: pytest.Pytester,
) -> None:
    result = run(project, FAILING)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "*stock_is_never_negative in *: more was sold than there was*",
            "*buy(count=1) → buy(count=2)*",
            "A test that repeats stock_is_never_negative:",
            "*from counter_shop import *make_world*",
            "*assert_holds(world, stock_is_never_negative)",
        ]
    )
    # No traceback of the plugin: the path is what matters.
    result.stdout.no_fnmatch_line("*holdfast_pytest.py*")


def test_the_fixture_explores_what_it_is_given(project: pytest.Pytester) -> None:
    test = """
def test_refunds(explore_world):
    explore_world(counter_shop.make_world, [counter_shop.refund], [])

def test_restarts(explore_world):
    result = explore_world(counter_shop.make_world, [counter_shop.restart], strategy="dfs")
    assert len(result.graph.states) == 1
"""
    result = run(project, test, "--junit-xml=report.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*refund raises LookupError*"])
    report = (project.path / "report.xml").read_text()
    assert 'name="exploration" value="1 states, 1 transitions' in report


def test_a_world_without_bugs_passes_and_the_result_is_at_hand(project: pytest.Pytester) -> None:
    test = """
counter_shop.FIXED.update(["oversell", "refund"])

@pytest.mark.explore(make_world=counter_shop.make_world)
def test_shop(exploration):
    assert exploration.is_complete
    assert len(exploration.graph.states) > 5
    assert not exploration.unused_actions
"""
    run(project, test).assert_outcomes(passed=1)


def test_what_cannot_be_imported_is_reported_without_a_test(project: pytest.Pytester) -> None:
    test = """
def test_local(explore_world):
    def wrong(world):
        return False
    explore_world(counter_shop.make_world, invariants=[wrong], max_steps=3)
"""
    result = run(project, test)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*wrong does not hold*"])
    result.stdout.no_fnmatch_line("*A test that repeats wrong*")


def test_pytest_finds_the_plugin_and_the_package_brings_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    plugins = project["project"]["entry-points"]["pytest11"]
    assert plugins == {"holdfast_pytest": "holdfast_pytest"}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "src/holdfast_pytest.py" in wheel["only-include"]


def test_the_fixture_needs_its_marker(project: pytest.Pytester) -> None:
    result = run(project, "def test_shop(exploration):\n    pass\n")
    result.stdout.fnmatch_lines(["*the fixture `exploration` needs a marker*"])
    result.assert_outcomes(errors=1)
