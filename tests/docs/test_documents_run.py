"""Every example in the README and the documentation runs as it is printed.

The blocks of a page run in order, in one namespace and one empty folder. A block that cannot run
says so and why: ```python no-run: needs a broker.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.docs.documents import PAGES, Block, blocks_of, name_of

POSTGRES_IN_DOCS = "postgresql://localhost/agents"
NATS_IN_DOCS = "nats://127.0.0.1:4222"
COMMAND_SECONDS_MAX = 180
# A console block also shows output, so there only a prompt marks a command.
COMMANDS = {
    "console": re.compile(r"^\$ (holdfast\b.*)$", re.MULTILINE),
    "bash": re.compile(r"^(?:\$ )?(holdfast\b.*)$", re.MULTILINE),
}
NO_RUN = re.compile(r"no-run: \S")

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.fixture
def fresh_postgres() -> Iterator[Callable[[], str]]:
    """Return a function that creates an empty database for this page and returns its URL."""
    server = os.environ.get("HOLDFAST_TEST_POSTGRES")
    name = f"docs_{uuid.uuid4().hex}"
    created = False

    def create() -> str:
        nonlocal created
        if server is None:
            pytest.skip("this page needs PostgreSQL: set HOLDFAST_TEST_POSTGRES")
        if not created:
            with psycopg.connect(server, autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"')
            created = True
        return urlsplit(server)._replace(path=f"/{name}").geturl()

    yield create
    if server is not None and created:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def run_python(text: str, page: Path, line: int, module: ModuleType, loop: asyncio.Runner) -> None:
    padded = "\n" * line + text  # Tracebacks then show the lines of the page.
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(padded, str(page), "exec", flags=flags, dont_inherit=True)
    result = eval(code, module.__dict__)
    if inspect.iscoroutine(result):
        loop.run(result)


def run_command(command: str, where: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{where}: `{command}` failed\n{done.stdout}{done.stderr}"


def commands_in(block: Block) -> list[str]:
    pattern = COMMANDS.get(block.language)
    return pattern.findall(block.text.replace("\\\n", " ")) if pattern else []


@every_page
def test_a_block_that_does_not_run_says_why(page: Path) -> None:
    for block in blocks_of(page.read_text()):
        if block.language in {"python", *COMMANDS} and block.note:
            assert NO_RUN.match(block.note), (
                f"{name_of(page)}:{block.line}: write ```{block.language} no-run: and the reason"
            )


@every_page
def test_every_example_of_a_page_runs_in_order(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_postgres: Callable[[], str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Type hints of classes are looked up through the module that a class names as its own.
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    with asyncio.Runner() as loop:
        for block in blocks_of(page.read_text()):
            if block.note:
                continue
            dsn = fresh_postgres() if POSTGRES_IN_DOCS in block.text else POSTGRES_IN_DOCS
            if block.language == "python":
                text = block.text.replace(POSTGRES_IN_DOCS, dsn)
                if NATS_IN_DOCS in text:
                    text = text.replace(NATS_IN_DOCS, request.getfixturevalue("nats_url"))
                run_python(text, page, block.line, module, loop)
            for command in commands_in(block):
                text = command.replace(POSTGRES_IN_DOCS, shlex.quote(dsn))
                run_command(text, f"{name_of(page)}:{block.line}")


FILES = re.compile(r"sqlite:///([\w-]+\.db)")
# These expect no empty store.
SHARING = {
    "agents.db": {"README.md", "docs/quickstart.md", "docs/mcp.md", "docs/benchmarks.md"},
}


def test_a_reader_can_follow_all_pages_in_one_folder() -> None:
    pages: dict[str, set[str]] = {}
    for page in PAGES:
        for block in blocks_of(page.read_text()):
            if block.language in {"python", *COMMANDS} and not block.note:
                for file in FILES.findall(block.text):
                    pages.setdefault(file, set()).add(name_of(page))
    shared = {file: names for file, names in pages.items() if len(names) > 1}
    assert shared == SHARING, "a page uses a file of its own: what it asserts holds for no other"
