"""Text for exceptions and values of foreign code, whose `str` or `repr` may fail."""

from __future__ import annotations

from typing import Final

from ..arguments import shown

FAILURES: Final = (Exception, SystemExit)
"""What foreign code may end with. A command that it calls may exit, which must not end us."""


def message_of(error: BaseException) -> str:
    """Return the message of an exception; empty if it cannot be formatted."""
    try:
        return str(error)
    except Exception:
        return ""


def said(error: BaseException) -> str:
    """Return the type of an exception, with its message if it has one."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def text_of(value: object) -> str:
    """Return the repr of a value, or the name of its type if that fails."""
    try:
        return repr(value)
    except Exception:
        return shown(value)
