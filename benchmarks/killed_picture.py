"""The charges of killed agents as a picture: a coin each, red if it was not intended."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from .measure import Table

CHARGES, KILLS, FINISHED = "charges", "kills", "finished"
WIDTH, ROW, NAMES, COIN = 760, 30, 250, 32
LEGEND = "green: the intended charge; red: unintended charges"
TITLE = "The same agent, killed right after its charge and run again"
HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {{height}}"
    font-family="system-ui, sans-serif" font-size="14">
  <style>
    text {{{{ fill: #1f2328; }}}}
    .title {{{{ font-weight: 600; }}}}
    .small {{{{ font-size: 12px; fill: #57606a; }}}}
    .once {{{{ fill: #dafbe1; stroke: #1a7f37; }}}}
    .again {{{{ fill: #ffebe9; stroke: #cf222e; }}}}
    .coin {{{{ text-anchor: middle; font-size: 11px; }}}}
  </style>
  <rect width="{WIDTH}" height="{{height}}" fill="#ffffff"/>
  <text class="title" x="16" y="30">{TITLE}</text>
  <text class="small" x="16" y="50">{LEGEND}</text>
"""


def draw(tables: Sequence[Table]) -> str:
    """Return an SVG with a row for each contestant, which shows its worst trip."""
    y, lines = 52, []
    for table in tables:
        y += ROW + 8
        lines.append(_text("title", 16, y, table.title))
        for name in table.rounds:
            y += ROW
            count = round(table.worst(name, CHARGES))
            lines.append(_text("name", 32, y, name))
            for number in range(count):
                x = NAMES + number * COIN
                kind = "again" if number else "once"
                lines.append(f'<circle class="{kind}" cx="{x}" cy="{y - 5}" r="11"/>')
                lines.append(_text("coin", x, y - 1, "$"))
            kills = round(table.worst(name, KILLS))
            told = f"{_counted(count, 'charge')}, {_counted(kills, 'kill')}"
            if min(table.values(name, FINISHED)) < 1:
                told += "; then a person decides"
            lines.append(_text("small", NAMES + count * COIN, y, told))
    body = "".join(f"  {line}\n" for line in lines)
    return f"{HEAD.format(height=y + 24)}{body}</svg>\n"


def _text(kind: str, x: int, y: int, text: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
