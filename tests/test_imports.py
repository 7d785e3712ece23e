"""What `import holdfast` and `holdfast --help` load: the core alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CORE = {
    "holdfast", "holdfast_command", "apsw", "msgspec", "typer", "rich", "click", "shellingham",
    "annotated_doc", "pygments", "markdown_it", "mdurl", "typing_extensions", "xxhash",
}  # fmt: skip
EXTRAS = {
    "psycopg", "fastapi", "starlette", "uvicorn", "jinja2", "mcp", "nats", "redis",
    "zstandard", "cryptography", "pydantic", "pydantic_core", "sqlalchemy", "aiosqlite", "pytest",
}  # fmt: skip
# Parts of the standard library that are slow to load, or that only a server needs.
UNWANTED = {"sqlite3", "_sqlite3", "http.server", "xmlrpc", "unittest", "multiprocessing", "pickle"}

OURS_MAX = 173
OTHERS_MAX = 190
COMPILED_MAX = 60

LIST = """
import json, sys, time
before = set(sys.modules)
started = time.perf_counter()
{code}
seconds = time.perf_counter() - started
print(json.dumps([sorted(set(sys.modules) - before), seconds]))
"""
HELP = """
import contextlib, io
from holdfast.cli import main
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    sys.argv = ["holdfast", "--help"]
    main()
assert "Usage: holdfast" in printed.getvalue()
"""


def loaded_by(code: str) -> tuple[set[str], float]:
    """Run code in a new process and return the modules it loaded and the seconds it took."""
    done = subprocess.run(
        [sys.executable, "-c", LIST.format(code=code)], capture_output=True, text=True, check=True
    )
    modules, seconds = json.loads(done.stdout)
    return set(modules), seconds


@pytest.mark.parametrize(
    "code",
    ["import holdfast", "import holdfast.testing.nouns", HELP],
    ids=["package", "nouns", "help"],
)
def test_only_the_core_is_loaded(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    modules, seconds = loaded_by(code)
    with capsys.disabled():
        print(f" {len(modules)} modules in {seconds * 1000:.0f} ms ", end="")
    packages = {name.partition(".")[0] for name in modules}
    assert "holdfast" in packages
    assert packages - sys.stdlib_module_names - CORE == set()
    assert modules & (EXTRAS | UNWANTED) == set()


def test_the_package_alone_loads_neither_the_command_line_nor_rich() -> None:
    modules, _ = loaded_by("import holdfast")
    packages = {name.partition(".")[0] for name in modules}
    core = {"holdfast", "holdfast_command", "apsw", "msgspec", "typing_extensions", "xxhash"}
    assert packages - sys.stdlib_module_names <= core
    assert not any(name.startswith(("holdfast.cli", "holdfast.worlds")) for name in modules)


def test_the_package_loads_few_modules() -> None:
    """What it takes to import it: counted, because the time depends on the machine."""
    modules, _ = loaded_by("import holdfast")
    ours = {name for name in modules if name.partition(".")[0] == "holdfast"}
    assert len(ours) <= OURS_MAX
    assert len(modules - ours) <= OTHERS_MAX


COMPILED = """
import gc
import holdfast
compiled = [
    f"{each.__module__}.{each.__qualname__}" for each in gc.get_objects()
    if type(each) is type(lambda: 0) and each.__code__.co_filename == "<string>"
    and str(each.__module__).startswith("holdfast.")
]
print(json.dumps(sorted(compiled)))
sys.exit()
"""


def test_the_package_compiles_the_methods_of_few_records() -> None:
    """Those of all records took a third of the time of an import; see `holdfast.dataclass`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{COMPILED}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(done.stdout)) <= COMPILED_MAX, done.stdout


def test_help_is_shown_without_loading_rich() -> None:
    modules, _ = loaded_by(HELP)
    assert "rich" not in modules


def test_postgresql_is_loaded_by_the_first_postgresql_url() -> None:
    code = """
import holdfast
try:
    holdfast.open("postgresql://127.0.0.1:1/none")
except holdfast.StoreUnavailable:
    pass
"""
    modules, _ = loaded_by(code)
    assert "psycopg" in modules
