"""What a resumed agent is told: the shared state and its children's results, bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..checkpoints.diff import printable
from ..codec import to_json
from ..errors import InvalidArgument
from ..formatting import plural
from .records import StateSummary

STATE_HEADING = "## Session State Summary"
RESULTS_HEADING = "## Child Results"


def resume_prompt(summary: StateSummary, results: Mapping[str, Any], max_bytes: int) -> str:
    """Return both parts under their headings; whatever was left out or cut is said."""
    lines = [STATE_HEADING, *_state(summary), "", RESULTS_HEADING, *_results(results, max_bytes)]
    return "\n".join(lines) + "\n"


def require_results(results: object) -> Mapping[str, Any]:
    """Return results by the names of those who gave them."""
    if not isinstance(results, Mapping) or not all(isinstance(name, str) for name in results):
        raise InvalidArgument("results must be a dict of a child's name to its result")
    return results


def _state(summary: StateSummary) -> Iterator[str]:
    if summary.document or not summary.key_count:
        yield to_json(summary.document, indent=2)
    if summary.is_truncated:
        count = summary.key_count - len(summary.document)
        names = ", ".join(map(to_json, summary.left_out))
        yield f"(left out: {plural(count, 'key')} of {summary.key_count:,}; {names})"


def _results(results: Mapping[str, Any], max_bytes: int) -> Iterator[str]:
    """Give every result an equal share of the room."""
    share = max_bytes // max(1, len(results))
    for name, result in results.items():
        # As JSON, what a child says cannot pass for a heading.
        text = to_json(result, name=name)
        whole = text.encode()
        if len(whole) > share:
            cut = whole[:share].decode("utf-8", "ignore")
            text = f"{cut} (cut: {len(whole) - len(cut.encode()):,} of {len(whole):,} bytes)"
        yield f"- {printable(name)}: {text}"
    if not results:
        yield "(none)"
