"""Problems as HTTP responses."""

from __future__ import annotations

from ..answers.problems import CONFLICT_BYTES, Refusal, problem_of
from .messages import Answer

CONTENT_TYPE = "application/problem+json"
RETRY_SECONDS = 1


def answer_of(error: Exception, instance: str, conflict_bytes: int = CONFLICT_BYTES) -> Answer:
    """Return the response to a request that failed; details that it must not reveal are logged."""
    body = problem_of(error, instance, conflict_bytes)
    if body["error"] == "internal":
        return Answer(body["status"], body, {}, content_type=CONTENT_TYPE)
    headers = {"cache-control": "no-store"}
    if isinstance(error, Refusal):
        headers |= error.headers
    if body["status"] in {429, 503}:
        headers.setdefault("retry-after", str(RETRY_SECONDS))
    return Answer(
        body["status"], {**body, "instance": instance}, headers, content_type=CONTENT_TYPE
    )
