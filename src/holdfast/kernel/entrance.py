"""One call at a time on each thread: a store refuses to be called from inside a call of its own.

The function of `store.run`, a hook, a signal handler or `__del__` may run while a thread is inside
a call and holds the writer, a connection or a lock. Whatever it asked for would wait for that very
thread, or change what the thread is in the middle of.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from ..errors import StoreReentered

R = TypeVar("R")
T = TypeVar("T")


class Entrance:
    """Knows which threads are inside a call."""

    def __init__(self) -> None:
        self._inside: dict[int, Any] = {}

    def run(self, function: Callable[[T], R], argument: T) -> R:
        """Call a function while this thread counts as inside. Raises StoreReentered if it is."""
        thread, inside = get_ident(), self._inside
        if thread in inside:
            raise _error()
        # Python looks for signals neither between the test and the entry nor before its removal.
        try:
            inside[thread] = argument
            return function(argument)
        finally:
            inside.pop(thread, None)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call."""
        return get_ident() in self._inside

    def require_outside(self) -> None:
        """Raise StoreReentered on a thread that is inside a call."""
        if self.is_inside:
            raise _error()


def _error() -> StoreReentered:
    return StoreReentered(
        "this thread is inside a call of this store; a function of store.run uses its tx, a hook, "
        "a signal handler or __del__ leaves the call to another moment; nothing was done"
    )
