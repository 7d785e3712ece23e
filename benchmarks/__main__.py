"""`python -m benchmarks [NAME …] [--quick] [--json FILE] [--picture FILE]`.

`growth` also takes `--only TEXT` and `--sizes SIZE …`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from . import (
    beside,
    checkpoints,
    costs,
    effects,
    exports,
    growth,
    kernel,
    killed,
    mesh,
    pages,
    server,
    state,
    steady,
    work,
    worlds,
    writers,
)
from .measure import Report

TABLE_WIDTH = 124
BENCHMARKS: dict[str, Callable[..., Report]] = {
    "kernel": kernel.run,
    "checkpoints": checkpoints.run,
    "effects": effects.run,
    "work": work.run,
    "worlds": worlds.run,
    "state": state.run,
    "mesh": mesh.run,
    "server": server.run,
    "pages": pages.run,
    "costs": costs.run,
    "growth": growth.run,
    "exports": exports.run,
    "beside": beside.run,
    "steady": steady.run,
    "writers": writers.run,
    "killed": killed.run,
}


def main() -> None:
    """Run the chosen benchmarks, all by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="a first look, not to publish")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round here")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the kills as an SVG")
    only = "growth: only what has this in its name; can be repeated"
    parser.add_argument("--only", action="append", metavar="TEXT", help=only)
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="SIZE", help="growth: stores of these sizes"
    )
    arguments = parser.parse_args()
    limits = {name: getattr(arguments, name) for name in ("only", "sizes")}
    limits = {name: value for name, value in limits.items() if value}
    if limits and arguments.names != ["growth"]:
        parser.error("--only and --sizes are for growth alone")
    if arguments.only and not growth.choose(arguments.only):
        parser.error(f"nothing in growth has {' or '.join(arguments.only)} in its name")
    sizes = set(arguments.sizes or growth.FULL.sizes)
    if len(sizes) < 2 or min(sizes) < growth.SIZE_MIN:
        parser.error(f"growth takes two sizes or more, each at least {growth.SIZE_MIN}")
    if arguments.quick and arguments.picture:
        parser.error("a picture is for publishing; draw it from a full run, without --quick")
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    reports = []
    for name in arguments.names or BENCHMARKS:
        report = BENCHMARKS[name](console, quick=arguments.quick, **limits)
        report.is_quick = arguments.quick
        report.show(console)
        reports.append(report.data())
        if arguments.picture and report.picture:
            arguments.picture.write_text(report.picture)
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
