"""The page about MCP names every tool as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from holdfast.mcp.configuration import http_configuration, stdio_configuration
from holdfast.mcp.table import Tool
from holdfast.mcp.tools import tools
from tests.docs.documents import blocks_of

PAGE = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text()


def row(tool: Tool) -> str:
    required = tool.input_schema.get("required", [])
    names = [name for name in tool.input_schema["properties"] if name != "session"]
    # Those that must be given come first, and what only repeats a call last.
    names.sort(key=lambda name: (name not in required, name == "idempotency_key"))
    taken = ", ".join(f"`{name}`" if name in required else f"`{name}`?" for name in names)
    changes = "replaces" if tool.is_destructive else "adds"
    changes = "nothing" if tool.permission == "read" else changes
    return f"| `{tool.name}` | {taken} | {changes} | {tool.title} |"


@pytest.mark.parametrize("tool", tools.all, ids=lambda each: each.name)
def test_every_tool_is_on_the_page_as_it_is(tool: Tool) -> None:
    assert row(tool) in PAGE


def test_no_other_tool_is_on_the_page() -> None:
    told = re.findall(r"^\| `(\w+)` \| .* \| (?:nothing|adds|replaces) \|", PAGE, re.M)
    assert told == [each.name for each in tools.all]


def test_the_configurations_are_those_that_are_printed() -> None:
    local, remote = (json.loads(each.text) for each in blocks_of(PAGE) if each.language == "json")
    printed = stdio_configuration("sqlite:////home/me/agents.db", "my-agent")
    printed["mcpServers"]["holdfast"]["command"] = "/path/to/python"
    assert local == printed
    assert remote == http_configuration("http://127.0.0.1:8317", "my-agent")
