"""Real models through Pydantic AI, a client for many providers (`holdfast-agents[models]`).

It was chosen because it supports every large provider with one typed interface, is maintained,
keeps reasoning with its signatures, knows prices, and has offline models for tests. Only its models
are used, not its agent. The mapping is lossless: data that a block has no field for is stored with
it under `provider`, so the provider gets its own message back unchanged.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from ..arguments import shown
from ..errors import InvalidArgument, described
from ..extras import required
from ..kernel.threads import Thread
from .budget import Price, Usage
from .models import ModelError, Request, Response, count_tokens
from .transcript import Block, Message, ReasoningBlock, TextBlock, ToolCall, ToolResult

with required("a provider's model", "models"):
    from pydantic_ai import exceptions, messages, models
    from pydantic_ai.direct import model_request
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.tools import ToolDefinition
    from pydantic_ai.usage import RequestUsage

PROVIDER = "provider"
OUTPUT_TOKENS_ASSUMED = 4_096
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
UNPAID = Usage(usd=Decimal(0))
Part = dict[str, Any]


class ProviderModel:
    """A provider's model, by its Pydantic AI name ("anthropic:…", "openai:…") or as its object.

    Without `price`, Pydantic AI's price list is used; a model missing there has no price. The
    estimate of a call assumes `max_tokens` of the settings for the answer, or 4,096.
    """

    def __init__(
        self,
        model: models.Model | str,
        *,
        settings: Mapping[str, Any] | None = None,
        price: Price | None = None,
    ) -> None:
        try:
            self._model = models.infer_model(model)
        except (exceptions.UserError, ValueError, ImportError) as error:
            raise InvalidArgument(f"{shown(model)} cannot be used: {error}") from error
        self._settings = dict(settings or {})
        self._price = price
        self.name = self._model.model_name

    def __call__(self, request: Request) -> Response:
        """Call the model from a sync store."""
        asked = asyncio.run_coroutine_threadsafe(self.acall(request), _loop(os.getpid()))
        try:
            return asked.result()
        except BaseException:
            asked.cancel()
            raise

    async def acall(self, request: Request) -> Response:
        """Call the model from an async store."""
        try:
            answer = await model_request(self._model, to_history(request), **self._asked(request))
        except Exception as error:
            raise failure(error) from error
        response = from_response(answer)
        return replace(response, usage=self._usage(answer), model=response.model or self.name)

    def estimate(self, request: Request) -> Usage:
        """Return an estimate of what a call uses."""
        settings = {**self._settings, **request.settings}
        output_tokens = int(settings.get("max_tokens") or OUTPUT_TOKENS_ASSUMED)
        usage = RequestUsage(input_tokens=count_tokens(request), output_tokens=output_tokens)
        guessed = messages.ModelResponse(
            parts=[], usage=usage, model_name=self.name, provider_name=self._model.system
        )
        return self._usage(guessed)

    def _asked(self, request: Request) -> dict[str, Any]:
        tools = [
            ToolDefinition(
                name=tool.name,
                description=tool.description,
                parameters_json_schema=tool.parameters,
            )
            for tool in request.tools
        ]
        settings = ModelSettings(**{**self._settings, **request.settings})  # type: ignore[typeddict-item]
        return {
            "model_settings": settings,
            "model_request_parameters": models.ModelRequestParameters(function_tools=tools),
        }

    def _usage(self, answer: messages.ModelResponse) -> Usage:
        used = answer.usage
        if self._price is not None:
            return self._price.of(used.input_tokens, used.output_tokens)
        usd = used.cost
        if usd is None:
            try:
                usd = answer.cost().total_price
            except (LookupError, ValueError, AssertionError):
                usd = None
        return Usage(input_tokens=used.input_tokens, output_tokens=used.output_tokens, usd=usd)


@functools.cache
def _loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Return the event loop for calls from sync stores.

    There is one per process, because a client's connections are bound to their loop; a forked child
    gets its own.
    """
    loop = asyncio.new_event_loop()
    Thread(loop.run_forever, "holdfast-models").start()
    return loop


def failure(error: Exception) -> ModelError:
    """Return a client's error as a ModelError: whether to retry, and whether it was charged."""
    text = described(error)
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        is_retryable = status in RETRYABLE_STATUSES or status >= 500
        asked = float(getattr(error, "retry_after", None) or 0.0)
        return ModelError(text, is_retryable=is_retryable, usage=UNPAID, retry_seconds=asked)
    if isinstance(error, exceptions.UserError):
        return ModelError(text, usage=UNPAID)
    # The request may have arrived: whether it was charged is unknown.
    is_lost = isinstance(error, exceptions.ModelAPIError | TimeoutError | OSError)
    return ModelError(text, is_retryable=is_lost)


def from_response(answer: messages.ModelResponse) -> Response:
    """Return a client's response as a Response; data without a field is kept as metadata."""
    (plain,) = messages.ModelMessagesTypeAdapter.dump_python([answer], mode="json")
    blocks = [_block(part) for part in plain.pop("parts")]
    return Response(blocks=blocks, model=answer.model_name, metadata={PROVIDER: plain})


def _block(part: Part) -> Block:
    rest = {name: value for name, value in part.items() if value is not None}
    kind = rest.pop("part_kind")
    if kind == "thinking":
        return ReasoningBlock(text=rest.pop("content"), metadata=rest)
    if kind == "text":
        return TextBlock(text=rest.pop("content"), extra=_beside(rest))
    if kind == "tool-call":
        rest.pop("args", None)
        return ToolCall(
            call_id=rest.pop("tool_call_id"),
            name=rest.pop("tool_name"),
            arguments=part.get("args"),
            extra=_beside(rest),
        )
    raise ModelError(
        f"the model answered with a part of kind {kind!r}; a transcript can only hold text, "
        "reasoning and tool calls"
    )


def _beside(rest: Part) -> dict[str, Any]:
    return {PROVIDER: rest} if rest else {}


def to_history(request: Request) -> list[messages.ModelMessage]:
    """Return a request's messages in the client's form: alternating requests and responses."""
    names = {call.call_id: call.name for message in request.messages for call in message.calls}
    history: list[messages.ModelMessage] = []
    parts: list[messages.ModelRequestPart] = []
    for message in request.messages:
        if message.role != "assistant":
            parts += _request_parts(message, names)
            continue
        if parts:
            history.append(messages.ModelRequest(parts=parts, instructions=request.system))
            parts = []
        history.append(to_response(message))
    if parts or not history:
        history.append(messages.ModelRequest(parts=parts, instructions=request.system))
    return history


def to_response(message: Message) -> messages.ModelResponse:
    """Return an assistant's message as the client's own response."""
    plain: dict[str, Any] = dict(message.metadata.get(PROVIDER) or {})
    plain.setdefault("timestamp", _moment(message.created_at))
    plain.setdefault("kind", "response")
    plain["parts"] = [part for block in message.blocks for part in _response_part(block)]
    (found,) = messages.ModelMessagesTypeAdapter.validate_python([plain])
    assert isinstance(found, messages.ModelResponse)
    return found


def _response_part(block: Block) -> Sequence[Part]:
    if isinstance(block, ReasoningBlock):
        return [{"part_kind": "thinking", "content": block.text, **block.metadata}]
    beside = block.extra.get(PROVIDER) or {}
    if isinstance(block, TextBlock):
        return [{"part_kind": "text", "content": block.text, **beside}]
    if isinstance(block, ToolCall):
        called = {"tool_name": block.name, "args": block.arguments, "tool_call_id": block.call_id}
        return [{"part_kind": "tool-call", **called, **beside}]
    return []


def _request_parts(message: Message, names: dict[str, str]) -> list[messages.ModelRequestPart]:
    found: list[messages.ModelRequestPart] = []
    moment = _moment(message.created_at)
    for block in message.blocks:
        if isinstance(block, ToolResult):
            found.append(
                messages.ToolReturnPart(
                    tool_name=names.get(block.call_id, ""),
                    content=block.content,
                    tool_call_id=block.call_id,
                    timestamp=moment,
                    outcome="failed" if block.is_error else "success",
                )
            )
        elif isinstance(block, TextBlock) and message.role == "system":
            found.append(messages.SystemPromptPart(content=block.text, timestamp=moment))
        elif isinstance(block, TextBlock):
            found.append(messages.UserPromptPart(content=block.text, timestamp=moment))
    return found


def _moment(created_at: int) -> datetime:
    return datetime.fromtimestamp(created_at / 1000, UTC)
