"""A bounded prompt for a resumed agent: the shared state and its children's answers."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from typing import Any, overload

from ..checkpoints.diff import printable
from ..codec import to_json
from ..errors import InvalidArgument
from ..formatting import plural
from ..kernel.operation import Async, C, Op, Sync, query
from ..sessions import SessionHandle, SessionPart
from ..wire import travels
from .handle import SUMMARY_BYTES, SUMMARY_KEYS, State
from .records import StateSummary

STATE_HEADING = "## Session State Summary"
RESULTS_HEADING = "## Child Results"


@travels
class ResumePrompt(SessionPart[C]):
    """The resume prompt of one session."""

    @query
    def text(self, answers: Mapping[str, Any] | None, max_keys: int, max_bytes: int) -> Op[str]:
        """Return both parts under their headings; omissions and cuts are marked."""
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
    """Return a prompt for an agent that resumes: the shared state, and its children's answers.

    Each part takes at most `max_bytes`; omissions and cuts are marked.
    """
    return ResumePrompt(session).text(answers, max_keys, max_bytes)


def require_answers(answers: object) -> Mapping[str, Any]:
    """Return checked answers, by the name of the child."""
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
    """Yield a line for each answer, each cut to an equal share of the bytes."""
    share = max_bytes // max(1, len(answers))
    for name, answer in answers.items():
        # As JSON, an answer cannot imitate a heading.
        text = to_json(answer, name=name)
        whole = text.encode()
        if len(whole) > share:
            cut = whole[:share].decode("utf-8", "ignore")
            text = f"{cut} (cut: {len(whole) - len(cut.encode()):,} of {len(whole):,} bytes)"
        yield f"- {printable(name)}: {text}"
    if not answers:
        yield "(none)"
