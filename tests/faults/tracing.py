"""Interrupts at every place where Python can raise them, one after the other."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

# After these Python looks for signals. At the event "call" nothing is raised: Python 3.11 would
# crash where the function is a closure.
LOOKING = {n for name, n in dis.opmap.items() if name.startswith("CALL") or name == "RESUME"}


class Interrupt:
    """Raises KeyboardInterrupt at the nth place where CPython itself can raise it.

    Python looks for signals when a function begins, when a loop goes back, and after a call of a
    function written in C; nowhere else. Tracing every instruction finds these places. `files` are
    the ends of the names of those in which they count, all but `threading` if there are none.
    """

    def __init__(self, nth: int, files: tuple[str, ...] = ("",)) -> None:
        if sys.version_info >= (3, 13):
            pytest.skip("Python 3.13 traces the instructions of a function from its second run on")
        self.remaining = nth
        self._files = files
        self._last: dict[FrameType, int] = {}

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        # Python 3.12 traces instructions only if some frame asked for them before tracing began.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            yield
        finally:
            # One that was interrupted as it ended is closed by the garbage collector, at any time.
            if sys.gettrace() in (None, self._trace):
                sys.settrace(before)
            self.forget()

    def forget(self) -> None:
        """Let go of the frames that were seen, also if `armed` itself was interrupted."""
        self._last.clear()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is type(self).armed.__wrapped__.__code__:  # type: ignore[attr-defined]
            return None
        name = frame.f_code.co_filename
        # Where `threading` enters its locks, Python 3.11 can lose its way if a trace raises.
        if name == threading.__file__ or not name.endswith(self._files):
            if frame.f_back is not None:
                self._last[frame.f_back] = -1
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            # Not where it goes on inside a `yield from` or an error is thrown into it.
            instruction, argument = frame.f_code.co_code[frame.f_lasti :][:2]
            is_looking = instruction == dis.opmap["RESUME"] and argument & 3 < 2
            self._last[frame] = instruction if is_looking else -1
        elif event == "exception":
            self._last[frame] = -1
        elif event == "return" and frame.f_back is not None:
            # Only a function written in C, like `send`, goes on with a generator in a call.
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                self._last[frame.f_back] = -1
        elif event == "opcode":
            instruction = frame.f_code.co_code[frame.f_lasti]
            if self._last.get(frame) in LOOKING or instruction == dis.opmap["JUMP_BACKWARD"]:
                self._pass()
            self._last[frame] = instruction
        return self._trace

    def _pass(self) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise KeyboardInterrupt
