"""House rules that no linter checks."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
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
    "pickle", "marshal.load", "marshal.loads", "shelve", "runpy",
}  # fmt: skip
FACES = {"cli", "server", "mcp", "adapters", "mesh"}
STATEMENT = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|DROP|PRAGMA)\s")
SQL_CALLS = {"execute", "executemany", "executescript", "Query", "one", "rows"}


@cache
def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text(), filename=str(source))


def dotted(node: ast.expr) -> str:
    """Return the dotted name that is written, or its last parts."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
        case _:
            return ""


def imports_in(source: Path) -> Iterator[tuple[str, int]]:
    """Yield what is imported, as a module or as a name in one, with its line."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def names_in(source: Path) -> list[tuple[str, int]]:
    """Return what is imported and every name that is mentioned, with their lines."""
    mentioned = [
        (dotted(node), node.lineno)
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Name | ast.Attribute)
    ]
    return [*imports_in(source), *mentioned]


def uses_in(source: Path, forbidden: set[str]) -> list[str]:
    """Return where a file imports or mentions one of these names."""
    return [f"line {line}: {name}" for name, line in names_in(source) if name in forbidden]


def part_of(source: Path) -> str:
    """Return the first part of a module's name below the package: `kernel`, `cli`, `work`."""
    return source.relative_to(PACKAGE).with_suffix("").parts[0]


def found_by(look: Callable[[Path], object]) -> dict[str, object]:
    """Return what a look at each file finds, by the file's name, where it finds anything."""
    found = {source.relative_to(PACKAGE).as_posix(): look(source) for source in SOURCES}
    return {name: each for name, each in found.items() if each}


def test_a_file_is_short_enough_to_read() -> None:
    """What is longer becomes a folder of the same name."""

    def lines_of_a_long_one(source: Path) -> int:
        lines = len(source.read_text().splitlines())
        return lines if lines > LINES_MAX else 0

    assert found_by(lines_of_a_long_one) == {}


def test_only_the_clock_module_reads_the_time() -> None:
    assert list(found_by(lambda source: uses_in(source, CLOCK_READS))) == ["clock.py"]


def test_no_stored_data_can_become_code() -> None:
    assert found_by(lambda source: uses_in(source, CODE_LOADERS)) == {}
    # Its output is compared, never read.
    written = {"marshal", "marshal.dumps"}
    for name, found in found_by(lambda source: uses_in(source, {"marshal"})).items():
        assert name == "codec.py", found
        assert {each for each, _ in names_in(PACKAGE / name) if "marshal" in each} == written


def names_outside(node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[ast.Name]:
    """Yield the names in a function that are no variables of its comprehensions."""
    bound |= names_bound(getattr(node, "generators", []))
    if isinstance(node, ast.Name) and node.id not in bound:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from names_outside(child, bound)


def names_bound(generators: list[ast.comprehension]) -> set[str]:
    targets = [node for each in generators for node in ast.walk(each.target)]
    return {node.id for node in targets if isinstance(node, ast.Name)}


def names_hidden_in(function: ast.AST) -> set[str]:
    """Return the variables of comprehensions that elsewhere in a function are not its own."""
    nodes, outside = list(ast.walk(function)), list(names_outside(function))
    used = {name.id for name in outside if isinstance(name.ctx, ast.Load)}
    own = {name.id for name in outside if isinstance(name.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    return names_bound([node for node in nodes if isinstance(node, ast.comprehension)]) & used - own


def test_no_comprehension_hides_a_name_that_its_function_takes_from_outside() -> None:
    """Python 3.12 may take one for the other: UnboundLocalError (python/cpython#118513)."""

    def hidden(source: Path) -> list[str]:
        return [
            f"line {node.lineno}: {name}"
            for node in ast.walk(tree_of(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for name in names_hidden_in(node)
        ]

    assert found_by(hidden) == {}


def test_faces_hold_no_sql() -> None:
    def statements(source: Path) -> list[str]:
        found = [
            node.value
            for node in ast.walk(tree_of(source))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        return [each for each in found if STATEMENT.match(each)] if part_of(source) in FACES else []

    assert found_by(statements) == {}


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


def test_sql_is_never_put_together_where_it_is_run() -> None:
    def formatted_calls(source: Path) -> list[str]:
        found = [
            f"line {call.lineno}: {ast.unparse(call)[:80]}"
            for call in ast.walk(tree_of(source))
            if isinstance(call, ast.Call)
            and dotted(call.func).rpartition(".")[2] in SQL_CALLS
            and call.args
            and is_formatted(call.args[0])
        ]
        return found if part_of(source) != "kernel" else []

    assert found_by(formatted_calls) == {}


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


def test_every_python_from_the_oldest_on_is_allowed_and_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = re.fullmatch(r">=3\.(\d+)", project["requires-python"])
    assert oldest is not None, "a newer Python is refused without a reason"
    tested = re.search(r"^PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert tested is not None
    minors = [int(name.removeprefix("python3.")) for name in tested[1].split()]
    assert minors == list(range(int(oldest[1]), minors[-1] + 1))
    named = {each.rpartition(".")[2] for each in project["classifiers"] if ":: 3." in each}
    assert named <= set(map(str, minors))


def test_the_readme_begins_with_the_commands_of_a_clone() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\$ (make \w+|pip install \S+)", text, re.M)
    assert commands[:3] == ["make demo", "make test", "pip install holdfast-agents"]


def test_the_readme_and_the_license_exist() -> None:
    assert (ROOT / "README.md").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_quick_tests_are_there() -> None:
    listed = re.search(
        r"QUICK = \$\(addprefix tests/,(.*?)\)", (ROOT / "Makefile").read_text(), re.S
    )
    assert listed is not None
    names = listed[1].replace("\\", "").split()
    assert [name for name in names if not (ROOT / "tests" / name).is_file()] == []
    assert len(names) > 10
