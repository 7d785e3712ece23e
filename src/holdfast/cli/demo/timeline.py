"""The output of the demo: a timeline as it happens, and the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...formatting import plural
from ..output import console, wrapped
from .trip import destination

if TYPE_CHECKING:
    from .running import Loop, Moment, Trip

INTRODUCTION = (
    "An agent plans a trip: it asks a model, searches for trains, writes a file and charges a "
    "card. The payment server takes every request as a new charge. The agent is killed with "
    "SIGKILL at five points around the charge, and each time a new process takes over:"
)
PICTURE = " (1)  intent  (2)  charge  (3)  result  (4)  checkpoint  (5)"
POINTS = {
    "before_intent": "(1) before the intent",
    "after_intent": "(2) after the intent",
    "after_effect": "(3) after the charge",
    "after_result": "(4) after the result",
    "after_checkpoint": "(5) after the checkpoint",
}
PLAIN_POINTS = POINTS | {
    "before_intent": "(1) before the charge",
    "after_intent": "(2) before the charge",
    "after_checkpoint": "(5) after the turn",
}
STYLES = {
    "reached": "bold red",
    "began": "green",
    "verified": "yellow",
    "replayed": "yellow",
    "charged": "bold",
    "done": "bold green",
}
WIDTH = 80
LINE = "{:>5} {:>8}  {:<38}{:>6} {:>10} {:>8}"


class Timeline:
    """Writes a line for each thing that happens, on a terminal or into a log."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._out = console()
        self._out.quiet = is_silent
        self._loop: Loop = "plain"

    def introduce(self) -> None:
        """Print what is going to happen."""
        self._say(wrapped(INTRODUCTION, min(self._out.width, WIDTH)) + "\n")
        self._say(PICTURE, "bold")

    @contextmanager
    def section(self, number: int, loop: Loop) -> Iterator[None]:
        """Show one trip; on a terminal, also that it is in progress."""
        self._loop = loop
        title = f"To {destination(number)} with Holdfast: it resumes where it was killed."
        if loop == "plain":
            title = f"To {destination(number)} with a plain loop: it starts over after each kill."
        self._say(f"\n{title}\n", "bold")
        self._line("time", "process", "", "tokens", "ledger", "charges", "dim")
        with self._out.status("Running"):
            yield

    def show(self, moment: Moment) -> None:
        """Print what happened."""
        text = self._plain_text(moment) if self._loop == "plain" else _text(moment)
        if text is None:
            return
        fields = moment.fields
        is_replay = fields.get("is_replay", False)
        self._line(
            f"{moment.seconds:.1f}",
            str(moment.process_id),
            text,
            str(fields.get("tokens", "")),
            str(fields.get("ledger") or ""),
            str(fields.get("charges", "")),
            STYLES.get("replayed" if is_replay else moment.what, ""),
        )

    def _plain_text(self, moment: Moment) -> str | None:
        match moment.what:
            case "reached":
                return f"SIGKILL {PLAIN_POINTS[moment.fields['point']]}"
            case "done":
                return f"done: {moment.fields['text']}"
        return None

    def compare(self, fork_id: str, version: int, changes: Sequence[str]) -> None:
        """Show a fork from before the charge, and what the charge changed."""
        self._say(
            "\nForked from before it paid: a session that shares the history up to there.", "bold"
        )
        self._say(f"  {fork_id} starts at version {version}. Paying changed:")
        for change in changes:
            self._say(f"  {change}"[:WIDTH])

    def conclude(self, pairs: Sequence[tuple[Trip, Trip]], problems: Sequence[str]) -> None:
        """Show the results of both loops side by side."""
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(plural(len(pairs), "trip"))
        for heading in ("plain loop", "with Holdfast"):
            table.add_column(heading, justify="right", min_width=14)
        loops = list(zip(*pairs, strict=True))
        wanted = {
            "killed with SIGKILL": lambda trip: len(trip.kills),
            "restarted": lambda trip: trip.restarts,
            "model calls": lambda trip: trip.model_calls,
            "tokens": lambda trip: trip.tokens,
            "charges at the payment server": lambda trip: trip.charges,
        }
        for name, count in wanted.items():
            cells = [f"{sum(map(count, loop)):,}" for loop in loops]
            if name.startswith("charges"):
                styles = ("bold red", "bold red" if problems else "bold green")
                cells = [f"[{style}]{cell}[/]" for style, cell in zip(styles, cells, strict=True)]
            table.add_row(name, *cells)
        self._out.print()
        self._out.print(table)
        saved = sum(durable.tokens_not_spent_again for _, durable in pairs)
        self._say(f"\nWith Holdfast, {saved:,} tokens were not spent again.")
        for problem in problems:
            self._say(f"This is wrong: {problem}.", "bold red")

    def suggest(self, path: str, commands: Sequence[tuple[str, str]]) -> None:
        """Print commands to explore the result."""
        self._say(f"\nEverything is in {path}. Explore it:", "bold")
        for what, command in commands:
            self._say(f"\n  {what}:", "dim")
            self._out.print(f"  {command}", markup=False, soft_wrap=True)

    def invite(self) -> None:
        """Announce the dashboard."""
        self._say("\nOpen the dashboard at the URL below; Ctrl-C ends it.\n", "bold")

    def _line(self, *columns: str) -> None:
        *texts, style = columns
        self._say(LINE.format(*texts).rstrip(), style)

    def _say(self, text: str, style: str = "") -> None:
        self._out.print(text, style=style or None, markup=False)


def _text(moment: Moment) -> str | None:
    """Return what an agent with Holdfast did, as text."""
    fields = moment.fields
    match moment.what:
        case "began" if fields["messages"]:
            return f"resumes with {plural(fields['messages'], 'message')}"
        case "began":
            return "starts"
        case "answered":
            return f"model: {fields['text']}"
        case "charged":
            return f"charges {fields['cents'] / 100:.2f}"
        case "verified":
            return f"asks the server: charged? {'yes' if fields['is_charged'] else 'no'}"
        case "called" if fields["is_replay"]:
            return f"{fields['tool']}: stored result, not run again"
        case "called":
            return f"{fields['tool']}"
        case "saved":
            return f"checkpoint {fields['version']}"
        case "reached":
            return f"SIGKILL {POINTS[fields['point']]}"
        case "done":
            return "done"
    return None
