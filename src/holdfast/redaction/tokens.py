"""Tokens and keys with a recognisable format."""

from __future__ import annotations

import functools
import re
from typing import Final

from .edit import Edit, replace_all

# An anchor is a text that every token of its kind contains; a pattern describes what follows it,
# and `back` characters of the token precede it.

_TOKENS: Final = (
    ("aws_key", 0, "AKIA ASIA ABIA ACCA", r"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("gcp_key", 0, "AIza", r"[A-Za-z0-9_-]{35}(?![A-Za-z0-9])"),
    ("gcp_key", 0, "GOCSPX- ya29.", r"[A-Za-z0-9_-]{20,}"),
    ("azure_key", 52, "JQQJ9", r"[A-Za-z0-9]{20,}={0,2}"),
    ("azure_key", 76, "+ASt +AMC +ABa ACDb APIM", r"[A-Za-z0-9+/]{6}=="),
    ("github", 0, "ghp_ gho_ ghu_ ghs_ ghr_", r"[A-Za-z0-9]{30,}"),
    ("github", 0, "github_pat_", r"[A-Za-z0-9_]{22,}"),
    ("gitlab", 0, "glpat- gldt- glrt- glptt- glcbt- glsoat- glft- gloas- glagent- glimt-",
     r"[A-Za-z0-9_-]{20,}(?:\.[A-Za-z0-9_-]{2,})*"),
    ("slack", 0, "xoxa- xoxb- xoxc- xoxd- xoxe- xoxe. xoxo- xoxp- xoxr- xoxs- xapp-",
     r"[A-Za-z0-9%-]{10,}"),
    ("slack", 0, "hooks.slack.com/", r"[a-z]{1,20}/T[A-Za-z0-9_/]{18,}"),
    ("stripe", 0, "sk_live_ sk_test_ rk_live_ rk_test_", r"[A-Za-z0-9]{16,}"),
    ("stripe", 0, "whsec_", r"[A-Za-z0-9+/=]{24,}"),
    ("anthropic", 0, "sk-ant-", r"[A-Za-z0-9_-]{20,}"),
    ("openai", 0, "sk-proj- sk-svcacct- sk-admin- sk-or-", r"[A-Za-z0-9_-]{20,}"),
    ("openai", 0, "sk-", r"[A-Za-z0-9]{32,}"),
    # Our own idempotency keys start in the same way.
    ("huggingface", 0, "hf_", r"(?![0-9a-f]{40}(?![A-Za-z0-9]))[A-Za-z0-9]{30,}"),
    ("huggingface", 0, "api_org_", r"[A-Za-z0-9]{30,}"),
    ("npm", 0, "npm_", r"[A-Za-z0-9]{36,}"),
    ("pypi", 0, "pypi-", r"[A-Za-z0-9_-]{50,}"),
    ("token", 0, "SG.", r"[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}"),
    ("token", 0, "hvs. hvb.", r"[A-Za-z0-9_-]{24,}"),
    ("token", 0, "gsk_ xai- r8_ dapi pplx- figd_ lin_api_ ntn_ sbp_ dop_v1_ shpat_ dckr_pat_",
     r"[A-Za-z0-9_-]{27,}"),
    ("private_key", 0, "AGE-SECRET-KEY-1", r"[A-Z0-9]{58}"),
    ("jwt", 0, "eyJ",
     r"[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*"),
)  # fmt: skip

# A token begins a word, or follows an escape: `\n` in quoted text, `%20` in a URL.
_STARTS: Final = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"


@functools.cache
def _pattern(anchor: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a token, compiled at first use: compiling all of them is slow."""
    _, back, rest = _SHAPES[anchor]
    head = f"[A-Za-z0-9+/]{{{back}}}" if back else _STARTS
    if anchor == b"eyJ":
        head += "(?<![_-])"  # So that a long run is scanned once, not again after each dash.
    return re.compile(head.encode() + re.escape(anchor) + rest.encode())


_SHAPES: Final = {
    anchor.encode(): (kind, back, rest)
    for kind, back, anchors, rest in _TOKENS
    for anchor in anchors.split()
}
_ANCHORS: Final = tuple(sorted(_SHAPES, key=len, reverse=True))
_PLAIN_ANCHORS: Final = tuple(anchor for anchor in _ANCHORS if not {*b"_-"} & {*anchor})
WORD_BYTES: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
_TOKEN_CHARACTERS: Final = bytes(97 if i in WORD_BYTES + b"+/" else 32 for i in range(256))
_LONG_RUN: Final = b"a" * 20
_BEFORE_RUN: Final = 24
_PEM: Final = re.compile(rb"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_PEM_END: Final = re.compile(rb"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_AZURE_SECRET: Final = re.compile(
    rb"(?<![A-Za-z0-9_.~-])([A-Za-z0-9_.~-]{3}[78]Q~[A-Za-z0-9_.~-]{31,34})(?![A-Za-z0-9_~-])"
)
_AWS_SECRET: Final = re.compile(rb"(?<![A-Za-z0-9/+_-])([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=_-])")


def without_tokens(raw: bytes) -> bytes:
    """Replace every token and private key with a recognisable format."""
    if b"~" in raw:
        raw = replace_all(_AZURE_SECRET, "azure_key", raw)
    shape = raw.translate(_TOKEN_CHARACTERS)
    if _LONG_RUN not in shape:
        return raw
    if b"PRIVATE KEY" in raw:
        raw = _without_pem(raw)
        shape = raw.translate(_TOKEN_CHARACTERS)
    edit = Edit(raw)
    at = shape.find(_LONG_RUN)
    while at >= 0:
        end = shape.find(b" ", at)
        end = len(shape) if end < 0 else end
        _cut_run(edit, max(edit.done, at - _BEFORE_RUN), end)
        at = shape.find(_LONG_RUN, max(end, edit.done))
    if "aws_key" in edit.kinds:
        # 40 characters are an AWS secret only near an AWS key id.
        return replace_all(_AWS_SECRET, "aws_secret", edit.text())
    return edit.text()


def _cut_run(edit: Edit, begin: int, end: int) -> None:
    raw = edit.raw
    has_dash = raw.find(b"_", begin, end) >= 0 or raw.find(b"-", begin, end) >= 0
    hits = []
    for anchor in _ANCHORS if has_dash else _PLAIN_ANCHORS:
        at = raw.find(anchor, begin, end)
        while at >= 0:
            hits.append((at, anchor))
            at = raw.find(anchor, at + len(anchor), end)
    for at, anchor in sorted(hits):
        kind, back, _ = _SHAPES[anchor]
        start = at - back
        found = _pattern(anchor).match(raw, start) if start >= edit.done else None
        if found is not None:
            edit.cut(start, found.end(), kind)


def _without_pem(raw: bytes) -> bytes:
    edit = Edit(raw)
    found = _PEM.search(raw)
    while found is not None:
        end = _PEM_END.search(raw, found.end())
        edit.cut(found.start(), end.end() if end else len(raw), "private_key")
        found = _PEM.search(raw, edit.done)
    return edit.text()
