"""What needs a package that is not installed says which extra has it, always in the same way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import MissingPackage
from holdfast.extras import required

IMPORTS = {
    "holdfast.mesh.nats": ("nats", "NATS needs nats: … [nats]"),
    "holdfast.agent.providers": ("pydantic_ai", "a provider's model needs pydantic_ai: … [models]"),
    "holdfast.worlds.systems.redis": ("redis", "RedisSystem needs redis: … [worlds]"),
    "holdfast.worlds.systems.postgres": ("psycopg", "PostgresSystem needs psycopg: … [postgres]"),
    "holdfast.worlds.systems.postgres_connection": (
        "psycopg",
        "PostgresConnectionSystem needs psycopg: … [postgres]",
    ),
}
CALLS = {
    "holdfast.open('postgresql://localhost/none')": (
        "psycopg",
        "PostgreSQL needs psycopg: … [postgres]",
    ),
    "holdfast.connect('http://127.0.0.1:1', token='t')": (
        "httpx",
        "the client of a server needs httpx: … [client]",
    ),
    "holdfast.open('sqlite://', compression='zstd')": (
        "zstandard",
        "zstd needs zstandard: … [compress]",
    ),
    "__import__('holdfast.ciphers').ciphers.AesGcm({'k': bytes(32)}, 'k')": (
        "cryptography",
        "AesGcm needs cryptography: … [crypto]",
    ),
    "holdfast.open('sqlite://').session('s').state.set_rule('k', schema={})": (
        "jsonschema",
        "checking a JSON Schema needs jsonschema: … [schema]",
    ),
}
COMMANDS = {
    "serve": ("uvicorn", "the server needs uvicorn: … [server]"),
    "mcp --session run": ("mcp", "MCP needs mcp: … [mcp]"),
}
CODE = """
import sys
sys.modules[{package!r}] = None
import holdfast
try:
    {statement}
except holdfast.MissingPackage as error:
    assert isinstance(error, holdfast.HoldfastError) and isinstance(error, ImportError)
    print(error)
    assert error.name.startswith(error.package)
    print(error.package, error.extra)
"""


def told(text: str) -> tuple[str, str]:
    """Return a message in full, and its extra."""
    what, _, extra = text.partition(" … ")
    return f"{what} pip install 'holdfast-agents{extra}'", extra.strip("[]")


@pytest.mark.parametrize("statement", [*(f"import {name}" for name in IMPORTS), *CALLS])
def test_a_package_that_is_missing_is_named_with_its_extra(statement: str) -> None:
    package, text = (IMPORTS | CALLS)[statement.removeprefix("import ")]
    code = CODE.format(package=package, statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, extra = told(text)
    assert done.stdout == f"{message}\n{package} {extra}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_the_same(command: str, tmp_path: Path) -> None:
    package, text = COMMANDS[command]
    arguments = ["holdfast", *command.split()]
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = {arguments}\n"
        "from holdfast_command import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert told(text)[0] in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_our_own_is_not_taken_for_a_missing_package() -> None:
    with pytest.raises(ImportError, match="nothing_like_this") as caught, required("it", "extra"):
        from holdfast.clock import nothing_like_this  # type: ignore[attr-defined]  # noqa: F401
    assert not isinstance(caught.value, MissingPackage)
    with pytest.raises(MissingPackage, match=r"inner needs .*\[inner\]"):  # noqa: SIM117
        with required("outer", "outer"), required("inner", "inner"):
            import no_such_package  # type: ignore[import-not-found]  # noqa: F401
