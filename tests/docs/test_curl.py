"""The commands with curl on a page work as they are printed, with a server on an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.documents import PAGES, blocks_of, name_of
from tests.server.processes import server_process

SERVER_IN_DOCS = "http://127.0.0.1:8317"
# A command that follows something would not end by itself.
CURL_OPTIONS = "--silent --show-error --fail-with-body --max-time 60"
CURL = re.compile(r"^(curl .*|[A-Z]+=.*)$", re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    """Return the commands with curl of a page, and what they need to be set before."""
    texts = [block.text for block in blocks_of(page.read_text()) if block.language == "shell"]
    return CURL.findall("\n".join(texts).replace("\\\n", " "))


@pytest.fixture
def server_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if shutil.which("curl") is None:
        pytest.skip("these commands need curl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with server_process("--port=0", url="sqlite:///agents.db") as (_, told):
        yield told["url"]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=name_of)
def test_commands_with_curl_work(page: Path, server_url: str) -> None:
    settings: list[str] = []
    for command in commands_of(page):
        if not command.startswith("curl "):
            settings.append(command)
            continue
        asked = command.replace(SERVER_IN_DOCS, server_url)
        asked = asked.replace("curl ", f"exec curl {CURL_OPTIONS} ", 1)
        script = "\n".join([*settings, asked])
        if " -N " in asked:
            assert follows(script), command
        else:
            done = subprocess.run(script, shell=True, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"`{command}` failed\n{done.stdout}{done.stderr}"


def follows(script: str) -> bool:
    """Whether a command that does not end by itself tells of an event."""
    with subprocess.Popen(script, shell=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            return any(line.startswith("event: ") for line in process.stdout)
        finally:
            process.kill()
