"""Secrets of common shapes are taken out of plain data before it is stored.

A secret is known by its own shape (`ghp_…`, a PEM block, a card number), by the name it stands
under (`{"password": …}`, `api_key=…`), or by what carries it (a URL, a header). What is found
becomes `[redacted:kind]`. This lowers the harm of a secret in the wrong place; it is no proof that
none is left: a password in the middle of a sentence has no shape.

Nearly every text has no secret, so the search starts with a few passes over its bytes that cost
microseconds: is there a long run of token characters, a telling word, a URL with `@`, or as many
digits as a card has? Only what answers yes is looked at with patterns. None of them can backtrack
over more than a bounded stretch.
"""

from __future__ import annotations

from .redactor import NoRedaction, Redaction, Redactor, require_key

__all__ = ["NoRedaction", "Redaction", "Redactor", "require_key"]
