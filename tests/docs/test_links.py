"""Links between the pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.documents import PAGES, ROOT, name_of, without_blocks

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z]+:")


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors_in(page: Path) -> set[str]:
    return {anchor_of(heading) for heading in HEADING.findall(without_blocks(page.read_text()))}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"], ids=name_of)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(without_blocks(page.read_text())):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_in(target)):
            broken.append(link)
    assert not broken, f"{name_of(page)} has links that lead nowhere: {broken}"


def test_the_tests_that_the_security_page_names_exist() -> None:
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "SECURITY.md").read_text())
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []
