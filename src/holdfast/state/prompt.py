"""What a resumed agent is told: the shared state and its children's answers, bounded."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from typing import Any, overload

from ..checkpoints.diff import printable
from ..codec import to_json
from ..errors import InvalidArgument
from ..formatting import plural
from ..kernel.operation import Async, C, Handle, Op, Sync, query
from ..sessions import SessionHandle
from .handle import SUMMARY_BYTES, SUMMARY_KEYS, State
from .records import StateSummary

STATE_HEADING = "## Session State Summary"
RESULTS_HEADING = "## Child Results"


class ResumePrompt(Handle[C]):
    """Makes the text for one session."""

    def __init__(self, session: SessionHandle[C]) -> None:
        super().__init__(session.runtime)
        self._session = session

    @query
    def text(self, answers: Mapping[str, Any] | None, max_keys: int, max_bytes: int) -> Op[str]:
        """Return both parts under their headings; whatever was left out or cut is said."""
        given = require_answers({} if answers is None else answers)
        summary = yield from State.summary(State(self._session), max_keys, max_bytes)
        parts = [STATE_HEADING, *_state(summary), "", RESULTS_HEADING, *_answers(given, max_bytes)]
        return "\n".join(parts) + "\n"


@overload
def resume_prompt(
    session: SessionHandle[Sync],
    answers: Mapping[str, Any] | None = None,
    *,
    max_keys: int = SUMMARY_KEYS,
    max_bytes: int = SUMMARY_BYTES,
) -> str: ...


@overload
def resume_prompt(
    session: SessionHandle[Async],
    answers: Mapping[str, Any] | None = None,
    *,
    max_keys: int = SUMMARY_KEYS,
    max_bytes: int = SUMMARY_BYTES,
) -> Awaitable[str]: ...


def resume_prompt(
    session: SessionHandle[Any],
    answers: Mapping[str, Any] | None = None,
    *,
    max_keys: int = SUMMARY_KEYS,
    max_bytes: int = SUMMARY_BYTES,
) -> Any:
    """Return a bounded text for an agent that resumes: shared state, and its children's answers.

    Either part takes at most so many bytes; what was left out or cut is said.
    """
    return ResumePrompt(session).text(answers, max_keys, max_bytes)


def require_answers(answers: object) -> Mapping[str, Any]:
    """Return answers by the names of those who gave them."""
    if not isinstance(answers, Mapping) or not all(isinstance(name, str) for name in answers):
        raise InvalidArgument("answers must be a dict of a child's name to its answer")
    return answers


def _state(summary: StateSummary) -> Iterator[str]:
    if summary.document or not summary.key_count:
        yield to_json(summary.document, indent=2)
    if summary.is_truncated:
        count = summary.key_count - len(summary.document)
        names = ", ".join(map(to_json, summary.left_out))
        yield f"(left out: {plural(count, 'key')} of {summary.key_count:,}; {names})"


def _answers(answers: Mapping[str, Any], max_bytes: int) -> Iterator[str]:
    """Give every answer an equal share of the room."""
    share = max_bytes // max(1, len(answers))
    for name, answer in answers.items():
        # As JSON, what a child says cannot pass for a heading.
        text = to_json(answer, name=name)
        whole = text.encode()
        if len(whole) > share:
            cut = whole[:share].decode("utf-8", "ignore")
            text = f"{cut} (cut: {len(whole) - len(cut.encode()):,} of {len(whole):,} bytes)"
        yield f"- {printable(name)}: {text}"
    if not answers:
        yield "(none)"
