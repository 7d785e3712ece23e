"""Every example runs, and ends well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


RUNS: list[tuple[Path, tuple[str, ...]]] = [(each, ()) for each in EXAMPLES]
RUNS += [(each, ("--transport", "nats")) for each in EXAMPLES if each.stem == "travel"]


@pytest.mark.parametrize(
    ("example", "options"), RUNS, ids=["-".join([each.stem, *rest[1:]]) for each, rest in RUNS]
)
def test_the_example_runs(example: Path, options: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(example), str(tmp_path), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "each once" in result.stdout
