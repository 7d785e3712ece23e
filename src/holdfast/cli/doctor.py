"""`holdfast doctor`: examine a store and say what to do about what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from .. import store
from ..records import Finding
from .options import AsJson, Namespace, Url
from .output import console, print_json

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
        _show(findings)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def _show(findings: Sequence[Finding]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    table = Table.grid("level", "check", Column("message", overflow="fold"), padding=(0, 2))
    for finding in findings:
        message = Text(finding.message)
        if finding.advice:
            message.append(f" {finding.advice}", style="bold")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.check, message)
    out = console()
    out.print(table)
    counts = Counter[str](finding.level for finding in findings)
    if not counts["problem"] and not counts["warning"]:
        out.print("\nEverything is well.", style="green")
    else:
        out.print(f"\n{_count(counts, 'problem')}, {_count(counts, 'warning')}.")


def _count(counts: Counter[str], level: str) -> str:
    return f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}"
