"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.register_assert_rewrite("tests.faults.workload")

MEMORY = Path("/dev/shm")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of files are written to it."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as path:
        yield Path(path)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line although the test runner captures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return show
