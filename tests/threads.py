"""Threads that nobody waits for: a test whose call never returns fails at its own deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def begin(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call a function in a thread; its result or error is for whoever asks."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(function(*args, **kwargs))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return ended
