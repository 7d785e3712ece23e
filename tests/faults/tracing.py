"""Interrupts at every place where Python can raise them, one after the other."""

from __future__ import annotations

import _thread
import dis
import inspect
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import pytest

# With these Python looks for signals: after a call of a function written in C, as a function
# written in Python begins, and as a loop goes back.
CALLS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW") if name in dis.opmap}
LOOKING = {*CALLS, dis.opmap["JUMP_BACKWARD"]}

beside_threads = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12),
    reason="Python 3.12 may crash when it traces instructions that another thread runs",
)


class Signal(int):
    """A signal that is sent by a look at an attribute: after a call it would be received at once.

    A trace function that raises, as this one then would, lets Python 3.11 lose its way.
    """

    sent = property(_thread.interrupt_main)


class Interrupt:
    """Sends a signal so that Python itself raises KeyboardInterrupt at the nth place where it can.

    A trace of all instructions sends it right before that place. `files` are the ends of the names
    of those in which it is sent.
    """

    _signal = Signal(signal.SIGINT)
    # Where functions began though nothing was called: at `with`, `for`, a property, ….
    _entering: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, nth: int, files: tuple[str, ...] = ("",)) -> None:
        self.remaining = nth
        self._files = files
        self._is_on = False
        self._is_early = False

    def strike(self, function: Callable[[], object]) -> None:
        """Call a function, and catch its interrupt if one comes out of it."""
        handler, trace = signal.signal(self._signal, self._receive), sys.gettrace()
        # Python 3.12 traces instructions only if some frame asked for them before tracing began.
        sys._getframe().f_trace_opcodes = True
        try:
            self._is_on = True
            sys.settrace(self._trace)
            function()
        except KeyboardInterrupt:
            pass
        finally:
            # One that was sent as the function ended is received below.
            self._is_on = False
            sys.settrace(trace)
            signal.signal(self._signal, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # As the trace function begins, Python looks for signals too: it sends this one again.
        self._is_early = frame is not None and frame.f_code is self._trace.__code__
        if self._is_on and not self._is_early:
            raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._is_early:
            self._is_early = False
            _ = self._signal.sent
            return self._trace
        code, back = frame.f_code, frame.f_back
        if self.remaining == 0 or back is None or code.co_filename == __file__:
            return None
        is_place = False
        if event == "opcode":
            at = frame.f_lasti
            is_place = code.co_code[at] in LOOKING or (id(code), at) in self._entering
        elif event == "call":
            if not code.co_filename.endswith(self._files):
                return None
            # Python 3.13 asks for instructions only where a trace function is already set.
            frame.f_trace = self._trace
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._entering.add((id(back.f_code), instruction(back)))
        elif event == "return":
            # What a function written in C has begun ends inside a call.
            is_place = (
                code.co_flags & inspect.CO_GENERATOR != 0 or code.co_name == "__init__"
            ) and back.f_code.co_code[instruction(back)] in CALLS
        if is_place:
            self.remaining -= 1
            if self.remaining == 0:
                _ = self._signal.sent
        return self._trace


def instruction(frame: FrameType) -> int:
    """Return where the instruction begins that a frame is at: not at one of its caches."""
    at = frame.f_lasti
    while at > 0 and frame.f_code.co_code[at] == dis.opmap["CACHE"]:
        at -= 2
    return at


def interrupted_everywhere(
    call: Callable[[int], object], files: tuple[str, ...] = ("",)
) -> Iterator[int]:
    """Call again and again, interrupted one place later each time; yield the number after each.

    The first call, number 0, and the last are not interrupted: the first one finds where functions
    begin though nothing is called.
    """
    for nth in itertools.count():
        interrupt = Interrupt(nth or -1, files)
        interrupt.strike(partial(call, nth))
        yield nth
        if nth > 0 and interrupt.remaining > 0:
            return
