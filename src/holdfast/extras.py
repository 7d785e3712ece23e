"""Packages that are installed only by those who need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MissingPackage

OWN = __name__.partition(".")[0]


@contextmanager
def required(what: str, extra: str) -> Iterator[None]:
    """Let an import that fails in this block say which extra has the package."""
    try:
        yield
    except MissingPackage:
        raise
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == OWN:
            raise
        message = f"{what} needs {package}: pip install 'holdfast-agents[{extra}]'"
        missing = MissingPackage(message, package=package, extra=extra)
        missing.name, missing.path = error.name, error.path
        raise missing from error
