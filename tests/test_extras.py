"""What needs a package that is not installed says which extra has it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
sys.modules[{package!r}] = None
try:
    import {module}
except ImportError as error:
    print(error, error.name)
"""


@pytest.mark.parametrize(
    ("module", "package", "told"),
    [
        ("holdfast.mesh.nats", "nats", "NATS needs nats: … [nats]"),
        (
            "holdfast.agent.providers",
            "pydantic_ai",
            "a provider's model needs pydantic_ai: … [models]",
        ),
        (
            "holdfast.worlds.systems.redis",
            "redis",
            "RedisSystem needs redis: … [worlds]",
        ),
        (
            "holdfast.worlds.systems.postgres",
            "psycopg",
            "PostgresSystem needs psycopg: … [postgres]",
        ),
        (
            "holdfast.worlds.systems.postgres_connection",
            "psycopg",
            "PostgresConnectionSystem needs psycopg: … [postgres]",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    module: str, package: str, told: str
) -> None:
    code = CODE.format(module=module, package=package)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    what, extra = told.split(" … ")
    assert done.stdout == f"{what} pip install 'holdfast-agents{extra}' {package}\n"
