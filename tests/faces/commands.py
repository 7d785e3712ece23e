"""Every command that does something, by its words."""

from __future__ import annotations

from typing import Any

import typer.main

from holdfast.cli.app import app


def commands() -> dict[str, Any]:
    root: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name in root.commands:
        command = root.get_command(None, name)
        below: dict[str, Any] = getattr(command, "commands", {})
        found |= {f"{name} {each}": leaf for each, leaf in below.items()} or {name: command}
    return found
