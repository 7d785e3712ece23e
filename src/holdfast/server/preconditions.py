"""If-Match and related headers: the version that a write expects, or that a reader has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..answers.problems import Refusal
from .messages import Headers

NAMES = ("if-match", "if-none-match", "x-if-match")
_KEY_VERSION = re.compile(r'"?(\d{1,16})"?')
_STATE_VERSION = re.compile(r'"?(?:g|global_version_)?(\d{1,16})"?')
HOW = (
    'send If-Match: "<version>" to write only if nothing has changed since, If-None-Match: * to '
    "create only, or If-Match: * (or X-If-Match: skip) to write unconditionally"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a write expects: a version, 0 for a missing key, or None for anything."""

    version: int | None


def condition_of(headers: Headers, *, whole: bool = False) -> Condition | None:
    """Return the condition in the headers, if any; `whole` is for tags of the whole state."""
    match, none_match, skip = (headers.get(name) for name in NAMES)
    if skip is not None:
        if skip.lower() != "skip":
            raise _invalid(f"X-If-Match must be skip, not {skip!r}")
        if none_match is not None or match not in {None, "*"}:
            raise _invalid("X-If-Match: skip contradicts the other precondition")
        return Condition(None)
    if match is not None and none_match is not None:
        raise _invalid("If-Match and If-None-Match cannot be combined")
    if none_match is not None:
        if none_match != "*":
            raise _invalid("a write accepts only If-None-Match: *")
        return Condition(0)
    if match is None:
        return None
    return Condition(None if match == "*" else _version(match, whole=whole))


def required(condition: Condition | None) -> int | None:
    """Return the version that a write expects; a condition is required."""
    if condition is None:
        raise Refusal("precondition_required", f"a precondition is required: {HOW}")
    return condition.version


def optional(condition: Condition | None) -> int | None:
    """Return the version that a write expects, if there is a condition."""
    return None if condition is None else condition.version


def _version(tag: str, *, whole: bool) -> int:
    if tag.upper().startswith("W/"):
        raise _invalid(f"{tag} is a weak ETag: a proxy may have weakened it")
    found = (_STATE_VERSION if whole else _KEY_VERSION).fullmatch(tag)
    if found is None or tag.count('"') == 1:
        raise _invalid(f"If-Match must be one version, not {tag!r}")
    return int(found[1])


def _invalid(problem: str) -> Refusal:
    return Refusal("precondition_invalid", f"{problem}; {HOW}")


def key_tag(version: int) -> str:
    """Return the ETag of a key."""
    return f'"{version}"'


def state_tag(version: int) -> str:
    """Return the ETag of the whole state."""
    return f'"g{version}"'


def is_current(headers: Headers, version: int, *, whole: bool = False) -> bool:
    """Whether the reader already has this version."""
    given = headers.get("if-none-match")
    if given is None:
        return False
    pattern = _STATE_VERSION if whole else _KEY_VERSION
    for tag in given.split(","):
        found = pattern.fullmatch(tag.strip().removeprefix("W/"))
        if tag.strip() == "*" or (found is not None and int(found[1]) == version):
            return True
    return False
