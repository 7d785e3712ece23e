"""Fair comparisons on a shared machine.

All contestants of a table run in short rounds, one after the other, in one run; every round begins
with another contestant. A figure is the median over the rounds, the noise is their interquartile
range, and a ratio is the median of the ratios of the single rounds: what disturbs one round
disturbs both sides of it.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table as RichTable

Figures: TypeAlias = dict[str, float]

TIME = "µs"
RATE = "per second"
QUICK_WARNING = "A quick run: too few and too short rounds to publish or to judge a target by."


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to do the work; a round returns its figures."""

    name: str
    round: Callable[[], Figures]
    beside: str | None = None
    """The contestant it is compared with; None where a ratio would say nothing."""


@dataclass(slots=True)
class Table:
    """The rounds of some contestants, and what follows from them."""

    title: str
    key: str
    """The figure that is compared: a rate if it is `per second`, otherwise a time."""
    contestants: Sequence[Contestant]
    rounds: dict[str, list[Figures]]
    note: str = ""

    def values(self, name: str, figure: str) -> list[float]:
        """Return a figure of every round."""
        return [figures[figure] for figures in self.rounds[name] if figure in figures]

    def median(self, name: str, figure: str | None = None) -> float:
        """Return a figure's median over the rounds."""
        return statistics.median(self.values(name, figure or self.key))

    def worst(self, name: str, figure: str) -> float:
        """Return a figure's largest value."""
        return max(self.values(name, figure))

    def noise(self, name: str) -> float:
        """Return the interquartile range of the compared figure, as a share of its median."""
        values = self.values(name, self.key)
        if len(values) < 2:
            return math.nan
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return (high - low) / statistics.median(values)

    def times_slower(self, name: str, beside: str) -> float:
        """Return how many times longer `name` takes than `beside`, round by round."""
        pairs = zip(self.values(name, self.key), self.values(beside, self.key), strict=True)
        ratios = [mine / theirs for mine, theirs in pairs]
        ratio = statistics.median(ratios)
        return 1 / ratio if self.key == RATE else ratio

    def show(self, console: Console) -> None:
        """Print the table for people."""
        figures = list(dict.fromkeys(f for each in self.rounds.values() for f in each[0]))
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        table.caption = self.note or None
        table.caption_justify = "left"
        table.add_column("")
        for figure in figures:
            table.add_column(figure, justify="right")
        table.add_column("noise", justify="right")
        table.add_column("takes", justify="left")
        for contestant in self.contestants:
            name = contestant.name
            cells = [_cell(self, name, figure) for figure in figures]
            beside = contestant.beside
            takes = f"{self.times_slower(name, beside):.2f} x {beside}" if beside else ""
            noise = self.noise(name)
            table.add_row(name, *cells, "" if math.isnan(noise) else f"{noise:.0%}", takes)
        console.print(table)

    def data(self) -> dict[str, Any]:
        """Return the table for programs."""
        return {
            "title": self.title,
            "key": self.key,
            "note": self.note,
            "rows": [self._row(contestant) for contestant in self.contestants],
        }

    def _row(self, contestant: Contestant) -> dict[str, Any]:
        name, beside = contestant.name, contestant.beside
        figures = list(self.rounds[name][0])
        return {
            "name": name,
            "medians": {figure: self.median(name, figure) for figure in figures},
            "noise": None if math.isnan(self.noise(name)) else self.noise(name),
            "beside": beside,
            "times_slower": self.times_slower(name, beside) if beside else None,
            "rounds": self.rounds[name],
        }


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that was promised, and what came out."""

    text: str
    figure: float
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        """Tell whether the figure is within its bound."""
        if self.at_least is not None and self.figure < self.at_least:
            return False
        return self.at_most is None or self.figure <= self.at_most

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.at_least is not None:
            return f"at least {self.at_least:,.4g} {self.unit}".strip()
        return f"at most {self.at_most:,.4g} {self.unit}".strip()


@dataclass(slots=True)
class Report:
    """Everything one benchmark found."""

    benchmark: str
    environment: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    is_quick: bool = False
    picture: str | None = None
    """The tables as an SVG, where one is worth drawing."""

    def show(self, console: Console) -> None:
        """Print every target beside its figure, and what the figures depend on."""
        for name, value in self.environment.items():
            console.print(f"{name}: {value}", highlight=False)
        table = RichTable(title="Holdfast's targets", title_justify="left", title_style="bold")
        for heading in ("", "target", "measured", ""):
            table.add_column(heading)
        for target in self.targets:
            verdict = "[green]met[/green]" if target.is_met else "[red]missed[/red]"
            measured = f"{target.figure:.3g} {target.unit}"
            table.add_row(target.text, target.bound, measured, verdict)
        console.print(table)
        missed = sum(not target.is_met for target in self.targets)
        console.print(f"{missed} of {len(self.targets)} targets missed", highlight=False)
        if self.is_quick:
            console.print(QUICK_WARNING, style="yellow")

    def data(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "benchmark": self.benchmark,
            "is_quick": self.is_quick,
            "environment": self.environment,
            "tables": [table.data() for table in self.tables],
            "targets": [
                {**asdict(target), "bound": target.bound, "is_met": target.is_met}
                for target in self.targets
            ],
        }


def compare(
    title: str, contestants: Sequence[Contestant], *, rounds: int, key: str, note: str = ""
) -> Table:
    """Run the contestants in turn, after one round each that does not count."""
    found: dict[str, list[Figures]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds + 1):
        start = number % len(contestants)
        for contestant in [*contestants[start:], *contestants[:start]]:
            figures = contestant.round()
            if number > 0:
                found[contestant.name].append(figures)
    return Table(title, key, contestants, found, note)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def environment() -> dict[str, str]:
    """Return what the figures depend on."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load before": load,
    }


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the peers that are installed, and name those that are not."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed, left out; `make bench` installs it"
    return found


def _cell(table: Table, name: str, figure: str) -> str:
    values = table.values(name, figure)
    return _number(statistics.median(values)) if values else ""


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
