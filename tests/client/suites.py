"""Suites that were written for embedded stores and are run on a client as well."""

from __future__ import annotations

from typing import Any

# Why a test of a suite is not one of the client's.
COMPOSES = "it composes a transaction, which a client cannot"
OPENS = "it opens the database itself"
INTERNAL = "it looks inside an embedded store"
KILLS = "it kills processes, which need a server of its own: test_resumed_agents has it"
MOVES = "sessions are moved where the database is"
AUDIT = "the audit trail is read where the database is"
KEYS = "keys and redaction are the server's"


def leave_out(module: dict[str, Any], **reasons: str) -> None:
    """Remove tests from a module that has imported a whole suite."""
    for name in reasons:
        del module[f"test_{name}"]
