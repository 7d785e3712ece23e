"""Problems as text for people who use the pages: what happened, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .forms import told

FAILED = "Something went wrong here; the log of the server says what."
# By code: a title, if the API's own does not suit a reader, and what to do.
EXPLAINED: dict[str, tuple[str | None, str]] = {
    "unavailable": (
        "The store cannot be reached right now",
        "What was saved is safe. Wait a few seconds and load the page again. If that does not "
        "help, the log of the server says why.",
    ),
    "commit_unknown": (
        "It is not known whether the change was made",
        "The connection to the database broke while it was written. Look at the page before you "
        "send it again.",
    ),
    "store_full": (
        "There is no space left",
        "Nothing was changed. Make space for the database, then send it again.",
    ),
    "invalid_request": (
        "The page cannot be shown like this",
        "Part of its address is not valid. Go back and choose again.",
    ),
    "malformed": (
        "The page cannot be shown like this",
        "Part of its address cannot be read. Go back and choose again.",
    ),
    "not_found": ("There is no such page", "It may have been removed. Search finds what there is."),
    "session_not_found": (None, "It may have been deleted. Search finds what there is."),
    "checkpoint_not_found": (None, "It may have been pruned. The list of versions has the others."),
    "key_not_found": (None, "The list of keys has those that there are."),
    "history_compacted": (None, "Retention removed it. What is newer can still be looked at."),
    "forbidden": (None, "Sign out, and sign in with a token that allows it."),
    "read_only": (None, "This server only shows pages; nothing can be changed here."),
    "rate_limited": (None, "Wait a minute, then load the page again."),
}


def explained(problem: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the title of a problem's page, and its sentences."""
    title, advice = EXPLAINED.get(problem["error"], (None, ""))
    if "detail" not in problem:
        return problem["title"], [FAILED]
    field, words = told(problem)
    # If details must not be revealed, the detail is the title.
    is_title = problem["detail"] == problem["title"]
    named = f"{field}: {words}" if field and problem["error"] == "invalid_request" else words
    return title or problem["title"], [each for each in ("" if is_title else named, advice) if each]
