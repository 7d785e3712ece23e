"""The command: a quick run is told from one that may be published."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.measure import QUICK_WARNING, Report, Target


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that takes no time, with one target met and one missed."""
    targets = [Target("met", 2, at_least=1), Target("missed", 2, at_most=1)]

    def run(_: object, *, quick: bool) -> Report:
        return Report("small", targets=targets, picture="<svg/>")

    monkeypatch.setitem(BENCHMARKS, "small", run)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "small", *arguments])
    main()


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_a_quick_run_says_that_it_is_not_to_be_published(
    quick: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = tmp_path / "found.json"
    run_command(monkeypatch, "--json", str(found), *quick)
    printed = capsys.readouterr().out
    assert (QUICK_WARNING in printed) is bool(quick)
    assert "1 of 2 targets missed" in printed
    [report] = json.loads(found.read_text())
    assert report["is_quick"] is bool(quick)
    assert [target["is_met"] for target in report["targets"]] == [True, False]


def test_a_picture_is_drawn_by_a_full_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.svg"
    with pytest.raises(SystemExit):
        run_command(monkeypatch, "--quick", "--picture", str(picture))
    assert "draw it from a full run" in capsys.readouterr().err
    assert not picture.exists()
    run_command(monkeypatch, "--picture", str(picture))
    assert picture.read_text() == "<svg/>"


def test_growth_alone_can_be_limited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, object]] = []

    def run(_: object, **limits: object) -> Report:
        given.append(limits)
        return Report("growth")

    monkeypatch.setitem(BENCHMARKS, "growth", run)
    limits = ["--sizes", "1000", "5000", "--only", "asks(", "--only", "pauses("]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "growth", *limits])
    main()
    expected = {"quick": False, "sizes": [1_000, 5_000], "only": ["asks(", "pauses("]}
    assert given == [expected]
    with pytest.raises(SystemExit):
        run_command(monkeypatch, *limits)
    assert "for growth alone" in capsys.readouterr().err
    for wrong in (["--only", "nothing like this"], ["--sizes", "1000"], ["--sizes", "5", "1000"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "growth", *wrong])
        with pytest.raises(SystemExit):
            main()
    assert len(given) == 1
