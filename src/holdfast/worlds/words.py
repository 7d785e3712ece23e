"""What foreign objects say of themselves, in words; some of them cannot."""

from __future__ import annotations

from ..arguments import shown


def message_of(error: BaseException) -> str:
    """Return the message of an exception; one that cannot be shown has none."""
    try:
        return str(error)
    except Exception:
        return ""


def said(error: BaseException) -> str:
    """Return an exception by its type, with its message if it has one."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def text_of(value: object) -> str:
    """Return a value as Python writes it, or by its type if it cannot be written."""
    try:
        return repr(value)
    except Exception:
        return shown(value)
