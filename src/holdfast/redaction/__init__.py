"""Redaction of common kinds of secrets from plain data before it is stored.

A secret is recognised by its own format (`ghp_…`, a PEM block, a card number), by its name
(`{"password": …}`, `api_key=…`), or by its context (a URL, a header), and replaced by
`[redacted:kind]`. This reduces harm but guarantees nothing: a password in the middle of a sentence
cannot be recognised.

Most text has no secrets, so the search starts with a few cheap passes over its bytes: is there a
long run of token characters, a suspicious word, a URL with `@`, or as many digits as a card has?
Only then are patterns applied, none of which can backtrack without bound.
"""

from __future__ import annotations

from .redactor import NoRedaction, Redaction, Redactor, checked_redaction, log_origin

__all__ = ["NoRedaction", "Redaction", "Redactor", "checked_redaction", "log_origin"]
