"""A generator function runs nothing when it is called, so it is refused."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import InvalidArgument, Worker
from holdfast.agent import Agent, ScriptedModel
from holdfast.mesh import Service


def streaming(item: Any = None) -> Iterator[int]:
    yield 1


async def streaming_async(item: Any = None) -> AsyncIterator[int]:
    yield 1


class Streaming:
    """An object whose call is a generator function."""

    def __call__(self, item: Any = None) -> Iterator[int]:
        yield 1


GENERATORS: dict[str, Callable[..., Any]] = {
    "sync": streaming,
    "async": streaming_async,
    "partial": functools.partial(streaming, item=1),
    "object": Streaming(),
}


def act() -> None:
    """Do nothing."""


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_function_is_refused_where_a_function_is_given(
    kind: str, tmp_path: Path
) -> None:
    given = GENERATORS[kind]
    with holdfast.open(f"sqlite:///{tmp_path}/a.db") as store:
        session, model = store.session("s"), ScriptedModel(["done"])
        places: dict[str, Callable[[], object]] = {
            "tool stream": lambda: holdfast.tool(name="stream")(given),
            "verify": lambda: holdfast.tool(verify=given)(act),
            "undo": lambda: holdfast.tool(undo=given)(act),
            "dedupe": lambda: holdfast.tool(dedupe=given)(act),
            "the handler of 'mail'": lambda: Worker(store, {"mail": given}),
            "on_request": lambda: Service("a", given),
            "on_resume": lambda: Service("a", print, given),
            "a model": lambda: Agent(session, given, tools=[]),
            "approve": lambda: Agent(session, model, tools=[], approve=given),
            "what update calls": lambda: session.state.update("k", given),
        }
        for label, declare in places.items():
            with pytest.raises(InvalidArgument) as refused:
                declare()
            assert f"{label} must return its result: " in str(refused.value)
            assert "is a generator function (it has a yield)" in str(refused.value)
        if kind != "partial":
            with pytest.raises(InvalidArgument, match="must return its result"):
                store.once("key", given)
        assert store.effects() == []


def test_a_wrapper_that_returns_is_a_function() -> None:
    @holdfast.tool
    @functools.wraps(streaming)
    def first(item: int) -> int:
        return next(streaming(item))

    assert first(1) == 1
