"""House rules that no linter checks."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "holdfast"
SOURCES = sorted(PACKAGE.glob("**/*.py"))

LINES_MAX = 600
# With those that build the package.
CORE_PACKAGES_MAX = 17

CLOCK_READS = {
    "time.time", "time.time_ns",
    "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
    "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today",
    "datetime.date.today",
}  # fmt: skip
CODE_LOADERS = {
    "eval", "exec", "__import__", "importlib.import_module", "importlib.util",
    "pickle", "marshal", "shelve", "runpy",
}  # fmt: skip
FACES = {"cli", "server", "mcp", "adapters", "mesh"}
SQL_CALLS = {"execute", "executemany", "executescript", "Query", "one", "rows"}

every_source = pytest.mark.parametrize(
    "source", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix()
)


@cache
def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text(), filename=str(source))


def calls_in(source: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with the dotted name it is written with."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imports_in(source: Path) -> Iterator[tuple[str, int]]:
    """Yield what is imported, as a module or as a name in one, with its line."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def uses_in(source: Path, forbidden: set[str]) -> list[str]:
    """Return where a file imports or mentions one of these names."""
    mentioned = (
        (ast.unparse(node), node.lineno)
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Name | ast.Attribute)
    )
    found = (*imports_in(source), *mentioned)
    return [f"line {line}: {name}" for name, line in found if name in forbidden]


def part_of(source: Path) -> str:
    """Return the first part of a module's name below the package: `kernel`, `cli`, `work`."""
    return source.relative_to(PACKAGE).with_suffix("").parts[0]


@every_source
def test_a_file_is_short_enough_to_read(source: Path) -> None:
    lines = len(source.read_text().splitlines())
    name = source.relative_to(PACKAGE).as_posix()
    assert lines <= LINES_MAX, f"{name} has {lines} lines; make it a folder of the same name"


@every_source
def test_only_the_clock_module_reads_the_time(source: Path) -> None:
    if source != PACKAGE / "clock.py":
        assert not uses_in(source, CLOCK_READS)


@every_source
def test_no_stored_data_can_become_code(source: Path) -> None:
    assert not uses_in(source, CODE_LOADERS)


@every_source
def test_faces_reach_the_kernel_only_through_the_store(source: Path) -> None:
    if part_of(source) in FACES:
        found = [name for name, _ in imports_in(source) if name.startswith("holdfast.kernel")]
        assert not found


def is_formatted(node: ast.expr) -> bool:
    """Say whether an expression puts a text together from pieces that are not all literals."""
    match node:
        case ast.JoinedStr():
            return any(isinstance(part, ast.FormattedValue) for part in node.values)
        case ast.BinOp(op=ast.Add() | ast.Mod()):
            return True
        case ast.Call(func=ast.Attribute(attr="format" | "join")):
            return True
        case _:
            return False


@every_source
def test_sql_is_never_put_together_where_it_is_run(source: Path) -> None:
    if part_of(source) == "kernel":
        return
    found = [
        f"line {call.lineno}: {ast.unparse(call)[:80]}"
        for name, call in calls_in(source)
        if name.rpartition(".")[2] in SQL_CALLS and call.args and is_formatted(call.args[0])
    ]
    assert not found


@pytest.mark.parametrize("name", ["core.txt", "dev.txt"])
def test_locked_requirements_name_no_index_and_hash_every_file(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        assert re.fullmatch(
            r"[a-z0-9-]+==[\w.]+(?: ; [^/]+?)? (?:\s*--hash=sha256:[0-9a-f]{64})+", line.strip()
        ), line


def test_core_requirements_are_a_part_of_the_development_ones() -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"^\S+==\S+", (ROOT / "requirements" / name).read_text(), re.M))

    assert pins("core.txt") <= pins("dev.txt")


def test_the_core_installs_little() -> None:
    """Pydantic above all is left to those who use it: it is large, and its versions clash."""
    text = (ROOT / "requirements" / "core.txt").read_text()
    locked = set(re.findall(r"^([\w.-]+)==", text, re.M))
    assert {"apsw", "msgspec", "rich", "typer", "xxhash"} <= locked
    assert not any(name.startswith("pydantic") for name in locked)
    assert len(locked) <= CORE_PACKAGES_MAX


def test_nothing_tells_users_to_install_another_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "holdfast-agents"  # `holdfast` on the package index is not ours.
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in (*pages, *SOURCES))
    installed = set(re.findall(r"pip install ['\"]?([\w-]+)", text))
    assert installed == {"holdfast-agents"}
    extras = set(re.findall(r"(holdfast[\w-]*)\[(\w+)\]", text))
    assert {name for name, _ in extras} == {"holdfast-agents"}
    assert {extra for _, extra in extras} <= set(project["optional-dependencies"])


def test_the_readme_and_the_license_exist() -> None:
    assert (ROOT / "README.md").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
