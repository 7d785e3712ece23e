"""The Markdown pages of the project and the fenced blocks in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<note>[^\n]*)\n(?P<text>.*?)^(?P=indent)```\s*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block; `note` is what follows the language, `line` the line of the fence."""

    language: str
    note: str
    text: str
    line: int


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(markdown: str) -> list[Block]:
    return [
        Block(
            language=match["language"],
            note=match["note"].strip(),
            text=textwrap.dedent(match["text"]),
            line=markdown.count("\n", 0, match.start()) + 1,
        )
        for match in _FENCE.finditer(markdown)
    ]


def without_blocks(markdown: str) -> str:
    return _FENCE.sub("", markdown)
