"""Packages that are installed only by those who need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def required(what: str, extra: str) -> Iterator[None]:
    """Let an import that fails in this block say which extra has the package."""
    try:
        yield
    except ImportError as error:
        message = f"{what} needs {error.name}: pip install 'holdfast-agents[{extra}]'"
        raise ImportError(message, name=error.name, path=error.path) from error
