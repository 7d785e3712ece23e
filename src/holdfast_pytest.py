"""A pytest plugin that explores worlds; what is violated fails the test, with the path to it.

It stands outside the package, which is imported only by tests that explore.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from holdfast.worlds import Action, Exploration, Invariant, World

_MARKER = (
    "explore(make_world=…, actions=None, invariants=None, **options): what the fixture "
    "`exploration` explores; the options are those of holdfast.worlds.explore"
)


class ExploreWorld(Protocol):
    """Explores a world; fails the test if an invariant is violated or a system leaks."""

    def __call__(
        self,
        make_world: Callable[[], World],
        actions: Sequence[Action | Callable[..., Any]] | None = None,
        invariants: Sequence[Invariant | Callable[[World], object]] | None = None,
        **options: Any,
    ) -> Exploration:
        """Explore; actions and invariants are by default those in the world's module."""
        ...


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def explore_world(request: pytest.FixtureRequest) -> ExploreWorld:
    """Return a function that explores a world and fails the test if something is wrong."""

    def run(
        make_world: Callable[[], World],
        actions: Sequence[Action | Callable[..., Any]] | None = None,
        invariants: Sequence[Invariant | Callable[[World], object]] | None = None,
        **options: Any,
    ) -> Exploration:
        from holdfast.worlds import explore
        from holdfast.worlds.marked import marked_in

        beside = marked_in(sys.modules[make_world.__module__])
        result = explore(
            make_world,
            beside[0] if actions is None else actions,
            beside[1] if invariants is None else invariants,
            **options,
        )
        request.node.user_properties.append(("exploration", result.summary().splitlines()[0]))
        if not result.has_passed:
            pytest.fail(_counterexamples(result, make_world), pytrace=False)
        return result

    return run


@pytest.fixture
def exploration(request: pytest.FixtureRequest, explore_world: ExploreWorld) -> Exploration:
    """Explore what the marker `explore` of the test says, and return the result."""
    marker = request.node.get_closest_marker("explore")
    # One function alone would be what the marker decorates, so it is given by its name.
    if marker is None or "make_world" not in marker.kwargs:
        raise pytest.UsageError(
            "the fixture `exploration` needs a marker: @pytest.mark.explore(make_world=…)"
        )
    return explore_world(**marker.kwargs)


def _counterexamples(result: Exploration, make_world: Callable[[], World]) -> str:
    """Return what was found, and a test that repeats each where one can be written."""
    from holdfast.errors import InvalidArgument
    from holdfast.worlds import reproducer

    parts = [result.summary()]
    for violation in result.nearest():
        try:
            test = reproducer(violation, result.graph, make_world)
        except InvalidArgument:
            continue
        parts.append(f"A test that repeats {violation.invariant}:\n\n{test}")
    return "\n\n".join(parts)
