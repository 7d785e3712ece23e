"""Forms: what they send, and what a person reads when one is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlencode

import msgspec

from ...answers.problems import Refusal
from ...codec import from_json
from ...errors import InvalidValue
from ..bodies import FIELDS_MAX, parse_query
from ..messages import Call

# Statuses of problems that a person can correct on the same page.
MENDED = frozenset({400, 404, 409, 410, 413, 422, 503, 507})
# Messages of type checks, and what a person reads instead.
_PLAIN = (
    (r"Expected `str` of length >= 1$", "Fill this in."),
    (r"Expected `str` of length <= (\d+)$", "Enter at most {} characters."),
    (r"Expected `int` >= (-?\d+)$", "Enter a whole number of at least {}."),
    (r"Expected `int` <= (\d+)$", "Enter a whole number of at most {}."),
    (r"Expected `int", "Enter a whole number."),
    (r"Invalid enum value", "Choose one of the options."),
    (r"Object missing required field", "Fill this in."),
    (r"Object contains unknown field `(\w*)`$", "The page does not know “{}”."),
)

_BEGINS = re.compile(r"(?:the|an?|th(?:is|at|ere|ese)|no|nothing|tick|another|more|only|name)\b")


class Form(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every form sends besides its own fields; surrounding white space is removed."""

    subject: ClassVar[str | None] = None
    """The field to blame if a value is refused without naming one."""

    csrf: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused form: what is wrong, at which field, and what was typed."""

    form: str
    field: str | None
    words: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Around:
    """The page that a form is on; it is shown again if the form is refused."""

    page: Callable[[Call], Any]
    query: Callable[[Mapping[str, str]], msgspec.Struct]
    """The query of the page, from what the form sends."""
    part: str = ""
    """What replaces the last part of the form's address in that of the page."""


def sent_by(call: Call) -> dict[str, str]:
    """Return what a form sends, as it was typed."""
    text = call.raw_body.decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError:
        raise Refusal("malformed", f"the form has more than {FIELDS_MAX} fields") from None


def form_of(call: Call, wanted: type[Form]) -> Any:
    """Return what a form sends; from a browser, it must come from a page of this server."""
    is_signed_in = call.headers.get("authorization") is None
    given = sent_by(call).get("csrf", "")
    sign_in = call.context.options.sign_in
    if is_signed_in and not sign_in.is_form_token(given, call.headers.get("cookie")):
        raise Refusal(
            "forbidden", "the form does not come from a page of this server; open the page again"
        )
    # Only spaces count as nothing.
    parse_query(call.raw_body, dict[str, str])
    stripped = urlencode({name: text.strip() for name, text in sent_by(call).items()})
    return parse_query(stripped.encode(), wanted)


def json_field(call: Call, text: str, name: str) -> Any:
    """Return what a person has typed as JSON; an empty field is null."""
    if not text.strip():
        return None
    try:
        return from_json(text.encode(), call.store.runtime.codec.limits, name=f"the {name}")
    except (InvalidValue, msgspec.MsgspecError) as error:
        raise Refusal("invalid_request", str(error), pointer=name) from None


def refused_of(
    problem: Mapping[str, Any], name: str, form: type[Form], values: Mapping[str, str]
) -> Refused:
    """Return how a form shows a problem: at the field that it is about, if that is known."""
    field, words = told(problem)
    if field not in form.__struct_fields__ and problem["status"] in {413, 422}:
        # It may point into a value.
        field = form.subject
    return Refused(name, field, words, values)


def told(problem: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the field that a problem is about, if it names one, and what a person reads."""
    detail = problem.get("detail") or ""
    field = str(problem.get("pointer") or "").removeprefix("/") or None
    # If types do not match, the detail begins with the pointer.
    bare = detail.partition(": ")[2] if re.match(r"(/\S*|the query): ", detail) else detail
    missing = re.match(r"Object missing required field `(\w+)`", bare)
    if missing:
        field = missing[1]
    named = re.match(r"(\w+) must be text of 1 to", detail)
    if field is None and named:
        field = named[1]
    for pattern, words in _PLAIN:
        if found := re.match(pattern, bare):
            return field, words.format(*found.groups())
    return field, sentence(detail or problem["title"])


def sentence(text: str) -> str:
    """Return an error's message as a sentence; a name at its beginning is not capitalized."""
    ended = text if text.endswith((".", "!", "?", "…")) else f"{text}."
    return ended[:1].upper() + ended[1:] if _BEGINS.match(ended) else ended
