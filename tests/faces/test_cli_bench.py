"""`holdfast bench` measures beside a store, and leaves nothing there."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast.cli import INTERRUPTED
from tests.faces.test_cli_sessions import data, lines, quick  # noqa: F401 - a fixture
from tests.work.fleet import wait_until

OPERATIONS = 7
# The command with the names of its temporary places told apart from those of other tests.
PREFIXED = """
import signal, sys
from holdfast.kernel import scratch
scratch.PREFIX = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
from holdfast.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the names of this test's temporary places begin with."""
    name = f"scratch_{uuid.uuid4().hex[:12]}_"
    monkeypatch.setattr("holdfast.kernel.scratch.PREFIX", name)
    return name


def scratched(place: dict[str, str], prefix: str) -> list[str]:
    """The temporary directories or schemas beside a store."""
    url = place["url"]
    if url.startswith("sqlite"):
        directory = Path(url.removeprefix("sqlite:///")).parent
        return [each.name for each in directory.iterdir() if each.name.startswith(prefix)]
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", [prefix]
        )
        return [name for (name,) in found]


def test_it_measures_every_kind_of_call_and_leaves_nothing(
    quick: Callable[..., Any],  # noqa: F811
    place: dict[str, str],
    prefix: str,
) -> None:
    found = data(quick("bench", "--seconds", "0.01", "--sessions", "2", "--json"))
    assert found["durability"] == "full"
    assert len(found["operations"]) == OPERATIONS
    for each in found["operations"]:
        assert each["calls"] >= 1
        assert 0 < each["median_ms"] <= each["p95_ms"]
        assert each["per_second"] > 0
    assert "2 sessions at once" in found["operations"][-1]["operation"]
    assert scratched(place, prefix) == []


def test_people_see_a_table(
    quick: Callable[..., Any],  # noqa: F811
    place: dict[str, str],
    prefix: str,
) -> None:
    shown = lines(quick("bench", "--seconds", "0", "--sessions", "1", "--durability", "normal"))
    assert shown[0].startswith("Next to ")
    assert shown[0].endswith("durability normal:")
    assert shown[2].split() == ["operation", "median", "ms", "p95", "ms", "per", "second"]
    assert len(shown) == OPERATIONS + 3
    assert scratched(place, prefix) == []


def test_the_named_store_is_neither_needed_nor_made(
    tmp_path: Path,
    quick: Callable[..., Any],  # noqa: F811
) -> None:
    directory = tmp_path / "empty"
    directory.mkdir()
    place = {"url": f"sqlite:///{directory}/agents.db"}
    data(quick("bench", "--seconds", "0", "--json", at=place))
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "-1"], "--seconds must be 0 to 600, not -1.0"),
        (["--seconds", "601"], "--seconds must be 0 to 600, not 601.0"),
        (["--sessions", "0"], "--sessions must be 1 to 256, not 0"),
        (["--durability", "none"], "--durability must be"),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(
    arguments: list[str],
    message: str,
    quick: Callable[..., Any],  # noqa: F811
    place: dict[str, str],
    prefix: str,
) -> None:
    refused = quick("bench", *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert message in refused.stderr
    assert scratched(place, prefix) == []


def test_a_directory_that_does_not_exist_is_named(
    tmp_path: Path,
    quick: Callable[..., Any],  # noqa: F811
) -> None:
    refused = quick("bench", at={"url": f"sqlite:///{tmp_path}/none/agents.db"})
    assert refused.returncode == 2
    assert f"there is no directory {tmp_path}/none" in refused.stderr


def test_a_server_is_refused(
    quick: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "t")
    refused = quick("bench", at={"url": "http://127.0.0.1:1"})
    assert refused.returncode == 2
    assert "name the database that it serves" in refused.stderr


def test_ctrl_c_leaves_nothing(place: dict[str, str], prefix: str) -> None:
    options = ["bench", "--seconds", "600", *(f"--{name}={text}" for name, text in place.items())]
    with subprocess.Popen(
        [sys.executable, "-c", PREFIXED, prefix, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: scratched(place, prefix))
            process.send_signal(signal.SIGINT)
            printed = process.communicate()
        finally:
            process.kill()
    assert (process.returncode, *printed) == (INTERRUPTED, "", "")
    assert scratched(place, prefix) == []
