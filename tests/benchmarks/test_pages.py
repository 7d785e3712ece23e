"""The benchmark of pages asks for every page in a filled store."""

from __future__ import annotations

from benchmarks import pages

PLAN = pages.Plan(sessions=500, events=3_000, rounds=1)


def test_every_page_is_measured_in_a_filled_store(place: dict[str, str]) -> None:
    with pages.serving(dict(place), PLAN) as served:
        assert pages.unmeasured(served.paths.values()) == set()
        for name, path in served.paths.items():
            figures = served.round(path)
            assert figures[pages.MILLISECONDS] > 0, name
            assert figures["kB"] > 3, name
        assert "Event, 2652 to" in served.get("/ui/sessions/big/timeline")


def test_a_page_that_is_not_measured_is_named() -> None:
    paths = ["/ui/sessions", "/ui/sessions/big/state/plan?cursor=x", "/ui/spend?by=day"]
    left = pages.unmeasured(paths)
    assert {"/ui/", "/ui/conflicts", "/ui/explorations/{id}"} <= left
    assert not {"/ui/sessions", "/ui/sessions/{id}/state/{key}", "/ui/spend"} & left
