"""If-Match and its relatives: which version a write expects, and which one a reader has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..answers.problems import Refusal
from .messages import Headers

NAMES = ("if-match", "if-none-match", "x-if-match")
_KEY_VERSION = re.compile(r'"?(\d{1,16})"?')
_STATE_VERSION = re.compile(r'"?(?:g|global_version_)?(\d{1,16})"?')
HOW = (
    'send If-Match: "<version>" to write only if nobody was first, If-None-Match: * to create '
    "only, or If-Match: * (or X-If-Match: skip) to write whatever is there"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a write expects: a version, 0 for nothing there, or None for whatever is there."""

    version: int | None


def condition_of(headers: Headers, *, whole: bool = False) -> Condition | None:
    """Return what the headers expect, or None if they say nothing; `whole` is the whole state's."""
    match, none_match, skip = (headers.get(name) for name in NAMES)
    if skip is not None:
        if skip.lower() != "skip":
            raise _invalid(f"X-If-Match takes skip, not {skip!r}")
        if none_match is not None or match not in {None, "*"}:
            raise _invalid("X-If-Match: skip contradicts the other precondition")
        return Condition(None)
    if match is not None and none_match is not None:
        raise _invalid("If-Match and If-None-Match cannot be combined")
    if none_match is not None:
        if none_match != "*":
            raise _invalid("a write takes If-None-Match: * only")
        return Condition(0)
    if match is None:
        return None
    return Condition(None if match == "*" else _version(match, whole=whole))


def required(condition: Condition | None) -> int | None:
    """Return the version that a write expects; it must say so, or that it expects none."""
    if condition is None:
        raise Refusal("precondition_required", f"this would overwrite blindly: {HOW}")
    return condition.version


def optional(condition: Condition | None) -> int | None:
    """Return the version that a write expects, if it says so."""
    return None if condition is None else condition.version


def _version(tag: str, *, whole: bool) -> int:
    if tag.upper().startswith("W/"):
        raise _invalid(f"{tag} is a weak tag: something on the way has weakened it")
    found = (_STATE_VERSION if whole else _KEY_VERSION).fullmatch(tag)
    if found is None or tag.count('"') == 1:
        raise _invalid(f"If-Match takes one version, not {tag!r}")
    return int(found[1])


def _invalid(problem: str) -> Refusal:
    return Refusal("precondition_invalid", f"{problem}; {HOW}")


def key_tag(version: int) -> str:
    """Return the tag of a key."""
    return f'"{version}"'


def state_tag(version: int) -> str:
    """Return the tag of the whole state."""
    return f'"g{version}"'


def is_current(headers: Headers, version: int, *, whole: bool = False) -> bool:
    """Whether the reader has this version already."""
    given = headers.get("if-none-match")
    if given is None:
        return False
    pattern = _STATE_VERSION if whole else _KEY_VERSION
    for tag in given.split(","):
        found = pattern.fullmatch(tag.strip().removeprefix("W/"))
        if tag.strip() == "*" or (found is not None and int(found[1]) == version):
            return True
    return False
