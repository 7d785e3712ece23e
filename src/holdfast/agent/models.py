"""Models: callables from a request to a response, and a scripted one for tests and demos."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..arguments import shown
from ..errors import InvalidArgument
from ..formatting import plural
from .budget import Price, Usage
from .transcript import Block, Message, ReasoningBlock, TextBlock, ToolCall, ToolResult

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """The description of a tool for a model."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The input of a model: the whole conversation so far, and the tools it may call."""

    messages: tuple[Message, ...]
    system: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    session_id: str = ""
    iteration: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The answer of a model; `metadata` is stored with the message unchanged."""

    blocks: Sequence[Block]
    usage: Usage = field(default_factory=Usage)
    model: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


ModelAnswer: TypeAlias = Response | str


@runtime_checkable
class Model(Protocol):
    """Any callable from a request to a response, sync or async.

    Optional attributes: `name`; `estimate(request) -> Usage`, an upper bound that counts against
    the budget before a call, and for attempts with an unknown outcome; `acall`, a coroutine
    function that an async store calls instead.
    """

    def __call__(self, request: Request, /) -> ModelAnswer | Awaitable[ModelAnswer]:
        """Return the answer to a request."""
        ...


class ModelError(Exception):
    """A model call failed.

    If `usage` is None, the cost is unknown and the attempt counts with its estimate.
    `retry_seconds` is how long the provider asks to wait.
    """

    def __init__(
        self,
        message: str,
        *,
        is_retryable: bool = False,
        usage: Usage | None = None,
        retry_seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable
        self.usage = usage
        self.retry_seconds = retry_seconds


def name_of(model: object) -> str:
    """Return the name of a model in the ledger of spend."""
    name = getattr(model, "name", None) or getattr(model, "__name__", None)
    return name if isinstance(name, str) and name.isprintable() else type(model).__name__


def estimate_of(model: object, request: Request) -> Usage:
    """Return a model's own estimate of a request's cost; zero if it has none."""
    estimate = getattr(model, "estimate", None)
    found = estimate(request) if callable(estimate) else Usage()
    if not isinstance(found, Usage):
        raise InvalidArgument(f"{name_of(model)}.estimate must return Usage, not {shown(found)}")
    return found


def response_of(model: object, answer: object) -> Response:
    """Return a model's answer as a response; a text becomes one block."""
    if isinstance(answer, str):
        return Response(blocks=[TextBlock(text=answer)])
    if not isinstance(answer, Response):
        raise InvalidArgument(
            f"model {name_of(model)} returned {type(answer).__name__}; it must return a "
            "holdfast.agent.Response or a text"
        )
    for block in answer.blocks:
        if not isinstance(block, TextBlock | ReasoningBlock | ToolCall):
            raise InvalidArgument(
                f"model {name_of(model)} returned a block of type {type(block).__name__}; it must "
                "return TextBlock, ReasoningBlock or ToolCall"
            )
    return answer


ScriptStep: TypeAlias = Response | str | Block | Sequence[Block]


class ScriptedModel:
    """A model that follows a script, deterministically in every process.

    The next step of a list is chosen by the number of answers in the transcript, so a restarted
    process continues where the last one stopped. A function gets the request and returns a step.
    Tokens are counted from the texts (4 characters each) and priced; the estimate is exact.
    """

    def __init__(
        self,
        script: Sequence[object] | Callable[[Request], ScriptStep],
        *,
        name: str = "scripted",
        price: Price | None = None,
    ) -> None:
        if not callable(script):
            for step in script:
                _blocks(step)
        self._script = script
        self._price = price or Price()
        self.name = name
        self.asked = 0

    def __call__(self, request: Request) -> Response:
        """Return the next step of the script."""
        self.asked += 1
        return self._answer(request)

    def estimate(self, request: Request) -> Usage:
        """Return exactly what the call will use; nothing at the end of the script."""
        try:
            return self._answer(request).usage
        except ModelError:
            return Usage()

    def _answer(self, request: Request) -> Response:
        step = self._step(request)
        blocks = _blocks(step)
        metadata = step.metadata if isinstance(step, Response) else {}
        usage = self._price.of(count_tokens(request), sum(map(_tokens, blocks)))
        return Response(blocks=blocks, usage=usage, model=self.name, metadata=metadata)

    def _step(self, request: Request) -> object:
        if callable(self._script):
            return self._script(request)
        number = sum(message.role == "assistant" for message in request.messages)
        if number >= len(self._script):
            raise ModelError(
                f"the script of {self.name} has ended after {plural(len(self._script), 'step')}",
                usage=Usage(),
            )
        return self._script[number]


def _blocks(step: object) -> list[Block]:
    if isinstance(step, Response):
        return list(step.blocks)
    if isinstance(step, str):
        return [TextBlock(text=step)]
    blocks: list[Block] = []
    for block in step if isinstance(step, list | tuple) else [step]:
        if isinstance(block, TextBlock | ReasoningBlock | ToolCall):
            blocks.append(block)
        else:
            raise InvalidArgument(
                "a step of a script must be a text, a Response, or one or more of TextBlock, "
                f"ReasoningBlock and ToolCall, not {type(block).__name__}"
            )
    return blocks


def call(name: str, call_id: str = "", /, **arguments: Any) -> ToolCall:
    """Return a tool call for a script."""
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def count_tokens(request: Request) -> int:
    """Return the approximate number of tokens in a request, from its texts."""
    texts = len(request.system or "") + sum(
        len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters))
        for tool in request.tools
    )
    blocks = (block for message in request.messages for block in message.blocks)
    return -(-texts // CHARACTERS_PER_TOKEN) + sum(map(_tokens, blocks))


def _tokens(block: Block) -> int:
    if isinstance(block, ToolCall):
        text = block.name + json.dumps(block.arguments, ensure_ascii=False)
    elif isinstance(block, ToolResult):
        text = json.dumps(block.content, ensure_ascii=False)
    else:
        text = block.text
    return -(-len(text) // CHARACTERS_PER_TOKEN)
