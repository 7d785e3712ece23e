"""Flows and streams: code that runs user functions or waits between transactions.

A flow is a generator one level above operations, written once for sync and async. It yields steps
and receives their results; a stream also gives values, and is read as an iterator. Errors,
cancellation included, are thrown in at the step that raised them, so that a flow can record what
it must and re-raise. Never `yield` inside `finally`: a closed generator cannot run a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from dataclasses import field
from types import GeneratorType, MethodType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from ..arguments import shown
from ..dataclass import dataclass
from ..errors import InvalidArgument
from .driver import AsyncDriver, SyncDriver
from .operation import Async, Call, Handle, Mode, Runtime, Sync, operation
from .threads import Latch, Thread

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

INTERRUPTS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""What ends a caller from outside."""
INTERRUPTS_MAX = 10


@dataclass(slots=True)
class Perform:
    """Run one operation or query; with `to_the_end`, despite interrupts of its caller."""

    call: Call[Any]
    to_the_end: bool = False


class Ended(Future[R]):
    """The result of a thread; `latch` is the interrupt-safe way to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.latch = Latch()


@dataclass(slots=True)
class Invoke:
    """Call a user function or coroutine function, optionally with a timeout."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    timeout_seconds: float | None = None
    ended: Ended[Any] | None = field(default=None, init=False)
    """Resolves when the function returns, if it runs in a thread."""
    _token: list[None] = field(default_factory=lambda: [None], init=False)
    _is_withdrawn: bool = field(default=False, init=False)

    def call(self) -> Any:
        """Call the function, unless the call was withdrawn."""
        try:
            # Python handles no signal between this line and the call.
            del self._token[0]
        except IndexError:
            name = _name(self.function)
            raise InvalidArgument(f"{name} was withdrawn before it was called") from None
        return self.function(*self.arguments, **self.keywords)

    def withdraw(self) -> bool:
        """Prevent the call; return False if the function was called already."""
        try:
            del self._token[0]
            self._is_withdrawn = True
        except IndexError:
            pass  # Already called, or withdrawn.
        return self._is_withdrawn


@dataclass(slots=True)
class Wait:
    """Wait until a topic is rung after `seen`, or until the timeout."""

    seconds: float
    topic: str | None = None
    seen: int = 0


@dataclass(slots=True)
class Give(Generic[R]):
    """Yield a value to the reader of a stream."""

    value: R


Step: TypeAlias = Perform | Invoke | Wait
Flow: TypeAlias = Generator[Step, Any, R]
Stream: TypeAlias = Generator[Step | Give[R], Any, None]


class StillRunning(TimeoutError):
    """A function timed out and cannot be interrupted; `ended` resolves when it returns."""

    def __init__(self, message: str, ended: Ended[Any]) -> None:
        super().__init__(message)
        self.ended = ended


class CancelledAfterwards(asyncio.CancelledError):
    """The caller was cancelled while a thread ran a function; `ended` resolves when it returns."""

    def __init__(self, ended: Future[Any]) -> None:
        super().__init__()
        self.ended = ended


def perform(op: operation[P, R], instance: object, /, *args: P.args, **kwargs: P.kwargs) -> Flow[R]:
    """Run an operation in its own transaction and return its result."""
    result: R = yield Perform(Call(op, instance, args, kwargs))
    return result


def perform_to_the_end(
    op: operation[P, R], instance: object, /, *args: P.args, **kwargs: P.kwargs
) -> Flow[R]:
    """Run an operation even if its caller is interrupted again; the interrupt is raised afterwards.

    It may be run more than once.
    """
    result: R = yield Perform(Call(op, instance, args, kwargs), to_the_end=True)
    return result


def invoke(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Flow[Any]:
    """Call user code and return its result; an async store accepts sync and async functions."""
    return (yield Invoke(function, args, kwargs))


def wait(seconds: float, topic: str | None = None, seen: int = 0) -> Flow[bool]:
    """Wait, and return whether the topic was rung."""
    was_rung: bool = yield Wait(seconds, topic, seen)
    return was_rung


def let_others_write(runtime: Runtime) -> Flow[None]:
    """Wait between two transactions of maintenance while others write.

    Otherwise a call of theirs that takes two transactions would wait for both.
    """
    driver = runtime.driver
    if driver.keeps_others_waiting and (seconds := driver.rest_seconds()) > 0:
        yield Wait(seconds)


class flow(Generic[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A method written as a generator of steps; the handle's colour decides how it runs."""

    def __init__(self, function: Callable[Concatenate[Any, P], Flow[R_co]]) -> None:
        self.function: Callable[..., Flow[R_co]] = function
        functools.update_wrapper(cast("Any", self), function)

        @functools.wraps(function)
        def start(handle: Handle[Any], *args: Any, **kwargs: Any) -> Any:
            return handle.runtime.run_flow(function(handle, *args, **kwargs))

        self._start = start

    def __call__(self, instance: object, /, *args: P.args, **kwargs: P.kwargs) -> Flow[R_co]:
        """Return the bare generator, for `yield from` inside another flow."""
        return self.function(instance, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> flow[P, R_co]: ...
    @overload
    def __get__(self, instance: Handle[Sync], owner: type) -> Callable[P, R_co]: ...
    @overload
    def __get__(self, instance: Handle[Async], owner: type) -> Callable[P, Awaitable[R_co]]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Bind to a handle."""
        return self if instance is None else MethodType(self._start, instance)


class served(flow[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A flow of transactions alone, which a remote store has run by its server.

    It may be run twice there, if an answer is lost. Nobody is told of its progress.
    """

    mode: ClassVar[Mode] = "read"
    __qualname__: str

    def __init__(self, function: Callable[Concatenate[Any, P], Flow[R_co]]) -> None:
        super().__init__(function)
        self.__qualname__ = function.__qualname__
        here = self._start

        @functools.wraps(function)
        def start(handle: Handle[Any], *args: Any, **kwargs: Any) -> Any:
            runtime = handle.runtime
            if not runtime.is_remote:
                return here(handle, *args, **kwargs)
            return runtime.start(self._call(handle, args, kwargs))

        self._start = start

    def __call__(self, instance: object, /, *args: P.args, **kwargs: P.kwargs) -> Flow[R_co]:
        """Return the generator, for `yield from` inside another flow."""
        if not cast("Handle[Any]", instance).runtime.is_remote:
            return self.function(instance, *args, **kwargs)
        return self._sent(self._call(instance, args, kwargs))

    def _sent(self, call: Call[Any]) -> Flow[R_co]:
        result: R_co = yield Perform(call)
        return result

    def _call(self, handle: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        given = {name: value for name, value in kwargs.items() if name != "progress"}
        return Call(cast("Any", self), handle, args, given)


class stream(Generic[P, R_co]):  # noqa: N801 - it is used as a decorator
    """A method written as a generator of steps and values; a call returns an iterator."""

    def __init__(self, function: Callable[Concatenate[Any, P], Stream[R_co]]) -> None:
        functools.update_wrapper(cast("Any", self), function)

        @functools.wraps(function)
        def start(handle: Handle[Any], *args: Any, **kwargs: Any) -> Any:
            return handle.runtime.run_stream(function(handle, *args, **kwargs))

        self._start = start

    @overload
    def __get__(self, instance: None, owner: type) -> stream[P, R_co]: ...
    @overload
    def __get__(self, instance: Handle[Sync], owner: type) -> Callable[P, Iterator[R_co]]: ...
    @overload
    def __get__(self, instance: Handle[Async], owner: type) -> Callable[P, AsyncIterator[R_co]]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Bind to a handle."""
        return self if instance is None else MethodType(self._start, instance)


def refuse_steps(steps: Any) -> NoReturn:
    """Refuse to run a flow or a stream inside a transaction."""
    raise InvalidArgument(
        f"{steps.__qualname__} runs user code or waits between transactions, "
        "so it cannot run inside one"
    )


def drive(steps: Generator[S, Any, R], perform_step: Callable[[S], Any]) -> R:
    """Run a generator of steps to its end: results are sent in, errors and interrupts thrown in."""
    answer: Any = None
    error: BaseException | None = None
    running = cast("GeneratorType[S, Any, R]", steps)
    while True:
        try:
            if error is not None:
                step = steps.throw(error)
                error = None
                answer = perform_step(step)
            while True:
                answer = perform_step(steps.send(answer))
        except BaseException as raised:
            # An error that refers to itself would keep alive whatever the steps refer to.
            error = None if running.gi_frame is None else raised
            if error is None:
                if isinstance(raised, StopIteration):
                    result: R = raised.value
                    return result
                raise


async def drive_async(
    steps: Generator[S, Any, R], perform_step: Callable[[S], Awaitable[Any]]
) -> R:
    """Run a generator of steps to its end in an event loop; cancellation is thrown in."""
    advance: Callable[[Any], S] = steps.send
    answer: Any = None
    while True:
        try:
            step = advance(answer)
        except StopIteration as stop:
            return cast("R", stop.value)
        try:
            answer = await perform_step(step)
        except BaseException as error:
            advance, answer = steps.throw, error
        else:
            advance = steps.send


def require_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse to run in an event loop other than the one the store was opened in."""
    if asyncio.get_running_loop() is not loop:
        raise InvalidArgument(
            "an AsyncStore can be used only in the event loop in which it was opened"
        )


async def finish(awaitable: Awaitable[R]) -> R:
    """Await to the end even when cancelled, then raise the cancellation."""
    future = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # Retrieved, so that asyncio does not log it.
        raise cancelled
    return future.result()


def run_flow(driver: SyncDriver, steps: Flow[R]) -> R:
    """Run a flow on this thread."""
    return drive(steps, functools.partial(_step, driver))


def run_stream(driver: SyncDriver, steps: Stream[R]) -> Iterator[R]:
    """Run a stream on this thread, one value at a time."""
    with contextlib.closing(steps):
        while (given := run_flow(driver, _next_given(steps))) is not None:
            yield given.value


async def run_stream_async(driver: AsyncDriver, steps: Stream[R]) -> AsyncIterator[R]:
    """Run a stream in the event loop, one value at a time."""
    advance: Callable[[Any], Step | Give[R]] = steps.send
    answer: Any = None
    with contextlib.closing(steps):
        while True:
            try:
                step = advance(answer)
            except StopIteration:
                return
            advance, answer = steps.send, None
            if isinstance(step, Give):
                yield step.value
                continue
            try:
                answer = await _step_async(driver, step)
            except BaseException as error:
                advance, answer = steps.throw, error


def _next_given(steps: Stream[R]) -> Flow[Give[R] | None]:
    """Run a stream to its next value and return it, or None at its end."""
    advance: Callable[[Any], Step | Give[R]] = steps.send
    answer: Any = None
    while True:
        try:
            step = advance(answer)
        except StopIteration:
            return None
        if isinstance(step, Give):
            return step
        try:
            advance, answer = steps.send, (yield step)
        except BaseException as error:
            advance, answer = steps.throw, error


def _step(driver: SyncDriver, step: Step) -> Any:
    if isinstance(step, Perform):
        return _run_to_the_end(driver, step.call) if step.to_the_end else driver.run(step.call)
    if isinstance(step, Invoke):
        return _invoke(step)
    return driver.signals.wait(step.topic, step.seen, step.seconds)


def _run_to_the_end(driver: SyncDriver, call: Call[R], tries: int = INTERRUPTS_MAX) -> R:
    try:
        return driver.run(call)
    except (KeyboardInterrupt, SystemExit):
        if tries > 1:
            _run_to_the_end(driver, call, tries - 1)
        raise


def _invoke(step: Invoke) -> Any:
    if step.timeout_seconds is None:
        context = contextvars.copy_context()
        try:
            result = context.run(step.call)
        except (StopIteration, GeneratorExit) as error:
            raise _not_thrown(step.function, error) from error
    else:
        result = _result_within(step.timeout_seconds, step)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise needs_async_store(step.function)
    return result


def start_async(driver: AsyncDriver, call: Call[R]) -> Awaitable[R]:
    """Return a call to be awaited."""
    return _named(call.name, driver.run(call))


def run_flow_async(driver: AsyncDriver, steps: Flow[R]) -> Awaitable[R]:
    """Run a flow in the event loop; sync functions run in threads and are always awaited."""
    named: Any = steps
    return _named(named.__qualname__, drive_async(steps, functools.partial(_step_async, driver)))


def _named(name: str, running: Coroutine[Any, Any, R]) -> Awaitable[R]:
    """Let Python's warning about a forgotten `await` name the method that was called."""
    named: Any = running
    named.__qualname__ = name
    return running


async def _step_async(driver: AsyncDriver, step: Step) -> Any:
    match step:
        case Perform(call, to_the_end=True):
            # Not a task: a closing event loop would cancel it.
            return await finish(asyncio.wrap_future(in_thread(lambda: driver.twin().run(call))))
        case Perform(call):
            return await driver.run(call)
        case Invoke():
            if is_async(step.function):
                async with asyncio.timeout(step.timeout_seconds):
                    return await _awaited(step, step.call())
            result = await _await_thread(step)
            return await _awaited(step, result) if inspect.isawaitable(result) else result
        case Wait(seconds, topic, seen):
            return await driver.signals.wait_async(topic, seen, seconds)


async def _awaited(step: Invoke, running: Awaitable[R]) -> R:
    try:
        return await running
    except GeneratorExit as error:
        # Of its own, unless it was raised right here: then this coroutine is closed.
        if error.__traceback__ is None or error.__traceback__.tb_next is None:
            raise
        raise _not_thrown(step.function, error) from error


def in_thread(function: Callable[[], R]) -> Ended[R]:
    """Run a function in a thread of its own, in a copy of this context."""
    ended: Ended[R] = Ended()
    _start(function, ended)
    return ended


def _start(function: Callable[[], R], ended: Ended[R]) -> None:
    # A running thread cannot be cancelled.
    ended.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(function)
        except (StopIteration, GeneratorExit) as error:
            stopped = _not_thrown(function, error)
            stopped.__cause__ = error
            ended.set_exception(stopped)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(result)
        finally:
            ended.latch.set()

    Thread(run, "holdfast-call").start()


def _result_within(timeout_seconds: float, step: Invoke) -> Any:
    """Wait for a function in a thread; after an interrupt too, until a second one."""
    ended = step.ended = Ended()
    try:
        _start(step.call, ended)
        has_ended = ended.latch.wait(timeout_seconds)
    except (KeyboardInterrupt, SystemExit):
        if not step.withdraw():
            ended.latch.wait(threading.TIMEOUT_MAX)
        raise
    if not has_ended:
        raise _still_running(step.function, timeout_seconds, ended)
    return ended.result()


async def _await_thread(step: Invoke) -> Any:
    """Wait for a function in a thread, also when cancelled; then raise CancelledAfterwards."""
    ended = step.ended = Ended()
    _start(step.call, ended)
    waiting = asyncio.wrap_future(ended)
    try:
        await asyncio.wait([waiting], timeout=step.timeout_seconds)
    except asyncio.CancelledError as cancelled:
        with contextlib.suppress(BaseException):
            await finish(waiting)
        raise CancelledAfterwards(ended) from cancelled
    if not ended.done():
        waiting.add_done_callback(lambda future: future.cancelled() or future.exception())
        raise _still_running(step.function, step.timeout_seconds or 0, ended)
    return await waiting


def _still_running(
    function: Callable[..., Any], timeout_seconds: float, ended: Ended[Any]
) -> StillRunning:
    return StillRunning(f"{_name(function)} did not return within {timeout_seconds:g} s", ended)


def _not_thrown(function: Callable[..., Any], error: BaseException) -> RuntimeError:
    """Return what stands for an error that would end the steps it is thrown into."""
    return RuntimeError(f"{_name(function)} raised {type(error).__name__}")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling a function or an object returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def require_function(label: str, function: object) -> None:
    """Refuse what cannot be called, and generator functions: a call does not run their body."""
    if not callable(function):
        raise InvalidArgument(f"{label} must be a function, not {shown(function)}")
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise InvalidArgument(
                f"{label} must return its result: {_name(function)} is a generator function "
                "(it has a yield), so a call of it would run nothing"
            )


def require_colour(runtime: Runtime, *functions: Callable[..., Any] | None) -> None:
    """Raise if a sync store is given coroutine functions."""
    for function in functions:
        if function is not None and is_async(function) and not runtime.is_async:
            raise needs_async_store(function)


def needs_async_store(function: Callable[..., Any]) -> InvalidArgument:
    """Return the error for an async function in a sync store."""
    return InvalidArgument(
        f"{_name(function)} is async; use it with an async store (holdfast.aopen)"
    )


def _name(function: Callable[..., Any]) -> str:
    step = getattr(function, "__self__", None)
    function = step.function if isinstance(step, Invoke) else function
    return getattr(function, "__qualname__", repr(function))
