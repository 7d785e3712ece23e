"""`holdfast doctor`: examine a store and say what to do about what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from .. import store
from ..records import Finding
from ..words import plural
from .options import AsJson, Namespace, Url
from .output import console, print_json, with_place, wrapped

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    url: Url = None,
    namespace: Namespace = None,
    full: Annotated[
        bool, typer.Option("--full", help="SQLite: also compare every index with its table.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Examine a store. The exit code is 1 if there is a problem; nothing is changed."""
    findings = store.check(url, namespace=namespace, full=full)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _show(findings, url, namespace)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def _show(findings: Sequence[Finding], url: str | None, namespace: str | None) -> None:
    from rich.text import Text

    out = console()
    level_width, check_width = (
        max(len(getattr(finding, name)) for finding in findings) + 2 for name in ("level", "check")
    )
    indent = level_width + check_width
    for finding in findings:
        advice = with_place(finding.advice or "", url, namespace)
        message = wrapped(f"{finding.message} {advice}", out.width, indent)
        line = Text(finding.level.ljust(level_width), style=STYLES[finding.level])
        line.append(finding.check.ljust(check_width) + message, style="default")
        out.print(line, soft_wrap=True)
    counts = Counter[str](finding.level for finding in findings)
    if not counts["problem"] and not counts["warning"]:
        out.print("\nEverything is well.", style="green")
    else:
        problems, warnings = (plural(counts[level], level) for level in ("problem", "warning"))
        out.print(f"\n{problems}, {warnings}.")
